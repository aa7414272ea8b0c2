"""What a run asks of the machine, compared with what the machine has. Pure, apart from the free space of volumes."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent.checks import CheckResult, format_bytes, warning
from agent.disk import GIB, Need, Sizes, add_up, estimate_sizes, group_by_volume, product
from agent.machine import Machine, Volume, read_volume
from trials.gpus import Gpu, select_visible
from trials.runner import RAY_FULL_SHARE

FREE_GPUS, DISK = "free GPUs", "disk of "
"""Names of checks whose failure a resumed run may itself have caused."""
_RAY_TEMP_BYTES = {"cpu": GIB, "cuda": 8 * GIB}
"""Logs and spilled objects of one trial's Ray."""


@dataclass(frozen=True)
class Demand:
    """What a run asks for; None is unknown."""

    device: str
    """trainer.device."""
    gpus_per_node: int | None
    nodes: int
    concurrent: int
    """Trials at the same time."""
    cpus_per_gpu: int | None
    """CPUs in verl's placement group beside each GPU."""
    ray_cpus: int | None
    """CPUs that train.sh tells Ray; None: Ray counts the machine's."""
    parameters: int | None
    trial_checkpoints: int | None
    """Checkpoints of a short trial before the losers' are deleted."""
    full_run_checkpoints: int | None
    test_rows: int | None
    response_tokens: int | None
    vocabulary: int | None
    devices: str | None
    """CUDA_VISIBLE_DEVICES as train.sh sets it; None: it does not."""
    runs: Path
    full_run_folder: Path
    outputs: Path
    cluster: str | None = None
    """Address of a Ray cluster whose nodes run the trials; None: this machine does."""

    @property
    def needs_gpus(self) -> bool:
        return self.device != "cpu"

    @property
    def sizes(self) -> Sizes:
        """What single things take on disk, as far as it can be known before anything is measured."""
        return estimate_sizes(self.parameters, self.test_rows, self.response_tokens, self.vocabulary)


def check_machine(
    machine: Machine, demand: Demand, volume_of: Callable[[Path], Volume] = read_volume
) -> list[CheckResult]:
    """All comparisons. `volume_of` tells the volume of a folder."""
    nodes = [_check_nodes(demand)] if demand.nodes > 1 else []
    if demand.cluster is not None:
        found = f"of the Ray cluster at {demand.cluster}, counted when it is joined"
        return [CheckResult("GPUs and CPUs", found), *nodes, *check_disks(demand, volume_of)]
    return [
        *_check_gpus(machine, demand),
        *nodes,
        _check_cpus(machine, demand),
        _check_memory(machine, demand),
        *([_check_shared_memory(machine)] if demand.needs_gpus else []),
        *check_disks(demand, volume_of),
        _check_open_files(machine, demand),
        _check_threads(machine, demand),
        _check_ray(machine, demand),
    ]


# ---- GPUs and CPUs ----------------------------------------------------------------------------------------------------


def _check_gpus(machine: Machine, demand: Demand) -> list[CheckResult]:
    """Asked, visible and free, per device."""
    name = "GPUs"
    if not demand.needs_gpus:
        return [CheckResult(name, f"none asked (trainer.device={demand.device})")]
    if demand.device != "cuda":
        problem = "only NVIDIA GPUs can be counted; check by hand"
        return [warning(name, f"unknown (trainer.device={demand.device})", problem)]
    each = demand.gpus_per_node or 0
    asked = each * demand.concurrent
    text = f"asked {asked} ({demand.concurrent} trials × {each})"
    if machine.gpus is None:
        problem = (
            f"{machine.gpu_problem}, so the GPUs are unknown; run on a machine where nvidia-smi lists {asked} GPUs"
        )
        return [CheckResult(name, f"{text}, visible unknown", problem)]
    setting = machine.visible if demand.devices is None else demand.devices
    visible, complaint = select_visible(machine.gpus, machine.mig, setting)
    if complaint is None and any(isinstance(device, str) for device in visible) and each > 1:
        complaint = "NCCL cannot join MIG slices into one trainer; make whole GPUs visible"
    if complaint is None and len(visible) < asked:
        complaint = _smaller_plan(demand, each, len(visible), f"only {len(visible)} GPUs are visible; add some")
    found = f"{text}, on the machine {len(machine.gpus)}, visible {len(visible)}"
    return [CheckResult(name, found, complaint), _check_free_gpus(demand, visible, each, asked)]


