"""The search: one Ray Tune run whose sampler (Optuna) and scheduler (ASHA) are rebuilt from the ledger at every start.

Neither Tune's nor Optuna's own state survives a crash in a usable way, so both are opinions: finished trials of the
ledger are added to a new study, unfinished and not yet started ones are queued, and ASHA's rungs are filled again. The
driver writes the ledger here, when results arrive. The only file that imports optuna.
"""

import json
import os
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.trial import TrialState as OptunaState
from ray import tune
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search.optuna import OptunaSearch

from agent.cluster import Engine, driver_environment, find_slots, is_node_lost
from agent.errors import AgentError, StageError
from agent.ledger import Event, RunState, Score, TrialState, apply
from agent.objective import WORST, standard_error
from agent.slots import ON_CPU, Ask, SlotsBusy
from search_spaces.space import Configuration, SearchSpace
from trials.health import ATTEMPTS, FailureKind
from trials.runner import TrialSpec
from trials.trainable import Scorer, TrialTrainable, read_place

PROXY_BASELINE = "plain GRPO"
"""Origin of the first proxy: what the other proxies are compared with, as the baseline is too large for that."""

_DRAWS = 10
"""So often a new point is drawn until it differs from all before it."""
_LOOK_AGAIN_S = 20.0

_WORKER_DIED = "the trial's worker died"

Prepare = Callable[[str, int, str, Configuration], TrialSpec]
"""(trial, attempt, kind, configuration) → the attempt to run."""


@dataclass(frozen=True)
class SearchPlan:
    """What one search does."""

    space: SearchSpace
    trials: int
    """Search trials in all, those already in the ledger included."""
    concurrent: int | None
    """Most trials that run side by side; None is as many as the GPUs hold."""
    rungs: tuple[int, ...]
    """Steps at which ASHA judges, ascending; the last one ends a trial."""
    reduction_factor: int
    dev_rows: int
    seed: int
    startup_trials: int
    failures_in_a_row: int
    ask: Ask = ON_CPU
    patience_s: float = 1800.0
    """While no trial runs, so long may one wait for a slot that others hold."""


def distributions_of(space: SearchSpace, parameters: Configuration) -> dict[str, str]:
    """Optuna's distributions (as JSON) of the knobs that are active at a point."""
    fixed = optuna.trial.FixedTrial(parameters)
    space.suggest(fixed)
    return {name: distribution_to_json(distribution) for name, distribution in fixed.distributions.items()}


