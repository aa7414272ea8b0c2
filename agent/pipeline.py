"""The story of a run: baseline → search → promote → full run → select → submit → report.

Each stage leaves a receipt in the ledger with a hash of its inputs; a resumed run skips stages whose receipt fits.
"""

import functools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.budget import (
    BudgetPlan,
    Limits,
    Measured,
    Schedule,
    last_save,
    measure,
    plan_budget,
    submission_reserve,
    training_left,
)
from agent.clock import RunClock, SystemTime, TimeSource, boot_facts, start_run_clock
from agent.config import AgentConfig, digest
from agent.disk import Deletion, Need, Sizes, plan_checkpoint_deletions, plan_submission_deletions, product
from agent.disk_guard import DiskGuard
from agent.doctor import read_demand
from agent.errors import AgentError, Interrupted, PreflightError, RunFolderError, StageError
from agent.ledger import Event, RunState, TrialState
from agent.merging import merge_checkpoint
from agent.model_check import check_merged_model
from agent.objective import judge, score_validation
from agent.promotion import (
    CheckpointChoice,
    choose_checkpoint,
    choose_losers,
    choose_promotion,
    losing_steps,
    rank_proxies,
)
from agent.report import write_report
from agent.run_folder import Lock, RunFolder, is_locked
from agent.rungs import plan_rungs, trial_overrides
from agent.script_checks import known
from agent.slots import Ask, read_ask, read_proxy_overrides, require_open_devices
from agent.submission import (
    LOGITS,
    RESULTS,
    Submission,
    is_copy,
    is_published,
    publish,
    restore_outputs,
    run_inference,
    run_logged,
    validate_submission,
)
from agent.tensors import read_batches_given
from agent.workspace import Workspace, changed_files, forbidden_changes, read_manifest
from search_spaces.space import Configuration
from trials.checkpoints import (
    bring_back,
    complete_steps,
    delete_checkpoints,
    delete_over_limit,
    describe_data_place,
    folder_bytes,
    list_problems,
    read_checkpoints,
    repair_tracker,
    set_back,
)
from trials.guard import sweep, sweep_holders
from trials.health import FailureKind
from trials.runner import (
    Attempt,
    Ended,
    TrialSpec,
    Validation,
    attempt_seconds,
    last_line,
    read_history,
    recover_history,
    trial_scratch,
    validations,
)
from trials.script import differing_overrides
from verl_overlay import install

if TYPE_CHECKING:
    from agent.cluster import ClusterAttempt, Engine

BASELINE, FULL = "t000", "full"
_CHOSEN = ("trial", "step", "objective", "accuracy", "entropy")
_CPU_SLOTS = 2
_COMMAND = Path(__file__).resolve().parents[1] / "run_agent.py"
_SLACK = 1.05
"""A re-measurement that must end leaves this much of the full run's expected time."""


