"""The story of a run: baseline → search → promote → full run → select → submit → report.

Each stage leaves a receipt in the ledger with a hash of its inputs; a resumed run skips stages whose receipt fits.
"""

import functools
import os
import re
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.budget import BudgetPlan, Measured, plan_budget
from agent.config import AgentConfig, digest
from agent.errors import AgentError, Interrupted, PreflightError, RunFolderError, StageError
from agent.ledger import Event, RunState, TrialState
from agent.objective import judge, score_validation
from agent.promotion import CheckpointChoice, choose_checkpoint, choose_promotion
from agent.report import write_report
from agent.run_folder import Lock, RunFolder, elapsed_s
from agent.submission import (
    Submission,
    is_published,
    merge_checkpoint,
    publish,
    restore_outputs,
    run_inference,
    run_logged,
    validate_submission,
)
from agent.workspace import Workspace, changed_files, forbidden_changes, read_manifest
from search_spaces.space import Configuration
from trials.checkpoints import complete_steps, delete_checkpoints, read_checkpoints, repair_tracker
from trials.guard import sweep, sweep_holders
from trials.runner import Attempt, Ended, TrialSpec, Validation, read_history, trial_scratch, validations
from trials.script import OverrideValue, differing_overrides
from verl_overlay import install

BASELINE, FULL = "t000", "full"
_FULL_RUN_ATTEMPTS = 3


