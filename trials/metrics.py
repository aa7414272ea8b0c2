"""Log lines of any verl version → StepMetrics. Pure.

verl's console logger prints one line per step: `step:7 - actor/entropy:0.61 - val-core/gsm8k/acc/mean@1:0.5 …`. Around
it stand worker prefixes, colours, progress bars, `np.float64(…)` and Ray's `[repeated 9x across cluster]`; a data source
may itself contain ` - ` or `/`. verl's file logger writes the same as JSON. A value that is not in the line is unknown
(None), never 0.

    version        dev accuracy of a source                  entropy                numbers          file logger
    0.3.0.post1    val/test_score/<source>                   actor/entropy_loss     3 decimals       none
    0.4.1          val-core/<source>/(acc|reward)/mean@<k>   actor/entropy          3 decimals       none
    0.5.0          same                                      actor/entropy          repr             none
    0.6.1          same                                      actor/entropy          repr             written in blocks
    0.7.1 – 0.9.1  same                                      both names occur       repr             live, NaN as null
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
_STEP = re.compile(r"(?:^|[\s\]])step:(\d+) - (.*)$")
_STEP_BEGUN = re.compile(r"(?:^|\s)s(?:t(?:e(?:p(?::\d*(?: -? ?)?)?)?)?)?$")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
_FIELD = re.compile(rf"(?P<key>\S.*?):(?:np\.\w+\()?(?P<value>{_NUMBER}|None)\)?(?: - |\s*$)")
_GOES_ON = re.compile(r"[-+.\deE]*\)? ?(?:- [\w-]+/|$)")
"""How the rest of a line begins that was cut where it looked whole: digits of the last value, then ` - <group>/`."""

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

    def is_validated(self, metric: str | None = None) -> bool:
        """Whether the line has a dev accuracy, or `metric` where that was chosen to be it."""
        return metric in self.values if metric else bool(self.dev_accuracies())

    def dev_accuracy(self, rows: Mapping[str, int], metric: str | None = None) -> float | None:
        """Dev accuracy over all data sources, weighted by their rows; None when it is unknown or not finite.

        A source of `rows` that the line lacks makes the result unknown: part of the dev set is not the dev set.

        Args:
            rows: data source → rows.
            metric: name of the one metric to take instead.
        """
        if metric:
            value = self.values.get(metric)
            return value if value is not None and math.isfinite(value) else None
        accuracies = self.dev_accuracies()
        weights = {source: count for source, count in rows.items() if count > 0}
        if not weights or not weights.keys() <= accuracies.keys():
            return None
        mean = sum(accuracies[source] * count for source, count in weights.items()) / sum(weights.values())
        return mean if math.isfinite(mean) else None

    def to_record(self) -> dict[str, float | None]:
        """What a line of metrics.jsonl holds; non-finite values become null."""
        values = {name: value if math.isfinite(value) else None for name, value in self.values.items()}
        return {"step": self.step, **values}


def metrics_from_json(line: str) -> StepMetrics:
    """The inverse of `StepMetrics.to_record` as a line of JSON; null reads as nan."""
    record: dict[str, Any] = json.loads(line)
    step = int(record.pop("step"))
    return StepMetrics(step, {name: math.nan if value is None else float(value) for name, value in record.items()})


def parse_file_line(line: str) -> StepMetrics | None:
    """A line of verl's file logger, `{"step": 7, "data": {…}}`; null reads as nan. None when it is anything else."""
    try:
        record = json.loads(line)
        step, data = int(record["step"]), dict(record["data"])
    except (ValueError, KeyError, TypeError):
        return None
    numbers = {name: math.nan if value is None else value for name, value in data.items()}
    return StepMetrics(step, {name: float(value) for name, value in numbers.items() if isinstance(value, (int, float))})


class LineJoiner:
    """Puts step lines together that reached the log in several pieces.

    A worker's log reaches the driver's through a monitor that may read while the worker is still writing a long line.
    The rest then follows as a line of its own, with the same `(TaskRunner pid=812)` before it. Terminals and log
    collectors wrap long lines without a prefix. A step line is therefore held back until another line of the same origin
    arrives, or until `flush`.
    """

    def __init__(self) -> None:
        self._held: dict[str, str] = {}
        """Origin → the step line, or its beginning, that may go on."""

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def push(self, line: str) -> list[StepMetrics]:
        """Take the next line of the log; returns the steps that are now complete."""
        source, text = _split_source(line)
        held = self._held.pop(source, None)
        if held is not None and _goes_on(held, text, is_plain=not source):
            self._held[source] = held + text
            return []
        if _STEP.search(text) or _STEP_BEGUN.search(text):
            self._held[source] = text
        complete = _parse_text(held) if held is not None else None
        return [complete] if complete is not None else []

    def flush(self) -> list[StepMetrics]:
        """The steps that were held back."""
        held, self._held = self._held, {}
        return [metrics for metrics in map(_parse_text, held.values()) if metrics is not None]


def parse_line(line: str) -> StepMetrics | None:
    """The metrics of one whole log line, or None when it is not a step line."""
    return _parse_text(_split_source(line)[1])


def _goes_on(held: str, text: str, *, is_plain: bool) -> bool:
    """Whether `text` is the rest of the line that `held` begins. Plain lines have no worker's name before them."""
    if _STEP.search(text) is not None:
        return False
    if _STEP.search(held) is None:  # cut within `step:<number> - `
        return _STEP.search(held + text) is not None
    rest = held[_consumed_length(held) :]
    if not rest and not held.endswith(" - "):
        is_digits = not text.strip(" .0123456789")
        return bool(_GOES_ON.match(text)) and not (is_plain and is_digits)
    # Cut within a field: `<group>/<name>:<value>`, where only names of data sources have spaces.
    cut = _FIELD.match(rest + text)
    name = cut["key"] if cut else rest + text
    return name.startswith("val") or (" " not in name.strip() and ("/" in name or not cut))


def _split_source(line: str) -> tuple[str, str]:
    """Ray's `(Name pid=…)` before a line, or "", and the text without colours and progress bars."""
    pieces = _ANSI.sub("", line.rstrip("\r\n")).split("\r")
    text = _REPEATED.sub("", next((piece for piece in reversed(pieces) if _STEP.search(piece)), pieces[-1]))
    match = _SOURCE.match(text)
    return (match[1], match[2]) if match else ("", text)


def _consumed_length(text: str) -> int:
    """How much of a step line consists of whole fields."""
    return max((field.end() for field in _FIELD.finditer(text)), default=0)


def _parse_text(text: str) -> StepMetrics | None:
    match = _STEP.search(text)
    if match is None:
        return None
    values: dict[str, float] = {}
    for field in _FIELD.finditer(match[2].rstrip()):
        if field["value"] != "None":
            values[_last_key(field["key"])] = float(field["value"])
    return StepMetrics(int(match[1]), values) if values else None


def _last_key(key: str) -> str:
    """A field's key without the fields before it whose value is no number; a data source may hold ` - ` and `:`."""
    if ":" not in key or key.startswith("val"):
        return key
    return key.rsplit(" - ", 1)[-1]
