"""Room on disk: the arithmetic, the order of deletions, and a guard that deletes, refuses and stops."""

import time
import zipfile
from pathlib import Path

import pytest

from agent.config import AgentConfig, load_config
from agent.disk import GIB, Need, estimate_sizes, find_shortages, reserve_bytes
from agent.disk_guard import DiskGuard
from agent.doctor import read_demand
from agent.errors import StageError
from agent.ledger import Ledger
from agent.machine import Volume
from agent.machine_checks import check_disks, forecast_disks
from agent.pipeline import Pipeline
from agent.run_folder import RunFolder, create_run_folder
from agent.workspace import Workspace
from trials.checkpoints import TRACKER, complete_steps, folder_bytes

SAVE = 40_000
"""Bytes of a checkpoint's one rank."""


def make_checkpoint(path: Path, is_whole: bool = True) -> None:
    (path / "actor").mkdir(parents=True)
    for file in (path / "actor" / "model_world_size_1_rank_0.pt", path / "data.pt"):
        if file.name != "data.pt" or is_whole:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("data", bytes(SAVE // 2))


class Case:
    """A run in the middle of its search on a volume of a chosen size that holds nothing else."""

    def __init__(self, workspace: Path, capacity: int) -> None:
        config: AgentConfig = load_config(None, [f"workspace={workspace}", f"runs={workspace.parent / 'runs'}"])
        self.run = RunFolder(config.runs / "run-1")
        create_run_folder(self.run, config, {"workspace": str(workspace), "total_steps": 16, "rungs": [2, 4, 8]})
        self.pipeline = Pipeline(self.run, config, lambda event: None)
        self.capacity = capacity
        self.stopped = 0
        self.guard = DiskGuard(
            self.run.path, [self.run.path], self.pipeline._plan_deletions, self.pipeline.record, self.stop, self.volume
        )  # fmt: skip
        self.pipeline.__dict__["disk"] = self.guard
        facts = {"initial_entropy": 0.4, "start_up_s": 1.0, "step_s": 0.1, "checkpoint_bytes": SAVE}
        self.pipeline.record("stage_done", stage="baseline", inputs="", **facts)

    def stop(self) -> None:
        self.stopped += 1

    def volume(self, folder: Path) -> Volume:
        return Volume(1, self.capacity, self.capacity - folder_bytes(self.run.path))

    def leave_free(self, size: int) -> None:
        """Others fill the volume but for this."""
        self.capacity = folder_bytes(self.run.path) + size

    def delete_all(self) -> None:
        """Ask for more than there can be."""
        self.leave_free(0)
        with pytest.raises(StageError, match="are needed for much"):
            self.guard.require([Need(self.run.path, "much", 10**9)])

    def trial(self, name: str, outcome: str | None, scores: dict[int, float], unfinished: int | None = None) -> None:
        record = self.pipeline.record
        kind = {"t000": "baseline", "full": "full"}.get(name, "search")
        record("trial_started", trial=name, attempt=1, kind=kind, origin=name, configuration={})
        folder = self.pipeline.checkpoints_of(self.pipeline.state().trials[name])
        for step, objective in scores.items():
            facts = {"accuracy": objective, "entropy": 0.4, "objective": objective}
            record("trial_scored", trial=name, step=step, **facts)
            make_checkpoint(folder / f"global_step_{step}")
        (folder / TRACKER).write_text(str(max(scores)))
        if unfinished:
            make_checkpoint(folder / f"global_step_{unfinished}", is_whole=False)
        if outcome is not None:
            record("trial_ended", trial=name, outcome=outcome, reason="", step=max(scores), seconds=1.0)

    def left(self) -> dict[str, list[int]]:
        """Trial → steps in its folder."""
        trials = self.pipeline.state().trials.values()
        folders = {trial.trial: self.pipeline.checkpoints_of(trial).glob("global_step_*") for trial in trials}
        return {name: sorted(int(path.name[12:]) for path in found) for name, found in folders.items()}

    def deletions(self) -> list[tuple[str, int]]:
        decisions = self.pipeline.state().decisions
        return [(d["chosen"], d["freed_bytes"]) for d in decisions if d["what"] == "emergency deletion"]


@pytest.fixture
def case(workspace: Path) -> Case:
    """One failed trial, two that lost, a leader, one that runs and has begun a save."""
    case = Case(workspace, 10**9)
    case.trial("t000", "completed", {2: 0.2, 4: 0.2, 8: 0.3})
    case.trial("t001", "failed", {2: 0.9, 4: 0.9})
    case.trial("t002", "stopped", {2: 0.1})
    case.trial("t003", "completed", {2: 0.1, 4: 0.6, 8: 0.5})
    case.trial("t004", None, {2: 0.1, 4: 0.3, 6: 0.2}, unfinished=8)
    return case


ORDER = [
    ("t001", [2, 4]),  # failed
    ("t002", [2]), ("t000", [2, 4, 8]),  # lost, the worst first
    ("t003", [2, 8]),  # the leader's others
    ("t004", [2]),  # what a running training cannot be chosen for any more
]  # fmt: skip


def test_losers_go_in_a_stated_order_and_what_may_win_stays(case: Case) -> None:
    case.delete_all()
    assert not case.guard.has_room()
    names = [f"{name}'s" for name, steps in ORDER for _ in steps]
    steps = [step for _, steps in ORDER for step in steps]
    told = case.deletions()
    assert [what.rpartition(" ")[2] for what, _ in told] == [str(step) for step in steps]
    assert all(name in what for name, (what, _) in zip(names, told, strict=True))
    assert all(SAVE < freed < 2 * SAVE for _, freed in told)
    assert case.left() == {"t000": [], "t001": [], "t002": [], "t003": [4], "t004": [4, 6, 8]}
    trial, choice = case.pipeline.best_checkpoint()
    assert (trial.trial, choice.step) == ("t003", 4)


def test_no_more_is_deleted_than_is_needed(case: Case) -> None:
    needs = [Need(case.run.path, "2 checkpoints", 2 * SAVE)]
    case.leave_free(2 * SAVE)  # but not the reserve
    case.guard.require(needs)
    assert [what for what, _ in case.deletions()] == ["failed t001's checkpoint of step 2"]
    case.guard.require(needs)
    assert len(case.deletions()) == 1 and case.stopped == 0
    reason = str(case.pipeline.state().decisions[0]["reason"])
    assert reason.startswith("39 KiB freed: the volume of ") and "are needed for 2 checkpoints (78 KiB)" in reason


def test_a_running_trial_that_leads_makes_no_loser_of_the_best_ended_one(workspace: Path) -> None:
    case = Case(workspace, 10**9)
    case.trial("t000", "completed", {2: 0.2, 4: 0.1, 8: 0.2})
    case.trial("t001", None, {2: 0.3, 4: 0.9, 8: 0.4})
    case.delete_all()
    assert case.left() == {"t000": [8], "t001": [4, 8]}


def test_what_does_not_fit_is_refused_with_what_a_person_could_delete(case: Case) -> None:
    (case.run.path.parent / "run-0").mkdir()
    (case.run.path.parent / "run-0" / "model").write_bytes(bytes(3 * 2**20))
    case.leave_free(SAVE)
    with pytest.raises(StageError) as refused:
        case.guard.require([Need(case.run.path, "the merged model", GIB)])
    text = str(refused.value)
    assert f"the volume of {case.run.path} has " in text and "needed for the merged model (1.0 GiB)" in text
    assert f"e.g. {case.run.path.parent / 'run-0'} (3 MiB), then resume" in text and "\n" not in text
    case.guard.require([Need(case.run.path, "answers as long as allowed", GIB, is_ceiling=True)])  # only a ceiling


def test_the_guard_stops_a_run_before_its_disk_is_full(case: Case) -> None:
    with case.guard.watching():
        time.sleep(1.2)
        assert case.guard.problem is None and case.deletions() == []
        case.leave_free(-10 * SAVE)
        time.sleep(1.3)
    assert case.stopped == 1 and case.left()["t003"] == [4]
    assert str(case.guard.problem).startswith(f"stopped before a disk is full: the volume of {case.run.path} has ")
    assert str(case.guard.problem).endswith("then resume")


def test_a_deletion_that_cannot_be_recorded_stops_the_run(case: Case) -> None:
    case.guard._record = Ledger(Path("/dev/full")).append
    case.leave_free(0)
    assert not case.guard.has_room() and case.stopped == 1
    assert str(case.guard.problem).startswith("cannot write to /dev/full: No space left on device; what was recorded")


def test_superseded_submissions_lose_their_models_first_and_a_persons_own_stays(case: Case) -> None:
    record, submissions = case.pipeline.record, case.run.submission
    for name, step in (("t000_step_8", 8), ("t003_step_8", 8), ("t003_step_4", 4)):
        for file in ("model/weights", "results/math_results.parquet", "results/math_results_logits.pt"):
            path = submissions / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(1000 + step))
    (submissions / "previous_1").mkdir()
    (submissions / "previous_1" / "math_results.parquet").write_text("a person's own")
    record("published", trial="t003", step=8, paths=[], sha256={})
    record("stage_done", stage="select", inputs="", trial="t003", step=4)
    case.delete_all()
    assert [what for what, _ in case.deletions()][-2:] == [
        "the merged model of superseded t000_step_8",
        "the results of superseded t000_step_8",
    ]
    kept = {str(path.relative_to(submissions)) for path in submissions.glob("*/*")}
    assert kept == {"t003_step_4/model", "t003_step_4/results", "t003_step_8/model", "t003_step_8/results"} | {
        "previous_1/math_results.parquet"
    }


def test_a_full_run_that_can_be_submitted_makes_losers_of_all_trials(case: Case) -> None:
    case.trial("full", None, {4: 0.1, 8: 0.4, 12: 0.3})
    case.delete_all()
    assert case.left() | {"t004": []} == {"t000": [], "t001": [], "t002": [], "t003": [], "t004": [], "full": [8, 12]}
    full = case.pipeline.state().trials["full"]
    assert complete_steps(case.pipeline.checkpoints_of(full)) == [8, 12]


def test_doctor_and_run_reckon_alike(workspace: Path) -> None:
    demand = read_demand(AgentConfig(workspace=workspace), Workspace(workspace), (2, 4, 8))
    assert demand.sizes == estimate_sizes(128, 12, None, 32) and demand.sizes.checkpoint == 12 * 128
    for capacity in (2**20, 8 * GIB, 4000 * GIB):
        for free in (capacity // 200, capacity // 99, capacity // 2):
            volume = Volume(1, capacity, free)
            (result,) = check_disks(demand, lambda folder, volume=volume: volume)
            short = find_shortages(forecast_disks(demand), lambda folder, volume=volume: volume)
            assert (result.state == "failed") is any(shortage.is_certain for shortage in short)
            assert (result.state == "ok") is (not short and volume.used_share < 0.99)
    assert [reserve_bytes(Volume(1, size, 0)) for size in (10**6, 10**9, 10**13)] == [10**4, 10**7, GIB // 4]