class Pipeline:
    """One run on one workspace. `execute()` goes from wherever the ledger stands to the end."""

    def __init__(
        self, folder: RunFolder, config: AgentConfig, on_event: Callable[[Event], None], alone: bool = True
    ) -> None:
        """`alone` is False when a living driver owns the run and this process only exports from it."""
        self.folder, self.config, self.alone = folder, config, alone
        self.workspace = Workspace(config.workspace)
        self.space = config.read_space()
        self.ledger = folder.ledger
        self._on_event = on_event
        self._stop = threading.Event()
        self.dev_rows = self.workspace.dev_rows()
        self.rungs = plan_rungs(config, self.workspace)

    # ---- ledger --------------------------------------------------------------------------------------------------

    def record(self, event: str, **facts: Any) -> None:
        """Append to the ledger and tell the view."""
        self._on_event(self.ledger.append(event, **facts))

    def state(self) -> RunState:
        return self.folder.read_state()

    def decide(self, what: str, chosen: Any, reason: str) -> None:
        """A decision with its reason, so that the report can tell why."""
        self.record("decision", what=what, chosen=chosen, reason=reason)

    def stage(self, name: str, inputs: Any, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a stage unless its receipt with the same inputs is in the ledger; returns the receipt's facts."""
        key = digest(inputs)
        receipt = self.state().stages.get(name)
        if receipt is not None and receipt["inputs"] == key:
            return receipt
        self.record("stage_started", stage=name)
        started = time.monotonic()
        try:
            facts = work()
        except AgentError as error:
            if not isinstance(error, Interrupted):
                self.record("stage_failed", stage=name, reason=str(error))
            raise
        self.record("stage_done", stage=name, inputs=key, seconds=round(time.monotonic() - started, 2), **facts)
        return facts

    # ---- the story -----------------------------------------------------------------------------------------------

    def execute(self) -> Submission:
        """Everything that is still to do.

        Raises:
            Interrupted: a person stopped it; all children are gone.
            StageError: a stage failed for good.
        """
        with self._interruptible():
            self.clean_up()
            self._require_unchanged_workspace()
            self.record("driver_started", pid=os.getpid())
            self._install_overlay()
            self.stage("baseline", {}, self._run_baseline)
            self._search()
            trial, choice = self._promote_and_train()
            submission = self.submit(trial, choice)
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
            submission = self.submit(trial, choice, what="checkpoint for export")
        write_report(self.folder.path)
        return submission

    def finish(self) -> None:
        """Prove what changed in the workspace and write the report."""
        self._remove_scripts()
        changed, forbidden = self.workspace_changes()
        state = self.state()
        if state.finished is None or state.published[-1]["time"] > state.finished["time"]:
            facts = {"changed_files": changed, "forbidden_changes": forbidden}
            self.record("run_finished", **facts, seconds=round(elapsed_s(state), 1))
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
                self.folder.stop_file.touch()

        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except Interrupted as error:
            self.record("interrupted")
            raise Interrupted(f"{error}; `python run_agent.py resume {self.folder.path}` goes on") from None
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _require_running(self) -> None:
        if self._stop.is_set():
            raise Interrupted("stopped on request")

    def clean_up(self) -> None:
        """Remove what a killed driver left: processes, scripts, scratch folders; recover what its trials had done."""
        self.folder.stop_file.unlink(missing_ok=True)
        sweep(self.folder.tag)
        sweep_holders(self.folder.ray_tmpdir)
        self._remove_scripts()
        shutil.rmtree(self.folder.ray_tmpdir, ignore_errors=True)
        for trial in self.state().trials.values():
            if trial.outcome is None:
                self._recover(trial)

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
        known = {score.step for score in trial.scores}
        initial = self._measured_initial_entropy()
        history = read_history(self.folder.trial(trial.trial))
        for validation in validations(history, self.dev_rows):
            if initial and validation.step not in known and validation.step > 0:
                self.record("trial_scored", trial=trial.trial, **self._score(trial.kind, initial)(validation))
        last = history[-1].step if history else 0
        if trial.kind == "search" and last >= self.rungs[-1]:
            reason = f"recovered from its log: step {last} was done when the driver died"
            self.record("trial_ended", trial=trial.trial, outcome="completed", failure=None, reason=reason, step=last)

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
        state = self.state()
        attempt = (state.trials[BASELINE].attempts if BASELINE in state.trials else 0) + 1
        parameters = self.space.complete({})
        from agent.search import distributions_of

        self.record(
            "trial_started", trial=BASELINE, attempt=attempt, kind="baseline", origin="baseline", configuration={},
            parameters=parameters, distributions=distributions_of(self.space, parameters),
        )  # fmt: skip

        def tell(validation: Validation) -> None:
            initial = self._measured_initial_entropy()
            if initial and validation.step > 0:
                self.record("trial_scored", trial=BASELINE, **self._score("baseline", initial)(validation))

        ended = self._run_attempt(self.prepare(BASELINE, attempt, "baseline", {}), tell)
        self._record_end(BASELINE, ended)
        if ended.outcome != "completed":
            raise StageError(f"the GRPO baseline failed: {ended.reason}; fix the workspace, then resume")
        initial = self._measured_initial_entropy()
        if initial is None or not initial > 0:
            raise StageError(
                f"the baseline shows no policy entropy (first value: {initial}): the log has neither actor/entropy nor "
                "actor/entropy_loss; the agent cannot judge methods without it"
            )
        steps = [m.step_s for m in read_history(self.folder.trial(BASELINE)) if m.step_s is not None]
        step_s = ended.step_s or (statistics.fmean(steps) if steps else 0.0)  # a resumed baseline may end at once
        return {"initial_entropy": initial, "start_up_s": ended.start_up_s or 0.0, "step_s": step_s}

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

    def _run_attempt(self, spec: TrialSpec, on_validation: Callable[[Validation], None]) -> Ended:
        """Run one attempt in this process.

        Raises:
            Interrupted: a person stopped it.
        """
        attempt = Attempt(spec)
        try:
            for event in attempt.events():
                if isinstance(event, Ended):
                    self._require_running()
                    return event
                on_validation(event)
        except OSError as error:
            raise StageError(
                f"cannot write to {spec.folder}: {error.strerror}; free space or fix it, then resume"
            ) from None
        finally:
            attempt.close()
        raise AssertionError("events() ends with Ended")

    def _record_end(self, trial: str, ended: Ended) -> None:
        facts = asdict(ended)
        self.record("trial_ended", trial=trial, step=facts.pop("last_step"), **facts)

    # ---- trials --------------------------------------------------------------------------------------------------

    def prepare(self, trial: str, attempt: int, kind: str, configuration: Configuration) -> TrialSpec:
        """The attempt of a short trial, its folder made ready for it."""
        folder = self.folder.trial(trial)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints = folder / "checkpoints"
        resumed_step = repair_tracker(checkpoints) if attempt > 1 else None
        return self.short_trial(trial, attempt, kind, configuration, resumed_step or 0)

    def short_trial(
        self, trial: str, attempt: int, kind: str, configuration: Configuration, resumed_step: int = 0
    ) -> TrialSpec:
        """The attempt of a short trial: the workspace's script with other test_freq, save_freq and output folder."""
        checkpoints = self.folder.trial(trial) / "checkpoints"
        if kind == "search":
            schedule: Configuration = {"schedule.steps": float(self.workspace.total_steps)}
            configuration = schedule | self.space.configuration(configuration)
        concurrent = 1 if kind == "baseline" else self.config.search.concurrent
        return TrialSpec(
            script=self.workspace.script.render(trial_overrides(self.rungs, checkpoints)),
            script_path=str(self._script_of(trial)),
            configuration=dict(configuration),
            resumed_step=resumed_step,
            stop_step=self.rungs[-1],
            environment=self._threads(concurrent),
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
            "run_tag": self.folder.tag,
            "configuration_id": install.configuration_identity(configuration),
            "needs_advantage": install.acts_on_advantage(configuration),
            "startup_timeout_s": search.startup_timeout_s,
            "stall_timeout_s": search.stall_timeout_s,
            "training_env": self.config.training_prefix(),
            "stop_file": str(self.folder.stop_file),
        }

    def _threads(self, concurrent: int) -> dict[str, str]:
        """On a machine where the CPU trains, trials side by side share its cores."""
        if self.workspace.setting("trainer.device") != "cpu" or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // concurrent))}

    # ---- search --------------------------------------------------------------------------------------------------

    def plan(self) -> BudgetPlan:
        """What still fits, from the baseline's measurements."""
        state = self.state()
        budget = self.config.budget
        return plan_budget(
            measured=self._measured(),
            elapsed_s=elapsed_s(state),
            total_s=budget.total_hours * 3600,
            training_done_s=state.training_s,
            training_limit_s=budget.training_hours * 3600,
            total_steps=self.workspace.total_steps,
            inference_limit_s=budget.inference_minutes * 60,
            concurrent=self.config.search.concurrent,
        )

    def _measured(self) -> Measured:
        """Start-up and step time of the baseline."""
        receipt = self.state().stages["baseline"]
        return Measured(float(receipt["start_up_s"]), float(receipt["step_s"]))

    def _search(self) -> None:
        state = self.state()
        enough = "search" in state.stages and len(state.search_trials) >= self.config.search.trials
        if enough or state.full_run is not None:
            return
        budget = self.plan()
        measured = self._measured()
        if budget.search_ends_s < measured.start_up_s + self.rungs[0] * measured.step_s:
            self.decide("budget", "no search: not even a first rung fits", budget.reason)
            return
        self.decide("budget", f"search for at most {budget.search_ends_s:.0f} s", budget.reason)
        search_deadline = time.monotonic() + budget.search_ends_s
        self.stage(
            "search",
            {"trials": self.config.search.trials},
            lambda: self._run_search(state, lambda: time.monotonic() > search_deadline),
        )

    def _run_search(self, state: RunState, time_is_over: Callable[[], bool]) -> dict[str, Any]:
        from agent.search import SearchPlan, run_search

        settings = self.config.search
        plan = SearchPlan(
            space=self.space,
            trials=settings.trials,
            concurrent=settings.concurrent,
            rungs=self.rungs,
            reduction_factor=settings.reduction_factor,
            dev_rows=sum(self.dev_rows.values()),
            seed=self.config.seed,
            startup_trials=settings.startup_trials,
            failures_in_a_row=settings.failures_in_a_row,
        )
        initial = state.initial_entropy
        assert initial is not None
        broken = run_search(
            plan,
            self.record,
            state,
            self.prepare,
            self._score("search", initial),
            must_stop=self._stop.is_set,
            time_is_over=time_is_over,
            stop_file=self.folder.stop_file,
            on_end=self.delete_losers,
            scratch=self.folder.path / "tune",
            ray_tmpdir=self.folder.ray_tmpdir,
            run_tag=self.folder.tag,
        )
        self._require_running()
        self.folder.stop_file.unlink(missing_ok=True)
        self._remove_scripts()
        if broken:
            raise StageError(f"{broken} — fix the cause, then resume; nothing that had finished is lost")
        after = self.state()
        return {"trials": len(after.search_trials), "failed": sum(t.outcome == "failed" for t in after.search_trials)}

    def delete_losers(self) -> None:
        """Delete the checkpoints of ended trials that can no longer become the submission."""
        state = self.state()
        trials = [trial for trial in state.trials.values() if trial.kind != "full"]
        leader = choose_promotion([trial for trial in trials if trial.scores])
        for trial in trials:
            if trial.outcome is not None and leader is not None and trial.trial != leader.trial:
                delete_checkpoints(self.folder.trial(trial.trial) / "checkpoints", keep=())

    # ---- promotion and full run ----------------------------------------------------------------------------------

    def _promote_and_train(self) -> tuple[TrialState, CheckpointChoice]:
        state = self.state()
        candidates = [trial for trial in state.trials.values() if trial.kind != "full"]
        promotion = choose_promotion(candidates)
        if promotion is None:
            raise StageError("no trial has a usable score, so nothing can be promoted; see the report for the failures")
        if state.full_run is None:
            self.decide("promotion", promotion.trial, promotion.reason)
            budget = self.plan()
            if not budget.full_run_fits:
                self.decide("full run", None, budget.reason)
                return self.best_checkpoint()
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
        return full, choice

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
            **self._common(FULL, attempt, configuration),
        )

    def full_run_checkpoints(self) -> Path:
        return self.workspace.full_run_checkpoints(self.folder.trial(FULL))

    def _full_run(self, configuration: Configuration, promoted: str) -> dict[str, Any]:
        self._bake(configuration)
        initial = self.state().initial_entropy
        assert initial is not None
        while True:
            state = self.state()
            attempt = (state.full_run.attempts if state.full_run else 0) + 1
            checkpoints = self.full_run_checkpoints()
            if attempt == 1 and read_checkpoints(checkpoints):
                raise StageError(
                    f"{checkpoints} already holds checkpoints of another run, which verl would resume from; move them away"
                )
            resumed_step = repair_tracker(checkpoints) if attempt > 1 else None
            self.record(
                "trial_started", trial=FULL, attempt=attempt, kind="full", origin=f"promotion of {promoted}",
                configuration=configuration,
            )  # fmt: skip
            score = self._score("full", initial)

            def tell(validation: Validation, score: Callable[[Validation], dict[str, Any]] = score) -> None:
                if validation.step > 0:
                    self.record("trial_scored", trial=FULL, **score(validation))

            limit_s = self.plan().training_ends_s
            ended = self._run_attempt(self.full_run_spec(attempt, configuration, limit_s, resumed_step or 0), tell)
            self._record_end(FULL, ended)
            if ended.outcome == "completed":
                return {"steps": ended.last_step, "start_up_s": ended.start_up_s, "step_s": ended.step_s}
            if ended.outcome == "stopped" or attempt >= _FULL_RUN_ATTEMPTS:
                if complete_steps(checkpoints) or ended.outcome == "stopped":
                    return {"steps": ended.last_step, "failure": ended.failure}
                raise StageError(
                    f"the full run failed {attempt} times, at last: {ended.reason}; `export` can still submit"
                )

    # ---- submission ----------------------------------------------------------------------------------------------

    def checkpoints_of(self, trial: TrialState) -> Path:
        return self.full_run_checkpoints() if trial.kind == "full" else self.folder.trial(trial.trial) / "checkpoints"

    def _choose(self, trial: TrialState) -> CheckpointChoice | None:
        """The best complete checkpoint of a trial by its measured entropy."""
        initial = self.state().initial_entropy
        if initial is not None:
            band = self.config.objective.band()
            for score in trial.scores:
                measured = judge(score.accuracy, score.entropy, initial, 1.0, band)
                score.objective, score.reason = measured.value, measured.reason
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
            promotion = choose_promotion(trials)
            leader = state.trials[promotion.trial] if promotion else trials[0]
            if choice := self._choose(leader):
                return leader, choice
            trials.remove(leader)
        raise StageError(f"no trial of {self.folder.path} has a complete checkpoint yet; resume the run first")

    def submit(self, trial: TrialState, choice: CheckpointChoice, what: str = "checkpoint") -> Submission:
        """Merge, run inference, validate and publish one checkpoint; finished parts are not repeated."""
        chosen = {"trial": trial.trial, "step": choice.step}
        origin = {**chosen, "attempts": trial.attempts, "configuration": trial.configuration}
        checkpoint = next(c for c in read_checkpoints(self.checkpoints_of(trial)) if c.step == choice.step)
        facts = {"objective": choice.objective, "accuracy": choice.accuracy, "entropy": choice.entropy}
        self.stage("select", origin, lambda: self._select(what, choice, {**chosen, **facts, "reason": choice.reason}))
        folder = self.folder.submission / f"{trial.trial}_step_{choice.step}"
        folder.mkdir(parents=True, exist_ok=True)
        model, results = folder / "model", folder / "results"
        must_stop = self._stop.is_set
        run = functools.partial(
            run_logged, run_tag=self.folder.tag, training_env=self.config.training_prefix(), must_stop=must_stop
        )

        def merge() -> dict[str, Any]:
            merge_checkpoint(self.workspace, checkpoint.actor, model, log=folder / "merge.log", run=run)
            return {"model": str(model)}

        def infer() -> dict[str, Any]:
            limit_s = self.config.budget.inference_minutes * 60
            log = folder / "inference.log"
            run_inference(self.workspace, model, results, log=log, timeout_s=limit_s, run=run)
            return {"results": str(results)}

        def validate() -> dict[str, Any]:
            return {"submission": asdict(validate_submission(results, self.workspace.test_file, model))}

        with Lock(folder / "lock", f"the submission {folder}", must_stop):  # waits for an export of the same checkpoint
            for name, work in (("merge", merge), ("inference", infer), ("validate", validate)):
                self._require_running()
                receipt = self.stage(name, origin, work)
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
        number = 1
        while (previous := self.folder.submission / f"previous_{number}").exists():
            number += 1
        paths = publish(submission, self.workspace.outputs, previous)
        self.record("published", paths=paths, sha256=submission.sha256, **chosen)


def trial_overrides(rungs: Sequence[int], checkpoints: Path) -> dict[str, OverrideValue]:
    """What a short trial changes in train.sh: it is judged and saved at every rung, in a folder of its own."""
    return {
        "trainer.test_freq": rungs[0],
        "trainer.save_freq": rungs[0],
        "trainer.default_local_dir": str(checkpoints),
    }


def plan_rungs(config: AgentConfig, workspace: Workspace) -> tuple[int, ...]:
    """The steps at which trials are judged.

    Raises:
        PreflightError: the configured steps do not fit the schedule of train.sh.
    """
    total = workspace.total_steps
    first = config.search.first_rung_steps or max(1, total // 8)
    last = config.search.last_rung_steps or max(first, total // 2 // first * first)
    if not first <= last <= total or last % first:
        raise PreflightError(
            f"search.first_rung_steps={first} and search.last_rung_steps={last} do not fit train.sh's {total} steps: the "
            "last must be a multiple of the first and at most the total"
        )
    steps, factor = [], config.search.reduction_factor
    step = first
    while step < last:
        steps.append(step)
        step *= factor
    return (*steps, last)
