"""Who is promoted to the full run, and which checkpoint wins. Pure: plain values in, a decision with its reason out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agent.ledger import Score, TrialState


@dataclass(frozen=True)
class Promotion:
    """The trial whose configuration the full run gets."""

    trial: str
    step: int
    objective: float
    reason: str


@dataclass(frozen=True)
class CheckpointChoice:
    """The checkpoint that becomes the submission."""

    step: int
    objective: float
    accuracy: float | None
    entropy: float | None
    reason: str


def choose_promotion(trials: Sequence[TrialState]) -> Promotion | None:
    """The best trial at the highest step that any usable trial has reached.

    Trials are compared at the same step only: a run is a prefix of the full schedule, so equal steps are comparable and
    unequal ones are not. Ties go to the higher accuracy, then to the earlier trial. None when no trial has a score.
    """
    usable = [trial for trial in trials if trial.outcome != "failed" and trial.scores and _last(trial).objective > 0]
    if not usable:
        usable = [trial for trial in trials if trial.outcome != "failed" and trial.scores]
    if not usable:
        return None
    top = max(_last(trial).step for trial in usable)
    finalists = sorted((trial for trial in usable if _last(trial).step == top), key=_merit, reverse=True)
    best = finalists[0]
    score = _last(best)
    reason = f"{best.trial} ({best.origin}) has the highest objective of {len(finalists)} trials at step {top}: "
    reason += f"{score.objective:.4f}, {score.reason}"
    if len(finalists) > 1:
        second = _last(finalists[1])
        reason += f"; next is {finalists[1].trial} ({finalists[1].origin}) with {second.objective:.4f}"
    stopped = sum(1 for trial in trials if trial.scores and _last(trial).step < top)
    if stopped:
        reason += f"; {stopped} trials had ended earlier"
    return Promotion(best.trial, top, score.objective, reason)


def rank_proxies(trials: Sequence[TrialState]) -> list[TrialState]:
    """The proxies worth an exact trial, best first: usable, and by objective among those at the highest step."""
    usable = [t for t in trials if t.is_proxy and t.outcome != "failed" and t.scores and _last(t).objective > 0]
    return sorted(usable, key=lambda trial: (_last(trial).step, *_merit(trial)), reverse=True)


def choose_checkpoint(scores: Sequence[Score], complete_steps: Sequence[int]) -> CheckpointChoice | None:
    """The complete checkpoint whose step has the highest objective; ties go to the later step.

    When the best step overall has no complete checkpoint, the reason says what was lost. None when no checkpoint can be
    used. A complete checkpoint without a validation can only win if no checkpoint has one.
    """
    if not complete_steps:
        return None
    judged = [score for score in scores if score.step in set(complete_steps)]
    if not judged:
        step = max(complete_steps)
        return CheckpointChoice(
            step, 0.0, None, None, f"step {step} is the newest complete checkpoint; none of them has been validated"
        )
    best = max(judged, key=lambda score: (score.objective, score.step))
    reason = f"step {best.step} has the highest objective of {len(judged)} validated checkpoints: "
    reason += f"{best.objective:.4f}, {best.reason}"
    overall = max(scores, key=lambda score: score.objective)
    if overall.objective > best.objective:
        reason += f"; step {overall.step} scored {overall.objective:.4f} but has no complete checkpoint"
    return CheckpointChoice(best.step, best.objective, best.accuracy, best.entropy, reason)


def choose_losers(trials: Sequence[TrialState], with_checkpoint: Collection[str]) -> list[str]:
    """Ended trials whose checkpoints can never become the submission.

    These are all ended trials but the best one that has a complete checkpoint. A trial that still runs may fail, so it
    makes no loser of anybody. The ranking of ended trials cannot change: what is a loser once stays one.
    """
    ended = [trial for trial in trials if trial.outcome is not None]
    candidates = [trial for trial in ended if trial.trial in with_checkpoint]
    winner = choose_promotion(candidates)
    return [trial.trial for trial in ended if trial.trial != winner.trial] if winner else []


def losing_steps(scores: Sequence[Score], complete_steps: Sequence[int]) -> list[int]:
    """Complete checkpoints of one training that can no longer be chosen, the least useful first.

    Empty as long as none has been validated.
    """
    objective = {score.step: score.objective for score in scores}
    choice = choose_checkpoint(scores, complete_steps)
    if choice is None or choice.step not in objective:
        return []
    losers = [step for step in complete_steps if step != choice.step]
    return sorted(losers, key=lambda step: (objective.get(step, -1.0), step))


def _last(trial: TrialState) -> Score:
    score = trial.last
    assert score is not None
    return score


def _merit(trial: TrialState) -> tuple[float, float, float]:
    score = _last(trial)
    return score.objective, score.accuracy or 0.0, -trial.started_s
