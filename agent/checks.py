"""What a check says: its name, what was found, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from agent.errors import PreflightError


@dataclass(frozen=True)
class CheckResult:
    """One line of the table of checks."""

    name: str
    found: str
    problem: str | None = None
    """What is wrong and what to do; None when all is well."""
    is_fatal: bool = True
    """False: the problem is a warning, a run may start."""

    @property
    def state(self) -> Literal["ok", "warning", "failed"]:
        if self.problem is None:
            return "ok"
        return "failed" if self.is_fatal else "warning"


def warning(name: str, found: str, problem: str) -> CheckResult:
    """A result that a person should read and that stops nothing."""
    return CheckResult(name, found, problem, is_fatal=False)


def require_sound(results: Iterable[CheckResult]) -> None:
    """Raise one PreflightError that lists every failed check.

    Raises:
        PreflightError: at least one check failed.
    """
    problems = [f"{result.name}: {result.problem}" for result in results if result.state == "failed"]
    if problems:
        raise PreflightError("the workspace cannot be used: " + " | ".join(problems) + " — nothing was changed")


def first_line(error: Exception) -> str:
    """The first line of an error's text, cut to a readable length."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def format_bytes(size: float) -> str:
    """12.3 GiB, 40 MiB …"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