class Pipeline:
    """One run on one workspace. `execute()` goes from wherever the ledger stands to the end."""

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

    # ---- ledger --------------------------------------------------------------------------------------------------

    def record(self, event: str, **facts: Any) -> None:
        """Append to the ledger and tell the view."""
        with self._recording:
            self._on_event(self.ledger.append(event, **self.clock.stamp(), **facts))

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
            told = error if isinstance(error, AgentError) else _unwritable(name, error)
            if not isinstance(error, Interrupted):
                self.record("stage_failed", stage=name, reason=str(told))
            raise told from None
        self.record("stage_done", stage=name, inputs=key, seconds=round(self.clock.elapsed_s() - started_s, 2), **facts)
        return facts

    # ---- time ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def clock(self) -> RunClock:
        """How long the run has lasted."""
        state = self.state()
        seen = []
        for trial in state.trials.values():
            line = last_line(self.folder.trial(trial.trial), trial.attempts)
            if line is not None and trial.open_since_s is not None:
                seen.append((trial.open_since_s + line[0], line[1]))
        return start_run_clock(state, self._time_source, seen)

    @property
    def limits(self) -> Limits:
        budget = self.config.budget
        return Limits(budget.total_hours * 3600, budget.training_hours * 3600, budget.inference_minutes * 60)

    @functools.cached_property
    def schedule(self) -> Schedule:
        return Schedule(self.workspace.total_steps, self.workspace.save_freq, self.rungs)

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
            gpu_share=self._gpu_share,
            remeasured=max(0, self.config.search.remeasured_proxies - len(exact)) if to_remeasure else 0,
            running=len(running),
            promised_s=promised_s * self._gpu_share,
        )

    def _left_s(self, trial: TrialState, measured: Measured, now_s: float) -> float:
        """How long a search trial that runs is expected to run on."""
        steps = self._stop_steps.get(trial.trial, self.rungs[-1]) - trial.resumed_step
        return max(0.0, measured.training_s(steps, self.rungs[0]) + (trial.open_since_s or 0.0) - now_s)

    @property
    def _gpu_share(self) -> float:
        return self.ask.gpus / self.ask.exact_gpus if self.ask.is_proxy else 1.0

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
            return replace(measured, step_s=measured.step_s / self._gpu_share)
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

    # ---- the story -----------------------------------------------------------------------------------------------

    def execute(self) -> Submission:
        """Everything that is still to do.

        Raises:
            Interrupted: a person stopped it; all children are gone.
            StageError: a stage failed for good.
        """
        with self._interruptible(), ExitStack() as watch:
            self.clean_up()
            watch.enter_context(self.disk.watching())
            self._require_running()
            self._require_unchanged_workspace()
            self._plan_slots()
            self.record("driver_started", pid=os.getpid(), **boot_facts(self._time_source))
            self._install_overlay()
            self.stage("baseline", {}, self._run_baseline)
            self._submit_early()
            try:
                self._search()
                self._remeasure()
                trial, choice = self._promote_and_train()
            except StageError as error:
                raise StageError(f"{error}{self._salvage()}") from None
            submission = self._submit_better(trial, choice)
        self.finish()
        return submission

    def export(self) -> Submission:
        """A submission from the best trial so far; works beside a living driver, too.

        Raises:
            StageError: there is no complete checkpoint yet, or a part of the submission failed.
        """
        with self._interruptible():
            if self.alone:
                self.clean_up()
            trial, choice = self.best_checkpoint()
            if self.alone and self.state().full_run is None:
                self._bake(trial.configuration)
            submission = self._keep_published(trial, choice) or self.submit(trial, choice, what="checkpoint for export")
        write_report(self.folder.path)
        return submission

    def finish(self) -> None:
        """Prove what changed in the workspace and write the report."""
        self._remove_scripts()
        changed, forbidden = self.workspace_changes()
        state = self.state()
        if state.finished is None or state.published[-1]["time"] > state.finished["time"]:
            facts = {"changed_files": changed, "forbidden_changes": forbidden}
            self.record("run_finished", **facts, seconds=round(self.clock.elapsed_s(), 1))
        write_report(self.folder.path)
        if forbidden:
            raise StageError(
                f"files of the workspace changed that must not: {', '.join(forbidden[:5])} — restore them; the "
                "submission is published, see the report"
            )

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

    # ---- interruption --------------------------------------------------------------------------------------------

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C and TERM ask for an orderly stop; a second one ends the process, and the guards end the rest."""

        def handle(number: int, frame: Any) -> None:
            if self._stop.is_set():
                os._exit(130)
            self._stop.set()
            os.write(2, b"\nstopping in an orderly way; once more ends at once\n")
            if self.alone:
                self._request_stop()

        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except Interrupted as error:
            if self.disk.problem is not None:
                with suppress(AgentError):  # the disk is nearly full
                    self.record("stage_failed", stage="disk", reason=self.disk.problem)
                raise StageError(self.disk.problem) from None
            self.record("interrupted")
            raise Interrupted(f"{error}; `python run_agent.py resume {self.folder.path}` goes on") from None
        finally:
            if not self._stop.is_set():  # else a second Ctrl-C during the last words still ends without a traceback
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def _request_stop(self) -> None:
        """End whatever runs in an orderly way."""
        self._stop.set()
        with suppress(OSError):
            self.folder.stop_file.touch()

    def _require_running(self) -> None:
        if self._stop.is_set():
            raise Interrupted("stopped on request")

    def clean_up(self) -> None:
        """Remove what a killed driver left: processes, scripts, scratch folders; recover what its trials had done."""
        self.folder.stop_file.unlink(missing_ok=True)
        sweep(self.folder.tag)
        sweep_holders(self.folder.ray_tmpdir)
        if self.config.ray_address is not None:
            self._sweep_nodes()
        self._remove_scripts()
        for path in (self.folder.ray_tmpdir, self.folder.tune):
            shutil.rmtree(path, ignore_errors=True)
        left = [trial for trial in self.state().trials.values() if trial.outcome is None]
        if self.disk.is_full():  # perhaps by their unfinished saves, and then nothing could be recorded
            for trial in left:
                repair_tracker(self.checkpoints_of(trial))
        for trial in left:
            self._recover(trial)

    def _sweep_nodes(self) -> None:
        """The same on the other nodes of the cluster."""
        from agent.cluster import sweep_nodes

        open_trials = [trial for trial in self.state().trials.values() if trial.outcome is None]
        attempts = [(trial.trial, attempt) for trial in open_trials for attempt in range(1, trial.attempts + 1)]
        scratch = [trial_scratch(self.folder.tag, trial, attempt) for trial, attempt in attempts]
        sweep_nodes(self.engine, self.folder.tag, scratch)

    def _remove_scripts(self) -> None:
        """Remove the generated scripts of short trials; the run's folder has copies."""
        for trial in self.state().trials.values():
            if trial.kind != "full":
                self._script_of(trial.trial).unlink(missing_ok=True)

    def _script_of(self, trial: str) -> Path:
        return self.workspace.scripts / f"train_{self.folder.path.name}_{trial}.sh"

    def _recover(self, trial: TrialState) -> None:
        """Record what a trial did that its driver could not; end it if it had done all."""
        for attempt in range(1, trial.attempts + 1):
            shutil.rmtree(trial_scratch(self.folder.tag, trial.trial, attempt), ignore_errors=True)
        if trial.open_since_s is not None:
            at_most_s = self.clock.elapsed_s() - trial.open_since_s
            seconds = min(attempt_seconds(self.folder.trial(trial.trial), trial.attempts), at_most_s)
            reason = "the agent ended before it"
            self.record("attempt_lost", trial=trial.trial, attempt=trial.attempts, seconds=seconds, reason=reason)
        known = {score.step for score in trial.scores}
        initial = self._measured_initial_entropy()
        history = recover_history(self.folder.trial(trial.trial), trial.attempts)
        for validation in validations(history, self.dev_rows, self.config.objective.dev_metric):
            if initial and validation.step not in known and validation.step > 0:
                self.record("trial_scored", trial=trial.trial, **self._score(trial.kind, initial)(validation))
        last = history[-1].step if history else 0
        is_short = trial.kind in ("search", "remeasure") or "baseline" in self.state().stages
        if trial.kind != "full" and is_short and last >= self.rungs[-1]:
            reason = f"recovered from its log: step {last} was done when the driver died"
            self.record("trial_ended", trial=trial.trial, outcome="completed", failure=None, reason=reason, step=last)

    # ---- disk ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def disk(self) -> DiskGuard:
        """Keeps the volumes from filling; beside a living driver it deletes nothing."""
        folders = [self.folder.path, self.full_run_checkpoints(), self.folder.ray_tmpdir, Path(tempfile.gettempdir())]
        plan = self._plan_deletions if self.alone else list
        return DiskGuard(self.folder.path, folders, plan, self.record, self._request_stop)

    @functools.cached_property
    def _estimated_sizes(self) -> Sizes:
        return read_demand(self.config, self.workspace, self.rungs).sizes

    def _sizes(self) -> Sizes:
        """What single things take on disk: as this run measured them, else estimated."""
        stages = self.state().stages
        measured = {
            "checkpoint": stages.get("baseline", {}).get("checkpoint_bytes"),
            "model": stages.get("merge", {}).get("model_bytes"),
            "logits": stages.get("inference", {}).get("results_bytes"),
        }
        return replace(self._estimated_sizes, **{name: size for name, size in measured.items() if size})

    def _training_needs(self, folder: Path, checkpoints: int) -> list[Need]:
        """Room for the next checkpoints, and for the submission that can be asked for at any time."""
        sizes, run = self._sizes(), self.folder.path
        saves = Need(folder, f"{checkpoints} checkpoints", product(sizes.checkpoint, checkpoints))
        return [saves, Need(run, "a merged model", sizes.model), Need(run, "its results", sizes.logits)]

    def _plan_deletions(self) -> list[Deletion]:
        """What the run can do without, those to go first in front."""
        state = self.state()
        trials = list(state.trials.values())
        possible = self._possible_submissions(state)
        for trial in trials:
            self._measure(trial, state.initial_entropy)
        checkpoints = {trial.trial: read_checkpoints(self.checkpoints_of(trial)) for trial in trials}
        submissions, wanted = self.folder.submission, [*state.published[-1:], *_receipt(state, "select")]
        needed = {submissions / f"{event['trial']}_step_{event['step']}" for event in wanted}
        needed |= {Path(receipt["model"]).parent for receipt in _receipt(state, "merge")}
        needed |= {Path(receipt["results"]).parent for receipt in _receipt(state, "inference")}
        needed |= {lock.parent for lock in submissions.glob("*/lock") if is_locked(lock)}
        return [
            *plan_checkpoint_deletions(trials, checkpoints, possible),
            *plan_submission_deletions(submissions, needed),
        ]

    def _possible_submissions(self, state: RunState) -> dict[str, int]:
        """Trial → step of the checkpoint to submit now, and of the best ended trial's, should the one that leads fail."""
        if state.full_run is not None and (choice := self._choose(state.full_run)) and choice.accuracy is not None:
            return {state.full_run.trial: choice.step}
        possible = {}
        with suppress(StageError):
            trial, choice = self.best_checkpoint()
            possible[trial.trial] = choice.step
        ended = [t for t in state.trials.values() if t.kind != "full" and t.outcome is not None and not t.is_proxy]
        best = choose_promotion([t for t in ended if complete_steps(self.checkpoints_of(t))], self._dev_total)
        if best and (choice := self._choose(state.trials[best.trial])):
            possible[best.trial] = choice.step
        return possible

    # ---- slots ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def ask(self) -> Ask:
        """What a search trial reserves."""
        return read_ask(self.config, self.workspace)

    @functools.cached_property
    def _proxy_overrides(self) -> dict[str, int]:
        return read_proxy_overrides(self.workspace, self.ask)

    @property
    def _cpu_trains(self) -> bool:
        return self.workspace.setting("trainer.device") == "cpu"

    @functools.cached_property
    def engine(self) -> "Engine":
        """The Ray of this run."""
        from agent.cluster import Engine

        return Engine(
            address=self.config.ray_address,
            cpu_slots=self.slots if self._cpu_trains else None,
            folder=self.folder.ray_tmpdir,
            log=self.folder.path / "ray.log",
            name=self.folder.tag,
            again=(sys.executable, str(_COMMAND), "resume", str(self.folder.path)),
        )

    def _plan_slots(self) -> None:
        """Count the slots, and refuse at once what no slot could ever hold.

        Raises:
            PreflightError: naming the GPUs asked, there and free, or why verl could not train a proxy.
        """
        ask, overrides = self.ask, self._proxy_overrides
        if not ask.gpus or "full_run" in self.state().stages:
            return
        from agent.cluster import find_slots

        with self.engine:
            slots = find_slots(ask, self.config.search.concurrent)
            find_slots(Ask(ask.exact_gpus, ask.exact_gpus), 1)  # for the baseline and the full run
        if ask.is_proxy or slots.count > 1:
            require_open_devices(self.workspace.script.text)
        self.slots = slots.count
        self.record(
            "slots_planned", slots=slots.count, cpus=slots.cpus, found=slots.found, overrides=overrides,
            is_proxy=ask.is_proxy, **asdict(ask),
        )  # fmt: skip

    # ---- overlay and baseline ------------------------------------------------------------------------------------

    def _install_overlay(self) -> None:
        """Append the overlay to core_algos.py, everything off, or as promoted once the full run has begun."""
        full_run = self.state().full_run
        self._bake(full_run.configuration if full_run else {})

    def _bake(self, configuration: Configuration) -> None:
        """Let core_algos.py run this configuration where no environment variable says otherwise."""
        try:
            report = install.install(self.workspace.core_algos, configuration, self.folder.path / "original")
        except install.OverlayError as error:
            raise PreflightError(str(error)) from None
        if report.changed:
            hashes = {"original_sha256": report.original_sha256, "installed_sha256": report.installed_sha256}
            self.record("overlay_installed", configuration=configuration, **hashes)

    def _run_baseline(self) -> dict[str, Any]:
        """Plain GRPO up to the last rung: measures H0, start-up and seconds per step, and is the first in every rung."""
        from agent.search import distributions_of

        parameters = self.space.complete({})
        distributions = distributions_of(self.space, parameters)

        def begin(attempt: int) -> TrialSpec:
            spec = self._limited(self.prepare(BASELINE, attempt, "baseline", {}))
            self.disk.require(self._training_needs(self.folder.path, 1))
            self.record(
                "trial_started", trial=BASELINE, attempt=attempt, resumed_step=spec.resumed_step, kind="baseline",
                origin="baseline", configuration={}, parameters=parameters, distributions=distributions,
            )  # fmt: skip
            return spec

        def tell(validation: Validation) -> None:
            initial = self._measured_initial_entropy()
            if initial and validation.step > 0:
                self.record("trial_scored", trial=BASELINE, **self._score("baseline", initial)(validation))

        ended = self._train_baseline(begin, tell)
        initial = self._measured_initial_entropy()
        if initial is None or not initial > 0:
            raise StageError(
                f"the baseline shows no policy entropy (first value: {initial}): the log has neither actor/entropy nor "
                "actor/entropy_loss; the agent cannot judge methods without it"
            )
        history = read_history(self.folder.trial(BASELINE))
        shown = [m.step_s for m in history if m.step_s is not None]
        measured = measure(history) or Measured(ended.start_up_s or 0.0, statistics.fmean(shown) if shown else 0.0)
        saved = self.folder.trial(BASELINE) / "checkpoints"
        saves = [folder_bytes(checkpoint.path) for checkpoint in read_checkpoints(saved) if checkpoint.problem is None]
        return {"initial_entropy": initial, **asdict(measured), "checkpoint_bytes": max(saves, default=None)}

    def _train_baseline(
        self, begin: Callable[[int], TrialSpec], on_validation: Callable[[Validation], str | None]
    ) -> Ended:
        """Run the baseline as far as time allows.

        Raises:
            StageError: it failed, or time was over before it had a checkpoint.
        """
        if self._training_ends_s() > 0:
            ended = self._run_trial(BASELINE, begin, on_validation)
        else:
            history = read_history(self.folder.trial(BASELINE))
            ended = Ended("stopped", history[-1].step if history else 0, 0.0, reason="no time is left for it")
            if BASELINE in self.state().trials:
                self._record_end(BASELINE, ended)
        if ended.outcome == "failed":
            raise StageError(f"the GRPO baseline failed: {ended.reason}; fix the workspace, then resume")
        if ended.outcome == "stopped" and not complete_steps(self.folder.trial(BASELINE) / "checkpoints"):
            raise StageError(
                f"time ended in the baseline after step {ended.last_step}, before its first checkpoint at step "
                f"{self.rungs[0]}: {self._time_spent()}"
            )
        return ended

    def _time_spent(self) -> str:
        """For an error message: what was spent of what, and what to do."""
        now_s, limits = self.clock.elapsed_s(), self.limits
        return (
            f"{now_s / 3600:.2f} of {limits.total_s / 3600:g} h and {self.state().spent_s(now_s) / 3600:.2f} of "
            f"{limits.training_s / 3600:g} h of training are spent, {self._submission_s(self.state()) / 60:.0f} min are "
            "kept for the submission — resume with --set budget.total_hours=… or budget.training_hours=…"
        )

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

    def _run_trial(
        self, name: str, begin: Callable[[int], TrialSpec], on_validation: Callable[[Validation], str | None]
    ) -> Ended:
        """Run a trial in this process, again after failures that its kind of failure allows, and record how it ended.

        Args:
            name: the trial.
            begin: attempt → the attempt to run, its start recorded.
            on_validation: called for each validation; says why the trial must end then, or None.

        Raises:
            Interrupted: a person stopped it.
            StageError: the disk is full.
        """
        while True:
            known = self.state().trials.get(name)
            attempt = (known.attempts if known else 0) + 1
            ended = self._run_attempt(begin(attempt), on_validation)
            kind = FailureKind(ended.failure) if ended.failure else None
            if kind is FailureKind.DISK_FULL:
                raise StageError(f"{name}: {ended.reason}; free space, then resume")
            failed_attempts = self.state().trials[name].failed_attempts
            if kind is None or failed_attempts + 1 >= kind.attempts(ended.start_up_s is not None):
                self._record_end(name, ended)
                return ended
            facts = asdict(ended)
            self.record("attempt_failed", trial=name, attempt=attempt, step=facts.pop("last_step"), **facts)

    def _run_attempt(self, spec: TrialSpec, on_validation: Callable[[Validation], str | None]) -> Ended:
        """Run one attempt in this process, until it ends or `on_validation` gives a reason to end it.

        Raises:
            Interrupted: a person stopped it.
        """
        attempt = self._attempt_of(spec)
        try:
            for event in attempt.events():
                if isinstance(event, Ended):
                    self._require_running()
                    return event
                if reason := on_validation(event):
                    return Ended("stopped", event.step, event.seconds, reason=reason)
        except OSError as error:
            raise _unwritable(spec.trial, error) from None
        finally:
            attempt.close()
        raise AssertionError("events() ends with Ended")

    def _attempt_of(self, spec: TrialSpec) -> "Attempt | ClusterAttempt":
        """Here, or on the node of the cluster that has the GPUs."""
        if self.config.ray_address is None:
            return Attempt(spec)
        from agent.cluster import ClusterAttempt

        return ClusterAttempt(self.engine, spec, Ask(self.ask.exact_gpus, self.ask.exact_gpus))

    def _record_end(self, trial: str, ended: Ended) -> None:
        facts = asdict(ended)
        out_of_time = ended.outcome == "stopped"
        self.record("trial_ended", trial=trial, step=facts.pop("last_step"), out_of_time=out_of_time, **facts)

    # ---- trials --------------------------------------------------------------------------------------------------

    def prepare(self, trial: str, attempt: int, kind: str, configuration: Configuration) -> TrialSpec:
        """The attempt of a short trial, its folder made ready for it."""
        self.folder.trial(trial).mkdir(parents=True, exist_ok=True)
        known = self.state().trials.get(trial)
        resumed_step = self._make_resumable(known) if known else 0
        spec = self.short_trial(trial, attempt, kind, configuration, resumed_step)
        if kind != "search" or self._last_rung is None:
            return spec
        ends = [rung for rung in self.rungs if rung >= self._last_rung and rung > resumed_step]
        self._stop_steps[trial] = ends[0] if ends else self.rungs[-1]
        return replace(spec, stop_step=self._stop_steps[trial])

    def _limited(self, spec: TrialSpec) -> TrialSpec:
        """The same, interrupted in time for a submission."""
        return replace(spec, time_limit_s=self._training_ends_s())

    def short_trial(
        self, trial: str, attempt: int, kind: str, configuration: Configuration, resumed_step: int = 0
    ) -> TrialSpec:
        """The attempt of a short trial: the workspace's script with other test_freq, save_freq and output folder; a proxy's
        also with fewer GPUs."""
        checkpoints = self.folder.trial(trial) / "checkpoints"
        if kind == "search":
            schedule: Configuration = {"schedule.steps": float(self.workspace.total_steps)}
            configuration = schedule | self.space.configuration(configuration)
        overrides = trial_overrides(self.workspace, self.rungs, checkpoints)
        if kind == "search":
            overrides.update(self._proxy_overrides)
        return TrialSpec(
            script=self.workspace.script.render(overrides),
            script_path=str(self._script_of(trial)),
            configuration=dict(configuration),
            resumed_step=resumed_step,
            stop_step=self.rungs[-1],
            environment=self._threads(self.slots if kind == "search" else 1),
            gpus=self.ask.gpus if kind == "search" else self.ask.exact_gpus,
            **self._common(trial, attempt, configuration),
        )

    def _common(self, trial: str, attempt: int, configuration: Configuration) -> dict[str, Any]:
        search = self.config.search
        return {
            "trial": trial,
            "attempt": attempt,
            "folder": str(self.folder.trial(trial)),
            "cwd": str(self.folder.trial(trial)),
            "total_steps": self.workspace.total_steps,
            "dev_rows": self.dev_rows,
            "dev_metric": self.config.objective.dev_metric,
            "run_tag": self.folder.tag,
            "configuration_id": install.configuration_identity(configuration),
            "needs_advantage": install.acts_on_advantage(configuration),
            "startup_timeout_s": search.startup_timeout_s,
            "stall_timeout_s": search.stall_timeout_s,
            "training_env": self._training_env(),
            "stop_file": str(self.folder.stop_file),
        }

    def _training_env(self) -> str | None:
        """The agent's own is named, too, on a cluster: its nodes may run Ray from another."""
        return self.config.training_prefix() or (sys.prefix if self.config.ray_address else None)

    def _threads(self, concurrent: int) -> dict[str, str]:
        """On a machine where the CPU trains, trials side by side share its cores."""
        if not self._cpu_trains or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // concurrent))}

    # ---- search --------------------------------------------------------------------------------------------------

    def _search(self) -> None:
        state, hours = self.state(), (self.config.budget.total_hours, self.config.budget.training_hours)
        if state.full_run is not None:
            return
        enough = "search" in state.stages and len(state.search_trials) >= self.config.search.trials
        if not enough:
            budget = self._plan_search()
            self._last_rung = budget.last_rung
            if self._last_rung is None:
                self.decide("budget", "no search: not even a first rung fits", budget.reason)
            else:
                ended = sum(trial.outcome is not None for trial in state.search_trials)
                wanted = self.config.search.trials - ended
                fits = "" if wanted <= budget.trials else f", {budget.trials} of {wanted} trials fit"
                self.decide("budget", f"search for at most {budget.search_ends_s:.0f} s{fits}", budget.reason)
                inputs = {"trials": self.config.search.trials, "hours": hours}
                self.stage("search", inputs, lambda: self._run_search(state))
        self._end_open_trials("search", "baseline")

    def _plan_search(self) -> BudgetPlan:
        """See what still fits, and move the end of the search accordingly."""
        budget = self.plan()
        self._search_ends_s = self.clock.elapsed_s() + budget.search_ends_s
        return budget

    def _may_start(self) -> bool:
        """Whether another trial fits; a change of its last rung is a decision."""
        budget = self._plan_search()
        if budget.last_rung != self._last_rung:
            now = (
                f"trials that begin now end at step {budget.last_rung}" if budget.last_rung else "no more trials begin"
            )
            self.decide("budget", now, budget.reason)
        self._last_rung = budget.last_rung
        return self._last_rung is not None

    def _time_is_over(self) -> bool:
        return self.clock.elapsed_s() >= self._search_ends_s

    def _after_trial(self) -> None:
        """What follows the end of a search trial: it may leave time to others."""
        self.delete_losers()
        self._write_study(every_s=60.0)
        self._plan_search()

    def _end_open_trials(self, *kinds: str) -> None:
        """Trials that were interrupted and for which no time is left."""
        for trial in self.state().trials.values():
            if trial.outcome is None and trial.kind in kinds:
                reason = "the time of the search is over"
                self.record("trial_ended", trial=trial.trial, outcome="stopped", reason=reason, out_of_time=True)

    def _run_search(self, state: RunState) -> dict[str, Any]:
        from agent.search import SearchPlan, run_search

        settings = self.config.search
        plan = SearchPlan(
            space=self.space,
            trials=settings.trials,
            concurrent=settings.concurrent if self.ask.gpus else self.slots,
            rungs=self.rungs,
            reduction_factor=settings.reduction_factor,
            dev_rows=self._dev_total,
            seed=self.config.seed,
            startup_trials=settings.startup_trials,
            failures_in_a_row=settings.failures_in_a_row,
            ask=self.ask,
            patience_s=settings.startup_timeout_s,
        )
        initial = state.initial_entropy
        assert initial is not None
        while True:
            self.disk.require(self._training_needs(self.folder.path, self.slots))
            broken = run_search(
                plan,
                self.record,
                self.state(),
                self.prepare,
                self._score("search", initial),
                engine=self.engine,
                must_stop=self._stop.is_set,
                time_is_over=self._time_is_over,
                may_start=lambda: self._may_start() and self.disk.has_room(),
                stop_file=self.folder.stop_file,
                on_end=self._after_trial,
                scratch=self.folder.tune,
            )
            self._require_running()
            trials = self.state().search_trials
            is_whole = all(trial.outcome is not None for trial in trials)  # not when a node was lost at the end
            is_over = self._time_is_over() or not self._may_start()
            if broken or is_over or (is_whole and len(trials) >= settings.trials):
                break
        self.folder.stop_file.unlink(missing_ok=True)
        self._remove_scripts()
        if broken:
            raise StageError(f"{broken} — fix the cause, then resume; nothing that had finished is lost")
        self._write_study()
        after = self.state()
        return {"trials": len(after.search_trials), "failed": sum(t.outcome == "failed" for t in after.search_trials)}

    def _write_study(self, every_s: float = 0.0) -> None:
        """Bring the view for optuna-dashboard up to date, unless it was written a moment ago."""
        from agent.search import write_study

        path = self.folder.optuna
        if not path.exists() or self._time_source.wall_s() - path.stat().st_mtime > every_s:
            write_study(self.state(), path, self.folder.path.name)

    def delete_losers(self) -> None:
        """Delete the checkpoints of ended trials that can no longer become the submission."""
        with self.disk.lock:
            self._delete_losers()

    def _delete_losers(self) -> None:
        trials = [trial for trial in self.state().trials.values() if trial.kind != "full"]
        ended = [trial for trial in trials if trial.outcome is not None]
        with_checkpoint = {trial.trial for trial in ended if complete_steps(self.checkpoints_of(trial))}
        losers: list[str] = []
        for is_proxy in (False, True):  # a proxy never makes a loser of an exact trial
            alike = [trial for trial in ended if trial.is_proxy is is_proxy]
            losers += choose_losers(alike, with_checkpoint, self._dev_total)
        for trial in ended:
            if trial.trial in losers:
                delete_checkpoints(self.checkpoints_of(trial), keep=())
            else:
                self._limit_disk(trial)

    def _limit_disk(self, trial: TrialState) -> None:
        """Keep a training's checkpoints within budget.checkpoint_gb by deleting those that cannot be chosen any more."""
        limit_gb = self.config.budget.checkpoint_gb
        if limit_gb is not None:
            folder = self.checkpoints_of(trial)
            delete_over_limit(folder, losing_steps(trial.scores, complete_steps(folder)), limit_gb * 1e9)

    # ---- re-measurement of proxies -------------------------------------------------------------------------------

    def _remeasure(self) -> None:
        """Run exact trials of the best proxies' configurations: only those and the baseline can be promoted."""
        state = self.state()
        proxies = rank_proxies(state.search_trials, self._dev_total)
        if not proxies or state.full_run is not None:
            return
        names = [proxy.trial for proxy in proxies]
        wanted = self.config.search.remeasured_proxies
        self.stage("remeasure", {"proxies": sorted(names), "wanted": wanted}, lambda: self._run_remeasurements(proxies))

    def _run_remeasurements(self, proxies: list[TrialState]) -> dict[str, Any]:
        wanted = self.config.search.remeasured_proxies
        for rank, proxy in enumerate(proxies, start=1):
            state = self.state()
            exact = [trial for trial in state.trials.values() if trial.kind == "remeasure"]
            known = next((trial for trial in exact if trial.origin == f"re-measurement of {proxy.trial}"), None)
            if sum(trial.outcome == "completed" for trial in exact) >= wanted:
                break
            if known is not None and known.outcome is not None:
                continue
            done = max(complete_steps(self.checkpoints_of(known)), default=0) if known else 0
            needed_s = self._measured().training_s(self.rungs[-1] - done, self.rungs[0])
            left_s = self._left_before_full_run_s()
            if left_s < needed_s:
                reason = f"{left_s:.0f} s are left before the full run, an exact trial takes {needed_s:.0f} s"
                self.decide("re-measurement", None, reason)
                break
            score = proxy.last
            assert score is not None
            reason = f"{proxy.trial} is number {rank} of {len(proxies)} proxies on {proxy.gpus} of "
            reason += f"{self.ask.exact_gpus} GPUs, "
            reason += (
                f"with objective {score.objective:.4f} at step {score.step}; it is trusted only when measured on all"
            )
            self.decide("re-measurement", proxy.trial, reason)
            self._run_remeasurement(proxy, known)
        self._end_open_trials("remeasure")
        exact = [trial for trial in self.state().trials.values() if trial.kind == "remeasure"]
        return {"trials": [trial.trial for trial in exact]}

    def _left_before_full_run_s(self) -> float:
        budget = self.plan()
        return budget.training_ends_s - (_SLACK * budget.full_run_s if budget.full_run_fits else 0.0)

    def _run_remeasurement(self, proxy: TrialState, known: TrialState | None) -> None:
        state = self.state()
        name = known.trial if known else f"t{len(state.trials):03d}"
        initial = state.initial_entropy
        assert initial is not None

        def begin(attempt: int) -> TrialSpec:
            spec = self.prepare(name, attempt, "remeasure", proxy.configuration)
            self.disk.require(self._training_needs(self.folder.path, 1))
            spec = replace(spec, time_limit_s=self._left_before_full_run_s())
            self.record(
                "trial_started", trial=name, attempt=attempt, resumed_step=spec.resumed_step, kind="remeasure",
                origin=f"re-measurement of {proxy.trial}", configuration=proxy.configuration, gpus=self.ask.exact_gpus,
            )  # fmt: skip
            return spec

        score = self._score("remeasure", initial)

        def tell(validation: Validation) -> None:
            if validation.step > 0:
                self.record("trial_scored", trial=name, **score(validation))

        self._run_trial(name, begin, tell)
        self.delete_losers()

    # ---- promotion and full run ----------------------------------------------------------------------------------

    def _promote_and_train(self) -> tuple[TrialState, CheckpointChoice]:
        state = self.state()
        candidates = [trial for trial in state.trials.values() if trial.kind != "full" and not trial.is_proxy]
        promotion = choose_promotion(candidates, self._dev_total)
        if promotion is None:
            raise StageError("no trial has a usable score, so nothing can be promoted; see the report for the failures")
        if state.full_run is None:
            self.decide("promotion", promotion.trial, promotion.reason)
            budget = self.plan()
            if not budget.full_run_fits:
                self.decide("full run", None, budget.reason)
                self._continue(state.trials[promotion.trial])
                best = self.best_checkpoint()
                self._bake(best[0].configuration)
                return best
        winner = state.full_run or state.trials[promotion.trial]
        self.stage(
            "full_run",
            {"configuration": winner.configuration},
            lambda: self._full_run(winner.configuration, promotion.trial),
        )
        full = self.state().full_run
        assert full is not None
        choice = self._choose(full)
        if choice is None:
            self.decide("full run", None, "the full run left no complete checkpoint; the best trial's is taken")
            return self.best_checkpoint()
        leader = self.state().trials[promotion.trial]
        earlier = self._choose(leader) if full.outcome != "completed" else None
        if earlier is not None and earlier.objective > choice.objective:
            reason = f"the full run ended at step {full.last.step if full.last else 0} with {choice.objective:.4f}; "
            self.decide("full run", leader.trial, f"{reason}{leader.trial} reached {earlier.objective:.4f}")
            return leader, earlier
        return full, choice

    def _continue(self, leader: TrialState) -> None:
        """Train the leading trial on from its last checkpoint as far as a save can be finished in time: what is done when a
        full run no longer fits."""
        steps, save_freq, total = complete_steps(self.checkpoints_of(leader)), self.rungs[0], self.workspace.total_steps
        measured, left_s = self._measured(), self._training_ends_s()
        left_s -= measured.start_up_s
        last = (
            last_save(measured, step=steps[-1], save_freq=save_freq, total_steps=total, left_s=left_s) if steps else 0
        )
        if not steps or last == steps[-1]:
            return
        initial = self.state().initial_entropy
        assert initial is not None
        point = leader.parameters if leader.kind == "search" else leader.configuration

        def begin(attempt: int) -> TrialSpec:
            spec = self._limited(self.prepare(leader.trial, attempt, leader.kind, point))
            self.disk.require(self._training_needs(self.folder.path, 1))
            self.record(
                "trial_started", trial=leader.trial, attempt=attempt, resumed_step=spec.resumed_step, kind=leader.kind,
                origin=leader.origin, configuration=leader.configuration,
            )  # fmt: skip
            return replace(spec, stop_step=last)

        score = self._score(leader.kind, initial)

        def tell(validation: Validation) -> str | None:
            self.record("trial_scored", trial=leader.trial, **score(validation))
            return self._past_last_save(leader.trial, validation.step, save_freq)

        reason = f"{left_s:.0f} s of training are left after its start-up; a full run from the beginning does not fit"
        self.decide("continuation", f"{leader.trial} from step {steps[-1]} to {last}", reason)
        inputs = {"trial": leader.trial, "step": steps[-1]}
        self.stage("continuation", inputs, lambda: {"steps": self._run_trial(leader.trial, begin, tell).last_step})

    def full_run_spec(
        self, attempt: int, configuration: Configuration, time_limit_s: float, resumed_step: int = 0
    ) -> TrialSpec:
        """train.sh itself; only trainer.test_freq differs, and that is checked.

        Raises:
            StageError: the rendered script differs in anything else.
        """
        original = self.workspace.script.text
        script = self.workspace.script.render({"trainer.test_freq": self.workspace.save_freq})
        changed = set(differing_overrides(original, script))
        if not changed <= {"trainer.test_freq"}:
            raise StageError(
                f"the full run's script differs from train.sh in {', '.join(sorted(changed))}; this is a bug"
            )
        return TrialSpec(
            script=script,
            script_path=str(self._script_of(FULL)),
            configuration=None,
            resumed_step=resumed_step,
            stop_step=None,
            keep_script=True,
            time_limit_s=time_limit_s,
            environment=self._threads(1),
            gpus=self.ask.exact_gpus,
            **self._common(FULL, attempt, configuration),
        )

    def full_run_checkpoints(self) -> Path:
        return self.workspace.full_run_checkpoints(self.folder.trial(FULL))

    def _full_run(self, configuration: Configuration, promoted: str) -> dict[str, Any]:
        self._bake(configuration)
        initial = self.state().initial_entropy
        assert initial is not None
        checkpoints = self.full_run_checkpoints()

        def begin(attempt: int) -> TrialSpec:
            if attempt == 1 and read_checkpoints(checkpoints):
                raise StageError(
                    f"{checkpoints} already holds checkpoints of another run, which verl would resume from; move them away"
                )
            known = self.state().full_run
            resumed_step = self._make_resumable(known) if known else 0
            has_one = resumed_step > 0 or self.workspace.total_steps <= self.workspace.save_freq
            self.disk.require(self._training_needs(checkpoints, 1 if has_one else 2))
            spec = self.full_run_spec(attempt, configuration, self._training_ends_s(), resumed_step)
            self.record(
                "trial_started", trial=FULL, attempt=attempt, resumed_step=resumed_step, kind="full",
                origin=f"promotion of {promoted}", configuration=configuration,
            )  # fmt: skip
            return spec

        score = self._score("full", initial)

        def tell(validation: Validation) -> str | None:
            if validation.step == 0:
                return None
            self.record("trial_scored", trial=FULL, **score(validation))
            full = self.state().full_run
            assert full is not None
            self._limit_disk(full)
            return self._past_last_save(FULL, validation.step, self.workspace.save_freq)

        if known := self.state().full_run:
            done, start_up_s = max(complete_steps(checkpoints), default=0), self._measured().start_up_s
            if reason := self._past_last_save(FULL, done, self.workspace.save_freq, start_up_s):
                if known.outcome is None:
                    self._record_end(FULL, Ended("stopped", done, 0.0, reason=reason))
                return {"steps": done}
        ended = self._run_trial(FULL, begin, tell)
        bring_back(checkpoints)
        if ended.outcome == "completed":
            return {"steps": ended.last_step, "start_up_s": ended.start_up_s, "step_s": ended.step_s}
        if ended.outcome == "stopped" or complete_steps(checkpoints):
            return {"steps": ended.last_step, "failure": ended.failure}
        raise StageError(f"the full run failed: {ended.reason}; `export` can still submit")

    def _make_resumable(self, trial: TrialState) -> int:
        """Let verl go on from a trial's newest complete checkpoint, or, if that made no step, from one before it.

        Returns:
            The step from which the next attempt goes on; 0 when it begins anew.
        """
        checkpoints = self.checkpoints_of(trial)
        bring_back(checkpoints)  # of an earlier such retry
        reasons = list_problems(checkpoints)
        step = repair_tracker(checkpoints)
        if trial.failure == FailureKind.NO_PROGRESS and step is not None:
            before = trial.resumed_step or step
            step = set_back(checkpoints, before)
            reasons.append(f"the attempt that went on from step {before} made no step")
        self._tell_resume(trial.trial, checkpoints, step, reasons)
        return step or 0

    def _tell_resume(self, trial: str, checkpoints: Path, step: int | None, reasons: list[str]) -> None:
        """Record from which step, and from where in the training data, an attempt goes on."""
        if step is None:
            self.decide(
                "resume", f"{trial} from the beginning", "; ".join([*reasons, "there is no checkpoint to go on from"])
            )
            return
        given = read_batches_given(checkpoints / f"global_step_{step}" / "data.pt")
        place = describe_data_place(step, known(lambda: self.workspace.steps_per_epoch), given)
        self.decide("resume", f"{trial} from step {step}", "; ".join([*reasons, place]))

    # ---- submission ----------------------------------------------------------------------------------------------

    def checkpoints_of(self, trial: TrialState) -> Path:
        return self.full_run_checkpoints() if trial.kind == "full" else self.folder.trial(trial.trial) / "checkpoints"

    def _choose(self, trial: TrialState) -> CheckpointChoice | None:
        """The best complete checkpoint of a trial by its measured entropy."""
        self._measure(trial, self.state().initial_entropy)
        return choose_checkpoint(trial.scores, complete_steps(self.checkpoints_of(trial)))

    def _measure(self, trial: TrialState, initial: float | None) -> None:
        """Judge a trial's scores by the entropy measured, no more by a forecast."""
        if initial is not None:
            band = self.config.objective.band()
            for score in trial.scores:
                measured = judge(score.accuracy, score.entropy, initial, 1.0, band)
                score.objective, score.reason = measured.value, measured.reason

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

    def _submit_early(self) -> None:
        """A submission from the baseline, before days are spent: it proves the way to the end and measures its duration."""
        state = self.state()
        if state.published or state.full_run is not None:
            return
        if self.clock.elapsed_s() + 2 * self._submission_s(state) + self.limits.margin_s > self.limits.total_s:
            self.decide("early submission", None, "the time that is left is needed for the last one")
            return
        try:
            trial, choice = self.best_checkpoint()
            self.submit(trial, choice, what="checkpoint for the early submission")
        except StageError as error:
            reason = f"{error}; the search goes on, but the last submission will fail alike if this is not fixed"
            self.decide("early submission", None, reason)

    def _submit_better(self, trial: TrialState, choice: CheckpointChoice) -> Submission:
        """Submit a checkpoint, or keep what is published if that is better; what fails is tried once more."""
        if kept := self._keep_published(trial, choice):
            return kept
        try:
            return self.submit(trial, choice)
        except StageError as error:
            self._require_running()
            self.decide("submission", "once more", str(error))
        try:
            return self.submit(trial, choice)
        except StageError as error:
            raise StageError(f"{error}{self._published_so_far()}") from None

    def _keep_published(self, trial: TrialState, choice: CheckpointChoice) -> Submission | None:
        """The published submission where its objective is higher, put back if its files are gone; else None."""
        state = self.state()
        event = state.published[-1] if state.published else {}
        if event.get("objective", 0.0) <= choice.objective:
            return None
        try:
            submission = Submission(**json.loads((Path(event["folder"]) / "submission.json").read_text("utf-8")))
            self._publish(submission, {name: event[name] for name in _CHOSEN})
        except (OSError, ValueError, TypeError, StageError):
            return None
        chosen = f"{event['trial']} step {event['step']} stays"
        if not any(decision["chosen"] == chosen for decision in state.decisions):
            reason = (
                f"its objective {event['objective']:.4f} is above the {choice.objective:.4f} of {trial.trial} step "
            )
            self.decide("submission", chosen, f"{reason}{choice.step}")
        return submission

    def _salvage(self) -> str:
        """Submit what was reached before the run stops with an error; returns what is to be told of it."""
        try:
            self._submit_better(*self.best_checkpoint())
        except StageError:
            pass  # the first error is the one to tell
        return self._published_so_far()

    def _published_so_far(self) -> str:
        published = self.state().published
        if not published:
            return ""
        return f"; {self.workspace.outputs} has the submission of {published[-1]['trial']} step {published[-1]['step']}"

    def submit(self, trial: TrialState, choice: CheckpointChoice, what: str = "checkpoint") -> Submission:
        """Merge, run inference, validate and publish one checkpoint; finished parts are not repeated."""
        chosen = {"trial": trial.trial, "step": choice.step}
        origin = {**chosen, "attempts": trial.attempts, "configuration": trial.configuration}
        chosen |= {"objective": choice.objective, "accuracy": choice.accuracy, "entropy": choice.entropy}
        self.stage("select", origin, lambda: self._select(what, choice, {**chosen, "reason": choice.reason}))
        folder = self.folder.submission / f"{trial.trial}_step_{choice.step}"
        folder.mkdir(parents=True, exist_ok=True)
        model, results = folder / "model", folder / "results"
        must_stop = self._stop.is_set
        run = functools.partial(
            run_logged, run_tag=self.folder.tag, training_env=self._training_env(), must_stop=must_stop
        )

        def merge() -> dict[str, Any]:
            checkpoint = next(c for c in read_checkpoints(self.checkpoints_of(trial)) if c.step == choice.step)
            self.disk.require([Need(folder, "the merged model", self._sizes().model)])
            verl, base = self.workspace.verl, self.workspace.base_model
            merge_checkpoint(verl, base, checkpoint.actor, model, log=folder / "merge.log", run=run)
            check = check_merged_model(self.workspace, model, choice.accuracy, choice.entropy, run)
            return {"model": str(model), "check": check, "model_bytes": folder_bytes(model)}

        def infer() -> dict[str, Any]:
            sizes, limit_s = self._sizes(), self.config.budget.inference_minutes * 60
            longest = Need(folder, "answers as long as allowed", sizes.longest_logits, is_ceiling=True)
            self.disk.require([Need(folder, "logits", sizes.logits) if sizes.logits else longest])
            log = folder / "inference.log"
            run_inference(self.workspace, model, results, log=log, timeout_s=limit_s, run=run)
            return {"results": str(results), "results_bytes": folder_bytes(results)}

        def validate() -> dict[str, Any]:
            return {"submission": asdict(validate_submission(results, self.workspace.test_file, model))}

        with Lock(folder / "lock", f"the submission {folder}", must_stop):  # waits for an export of the same checkpoint
            again = False
            parts = (("merge", model, merge), ("inference", results / LOGITS, infer), ("validate", results, validate))
            for name, made, work in parts:
                self._require_running()
                again = again or not made.exists()  # what was made is gone
                receipt = self.stage(name, origin, work, again)
        submission = Submission(**receipt["submission"])
        self._publish(submission, chosen)
        return submission

    def _select(self, what: str, choice: CheckpointChoice, facts: dict[str, Any]) -> dict[str, Any]:
        self.decide(what, f"{facts['trial']} step {choice.step}", choice.reason)
        return facts

    def _publish(self, submission: Submission, chosen: dict[str, Any]) -> None:
        state = self.state()
        if state.published and state.published[-1]["sha256"] == submission.sha256:
            if is_published(submission, self.workspace.outputs):
                return
        if not is_published(submission, Path(submission.folder)):
            raise StageError(
                f"the files in {submission.folder} changed since they were validated; remove that folder's parent"
            )
        number, outputs = 1, self.workspace.outputs
        while (previous := self.folder.submission / f"previous_{number}").exists():
            number += 1
        is_kept = any(is_copy(Path(event["folder"]), outputs) for event in state.published)
        old = [] if is_kept else [outputs / name for name in (RESULTS, LOGITS) if (outputs / name).is_file()]
        copy = Need(outputs, "the published copy", folder_bytes(Path(submission.folder)))
        replaced = Need(self.folder.path, "a copy of what it replaces", sum(path.stat().st_size for path in old))
        self.disk.require([copy, replaced])
        paths = publish(submission, outputs, None if is_kept else previous)
        self.record("published", paths=paths, sha256=submission.sha256, folder=submission.folder, **chosen)

    def evaluations(self) -> list[Event]:
        """The evaluations of this task that were counted so far, by all runs on the workspace.

        Raises:
            RunFolderError: the ledger of a run beside this one cannot be read.
        """
        counted: list[Event] = []
        for path in sorted(self.folder.path.parent.glob("*/ledger.jsonl")):
            state = RunFolder(path.parent).read_state()
            if (state.opened or {}).get("workspace") == str(self.workspace.root):
                counted += state.evaluations
        return sorted(counted, key=lambda event: float(event["time"]))

    def require_evaluation(self) -> None:
        """Refuse when the task's evaluations are used up.

        Raises:
            StageError: naming what was handed in, and when.
        """
        counted, limit = self.evaluations(), self.config.budget.evaluations
        if len(counted) >= limit:
            days = (time.strftime("%Y-%m-%d %H:%M", time.localtime(event["time"])) for event in counted)
            raise StageError(f"all {limit} evaluations are used ({', '.join(days)}); nothing was changed or counted")

    def count_evaluation(self) -> str:
        """Count the newest publication as handed in; the same files are counted once. Returns what is to be told."""
        published, counted = self.state().published[-1], self.evaluations()
        limit = self.config.budget.evaluations
        for number, event in enumerate(counted, start=1):
            if event["sha256"] == published["sha256"]:
                return f"these files are evaluation {number} of {limit} already"
        self.record("evaluation_counted", **{name: published[name] for name in ("sha256", "trial", "step")})
        return f"counted as evaluation {len(counted) + 1} of {limit}"


def _unwritable(what: str, error: OSError) -> StageError:
    where = f" {error.filename}" if error.filename else ""
    return StageError(f"{what} cannot write{where}: {error.strerror or error}; free space or fix it, then resume")


def _receipt(state: RunState, stage: str) -> list[Event]:
    """The newest receipt of a stage; [] when there is none."""
    return [state.stages[stage]] if stage in state.stages else []
