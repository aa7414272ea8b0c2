"""The ledger: one append-only file of facts about a run, and the state that follows from them.

Each line of `ledger.jsonl` is one JSON object with `event` and `time` (seconds since the epoch). Appending writes
one line and calls fsync. A torn last line, as a power cut leaves it, is skipped when reading and closed before the
next append. Everything else — status, resume, export, report — is a function of this file.

Events: run_opened, workspace_checked, driver_started, overlay_installed, slots_planned, trial_started, trial_scored,
attempt_failed, attempt_lost, trial_ended, decision, stage_started, stage_done, stage_failed, published,
evaluation_counted, configuration_changed, interrupted, run_finished.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.errors import RunFolderError

SCHEMA = 1

Event = dict[str, Any]


class Ledger:
    """Append and read the events of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **facts: Any) -> Event:
        """Write one event durably and return it.

        Raises:
            RunFolderError: the line could not be written in full (disk full, no permission).
        """
        record: Event = {"event": event, "time": round(time.time(), 3), **facts}
        try:
            with self.path.open("a+b") as file:
                size = file.seek(0, os.SEEK_END)
                torn = size > 0 and not self._ends_with_newline(file, size)
                if torn:
                    record["after_torn_line"] = True
                line = json.dumps(_finite(record), allow_nan=False, default=str) + "\n"
                try:
                    file.write((b"\n" if torn else b"") + line.encode())
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(self.path, size)
                    raise
        except OSError as error:
            raise RunFolderError(
                f"cannot write to {self.path}: {error.strerror}; what was recorded before is intact — free space or fix "
                "the permissions, then `python run_agent.py resume`"
            ) from None
        return record

    @staticmethod
    def _ends_with_newline(file: Any, size: int) -> bool:
        file.seek(size - 1)
        return bool(file.read(1) == b"\n")

    def read(self) -> list[Event]:
        """All whole events, in order. Unreadable lines other than a torn last one are refused.

        Raises:
            RunFolderError: no ledger, or a damaged line in the middle (its number is named).
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise RunFolderError(
                f"no ledger at {self.path} ({error.strerror}); name a run folder that has one"
            ) from None
        return list(self._parse(lines))

    def _parse(self, lines: list[bytes]) -> Iterator[Event]:
        damaged: int | None = None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get("event"), str) or "time" not in record:
                    raise ValueError
            except ValueError:
                damaged = number
                continue
            if damaged is not None and "after_torn_line" not in record:
                raise RunFolderError(
                    f"{self.path}: line {damaged} is damaged; restore the file or remove that line if you know its content"
                )
            damaged = None
            yield record


def _finite(value: Any) -> Any:
    """JSON has no NaN: replace non-finite floats by null, everywhere."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


@dataclass
class Score:
    """One validation of a trial."""

    step: int
    objective: float
    accuracy: float | None = None
    entropy: float | None = None
    """Mean policy entropy over the last steps, nats per token."""
    reason: str = ""
    entropy_ratio: float | None = None
    forecast_ratio: float | None = None
    entropy_score: float | None = None

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "Score":
        """From an event or a result that holds more than a score."""
        return cls(**{key: facts[key] for key in cls.__dataclass_fields__ if key in facts})


