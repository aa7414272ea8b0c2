"""What still fits into a run's time. Pure: limits, readings and measured times in, plans with their reasons out.

From the end backwards: a margin before the limit, the submission with one retry, the full run, the re-measurement of
proxies; the rest belongs to the search. When time gets short, these are given up in this order:

1. search trials, one after the other;
2. the last rung of trials that have not begun: an earlier one ends them;
3. the fresh full run: the leading trial goes on from its last checkpoint instead, and at most a quarter of the
   whole time is kept for that;
4. that, too: the best checkpoint there is becomes the submission.

The limit of training is counted in seconds of all the GPUs that train.sh asks; a trial on k of N of them spends k/N.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from agent.config import AgentConfig
from trials.metrics import StepMetrics

_MARGIN_S = 720.0
_MARGIN_SHARE = 1 / 20
RESERVE = 1.15
"""Planned times are this much longer than measured ones: answers grow while a policy learns."""
_CONTINUATION = 1 / 4
_SLOWER = 1.25
"""The same for merge, inference and validation, which were measured once."""


@dataclass(frozen=True)
class Limits:
    """What the task allows, seconds."""

    total_s: float
    training_s: float
    inference_s: float

    @property
    def margin_s(self) -> float:
        """The submission is there so long before the limit: ten minutes, and two for stopping what runs; a twentieth of a
        limit below four hours."""
        return min(_MARGIN_S, self.total_s * _MARGIN_SHARE)


def read_limits(config: AgentConfig) -> Limits:
    """The limits of a configuration."""
    budget = config.budget
    return Limits(budget.total_hours * 3600, budget.training_hours * 3600, budget.inference_minutes * 60)


@dataclass(frozen=True)
class Measured:
    """Times of a training, seconds."""

    start_up_s: float
    """From launching it to its first step."""
    step_s: float
    """One step, without validation and save where the log shows those."""
    save_s: float | None = None
    """Writing one checkpoint; None when the log does not show it: then `step_s` includes it."""
    validate_s: float | None = None
    """One validation; likewise."""

    @classmethod
    def from_receipt(cls, receipt: Mapping[str, Any]) -> "Measured":
        """From the ledger's receipt of a baseline."""
        times = receipt.get("save_s"), receipt.get("validate_s")
        return cls(float(receipt["start_up_s"]), float(receipt["step_s"]), *times)

    def on_share(self, gpu_share: float) -> "Measured":
        """What to expect on so much of the GPUs, before it is measured."""
        return replace(self, step_s=self.step_s / gpu_share)

    def steps_s(self, steps: int, saves: int) -> float:
        """So many steps, with so many saves that are validated each."""
        return steps * self.step_s + saves * ((self.save_s or 0.0) + (self.validate_s or 0.0))

    def training_s(self, steps: int, save_freq: int) -> float:
        """A whole attempt."""
        return self.start_up_s + self.steps_s(steps, math.ceil(steps / save_freq))


@dataclass(frozen=True)
class Schedule:
    """The steps of full run and trials."""

    total_steps: int
    save_freq: int
    """Of the full run, which validates each save."""
    rungs: tuple[int, ...]
    """Ascending; a trial validates and saves at each multiple of the first."""

    def trial_s(self, measured: Measured, rung: int) -> float:
        return measured.training_s(rung, self.rungs[0])


@dataclass(frozen=True)
class BudgetPlan:
    """How the remaining time is divided."""

    search_ends_s: float
    """Seconds from now at which no search trial may run any more."""
    training_ends_s: float
    """Seconds from now at which all training must have been interrupted."""
    full_run_s: float
    """Expected duration of the full run."""
    final_s: float
    """Kept for the full run, or where it does not fit for the leading trial that goes on instead."""
    submission_s: float
    """Reserve for merge, inference, validation and one retry."""
    full_run_fits: bool
    trials: int
    """Search trials that fit when none is stopped early."""
    last_rung: int | None
    """The step that ends a search trial that begins now; None when not even the first rung fits."""
    reason: str


def measure(history: Sequence[StepMetrics], last_steps: int | None = None) -> Measured | None:
    """The times that a training's metrics show; None before there are two consecutive step lines.

    Args:
        history: as `trials.runner.read_history`.
        last_steps: look at no more than so many steps at the end.
    """
    lines = [m for m in history if m.is_training_step and m.get("seconds") is not None]
    first: dict[float, float] = {}
    for line in lines:
        first.setdefault(line.get("attempt") or 0.0, line.values["seconds"])
    recent = lines[-last_steps - 1 :] if last_steps else lines
    pairs = [(b, b.values["seconds"] - a.values["seconds"]) for a, b in pairwise(recent) if _is_next(a, b)]
    if not pairs:
        return None
    save_s, validate_s = (_mean_of(name, recent) for name in ("timing_s/save_checkpoint", "timing_s/testing"))
    pure = [seconds - sum(line.get(name) or 0.0 for name in _SHOWN) for line, seconds in pairs]
    start_up_s = sum(first.values()) / len(first)
    return Measured(start_up_s, max(0.0, sum(pure) / len(pure)), save_s, validate_s)


_SHOWN = ("timing_s/save_checkpoint", "timing_s/testing")


