"""Seven verl versions × {clean run, crash, stall, NaN, resume}: real runner and guard, each version's own logger, checkpoint
writer and resume rules (see verl_parts.py); only the policy is scripted."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from agent.tensors import read_batches_given
from scripted_workspace import TRAIN_SH, install_trainer
from trials.checkpoints import complete_steps, read_checkpoints, repair_tracker, set_back
from trials.runner import Attempt, Ended, TrialSpec, Validation, read_history
from trials.script import TrainScript
from verl_overlay.install import configuration_identity
from wheels import VERSIONS, wheel_tree

CONFIGURATION = {"clip_high": 0.28}
ROWS = {"a - b": 10, "c": 20}


@dataclass
class Result:
    validations: list[Validation]
    ended: Ended
    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


Trial = Callable[..., Result]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    wheel_tree(value)
    return value


@pytest.fixture
def trial(version: str, tmp_path: Path) -> Trial:
    """Runs an attempt of one trial whose trainer behaves as told."""
    install_trainer(tmp_path, version)
    script = TrainScript(TRAIN_SH)

    def run(
        attempt: int = 1, total: int = 8, save: int = 4, stop_step: int | None = None, **behaviour: object
    ) -> Result:
        folder = tmp_path / "t001"
        every = {"trainer.test_freq": 2, "trainer.save_freq": save, "trainer.total_training_steps": total}
        spec = TrialSpec(
            trial="t001", attempt=attempt, folder=str(folder), cwd=str(folder),
            script_path=str(tmp_path / "task" / "scripts" / "train_t001.sh"),
            script=script.render({**every, "trainer.default_local_dir": str(folder / "checkpoints")}),
            configuration=CONFIGURATION, configuration_id=configuration_identity(CONFIGURATION), stop_step=stop_step,
            total_steps=total, dev_rows=ROWS, run_tag=str(tmp_path), grace_s=0.3, stall_timeout_s=1.5,
            environment={"SCRIPTED": json.dumps({"step_s": 0.02, **behaviour})},
        )  # fmt: skip
        running = Attempt(spec)
        try:
            *validations, ended = running.events()
        finally:
            running.close()
        assert isinstance(ended, Ended)
        return Result([event for event in validations if isinstance(event, Validation)], ended, folder)

    return run


def log_of(result: Result, attempt: int = 1) -> str:
    return (result.folder / f"attempt_{attempt}" / "log").read_text(errors="replace")


def test_clean_run(trial: Trial, version: str) -> None:
    result = trial()
    assert (result.ended.outcome, result.ended.last_step) == ("completed", 8), result.ended.reason + log_of(result)
    assert [validation.step for validation in result.validations] == [0, 2, 4, 6, 8]
    accuracies = [validation.accuracy for validation in result.validations]
    assert accuracies == pytest.approx([0.25, 0.375, 0.5, 0.625, 0.75], abs=6e-4)  # old consoles show three decimals
    assert [validation.entropy for validation in result.validations] == [None, *[0.5] * 4]
    assert complete_steps(result.checkpoints) == [4, 8]
    has_config = (result.checkpoints / "global_step_4" / "actor" / "fsdp_config.json").is_file()
    assert has_config is (version != "0.3.0.post1")
    assert [metrics.step for metrics in read_history(result.folder)] == list(range(9))


def test_interrupted_at_a_rung_with_its_checkpoint(trial: Trial) -> None:
    result = trial(stop_step=4, step_s=0.3)
    assert (result.ended.outcome, result.ended.last_step) == ("completed", 4)
    assert complete_steps(result.checkpoints) == [4]  # verl logs a step after it has saved


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [({"crash_at": 6}, "unknown", "exit code 1 after step 5 of 8: "), ({"die_at": 6}, "killed", "killed by a signal")],
)
def test_crash(trial: Trial, behaviour: dict[str, object], kind: str, words: str) -> None:
    result = trial(**behaviour)
    assert (result.ended.outcome, result.ended.failure, result.ended.last_step) == ("failed", kind, 5)
    assert words in result.ended.reason
    assert ("torch.distributed.DistBackendError: scripted crash" in result.ended.reason) is (kind == "unknown")
    assert complete_steps(result.checkpoints) == [4] and [v.step for v in result.validations] == [0, 2, 4]


def test_stall_of_a_trainer_that_ignores_term_and_leaves_children(trial: Trial) -> None:
    result = trial(hang_at=6, ignore_term=True, leave_children=True)
    assert (result.ended.outcome, result.ended.failure, result.ended.last_step) == ("failed", "stall", 5)
    assert re.match(r"no step line for \d+ s after step 5; the limit is \d+ s", result.ended.reason)
    children = [int(pid) for pid in (result.folder / "children.txt").read_text().split()]
    assert len(children) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_nan_among_garbage(trial: Trial) -> None:
    result = trial(total=60, nan_from=5, garbage=True, step_s=0.2)
    assert (result.ended.outcome, result.ended.failure, result.ended.last_step) == ("failed", "non_finite", 7)
    assert result.ended.reason == "loss, gradient or entropy not finite for 3 steps up to 7"
    assert [metrics.step for metrics in read_history(result.folder)] == list(range(8))  # nothing of the garbage
    assert complete_steps(result.checkpoints)[0] == 4  # the last healthy one


def test_resume_after_a_kill_within_a_save(trial: Trial) -> None:
    first = trial(total=12, cut_save_at=8)
    assert (first.ended.failure, first.ended.last_step) == ("killed", 7)
    assert [checkpoint.problem for checkpoint in read_checkpoints(first.checkpoints)] == [
        None, "newer than the tracker (4): the save did not finish",
    ]  # fmt: skip
    assert repair_tracker(first.checkpoints) == 4
    second = trial(attempt=2, total=12)
    assert (second.ended.outcome, second.ended.last_step) == ("completed", 12), log_of(second, 2)
    assert second.validations[0].step == 4 and second.validations[0].accuracy == pytest.approx(
        0.25 + 0.5 * 4 / 12, abs=6e-4
    )
    assert complete_steps(second.checkpoints) == [4, 8, 12]
    history = read_history(second.folder)
    assert [metrics.step for metrics in history] == list(range(13))
    assert all(metrics.entropy == 0.5 for metrics in history[1:])  # step 4, validated again, keeps its entropy


def test_resume_at_the_end_of_an_epoch(trial: Trial, version: str) -> None:
    """Three epochs of four steps, killed right after the second: 0.7.1 then makes no step and reports success."""
    epochs = {"steps_per_epoch": 4, "total_epochs": 3}
    first = trial(total=12, save=2, die_at=9, **epochs)
    assert first.ended.failure == "killed" and repair_tracker(first.checkpoints) == 8
    last = trial(attempt=2, total=12, save=2, **epochs)
    if version == "0.7.1":
        assert (last.ended.outcome, last.ended.failure) == ("failed", "no_progress")
        assert "went on from step 8 of 12, made no step and reported success" in last.ended.reason
        assert set_back(last.checkpoints, before=8) == 6
        last = trial(attempt=3, total=12, save=2, **epochs)
    assert (last.ended.outcome, last.ended.last_step) == ("completed", 12), last.ended.reason
    assert complete_steps(last.checkpoints) == [2, 4, 6, 8, 10, 12]


def test_the_stand_in_for_the_data_loader_resumes_like_the_real_one() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    from verl_parts import Loader

    for given in (2, 4):
        real, stand_in = stateful(list(range(4)), batch_size=None), Loader(4)
        for loader in (real, stand_in):
            iterator = iter(loader)
            for _ in range(given):
                next(iterator)
            state = loader.state_dict()
            again = type(loader)(list(range(4)), batch_size=None) if loader is real else Loader(4)
            again.load_state_dict(state)
            assert [list(again), list(again)] == [list(range(given, 4)), list(range(4))], (type(loader), given)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_place_in_the_data_is_read_from_what_the_real_loader_saves(tmp_path: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = stateful(list(range(24)), batch_size=4, num_workers=workers, shuffle=True)
    iterator = iter(loader)
    for given in range(1, 4):
        next(iterator)
        torch.save(loader.state_dict(), tmp_path / "data.pt")
        assert read_batches_given(tmp_path / "data.pt") == given
    again = stateful(list(range(24)), batch_size=4, num_workers=workers, shuffle=True)
    again.load_state_dict(torch.load(tmp_path / "data.pt"))
    assert len(list(again)) == 3
    torch.save({"batches": 3}, tmp_path / "data.pt")
    assert read_batches_given(tmp_path / "data.pt") is None
    (tmp_path / "data.pt").write_bytes(b"PK")
    assert read_batches_given(tmp_path / "data.pt") is None and read_batches_given(tmp_path / "no.pt") is None
