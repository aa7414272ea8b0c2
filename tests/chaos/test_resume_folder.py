"""What a resume finds: other people's processes, reused process ids, entries of the run's folder that are gone."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from arena import FINISHED, Run, build, faults, settings, wait_until
from trials.guard import RUN_TAG


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose driver was killed in its search, after one trial had ended and while another was training."""
    folder = build(tmp_path_factory.mktemp("killed"))
    run = Run(folder, "run-1", {"step_s": 0.2}, (*settings(folder, 2), "search.concurrent=1"))
    run.start()
    wait_until(lambda: run.count("trial_ended") >= 2 and run.count("trial_scored", trial="t002") >= 1, 120)
    assert run.driver is not None
    run.driver.kill()
    run.wait()
    return run


@pytest.fixture
def bystanders(killed: Run) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """Processes that must be left alone, by what is misleading about them."""
    ours = {**os.environ, RUN_TAG: f"{killed.path}-2"}
    script = killed.folder / "train_run-1_t001.sh"
    script.write_text("sleep 600; true\n")
    python = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = {
        "another run's": subprocess.Popen(["sleep", "600"], env=ours),
        "reads the ledger": subprocess.Popen(["tail", "-f", str(killed.path / "ledger.jsonl")]),
        "has the run's path in its words": subprocess.Popen([*python, str(killed.path)], cwd=killed.path),
        "has a trainer's name": subprocess.Popen(["bash", str(script)]),
        "has the name of a Ray worker": subprocess.Popen(["ray::IDLE", "600"], executable="/usr/bin/sleep"),
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def test_a_resume_without_what_it_needs_is_refused_in_one_line(killed: Run) -> None:
    before = killed.events()
    for name in ("config.yaml", "workspace_before.json", "ledger.jsonl"):
        aside = (killed.path / name).rename(killed.folder / name)
        killed.resume()
        assert killed.wait() == 4
        told = killed.output.strip().splitlines()[-1]
        assert told.startswith("error: ") and name in told
        aside.rename(killed.path / name)
        assert killed.events()[: len(before)] == before


def test_a_resume_does_without_the_rest_and_leaves_bystanders_alone(
    killed: Run, bystanders: dict[str, "subprocess.Popen[bytes]"]
) -> None:
    before = killed.events()
    reused = json.dumps({"guard_pid": bystanders["another run's"].pid, "pid": os.getpid(), "started_s": 0})
    for record in killed.path.glob("trials/*/attempt_*/process.json"):
        record.write_text(reused)
    gone = ["t000", "t001/metrics.jsonl", "t001/attempt_1/spec.json", "t002/checkpoints", "t002/attempt_1/log"]
    remove(killed.path / "trials" / name for name in gone)
    remove(killed.path / name for name in ("submission", "tune", "original", "lock", "optuna.db"))
    killed.resume()
    assert killed.finish(most_resumes=0) == 0 and "Traceback" not in killed.output
    assert killed.events()[: len(before)] == before and not faults(killed)
    assert all(trial.outcome in FINISHED for trial in killed.state().trials.values())
    assert [words for words, process in bystanders.items() if process.poll() is not None] == []


def test_a_submission_that_is_gone_is_made_again(killed: Run) -> None:
    remove([killed.path / "submission", *(killed.folder / "workspace/data/outputs").iterdir()])
    killed.resume()
    assert killed.finish(most_resumes=0) == 0 and not faults(killed)
    assert killed.count("trial_started", trial="full") == 1