def _is_next(one: StepMetrics, other: StepMetrics) -> bool:
    return other.step == one.step + 1 and other.get("attempt") == one.get("attempt")


def _mean_of(name: str, lines: Sequence[StepMetrics]) -> float | None:
    shown = [value for line in lines if (value := line.get(name)) is not None]
    return sum(shown) / len(shown) if shown else None


def submission_reserve(
    limits: Limits, merge_s: float | None, inference_s: float | None, validate_s: float | None
) -> float:
    """Seconds for merge, an inference that fails after all its time, a second one, and validation.

    Args:
        limits: of the task.
        merge_s: as an earlier submission of this run took; None when there was none: then the limit of an inference.
        inference_s: likewise.
        validate_s: likewise, half of that limit.
    """
    limit_s = limits.inference_s
    again_s = limit_s if inference_s is None else min(limit_s, _SLOWER * inference_s)
    merge_s = limit_s if merge_s is None else _SLOWER * merge_s
    validate_s = limit_s / 2 if validate_s is None else _SLOWER * validate_s
    return merge_s + limit_s + again_s + validate_s


def training_left(limits: Limits, elapsed_s: float, training_done_s: float, submission_s: float) -> tuple[float, float]:
    """Seconds from now until training must end: by the wall clock, and by the sum of training."""
    wall_s = limits.total_s - limits.margin_s - submission_s - elapsed_s
    return max(0.0, wall_s), max(0.0, limits.training_s - training_done_s)


def plan_budget(
    *,
    limits: Limits,
    elapsed_s: float,
    training_done_s: float,
    submission_s: float,
    measured: Measured,
    trial_measured: Measured,
    schedule: Schedule,
    slots: int,
    gpu_share: float = 1.0,
    remeasured: int = 0,
    running: int = 0,
    promised_s: float = 0.0,
) -> BudgetPlan:
    """Take full run and submission off the top of the remaining time; the rest belongs to the search.

    Args:
        limits: of the task.
        elapsed_s: wall clock since the run was opened (down-time counts).
        training_done_s: training so far, trials that still run included.
        submission_s: as `submission_reserve`.
        measured: times on all GPUs of train.sh.
        trial_measured: times of a search trial.
        schedule: steps of full run and trials.
        slots: trials that can run side by side; each of them spends training time.
        gpu_share: of train.sh's GPUs that a trial has.
        remeasured: exact trials that are to follow the search.
        running: search trials that run now.
        promised_s: training that those are still going to spend, by all GPUs of train.sh.
    """
    wall_s, training_s = training_left(limits, elapsed_s, training_done_s, submission_s)
    full_run_s = measured.training_s(schedule.total_steps, schedule.save_freq)
    ends_s = min(wall_s, training_s)
    fits = ends_s >= full_run_s
    rest = schedule.total_steps - schedule.rungs[-1]
    final_s = full_run_s if fits else measured.training_s(rest, schedule.rungs[0])
    at_most_s = ends_s if fits else min(ends_s, _CONTINUATION * min(limits.total_s, limits.training_s))
    final_s = min(at_most_s, RESERVE * final_s)
    reserved_s = final_s + RESERVE * remeasured * schedule.trial_s(measured, schedule.rungs[-1])
    search_wall_s, search_training_s = max(0.0, wall_s - reserved_s), max(0.0, training_s - reserved_s)
    trials, last_rung = 0, None
    for rung in schedule.rungs:
        trial_s = schedule.trial_s(trial_measured, rung)
        rounds, paid = search_wall_s // trial_s, (search_training_s - promised_s) // (trial_s * gpu_share)
        if (fitting := int(min(slots * rounds, paid))) > 0:
            trials, last_rung = fitting, rung
    side_by_side = max(1, min(slots, running + trials))
    search_s = min(search_wall_s, search_training_s / (side_by_side * gpu_share))
    reason = (
        f"{_describe(measured)}; {wall_s:.0f} s of wall clock remain before {submission_s:.0f} s for the submission and a "
        f"margin of {limits.margin_s:.0f} s, and {training_s:.0f} s of training; a full run of {schedule.total_steps} steps "
        f"of {full_run_s:.0f} s {'fits' if fits else 'no longer fits'}"
    )
    reason += f"; search may last {search_s:.0f} s: {trials} trials to step {last_rung} fit" if last_rung else ""
    return BudgetPlan(search_s, ends_s, full_run_s, final_s, submission_s, fits, trials, last_rung, reason)


def _describe(measured: Measured) -> str:
    text = f"{measured.start_up_s:.0f} s start-up, {measured.step_s:.2f} s per step"
    shown = {"save": measured.save_s, "validation": measured.validate_s}
    return ", ".join([text, *(f"{value:.2f} s per {name}" for name, value in shown.items() if value is not None)])


def last_save(measured: Measured, *, step: int, save_freq: int, total_steps: int, left_s: float) -> int:
    """The last save that a training which has done `step` can finish in time; `step` itself when not even the next one.

    What is trained after it would be lost, so that nothing is waited for that cannot be saved.
    """
    while step < total_steps:
        following = min(total_steps, (step // save_freq + 1) * save_freq)
        left_s -= measured.steps_s(following - step, saves=1)
        if left_s < 0:
            break
        step = following
    return step
