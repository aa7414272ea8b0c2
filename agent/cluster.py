"""The Ray that runs the trials: one of the run's own, or an existing cluster over a shared filesystem.

Of a cluster nothing is touched but what this run puts there: its namespace and the names of its trainables are its own,
its actors end with the driver, and leaving it is a disconnect.
"""

import hashlib
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agent.checks import first_line
from agent.errors import PreflightError, StageError
from agent.slots import Ask, Node, Slots, SlotsBusy, count_slots
from trials.guard import RUN_TAG, Guarded, sweep
from trials.health import FailureKind
from trials.runner import RAY_FULL_SHARE, Ended, TrialSpec, Validation
from trials.trainable import NodeAttempt

_SOURCE = str(Path(__file__).resolve().parents[1])
_NODE_BOUND = ("RAY_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "SSH_", "SLURM_")
_NODE_BOUND_NAMES = {"HOSTNAME", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "DISPLAY", "XDG_RUNTIME_DIR"}
_JOINS_CLUSTER = ("RAY_AUTH", "RAY_TLS", "RAY_USE_TLS")
_CONNECT_S = 10.0
_SWEEP_S = 120.0
_RELEASE_S = 10.0
_RESTARTS, _MOST_RESTARTS = "GRPO_AGENT_RESTARTS", 3


@dataclass(frozen=True)
class Engine:
    """A Ray to connect to; use `with engine:` around what needs it."""

    address: str | None
    """`host:port` or `auto` of a running cluster; None starts a Ray of the run's own."""
    cpu_slots: int | None
    """Slots of the own Ray where the CPU trains; None takes the machine as Ray finds it."""
    folder: Path
    """Short path for the own Ray's files; emptied."""
    log: Path
    name: str
    """The run's tag; unique per run."""
    again: tuple[str, ...] = ()
    """The command that goes on with the run if the own Ray's GCS dies."""
    _left: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)
    """What to do when it is left."""

    @property
    def identifier(self) -> str:
        """A short name for what the run puts into a cluster."""
        return f"grpo-agent-{hashlib.sha256(self.name.encode()).hexdigest()[:10]}"

    def __enter__(self) -> None:
        self._left.callback(_restore_environment, dict(os.environ))
        kept = _JOINS_CLUSTER if self.address else ()
        for name in [name for name in os.environ if name.startswith("RAY_") and not name.startswith(kept)]:
            del os.environ[name]
        os.environ[RUN_TAG] = self.name
        os.environ.update(
            TUNE_DISABLE_SIGINT_HANDLER="1",
            TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1",
            TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S="0",
            RAY_USAGE_STATS_ENABLED="0",
            RAY_local_fs_capacity_threshold=str(RAY_FULL_SHARE),
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
            RAY_AIR_NEW_OUTPUT="0",  # the new output engine prints tables even at verbose=0
        )
        logging.raiseExceptions = False  # a full disk is told once, by the ledger
        logger = logging.getLogger("ray")
        logger.handlers, logger.propagate = [logging.FileHandler(self.log)], False
        handler = signal.getsignal(signal.SIGTERM)
        self._left.callback(signal.signal, signal.SIGTERM, handler)
        try:
            if self.address:
                self._join(self.address)
            else:
                self._start()
        except BaseException:
            self._left.close()
            raise
        signal.signal(signal.SIGTERM, handler)  # Ray's own aborts; leaving Ray takes it away, too

    def _start(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        # Some of Ray's processes outlive a killed driver: a guard of nothing notices its end and ends them.
        guard = Guarded(
            ["sleep", "infinity"], log=self.folder / "guard.log", env=os.environ, cwd=self.folder,
            record=self.folder / "guard.json", scratch=self.folder,
        )  # fmt: skip
        self._left.callback(guard.close)
        self._left.callback(ray.shutdown)
        try:
            ray.init(
                address="local",
                num_cpus=self.cpu_slots,
                num_gpus=None if self.cpu_slots is None else 0,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=80 * 2**20,
                _temp_dir=str(self.folder),
            )
        except Exception as error:  # Ray raises bare ones, e.g. when one of its processes is killed meanwhile
            raise StageError(f"Ray did not start: {first_line(error)}; see {self.log}, then resume") from None
        is_left = threading.Event()
        self._left.callback(is_left.set)
        threading.Thread(target=self._watch, args=(is_left,), daemon=True).start()

    def lost_process(self) -> str | None:
        """Which process has died that the own Ray cannot do without: `gcs_server`, `raylet` or None."""
        node = ray_worker._global_node
        if self.address is not None or node is None:
            return None
        dead = {str(kind) for kind, _ in node.dead_processes()}
        return next((kind for kind in ("gcs_server", "raylet") if kind in dead), None)

    def _watch(self, is_left: threading.Event) -> None:
        """When Ray's GCS has died, calls to Ray wait until Ray itself ends the driver without a word. So this process
        becomes a resume of its run, a few times; guards end Ray's other processes and the trainers.
        """
        while self.lost_process() != "gcs_server" or is_left.is_set():
            if is_left.wait(1.0):
                return
        os.write(2, f"error: Ray's gcs_server died (killed?); its last words: {self.log}; resume goes on\n".encode())
        restarts = int(os.environ.get(_RESTARTS, "0"))
        if self.again and restarts < _MOST_RESTARTS:
            os.environ[_RESTARTS] = str(restarts + 1)
            del os.environ[RUN_TAG]
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # Ray's stay open otherwise, and the guard ends their holders
            os.execv(self.again[0], self.again)
        os._exit(StageError.exit_code)

    def _join(self, address: str) -> None:
        host, _, port = address.partition(":")
        try:
            if port:
                socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
            job = JobConfig(ray_namespace=self.identifier, _py_driver_sys_path=[_SOURCE])
            ray.init(address=address, job_config=job, log_to_driver=False, logging_level=logging.ERROR)
            self._left.callback(ray.shutdown)
        except (OSError, RayError, RuntimeError, ValueError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise PreflightError(
                f"no Ray cluster to join at ray_address={address}: {line}; start one with `ray start --head`, or remove "
                "the key for a Ray of the run's own"
            ) from None

    def __exit__(self, *exception: object) -> None:
        self._left.close()


def _restore_environment(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def driver_environment() -> dict[str, str]:
    """The driver's environment for workers on other nodes, without what belongs to a node or to Ray."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NODE_BOUND) and name not in _NODE_BOUND_NAMES
    }


def read_nodes() -> list[Node]:
    """The living nodes of the Ray that is connected."""
    free = available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            total = node["Resources"]
            left = free.get(node["NodeID"], total)  # a node that has just joined has not reported yet
            name = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
            nodes.append(
                Node(name, total.get("GPU", 0.0), left.get("GPU", 0.0), total.get("CPU", 0.0), left.get("CPU", 0.0))
            )
    return nodes


def find_slots(ask: Ask, at_most: int | None) -> Slots:
    """The slots of the Ray that is connected; what the run itself has just released may take a moment to be free.

    Raises:
        PreflightError: no node is large enough.
        SlotsBusy: others hold the GPUs.
    """
    deadline = time.monotonic() + _RELEASE_S
    while True:
        try:
            return count_slots(read_nodes(), ask, at_most)
        except SlotsBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def is_node_lost(node_id: str | None) -> bool:
    """Whether a node is gone; None asks whether any of those is that Ray takes for living.

    Ray itself takes a quarter of a minute to see it, and tells of a lost node in the same words as of a killed worker; so
    the node's own port is asked.
    """
    living = [node for node in ray.nodes() if node["Alive"]]
    if node_id is None:
        return not all(_answers(node) for node in living)
    return not any(node["NodeID"] == node_id and _answers(node) for node in living)


def _answers(node: dict[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def sweep_nodes(engine: Engine, tag: str, scratch: Sequence[Path]) -> None:
    """End what a killed driver's trials left on any node of the cluster, and remove their scratch folders.

    Raises:
        StageError: a node does not answer.
    """
    with engine:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        task = ray.remote(num_cpus=0, max_retries=0)(_sweep_node)
        pending = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
                tag, [str(path) for path in scratch]
            )
            for node in nodes
        ]
        try:
            ray.get(pending, timeout=_SWEEP_S)
        except RayError as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise StageError(
                f"a node of the Ray cluster could not be searched for leftovers of this run ({line}); check `ray status`"
            ) from None


def _sweep_node(tag: str, scratch: list[str]) -> list[int]:
    ended = sweep(tag)
    for path in scratch:
        shutil.rmtree(path, ignore_errors=True)
    return ended


class ClusterAttempt:
    """As `trials.runner.Attempt`, on whatever node of the cluster has the GPUs."""

    def __init__(self, engine: Engine, spec: TrialSpec, ask: Ask) -> None:
        self._engine, self._spec, self._ask = engine, spec, ask

    def events(self) -> Iterator[Validation | Ended]:
        """Yield a Validation for each validated step and, last, one Ended.

        Raises:
            PreflightError: no node has the GPUs, or others hold them.
            StageError: the slot was taken by others in the meantime.
        """
        started = time.monotonic()
        with self._engine:
            cpus = find_slots(self._ask, at_most=1).cpus if self._ask.gpus else 1
            actor = (
                ray.remote(NodeAttempt)
                .options(num_gpus=self._ask.gpus, num_cpus=cpus, max_restarts=0)
                .remote(self._spec, driver_environment())
            )
            try:
                ray.get(actor.place.remote(), timeout=self._spec.startup_timeout_s)
                waited_s = time.monotonic() - started
                for reference in actor.events.options(num_returns="streaming").remote(waited_s):
                    yield ray.get(reference)
            except GetTimeoutError:
                raise StageError(
                    f"{self._spec.trial} waited {self._spec.startup_timeout_s:.0f} s for a slot of the Ray cluster; check "
                    "`ray status`"
                ) from None
            except RayActorError as error:
                reason = f"its node or worker was lost: {(str(error).strip().splitlines() or ['no details'])[0]}"
                yield Ended("failed", 0, time.monotonic() - started, FailureKind.KILLED.value, reason)
            finally:
                ray.kill(actor)

    def close(self) -> None:
        """Nothing is left: the actor ends its processes when it ends."""
