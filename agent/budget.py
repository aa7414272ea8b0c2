"""What still fits into the wall clock. Pure: measured times in, a plan with its reason out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Times measured on this workspace, seconds."""

    start_up_s: float
    """From launching a trial to its first step."""
    step_s: float
    """One training step, validation and checkpoint included."""


@dataclass(frozen=True)
class BudgetPlan:
    """How the remaining time is divided."""

    search_ends_s: float
    """Seconds from now at which no search trial may run any more."""
    training_ends_s: float
    """Seconds from now at which a full run must be interrupted."""
    full_run_s: float
    """Expected duration of the full run."""
    submission_s: float
    """Reserve for merge, inference, validation and one retry."""
    full_run_fits: bool
    reason: str


def plan_budget(
    *,
    measured: Measured,
    elapsed_s: float,
    total_s: float,
    training_done_s: float,
    training_limit_s: float,
    total_steps: int,
    inference_limit_s: float,
    concurrent: int,
    remeasure_s: float = 0.0,
) -> BudgetPlan:
    """Take full run and submission off the top of the remaining time; the rest belongs to the search.

    Args:
        measured: start-up and step time of the baseline.
        elapsed_s: wall clock since the run was opened (down-time counts).
        total_s: wall-clock limit of the whole run.
        training_done_s: training seconds already spent, summed over trials.
        training_limit_s: limit of that sum.
        total_steps: steps of the full run.
        inference_limit_s: limit of one inference.
        concurrent: trials that run side by side; each of them spends training time.
        remeasure_s: time of the exact trials that follow a search with proxies.
    """
    full_run_s = 1.15 * (measured.start_up_s + total_steps * measured.step_s)
    submission_s = 2.0 * inference_limit_s
    wall_s = max(0.0, total_s - elapsed_s - submission_s)
    training_s = max(0.0, training_limit_s - training_done_s)
    fits = min(wall_s, training_s) > full_run_s
    reserved_s = (full_run_s if fits else 0.0) + remeasure_s
    search_ends_s = min(wall_s - reserved_s, (training_s - reserved_s) / concurrent)
    reason = (
        f"{measured.start_up_s:.0f} s start-up, {measured.step_s:.2f} s per step; {wall_s:.0f} s of wall clock "
        f"remain before a {submission_s:.0f} s reserve for the submission, and {training_s:.0f} s of training; "
    )
    if fits:
        reason += f"full run of {total_steps} steps takes {full_run_s:.0f} s; search may last {search_ends_s:.0f} s"
    else:
        reason += f"a full run of {full_run_s:.0f} s no longer fits: the best trial's checkpoint will be submitted"
    return BudgetPlan(search_ends_s, min(wall_s, training_s), full_run_s, submission_s, fits, reason)
