"""A run in no time: the real pipeline, its decisions and its ledger on simulated clocks, trainings and submissions.

What starts processes is replaced: attempts write the step lines and checkpoints that verl would have written by the
simulated time, the search starts and stops trials without Ray. Everything else is the product's own.
"""

import functools
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import agent.config
import agent.pipeline
import agent.run_folder
import agent.search
import agent.submitting
import agent.trial_runs
from agent.config import AgentConfig, load_config
from agent.errors import StageError
from agent.pipeline import Pipeline
from agent.run_folder import RunFolder, create_run_folder
from agent.submission import LOGITS, RESULTS, Submission, file_sha256
from agent.workspace import Workspace, read_manifest
from scripted_workspace import build_scripted_workspace
from trials.runner import Ended, TrialSpec, Validation

H = 3600.0
_read_space_once = functools.cache(agent.config.read_space)


class Killed(BaseException):
    """The agent's process is gone at this moment."""


@dataclass
class FakeTime:
    """The clocks of a simulated machine. `now` is the truth; what happens meanwhile is scheduled."""

    now: float = 1000.0
    boot_id: str = "first boot"
    booted: float = 0.0
    wall_error: float = 0.0
    scheduled: list[tuple[float, float | None]] = field(default_factory=list)
    """(when, by how much the wall clock steps, or None for the end of the agent's process)."""

    def boot_s(self) -> float:
        return self.now - self.booted

    def wall_s(self) -> float:
        return self.wall_s_at(self.now)

    def wall_s_at(self, when: float) -> float:
        return 1.8e9 + when + self.wall_error

    def wait_until(self, when: float) -> None:
        while self.scheduled and self.scheduled[0][0] <= when:
            at, step = self.scheduled.pop(0)
            self.now = max(self.now, at)
            if step is None:
                raise Killed
            self.wall_error += step
        self.now = max(self.now, when)

    def wait(self, seconds: float) -> None:
        self.wait_until(self.now + seconds)

    def is_down(self, seconds: float, reboots: bool) -> None:
        """Nothing runs for so long."""
        self.now += seconds
        if reboots:
            self.boot_id, self.booted = f"boot at {self.now}", self.now


@dataclass(frozen=True)
class World:
    """How long things take, in seconds; the numbers of a training on 8 GPUs."""

    start_up_s: float = 180.0
    step_s: float = 60.0
    trial_factor: float = 1.0
    """Steps of search trials take so many times as long as the baseline's …"""
    full_factor: float = 1.0
    """… and those of the full run."""
    save_s: float = 60.0
    validate_s: float = 90.0
    merge_s: float = 120.0
    inference_s: float = 480.0
    hung_inferences: int = 0
    """So many inferences take all their time and fail, the first submission's not counted."""
    check_s: float = 120.0
    stop_s: float = 20.0
    """Ending a training that is interrupted."""
    asha_stops: tuple[str, ...] = ()
    """Trials that are stopped at their first rung."""


