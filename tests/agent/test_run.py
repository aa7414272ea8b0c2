"""Whole runs on a scripted workspace: real Ray Tune, Optuna, ledger, guard and overlay; only the trainer is scripted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pyarrow.parquet as pq
import pytest

from agent.ledger import Ledger, RunState, fold
from agent.workspace import Workspace, changed_files, read_manifest
from scripted_workspace import agent_environment
from search_spaces.space import read_space, shipped_space
from trials.guard import RUN_TAG, sweep_holders
from trials.runner import short_scratch
from trials.script import differing_overrides
from verl_overlay import install

ROOT = Path(__file__).parents[2]
RUN_TIMEOUT_S = 300


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "run_agent.py"), *arguments]


def run_agent(cwd: Path, *arguments: str, **behaviour: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=agent_environment(**behaviour),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )


def read_state(folder: Path) -> RunState:
    return fold(Ledger(folder / "ledger.jsonl").read())


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in Ledger(folder / "ledger.jsonl").read() if event["event"] == kind]


def processes_of(run: Path) -> list[int]:
    """Living processes that carry the run's tag."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{RUN_TAG}={run}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def command_line(pid: int) -> bytes:
    """As /proc shows it, empty for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(condition: Callable[[], bool], timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, dict[str, str]]]:
    """One whole run: folder it ran in, its output, the workspace's hashes before."""
    from scripted_workspace import build_scripted_workspace

    folder = tmp_path_factory.mktemp("whole run")  # a space in the path
    workspace = build_scripted_workspace(folder / "workspace")
    before = read_manifest(Workspace(workspace))
    result = run_agent(folder, "--set", "search.trials=9")
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "stdout").write_text(result.stdout)
    yield folder, folder / "runs" / "run-1", before


def test_a_run_ends_with_a_valid_published_submission(finished: tuple[Path, Path, dict[str, str]]) -> None:
    folder, run, _ = finished
    outputs = folder / "workspace" / "data" / "outputs"
    table = pq.ParquetFile(outputs / "math_results.parquet").read()
    assert table.column_names == ["sample_id", "output"] and table.column("sample_id").to_pylist() == list(
        range(100, 112)
    )
    assert (outputs / "math_results_logits.pt").stat().st_size > 0
    assert "valid submission of 12 samples published" in (folder / "stdout").read_text()
    assert (run / "report.html").read_text().startswith("<!doctype html>") or (
        run / "report.html"
    ).stat().st_size > 5000


def test_trials_are_baseline_then_presets_then_optuna(finished: tuple[Path, Path, dict[str, str]]) -> None:
    state = read_state(finished[1])
    assert state.baseline is not None and state.baseline.trial == "t000" and state.baseline.configuration == {}
    origins = [trial.origin for trial in state.search_trials]
    presets = [f"preset:{name}" for name in read_space(shipped_space("overlay")).presets]
    assert len(origins) == 9 and origins[:6] == presets
    assert sorted(Counter(origins)) == sorted({*origins[:6], "optuna"}) and origins.count("optuna") == 3
    assert all(trial.outcome in ("completed", "stopped") for trial in state.search_trials)
    assert state.initial_entropy == pytest.approx(0.4 * 0.5**0.25)


def test_the_best_method_is_promoted_and_every_decision_has_a_reason(
    finished: tuple[Path, Path, dict[str, str]],
) -> None:
    state = read_state(finished[1])
    what = ["checkpoint for the early submission", "budget", "promotion", "checkpoint"]
    assert [decision["what"] for decision in state.decisions] == what
    assert all(len(str(decision["reason"])) > 20 for decision in state.decisions)
    assert state.full_run is not None and state.full_run.outcome == "completed"
    promoted = state.trials[state.decisions[2]["chosen"]]
    assert state.full_run.configuration == promoted.configuration
    at_end = [trial for trial in state.trials.values() if trial.kind != "full" and trial.last and trial.last.step == 8]
    assert promoted.last is not None
    assert promoted.last.objective == max(trial.last.objective for trial in at_end if trial.last)
    best = state.full_run.best
    assert best is not None and state.stages["select"]["step"] == best.step
    assert state.stages["merge"]["check"] == {
        "unchecked": "the model has no tokenizer files"
    }  # a scripted one has none


