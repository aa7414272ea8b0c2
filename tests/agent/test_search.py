"""Sampler and scheduler are rebuilt from the ledger."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState as OptunaState

from agent.ledger import Event, RunState, Score, TrialState
from agent.rungs import plan_rungs
from agent.search import LedgerASHA, LedgerSearch, SearchPlan, distributions_of, optuna_verdict, write_study
from search_spaces.space import read_space, shipped_space
from trials.runner import TrialSpec

SPACE = read_space(shipped_space("overlay"))
PLAN = SearchPlan(SPACE, 8, 2, (8, 16, 32), 2, dev_rows=200, seed=0, startup_trials=2, failures_in_a_row=3)


def finished(
    name: str, origin: str, outcome: str | None, *scores: tuple[int, float], failure: str | None = None
) -> TrialState:
    parameters = SPACE.complete({"clip_high": 0.25 + 0.01 * len(name)})
    kind = "baseline" if origin == "baseline" else "search"
    trial = TrialState(name, kind, parameters, parameters, distributions_of(SPACE, parameters), origin, attempts=1)
    trial.outcome, trial.failure = outcome, failure
    trial.scores = [Score(step, objective, objective, 0.3) for step, objective in scores]
    return trial


SMALL_SPACE = """
schema: 1
knobs:
  token_rule: {type: choice, choices: [none, clip_cov, stare], default: none}
