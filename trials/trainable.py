"""Ray Tune's view of a trial: one `step()` is the training up to the next validation."""

import errno
from collections.abc import Callable, Iterator
from typing import Any

from ray import tune

from trials.health import FailureKind
from trials.runner import Attempt, Ended, TrialSpec, Validation

Scorer = Callable[[Validation], dict[str, Any]]
"""Validation → at least a finite `objective`."""


class TrialTrainable(tune.Trainable):  # type: ignore[misc]
    """Runs the TrialSpec in `config["spec"]`; every result has step, objective and outcome.

    `outcome` is `running` while the trial could go on, else completed, failed or interrupted. A failed trial reports the
    worst objective instead of raising, so that scheduler and sampler see a finite number.
    """

    def setup(self, config: dict[str, Any], score: Scorer | None = None, worst: float = 0.0) -> None:
        assert score is not None
        self._score, self._worst = score, worst
        self._attempt = Attempt(TrialSpec(**config["spec"]))
        self._events: Iterator[Validation | Ended] = self._attempt.events()
        self._last: dict[str, Any] = {"step": 0, "objective": worst}

    def step(self) -> dict[str, Any]:
        """Wait for the next validation after training started, or for the end."""
        try:
            return self._next_result()
        except OSError as error:  # the run's folder cannot be written
            kind = FailureKind.DISK_FULL if error.errno == errno.ENOSPC else FailureKind.UNKNOWN
            seconds = float(self._last.get("seconds", 0.0))
            return self._end(Ended("failed", int(self._last["step"]), seconds, kind.value, str(error)))

    def _next_result(self) -> dict[str, Any]:
        for event in self._events:
            if isinstance(event, Ended):
                return self._end(event)
            if event.step == 0:
                continue  # the untrained policy, the same for every trial
            self._last = {"step": event.step, "outcome": "running", "seconds": event.seconds, **self._score(event)}
            if event.step == self._attempt.spec.stop_step:
                continue  # the last rung: its result is reported together with the end
            return self._last
        raise AssertionError("events() ends with Ended")

    def _end(self, ended: Ended) -> dict[str, Any]:
        facts = {
            "outcome": ended.outcome, "failure": ended.failure, "ending": ended.reason, "seconds": ended.seconds,
            "start_up_s": ended.start_up_s, "step_s": ended.step_s, "done": True,
        }  # fmt: skip
        if ended.outcome == "failed":
            facts["objective"] = self._worst
        return {**self._last, **facts}

    def cleanup(self) -> None:
        """Called by Tune whenever the trial stops: returns only when all its processes are gone."""
        self._attempt.close()