def test_the_workspace_changed_only_where_it_may(finished: tuple[Path, Path, dict[str, str]]) -> None:
    folder, run, before = finished
    workspace = Workspace(folder / "workspace")
    changed = changed_files(before, read_manifest(workspace))
    assert changed == [
        "data/outputs/math_results.parquet",
        "data/outputs/math_results_logits.pt",
        "task/repositories/verl/verl/trainer/ppo/core_algos.py",
        "task/scripts/train_run-1_full.sh",
    ]
    event = events(run, "run_finished")[0]
    assert event["changed_files"] == changed and event["forbidden_changes"] == []
    full = (workspace.scripts / "train_run-1_full.sh").read_text()
    assert differing_overrides(workspace.train_script.read_text(), full) == {"trainer.test_freq": ("2", "4")}


def test_the_promoted_configuration_is_baked_and_can_be_reverted(finished: tuple[Path, Path, dict[str, str]]) -> None:
    folder, run, before = finished
    workspace = Workspace(folder / "workspace")
    state = read_state(run)
    assert state.full_run is not None
    baked = install.read_configuration(workspace.core_algos)
    assert {key: baked[key] for key in state.full_run.configuration} == state.full_run.configuration
    bytes_now = workspace.core_algos.read_bytes()
    install.revert(workspace.core_algos)
    relative = str(workspace.core_algos.relative_to(workspace.root))
    assert read_manifest(workspace)[relative] == before[relative]
    workspace.core_algos.write_bytes(bytes_now)


def test_nothing_is_left_running_or_lying_about(finished: tuple[Path, Path, dict[str, str]]) -> None:
    _, run, _ = finished
    wait_until(lambda: processes_of(run) == [], 10)
    assert not (run / "tune").exists() and not (run / "stop_requested").exists()
    kept = {path.parents[1].name for path in (run / "trials").glob("*/checkpoints/global_step_*")}
    assert kept == {read_state(run).decisions[2]["chosen"]}
    assert list((run / "trials" / "full").rglob("global_step_16"))


def test_the_study_shows_all_trials(finished: tuple[Path, Path, dict[str, str]]) -> None:
    study = optuna.load_study(storage=f"sqlite:///{finished[1]}/optuna.db", study_name="run-1")
    state = read_state(finished[1])
    names = [name for name, trial in state.trials.items() if trial.kind != "full"]
    assert [trial.user_attrs["trial"] for trial in study.trials] == names and len(names) == 10
    assert {trial.state.name for trial in study.trials} <= {"COMPLETE", "PRUNED"}


def test_status_and_report_work_from_the_folder_alone(finished: tuple[Path, Path, dict[str, str]]) -> None:
    folder, run, _ = finished
    status = run_agent(folder, "status")
    assert status.returncode == 0 and "t003" in status.stdout and "preset:stare" in status.stdout
    (run / "report.html").unlink()
    assert run_agent(folder, "report", "run-1").returncode == 0 and (run / "report.html").exists()


def test_resuming_a_finished_run_repeats_nothing(finished: tuple[Path, Path, dict[str, str]]) -> None:
    folder, run, _ = finished
    before = len(events(run, "trial_started")), len(events(run, "published"))
    result = run_agent(folder, "resume")
    assert result.returncode == 0, result.stderr
    assert (len(events(run, "trial_started")), len(events(run, "published"))) == before