"""


def prepare(trial: str, attempt: int, kind: str, configuration: dict[str, Any]) -> TrialSpec:
    return TrialSpec(trial, attempt, "/f", "", "/s", "/c", configuration, 32, 64, {}, "/tag")


def build(
    *trials: TrialState, plan: SearchPlan = PLAN, may_start: Callable[[], bool] = lambda: True
) -> tuple[LedgerSearch, list[dict[str, Any]]]:
    written: list[dict[str, Any]] = []
    state = RunState(trials={trial.trial: trial for trial in trials})

    def record(event: str, **facts: Any) -> Event:
        written.append({"event": event, **facts})
        return {"time": 0.0, **written[-1]}

    search = LedgerSearch(
        plan,
        record,
        state,
        prepare,
        lambda: False,
        lambda: None,
        may_start=may_start,
    )
    return search, written


def test_without_room_no_trial_starts_and_those_that_run_go_on() -> None:
    room = [True, False]
    search, written = build(finished("t000", "baseline", "completed", (32, 0.2)), may_start=lambda: room.pop(0))
    assert isinstance(search.suggest("ray0"), dict) and search.suggest("ray1") == search.FINISHED
    search.on_trial_complete("ray0", {"step": 32, "objective": 0.25, "outcome": "completed", "accuracy": 0.5})
    assert [(event["event"], event["trial"]) for event in written] == [
        ("trial_started", "t001"), ("trial_scored", "t001"), ("trial_ended", "t001"),
    ]  # fmt: skip


def test_the_ledger_becomes_the_study() -> None:
    search, _ = build(
        finished("t000", "baseline", "completed", (8, 0.3), (32, 0.2)),
        finished("t001", "preset:clip_higher", "stopped", (8, 0.1)),
        finished("t002", "preset:stare", "failed", failure="out_of_memory"),
        finished("t003", "optuna", "failed", (8, 0.2), failure="killed"),
    )
    seen = [
        (trial.state, trial.values[0] if trial.values else None) for trial in search._ot_study.get_trials(False)[:4]
    ]
    assert seen == [
        (OptunaState.COMPLETE, 0.2),
        (OptunaState.PRUNED, None),
        (OptunaState.COMPLETE, 0.0),
        (OptunaState.FAIL, None),
    ]
    assert search._ot_study.trials[1].intermediate_values == {8: 0.1}
    assert search._ot_study.trials[0].params == SPACE.complete({"clip_high": 0.29})


def test_the_study_is_a_view_that_can_be_written_again(tmp_path: Path) -> None:
    trials = [
        finished("t000", "baseline", "completed", (8, 0.3), (32, 0.2)),
        finished("t001", "preset:clip_higher", "stopped", (8, 0.1)),
        finished("t002", "preset:stare", "failed", failure="out_of_memory"),
        finished("t003", "optuna", None, (8, 0.4)),
    ]
    path = tmp_path / "a ?#% folder" / "optuna.db"
    path.parent.mkdir()
    path.write_text("what was there before")
    write_study(RunState(trials={trial.trial: trial for trial in trials}), path, "run-1")
    assert [entry.name for entry in path.parent.iterdir()] == ["optuna.db"]
    path.rename(tmp_path / "copy.db")
    study = optuna.load_study(storage=f"sqlite:///{tmp_path}/copy.db", study_name="run-1")
    states = [OptunaState.COMPLETE, OptunaState.PRUNED, OptunaState.COMPLETE, OptunaState.RUNNING]
    assert [trial.state for trial in study.trials] == states
    assert [trial.user_attrs["trial"] for trial in study.trials] == ["t000", "t001", "t002", "t003"]
    assert study.best_value == 0.2 and study.trials[0].params == trials[0].parameters
    assert study.trials[3].intermediate_values == {8: 0.4}


def test_unfinished_trials_go_first_under_their_name_then_presets_then_optuna() -> None:
    search, written = build(
        finished("t000", "baseline", "completed", (32, 0.2)),
        finished("t001", "preset:clip_higher", "completed", (32, 0.1)),
        finished("t002", "optuna", None, (8, 0.1)),
    )
    configs = [search.suggest(f"ray{index}") for index in range(7)]
    assert [config["trial"] for config in configs if config] == [f"t00{number}" for number in range(2, 9)]
    origins = [event["origin"] for event in written]
    presets = [f"preset:{name}" for name in SPACE.presets if name != "clip_higher"]
    assert origins == ["optuna", *presets, "optuna"]
    assert written[0]["attempt"] == 2 and written[0]["parameters"] == SPACE.complete({"clip_high": 0.29})
    assert written[1]["attempt"] == 1
    assert configs[0] is not None and configs[0]["spec"]["configuration"] == written[0]["configuration"]


def test_results_become_facts_and_optuna_never_sees_nan() -> None:
    search, written = build(finished("t000", "baseline", "completed", (32, 0.2)))
    for index in range(4):
        search.suggest(f"ray{index}")
    search.on_trial_result("ray0", {"step": 8, "objective": 0.25, "outcome": "running", "accuracy": 0.5})
    search.on_trial_complete("ray0", {"step": 16, "objective": 0.2, "outcome": "running"})
    failed = {
        "step": 8,
        "objective": 0.0,
        "outcome": "failed",
        "failure": "non_finite",
        "ending": "nan",
        "seconds": 3.0,
    }
    search.on_trial_complete("ray1", failed)
    search.on_trial_complete("ray2", {**failed, "failure": "bad_configuration"})
    scores = [(event["trial"], event["step"]) for event in written if event["event"] == "trial_scored"]
    ends = [
        (event["trial"], event["outcome"], event["failure"]) for event in written if event["event"] == "trial_ended"
    ]
    assert scores == [("t001", 8), ("t001", 16)]
    assert ends == [
        ("t001", "stopped", None),
        ("t002", "failed", "non_finite"),
        ("t003", "failed", "bad_configuration"),
    ]
    states = [trial.state for trial in search._ot_study.trials[1:4]]
    assert states == [OptunaState.PRUNED, OptunaState.COMPLETE, OptunaState.FAIL]


def ended(failure: str, step: int = 0, start_up_s: float | None = 1.0) -> dict[str, Any]:
    facts = {"step": step, "objective": 0.0, "outcome": "failed", "failure": failure, "ending": f"it was {failure}"}
    return {**facts, "start_up_s": start_up_s, "seconds": 2.0}


@pytest.mark.parametrize(
    ("failure", "start_up_s", "attempts"),
    [
        ("preempted", 1.0, 3), ("killed", 1.0, 3), ("stall", 1.0, 3), ("no_progress", None, 3), ("startup_hang", None, 2),
        ("unknown", 1.0, 2), ("ended_early", 1.0, 2), ("bad_configuration", 1.0, 1), ("non_finite", 1.0, 1),
        ("out_of_memory", 1.0, 1), ("out_of_memory", None, 2),  # before a step it may be the previous trial's memory
    ],
)  # fmt: skip
def test_each_kind_of_failure_has_its_number_of_attempts(failure: str, start_up_s: float | None, attempts: int) -> None:
    search, written = build(plan=replace(PLAN, failures_in_a_row=9, trials=1))
    seen = 0
    while isinstance(config := search.suggest(f"ray{seen}"), dict):
        assert config["trial"] == "t000"
        search.on_trial_complete(f"ray{seen}", ended(failure, start_up_s=start_up_s))
        seen += 1
    assert seen == attempts
    kinds = [event["event"] for event in written]
    assert kinds == ["trial_started", *["attempt_failed", "trial_started"] * (attempts - 1), "trial_ended"]
    assert len({json.dumps(event["parameters"]) for event in written if event["event"] == "trial_started"}) == 1


def test_a_trial_for_which_time_ended_at_an_earlier_rung_is_pruned_for_optuna() -> None:
    search, written = build(plan=replace(PLAN, trials=1))
    search.suggest("ray0")
    search.on_trial_complete("ray0", {"step": 16, "objective": 0.2, "outcome": "completed", "seconds": 3.0})
    assert [(e["outcome"], e["out_of_time"]) for e in written if e["event"] == "trial_ended"] == [("completed", True)]
    assert search._ot_study.trials[-1].state == OptunaState.PRUNED
    shortened = finished("t001", "optuna", "completed", (16, 0.2))
    shortened.out_of_time = True
    assert optuna_verdict(shortened) == (OptunaState.PRUNED, None)


def test_progress_earns_a_trial_new_attempts() -> None:
    search, written = build(plan=replace(PLAN, trials=1))
    for attempt, step in enumerate((8, 16, 32)):
        search.suggest(f"ray{attempt}")
        search.on_trial_result(f"ray{attempt}", {"step": step, "objective": 0.2, "outcome": "running"})
        search.on_trial_complete(f"ray{attempt}", ended("killed", step))
    assert isinstance(search.suggest("ray3"), dict) and search.broken is None
    search.on_trial_complete("ray3", {"step": 32, "objective": 0.2, "outcome": "completed"})
    assert search.suggest("ray4") == "FINISHED"
    assert [event["outcome"] for event in written if event["event"] == "trial_ended"] == ["completed"]


def test_the_circuit_breaker_wants_one_cause_in_a_row_and_more_than_one_trial() -> None:
    search, _ = build(plan=replace(PLAN, trials=8))
    for name, failure in (("a", "stall"), ("b", "killed"), ("c", "stall")):
        search.suggest(name)
        search.on_trial_complete(name, ended(failure))
    assert search.broken is None
    search.suggest("d")
    search.on_trial_result("d", {"step": 8, "objective": 0.2, "outcome": "running"})
    for name in "efg":
        search.suggest(name)
        search.on_trial_complete(name, ended("unknown"))
    assert search.broken is not None
    assert search.broken.startswith("3 attempts in a row failed with unknown") and "it was unknown" in search.broken


def test_a_killed_search_goes_on_with_the_points_of_an_undisturbed_one() -> None:
    """In one slot, trial by trial; startup_trials is 2, so most points come from TPE and depend on what it has seen."""
    plan = replace(PLAN, trials=16, concurrent=1)

    def play(search: LedgerSearch, written: list[dict[str, Any]], trials: int) -> list[TrialState]:
        done = []
        for _ in range(trials):
            config = search.suggest(f"ray{search._numbers}")
            assert isinstance(config, dict)
            event = written[-1]
            objective = 0.05 * (search._numbers % 5)
            result = {"step": 32, "objective": objective, "outcome": "completed"}
            search.on_trial_complete(f"ray{search._numbers - 1}", result)
            trial = TrialState(config["trial"], "search", {}, event["parameters"], event["distributions"])
            trial.origin, trial.attempts, trial.outcome = event["origin"], 1, "completed"
            trial.scores = [Score(32, objective, objective, 0.3)]
            done.append(trial)
        return done

    undisturbed = play(*build(plan=plan), 16)
    before = play(*build(plan=plan), 11)
    after = play(*build(*before, plan=plan), 5)
    assert [trial.parameters for trial in before + after] == [trial.parameters for trial in undisturbed]
    assert sum(trial.origin == "optuna" for trial in undisturbed) > 5


def test_a_point_is_not_run_twice_unless_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL_SPACE)
    search, written = build(plan=replace(PLAN, space=read_space(path), trials=5, startup_trials=0))
    for index in range(5):
        assert isinstance(search.suggest(f"ray{index}"), dict)
        search.on_trial_complete(f"ray{index}", {"step": 32, "objective": 0.1, "outcome": "completed"})
    points = [event["parameters"]["token_rule"] for event in written if event["event"] == "trial_started"]
    origins = [event["origin"] for event in written if event["event"] == "trial_started"]
    assert len(set(points[:3])) == 3
    assert all("once more" in origin for origin in origins[3:])


def test_distributions_round_trip_as_json() -> None:
    texts = distributions_of(SPACE, SPACE.preset_parameters("stare"))
    assert set(texts) == set(SPACE.preset_parameters("stare"))
    restored = optuna.distributions.json_to_distribution(texts["stare.fraction"])
    assert restored == optuna.distributions.FloatDistribution(0.02, 0.5, log=True)
    assert json.loads(texts["token_rule"])["name"] == "CategoricalDistribution"


def judged(step: int, objective: float, accuracy: float = 0.5) -> Score:
    return Score(step, objective, accuracy, 0.3, entropy_score=1.0)


def test_asha_needs_three_at_a_rung_and_stops_below_the_cutoff() -> None:
    scheduler = LedgerASHA((8, 16, 32), 2, dev_rows=10**9)
    assert scheduler.decide("a", judged(8, 0.5)) == "CONTINUE"
    assert scheduler.decide("b", judged(8, 0.1)) == "CONTINUE"  # two members: no judgement yet
    assert scheduler.decide("c", judged(8, 0.2)) == "STOP"  # below the median of 0.5 and 0.1
    assert scheduler.decide("d", judged(8, 0.3)) == "CONTINUE"
    assert scheduler.decide("e", judged(16, 0.01)) == "CONTINUE"  # first at the next rung


def test_asha_stops_nobody_for_noise() -> None:
    """With 200 dev rows and accuracy .5 the standard error is sqrt(.25 / 200) = .0354."""
    scheduler = LedgerASHA((8, 16, 32), 2, dev_rows=200)
    for name in "abc":
        scheduler.decide(name, judged(8, 0.60))
    assert scheduler.decide("close", judged(8, 0.566)) == "CONTINUE"
    assert scheduler.decide("clear", judged(8, 0.563)) == "STOP"


def test_asha_is_filled_again_from_the_ledger() -> None:
    trials = [finished(f"t00{index}", "optuna", "stopped", (8, 0.1 * index)) for index in range(1, 5)]
    trials.append(finished("t009", "optuna", "failed", (8, 9.0)))
    scheduler = LedgerASHA((8, 16, 32), 2, dev_rows=10**9)
    scheduler.refill(trials)
    assert (
        scheduler.decide("new", judged(8, 0.24)) == "STOP"
    )  # the median of .1 .2 .3 .4; the failed one does not count
    assert scheduler.decide("other", judged(8, 0.26)) == "CONTINUE"
    assert scheduler.decide("t001", judged(8, 0.0)) == "CONTINUE"  # a resumed trial is not judged twice


@pytest.mark.parametrize(
    ("first", "last", "rungs"), [(8, 32, (8, 16, 32)), (1, 1000, None), (5, 15, (5, 10, 15)), (4, 4, (4,))]
)
def test_rungs_are_exact_integers(first: int, last: int, rungs: tuple[int, ...] | None) -> None:
    class Workspace:
        total_steps = 1000

    from agent.config import load_config

    config = load_config(
        None, [f"search.first_rung_steps={first}", f"search.last_rung_steps={last}", "search.reduction_factor=2"]
    )
    seen = plan_rungs(config, Workspace())  # type: ignore[arg-type]
    assert seen[0] == first and seen[-1] == last and list(seen) == sorted(set(seen))
    assert rungs is None or seen == rungs
