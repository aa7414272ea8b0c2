"""How long a run has lasted, by clocks that nobody can set back.

The rule: within one boot of the machine, the boot clock counts (CLOCK_BOOTTIME: never stepped, goes on while the machine
is suspended); from one boot to the next, or on another machine, the wall clock counts, since the newest event of the ledger
or the newest step line of a training, and never less than nothing. So the down-time of a run counts, and a wall clock that
steps by an hour, back or forth, while the machine is up changes nothing. Epoch time knows no daylight saving time.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agent.ledger import RunState


class TimeSource(Protocol):
    """The clocks of a machine."""

    @property
    def boot_id(self) -> str:
        """Another one after each boot."""

    def boot_s(self) -> float:
        """Seconds since the boot, suspended ones included."""

    def wall_s(self) -> float:
        """Seconds since the epoch, as far as the machine knows."""


class SystemTime:
    """The clocks of this machine."""

    @property
    def boot_id(self) -> str:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

    def boot_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        return time.time()


@dataclass(frozen=True)
class RunClock:
    """The seconds since a run was opened."""

    source: TimeSource
    offset_s: float
    """What the run had lasted when the boot clock stood at 0."""

    def elapsed_s(self) -> float:
        return self.offset_s + self.source.boot_s()

    def stamp(self) -> dict[str, float]:
        """What each event of the ledger gets."""
        return {"time": round(self.source.wall_s(), 3), "elapsed_s": round(self.elapsed_s(), 3)}


def boot_facts(source: TimeSource) -> dict[str, Any]:
    """What run_opened and driver_started tell of the boot clock; read by `start_run_clock`."""
    return {"boot_id": source.boot_id, "boot_s": round(source.boot_s(), 3)}


def start_run_clock(state: RunState, source: TimeSource, seen: Iterable[tuple[float, float]] = ()) -> RunClock:
    """The clock of a run by the rule above.

    Args:
        state: the fold of its ledger.
        source: the machine's clocks.
        seen: what the run had lasted and what the wall clock showed at other moments, as the logs of trainings tell.
    """
    boot_s = source.boot_s()
    if state.boot is not None and state.boot["boot_id"] == source.boot_id and boot_s >= state.boot["boot_s"]:
        elapsed_s = state.boot["elapsed_s"] + boot_s - state.boot["boot_s"]
    else:
        known_s, known_wall_s = max([(state.elapsed_s, state.newest_s), *seen])
        elapsed_s = known_s + max(0.0, source.wall_s() - known_wall_s)
    return RunClock(source, elapsed_s - boot_s)