@dataclass
class TrialState:
    """What the ledger knows of one trial."""

    trial: str
    kind: str
    """baseline, search, remeasure (a proxy's configuration on all GPUs of train.sh) or full"""
    configuration: dict[str, Any]
    """The overlay's configuration; {} is plain GRPO."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Optuna's parameters."""
    distributions: dict[str, str] = field(default_factory=dict)
    """Parameter → Optuna distribution as JSON."""
    origin: str = ""
    """`baseline`, `plain GRPO`, `preset:<name>`, `optuna`, `re-measurement of <trial>` or `promotion of <trial>`."""
    gpus: int | None = None
    """GPUs it trains on, where that is not simply what train.sh asks."""
    is_proxy: bool = False
    """On fewer GPUs than train.sh asks: its score is no basis for a promotion."""
    attempts: int = 0
    failed_attempts: int = 0
    """Failures in a row without a score in between."""
    resumed_step: int = 0
    """Step of the checkpoint that the newest attempt went on from."""
    started_s: float = 0.0
    ended_s: float | None = None
    outcome: str | None = None
    """completed, stopped or failed; None while it runs or waits for a resume"""
    failure: str | None = None
    """Why its newest attempt failed, until the next one."""
    reason: str = ""
    scores: list[Score] = field(default_factory=list)
    out_of_time: bool = False
    """The clock ended it, not its score."""
    training_s: float = 0.0
    """Seconds all its ended attempts ran."""
    open_since_s: float | None = None
    """What the run had lasted when the attempt began that has not ended; None when there is none."""
    start_up_s: float | None = None
    """As measured by its newest attempt that ended; None when unknown."""
    step_s: float | None = None
    """Likewise: seconds per step, validations and saves included."""

    def spent_s(self, elapsed_s: float) -> float:
        """Seconds of training up to now, those of a running attempt included."""
        return self.training_s + (0.0 if self.open_since_s is None else max(0.0, elapsed_s - self.open_since_s))

    @property
    def label(self) -> str:
        """Where it comes from, in words; a proxy is named as such."""
        origin = self.origin or self.kind
        return f"{origin} (proxy on {self.gpus or 'fewer'} GPUs)" if self.is_proxy else origin

    @property
    def best(self) -> Score | None:
        """The score with the highest objective."""
        return max(self.scores, key=lambda score: score.objective, default=None)

    @property
    def last(self) -> Score | None:
        """The newest score."""
        return max(self.scores, key=lambda score: score.step, default=None)

    def score_at(self, step: int) -> Score | None:
        """Its score at a step, None when it has none there."""
        return next((score for score in self.scores if score.step == step), None)


@dataclass
class RunState:
    """The fold of a ledger."""

    opened: Event | None = None
    elapsed_s: float = 0.0
    """What the run had lasted at the newest event."""
    newest_s: float = 0.0
    """Wall clock of the newest event."""
    boot: Event | None = None
    """The newest event that tells of the boot clock."""
    exact_gpus: int | None = None
    """GPUs that train.sh asks, once slots were planned."""
    drivers: list[Event] = field(default_factory=list)
    trials: dict[str, TrialState] = field(default_factory=dict)
    stages: dict[str, Event] = field(default_factory=dict)
    """Stage → its newest receipt."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    decisions: list[Event] = field(default_factory=list)
    published: list[Event] = field(default_factory=list)
    evaluations: list[Event] = field(default_factory=list)
    """Publications that were handed in."""
    checks: Event | None = None
    finished: Event | None = None
    trouble: Event | None = None
    """The newest stage_failed or interrupted, until a driver starts again."""

    @property
    def baseline(self) -> TrialState | None:
        return next((trial for trial in self.trials.values() if trial.kind == "baseline"), None)

    @property
    def search_trials(self) -> list[TrialState]:
        return [trial for trial in self.trials.values() if trial.kind == "search"]

    @property
    def full_run(self) -> TrialState | None:
        return next((trial for trial in self.trials.values() if trial.kind == "full"), None)

    @property
    def initial_entropy(self) -> float | None:
        """H0 in nats per token, once the baseline has measured it."""
        value = self.stages.get("baseline", {}).get("initial_entropy")
        return float(value) if isinstance(value, (int, float)) and value > 0 else None

    @property
    def training_s(self) -> float:
        """Seconds of training so far, summed over all ended attempts; those of proxies weigh as much as their GPUs."""
        return sum(trial.training_s * self.gpu_share(trial) for trial in self.trials.values())

    def spent_s(self, elapsed_s: float) -> float:
        """The same with what running attempts have spent up to now."""
        return sum(trial.spent_s(elapsed_s) * self.gpu_share(trial) for trial in self.trials.values())

    def gpu_share(self, trial: TrialState) -> float:
        """Of train.sh's GPUs that a trial has; 1 unless it is a proxy."""
        return trial.gpus / self.exact_gpus if trial.is_proxy and trial.gpus and self.exact_gpus else 1.0