def test_a_lost_publication_is_made_again_and_foreign_scripts_stay(finished: tuple[Path, Path, dict[str, str]]) -> None:
    folder, run, _ = finished
    outputs = folder / "workspace" / "data" / "outputs"
    digest = (outputs / "math_results_logits.pt").read_bytes()
    for path in outputs.iterdir():
        path.unlink()
    foreign = folder / "workspace" / "task" / "scripts" / "train_run-1_test.sh"
    foreign.write_text("a person's own")
    refused = run_agent(folder, "resume")
    assert refused.returncode == 4 and "train_run-1_test.sh changed" in refused.stderr
    assert foreign.read_text() == "a person's own"
    foreign.unlink()
    (folder / "runs" / "run-2").mkdir()
    other = foreign.with_name("train_run-2_full.sh")
    other.write_text("another run's")
    assert run_agent(folder, "resume", "run-1").returncode == 0
    other.unlink()
    assert (outputs / "math_results_logits.pt").read_bytes() == digest and len(events(run, "published")) == 3


def test_a_resume_may_not_change_what_the_run_depends_on(finished: tuple[Path, Path, dict[str, str]]) -> None:
    folder, _, _ = finished
    result = run_agent(folder, "resume", "--set", "seed=7", "--set", "objective.collapsed=0.1")
    assert result.returncode == 4
    late = run_agent(folder, "resume", "--set", "search.trials=20")
    assert late.returncode == 2 and "the full run has begun, so search.trials cannot change" in late.stderr
    assert "seed: 0 → 7" in result.stderr and "objective.collapsed: 0.05 → 0.1" in result.stderr


def start_and_kill(folder: Path, when: Callable[[Path], bool], number: int, **behaviour: object) -> int:
    """Start a run, send a signal to the driver once `when(run folder)` holds; returns its exit code."""
    process = subprocess.Popen(
        command("--set", "search.trials=6"), cwd=folder, env=agent_environment(**behaviour),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    run = folder / "runs" / "run-1"
    wait_until(lambda: (run / "ledger.jsonl").exists() and when(run))
    process.send_signal(number)
    return process.wait(60)


def count(run: Path, kind: str, **facts: object) -> int:
    return sum(all(event.get(key) == value for key, value in facts.items()) for event in events(run, kind))


@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGKILL, lambda run: count(run, "trial_ended") >= 2),
        (signal.SIGKILL, lambda run: count(run, "trial_started", trial="full") == 1),
        (signal.SIGINT, lambda run: count(run, "trial_started") >= 2),
    ],
)
def test_a_killed_run_goes_on_without_repeating_finished_trials(
    workspace: Path, number: int, when: Callable[[Path], bool]
) -> None:
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    exit_code = start_and_kill(folder, when, number, step_s=0.25)
    assert exit_code == (130 if number == signal.SIGINT else -number)
    state = read_state(run)
    done = {name for name, trial in state.trials.items() if trial.outcome is not None}
    result = run_agent(folder, "resume")
    assert result.returncode == 0, result.stdout + result.stderr
    started = Counter(str(event["trial"]) for event in events(run, "trial_started"))
    assert all(started[name] == 1 for name in done)
    after = read_state(run)
    assert sorted(started) == sorted(["t000", *(f"t{number:03d}" for number in range(1, 7)), "full"])
    assert all(trial.outcome in ("completed", "stopped") for trial in after.trials.values())
    assert all(0 <= float(str(event["seconds"])) < 60 for event in events(run, "attempt_lost"))
    told = [str(decision["chosen"]).split()[0] for decision in after.decisions if decision["what"] == "resume"]
    assert sorted(told) == sorted(name for name, trial in after.trials.items() if trial.attempts > 1)
    assert [event["trial"] for event in events(run, "published")] == ["t000", "full"]
    wait_until(lambda: processes_of(run) == [], 10)
    assert sweep_holders(short_scratch(str(run))) == []


