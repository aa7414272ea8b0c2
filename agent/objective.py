"""The number a search maximises: dev accuracy × entropy score. Pure.

h is the policy entropy divided by H0, the entropy of the untrained policy (nats per token, both at T = 1).

    E(h) = clip(ln(h/0.05) / ln(0.50/0.05), 0, 1) · (1 − clip(ln(h/1.25) / ln(2.5/1.25), 0, 1))

is 0 below 5 % of H0 (collapsed) and above 250 % (exploded) and 1 from 50 % to 125 %. Early in a run nothing has
collapsed yet, so at a rung the *forecast* h^g is judged, g = 2 up to half of the schedule, falling to 1 at its end.
"""

import math
from dataclasses import dataclass
from typing import Any

from agent.ledger import Score
from trials.runner import Validation

WORST = 0.0
"""The objective of a trial without a usable score."""


@dataclass(frozen=True)
class EntropyBand:
    """Where the entropy score rises and falls, as multiples of H0."""

    collapsed: float = 0.05
    healthy_low: float = 0.50
    healthy_high: float = 1.25
    exploded: float = 2.5


@dataclass(frozen=True)
class Objective:
    """One judged measurement; `value` is always finite and within 0..1."""

    value: float
    reason: str
    """How the value came about, in words and numbers."""
    entropy_ratio: float | None = None
    """h = entropy / H0 as measured."""
    forecast_ratio: float | None = None
    """h that is expected at the end of the schedule."""
    entropy_score: float | None = None


def entropy_score(ratio: float, band: EntropyBand) -> float:
    """E(h) in 0..1 for h = entropy / H0 ≥ 0."""
    if ratio <= 0:
        return 0.0
    rise = math.log(ratio / band.collapsed) / math.log(band.healthy_low / band.collapsed)
    fall = math.log(ratio / band.healthy_high) / math.log(band.exploded / band.healthy_high)
    return min(max(rise, 0.0), 1.0) * (1.0 - min(max(fall, 0.0), 1.0))


def forecast_exponent(fraction: float) -> float:
    """g for a measurement at `fraction` (0..1] of the schedule: 2 up to one half, then linear down to 1."""
    return 1.0 + min(1.0, max(0.0, 2.0 * (1.0 - fraction)))


def judge(
    accuracy: float | None, entropy: float | None, initial_entropy: float, fraction: float, band: EntropyBand
) -> Objective:
    """Score one validation.

    Args:
        accuracy: dev accuracy, 0..1; None when unknown.
        entropy: mean policy entropy over the last steps, nats per token; None when unknown.
        initial_entropy: H0, nats per token, > 0.
        fraction: how much of the full schedule is done; 1 judges the measured entropy without a forecast.
        band: the entropy band.
    """
    if accuracy is None or not math.isfinite(accuracy):
        return Objective(WORST, f"no usable dev accuracy (seen: {accuracy})")
    if entropy is None or not math.isfinite(entropy):
        return Objective(WORST, f"no usable policy entropy (seen: {entropy})")
    ratio = max(entropy, 0.0) / initial_entropy
    forecast = ratio ** forecast_exponent(fraction)
    score = entropy_score(forecast, band)
    value = min(max(accuracy, 0.0), 1.0) * score
    reason = f"accuracy {accuracy:.3f} × entropy score {score:.3f} (entropy {entropy:.4f} nats = {ratio:.2f}·H0"
    reason += ")" if fraction >= 1 else f", forecast for the end {forecast:.2f}·H0)"
    return Objective(value, reason, ratio, forecast, score)


def standard_error(score: Score, dev_rows: int) -> float:
    """Of an objective: binomial standard error of the dev accuracy, sqrt(p (1 - p) / n), times the entropy score."""
    accuracy = min(max(score.accuracy or 0.0, 0.0), 1.0)
    return (score.entropy_score or 0.0) * math.sqrt(accuracy * (1.0 - accuracy) / max(1, dev_rows))


def score_validation(
    validation: Validation, *, initial_entropy: float, total_steps: int, band: EntropyBand, measured: bool = False
) -> dict[str, Any]:
    """Judge a trial's validation; the facts of a `trial_scored` event.

    Args:
        validation: what the trial showed.
        initial_entropy: H0, nats per token.
        total_steps: steps of the full schedule.
        band: the entropy band.
        measured: judge the entropy as it is, because this checkpoint may be the product, instead of its forecast.
    """
    fraction = 1.0 if measured else validation.step / total_steps
    objective = judge(validation.accuracy, validation.entropy, initial_entropy, fraction, band)
    return {
        "step": validation.step,
        "objective": objective.value,
        "accuracy": validation.accuracy,
        "entropy": validation.entropy,
        "reason": objective.reason,
        "entropy_ratio": objective.entropy_ratio,
        "forecast_ratio": objective.forecast_ratio,
        "entropy_score": objective.entropy_score,
    }
