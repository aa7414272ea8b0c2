"""Pure decisions: objective, promotion, checkpoint choice, budget."""

import math
from typing import Any

import pytest

from agent.budget import BudgetPlan, Limits, Measured, Schedule, last_save, measure, plan_budget, submission_reserve
from agent.ledger import Score, TrialState
from agent.objective import WORST, EntropyBand, entropy_score, forecast_exponent, judge
from agent.promotion import (
    CheckpointChoice,
    choice_error,
    choose_checkpoint,
    choose_losers,
    choose_promotion,
    losing_steps,
)
from trials.metrics import StepMetrics

BAND = EntropyBand()


@pytest.mark.parametrize(
    ("ratio", "score"),
    [
        (0.0, 0.0), (0.05, 0.0), (0.5, 1.0), (1.0, 1.0), (1.25, 1.0), (2.5, 0.0), (9.0, 0.0),
        (math.sqrt(0.05 * 0.5), 0.5),  # half-way in log space
        (math.sqrt(1.25 * 2.5), 0.5),
    ],
)  # fmt: skip
def test_entropy_score_is_the_documented_trapezoid_in_log_space(ratio: float, score: float) -> None:
    assert entropy_score(ratio, BAND) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(("fraction", "exponent"), [(0.1, 2), (0.25, 2), (0.5, 2), (0.75, 1.5), (1.0, 1.0)])
def test_forecast_exponent(fraction: float, exponent: float) -> None:
    assert forecast_exponent(fraction) == pytest.approx(exponent)


def test_objective_is_accuracy_times_score_of_the_forecast() -> None:
    early = judge(0.6, 0.09, 0.3, 0.25, BAND)
    assert early.entropy_ratio == pytest.approx(0.3)
    assert early.forecast_ratio == pytest.approx(0.09)
    assert early.value == pytest.approx(0.6 * math.log(0.09 / 0.05) / math.log(10))
    final = judge(0.6, 0.09, 0.3, 1.0, BAND)
    assert final.value == pytest.approx(0.6 * math.log(0.3 / 0.05) / math.log(10))


@pytest.mark.parametrize("accuracy", [None, math.nan, math.inf])
@pytest.mark.parametrize("entropy", [0.3, None, math.nan, -math.inf])
def test_unknown_or_non_finite_values_give_the_worst_objective_with_a_reason(accuracy: object, entropy: object) -> None:
    objective = judge(accuracy, entropy, 0.3, 0.5, BAND)  # type: ignore[arg-type]
    assert objective.value == 0.0 and "no usable" in objective.reason


def trial(name: str, *scores: tuple[int, float], outcome: str = "completed", started: float = 0.0) -> TrialState:
    state = TrialState(name, "search", {}, outcome=outcome, started_s=started)
    state.scores = [Score(step, objective, objective, 0.3) for step, objective in scores]
    return state


def test_promotion_compares_at_the_highest_step_only() -> None:
    trials = [trial("a", (8, 0.9), outcome="stopped"), trial("b", (8, 0.2), (32, 0.5)), trial("c", (8, 0.1), (32, 0.6))]
    promotion = choose_promotion(trials)
    assert promotion is not None and (promotion.trial, promotion.step) == ("c", 32)
    assert "of 2 trials at step 32" in promotion.reason and "next is b" in promotion.reason


def test_failed_trials_are_never_promoted_and_ties_go_to_the_earlier() -> None:
    trials = [
        trial("x", (32, 0.9), outcome="failed"),
        trial("late", (32, 0.5), started=2),
        trial("early", (32, 0.5), started=1),
    ]
    promotion = choose_promotion(trials)
    assert promotion is not None and promotion.trial == "early"
    assert choose_promotion([trial("x", (32, 0.9), outcome="failed"), trial("n")]) is None


def test_checkpoint_choice_says_what_was_lost() -> None:
    scores = [Score(15, 0.2, 0.2, 0.3), Score(20, 0.41, 0.5, 0.3), Score(45, 0.44, 0.5, 0.3)]
    choice = choose_checkpoint(scores, [20, 40])
    assert choice is not None and choice.step == 20
    assert "step 45 scored 0.4400 but has no complete checkpoint" in choice.reason
    assert choose_checkpoint(scores, []) is None
    unjudged = choose_checkpoint([], [20, 40])
    assert unjudged is not None and unjudged.step == 40 and "none of them has been validated" in unjudged.reason
    broken = [Score(40, 0.4, 0.5, 0.3), Score(60, WORST, 0.6, None)]  # from step 60 on, the entropy was not a number
    healthy = choose_checkpoint(broken, [40, 60])
    assert healthy is not None and healthy.step == 40


MEASURED = Measured(100.0, 10.0, save_s=20.0, validate_s=30.0)
SCHEDULE = Schedule(200, 20, (25, 50, 100))


