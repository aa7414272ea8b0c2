"""The submissions of a run: early, better, last, exported; and how many were handed in."""

import functools
import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.disk import Need
from agent.errors import StageError
from agent.ledger import Event, TrialState
from agent.merging import merge_checkpoint
from agent.model_check import check_merged_model
from agent.promotion import CheckpointChoice, choice_error
from agent.run_folder import Lock, RunFolder
from agent.submission import (
    LOGITS,
    RESULTS,
    Submission,
    is_copy,
    is_published,
    publish,
    run_inference,
    run_logged,
    validate_submission,
)
from agent.trial_runs import TrialRuns
from trials.checkpoints import folder_bytes, read_checkpoints

_CHOSEN = ("trial", "step", "objective", "accuracy", "entropy")


class Submitting(TrialRuns):
    """Makes and publishes submissions."""

    # ---- which -------------------------------------------------------------------------------------------------------

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
        """The published submission where its objective is higher by more than one standard error, put back if its files are
        gone; else None: of two that chance cannot tell apart, the newer one has been trained for longer."""
        state = self.state()
        event = state.published[-1] if state.published else {}
        margin = choice_error(choice, self._dev_total)
        if event.get("objective", 0.0) <= choice.objective + margin:
            return None
        try:
            submission = Submission(**json.loads((Path(event["folder"]) / "submission.json").read_text("utf-8")))
            self._publish(submission, {name: event[name] for name in _CHOSEN})
        except (OSError, ValueError, TypeError, StageError):
            return None
        chosen = f"{event['trial']} step {event['step']} stays"
        if not any(decision["chosen"] == chosen for decision in state.decisions):
            reason = f"its objective {event['objective']:.4f} is above the {choice.objective:.4f} ± {margin:.4f} of "
            self.decide("submission", chosen, f"{reason}{trial.trial} step {choice.step}")
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

    # ---- how ---------------------------------------------------------------------------------------------------------

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
            try:
                return {"submission": asdict(validate_submission(results, self.workspace.test_file, model))}
            except StageError:
                refused = results.with_name("refused")  # to look at; the next attempt runs the inference again
                shutil.rmtree(refused, ignore_errors=True)
                results.rename(refused)
                raise

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

    # ---- evaluations -------------------------------------------------------------------------------------------------

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
        published = [event["sha256"] for event in self.state().published[-1:]]
        if len(counted) >= limit and not any(event["sha256"] in published for event in counted):
            days = (time.strftime("%Y-%m-%d %H:%M", time.localtime(event["time"])) for event in counted)
            raise StageError(f"all {limit} evaluations are used ({', '.join(days)}); nothing was changed or counted")

    def count_evaluation(self) -> str:
        """Count the newest publication as handed in; the same files are counted once. Returns what is to be told."""
        published, counted = self.state().published[-1], self.evaluations()
        limit = self.config.budget.evaluations
        for number, event in enumerate(counted, start=1):
            if event["sha256"] == published["sha256"]:
                return f"these files are evaluation {number} of {limit} already"
        self.require_evaluation()
        self.record("evaluation_counted", **{name: published[name] for name in ("sha256", "trial", "step")})
        return f"counted as evaluation {len(counted) + 1} of {limit}"
