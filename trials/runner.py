"""One attempt: a training script under guard, its log turned into validations, and how it ended.

An attempt has a folder `trials/<id>/attempt_<n>/` with the script that was run, its environment, the process ids and the
log. A trial's `metrics.jsonl` gets every step line of every attempt.
"""

import hashlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from trials.gpus import held_gpus
from trials.guard import ATTEMPT_TAG, RUN_TAG, Guarded, sweep
from trials.health import FailureKind, classify_exit, is_non_finite
from trials.log_reader import FILE_LOGGER_VARIABLE, GrowingFile, LogReader
from trials.metrics import StepMetrics, metrics_from_json

OVERLAY_VARIABLE = "VERL_OVERLAY"
"""The overlay reads its configuration from this environment variable."""
OVERLAY_FOLDER_VARIABLE = "VERL_OVERLAY_FOLDER"
"""The overlay keeps its records and the mean entropy of a rollout batch in this folder."""
OVERLAY_RESUMED_VARIABLE = "VERL_OVERLAY_RESUMED_STEP"
"""Step of the checkpoint that the training goes on from; the overlay takes up its state of that step."""

FILE_LOG = "verl_metrics.jsonl"
ENTROPY_WINDOW_STEPS = 4
"""The entropy of a validation is the mean over this many last training steps."""

_PYTHON_VARIABLES = {
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__", "VIRTUAL_ENV",
    "VIRTUAL_ENV_PROMPT",
}  # fmt: skip
_POLL_S = 0.1
_FULL_BYTES = 2**16
RAY_FULL_SHARE = 0.99
"""Used share of a disk at which Ray refuses to spill objects and warns every ten seconds; its own 0.95 leaves 200 GB of
4 TB unused."""
_STALL_FACTOR = 20.0
"""So many times the median step without a step line is a stall."""


