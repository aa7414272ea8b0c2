"""The steps of a running attempt, read from its log while it grows, and from verl's file logger where that is live.

Only whole lines are read: a line that a killed trainer left unfinished may end within a number.
"""

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from trials.metrics import LineJoiner, StepMetrics, parse_file_line

FILE_LOGGER_VARIABLE = "VERL_FILE_LOGGER_PATH"
"""verl's file logger writes to this path when `trainer.logger` contains `file`."""

_JOIN_WAIT_S = 0.4
"""The rest of a step line that arrived in pieces follows within this time."""
_TAIL_LINES = 200
_LONGEST_LINE = 2**20


class LogReader:
    """Reads what was added to an attempt's files since the last call."""

    def __init__(self, log: Path, file_log: Path) -> None:
        """`log` is the console output of the attempt, `file_log` what verl's file logger writes, if it does."""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines of the console output."""
        self._console, self._file = GrowingFile(log), GrowingFile(file_log)
        self._joiner = LineJoiner()
        self._holding_since: float | None = None
        self._teller: dict[int, str] = {}
        """Step → which of the two files told of it first; the other one is not asked again."""

    def read(self, is_final: bool) -> Iterator[StepMetrics]:
        """The steps that are new; `is_final` when no more can come."""
        for line in self._console.read_lines():
            self.tail.append(line)
            yield from self._told_by("console", self._joiner.push(line))
        yield from self._told_by("console", self._flush_joiner(is_final))
        steps = [metrics for line in self._file.read_lines() if (metrics := parse_file_line(line)) is not None]
        yield from self._told_by("file", steps)

    def _flush_joiner(self, is_final: bool) -> list[StepMetrics]:
        if not self._joiner.is_holding:
            self._holding_since = None
            return []
        now = time.monotonic()
        self._holding_since = self._holding_since or now
        if not is_final and now - self._holding_since < _JOIN_WAIT_S:
            return []
        self._holding_since = None
        return self._joiner.flush()

    def _told_by(self, teller: str, steps: list[StepMetrics]) -> Iterator[StepMetrics]:
        for metrics in steps:
            if self._teller.setdefault(metrics.step, teller) == teller:
                yield metrics


class GrowingFile:
    """The whole lines that are appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    def read_lines(self) -> list[str]:
        """New whole lines; [] when the file does not exist (yet)."""
        try:
            with self._path.open("rb") as file:
                if self._path.stat().st_size < self._offset:  # opened anew by its writer
                    self._offset, self._partial = 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-_LONGEST_LINE:]  # progress bars alone make one endless line
        return [line.decode("utf-8", "replace") for line in lines]