class SimulatedAttempt:
    """One training: its step lines and checkpoints appear as the simulated time passes."""

    def __init__(
        self, time: FakeTime, world: World, spec: TrialSpec, factor: float, save_freq: int, checkpoints: Path
    ) -> None:
        self.time, self.spec, self.began = time, spec, time.now
        self._folder, self._checkpoints = Path(spec.folder), checkpoints
        self._save_freq, self._world = save_freq, world
        self._step_s = world.step_s * factor
        self._last = spec.stop_step or spec.total_steps
        self._step, self._at = spec.resumed_step, self.began + world.start_up_s

    def is_saved(self, step: int) -> bool:
        return step % self._save_freq == 0 or step == self.spec.total_steps

    def _end_of(self, step: int, previous: float) -> float:
        return previous + self._step_s + self.is_saved(step) * (self._world.save_s + self._world.validate_s)

    def next_validation(self) -> tuple[int, float]:
        """The next validated step, and when its line appears."""
        step = min(self.spec.total_steps, (self._step // self._save_freq + 1) * self._save_freq)
        saved_s = self._world.save_s + self._world.validate_s
        return step, self._at + (step - self._step) * self._step_s + saved_s

    def catch_up(self) -> None:
        """Write what the training has written by now."""
        lines = []
        while self._step < self._last and (end := self._end_of(self._step + 1, self._at)) <= self.time.now + 1e-3:
            self._step, self._at = self._step + 1, end
            lines.append(json.dumps(self._line(self._step, end)))
            if self.is_saved(self._step):
                self._save(self._step)
        own = self.spec.attempt_folder
        own.mkdir(parents=True, exist_ok=True)
        for name, true in (("spec.json", self.began), ("log", self.time.now)):
            (own / name).touch()
            os.utime(own / name, (self.time.wall_s_at(true), self.time.wall_s_at(true)))
        with (self._folder / "metrics.jsonl").open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        if lines:
            os.utime(self._folder / "metrics.jsonl", (self.time.wall_s_at(self._at), self.time.wall_s_at(self._at)))

    def _line(self, step: int, at: float) -> dict[str, Any]:
        line = {"step": step, "attempt": self.spec.attempt, "seconds": at - self.began}
        line["actor/entropy"] = entropy_at(step, self.spec.trial)
        if self.is_saved(step):
            accuracy = accuracy_at(step, self.spec.trial)
            line |= {"val-core/a - b/acc/mean@1": accuracy, "val-core/c/acc/mean@1": accuracy}
            line |= {"timing_s/save_checkpoint": self._world.save_s, "timing_s/testing": self._world.validate_s}
        return line

    def _save(self, step: int) -> None:
        actor = self._checkpoints / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True, exist_ok=True)
        for path in (actor / "model_world_size_1_rank_0.pt", actor.parent / "data.pt"):
            with zipfile.ZipFile(path, "w") as file:
                file.writestr("data", "x")
        (self._checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))

    def validation(self) -> Validation:
        step, name = self._step, self.spec.trial
        return Validation(step, accuracy_at(step, name), entropy_at(step, name), self.seconds)

    @property
    def seconds(self) -> float:
        return self.time.now - self.began

    def events(self) -> Iterator[Validation | Ended]:
        """As `trials.runner.Attempt.events`; the caller catches up when time ends here."""
        limit = self.began + self.spec.time_limit_s if self.spec.time_limit_s is not None else None
        while self._step < self._last:
            step, at = self.next_validation()
            if limit is not None and limit < at:
                self.time.wait_until(limit)
                self.catch_up()
                yield self._ended("stopped", f"its time of {self.spec.time_limit_s:.0f} s is over")
                return
            self.time.wait_until(at)
            self.catch_up()
            if step == self._step:
                yield self.validation()
        yield self._ended("completed", f"all {self._step} steps done")

    def _ended(self, outcome: str, reason: str) -> Ended:
        return Ended(outcome, self._step, self.seconds, None, reason, self._world.start_up_s, self._step_s)


def entropy_at(step: int, trial: str) -> float:
    return 0.4 * (0.997 if trial == "t000" else 0.9995) ** (step - 1)


def accuracy_at(step: int, trial: str) -> float:
    gain = sum(trial.encode()) % 7 / 100
    return 0.2 + (0.3 + gain) * step / 435


