"""Volumes that are full or read-only in every phase of a run: one line, an exit code, nothing lost, and a resume finishes.

Real volumes (small tmpfs), which only root can mount; the rest of what is tested of disks needs none, see test_disk.py.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agent.ledger import Event, Ledger, RunState, fold
from agent.submission import file_sha256
from scripted_workspace import agent_environment

IS_SLOW = bool(os.environ.get("GRPO_AGENT_SLOW_TESTS"))
ALL_PHASES = ("merge", "inference", "train_run-1_t001", "train_run-1_full")
ROOT = Path(__file__).parents[2]
FILL = 'if [[ "${FILL:-}" == "$(basename "$0" .sh)" ]]; then cat /dev/zero > "$BALLAST" 2> /dev/null || true; fi\n'
FILL_PY = 'import os\nif os.environ.get("FILL") == "merge":\n    os.system("cat /dev/zero > $BALLAST 2> /dev/null")\n'


def mount(folder: Path, options: str) -> None:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"needs to mount a small volume: {done.stderr.strip()}")


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


class Course:
    """A workspace whose scripts fill the volume of the runs on request."""

    def __init__(self, workspace: Path, size: str) -> None:
        self.workspace, self.folder = workspace, workspace.parent
        self.volume, self.outputs = self.folder / "volume", workspace / "data" / "outputs"
        self.ballast, self.temporary = self.volume / "ballast", self.folder / "temporary"
        self.runs = self.volume / "runs"
        scripts = workspace / "task" / "scripts"
        for name in ("train.sh", "inference.sh"):
            text = (scripts / name).read_text()
            (scripts / name).write_text(text.replace("set -euo pipefail\n", f"set -euo pipefail\n{FILL}"))
        merger = workspace / "task" / "repositories" / "verl" / "scripts" / "model_merger.py"
        merger.write_text(FILL_PY + merger.read_text())
        mount(self.volume, f"size={size}")
        mount(self.outputs, "size=1m")
        mount(self.temporary, "size=4m")

    def start(self, *words: str, fill: str = "", **behaviour: object) -> subprocess.Popen[str]:
        environment = {**agent_environment(**behaviour), "FILL": fill, "BALLAST": str(self.ballast)}
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run_agent.py"), *words], cwd=self.folder, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def agent(self, *words: str, fill: str = "", **behaviour: object) -> subprocess.CompletedProcess[str]:
        return self.wait(self.start(*words, fill=fill, **behaviour))

    def wait(self, process: "subprocess.Popen[str]") -> subprocess.CompletedProcess[str]:
        """Its end; then the ballast is gone."""
        stdout, stderr = process.communicate(timeout=200)
        result = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
        assert "Traceback" not in result.stderr, result.stderr
        if self.ballast.exists():
            self.ballast.unlink()
        return result

    def settings(self, *settings: str) -> list[str]:
        return [word for setting in (*settings, f"runs={self.runs}") for word in ("--set", setting)]

    def resume(self, *words: str, fill: str = "", **behaviour: object) -> subprocess.CompletedProcess[str]:
        return self.agent("resume", "--runs", str(self.runs), *words, fill=fill, **behaviour)

    def events(self) -> list[Event]:
        return Ledger(self.runs / "run-1" / "ledger.jsonl").read()

    def state(self) -> RunState:
        return fold(self.events())

    def require_whole_outputs(self, older: dict[str, str]) -> None:
        """What was there before the run, or what was published last, whole."""
        published, files = self.state().published, {path.name: path for path in self.outputs.iterdir()}
        if published:
            assert {name: file_sha256(path) for name, path in files.items()} == published[-1]["sha256"]
        else:
            assert {name: path.read_text() for name, path in files.items()} == older


@pytest.fixture
def course(workspace: Path) -> Iterator[Course]:
    try:
        yield (course := Course(workspace, "16m"))
    finally:
        for folder in (course.volume, course.outputs, course.temporary):
            subprocess.run(["umount", "-l", str(folder)], check=True)


def assert_one_line(result: subprocess.CompletedProcess[str], codes: tuple[int, ...], *words: str) -> None:
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode in codes and len(errors) == 1, (
        f"{result.returncode}: {result.stdout[-1500:]}{result.stderr}"
    )
    assert any(word in errors[0] for word in words), errors[0]


def test_a_full_volume_in_every_phase_costs_nothing(course: Course) -> None:
    older = {name: f"an older {name}" for name in ("math_results.parquet", "math_results_logits.pt")}
    for name, text in older.items():
        (course.outputs / name).write_text(text)
    signs = ("No space left", "free space", "no space is left")
    started = course.agent(*course.settings("search.trials=2", "search.concurrent=1"), save_bytes=4 * 10**7)
    assert_one_line(started, (4, 5), *signs)
    assert shutil.disk_usage(course.volume).free < 10**6  # half of a checkpoint; the run itself makes room
    for phase in ALL_PHASES if IS_SLOW else ("inference", "train_run-1_full"):
        before = course.state()
        assert_one_line(course.resume(fill=phase), (4, 5), *signs)
        after = course.state()
        finished = {name for name, trial in before.trials.items() if trial.outcome in ("completed", "stopped")}
        assert all(after.trials[name].attempts == before.trials[name].attempts for name in finished)
        course.require_whole_outputs(older)
    assert {"baseline", "search"} <= after.stages.keys() and "full_run" not in after.stages

    (course.temporary / "somebody's").write_bytes(bytes(4 * 2**20 - 8192))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(course.temporary))
        assert_one_line(course.resume(), (5,), f"the volume of {course.temporary} has ")

    filler = course.outputs / "somebody's"
    with filler.open("wb", buffering=0) as file:
        file.write(bytes(2**20))
    assert_one_line(course.resume(), (5,), f"the volume of {course.outputs} has ")
    filler.unlink()
    course.require_whole_outputs(older)
    remount(course.outputs, "ro")
    assert_one_line(course.resume(), (3,), f"{course.outputs} is not writable")
    remount(course.outputs, "rw")
    remount(course.volume, "ro")
    assert_one_line(course.resume(), (3,), f"{course.runs} is not a writable folder")
    assert course.agent("status", "--runs", str(course.runs)).returncode == 0
    remount(course.volume, "rw")

    result = course.resume()
    assert result.returncode == 0, result.stdout + result.stderr
    state, starts = course.state(), Counter(e["trial"] for e in course.events() if e["event"] == "trial_started")
    assert starts["t002"] == 1 and all(trial.outcome == "completed" for trial in state.trials.values())
    assert [event["trial"] for event in state.published] == ["t000", "full"]
    course.require_whole_outputs(older)
    assert pq.ParquetFile(course.outputs / "math_results.parquet").read().num_rows == 12
    previous = course.runs / "run-1" / "submission" / "previous_1"
    assert {path.name: path.read_text() for path in previous.iterdir()} == older


def test_a_run_makes_room_for_itself(course: Course) -> None:
    """8 MiB hold two trainings of four checkpoints of 1 MB each, but the run makes three."""
    remount(course.volume, "size=8m")
    settings = course.settings("search.trials=1", "search.concurrent=2")
    result = course.agent(*settings, step_s=0.5, save_bytes=10**6)
    assert result.returncode == 0, result.stdout + result.stderr
    state = course.state()
    freed = [decision["freed_bytes"] for decision in state.decisions if decision["what"] == "emergency deletion"]
    assert freed and all(10**6 <= size < 1.1e6 for size in freed)
    assert all(trial.outcome == "completed" and trial.attempts == 1 for trial in state.trials.values())
    assert state.stages["baseline"]["checkpoint_bytes"] == pytest.approx(1e6, rel=0.01)
    assert [event["trial"] for event in state.published] == ["t000", "full"]