def run_search(
    plan: SearchPlan,
    record: Callable[..., Event],
    state: RunState,
    prepare: Prepare,
    score: Scorer,
    *,
    engine: Engine,
    must_stop: Callable[[], bool],
    time_is_over: Callable[[], bool],
    may_start: Callable[[], bool],
    stop_file: Path,
    on_end: Callable[[], None],
    scratch: Path,
) -> str | None:
    """Run trials until the plan's number has been started and is over, time is over, a person stops it, or the circuit
    breaker opens. A trial for which time was over, or whose node was lost, may be left without an end; for the latter call
    again with a new state.

    Returns why the circuit breaker opened, None when it did not.

    Args:
        plan: what to do.
        record: appends an event to the ledger and returns it: every start, score and end.
        state: the fold of the ledger at this moment; the search keeps it up to date.
        prepare: makes the attempt of a trial.
        score: judges a validation; sent to the workers.
        engine: the Ray that runs the trials.
        must_stop: a person asked to stop.
        time_is_over: the budget of the search is spent.
        may_start: another trial fits into it.
        stop_file: created to interrupt running trials at once.
        on_end: called after each trial that ended.
        scratch: folder for Tune's own files; emptied.

    Raises:
        PreflightError: no node has the GPUs of a trial, or others hold them.
        StageError: the search engine failed, or nothing can be recorded any more.
    """
    ended = [trial for trial in state.search_trials if trial.outcome is not None]
    missing = plan.trials - len(ended)
    if missing <= 0:
        return None
    lost_workers: dict[str, str] = {}
    searcher = LedgerSearch(plan, record, state, prepare, must_stop, on_end, lost_workers, may_start)
    scheduler = LedgerASHA(plan.rungs, plan.reduction_factor, plan.dev_rows, lost_workers)
    scheduler.refill(comparable_trials(state, plan.ask))

    def is_over() -> bool:
        return must_stop() or time_is_over() or searcher.is_broken or engine.lost_process() is not None

    stopper = _Stopper(is_over, searcher.watch_waiting, stop_file)
    shutil.rmtree(scratch, ignore_errors=True)
    if not must_stop():
        stop_file.unlink(missing_ok=True)  # of a search that ended because Ray had lost a process
    with engine:
        slots, resources = _reserve(plan)
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(slots)  # by default the workers would start one after the other
        trainable = tune.with_parameters(
            TrialTrainable, score=score, worst=WORST, environment=driver_environment() if engine.address else {}
        )
        trainable.__name__ = f"trial-{engine.identifier}"
        tuner = tune.Tuner(
            tune.with_resources(trainable, resources),
            tune_config=tune.TuneConfig(
                metric="objective",
                mode="max",
                search_alg=searcher,
                scheduler=scheduler,
                num_samples=ATTEMPTS * missing,  # the searcher ends it
                max_concurrent_trials=slots,
                reuse_actors=True,
                trial_name_creator=lambda trial: trial.trial_id,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(scratch),
                stop=stopper,
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            ),
        )
        try:
            tuner.fit()
        except Exception as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise searcher.fatal or StageError(f"the search engine failed: {line}; see {engine.log}") from None
    if searcher.fatal:
        raise searcher.fatal
    shutil.rmtree(scratch, ignore_errors=True)
    return searcher.broken


def _reserve(plan: SearchPlan) -> tuple[int, dict[str, float]]:
    """How many trials run side by side, and what each reserves of Ray."""
    if not plan.ask.gpus:
        return plan.concurrent or 1, {"cpu": 1}
    slots = find_slots(plan.ask, plan.concurrent)
    return slots.count, {"cpu": slots.cpus, "gpu": plan.ask.gpus}


def comparable_trials(state: RunState, ask: Ask) -> list[TrialState]:
    """The trials whose scores the search may compare: those on as many GPUs as its own, the baseline included."""
    return [t for t in state.trials.values() if t.kind in ("baseline", "search") and t.is_proxy == ask.is_proxy]


def write_study(state: RunState, path: Path, name: str) -> None:
    """Write all trials of a run as an Optuna study in a SQLite file, for optuna-dashboard; what was there is replaced.

    Nothing reads it back. It is made in memory and copied, so that the file is never half of it.

    Args:
        state: the fold of the ledger.
        path: `optuna.db` of the run.
        name: of the study.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    memory = sqlite3.connect(":memory:", check_same_thread=False)
    storage = optuna.storages.RDBStorage("sqlite://", {"creator": lambda: memory})
    study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
    for trial in state.trials.values():
        if trial.kind in ("baseline", "search"):
            study.add_trial(_frozen(trial, {"kind": trial.kind, "outcome": trial.outcome, "reason": trial.reason}))
    try:
        with closing(sqlite3.connect(temporary)) as file:
            memory.backup(file)
        temporary.rename(path)
    except (OSError, sqlite3.Error):
        temporary.unlink(missing_ok=True)  # a full disk is told by the ledger
    finally:
        memory.close()


def _frozen(trial: TrialState, attributes: Mapping[str, Any]) -> optuna.trial.FrozenTrial:
    """A trial of the ledger for Optuna."""
    verdict, value = optuna_verdict(trial) if trial.outcome else (OptunaState.RUNNING, None)
    return optuna.trial.create_trial(
        state=verdict,
        value=value,
        params=trial.parameters,
        distributions={name: json_to_distribution(text) for name, text in trial.distributions.items()},
        intermediate_values={score.step: score.objective for score in trial.scores},
        user_attrs={"trial": trial.trial, "origin": trial.origin, **attributes},
    )


class _NotSaved:
    """Tune pickles what it is given, for a restore that is never used here: there is nothing to save."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).touch()


