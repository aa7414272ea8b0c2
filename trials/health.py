"""What went wrong with a trial, by kind. Pure."""

import math
import re
import signal
from collections.abc import Sequence
from enum import Enum

from trials.guard import CANNOT_WRITE
from trials.metrics import StepMetrics

ATTEMPTS = 3
"""So often in a row a trial may end without any progress for reasons outside its configuration."""


class FailureKind(str, Enum):
    """Kinds of failure. `blames_configuration` and `may_retry` are their rules; a full disk stops the run."""

    OUT_OF_MEMORY = "out_of_memory"
    NON_FINITE = "non_finite"
    BAD_CONFIGURATION = "bad_configuration"
    STALL = "stall"
    STARTUP_HANG = "startup_hang"
    DISK_FULL = "disk_full"
    PREEMPTED = "preempted"
    """Asked to end from outside (SIGTERM), as clusters do before they take a machine away."""
    KILLED = "killed"
    ENDED_EARLY = "ended_early"
    NO_PROGRESS = "no_progress"
    """A resumed attempt ended well without a single step, as verl before 0.8.0 does at the end of an epoch."""
    UNKNOWN = "unknown"

    @property
    def blames_configuration(self) -> bool:
        """Whether the sampler should learn that this region is bad."""
        return self in (FailureKind.OUT_OF_MEMORY, FailureKind.NON_FINITE)

    def may_retry(self, failed_attempts: int, made_a_step: bool) -> bool:
        """Whether a trial whose attempt ended like this gets another one, from its last checkpoint.

        Args:
            failed_attempts: how many in a row, without a score in between, had failed before.
            made_a_step: whether the attempt got as far as a training step. Memory that runs out before one may still
                belong to the trial that had the GPUs before.
        """
        return failed_attempts + 1 < self._attempts(made_a_step)

    def _attempts(self, made_a_step: bool) -> int:
        if self in (FailureKind.PREEMPTED, FailureKind.KILLED, FailureKind.STALL, FailureKind.NO_PROGRESS):
            return ATTEMPTS
        if self in (FailureKind.STARTUP_HANG, FailureKind.ENDED_EARLY, FailureKind.UNKNOWN):
            return 2
        return 2 if self is FailureKind.OUT_OF_MEMORY and not made_a_step else 1


_SIGNS: list[tuple[FailureKind, re.Pattern[str]]] = [
    (FailureKind.DISK_FULL, re.compile(r"No space left on device|OSError: \[Errno 28\]|Disk quota exceeded")),
    (
        FailureKind.OUT_OF_MEMORY,
        re.compile(r"CUDA out of memory|OutOfMemoryError|Cannot allocate memory|oom-kill", re.I),
    ),
    (
        FailureKind.BAD_CONFIGURATION,
        re.compile(
            r"hydra\.errors|ConfigAttributeError|ConfigKeyError|MissingMandatoryValue|Could not override|is not in struct|"
            r"OverrideParseException|No module named|OverlayError|command not found"
        ),
    ),
]
_ERROR_LINE = re.compile(r"^(?:\x1b\[[0-9;]*m|\(.*?pid=.*?\)|\s)*[\w.]*(?:Error|Exception|Killed|error:)\b.*")
_NON_FINITE_STREAK = 3


def classify_exit(
    exit_code: int | None, log_tail: Sequence[str], last_step: int, expected_step: int
) -> tuple[FailureKind, str]:
    """Kind and one-line reason of an attempt that ended before its expected step."""
    log_tail = [
        line for line in log_tail if "Warning" not in line
    ]  # verl warns about every engine that is not installed
    text = "\n".join(log_tail)
    decisive = decisive_line(log_tail)
    where = f"ended with exit code {exit_code} after step {last_step} of {expected_step}"
    if exit_code == CANNOT_WRITE:
        return FailureKind.DISK_FULL, f"{where}: the attempt's folder cannot be written"
    for kind, pattern in _SIGNS:
        match = pattern.search(text)
        if match:
            line = next((line for line in reversed(log_tail) if pattern.search(line)), match[0])
            return kind, f"{where}: {line.strip()[:300]}"
    if exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        return FailureKind.PREEMPTED, f"{where}: asked to end by SIGTERM"
    if exit_code is not None and (exit_code < 0 or exit_code == 128 + signal.SIGKILL):
        return FailureKind.KILLED, f"{where}: killed by a signal"
    if exit_code == 0:
        return FailureKind.ENDED_EARLY, f"{where}, although it reported success"
    return FailureKind.UNKNOWN, f"{where}: {decisive}"


def decisive_line(log_tail: Sequence[str]) -> str:
    """The line of a log that most likely tells why the process ended."""
    for line in reversed(log_tail):
        if _ERROR_LINE.match(line):
            return line.strip()[:300]
    return next((line.strip()[:300] for line in reversed(log_tail) if line.strip()), "the log is empty")


def is_non_finite(history: Sequence[StepMetrics]) -> bool:
    """Whether loss, gradient norm or entropy were non-finite in each of the last three training steps."""
    recent = [metrics for metrics in history if metrics.is_training_step][-_NON_FINITE_STREAK:]
    if len(recent) < _NON_FINITE_STREAK:
        return False
    return all(
        any(
            value is not None and not math.isfinite(value)
            for value in (metrics.get("actor/pg_loss"), metrics.get("actor/grad_norm"), metrics.entropy)
        )
        for metrics in recent
    )