def test_a_workspace_that_changed_meanwhile_is_refused(workspace: Path) -> None:
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    start_and_kill(folder, lambda run: count(run, "trial_scored") >= 1, signal.SIGKILL, step_s=0.3)
    script = workspace / "task" / "scripts" / "train.sh"
    original = script.read_text()
    script.write_text(original.replace("total_training_steps=16", "total_training_steps=32"))
    before = len(Ledger(run / "ledger.jsonl").read())
    refused = run_agent(folder, "resume")
    assert refused.returncode == 4 and "task/scripts/train.sh changed" in refused.stderr
    assert {event["event"] for event in Ledger(run / "ledger.jsonl").read()[before:]} <= {
        "attempt_lost",
        "trial_scored",
    }


def test_a_killed_tune_worker_costs_no_trial_and_leaves_nothing(workspace: Path) -> None:
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    process = subprocess.Popen(
        command("--set", "search.trials=4"), cwd=folder, env=agent_environment(step_s=0.3), stdout=subprocess.DEVNULL
    )
    wait_until(lambda: (run / "ledger.jsonl").exists() and count(run, "trial_scored", trial="t001") >= 1)
    workers: list[int] = []

    def is_training() -> bool:  # a worker between two trials would cost none
        workers[:] = [pid for pid in processes_of(run) if b"Trainable.train" in command_line(pid)]
        return bool(workers)

    wait_until(is_training)
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait(RUN_TIMEOUT_S) == 0
    assert {trial.outcome for trial in read_state(run).search_trials} <= {"completed", "stopped"}
    [failed] = events(run, "attempt_failed")
    assert failed["failure"] == "killed" and "worker died" in str(failed["reason"])
    assert count(run, "trial_started", trial=failed["trial"]) == 2 and count(run, "trial_started") == 7
    assert not list((workspace / "task" / "scripts").glob("train_run-1_t*.sh"))
    wait_until(lambda: processes_of(run) == [], 20)


def test_a_killed_gcs_of_ray_costs_no_trial_and_needs_nobody(workspace: Path) -> None:
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    process = subprocess.Popen(
        command("--set", "search.trials=3"), cwd=folder, env=agent_environment(step_s=0.3), stdout=subprocess.DEVNULL
    )
    wait_until(lambda: (run / "ledger.jsonl").exists() and count(run, "trial_scored", trial="t001") >= 1)
    [server] = [pid for pid in processes_of(run) if b"gcs/gcs_server" in command_line(pid)]
    os.kill(server, signal.SIGKILL)
    assert process.wait(RUN_TIMEOUT_S) == 0
    assert count(run, "driver_started", pid=process.pid) == 2
    assert {trial.outcome for trial in read_state(run).trials.values()} <= {"completed", "stopped"}
    assert all(count(run, "trial_ended", trial=name) == 1 for name in ("t000", "t001", "t002", "t003", "full"))
    wait_until(lambda: processes_of(run) == [], 20)


def test_export_from_a_search_without_a_full_run(workspace: Path) -> None:
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    start_and_kill(folder, lambda run: count(run, "trial_ended") >= 3, signal.SIGKILL, step_s=0.2)
    outputs = workspace / "data" / "outputs"
    (outputs / "math_results.parquet").write_text("somebody else's submission")
    result = run_agent(folder, "export", "--count-evaluation")
    assert result.returncode == 0, result.stdout + result.stderr
    early, published = events(run, "published")
    assert early["trial"] == "t000" and published["trial"] not in ("t000", "full")
    assert pq.ParquetFile(outputs / "math_results.parquet").read().num_rows == 12
    kept = run / "submission" / "previous_1" / "math_results.parquet"
    assert kept.read_text() == "somebody else's submission"
    wait_until(lambda: processes_of(run) == [], 10)
    assert result.stdout.splitlines()[-1] == "counted as evaluation 1 of 3"

    again = run_agent(folder, "export", "--count-evaluation")
    assert again.stdout.splitlines()[-1] == "these files are evaluation 1 of 3 already", again.stderr
    ledger = Ledger(run / "ledger.jsonl")
    for number in (2, 3):
        ledger.append("evaluation_counted", sha256={"file": str(number)}, trial="t001", step=8)
    again = run_agent(folder, "export", "--count-evaluation")
    assert again.returncode == 0 and again.stdout.splitlines()[-1] == "these files are evaluation 1 of 3 already"
    rows = [
        json.dumps(row | {"sha256": {}} if row.get("event") == "evaluation_counted" else row) for row in ledger.read()
    ]
    ledger.path.write_text("\n".join(rows) + "\n")
    before = ledger.read()
    refused = run_agent(folder, "export", "--count-evaluation")
    assert refused.returncode == 5 and "all 3 evaluations are used" in refused.stderr and ledger.read() == before