class SimulatedPipeline(Pipeline):
    """The real pipeline; only what starts processes is simulated."""

    def __init__(self, folder: RunFolder, config: AgentConfig, time: FakeTime, world: World, log: "Outcome") -> None:
        super().__init__(folder, config, self._see, time_source=time)
        self.time, self.world, self.log = time, world, log

    def _see(self, event: dict[str, Any]) -> None:
        if event["event"] == "published":
            self.log.published.append(self.time.now - self.log.opened)

    def _plan_slots(self) -> None:
        ask = self.ask
        self.slots = self.config.search.concurrent or ask.exact_gpus // ask.gpus
        self.record("slots_planned", gpus=ask.gpus, exact_gpus=ask.exact_gpus, is_proxy=ask.is_proxy)

    def _install_overlay(self) -> None:
        pass

    def _bake(self, configuration: dict[str, Any]) -> None:
        pass

    def begin(self, spec: TrialSpec) -> SimulatedAttempt:
        trial = self.state().trials[spec.trial]
        factor = {"full": self.world.full_factor, "search": self.world.trial_factor}.get(trial.kind, 1.0)
        save_freq = self.workspace.save_freq if trial.kind == "full" else self.rungs[0]
        return SimulatedAttempt(self.time, self.world, spec, factor, save_freq, self.checkpoints_of(trial))

    def _run_attempt(self, spec: TrialSpec, on_validation: Callable[[Validation], str | None]) -> Ended:
        attempt = self.begin(spec)
        try:
            for event in attempt.events():
                if isinstance(event, Ended):
                    return self._interrupted(event) if event.outcome == "stopped" else event
                if reason := on_validation(event):
                    return self._interrupted(Ended("stopped", event.step, event.seconds, reason=reason))
        finally:
            attempt.catch_up()
            self.log.training_s += attempt.seconds
        raise AssertionError

    def _interrupted(self, ended: Ended) -> Ended:
        self.time.wait(self.world.stop_s)
        return replace(ended, seconds=ended.seconds + self.world.stop_s)

    # ---- what replaces agent.search and agent.submission -----------------------------------------------------------

    def simulate_search(self, plan: Any, record: Any, state: Any, prepare: Any, score: Any, **given: Any) -> None:
        """Trials side by side, without Ray: repeated ones first, then new ones."""
        share = plan.ask.gpus / plan.ask.exact_gpus
        again = [trial.trial for trial in state.search_trials if trial.outcome is None]
        ended = sum(trial.outcome is not None for trial in state.search_trials)
        to_start, number, running = plan.trials - ended, len(state.trials), []
        attempts = {trial.trial: trial.attempts for trial in state.trials.values()}
        try:
            while not given["time_is_over"]():
                while len(running) < plan.concurrent and to_start and given["may_start"]():
                    name = again.pop(0) if again else f"t{number:03d}"
                    number, to_start = number + (name not in attempts), to_start - 1
                    spec = prepare(name, attempts.get(name, 0) + 1, "search", {})
                    record("trial_started", trial=name, attempt=spec.attempt, resumed_step=spec.resumed_step,
                           kind="search", origin="optuna", configuration={}, gpus=plan.ask.gpus,
                           is_proxy=plan.ask.is_proxy)  # fmt: skip
                    running.append(self.begin(spec))
                if not running:
                    return
                nearest = min(running, key=lambda attempt: attempt.next_validation()[1])
                step, at = nearest.next_validation()
                self.time.wait_until(min(at, self.time.now + 60))
                if self.time.now < at:
                    continue
                nearest.catch_up()
                name, seconds = nearest.spec.trial, nearest.seconds
                record("trial_scored", trial=name, **score(nearest.validation()))
                is_done = step >= (nearest.spec.stop_step or 0)
                if is_done or name in self.world.asha_stops:
                    running.remove(nearest)
                    self.log.training_s += seconds * share
                    step_s = (seconds - self.world.start_up_s) / (step - nearest.spec.resumed_step)
                    record("trial_ended", trial=name, outcome="completed" if is_done else "stopped", seconds=seconds,
                           step=step, start_up_s=self.world.start_up_s, step_s=step_s)  # fmt: skip
                    given["on_end"]()
            self.time.wait(self.world.stop_s)
        finally:
            for attempt in running:
                attempt.catch_up()
                self.log.training_s += attempt.seconds * share

    def simulate_merge(self, *arguments: Any, **options: Any) -> None:
        self.time.wait(self.world.merge_s)

    def simulate_inference(self, workspace: Workspace, model: Path, results: Path, **options: Any) -> None:
        if self.log.published and self.log.hung < self.world.hung_inferences:
            self.log.hung += 1
            self.time.wait(options["timeout_s"])
            raise StageError("inference.sh took too long")
        self.time.wait(min(self.world.inference_s, options["timeout_s"]))
        results.mkdir(parents=True, exist_ok=True)
        for name in (RESULTS, LOGITS):
            (results / name).write_text(f"{model}")

    def simulate_validation(self, results: Path, *_: Any) -> Submission:
        self.time.wait(self.world.check_s)
        digests = {name: file_sha256(results / name) for name in (RESULTS, LOGITS)}
        return Submission(str(results), 12, 0.3, 100.0, 0.5, digests)