def fold(events: Iterable[Event]) -> RunState:
    """The state of a run from its events; unknown events are ignored, so that older agents can read newer runs.

    Raises:
        RunFolderError: a known event lacks facts.
    """
    state = RunState()
    for number, event in enumerate(events, start=1):
        try:
            apply(state, event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFolderError(
                f"event {number} of the ledger ({event['event']}) is not complete ({type(error).__name__}: {error}); "
                "restore the file or remove that line if you know its content"
            ) from None
    return state


def apply(state: RunState, event: Event) -> None:
    """Bring a state up to date with the next event of its ledger."""
    kind = event["event"]
    since_s = max(0.0, event["time"] - state.newest_s) if state.opened else 0.0
    state.elapsed_s = float(event.get("elapsed_s", state.elapsed_s + since_s))
    state.newest_s = float(event["time"])
    if "boot_id" in event:
        state.boot = {**event, "boot_s": float(event["boot_s"]), "elapsed_s": state.elapsed_s}
    if kind == "run_opened":
        state.opened = event
    elif kind == "driver_started":
        state.drivers.append(event)
        state.trouble = None
    elif kind == "workspace_checked":
        state.checks = event
    elif kind == "slots_planned":
        state.exact_gpus = event.get("exact_gpus")
    elif kind.startswith(("trial_", "attempt_")):
        _apply_trial(state, event)
    elif kind == "stage_done":
        state.stages[event["stage"]] = event
        spent = state.stage_seconds.get(event["stage"], 0.0)
        state.stage_seconds[event["stage"]] = spent + float(event.get("seconds", 0.0))
    elif kind == "decision":
        state.decisions.append(event)
    elif kind == "published":
        state.published.append(event)
    elif kind == "evaluation_counted":
        state.evaluations.append(event)
    elif kind in ("stage_failed", "interrupted"):
        state.trouble = event
    elif kind == "run_finished":
        state.finished = event


def _apply_trial(state: RunState, event: Event) -> None:
    name = event["trial"]
    if event["event"] == "trial_started":
        trial = state.trials.get(name)
        if trial is None:
            trial = state.trials[name] = TrialState(
                trial=name,
                kind=event["kind"],
                configuration=event["configuration"],
                parameters=event.get("parameters", {}),
                distributions=event.get("distributions", {}),
                origin=event.get("origin", ""),
                gpus=event.get("gpus"),
                is_proxy=bool(event.get("is_proxy", False)),
                started_s=event["time"],
            )
        trial.attempts = max(trial.attempts, int(event["attempt"]))
        trial.resumed_step = int(event.get("resumed_step") or 0)
        trial.open_since_s, trial.out_of_time = state.elapsed_s, False
        trial.outcome = trial.failure = trial.ended_s = None
        return
    trial = state.trials[name]
    if event["event"] == "trial_scored":
        score = Score.from_facts(event)
        if trial.last is None or score.step > trial.last.step:
            trial.failed_attempts = 0
        trial.scores = [old for old in trial.scores if old.step != score.step] + [score]
    elif event["event"] == "attempt_failed":
        trial.failure, trial.reason = event["failure"], event.get("reason", "")
        trial.failed_attempts += 1
        _end_attempt(state, trial, event)
    elif event["event"] == "attempt_lost":
        _end_attempt(state, trial, event)
    elif event["event"] == "trial_ended":
        trial.outcome = event["outcome"]
        trial.failure = event.get("failure")
        trial.reason = event.get("reason", "")
        trial.ended_s = event["time"]
        trial.out_of_time = bool(event.get("out_of_time", False))
        _end_attempt(state, trial, event)


def _end_attempt(state: RunState, trial: TrialState, event: Event) -> None:
    """Count the seconds of an attempt: as measured, or from its start to this event where nobody measured them."""
    seconds = event.get("seconds")
    trial.training_s = trial.spent_s(state.elapsed_s) if seconds is None else trial.training_s + float(seconds)
    trial.open_since_s = None
    for name in ("start_up_s", "step_s"):
        if event.get(name) is not None:
            setattr(trial, name, float(event[name]))