def test_when_time_is_short_the_best_trial_is_submitted_without_a_full_run(workspace: Path) -> None:
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    result = run_agent(folder, "--set", f"budget.training_hours={9 / 3600}", step_s=1.0)
    assert result.returncode == 0, result.stderr
    state = read_state(run)
    assert state.full_run is None and state.search_trials == []
    what = ["checkpoint for the early submission", "budget", "promotion", "full run"]
    assert [decision["what"] for decision in state.decisions] == what
    assert "no search" in state.decisions[1]["chosen"] and "no longer fits" in state.decisions[3]["reason"]
    assert [event["trial"] for event in state.published] == ["t000"]


def test_a_better_early_submission_stays(workspace: Path) -> None:
    """The full run learns nothing: its script has another end than the baseline's."""
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    main = next(workspace.glob("task/repositories/verl/**/main_ppo.py"))
    text = main.read_text()
    assert "accuracy = 0.3" in text
    main.write_text(text.replace("accuracy = 0.3", 'accuracy = (0.3 if os.environ.get("VERL_OVERLAY") else -0.25)'))
    result = run_agent(folder, "--set", "search.trials=1")
    assert result.returncode == 0, result.stderr
    state = read_state(run)
    assert state.full_run is not None and state.full_run.outcome == "completed"
    assert [event["trial"] for event in state.published] == ["t000"]
    last = state.decisions[-1]
    assert last["what"] == "submission" and last["chosen"] == f"t000 step {state.published[0]['step']} stays"
    assert pq.ParquetFile(workspace / "data" / "outputs" / "math_results.parquet").read().num_rows == 12


def test_an_inference_that_fails_is_told_early_and_does_not_stop_the_search(workspace: Path) -> None:
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    inference = workspace / "task" / "scripts" / "inference.py"
    original = inference.read_text()
    inference.write_text("raise SystemExit('no such GPU')\n" + original)
    result = run_agent(folder, "--set", "search.trials=1")
    assert result.returncode == 5 and "no such GPU" in result.stderr, result.stderr
    state = read_state(run)
    told = [(decision["what"], "no such GPU" in str(decision["reason"])) for decision in state.decisions]
    assert ("early submission", True) in told and ("submission", True) in told
    assert state.full_run is not None and state.full_run.outcome == "completed" and not state.published


def test_when_no_full_run_fits_the_baseline_goes_on_from_its_checkpoint(workspace: Path) -> None:
    """33 s of training: 20 for half of the schedule, so that neither a trial nor 40 for all of it fit."""
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    result = run_agent(folder, "--set", f"budget.training_hours={33 / 3600}", step_s=2.5)
    assert result.returncode == 0, result.stderr
    state = read_state(run)
    goes_on = events(run, "trial_started")[-1]
    assert state.full_run is None and list(state.trials) == ["t000"]
    assert (goes_on["trial"], goes_on["attempt"], goes_on["resumed_step"]) == ("t000", 2, 8)
    reached = state.stages["continuation"]["steps"]
    assert reached in (10, 12) and list((run / "trials" / "t000").rglob(f"global_step_{reached}"))
    assert state.training_s < 36


