"""The trials of a run: their scripts, slots, attempts and disk, and what is left of them after a kill."""

import functools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.disk import Deletion, Need, Sizes, plan_checkpoint_deletions, plan_submission_deletions, product
from agent.disk_guard import DiskGuard
from agent.doctor import read_demand
from agent.errors import AgentError, Interrupted, PreflightError, StageError
from agent.ledger import Event, RunState, TrialState
from agent.promotion import choose_losers, choose_promotion, losing_steps
from agent.run import FULL, Run, unwritable
from agent.run_folder import is_locked
from agent.rungs import trial_overrides
from agent.script_checks import known
from agent.slots import Ask, read_proxy_overrides, require_open_devices
from agent.tensors import read_batches_given
from search_spaces.space import Configuration
from trials.checkpoints import (
    bring_back,
    complete_steps,
    delete_checkpoints,
    delete_over_limit,
    describe_data_place,
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
    recover_history,
    trial_scratch,
    validations,
)
from trials.script import differing_overrides
from verl_overlay import install

if TYPE_CHECKING:
    from agent.cluster import ClusterAttempt, Engine

_COMMAND = Path(__file__).resolve().parents[1] / "run_agent.py"


class TrialRuns(Run):
    """Prepares, runs and recovers trials."""

    # ---- start and stop ----------------------------------------------------------------------------------------------

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
        for half in [*self.folder.path.glob("*.tmp*"), *self.folder.path.glob("trials/*/attempt_*/*.tmp")]:
            half.unlink(missing_ok=True)
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

    # ---- disk --------------------------------------------------------------------------------------------------------

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

    def delete_losers(self) -> None:
        """Delete the checkpoints of ended trials that can no longer become the submission."""
        with self.disk.lock:
            self._delete_losers()

    def _delete_losers(self) -> None:
        trials = [trial for trial in self.state().trials.values() if trial.kind != "full"]
        ended = [trial for trial in trials if trial.outcome is not None]
        for trial in ended:
            bring_back(self.checkpoints_of(trial))
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

    # ---- slots -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _proxy_overrides(self) -> dict[str, int]:
        return read_proxy_overrides(self.workspace, self.ask)

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

    # ---- attempts ----------------------------------------------------------------------------------------------------

    def _bake(self, configuration: Configuration) -> None:
        """Let core_algos.py run this configuration where no environment variable says otherwise."""
        try:
            report = install.install(self.workspace.core_algos, configuration, self.folder.path / "original")
        except install.OverlayError as error:
            raise PreflightError(str(error)) from None
        if report.changed:
            hashes = {"original_sha256": report.original_sha256, "installed_sha256": report.installed_sha256}
            self.record("overlay_installed", configuration=configuration, **hashes)

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

    # ---- running -----------------------------------------------------------------------------------------------------

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
            failed_before = self.state().trials[name].failed_attempts
            if kind is None or not kind.may_retry(failed_before, ended.start_up_s is not None):
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
            raise unwritable(spec.trial, error) from None
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

    def _end_open_trials(self, *kinds: str) -> None:
        """Trials that were interrupted and for which no time is left."""
        for trial in self.state().trials.values():
            if trial.outcome is None and trial.kind in kinds:
                reason = "the time of the search is over"
                self.record("trial_ended", trial=trial.trial, outcome="stopped", reason=reason, out_of_time=True)


def _receipt(state: RunState, stage: str) -> list[Event]:
    """The newest receipt of a stage; [] when there is none."""
    return [state.stages[stage]] if stage in state.stages else []