def plan(elapsed_h: float, training_done_h: float, **facts: Any) -> BudgetPlan:
    """48 h wall clock, 24 h of training, 600 s inference, 200 steps of 10 s, a save with validation of 50 s every 20."""
    given: dict[str, Any] = {
        "measured": MEASURED,
        "trial_measured": MEASURED,
        "slots": 1,
        "submission_s": 2100.0,
        **facts,
    }
    return plan_budget(
        limits=Limits(48 * 3600, 24 * 3600, 600),
        elapsed_s=elapsed_h * 3600,
        training_done_s=training_done_h * 3600,
        schedule=SCHEDULE,
        **given,
    )


FULL_RUN_S = 100 + 200 * 10 + 10 * 50


def test_budget_takes_full_run_and_reserve_off_the_top() -> None:
    early = plan(elapsed_h=1, training_done_h=1)
    assert early.full_run_fits and early.full_run_s == FULL_RUN_S
    assert early.search_ends_s == pytest.approx(23 * 3600 - 1.15 * FULL_RUN_S)  # training is scarcer than wall clock
    assert early.training_ends_s == pytest.approx(23 * 3600)
    late = plan(elapsed_h=40, training_done_h=2)
    assert late.search_ends_s == pytest.approx(8 * 3600 - 720 - 2100 - 1.15 * FULL_RUN_S)  # wall clock is scarcer
    trial_s = 100 + 100 * 10 + 4 * 50
    assert (late.last_rung, late.trials) == (100, int(late.search_ends_s // trial_s)) == (100, 17)


def test_trials_side_by_side_spend_the_training_limit_faster_and_proxies_by_their_gpus() -> None:
    free_s = 23 * 3600 - 1.15 * FULL_RUN_S
    assert plan(1, 1, slots=2).search_ends_s == pytest.approx(free_s / 2)
    assert plan(1, 1, slots=4, gpu_share=0.25).search_ends_s == pytest.approx(free_s)
    exact_s = 1.15 * (100 + 100 * 10 + 4 * 50)
    assert plan(1, 1, slots=4, gpu_share=0.25, remeasured=2).search_ends_s == pytest.approx(free_s - 2 * exact_s)


def before_the_end(seconds: float) -> BudgetPlan:
    """The plan when so many seconds of training are left by the wall clock."""
    return plan(elapsed_h=48 - (seconds + 720 + 2100) / 3600, training_done_h=0)


def test_what_is_given_up_when_time_gets_short() -> None:
    """Trials, then their last rungs, then the full run."""
    reserve_s = 1.15 * FULL_RUN_S
    seen = [before_the_end(reserve_s + extra_s) for extra_s in (2700, 1400, 1200, 700, 500, 300)]
    assert [(p.full_run_fits, p.trials, p.last_rung) for p in seen] == [
        (True, 2, 100), (True, 1, 100), (True, 1, 50), (True, 1, 50), (True, 1, 25), (True, 0, None),
    ]  # fmt: skip
    for left_s, fits in ((FULL_RUN_S + 1, True), (FULL_RUN_S - 1, False)):
        last = before_the_end(left_s)
        assert last.full_run_fits is fits and last.training_ends_s == pytest.approx(left_s)
    rest_s = 1.15 * (100 + 100 * 10 + 4 * 50)
    assert last.final_s == pytest.approx(rest_s) and last.search_ends_s == pytest.approx(left_s - rest_s)
    over = plan(elapsed_h=50, training_done_h=30)
    assert not over.full_run_fits and over.search_ends_s == 0 == over.training_ends_s == over.final_s
    assert "no longer fits" in over.reason


def test_the_reserve_for_the_submission_is_measured_or_the_limit() -> None:
    limits = Limits(48 * 3600, 24 * 3600, 600)
    assert submission_reserve(limits, None, None, None) == 600 + 600 + 600 + 300
    assert submission_reserve(limits, 120, 400, 60) == 1.25 * 120 + 600 + 1.25 * 400 + 1.25 * 60
    assert submission_reserve(limits, 120, 590, 60) == 1.25 * 120 + 600 + 600 + 1.25 * 60


@pytest.mark.parametrize(
    ("step", "left_s", "last"),
    [(40, 249, 40), (40, 251, 60), (40, 501, 80), (0, 1e9, 95), (80, 199, 80), (80, 201, 95), (95, 0, 95)],
)
def test_the_last_save_that_fits(step: int, left_s: float, last: int) -> None:
    """Of 95 steps of 10 s with a save and validation of 50 s every 20 steps and at the end."""
    assert last_save(MEASURED, step=step, save_freq=20, total_steps=95, left_s=left_s) == last


def history(*lines: tuple[int, float], attempt: int = 1, save: float | None = 20.0) -> list[StepMetrics]:
    found = []
    for step, seconds in lines:
        values = {"actor/entropy": 0.3, "seconds": seconds, "attempt": float(attempt)}
        if step % 2 == 0 and save is not None:
            values |= {"timing_s/save_checkpoint": save, "timing_s/testing": 30.0}
        found.append(StepMetrics(step, values))
    return found


def test_times_are_measured_step_by_step() -> None:
    lines = [(1, 100.0), (2, 160.0), (3, 170.0), (4, 230.0)]
    assert measure(history(*lines)) == Measured(100.0, 10.0, 20.0, 30.0)
    assert measure(history(*lines, save=None)) == Measured(100.0, pytest.approx(130 / 3))
    again = [*history(*lines[:2]), *history((3, 80.0), (4, 170.0), attempt=2)]
    assert measure(again) == Measured(90.0, 25.0, 20.0, 30.0)  # from attempt to attempt nothing is measured
    assert measure(again, last_steps=1) == Measured(90.0, 40.0, 20.0, 30.0)
    assert measure(history(lines[0])) is None and measure([]) is None


def test_a_trial_that_ended_for_want_of_time_is_compared_at_its_own_last_step() -> None:
    leader = trial("b", (8, 0.3), (16, 0.4), (32, 0.5))
    short = trial("s", (8, 0.2), (16, 0.45))
    best = choose_promotion([leader, short])
    assert best is not None and (best.trial, best.step, best.objective) == ("s", 16, 0.45)
    assert "for which time ended at step 16, was better there: 0.4500 against 0.4000" in best.reason
    for beaten in (trial("s", (8, 0.2), (16, 0.45), outcome="stopped"), trial("s", (8, 0.2), (16, 0.4))):
        assert (found := choose_promotion([leader, beaten])) is not None and found.trial == "b"
    cut = trial("s", (8, 0.2), (16, 0.45), outcome="stopped")
    cut.out_of_time = True
    assert (found := choose_promotion([leader, cut])) is not None and found.trial == "s"
    for score in leader.scores:
        score.entropy_score = 1.0
    noisy = choose_promotion([leader, cut], dev_rows=50)  # standard error of 0.4 over 50 rows: 0.07
    assert noisy is not None and noisy.trial == "b"
    assert (found := choose_promotion([leader, cut], dev_rows=500)) is not None and found.trial == "s"


ENDED = [
    trial("a", (8, 0.9), outcome="stopped"),
    trial("b", (8, 0.2), (32, 0.5)),
    trial("c", (8, 0.1), (32, 0.6)),
    trial("d", (8, 0.95), outcome="failed"),
    trial("e"),
]


@pytest.mark.parametrize(
    ("with_checkpoint", "losers"),
    [
        ("abcde", ["a", "b", "d", "e"]),
        ("abde", ["a", "c", "d", "e"]),  # the best has no complete checkpoint: the next one's stay
        ("ade", ["b", "c", "d", "e"]),
        ("de", []),  # nothing but failed ones: any may be the last resort
        ("", []),
    ],
)
def test_losers_leave_the_best_that_has_a_checkpoint(with_checkpoint: str, losers: list[str]) -> None:
    assert choose_losers(ENDED, with_checkpoint) == losers


def test_a_running_trial_neither_loses_nor_makes_losers() -> None:
    running = trial("r", (8, 0.3), (32, 0.99), outcome="")
    running.outcome = None
    assert choose_losers([*ENDED, running], "abcder") == ["a", "b", "d", "e"]


def test_what_was_a_loser_is_never_chosen_later() -> None:
    """Whatever order trials end in, the final choice among all checkpoints is still there."""
    objectives = {"t1": 0.4, "t2": 0.7, "t3": 0.6, "t4": 0.7, "t5": 0.1}
    for first in range(5):
        names = [*list(objectives)[first:], *list(objectives)[:first]]
        ended: list[TrialState] = []
        alive: set[str] = set()
        for name in names:
            ended.append(trial(name, (32, objectives[name]), started=float(name[1])))
            alive.add(name)
            alive -= set(choose_losers(ended, alive))
        best = choose_promotion(ended)
        assert best is not None and alive == {best.trial} == {"t2"}


def test_losing_steps_are_those_that_cannot_be_chosen_worst_first() -> None:
    scores = [
        Score(step, objective, objective, 0.3) for step, objective in ((10, 0.5), (20, 0.9), (30, 0.1), (40, 0.9))
    ]
    assert losing_steps(scores, [5, 10, 20, 30, 40]) == [
        5,
        30,
        10,
        20,
    ]  # 5 was never validated; of 20 and 40 the later wins
    assert losing_steps(scores, [10, 30]) == [30]
    assert losing_steps(scores, [5, 15]) == [] == losing_steps([], [10, 20]) == losing_steps(scores, [])


def test_the_error_of_a_choice_is_that_of_its_accuracy_times_the_entropy_score() -> None:
    choice = CheckpointChoice(48, 0.3, 0.6, 0.2, "")
    assert choice_error(choice, 200) == pytest.approx(0.5 * math.sqrt(0.6 * 0.4 / 200))
    assert choice_error(CheckpointChoice(48, 0.0, None, None, ""), 200) == 0.0
