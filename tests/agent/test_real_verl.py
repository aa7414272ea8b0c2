"""A real two-step verl training through guard, parser and ledger, and its real checkpoint merged, run and validated."""

import functools
import json
import math
import time
from pathlib import Path

import pytest

from agent.doctor import check_workspace
from agent.ledger import Ledger, fold
from agent.merging import merge_checkpoint
from agent.model_check import check_merged_model
from agent.objective import EntropyBand, score_validation
from agent.submission import publish, run_inference, run_logged, validate_submission
from agent.tensors import read_batches_given
from agent.workspace import Workspace, changed_files, forbidden_changes, read_manifest
from trials.checkpoints import complete_steps
from trials.embedded.build import build_workspace
from trials.guard import RUN_TAG
from trials.runner import Attempt, Ended, TrialSpec, Validation, read_history
from verl_overlay import install

CONFIGURATION = {
    "advantage.baseline": "quantile",
    "token_rule": "stare",
    "control.knob": "stare",
    "target.entropy": 1.5,
    "target.unit": "h0",
    "negative_weight": 0.5,
    "clip_high": 0.28,
}


def test_two_steps_of_verl_become_a_validated_submission(tmp_path: Path) -> None:
    workspace = Workspace(build_workspace(tmp_path / "work space"))
    checks = check_workspace(workspace)
    assert [check for check in checks if check.problem] == []
    before = read_manifest(workspace)
    install.install(workspace.core_algos, {})
    run, trial = tmp_path / "run", tmp_path / "run" / "t001"
    trial.mkdir(parents=True)
    ledger = Ledger(run / "ledger.jsonl")
    ledger.append("trial_started", trial="t001", attempt=1, kind="search", configuration=CONFIGURATION)
    every = {"trainer.test_freq": 1, "trainer.save_freq": 1, "trainer.default_local_dir": str(trial / "checkpoints")}
    attempt = Attempt(
        TrialSpec(
            trial="t001",
            attempt=1,
            folder=str(trial),
            script=workspace.script.render(every),
            script_path=str(workspace.scripts / "train_t001.sh"),
            cwd=str(trial),
            configuration=CONFIGURATION,
            configuration_id=install.configuration_identity(CONFIGURATION),
            needs_advantage=install.acts_on_advantage(CONFIGURATION),
            stop_step=2,
            total_steps=workspace.total_steps,
            dev_rows=workspace.dev_rows(),
            run_tag=str(run),
            startup_timeout_s=300,
        )
    )
    validations, ended = [], None
    for event in attempt.events():
        if isinstance(event, Ended):
            ended = event
        else:
            validations.append(event)
            facts = score_validation(event, initial_entropy=0.3, total_steps=workspace.total_steps, band=EntropyBand())
            ledger.append("trial_scored", trial="t001", **facts)
    assert ended is not None and ended.outcome == "completed" and ended.last_step == 2, (
        trial / "attempt_1/log"
    ).read_text()
    ledger.append("trial_ended", trial="t001", outcome=ended.outcome, seconds=ended.seconds)

    assert_metrics(trial, validations, workspace)
    state = fold(ledger.read()).trials["t001"]
    assert [score.step for score in state.scores] == [0, 1, 2] and state.scores[2].objective > 0
    assert complete_steps(trial / "checkpoints") == [1, 2]
    assert (
        read_batches_given(trial / "checkpoints" / "global_step_2" / "data.pt") == 2 < (workspace.steps_per_epoch or 0)
    )
    assert_nothing_left(run, workspace)

    model, results = run / "model", run / "results"
    actor = trial / "checkpoints" / "global_step_2" / "actor"
    run_command = functools.partial(run_logged, run_tag=str(run))
    merge_checkpoint(workspace.verl, workspace.base_model, actor, model, log=run / "merge.log", run=run_command)
    began = time.monotonic()
    check = check_merged_model(workspace, model, state.scores[2].accuracy, state.scores[2].entropy, run_command)
    assert check["problem"] is None and "agree within" in check["note"] and time.monotonic() - began < 60
    run_inference(workspace, model, results, log=run / "inference.log", timeout_s=120, run=run_command)
    submission = validate_submission(results, workspace.test_file, model)
    assert submission.samples > 0 and 0 < submission.mean_entropy < math.log(128)
    assert submission.accuracy is not None and 0 <= submission.accuracy <= 1
    publish(submission, workspace.outputs, run / "previous")

    changed = changed_files(before, read_manifest(workspace))
    assert forbidden_changes(workspace, changed, []) == []
    assert "task/repositories/verl/verl/trainer/ppo/core_algos.py" in changed
    install.revert(workspace.core_algos)
    assert "task/repositories/verl/verl/trainer/ppo/core_algos.py" not in changed_files(
        before, read_manifest(workspace)
    )


def assert_metrics(trial: Path, validations: list[Validation], workspace: Workspace) -> None:
    history = read_history(trial)
    assert [metrics.step for metrics in history] == [0, 1, 2]
    assert set(history[0].dev_accuracies()) == set(workspace.dev_rows()) and len(workspace.dev_rows()) == 2
    for metrics in history[1:]:
        assert metrics.entropy is not None and 0 < metrics.entropy < math.log(128)
        assert metrics.values["actor/overlay/calls"] > 0
        assert metrics.values["actor/overlay/negative_weight"] == 0.5
        # the trainer's process published the exact mean entropy, and the controller's target refers to the first one
        assert metrics.values["actor/overlay/entropy_exact"] == 1.0
        assert metrics.values["actor/overlay/entropy_estimate"] == pytest.approx(metrics.entropy, rel=1e-5)
        target = metrics.values["actor/overlay/target_entropy"]
        assert target == pytest.approx(1.5 * history[1].entropy, rel=1e-5)  # type: ignore[operator]
    assert history[1].values["actor/overlay/stare_amplify"] == pytest.approx(1.1)
    assert history[2].values["actor/overlay/stare_amplify"] == pytest.approx(1.11)
    records = [json.loads(line) for line in (trial / "overlay" / "overlay.jsonl").read_text().splitlines()]
    # a third step may have begun before the training was interrupted
    assert [record["kind"] for record in records].count("advantage") in (2, 3)
    assert {record["source"] for record in records if record["kind"] == "control"} == {"exact"}
    assert [validation.step for validation in validations] == [0, 1, 2]
    assert all(validation.accuracy is not None for validation in validations)
    record = json.loads((trial / "attempt_1" / "process.json").read_text())
    assert not Path(f"/proc/{record['pid']}").exists()


def assert_nothing_left(run: Path, workspace: Workspace) -> None:
    tag = f"{RUN_TAG}={run}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                assert tag not in (entry / "environ").read_bytes().split(b"\0"), entry
            except OSError:
                continue
    assert not (workspace.scripts / "train_t001.sh").exists()