def _check_free_gpus(demand: Demand, visible: list[Gpu | str], each: int, asked: int) -> CheckResult:
    free = [device for device in visible if isinstance(device, str) or device.is_free]
    found = f"{len(free)} of {len(visible)} visible: {_describe(visible) or 'none'}"
    if len(free) < min(asked, len(visible)):
        lack = f"only {len(free)} of {len(visible)} visible GPUs are free; end what runs there"
        return CheckResult(FREE_GPUS, found, _smaller_plan(demand, each, len(free), lack))
    return CheckResult(FREE_GPUS, found)


def _describe(devices: list[Gpu | str]) -> str:
    return ", ".join(
        device[:16]
        if isinstance(device, str)
        else f"{device.index} {device.name} {_free_memory(device)}" + ("" if device.is_free else " IN USE")
        for device in devices
    )


def _free_memory(gpu: Gpu) -> str:
    if gpu.memory_mib is None or gpu.used_mib is None:
        return "(memory unknown)"
    return f"{(gpu.memory_mib - gpu.used_mib) / 1024:.0f}/{gpu.memory_mib / 1024:.0f} GiB free"


def _smaller_plan(demand: Demand, each: int, usable: int, lack: str) -> str:
    if demand.concurrent > 1 and each <= usable:
        return f"{lack}, or set search.concurrent={usable // each}"
    if usable:
        return f"{lack}, or set trainer.n_gpus_per_node={usable} in train.sh with batch sizes that fit it"
    return lack


def _check_nodes(demand: Demand) -> CheckResult:
    problem = (
        f"trainer.nnodes={demand.nodes}, but a trial's own Ray has one node, so verl would wait for ever; set it to 1"
    )
    return CheckResult("nodes", str(demand.nodes), problem)


def _check_cpus(machine: Machine, demand: Demand) -> CheckResult:
    """verl waits without a limit for a placement group that Ray's CPUs cannot hold."""
    name = "CPUs"
    if demand.cpus_per_gpu is None or demand.gpus_per_node is None:
        return CheckResult(name, f"{machine.cpus}; what verl's placement groups ask for is unknown")
    needed = demand.gpus_per_node * demand.cpus_per_gpu + 1
    has = demand.ray_cpus or machine.cpus
    told = f", Ray is told {demand.ray_cpus}" if demand.ray_cpus else ""
    found = f"{machine.cpus}{told}; a trial's placement group and driver ask for {needed}"
    if has < needed:
        key = "ray_kwargs.ray_init.num_cpus (ray_init.num_cpus up to verl 0.5)"
        problem = (
            f"Ray has {has} CPUs and verl would wait for ever; give more cores or set {key} to {needed} in train.sh"
        )
        return CheckResult(name, found, problem)
    if demand.needs_gpus and machine.cpus < needed * demand.concurrent:
        problem = f"{demand.concurrent} trials share {machine.cpus} cores and slow each other; lower search.concurrent"
        return warning(name, found, problem)
    return CheckResult(name, found)


# ---- memory and disks -------------------------------------------------------------------------------------------------


def _check_memory(machine: Machine, demand: Demand) -> CheckResult:
    """Each rank may hold the weights in single precision while it loads them, beside 1 GiB of libraries."""
    name = "memory"
    if machine.memory_bytes is None:
        return CheckResult(name, "unknown")
    if demand.parameters is None or demand.gpus_per_node is None:
        return CheckResult(name, f"{format_bytes(machine.memory_bytes)} available, need unknown")
    ranks = max(1, demand.gpus_per_node)
    need = demand.concurrent * (2 * GIB + ranks * (GIB + 4 * demand.parameters))
    found = f"{format_bytes(machine.memory_bytes)} available, about {format_bytes(need)} needed"
    if machine.memory_bytes < need // 3:
        return CheckResult(name, found, "free memory, lower search.concurrent or use a larger machine")
    if machine.memory_bytes < need:
        return warning(
            name, found, "the kernel may kill trials while they load; free memory or lower search.concurrent"
        )
    return CheckResult(name, found)


def _check_shared_memory(machine: Machine) -> CheckResult:
    name = "shared memory"
    if machine.shared_memory_bytes is None:
        return CheckResult(name, "unknown (no /dev/shm)")
    found = f"/dev/shm {format_bytes(machine.shared_memory_bytes)}"
    if machine.shared_memory_bytes < GIB:
        return warning(name, found, "NCCL and Ray's object store need more; start the container with --shm-size=16g")
    return CheckResult(name, found)


