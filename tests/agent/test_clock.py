"""Whatever happens, a run ends in time with a submission: simulated runs of 48 hours, on clocks that go wrong."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from agent.budget import Limits
from agent.clock import SystemTime, start_run_clock
from agent.ledger import fold
from simulation import FakeTime, H, Outcome, World, build_long_workspace, simulate
from trials.checkpoints import complete_steps

EARLY_S = 600.0
"""The submission is there so long before the limit."""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder with the workspace, in memory where there is such a filesystem."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    build_long_workspace(root / "workspace")
    yield root
    shutil.rmtree(root)


def run(
    place: Path,
    world: World | None = None,
    *options: str,
    events: Sequence[tuple[float, float | None]] = (),
    down: Sequence[tuple[float, bool]] = (),
) -> Outcome:
    """Simulate a run; `events` as FakeTime.scheduled, `down` as in `simulate`."""
    runs = Path(tempfile.mkdtemp(dir=place))
    settings = ["search.concurrent=1", *options]
    return simulate(place / "workspace", runs, FakeTime(scheduled=[*events]), world or World(), settings, [*down])


def decisions(outcome: Outcome) -> list[tuple[str, str]]:
    return [(str(event["what"]), str(event["chosen"])) for event in outcome.folder.read_state().decisions]


def require_in_time(outcome: Outcome, hours: float = 48.0, training_hours: float = 24.0) -> None:
    """A finished run whose submission came early enough, and whose trainings kept to their limit."""
    assert outcome.error is None and outcome.published
    assert outcome.published[-1] <= hours * H - min(EARLY_S, hours * H / 24)
    state = outcome.folder.read_state()
    assert state.finished is not None and all(trial.outcome is not None for trial in state.trials.values())
    unseen_s = 120 + 400 * len(outcome.resumed)  # what a killed training did after its last step line
    assert outcome.training_s <= training_hours * H + unseen_s
    assert state.training_s == pytest.approx(outcome.training_s, abs=unseen_s)


# ---- the clock ---------------------------------------------------------------------------------------------------------


def opened(**facts: object) -> dict[str, object]:
    return {"event": "run_opened", "time": 1000.0, "elapsed_s": 0.0, "boot_id": "first boot", "boot_s": 50.0, **facts}


def test_within_a_boot_only_the_boot_clock_counts() -> None:
    state = fold([opened(), {"event": "decision", "time": 99999.0, "elapsed_s": 7.0}])
    time = FakeTime(now=80.0, wall_error=-1.8e9)
    clock = start_run_clock(state, time)
    assert clock.elapsed_s() == pytest.approx(30)
    time.wall_error += 3600
    time.wait(5)
    assert clock.elapsed_s() == pytest.approx(35) == start_run_clock(state, time).elapsed_s()


@pytest.mark.parametrize(("wall_s", "elapsed_s"), [(1300.0, 207.0), (1100.0, 7.0), (900.0, 7.0)])
def test_after_a_boot_the_wall_clock_since_the_newest_event_counts_and_never_back(
    wall_s: float, elapsed_s: float
) -> None:
    state = fold([opened(), {"event": "decision", "time": 1100.0, "elapsed_s": 7.0}])
    time = FakeTime(now=80.0, boot_id="second boot", wall_error=wall_s - 80 - 1.8e9)
    assert start_run_clock(state, time).elapsed_s() == pytest.approx(elapsed_s)


def test_a_ledger_without_readings_goes_by_its_wall_clock() -> None:
    state = fold([{"event": "run_opened", "time": 1000.0}, {"event": "decision", "time": 1500.0}])
    assert start_run_clock(state, FakeTime(now=0, wall_error=1700 - 1.8e9)).elapsed_s() == pytest.approx(700)


def test_the_machine_has_these_clocks() -> None:
    time = SystemTime()
    first = time.boot_s()
    assert 0 < first <= time.boot_s() < first + 60 and len(time.boot_id) == 36


def test_the_margin_of_short_limits() -> None:
    assert Limits(48 * H, 24 * H, 600).margin_s == 720 and Limits(1 * H, 24 * H, 600).margin_s == 180


# ---- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Outcome:
    return run(place)


PHASES = ("baseline", "search", "full_run", "merge", "inference", "validate")


def within(outcome: Outcome, phase: str) -> float:
    """A moment in the last two thirds of a stage's newest work, seconds since the beginning."""
    events = outcome.folder.ledger.read()
    end = next(e for e in reversed(events) if e["event"] == "stage_done" and e["stage"] == phase)
    return float(end["elapsed_s"]) - 0.6 * float(end["seconds"])


