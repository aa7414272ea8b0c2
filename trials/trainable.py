"""Ray's view of a trial: Tune's trainable, and an actor that runs one attempt on the node that has the GPUs.

Both run inside a Ray worker whose `CUDA_VISIBLE_DEVICES` names the GPUs that Ray reserved; the training script inherits it.
"""

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

from trials.health import FailureKind
from trials.runner import Attempt, Ended, TrialSpec, Validation

Scorer = Callable[[Validation], dict[str, Any]]
"""Validation → at least a finite `objective`."""


@dataclass(frozen=True)
class Place:
    """Where an attempt runs; written as `place.json` into its folder as soon as it has a slot."""

    host: str
    node_id: str
    """Ray's id of the node."""
    gpus: str | None
    """CUDA_VISIBLE_DEVICES; None when it is not set."""


def write_place(spec: TrialSpec) -> None:
    """Tell the driver, over the filesystem, that the attempt has a slot and which."""
    node_id = ray.get_runtime_context().get_node_id()
    place = Place(socket.gethostname(), node_id, os.environ.get("CUDA_VISIBLE_DEVICES"))
    spec.attempt_folder.mkdir(parents=True, exist_ok=True)
    (spec.attempt_folder / "place.json").write_text(json.dumps(asdict(place)), encoding="utf-8")


def read_place(attempt_folder: Path) -> Place | None:
    """Where an attempt runs, None while it waits for a slot."""
    try:
        return Place(**json.loads((attempt_folder / "place.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class TrialTrainable(tune.Trainable):  # type: ignore[misc]
    """Runs the TrialSpec in `config["spec"]`; every result has step, objective and outcome. One `step()` is the training up
    to the next validation.

    `outcome` is `running` while the trial could go on, else completed, failed or interrupted. A failed trial reports the
    worst objective instead of raising, so that scheduler and sampler see a finite number. A worker serves one trial after
    the other: starting a process and importing Ray costs seconds in which the slot would be idle.
    """

    def setup(
        self,
        config: dict[str, Any],
        score: Scorer | None = None,
        worst: float = 0.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is the driver's, for a worker that Ray started on another node."""
        assert score is not None
        os.environ.update(environment or {})
        self._score, self._worst = score, worst
        self._begin(config)

    def _begin(self, config: dict[str, Any]) -> None:
        self._attempt = Attempt(TrialSpec(**config["spec"]))
        self._events: Iterator[Validation | Ended] = self._attempt.events()
        self._last: dict[str, Any] = {"step": 0, "objective": self._worst}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial in this slot; what is left of the one before, e.g. after a stop by ASHA, is ended first."""
        self._attempt.close()
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Wait for the next validation after training started, or for the end."""
        try:
            if not self._last["step"]:
                write_place(self._attempt.spec)
            return self._next_result()
        except OSError as error:  # the run's folder cannot be written
            kind = FailureKind.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailureKind.UNKNOWN
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


class NodeAttempt:
    """One attempt inside a Ray actor, for the baseline, re-measurements and the full run on a cluster."""

    def __init__(self, spec: TrialSpec, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._attempt = Attempt(spec)

    def place(self) -> None:
        """Return once the actor has its slot."""
        write_place(self._attempt.spec)

    def events(self, waited_s: float) -> Iterator[Validation | Ended]:
        """As `Attempt.events`, within what waiting for the slot has left of the time limit."""
        spec = self._attempt.spec
        if spec.time_limit_s is not None:
            self._attempt = Attempt(replace(spec, time_limit_s=spec.time_limit_s - waited_s))
        try:
            yield from self._attempt.events()
        finally:
            self._attempt.close()