def forecast_disks(demand: Demand) -> list[Need]:
    """What a run writes at its worst moment."""
    sizes = demand.sizes
    trials = demand.concurrent + 1
    saves, full_saves = product(demand.trial_checkpoints, trials), demand.full_run_checkpoints
    temporary = _RAY_TEMP_BYTES.get(demand.device, _RAY_TEMP_BYTES["cuda"]) * demand.concurrent
    return [
        Need(demand.runs, f"checkpoints of {trials} trials", product(sizes.checkpoint, saves)),
        Need(demand.full_run_folder, "the full run's checkpoints", product(sizes.checkpoint, full_saves)),
        Need(demand.runs, "the merged model", sizes.model),
        Need(demand.runs, "logits", sizes.longest_logits, is_ceiling=True),
        Need(demand.outputs, "the published copy of the logits", sizes.longest_logits, is_ceiling=True),
        Need(Path(tempfile.gettempdir()), "Ray's temporary files", temporary, is_ceiling=True),
    ]


def check_disks(demand: Demand, volume_of: Callable[[Path], Volume]) -> list[CheckResult]:
    """One result per volume: what must fit fails, what may not fit at its ceiling warns."""
    return [_check_disk(volume, needs) for volume, needs in group_by_volume(forecast_disks(demand), volume_of)]


def _check_disk(volume: Volume, needs: list[Need]) -> CheckResult:
    name = f"{DISK}{needs[0].folder}"
    unknown = [need.what for need in needs if need.size is None]
    certain, most = add_up(volume, needs)
    parts = ", ".join(f"{need.what} {format_bytes(need.size)}" for need in needs if need.size is not None)
    found = f"{format_bytes(volume.free_bytes)} free; at most {parts or '?'}"
    found += f"; unknown: {', '.join(unknown)}" if unknown else ""
    if volume.free_bytes < certain:
        problem = f"{format_bytes(certain)} must fit; free space, move the folder or raise trainer.save_freq"
        return CheckResult(name, found, problem)
    if volume.free_bytes < most:
        problem = f"{format_bytes(most)} would be needed if all answers were as long as allowed; free space to be safe"
        return warning(name, found, problem)
    if volume.used_share >= RAY_FULL_SHARE:
        problem = f"{volume.used_share:.1%} full: Ray refuses to spill objects; free space to be safe"
        return warning(name, found, problem)
    return CheckResult(name, found)


# ---- limits and neighbours --------------------------------------------------------------------------------------------


def _check_open_files(machine: Machine, demand: Demand) -> CheckResult:
    name, limit = "open files", machine.open_files
    found = "unlimited" if limit is None else f"at most {limit} per process"
    wanted = 16384 if demand.needs_gpus else 4096
    if limit is not None and limit < 1024:
        return CheckResult(name, found, f"Ray cannot work with so few; ulimit -n {wanted}")
    if limit is not None and limit < wanted:
        return warning(name, found, f"large Ray clusters open more; ulimit -n {wanted}")
    return CheckResult(name, found)


def _check_threads(machine: Machine, demand: Demand) -> CheckResult:
    name, left = "threads", machine.threads
    found = "no limit known" if left is None else f"{left} more may be started"
    ranks = demand.gpus_per_node or 1
    if left is not None and left < 400 * demand.concurrent:
        return CheckResult(
            name, found, 'trials would end with "can\'t start new thread"; raise ulimit -u or the pids limit'
        )
    if left is not None and left < (500 + 500 * ranks) * demand.concurrent:
        return warning(
            name, found, "many workers may run into the limit; raise ulimit -u or the container's pids limit"
        )
    return CheckResult(name, found)


def _check_ray(machine: Machine, demand: Demand) -> CheckResult:
    """A cluster of somebody else is never joined, but it may hold GPUs."""
    name = "other Ray clusters"
    signs = list(machine.ray_processes[:4])
    signs += [f"RAY_ADDRESS={machine.ray_address}"] if machine.ray_address else []
    signs += ["port 6379 is taken"] if machine.is_ray_port_taken else []
    if not signs:
        return CheckResult(name, "none")
    found = f"{', '.join(signs)}; the run keeps to clusters of its own"
    if demand.needs_gpus:
        return warning(
            name, found, "it may hold GPUs, which the run's own clusters cannot see; stop it or keep GPUs apart"
        )
    return CheckResult(name, found)