@dataclass
class Outcome:
    """What came of a run."""

    folder: RunFolder
    opened: float
    published: list[float] = field(default_factory=list)
    """True seconds from the beginning of the run to each publication."""
    training_s: float = 0.0
    """True seconds of training on all GPUs of train.sh."""
    hung: int = 0
    resumed: list[float] = field(default_factory=list)
    """True seconds from the beginning of the run to each resume."""
    error: str | None = None


def build_long_workspace(root: Path) -> Path:
    """train.sh asks 435 steps on 8 GPUs, a checkpoint every 20."""
    workspace = build_scripted_workspace(root, on_gpus=True)
    script = workspace / "task" / "scripts" / "train.sh"
    text = script.read_text().replace("training_steps=16", "training_steps=435")
    script.write_text(text.replace("save_freq=4", "save_freq=20"))
    return workspace


def simulate(
    workspace: Path, runs: Path, time: FakeTime, world: World, settings: list[str], down: list[tuple[float, bool]]
) -> Outcome:
    """A whole run.

    Args:
        workspace: as `build_long_workspace`.
        runs: where its folder goes.
        time: with what is scheduled, in seconds from now.
        world: how long things take.
        settings: `key=value` of the configuration.
        down: how long nothing runs after each time that the agent was killed, and whether the machine boots meanwhile.
    """
    config = load_config(None, [f"workspace={workspace}", f"runs={runs}", "search.trials=6", *settings])
    folder = RunFolder(runs / "run-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent.run_folder, "space_digest", lambda config: "")
        patch.setattr(agent.run_folder, "versions", dict)
        create_run_folder(folder, config, {"workspace": str(workspace)}, time)
    folder.manifest.write_text(json.dumps(read_manifest(Workspace(workspace))))
    outcome = Outcome(folder, time.now)
    time.scheduled = sorted(((time.now + at, what) for at, what in time.scheduled), key=lambda event: event[0])
    while True:
        pipeline = SimulatedPipeline(folder, config, time, world, outcome)
        with pytest.MonkeyPatch.context() as patch:
            for module, name, substitute in (
                (agent.search, "run_search", pipeline.simulate_search),
                (agent.search, "write_study", lambda *arguments: None),
                (agent.submitting, "merge_checkpoint", pipeline.simulate_merge),
                (agent.submitting, "run_inference", pipeline.simulate_inference),
                (agent.submitting, "validate_submission", pipeline.simulate_validation),
                (agent.pipeline, "write_report", lambda path: None),
                (agent.trial_runs, "sweep", lambda tag: []),
                (agent.trial_runs, "sweep_holders", lambda folder: []),
                (agent.config, "read_space", _read_space_once),
                (os, "fsync", lambda descriptor: None),
            ):
                patch.setattr(module, name, substitute)
            try:
                pipeline.execute()
                return outcome
            except Killed:
                time.is_down(*(down.pop(0) if down else (60.0, False)))
                outcome.resumed.append(time.now - outcome.opened)
            except StageError as error:
                outcome.error = str(error)
                return outcome