def test_a_run_of_48_hours(undisturbed: Outcome) -> None:
    require_in_time(undisturbed)
    state = undisturbed.folder.read_state()
    assert state.full_run is not None and state.full_run.outcome == "completed"
    assert state.stages["select"]["trial"] == "full"
    assert undisturbed.published[-1] < 24 * H  # training is scarcer than wall clock here
    budget = [what for name, what in decisions(undisturbed) if name == "budget"]
    assert "2 of 6 trials fit" in budget[0] and budget[1] == "trials that begin now end at step 108"
    ends = {trial.trial: trial.last.step for trial in state.search_trials if trial.last}
    assert ends == {"t001": 216, "t002": 216, "t003": 108, "t004": 54}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("hour", [H, -H])
def test_a_wall_clock_that_steps_changes_nothing(place: Path, undisturbed: Outcome, phase: str, hour: float) -> None:
    outcome = run(place, events=[(within(undisturbed, phase), hour)])
    assert outcome.published == undisturbed.published and decisions(outcome) == decisions(undisturbed)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("reboots", [False, True])
def test_down_time_up_to_the_limit_in_any_phase(place: Path, undisturbed: Outcome, phase: str, reboots: bool) -> None:
    """The agent is killed in a phase, and comes back when only the reserve and ten minutes more are left."""
    at = within(undisturbed, phase)
    back = 48 * H - 720 - 2100 - 600
    outcome = run(place, events=[(at, None)], down=[(back - at, reboots)])
    require_in_time(outcome)


@pytest.mark.parametrize("reboots", [False, True])
def test_down_time_counts(place: Path, reboots: bool) -> None:
    """Killed after 10 hours, back after 30: 18 are left."""
    outcome = run(place, events=[(10 * H, None)], down=[(20 * H, reboots)])
    require_in_time(outcome)
    later = [event for event in outcome.folder.read_state().decisions if event["elapsed_s"] >= 30 * H]
    found = re.search(r"(\d+) s of wall clock remain before (\d+) s .* margin of (\d+) s", later[0]["reason"])
    assert found is not None and sum(map(int, found.groups())) == pytest.approx(18 * H, abs=2)


def test_without_time_for_a_first_checkpoint_the_error_says_so(place: Path) -> None:
    outcome = run(place, World(), "budget.total_hours=1.5")
    assert outcome.published == [] and outcome.error is not None
    assert "time ended in the baseline after step" in outcome.error and "--set budget.total_hours" in outcome.error
    again = run(place, World(), "budget.total_hours=0.5")
    assert (
        again.error is not None and "after step 0, before its first checkpoint at step 54: 0.00 of 0.5 h" in again.error
    )


@pytest.mark.parametrize("reboots", [False, True])
def test_a_baseline_that_died_with_a_checkpoint_is_submitted_when_the_time_is_over(place: Path, reboots: bool) -> None:
    outcome = run(place, events=[(2 * H, None)], down=[(45.6 * H, reboots)])
    assert outcome.error is None and outcome.published[-1] < 48 * H
    state = outcome.folder.read_state()
    assert (state.stages["select"]["trial"], state.stages["select"]["step"]) == ("t000", 108)


def test_the_limit_within_the_baseline_submits_its_last_checkpoint(place: Path) -> None:
    outcome = run(place, World(), "budget.total_hours=3.0")
    require_in_time(outcome, 3.0)
    assert outcome.folder.read_state().stages["select"]["step"] == 108


def test_a_full_run_slower_than_measured_ends_after_its_last_save(place: Path) -> None:
    outcome = run(place, World(full_factor=2.0), "budget.training_hours=20.0")
    require_in_time(outcome, training_hours=20.0)
    full = outcome.folder.read_state().full_run
    assert full is not None and full.outcome == "stopped" and full.out_of_time
    assert full.last is not None and full.last.step % 20 == 0 and "no save after that of step" in full.reason
    assert decisions(outcome).count(("last save", f"full step {full.last.step}")) == 1