@dataclass(frozen=True)
class TrialSpec:
    """Everything that is needed to run one attempt; JSON-serialisable by `to_dict`."""

    trial: str
    attempt: int
    folder: str
    """The trial's folder."""
    script: str
    """Text of the script to run."""
    script_path: str
    """Where the script is written: beside the workspace's train.sh, so that its relative paths hold."""
    cwd: str
    """Working directory: verl's relative output folders land here."""
    configuration: dict[str, Any] | None
    """Overlay configuration handed over by environment; None runs what is baked into core_algos.py."""
    stop_step: int | None
    """Interrupt after this step; None lets the script end by itself."""
    total_steps: int
    """Steps of the full schedule."""
    dev_rows: dict[str, int]
    """Dev data source → rows."""
    run_tag: str
    dev_metric: str | None = None
    """The metric that is the dev accuracy; None weights all dev sources by their rows."""
    keep_script: bool = False
    """Leave the script beside train.sh when the attempt ends."""
    configuration_id: int | None = None
    """What the overlay must show in every training step; None does not look."""
    needs_advantage: bool = False
    """The overlay must also show that it computed the advantage."""
    resumed_step: int = 0
    """Step of the checkpoint that the trainer goes on from."""
    startup_timeout_s: float = 1800.0
    stall_timeout_s: float = 600.0
    """Least time without a step line that counts as a stall; grows with the measured step time."""
    time_limit_s: float | None = None
    """Interrupt after this time; what was saved until then counts."""
    grace_s: float = 2.0
    training_env: str | None = None
    """Prefix of the Python environment that runs verl; None is the agent's own."""
    environment: dict[str, str] = field(default_factory=dict)
    """Additional environment variables."""
    gpus: int = 0
    """GPUs whose memory must be free before the script is started; 0 does not look."""
    gpu_timeout_s: float = 300.0
    """So long the attempt waits for that."""
    stop_file: str = ""
    """The attempt is interrupted as soon as this file exists."""

    @property
    def attempt_folder(self) -> Path:
        return Path(self.folder) / f"attempt_{self.attempt}"

    @property
    def file_log(self) -> Path:
        """Where verl's file logger writes if train.sh turns it on: a file per attempt, because verl opens it anew."""
        return self.attempt_folder / FILE_LOG

    @property
    def overlay_folder(self) -> Path:
        """Where the overlay writes its records, those of all attempts."""
        return Path(self.folder) / "overlay"

    @property
    def attempt_tag(self) -> str:
        """Marks all processes of the attempt."""
        return f"{self.run_tag}/{self.trial}/{self.attempt}"

    @property
    def ray_tmpdir(self) -> Path:
        """A private folder for the trial's own Ray; the guard removes it."""
        return trial_scratch(self.run_tag, self.trial, self.attempt)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Validation:
    """A training step with a dev accuracy."""

    step: int
    accuracy: float | None
    """0..1, weighted over the dev sources by rows; None when a source is missing."""
    entropy: float | None
    """Mean over the last training steps, nats per token; None when unknown."""
    seconds: float
    """Since the attempt was started."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    outcome: str
    """completed, stopped (its time limit), failed or interrupted (on request)"""
    last_step: int
    seconds: float
    failure: str | None = None
    reason: str = ""
    start_up_s: float | None = None
    """From the start to the first training step."""
    step_s: float | None = None
    """Mean seconds from one training step line to the next, validations and saves included."""


def short_scratch(owner: str) -> Path:
    """A scratch folder with a short path, always the same for an owner: unix socket paths are limited to 107 bytes."""
    root = tempfile.gettempdir()
    return Path(root if len(root) < 20 else "/tmp") / f"ga{hashlib.sha256(owner.encode()).hexdigest()[:10]}"


def trial_scratch(run_tag: str, trial: str, attempt: int) -> Path:
    """The scratch folder of one attempt."""
    return short_scratch(f"{run_tag}/{trial}/{attempt}")


class Attempt:
    """Run a TrialSpec. Iterate `events()`; always `close()`."""

    def __init__(self, spec: TrialSpec) -> None:
        self.spec = spec
        self._guarded: Guarded | None = None
        self._started = self._started_at = self._boot_started = 0.0
        self._reader = LogReader(spec.attempt_folder / "log", spec.file_log)
        self._overlay_file = GrowingFile(spec.overlay_folder / "overlay.jsonl")
        self._overlay_records: dict[str, dict[str, Any]] = {}
        """Kind → the latest record of this attempt."""
        self._history = read_history(Path(spec.folder))
        """Steps of earlier attempts included: a resumed attempt goes on from a checkpoint."""
        self._step_times: list[float] = []
        self._last_line = 0.0

    # ---- start and stop ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write script and environment, then launch under guard."""
        spec, folder = self.spec, self.spec.attempt_folder
        folder.mkdir(parents=True, exist_ok=True)
        Path(spec.cwd).mkdir(parents=True, exist_ok=True)
        environment = build_environment(spec, os.environ)
        for path in (Path(spec.script_path), folder / "train.sh"):
            path.write_text(spec.script, encoding="utf-8")
            path.chmod(0o755)
        (folder / "env.json").write_text(json.dumps(environment, indent=1, sort_keys=True), encoding="utf-8")
        (folder / "spec.json").write_text(json.dumps(spec.to_dict(), indent=1, sort_keys=True), encoding="utf-8")
        (folder / "log").touch()
        _end_torn_line(Path(spec.folder) / "metrics.jsonl")
        spec.ray_tmpdir.mkdir(parents=True, exist_ok=True)
        self._started = self._last_line = time.monotonic()
        self._started_at, self._boot_started = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
        self._guarded = Guarded(
            ["bash", spec.script_path],
            log=folder / "log",
            env=environment,
            cwd=Path(spec.cwd),
            record=folder / "process.json",
            scratch=spec.ray_tmpdir,
            grace_s=spec.grace_s,
        )

    def close(self) -> None:
        """End all processes of the attempt; harmless when repeated."""
        if self._guarded is not None:
            self._guarded.close()
            if self._guarded.poll() == -signal.SIGKILL:  # the guard itself was killed, or its command
                sweep(self.spec.attempt_tag, variable=ATTEMPT_TAG)
                shutil.rmtree(self.spec.ray_tmpdir, ignore_errors=True)
            self._guarded = None
        if not self.spec.keep_script:
            Path(self.spec.script_path).unlink(missing_ok=True)

    # ---- what happens --------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Validation | Ended]:
        """Yield a Validation for each validated step and, last, one Ended."""
        if self._guarded is None:
            held = self._wait_for_gpus()
            if held is not None:
                yield held
                return
            self.start()
        while True:
            exit_code = self._require_guard().poll()
            for metrics in self._reader.read(is_final=exit_code is not None):
                self._record(metrics)
                if metrics.is_validated(self.spec.dev_metric):
                    yield validation_at(self._history, self.spec.dev_rows, self.spec.dev_metric, self._seconds())
                ended = self._judge(metrics)
                if ended is not None:
                    self.close()
                    yield ended
                    return
            ended = self._ended_by_exit(exit_code) if exit_code is not None else self._ended_by_clock()
            if ended is not None:
                self.close()
                yield ended
                return
            time.sleep(_POLL_S)

    def _wait_for_gpus(self) -> Ended | None:
        """What trained there before may still hold memory. Returns why the attempt cannot begin, None when it can."""
        self._started = time.monotonic()
        while self.spec.gpus and (held := held_gpus(self.spec.gpus, os.environ)):
            if self._is_asked_to_stop():
                return self._ended("interrupted", None, "stopped on request")
            if self._seconds() > self.spec.gpu_timeout_s:
                reason = f"{held} after {self._seconds():.0f} s, by no process of this trial; see nvidia-smi"
                return self._ended("failed", FailureKind.STARTUP_HANG, reason)
            time.sleep(1.0)
        return None

    def _is_asked_to_stop(self) -> bool:
        return bool(self.spec.stop_file) and os.path.exists(self.spec.stop_file)

    def _require_guard(self) -> Guarded:
        assert self._guarded is not None
        return self._guarded

    def _record(self, metrics: StepMetrics) -> None:
        self._last_line = time.monotonic()
        if metrics.is_training_step:
            self._step_times.append(self._last_line - self._started)
        while self._history and self._history[-1].step >= metrics.step:
            earlier = self._history.pop()  # a resumed attempt repeats the steps after its checkpoint
            if earlier.step == metrics.step and not metrics.is_training_step:  # … and validates that one again
                metrics = StepMetrics(metrics.step, {**earlier.values, **metrics.values})
        self._history.append(metrics)
        append_metrics(Path(self.spec.folder), metrics, self.spec.attempt, round(self._last_line - self._started, 3))

    def _judge(self, metrics: StepMetrics) -> Ended | None:
        """Whether the attempt must end because of what this step says."""
        if is_non_finite(self._history):
            return self._ended(
                "failed",
                FailureKind.NON_FINITE,
                f"loss, gradient or entropy not finite for 3 steps up to {metrics.step}",
            )
        if self.spec.configuration_id is not None and metrics.is_training_step:
            problem = self._overlay_problem(metrics, self.spec.configuration_id)
            if problem is not None:
                return self._ended("failed", FailureKind.BAD_CONFIGURATION, problem)
        if self.spec.stop_step is not None and metrics.step >= self.spec.stop_step:
            return self._ended("completed", None, f"interrupted as planned after step {metrics.step}")
        return None

    def _overlay_problem(self, metrics: StepMetrics, expected: int) -> str | None:
        """Why the overlay does not act as this trial wants, None when it does."""
        seen = _overlay_value(metrics, "configuration_id")
        if seen is None:  # a verl whose policy loss returns no metrics
            seen = self._overlay_record("loss").get("configuration_id")
        if seen != expected:
            return (
                f"step {metrics.step} shows overlay configuration {seen}, expected {expected}: the trainer does not run the "
                "overlay in core_algos.py with this trial's configuration"
            )
        if self.spec.needs_advantage and self._overlay_record("advantage").get("configuration_id") != expected:
            return (
                f"step {metrics.step} was trained without the overlay's advantage: the trainer does not call "
                "compute_grpo_outcome_advantage; look at algorithm.adv_estimator in train.sh"
            )
        return None

    def _overlay_record(self, kind: str) -> dict[str, Any]:
        """The latest record of this attempt in the overlay's side file, {} when there is none."""
        with suppress(OSError):
            for line in self._overlay_file.read_lines():
                with suppress(ValueError, KeyError, TypeError):  # a line cut off by a crash
                    record: dict[str, Any] = json.loads(line)
                    if record["time"] >= self._started_at:
                        self._overlay_records[record["kind"]] = record
        return self._overlay_records.get(kind, {})

    def _ended_by_exit(self, exit_code: int) -> Ended:
        last = self._last_step()
        if exit_code == 0 and self.spec.stop_step is None and last >= self.spec.total_steps:
            return self._ended("completed", None, f"all {last} steps done")
        expected = self.spec.stop_step or self.spec.total_steps
        if exit_code == 0 and not self._step_times and self.spec.attempt > 1:
            reason = f"went on from step {last} of {expected}, made no step and reported success ({self._log})"
            return self._ended("failed", FailureKind.NO_PROGRESS, reason)
        kind, reason = classify_exit(exit_code, list(self._reader.tail), last, expected)
        if kind is FailureKind.UNKNOWN and is_full(self.spec.attempt_folder):
            kind, reason = FailureKind.DISK_FULL, f"{reason}; no space is left beside its log"
        return self._ended("failed", kind, f"{reason} ({self._log})")

    @property
    def _log(self) -> str:
        return f"log: {self.spec.attempt_folder / 'log'}"

    def _ended_by_clock(self) -> Ended | None:
        if self._is_asked_to_stop():
            return self._ended("interrupted", None, "stopped on request")
        lasted_s = time.clock_gettime(time.CLOCK_BOOTTIME) - self._boot_started  # while the machine is suspended, too
        if self.spec.time_limit_s is not None and lasted_s > self.spec.time_limit_s:
            return self._ended("stopped", None, f"its time of {self.spec.time_limit_s:.0f} s is over")
        silent_s = time.monotonic() - self._last_line
        if not self._step_times:
            if self._seconds() > self.spec.startup_timeout_s:
                reason = f"no training step within {self.spec.startup_timeout_s:.0f} s of the start"
                return self._ended("failed", FailureKind.STARTUP_HANG, reason)
        elif silent_s > (limit_s := max(self.spec.stall_timeout_s, _STALL_FACTOR * self._median_step_s())):
            reason = f"no step line for {silent_s:.0f} s after step {self._last_step()}; the limit is {limit_s:.0f} s"
            return self._ended("failed", FailureKind.STALL, f"{reason} ({self._log})")
        return None

    def _median_step_s(self) -> float:
        """Between step lines; 0 before there are two."""
        return statistics.median([later - one for one, later in pairwise(self._step_times)] or [0.0])

    def _last_step(self) -> int:
        return self._history[-1].step if self._history else 0

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _step_s(self) -> float | None:
        times = self._step_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def _ended(self, outcome: str, failure: FailureKind | None, reason: str) -> Ended:
        return Ended(
            outcome=outcome,
            last_step=self._last_step(),
            seconds=self._seconds(),
            failure=failure.value if failure else None,
            reason=reason,
            start_up_s=self._step_times[0] if self._step_times else None,
            step_s=self._step_s(),
        )


