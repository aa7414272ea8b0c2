"""One run: its ledger, its stages, its time, what its trials have scored. What acts is in the classes that build on it."""

import functools
import re
import statistics
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent.budget import (
    BudgetPlan,
    Limits,
    Measured,
    Schedule,
    last_save,
    measure,
    plan_budget,
    read_limits,
    submission_reserve,
    training_left,
)
from agent.clock import RunClock, SystemTime, TimeSource, start_run_clock
from agent.config import AgentConfig, digest
from agent.errors import AgentError, Interrupted, RunFolderError, StageError, describe_os_error
from agent.ledger import Event, RunState, TrialState
from agent.objective import judge, score_validation
from agent.promotion import CheckpointChoice, choose_checkpoint, choose_promotion
from agent.run_folder import RunFolder
from agent.rungs import plan_rungs
from agent.slots import Ask, read_ask
from agent.submission import restore_outputs
from agent.workspace import Workspace, changed_files, forbidden_changes, read_manifest
from trials.checkpoints import complete_steps
from trials.runner import Validation, last_line, read_history

BASELINE, FULL = "t000", "full"
_CPU_SLOTS = 2


class Run:
    """One run on one workspace, as far as it decides."""

    def __init__(
        self,
        folder: RunFolder,
        config: AgentConfig,
        on_event: Callable[[Event], None],
        alone: bool = True,
        time_source: TimeSource | None = None,
    ) -> None:
        """`alone` is False when a living driver owns the run and this process only exports from it. All time comes from
        `time_source`, by default the machine's clocks."""
        self.folder, self.config, self.alone = folder, config, alone
        self.workspace = Workspace(config.workspace)
        self.space = config.read_space()
        self.ledger = folder.ledger
        self._on_event = on_event
        self._time_source = time_source or SystemTime()
        self._stop = threading.Event()
        self._recording = threading.Lock()
        self.dev_rows = self.workspace.dev_rows()
        self._dev_total = sum(self.dev_rows.values())
        self.rungs = plan_rungs(config, self.workspace)
        self._last_save: int | None = None
        """The last save that a running training can finish, where that is not its last step."""
        self._search_ends_s = 0.0
        """What the run will have lasted when the search must end."""
        self._stop_steps: dict[str, int] = {}
        """Search trial → the step that ends it."""
        self._last_rung: int | None = self.rungs[-1]
        """The step that ends a search trial that begins now; None when none may begin."""
        self.slots = config.search.concurrent or _CPU_SLOTS
        """Trials side by side; counted where GPUs train."""

    def record(self, event: str, **facts: Any) -> Event:
        """Append to the ledger and tell the view; returns the event."""
        with self._recording:
            recorded = self.ledger.append(event, **self.clock.stamp(), **facts)
            self._on_event(recorded)
            return recorded

    def state(self) -> RunState:
        return self.folder.read_state()

    def decide(self, what: str, chosen: Any, reason: str) -> None:
        """A decision with its reason, so that the report can tell why."""
        self.record("decision", what=what, chosen=chosen, reason=reason)

    def stage(self, name: str, inputs: Any, work: Callable[[], dict[str, Any]], again: bool = False) -> dict[str, Any]:
        """Run a stage unless its receipt with the same inputs is in the ledger (or `again`); returns the receipt's facts."""
        key = digest(inputs)
        receipt = self.state().stages.get(name)
        if receipt is not None and receipt["inputs"] == key and not again:
            return receipt
        self.record("stage_started", stage=name)
        started_s = self.clock.elapsed_s()
        try:
            facts = work()
        except (AgentError, OSError) as error:
            told = error if isinstance(error, AgentError) else unwritable(name, error)
            if not isinstance(error, Interrupted):
                self.record("stage_failed", stage=name, reason=str(told))
            raise told from None
        self.record("stage_done", stage=name, inputs=key, seconds=round(self.clock.elapsed_s() - started_s, 2), **facts)
        return facts

    # ---- time --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def clock(self) -> RunClock:
        """How long the run has lasted."""
        state = self.state()
        seen = []
        for trial in state.trials.values():
            if trial.open_since_s is not None and (line := last_line(self.folder.trial(trial.trial), trial.attempts)):
                seen.append((trial.open_since_s + line[0], line[1]))
        return start_run_clock(state, self._time_source, seen)

    @property
    def limits(self) -> Limits:
        return read_limits(self.config)

    @functools.cached_property
    def schedule(self) -> Schedule:
        return Schedule(self.workspace.total_steps, self.workspace.save_freq, self.rungs)

    @functools.cached_property
    def ask(self) -> Ask:
        """What a search trial reserves."""
        return read_ask(self.config, self.workspace)

    @property
    def _cpu_trains(self) -> bool:
        return self.workspace.setting("trainer.device") == "cpu"

    def plan(self) -> BudgetPlan:
        """What still fits, from all that was measured up to now."""
        state, now_s, measured = self.state(), self.clock.elapsed_s(), self._measured()
        trial_measured = self._measured_trials(state, measured)
        running = [trial for trial in state.search_trials if trial.open_since_s is not None]
        promised_s = sum(self._left_s(trial, trial_measured, now_s) for trial in running)
        exact = [trial for trial in state.trials.values() if trial.kind == "remeasure" and trial.outcome == "completed"]
        to_remeasure = self.ask.is_proxy and state.full_run is None and "remeasure" not in state.stages
        return plan_budget(
            limits=self.limits,
            elapsed_s=now_s,
            training_done_s=state.spent_s(now_s),
            submission_s=self._submission_s(state),
            measured=measured,
            trial_measured=trial_measured,
            schedule=self.schedule,
            slots=self.slots,
            gpu_share=self.ask.gpu_share,
            remeasured=max(0, self.config.search.remeasured_proxies - len(exact)) if to_remeasure else 0,
            running=len(running),
            promised_s=promised_s * self.ask.gpu_share,
        )

    def _left_s(self, trial: TrialState, measured: Measured, now_s: float) -> float:
        """How long a search trial that runs is expected to run on."""
        steps = self._stop_steps.get(trial.trial, self.rungs[-1]) - trial.resumed_step
        return max(0.0, measured.training_s(steps, self.rungs[0]) + (trial.open_since_s or 0.0) - now_s)

    def _training_ends_s(self) -> float:
        """Seconds from now until all training must have been interrupted."""
        state, now_s = self.state(), self.clock.elapsed_s()
        return min(training_left(self.limits, now_s, state.spent_s(now_s), self._submission_s(state)))

    def _submission_s(self, state: RunState) -> float:
        """The reserve for the submission, by the newest receipts of its parts."""
        merge_s, inference_s, validate_s = (
            state.stages.get(name, {}).get("seconds") for name in ("merge", "inference", "validate")
        )
        return submission_reserve(self.limits, merge_s, inference_s, validate_s)

    def _measured(self) -> Measured:
        """Times of the baseline."""
        return Measured.from_receipt(self.state().stages["baseline"])

    def _measured_trials(self, state: RunState, measured: Measured) -> Measured:
        """Times of a search trial: as the ended ones took, before there is one as its GPUs let expect."""
        known = [t for t in state.search_trials if t.start_up_s is not None and t.step_s is not None]
        if not known:
            return measured.on_share(self.ask.gpu_share)
        start_up_s = statistics.median(trial.start_up_s or 0.0 for trial in known)
        return Measured(start_up_s, statistics.median(trial.step_s or 0.0 for trial in known))

    def _past_last_save(self, trial: str, step: int, save_freq: int, start_up_s: float = 0.0) -> str | None:
        """Why a training that has saved `step` must end now; None when another save fits, after a start-up where it is to be
        started again. Its own newest steps tell how long that takes."""
        measured = measure(read_history(self.folder.trial(trial)), last_steps=save_freq) or self._measured()
        left_s, total = self._training_ends_s() - start_up_s, self.workspace.total_steps
        last = last_save(measured, step=step, save_freq=save_freq, total_steps=total, left_s=left_s)
        if last == total:
            return None
        next_s = measured.steps_s(min(save_freq, total - step), saves=1)
        left = f"{left_s:.0f} s of training are left, and from one save to the next it takes {next_s:.0f} s"
        if last == step:
            return f"no save after that of step {step} fits: {left}"
        if self._last_save != last:
            self._last_save = last
            self.decide("last save", f"{trial} step {last}", left)
        return None

    def _time_spent(self) -> str:
        """For an error message: what was spent of what, and what to do."""
        now_s, limits = self.clock.elapsed_s(), self.limits
        return (
            f"{now_s / 3600:.2f} of {limits.total_s / 3600:g} h and {self.state().spent_s(now_s) / 3600:.2f} of "
            f"{limits.training_s / 3600:g} h of training are spent, {self._submission_s(self.state()) / 60:.0f} min are "
            "kept for the submission — resume with --set budget.total_hours=… or budget.training_hours=…"
        )

    # ---- scores and checkpoints --------------------------------------------------------------------------------------

    def _measured_initial_entropy(self) -> float | None:
        """The entropy of the baseline's first training step: the untrained policy's. None when it was not seen."""
        steps = [m for m in read_history(self.folder.trial(BASELINE)) if m.is_training_step]
        return steps[0].entropy if steps else None

    def _score(self, kind: str, initial_entropy: float) -> Callable[[Validation], dict[str, Any]]:
        return functools.partial(
            score_validation,
            initial_entropy=initial_entropy,
            total_steps=self.workspace.total_steps,
            band=self.config.objective.band(),
            measured=kind == "full",
        )

    def checkpoints_of(self, trial: TrialState) -> Path:
        return self.full_run_checkpoints() if trial.kind == "full" else self.folder.trial(trial.trial) / "checkpoints"

    def full_run_checkpoints(self) -> Path:
        return self.workspace.full_run_checkpoints(self.folder.trial(FULL))

    def _measure(self, trial: TrialState, initial: float | None) -> None:
        """Judge a trial's scores by the entropy measured, no more by a forecast."""
        if initial is not None:
            band = self.config.objective.band()
            for score in trial.scores:
                measured = judge(score.accuracy, score.entropy, initial, 1.0, band)
                score.objective, score.reason = measured.value, measured.reason

    def _choose(self, trial: TrialState) -> CheckpointChoice | None:
        """The best complete checkpoint of a trial by its measured entropy."""
        self._measure(trial, self.state().initial_entropy)
        return choose_checkpoint(trial.scores, complete_steps(self.checkpoints_of(trial)))

    def best_checkpoint(self) -> tuple[TrialState, CheckpointChoice]:
        """The checkpoint to submit now: the full run's best if it has one, else that of the leading trial.

        Raises:
            StageError: no trial has a complete checkpoint.
        """
        state = self.state()
        if state.full_run is not None and (choice := self._choose(state.full_run)):
            return state.full_run, choice
        trials = [trial for trial in state.trials.values() if trial.kind != "full"]
        while trials:
            promotion = choose_promotion(trials, self._dev_total)
            leader = state.trials[promotion.trial] if promotion else trials[0]
            if choice := self._choose(leader):
                return leader, choice
            trials.remove(leader)
        raise StageError(f"no trial of {self.folder.path} has a complete checkpoint yet; resume the run first")

    # ---- workspace ---------------------------------------------------------------------------------------------------

    def workspace_changes(self) -> tuple[list[str], list[str]]:
        """Files that differ from before the run, and those among them that the task's rules forbid."""
        changed = changed_files(self.folder.read_manifest(), read_manifest(self.workspace))
        runs = "|".join(re.escape(path.name) for path in self.folder.path.parent.iterdir())  # other runs generate, too
        generated = [path for path in changed if re.fullmatch(rf".*/train_(?:{runs})_(?:{FULL}|t\d+)\.sh", path)]
        return changed, forbidden_changes(self.workspace, changed, generated)

    def _require_unchanged_workspace(self) -> None:
        """A run that goes on must find the scripts and data it began with.

        Raises:
            RunFolderError: naming what differs.
        """
        restore_outputs(self.workspace)
        _, forbidden = self.workspace_changes()
        if forbidden:
            raise RunFolderError(
                f"the workspace is not the one this run began with: {', '.join(forbidden[:5])} changed; restore them or "
                "start a new run"
            )

    def _require_running(self) -> None:
        if self._stop.is_set():
            raise Interrupted("stopped on request")

    def _request_stop(self) -> None:
        """End whatever runs in an orderly way."""
        self._stop.set()
        with suppress(OSError):
            self.folder.stop_file.touch()


def unwritable(what: str, error: OSError) -> StageError:
    """The error of somebody who cannot write."""
    return StageError(f"{what} cannot write {describe_os_error(error, 'its folder')}, then resume")