def test_trials_slower_than_measured_leave_the_full_run_its_time(place: Path) -> None:
    outcome = run(place, World(trial_factor=3.0))
    require_in_time(outcome)
    state = outcome.folder.read_state()
    assert state.full_run is not None and state.full_run.outcome == "completed"
    assert any(trial.out_of_time for trial in state.search_trials)


def test_when_no_full_run_fits_the_leading_trial_goes_on(place: Path) -> None:
    outcome = run(place, World(step_s=200.0))
    require_in_time(outcome)
    state = outcome.folder.read_state()
    names = [what for what, _ in decisions(outcome)]
    assert state.full_run is None and names.index("full run") < names.index("continuation") < names.index("checkpoint")
    leader = state.trials[next(chosen for what, chosen in decisions(outcome) if what == "promotion")]
    assert leader.attempts == 2 and leader.last is not None and leader.last.step > 216
    assert state.stages["select"]["trial"] == leader.trial


@pytest.mark.parametrize("training_hours", [12.0, 24.0])
def test_an_inference_that_takes_its_limit_and_fails_once_still_leaves_time(place: Path, training_hours: float) -> None:
    """The full run is so slow that it is trained until nothing more fits before the limit."""
    world = World(full_factor=2.0, inference_s=590.0, hung_inferences=1)
    outcome = run(place, world, f"budget.total_hours={training_hours}", f"budget.training_hours={training_hours}")
    require_in_time(outcome, training_hours, training_hours)
    assert outcome.hung == 1 and outcome.published[-1] > (training_hours - 2.5) * H
    assert outcome.folder.read_state().published[0]["trial"] == "t000"


def test_proxies_spend_by_their_gpus(place: Path) -> None:
    outcome = run(place, World(trial_factor=4.0), "search.gpus_per_trial=2", "search.concurrent=4")
    require_in_time(outcome)
    state = outcome.folder.read_state()
    proxies = [trial for trial in state.search_trials if trial.is_proxy]
    raw_s = sum(trial.training_s for trial in state.trials.values())
    assert raw_s - state.training_s == pytest.approx(0.75 * sum(trial.training_s for trial in proxies))
    assert any(trial.kind == "remeasure" and trial.outcome == "completed" for trial in state.trials.values())
    assert state.full_run is not None


worlds = st.builds(
    World,
    step_s=st.sampled_from([60.0, 100.0, 150.0, 200.0]),
    trial_factor=st.sampled_from([0.8, 1.0, 1.5]),
    full_factor=st.sampled_from([0.9, 1.0, 1.3, 2.0]),
    merge_s=st.sampled_from([60.0, 120.0]),
    inference_s=st.sampled_from([300.0, 480.0, 599.0]),
    check_s=st.sampled_from([20.0, 240.0]),
    hung_inferences=st.sampled_from([0, 1]),
    asha_stops=st.sets(st.sampled_from(["t001", "t002", "t003"])).map(tuple),
)
moments = st.floats(60.0, 40 * H)
steps = st.lists(st.tuples(moments, st.sampled_from([H, -H, 5 * H, -5 * H])), max_size=2)
kills = st.lists(st.tuples(moments, st.floats(10.0, 6 * H), st.booleans()), max_size=3)


@settings(max_examples=200, deadline=None, derandomize=True, phases=[Phase.generate])
@given(worlds, st.sampled_from([10.0, 20.0, 48.0]), st.sampled_from([6.0, 12.0, 24.0]), steps, kills)
def test_whatever_happens_there_is_a_submission_in_time(
    place: Path,
    world: World,
    hours: float,
    training_hours: float,
    steps: list[tuple[float, float]],
    kills: list[tuple[float, float, bool]],
) -> None:
    options = [f"budget.total_hours={hours}", f"budget.training_hours={training_hours}"]
    events = [*steps, *((at, None) for at, _, _ in kills)]
    down = [(seconds, reboots) for _, seconds, reboots in sorted(kills)]
    outcome = run(place, world, *options, events=events, down=down)
    ends_s = Limits(hours * H, training_hours * H, 600).total_s - 720 - 2100
    if outcome.error is not None:  # a limit, or a resume near it, before a first checkpoint
        assert "the baseline" in outcome.error and not outcome.published
        assert complete_steps(outcome.folder.trial("t000") / "checkpoints") == []
    elif not outcome.resumed or outcome.resumed[-1] < ends_s:
        require_in_time(outcome, hours, training_hours)
    shutil.rmtree(outcome.folder.path.parent)