class LedgerSearch(_NotSaved, OptunaSearch):  # type: ignore[misc]
    """OptunaSearch that starts from the ledger and writes every trial's life into it."""

    def __init__(
        self,
        plan: SearchPlan,
        record: Callable[..., Event],
        state: RunState,
        prepare: Prepare,
        must_stop: Callable[[], bool],
        on_end: Callable[[], None],
        lost_workers: dict[str, str] | None = None,
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        """`state` is kept up to date with what is recorded here. `lost_workers`: Tune's trial id → how its worker was lost;
        filled by the scheduler, which Tune tells first."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._plan, self._append, self._state, self._prepare = plan, record, state, prepare
        self._must_stop, self._may_start, self._on_end = must_stop, may_start, on_end
        self._numbers = len(state.trials)
        super().__init__(space=plan.space.suggest, metric="objective", mode="max", sampler=self._new_sampler())
        self._to_start = plan.trials - sum(trial.outcome is not None for trial in state.search_trials)
        """Trials that are to be started still, once more included."""
        self._started: dict[str, str] = {}
        """Tune's trial id → ours."""
        known = comparable_trials(state, plan.ask)
        self._names = {_point(trial.parameters): trial.trial for trial in reversed(known)}
        """Point → the first trial that was run there."""
        self._queue: deque[tuple[Configuration, dict[str, str]]] = deque()
        """Points to run before Optuna draws new ones, with what is known of them: trial and origin."""
        self._waiting: dict[str, tuple[float, Path]] = {}
        """Trial → since when it waits for a slot, and its attempt's folder."""
        self._lost_workers = {} if lost_workers is None else lost_workers
        self._failures: list[tuple[str, str]] = []
        """(trial, failure) of the attempts that failed since a trial last showed a score or ended well."""
        self.broken: str | None = None
        self.fatal: AgentError | None = None
        """Why nothing can be recorded any more; Tune must not see it as a trial's error."""
        for trial in known:
            if trial.outcome is not None:
                self._ot_study.add_trial(_frozen(trial, {}))
        for trial in state.search_trials:
            if trial.outcome is None:
                self._queue.append((trial.parameters, {"trial": trial.trial, "origin": trial.origin}))
        used = {trial.origin for trial in state.trials.values()}
        if plan.ask.is_proxy and PROXY_BASELINE not in used:
            self._queue.append((plan.space.complete({}), {"origin": PROXY_BASELINE}))
        for preset in plan.space.presets:
            origin = f"preset:{preset}"
            if origin not in used:
                self._queue.append((plan.space.preset_parameters(preset), {"origin": origin}))

    def _new_sampler(self, draw: int = 0) -> optuna.samplers.BaseSampler:
        """A sampler for the next new trial. Its seed follows from the trial's number, so that a run that was killed goes on
        with the same points as one that was not."""
        seed = self._plan.seed + self._numbers + 10_007 * draw
        startup = self._plan.startup_trials
        if draw >= _DRAWS // 2:
            startup = 10**9  # at random: TPE insists on its optimum
        return optuna.samplers.TPESampler(
            seed=seed % 2**32, n_startup_trials=startup, multivariate=True, constant_liar=True
        )

    def _ask(self, trial_id: str) -> Any:
        """The next point. One that was sampled before is drawn again; in the end it is run once more, and says so."""
        if self._queue:
            parameters, attributes = self._queue.popleft()
            self._ot_study.enqueue_trial(parameters, user_attrs=attributes)
        for draw in range(_DRAWS):
            self._ot_study.sampler = self._new_sampler(draw)
            super().suggest(trial_id)
            chosen = self._ot_trials[trial_id]
            earlier = self._names.get(_point(chosen.params))
            if "origin" in chosen.user_attrs or earlier is None:
                return chosen
            if draw < _DRAWS - 1:
                self._ot_study.tell(self._ot_trials.pop(trial_id), state=OptunaState.FAIL)
        chosen.set_user_attr("origin", f"optuna, {earlier} once more")
        return chosen

    # ---- called by Tune ------------------------------------------------------------------------------------------

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """The next attempt, as Tune's config; FINISHED when no more may start: for None, Tune would ask again for ever."""
        if self.is_broken or self._must_stop() or self._to_start <= 0 or not self._may_start():
            return str(self.FINISHED)
        self._to_start -= 1
        chosen = self._ask(trial_id)
        name = chosen.user_attrs.get("trial")
        if name is None:
            name = f"t{self._numbers:03d}"
            self._numbers += 1
        attempt = self._state.trials[name].attempts + 1 if name in self._state.trials else 1
        spec = self._prepare(name, attempt, "search", dict(chosen.params))
        self._record(
            "trial_started",
            trial=name,
            attempt=attempt,
            resumed_step=spec.resumed_step,
            kind="search",
            origin=chosen.user_attrs.get("origin", "optuna"),
            configuration=spec.configuration,
            parameters=chosen.params,
            distributions={key: distribution_to_json(value) for key, value in chosen.distributions.items()},
            gpus=self._plan.ask.gpus or None,
            is_proxy=self._plan.ask.is_proxy,
        )
        self._started[trial_id] = name
        self._names.setdefault(_point(chosen.params), name)
        self._waiting[name] = (time.monotonic(), spec.attempt_folder)
        return {"trial": name, "spec": spec.to_dict()}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """A validation that lets the trial go on."""
        self._record_score(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """A trial ended: by itself, by ASHA, by failure, or because a person stopped the run."""
        if trial_id in self._completed_trials:
            return
        self._completed_trials.add(trial_id)
        name, result = self._started[trial_id], result or {}
        outcome = "failed" if error else str(result.get("outcome", "interrupted"))
        if result.get("failure") == FailureKind.DISK_FULL.value:
            self.fatal = self.fatal or StageError(f"{name}: {result.get('ending')}; free space, then resume")
        if error:
            ending = self._lost_workers.get(trial_id, _WORKER_DIED)
            result = {**result, "failure": FailureKind.KILLED.value, "ending": ending}
        if outcome == "failed" and not self.fatal and self._is_retried(name, result):
            self._retry(trial_id, name, result)
            outcome = "interrupted"
        if self.fatal or outcome == "interrupted" or (outcome == "running" and self._must_stop()):
            self._ot_study.tell(self._ot_trials[trial_id], state=OptunaState.FAIL)
            return
        if outcome != "failed":
            self._record_score(trial_id, result)
        is_short = outcome == "completed" and int(result.get("step") or 0) < self._plan.rungs[-1]
        self._end(name, "stopped" if outcome == "running" else outcome, {**result, "out_of_time": is_short})
        verdict, value = _verdict("stopped" if is_short else outcome, result.get("failure"), result.get("objective"))
        self._ot_study.tell(self._ot_trials[trial_id], value, state=verdict)
        self._on_end()

    @property
    def is_broken(self) -> bool:
        return self.broken is not None or self.fatal is not None

    # ---- facts ---------------------------------------------------------------------------------------------------

    def _record(self, event: str, **facts: Any) -> None:
        try:
            apply(self._state, self._append(event, **facts))
        except AgentError as error:
            self.fatal = self.fatal or error

    def _record_score(self, trial_id: str, result: dict[str, Any]) -> None:
        if not result.get("step"):
            return
        self._failures.clear()
        self._record("trial_scored", trial=self._started[trial_id], **asdict(Score.from_facts(result)))
        self._ot_trials[trial_id].report(result["objective"], int(result["step"]))

    def _is_retried(self, name: str, result: dict[str, Any]) -> bool:
        kind = FailureKind(result.get("failure") or FailureKind.UNKNOWN)
        return kind.may_retry(self._state.trials[name].failed_attempts, result.get("start_up_s") is not None)

    def _retry(self, trial_id: str, name: str, result: dict[str, Any]) -> None:
        """Record a failed attempt and queue the trial's next one."""
        chosen = self._ot_trials[trial_id]
        self._record(
            "attempt_failed", trial=name, attempt=self._state.trials[name].attempts, failure=result["failure"],
            reason=result.get("ending", ""), step=result.get("step"), seconds=result.get("seconds"),
        )  # fmt: skip
        self._count_failure(name, result)
        if not self.is_broken:
            origin = chosen.user_attrs.get("origin", "optuna")
            self._queue.appendleft((dict(chosen.params), {"trial": name, "origin": origin}))
            self._to_start += 1

    def _end(self, name: str, outcome: str, result: dict[str, Any]) -> None:
        reason = result.get("ending") or ""
        if outcome == "stopped":
            reason = (
                f"ASHA: objective {result['objective']:.4f} at step {result['step']} is clearly below the rung's cutoff"
            )
        self._record(
            "trial_ended", trial=name, outcome=outcome, failure=result.get("failure"), reason=reason,
            step=result.get("step"), seconds=result.get("seconds"), start_up_s=result.get("start_up_s"),
            step_s=result.get("step_s"), out_of_time=result["out_of_time"],
        )  # fmt: skip
        if outcome == "failed":
            self._count_failure(name, result)
        else:
            self._failures.clear()

    def _count_failure(self, name: str, result: dict[str, Any]) -> None:
        """The circuit breaker: several failures in a row with one cause, in more than one trial, stop the search."""
        self._failures.append((name, str(result.get("failure"))))
        recent = self._failures[-self._plan.failures_in_a_row :]
        causes, trials = {cause for _, cause in recent}, {trial for trial, _ in recent}
        enough = len(recent) == self._plan.failures_in_a_row and (len(trials) > 1 or len(recent) == 1)
        if enough and len(causes) == 1:
            self.broken = f"{len(recent)} attempts in a row failed with {causes.pop()}; the last one, of {name}: "
            self.broken += str(result.get("ending"))

    def watch_waiting(self) -> None:
        """A trial may wait for a slot while others run, but not for ever while none does."""
        running = {trial.trial for trial in self._state.search_trials if trial.open_since_s is not None}
        self._waiting = {n: w for n, w in self._waiting.items() if n in running and read_place(w[1]) is None}
        if not self._waiting or self._waiting.keys() != running:
            return
        waited_s = time.monotonic() - min(since for since, _ in self._waiting.values())
        if waited_s < min(_LOOK_AGAIN_S, self._plan.patience_s) or not self._plan.ask.gpus:
            return
        try:
            find_slots(self._plan.ask, 1)
            if waited_s > self._plan.patience_s:
                raise StageError(f"{', '.join(self._waiting)} waited {waited_s:.0f} s for a slot; check `ray status`")
        except AgentError as error:
            if waited_s > self._plan.patience_s or not isinstance(error, SlotsBusy):
                self.fatal = self.fatal or error


def _point(parameters: Configuration) -> str:
    """The same for equal points."""
    return json.dumps(parameters, sort_keys=True)


def _verdict(outcome: str, failure: str | None, objective: float | None) -> tuple[OptunaState, float | None]:
    """How Optuna is told of an ended trial: state and value.

    A trial that ASHA or the clock stopped is PRUNED: its last value belongs to a lower step than that of a completed one,
    and TPE ranks pruned trials behind completed ones by (step, value).
    """
    if outcome == "failed":
        blamed = failure is not None and FailureKind(failure).blames_configuration
        return (OptunaState.COMPLETE, WORST) if blamed else (OptunaState.FAIL, None)
    if objective is None:
        return OptunaState.FAIL, None
    if outcome == "completed":
        return OptunaState.COMPLETE, objective
    return OptunaState.PRUNED, None


def optuna_verdict(trial: TrialState) -> tuple[OptunaState, float | None]:
    """The same for a trial of the ledger."""
    last = trial.last
    outcome = "stopped" if trial.outcome == "completed" and trial.out_of_time else trial.outcome or "failed"
    return _verdict(outcome, trial.failure, last.objective if last else None)


class LedgerASHA(_NotSaved, ASHAScheduler):  # type: ignore[misc]
    """Tune's ASHA with our own rungs and trial names, so that a ledger can fill it again, and with respect for noise.

    It is the stopping variant: a trial goes on when its objective is not below the cutoff of those that reached the rung
    before it. Two more rules: nobody is stopped at a rung that fewer than `reduction_factor + 1` trials have reached (the
    cutoff of two is the noise of one), and nobody is stopped for a difference within one standard error of the objective.
    """

    def __init__(
        self, rungs: Sequence[int], reduction_factor: int, dev_rows: int, lost_workers: dict[str, str] | None = None
    ) -> None:
        """`dev_rows` is the size of the dev set: it sets the standard error of an accuracy. `lost_workers` is filled with
        Tune's trial id → how its worker was lost together with its node."""
        super().__init__(
            time_attr="step", max_t=rungs[-1], grace_period=rungs[0], reduction_factor=reduction_factor, brackets=1
        )
        self._brackets[0]._rungs = [(step, {}) for step in reversed(rungs)]
        self._dev_rows = dev_rows
        self._lost_workers = {} if lost_workers is None else lost_workers

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if result.get("outcome") != "running" or "objective" not in result:
            return str(TrialScheduler.CONTINUE)
        return self.decide(trial.config["trial"], Score.from_facts(result))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if result.get("outcome") == "completed":
            self.decide(trial.config["trial"], Score.from_facts(result))
        self._trial_info.pop(trial.trial_id, None)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        place = read_place(TrialSpec(**trial.config["spec"]).attempt_folder)
        if is_node_lost(place.node_id if place else None):
            where = f"{place.host} ({place.node_id[:6]})" if place else "its node"
            self._lost_workers[trial.trial_id] = f"the connection to its worker was lost together with {where}"
        self._trial_info.pop(trial.trial_id, None)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._trial_info.pop(trial.trial_id, None)

    def decide(self, name: str, score: Score) -> str:
        """Record a trial's score at its rung and say whether it goes on."""
        bracket = self._brackets[0]
        decision = str(bracket.on_result(SimpleNamespace(trial_id=name), score.step, score.objective))
        if decision != TrialScheduler.STOP:
            return decision
        reached = next(recorded for rung, recorded in bracket._rungs if rung <= score.step)
        cutoff = bracket.cutoff({other: value for other, value in reached.items() if other != name})
        is_clear = score.objective + standard_error(score, self._dev_rows) < cutoff
        return decision if is_clear and len(reached) > self._reduction_factor else str(TrialScheduler.CONTINUE)

    def refill(self, trials: Sequence[TrialState]) -> None:
        """Fill the rungs with what the ledger knows."""
        for trial in trials:
            if trial.outcome != "failed":
                for score in sorted(trial.scores, key=lambda score: score.step):
                    self.decide(trial.trial, score)


class _Stopper(_NotSaved, tune.Stopper):  # type: ignore[misc]
    """Ends the Tune run and, through the stop file, the steps that are under way."""

    def __init__(self, condition: Callable[[], bool], look: Callable[[], None], stop_file: Path) -> None:
        """`look` is called once a second."""
        self._condition, self._look, self._stop_file = condition, look, stop_file
        self._looked_s = time.monotonic()

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        if time.monotonic() - self._looked_s > 1:
            self._look()
            self._looked_s = time.monotonic()
        if self._condition():
            self._stop_file.touch()
            return True
        return False
