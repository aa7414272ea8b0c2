"""Sampler and scheduler are rebuilt from the ledger."""

import json
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState as OptunaState

from agent.ledger import RunState, Score, TrialState
from agent.pipeline import plan_rungs
from agent.search import LedgerASHA, LedgerSearch, SearchPlan, distributions_of
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


def prepare(trial: str, attempt: int, kind: str, configuration: dict[str, Any]) -> TrialSpec:
    return TrialSpec(trial, attempt, "/f", "", "/s", "/c", configuration, 32, 64, {}, "/tag")


def build(*trials: TrialState) -> tuple[LedgerSearch, list[dict[str, Any]]]:
    written: list[dict[str, Any]] = []
    state = RunState(trials={trial.trial: trial for trial in trials})
    search = LedgerSearch(
        PLAN,
        lambda event, **facts: written.append({"event": event, **facts}),
        state,
        prepare,
        lambda: False,
        lambda: None,
    )
    return search, written


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
    for index in range(3):
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
    search.on_trial_complete("ray2", None, error=True)
    scores = [(event["trial"], event["step"]) for event in written if event["event"] == "trial_scored"]
    ends = [
        (event["trial"], event["outcome"], event["failure"]) for event in written if event["event"] == "trial_ended"
    ]
    assert scores == [("t001", 8), ("t001", 16)]
    assert ends == [("t001", "stopped", None), ("t002", "failed", "non_finite"), ("t003", "failed", "unknown")]
    states = [trial.state for trial in search._ot_study.trials[1:4]]
    assert states == [OptunaState.PRUNED, OptunaState.COMPLETE, OptunaState.FAIL]


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