def test_an_invalid_result_is_inferred_again(workspace: Path) -> None:
    """The second inference, that of the full run, writes NaN; the third is right again."""
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    inference = workspace / "task" / "scripts" / "inference.py"
    text = inference.read_text()
    assert "import pandas as pd, torch" in text and "torch.save(" in text
    count_calls = f"calls = Path({str(folder / 'calls')!r}); calls.open('a').write('x')\n"
    spoil = "_save = torch.save\ndef spoiled(logits, path):\n    bad = len(calls.read_text()) == 2\n"
    spoil += "    _save([each * float('nan') for each in logits] if bad else logits, path)\ntorch.save = spoiled\n"
    head, rest = text.split("import pandas as pd, torch\n")
    inference.write_text(head + "import pandas as pd, torch\n" + count_calls + spoil + rest)
    result = run_agent(folder, "--set", "search.trials=1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (folder / "calls").read_text() == "xxx"
    assert [event["trial"] for event in events(run, "published")] == ["t000", "full"]
    assert [event["stage"] for event in events(run, "stage_failed")] == ["validate"]
    assert (run / "submission" / "full_step_16" / "refused" / "math_results_logits.pt").exists()


def test_fewer_trials_end_a_search_with_open_ones(workspace: Path) -> None:
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    exit_code = start_and_kill(folder, lambda run: count(run, "trial_started") >= 3, signal.SIGKILL, step_s=0.25)
    assert exit_code == -signal.SIGKILL
    ledger = Ledger(run / "ledger.jsonl")
    open_trials = [trial.trial for trial in read_state(run).search_trials if trial.outcome is None]
    assert len(open_trials) == 2
    ledger.append("trial_ended", trial=open_trials[0], outcome="stopped", failure=None, reason="by hand", seconds=0.0)
    result = run_agent(folder, "resume", "--set", "search.trials=1", "--set", "budget.inference_minutes=5")
    assert result.returncode == 0, result.stdout + result.stderr
    state = read_state(run)
    assert all(trial.outcome for trial in state.trials.values()) and state.full_run is not None
    [changed] = events(run, "configuration_changed")
    assert changed["changed"] == {"budget.inference_minutes": [10.0, 5.0], "search.trials": [6, 1]}


def test_failing_trials_open_the_circuit_breaker(workspace: Path) -> None:
    """The baseline is whole; every search trial crashes."""
    folder, run = workspace.parent, workspace.parent / "runs" / "run-1"
    script = workspace / "task" / "scripts" / "train.sh"
    crash = 'if [[ "${VERL_OVERLAY:-}" == *token_rule* ]]; then export SCRIPTED=\'{"crash_at": 2}\'; fi\nexec python3'
    script.write_text(script.read_text().replace("exec python3", crash))
    result = run_agent(folder, "--set", "search.trials=8", "--set", "search.concurrent=1")
    assert result.returncode == 5
    assert "3 attempts in a row failed with unknown" in result.stderr and "ValueError: scripted crash" in result.stderr
    assert [event["trial"] for event in events(run, "attempt_failed")] == ["t001", "t002"]
    assert count(run, "trial_ended", outcome="failed", trial="t001") == 1
    assert "; " + str(workspace / "data" / "outputs") + " has the submission of t000" in result.stderr
    failed = events(run, "stage_failed")[0]
    assert failed["stage"] == "search" and "scripted crash" in str(failed["reason"])
    assert "scripted crash" in (run / "report.html").read_text()


def test_two_agents_never_share_a_workspace(workspace: Path) -> None:
    folder = workspace.parent
    first = subprocess.Popen(
        command("--set", "search.trials=6"), cwd=folder, env=agent_environment(step_s=0.3), stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: (folder / "runs" / "run-1" / "ledger.jsonl").exists())
        second = run_agent(folder)
        assert second.returncode == 4 and "is in use by another agent" in second.stderr
        resumed = run_agent(folder, "resume", "run-1")
        assert resumed.returncode == 4 and "is in use by another agent" in resumed.stderr
    finally:
        first.send_signal(signal.SIGINT)
        first.wait(30)
    assert os.listdir(folder / "runs") == ["run-1"]
