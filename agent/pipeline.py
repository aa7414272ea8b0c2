"""The story of a run: baseline → search → promote → full run → select → submit → report.

Each stage leaves a receipt in the ledger with a hash of its inputs; a resumed run skips stages whose receipt fits.
"""

import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from agent.budget import BudgetPlan, Measured, last_save, measure
from agent.clock import boot_facts
from agent.errors import StageError
from agent.ledger import RunState, TrialState
from agent.promotion import CheckpointChoice, choose_promotion, rank_proxies
from agent.report import write_report
from agent.run import BASELINE, FULL
from agent.submission import Submission
from agent.submitting import Submitting
from search_spaces.space import Configuration
from trials.checkpoints import bring_back, complete_steps, folder_bytes, read_checkpoints
from trials.runner import Ended, TrialSpec, Validation, read_history

_SLACK = 1.05
"""A re-measurement that must end leaves this much of the full run's expected time."""


class Pipeline(Submitting):
    """One run on one workspace. `execute()` goes from wherever the ledger stands to the end."""

    # ---- the story ---------------------------------------------------------------------------------------------------

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

    # ---- overlay and baseline ----------------------------------------------------------------------------------------

    def _install_overlay(self) -> None:
        """Append the overlay to core_algos.py, everything off, or as promoted once the full run has begun."""
        full_run = self.state().full_run
        self._bake(full_run.configuration if full_run else {})

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

    # ---- search ------------------------------------------------------------------------------------------------------

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
        self._plan_search()

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
            ended = sum(
                trial.outcome is not None for trial in self.state().search_trials
            )  # not one whose node was lost
            if broken or ended >= settings.trials or self._time_is_over() or not self._may_start():
                break
        self.folder.stop_file.unlink(missing_ok=True)
        self._remove_scripts()
        if broken:
            raise StageError(f"{broken} — fix the cause, then resume; nothing that had finished is lost")
        self._write_study()
        after = self.state()
        return {"trials": len(after.search_trials), "failed": sum(t.outcome == "failed" for t in after.search_trials)}

    def _write_study(self) -> None:
        """Bring the view for optuna-dashboard up to date; not while trials wait for a slot, as it takes a second."""
        from agent.search import write_study

        write_study(self.state(), self.folder.optuna, self.folder.path.name)

    # ---- re-measurement of proxies -----------------------------------------------------------------------------------

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

    # ---- promotion and full run --------------------------------------------------------------------------------------

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