def build_environment(spec: TrialSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the training script: the caller's without what belongs to the agent or to its Ray.

    verl starts a Ray of its own in the trial; any inherited RAY_* variable would let it join the agent's. PYTHONPATH and
    the virtual environment of the agent must not reach a training environment of its own.
    """
    environment = child_environment(inherited, spec.training_env, spec.run_tag)
    environment[ATTEMPT_TAG] = spec.attempt_tag
    environment.update(
        RAY_ADDRESS="local",
        RAY_TMPDIR=str(spec.ray_tmpdir),
        RAY_DEDUP_LOGS="0",
        RAY_local_fs_capacity_threshold=str(RAY_FULL_SHARE),
        RAY_USAGE_STATS_ENABLED="0",
        PYTHONUNBUFFERED="1",
    )
    environment[FILE_LOGGER_VARIABLE] = str(spec.file_log)
    environment[OVERLAY_FOLDER_VARIABLE] = str(spec.overlay_folder)
    environment[OVERLAY_RESUMED_VARIABLE] = str(spec.resumed_step)
    if spec.configuration is not None:
        environment[OVERLAY_VARIABLE] = json.dumps(spec.configuration, sort_keys=True)
    environment.update(spec.environment)
    return environment


def child_environment(inherited: Mapping[str, str], training_env: str | None, run_tag: str) -> dict[str, str]:
    """What every program of the workspace inherits: nothing that belongs to the agent, its Python or its Ray.

    It is as if the training environment had been activated and the agent's never.

    Args:
        inherited: the caller's environment.
        training_env: prefix of the Python environment whose `bin/` comes first on PATH; None is the agent's own.
        run_tag: marks the program as the run's.
    """
    own = Path(sys.prefix)
    prefix = Path(training_env) if training_env else own
    environment = {name: value for name, value in inherited.items() if not _belongs_to_agent(name)}
    folders = [str(prefix / "bin"), *environment.get("PATH", os.defpath).split(os.pathsep)]
    if prefix != own:
        folders = [folder for folder in folders if folder != str(own / "bin")]
    environment["PATH"] = os.pathsep.join(dict.fromkeys(folders))
    if (prefix / "conda-meta").is_dir():
        environment["CONDA_PREFIX"] = str(prefix)
    elif (prefix / "pyvenv.cfg").is_file():
        environment["VIRTUAL_ENV"] = str(prefix)
    environment[RUN_TAG] = run_tag
    return environment


def _belongs_to_agent(name: str) -> bool:
    """Variables that describe the agent's Python, its Ray or its overlay."""
    return name in _PYTHON_VARIABLES or name.startswith(("RAY_", "CONDA_", "_CE_", OVERLAY_VARIABLE))


def _overlay_value(metrics: StepMetrics, name: str) -> float | None:
    """An overlay metric, whatever prefix this verl puts before it."""
    return next((value for key, value in metrics.values.items() if key.endswith(f"overlay/{name}")), None)


def append_metrics(folder: Path, metrics: StepMetrics, attempt: int, seconds: float | None) -> None:
    """Add a step to a trial's metrics.jsonl; `seconds` since the start of the attempt, None where unknown."""
    record = {**metrics.to_record(), "attempt": attempt}
    if seconds is not None:
        record["seconds"] = seconds
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


def recover_history(folder: Path, attempt: int) -> list[StepMetrics]:
    """A trial's steps after its driver was killed: what the log of its last attempt shows beyond metrics.jsonl is added."""
    _end_torn_line(folder / "metrics.jsonl")
    known = read_history(folder)
    read_up_to = max((m.step for m in known if m.get("attempt") == attempt), default=-1)
    log = folder / f"attempt_{attempt}"
    for metrics in LogReader(log / "log", log / FILE_LOG).read(is_final=True):
        if metrics.step > read_up_to and (metrics.is_training_step or metrics.step not in {m.step for m in known}):
            append_metrics(folder, metrics, attempt, None)
    return read_history(folder)


def is_full(folder: Path) -> bool:
    """Whether its volume has so little left that a program cannot even log what it died of."""
    return shutil.disk_usage(folder).free < _FULL_BYTES


def _end_torn_line(file: Path) -> None:
    """A full disk may have left half a line, onto which the next one must not be written."""
    if file.exists() and file.stat().st_size and not file.read_bytes().endswith(b"\n"):
        with file.open("ab") as opened:
            opened.write(b"\n")


def read_history(folder: Path) -> list[StepMetrics]:
    """A trial's steps from its metrics.jsonl, ascending; of a repeated step the newest attempt's. [] without a file."""
    try:
        lines = (folder / "metrics.jsonl").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    steps: dict[int, StepMetrics] = {}
    for line in lines:
        try:
            metrics = metrics_from_json(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a line cut off by a crash
        known = steps.get(metrics.step)
        if known is None or (metrics.get("attempt") or 0) >= (known.get("attempt") or 0):
            steps[metrics.step] = metrics
    return [steps[step] for step in sorted(steps)]


def last_line(folder: Path, attempt: int) -> tuple[float, float] | None:
    """Seconds from the start of a trial's newest attempt to its last step line, and the wall clock then; None before it has
    one."""
    lines = [m.values["seconds"] for m in read_history(folder) if m.get("attempt") == attempt and "seconds" in m.values]
    return (max(lines), (folder / "metrics.jsonl").stat().st_mtime) if lines else None


def attempt_seconds(folder: Path, attempt: int) -> float:
    """How long an attempt of a trial ran whose end nobody saw: up to its last step line, before there is one up to the last
    change of its log; 0 for one that never began."""
    if line := last_line(folder, attempt):
        return line[0]
    own = folder / f"attempt_{attempt}"
    try:
        return max(0.0, (own / "log").stat().st_mtime - (own / "spec.json").stat().st_mtime)
    except OSError:
        return 0.0


def validations(
    history: Sequence[StepMetrics], dev_rows: Mapping[str, int], dev_metric: str | None = None
) -> list[Validation]:
    """The validations that a history shows, as `Attempt.events` would have yielded them."""
    found = []
    for position, metrics in enumerate(history):
        if metrics.is_validated(dev_metric):
            found.append(validation_at(history[: position + 1], dev_rows, dev_metric))
    return found


def validation_at(
    history: Sequence[StepMetrics], dev_rows: Mapping[str, int], dev_metric: str | None, seconds: float = 0.0
) -> Validation:
    """The validation of the last step of a history."""
    entropies = [m.entropy for m in history if m.is_training_step and m.entropy is not None]
    recent = entropies[-ENTROPY_WINDOW_STEPS:]
    return Validation(
        step=history[-1].step,
        accuracy=history[-1].dev_accuracy(dev_rows, dev_metric),
        entropy=statistics.fmean(recent) if recent else None,
        seconds=seconds,
    )
