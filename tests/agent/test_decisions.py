"""Pure decisions: objective, promotion, checkpoint choice, budget."""

import math

import pytest

from agent.budget import BudgetPlan, Measured, plan_budget
from agent.ledger import Score, TrialState
from agent.objective import WORST, EntropyBand, entropy_score, forecast_exponent, judge
from agent.promotion import choose_checkpoint, choose_losers, choose_promotion, losing_steps

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


def plan(elapsed_h: float, training_done_h: float, concurrent: int = 1) -> BudgetPlan:
    """48 h wall clock, 24 h of training, 600 s inference, 200 steps of 10 s after a start-up of 100 s."""
    return plan_budget(
        measured=Measured(100.0, 10.0),
        elapsed_s=elapsed_h * 3600,
        total_s=48 * 3600,
        training_done_s=training_done_h * 3600,
        training_limit_s=24 * 3600,
        total_steps=200,
        inference_limit_s=600,
        concurrent=concurrent,
    )


def test_budget_takes_full_run_and_reserve_off_the_top() -> None:
    full_run_s = 1.15 * 2100
    early = plan(elapsed_h=1, training_done_h=1)
    assert early.full_run_fits and early.full_run_s == pytest.approx(full_run_s)
    assert early.search_ends_s == pytest.approx(23 * 3600 - full_run_s)  # training is scarcer than wall clock
    assert early.training_ends_s == pytest.approx(23 * 3600)
    late = plan(elapsed_h=40, training_done_h=2)
    assert late.search_ends_s == pytest.approx(8 * 3600 - 1200 - full_run_s)  # wall clock is scarcer


def test_trials_side_by_side_spend_the_training_limit_faster() -> None:
    assert plan(1, 1, concurrent=2).search_ends_s == pytest.approx((23 * 3600 - 1.15 * 2100) / 2)


def test_when_no_full_run_fits_the_search_gets_what_is_left() -> None:
    short = plan(elapsed_h=48 - 3000 / 3600, training_done_h=0)
    assert not short.full_run_fits and short.search_ends_s == pytest.approx(1800)
    assert "the best trial's checkpoint will be submitted" in short.reason
    over = plan(elapsed_h=50, training_done_h=30)
    assert not over.full_run_fits and over.search_ends_s == 0 and over.training_ends_s == 0


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
