"""Who is promoted to the full run, and which checkpoint wins. Pure: plain values in, a decision with its reason out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agent.ledger import Score, TrialState
from agent.objective import standard_error


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


def choose_promotion(trials: Sequence[TrialState], dev_rows: int | None = None) -> Promotion | None:
    """The best trial, each pair compared at the highest step that both have reached.

    Trials are compared at the same step only: a run is a prefix of the full schedule, so equal steps are comparable and
    unequal ones are not. The best at the highest step leads; a trial that ended earlier for want of time, not because ASHA
    stopped it, takes the lead when it was better at its own last step by more than a standard error of the accuracy over
    `dev_rows` rows. At the same step, ties go to the higher accuracy, then to the earlier trial. None when no trial has a
    score.
    """
    scored = [trial for trial in trials if trial.outcome != "failed" and trial.scores]
    contenders = [trial for trial in scored if trial.outcome != "stopped" or trial.out_of_time] or scored
    usable = [trial for trial in contenders if _last(trial).objective > 0] or contenders
    if not usable:
        return None
    groups = {step: [t for t in usable if _last(t).step == step] for step in {_last(t).step for t in usable}}
    top = max(groups)
    finalists = sorted(groups[top], key=_merit, reverse=True)
    best, step = finalists[0], top
    reason = f"{best.trial} ({best.origin}) has the highest objective of {len(finalists)} trials at step {top}: "
    reason += f"{_last(best).objective:.4f}, {_last(best).reason}"
    if len(finalists) > 1:
        second = _last(finalists[1])
        reason += f"; next is {finalists[1].trial} ({finalists[1].origin}) with {second.objective:.4f}"
    for earlier in sorted(groups.keys() - {top}, reverse=True):
        ended = [trial for trial in groups[earlier] if trial.outcome is not None]
        challenger, known = max(ended, key=_merit, default=None), best.score_at(earlier)
        noise = standard_error(known, dev_rows) if known and dev_rows else 0.0
        if challenger and known and _last(challenger).objective > known.objective + noise:
            reason += f"; {challenger.trial} ({challenger.origin}), for which time ended at step {earlier}, was better "
            reason += f"there: {_last(challenger).objective:.4f} against {known.objective:.4f}"
            best, step = challenger, earlier
    stopped = sum(1 for trial in trials if trial.scores and _last(trial).step < top)
    if stopped:
        reason += f"; {stopped} trials had ended earlier"
    return Promotion(best.trial, step, _last(best).objective, reason)


def rank_proxies(trials: Sequence[TrialState], dev_rows: int | None = None) -> list[TrialState]:
    """The proxies worth an exact trial, best first: usable, and each the one to promote among those behind it."""
    usable = {
        t.trial: t for t in trials if t.is_proxy and t.outcome != "failed" and t.scores and _last(t).objective > 0
    }
    ranked = []
    while promotion := choose_promotion(list(usable.values()), dev_rows):
        ranked.append(usable.pop(promotion.trial))
    return ranked


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


def choice_error(choice: CheckpointChoice, dev_rows: int) -> float:
    """One standard error of a choice's objective; 0 for a checkpoint that was not validated."""
    entropy_score = choice.objective / choice.accuracy if choice.accuracy else 0.0
    return standard_error(Score(choice.step, choice.objective, choice.accuracy, entropy_score=entropy_score), dev_rows)


def choose_losers(
    trials: Sequence[TrialState], with_checkpoint: Collection[str], dev_rows: int | None = None
) -> list[str]:
    """Ended trials whose checkpoints can never become the submission.

    These are all ended trials but the best one that has a complete checkpoint. A trial that still runs may fail, so it
    makes no loser of anybody. The ranking of trials that ended at the same step cannot change: a loser stays one.
    """
    ended = [trial for trial in trials if trial.outcome is not None]
    candidates = [trial for trial in ended if trial.trial in with_checkpoint]
    winner = choose_promotion(candidates, dev_rows)
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
