"""A run that is going to be hurt: starting its driver, finding its processes, and what must hold for it afterwards.

The trainer is scripted (tests/scripted_workspace.py), everything else is real: driver, Ray, Optuna, guards, ledger, verl's
core_algos.py, merger and inference as processes.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import pyarrow.parquet as pq

from agent.errors import RunFolderError
from agent.ledger import Event, Ledger, RunState, fold
from agent.submission import file_sha256
from scripted_workspace import agent_environment, build_scripted_workspace
from trials.guard import ATTEMPT_TAG, RUN_TAG
from trials.runner import short_scratch, trial_scratch

ROOT = Path(__file__).parents[2]
SPACE = """
schema: 1
constants: {target.unit: h0}
knobs:
  negative_weight: {type: float, low: 0.1, high: 1.0, default: 1.0}
  token_rule: {type: choice, choices: [none, stare], default: none}
  stare.fraction: {type: float, low: 0.02, high: 0.5, default: 0.1, when: {token_rule: [stare]}}
presets:
  damped: {source: "a point of the space", set: {negative_weight: 0.3}}
"""
LAST_STEP = {"baseline": 8, "search": 8, "full": 16}
"""Kind of trial → the step that ends it; train.sh has 16 steps, the last rung is half of them."""
FINISHED = ("completed", "stopped")
TEST_ROWS = 12
ORPHANS_S = 10.0
TIMEOUT_S = 180.0


@dataclass
class Run:
    """One run and the processes that the harness started for it."""

    folder: Path
    """Holds the workspace and `runs/`."""
    name: str
    behaviour: dict[str, object] = field(default_factory=dict)
    """Of its trainers, merger and inference; see tests/scripted_workspace.py."""
    settings: tuple[str, ...] = ()
    driver: "subprocess.Popen[bytes] | None" = None

    @property
    def path(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def output(self) -> str:
        """What all its drivers printed."""
        return (self.folder / f"{self.name}.output").read_text(errors="replace")

    # ---- driver --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new run."""
        flags = [word for setting in self.settings for word in ("--set", setting)]
        self._launch("run", "--name", self.name, *flags)

    def resume(self) -> None:
        self._launch("resume", self.name)

    def _launch(self, *words: str) -> None:
        """In a process group of its own, with Ctrl-C as a terminal has it."""
        with (self.folder / f"{self.name}.output").open("ab") as output:
            self.driver = subprocess.Popen(
                [sys.executable, str(ROOT / "run_agent.py"), *words], cwd=self.folder, stdin=subprocess.DEVNULL,
                env={**agent_environment(**self.behaviour), "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output,
                start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
            )  # fmt: skip

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The driver's exit code; a driver that does not end is killed and is an error."""
        assert self.driver is not None
        try:
            return self.driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            raise AssertionError(f"{self.path}: the driver did not end within {timeout_s:.0f} s") from None

    def finish(self, most_resumes: int = 5) -> int:
        """Wait, and resume after an error, until the run is finished; returns how many resumes it took."""
        resumes = 0
        while self.wait() != 0:
            assert resumes < most_resumes, f"{self.path} cannot be finished: {self.output[-500:]}"
            resumes += 1
            self.resume()
        return resumes

    def abandon(self) -> None:
        """Leave no driver behind."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()

    # ---- facts ---------------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        return Ledger(self.path / "ledger.jsonl").read() if (self.path / "ledger.jsonl").exists() else []

    def state(self) -> RunState:
        return fold(self.events())

    def count(self, kind: str, **facts: object) -> int:
        return sum(
            e["event"] == kind and all(e.get(key) == value for key, value in facts.items()) for e in self.events()
        )

    def scratch(self) -> list[Path]:
        """Every scratch folder that the run may have made."""
        trials = self.state().trials.values()
        attempts = [(trial.trial, attempt) for trial in trials for attempt in range(1, trial.attempts + 1)]
        return [short_scratch(str(self.path)), *(trial_scratch(str(self.path), *attempt) for attempt in attempts)]

    # ---- processes -----------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Living processes of the run: pid → driver, guard, trainer, stage guard, stage, worker, ray or command line."""
        roles = {pid: self._role(pid) for pid in _pids() if pid != os.getpid()}
        return {pid: role for pid, role in roles.items() if role is not None}

    def _role(self, pid: int) -> str | None:
        if self.driver is not None and pid == self.driver.pid:
            return "driver" if self.driver.poll() is None else None
        environ, command = _read(pid, "environ").split(b"\0"), _read(pid, "cmdline")
        is_tagged = f"{RUN_TAG}={self.path}".encode() in environ
        if not is_tagged and not _holds_file(pid, (f"{self.path}/", f"{short_scratch(str(self.path))}/")):
            return None
        if b"trials/guard.py" in command:
            return "guard" if any(name.startswith(ATTEMPT_TAG.encode()) for name in environ) else "stage guard"
        if any(name.startswith(ATTEMPT_TAG.encode()) for name in environ):
            return "trainer"
        if b"Trainable" in command:
            return "worker"
        if b"raylet/raylet" in command or b"gcs/gcs_server" in command:
            return "ray"
        if is_tagged and not any(word in command for word in (b"/ray/", b"ray::")):
            return "stage"
        return command[:200].replace(bytes(1), b" ").strip().decode(errors="replace")

    def wait_for_silence(self, timeout_s: float = ORPHANS_S) -> dict[int, str]:
        """The processes that are left, at the latest after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


def build(folder: Path) -> Path:
    """A folder with a scripted workspace and a small search space of one preset."""
    folder.mkdir(parents=True, exist_ok=True)
    build_scripted_workspace(folder / "workspace")
    (folder / "space.yaml").write_text(SPACE)
    return folder


def settings(folder: Path, trials: int, seed: int = 0) -> tuple[str, ...]:
    """Of a small search whose parameters depend on the seed alone, not on which trial ends first."""
    space = f"search.space={folder / 'space.yaml'}"
    return (space, f"search.trials={trials}", f"seed={seed}", "search.concurrent=2", "search.startup_trials=1000")


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


# ---- what must hold ----------------------------------------------------------------------------------------------------


def faults(run: Run, reference: RunState | None = None) -> Counter[str]:
    """What must not be, counted, once a run is finished; `reference` is an undisturbed run with the same seed."""
    found: Counter[str] = Counter()
    try:
        state = run.state()
    except RunFolderError as error:
        print(f"{run.path}: {error}")
        return Counter({"invalid ledgers": 1})
    found["lost finished trials"] = len(lost(run, state))
    found["repeated finished trials"] = len(repeated(run.events()))
    found["leftover scripts"] = len(list((run.folder / "workspace/task/scripts").glob(f"train_{run.name}_t*.sh")))
    leftovers = [path for path in [*run.scratch(), run.path / "tune"] if path.exists()]
    found["leftover files"] = len([*leftovers, *run.path.glob(".*"), *run.path.glob("**/*.tmp")])
    found["invalid submissions"] = int(not has_valid_submission(run, state))
    if reference is not None:
        found["different trials"] = len(plan_of(state) ^ plan_of(reference))
    return +found


def lost(run: Run, state: RunState) -> list[str]:
    """Trials whose logs show the last step but whose ledger does not say that they finished."""
    return [
        trial.trial
        for trial in state.trials.values()
        if trial.outcome not in FINISHED and max(logged_steps(run, trial.trial), default=0) >= LAST_STEP[trial.kind]
    ]


def logged_steps(run: Run, trial: str) -> list[int]:
    """Every step that the logs of a trial tell of in a whole line."""
    logs = [log.read_text(errors="replace") for log in (run.path / "trials" / trial).glob("attempt_*/log")]
    return [int(step) for text in logs for step in re.findall(r"step:(\d+) - \S+:\S+.*\n", text)]


def repeated(events: list[Event]) -> list[str]:
    """Trials that start or end again after they have finished."""
    finished: set[str] = set()
    found: list[str] = []
    for event in events:
        if event["event"] in ("trial_started", "trial_ended") and event["trial"] in finished:
            found.append(event["trial"])
        if event["event"] == "trial_ended" and event["outcome"] in FINISHED:
            finished.add(event["trial"])
    return found


def plan_of(state: RunState) -> set[tuple[str, str, str]]:
    """Name, origin and parameters of baseline and search trials."""
    trials = [trial for trial in state.trials.values() if trial.kind != "full"]
    return {(trial.trial, trial.origin, str(sorted(trial.parameters.items()))) for trial in trials}


def has_valid_submission(run: Run, state: RunState) -> bool:
    """Whether data/outputs holds what the ledger says was published last, of all test rows."""
    outputs = run.folder / "workspace" / "data" / "outputs"
    if not state.published or state.finished is None:
        return False
    recorded = state.published[-1]["sha256"]
    if any(not (outputs / name).is_file() or file_sha256(outputs / name) != value for name, value in recorded.items()):
        return False
    ids = pq.ParquetFile(outputs / "math_results.parquet").read().column("sample_id").to_pylist()
    return bool(ids == list(range(100, 100 + TEST_ROWS)))


# ---- /proc -------------------------------------------------------------------------------------------------------------


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _holds_file(pid: int, prefixes: tuple[str, ...]) -> bool:
    try:
        return any(_link(f"/proc/{pid}/fd/{name}").startswith(prefixes) for name in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
