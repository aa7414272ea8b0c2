"""Log lines of any verl version → StepMetrics. Pure.

verl's console logger prints one line per step: `step:7 - actor/entropy:0.61 - val-core/gsm8k/acc/mean@1:0.5 …`. Around
it stand worker prefixes, colours, `np.float64(…)` and Ray's `[repeated 9x across cluster]`; a data source may itself
contain ` - ` or `/`. A value that is not in the line is unknown (None), never 0.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_SOURCE = re.compile(r"^(\(\w[^()]*pid=[^()]*\)) ?(.*)$", re.DOTALL)
_STEP = re.compile(r"(?:^|\s)step:(\d+) - (.*)$")
_STEP_BEGUN = re.compile(r"(?:^|\s)s(?:t(?:e(?:p(?::\d*(?: -? ?)?)?)?)?)?$")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
_FIELD = re.compile(rf"(?P<key>\S.*?):(?:np\.\w+\()?(?P<value>{_NUMBER}|None)\)?(?: - |\s*$)")

_ENTROPY_KEYS = ("actor/entropy", "actor/entropy_loss")
_DEV_KEY = re.compile(r"^val-core/(?P<source>.+)/(?P<kind>acc|reward)/mean@(?P<k>\d+)$")
_OLD_DEV_KEY = re.compile(r"^val/test_score/(?P<source>.+)$")


@dataclass(frozen=True)
class StepMetrics:
    """The metrics that verl printed for one training step (step 0: validation before training)."""

    step: int
    values: Mapping[str, float]
    """Metric name → value as printed; may be nan or inf."""

    def get(self, *names: str) -> float | None:
        """The first of `names` that the line has, else None (unknown)."""
        return next((self.values[name] for name in names if name in self.values), None)

    @property
    def entropy(self) -> float | None:
        """Mean policy entropy of this step's rollouts, nats per token."""
        return self.get(*_ENTROPY_KEYS)

    @property
    def step_s(self) -> float | None:
        """Seconds that verl spent in this step."""
        return self.get("timing_s/step", "perf/time_per_step")

    @property
    def is_training_step(self) -> bool:
        """Whether the line tells of a policy update, not only of a validation."""
        return any(name.startswith(("actor/", "critic/")) for name in self.values)

    def dev_accuracies(self) -> dict[str, float]:
        """Data source → dev accuracy. `acc` wins over `reward`; with several @k the smallest k (mean over samples)."""
        found: dict[str, tuple[tuple[bool, int], float]] = {}
        for name, value in self.values.items():
            match = _DEV_KEY.match(name)
            if match:
                rank = (match["kind"] != "acc", int(match["k"]))
                if match["source"] not in found or rank < found[match["source"]][0]:
                    found[match["source"]] = (rank, value)
            elif old := _OLD_DEV_KEY.match(name):
                found.setdefault(old["source"], ((True, 0), value))
        return {source: value for source, (_, value) in found.items()}

    def dev_accuracy(self, rows: Mapping[str, int]) -> float | None:
        """Dev accuracy over all data sources, weighted by their rows; None when the step was not validated.

        A source of `rows` that the line lacks makes the result unknown: part of the dev set is not the dev set.
        """
        accuracies = self.dev_accuracies()
        weights = {source: count for source, count in rows.items() if count > 0}
        if not weights or not weights.keys() <= accuracies.keys():
            return None
        return sum(accuracies[source] * count for source, count in weights.items()) / sum(weights.values())

    def to_record(self) -> dict[str, float | None]:
        """What a line of metrics.jsonl holds; non-finite values become null."""
        values = {name: value if math.isfinite(value) else None for name, value in self.values.items()}
        return {"step": self.step, **values}


def metrics_from_json(line: str) -> StepMetrics:
    """The inverse of `StepMetrics.to_record` as a line of JSON; null reads as nan."""
    record: dict[str, Any] = json.loads(line)
    step = int(record.pop("step"))
    return StepMetrics(step, {name: math.nan if value is None else float(value) for name, value in record.items()})


class LineJoiner:
    """Puts step lines together that Ray forwarded in two pieces.

    A worker's log reaches the driver's through a monitor that may read while the worker is still writing a long line.
    The rest then follows as a line of its own, with the same `(TaskRunner pid=812)` before it. A step line from a worker
    is therefore held back until another line from that worker arrives, or until `flush`.
    """

    def __init__(self) -> None:
        self._source = ""
        self._held = ""

    def push(self, line: str) -> StepMetrics | None:
        """Take the next line of the log; returns a step that is now complete."""
        source, text = _split_source(line)
        if not source:
            return _parse_text(text)
        if self._held and source == self._source:
            joined = self._held + text
            if _STEP.search(self._held) is None:  # cut within `step:<number> - `
                self._held = ""
                self._hold(source, joined if _STEP.search(joined) and not _STEP.search(text) else text)
                return None
            if _STEP.search(text) is None and (_FIELD.search(text) or _is_consumed(joined)):
                self._held = joined
                return None
        complete = self.flush() if source == self._source else None
        self._hold(source, text)
        return complete

    def flush(self) -> StepMetrics | None:
        """The step that was held back, if any."""
        text, self._held = self._held, ""
        return _parse_text(text)

    def _hold(self, source: str, text: str) -> None:
        if _STEP.search(text) or _STEP_BEGUN.search(text):
            self._source, self._held = source, text


def parse_line(line: str) -> StepMetrics | None:
    """The metrics of one whole log line, or None when it is not a step line."""
    return _parse_text(_split_source(line)[1])


def _split_source(line: str) -> tuple[str, str]:
    """Ray's `(Name pid=…)` before a line, or "", and the text without colours and progress bars."""
    text = _REPEATED.sub("", _ANSI.sub("", line.rstrip("\r\n").rsplit("\r", 1)[-1]))
    match = _SOURCE.match(text)
    return (match[1], match[2]) if match else ("", text)


def _is_consumed(text: str) -> bool:
    """Whether a step line consists of whole fields up to its end."""
    fields = list(_FIELD.finditer(text))
    return bool(fields) and fields[-1].end() == len(text)


def _parse_text(text: str) -> StepMetrics | None:
    match = _STEP.search(text)
    if match is None:
        return None
    values: dict[str, float] = {}
    for field in _FIELD.finditer(match[2].rstrip()):
        if field["value"] != "None":
            key = field["key"]
            values[key.rsplit(" - ", 1)[-1] if ":" in key else key] = float(field["value"])
    return StepMetrics(int(match[1]), values) if values else None
