"""What this machine has: GPUs, CPUs, memory, disks, limits, running Ray clusters. Reads only; unknown is None."""

import os
import re
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trials.gpus import Gpu, read_gpus, read_mig

_RAY_PORT = 6379
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """Readings at one moment."""

    gpus: tuple[Gpu, ...] | None
    """None: nvidia-smi is missing or does not answer."""
    gpu_problem: str
    """Why `gpus` is None; else empty."""
    mig: tuple[str, ...]
    """UUIDs of MIG devices."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES; None when it is not set."""
    cpus: int
    """Cores this process may use, a container's quota included."""
    memory_bytes: int | None
    """Available, a container's limit included."""
    shared_memory_bytes: int | None
    """Size of /dev/shm."""
    open_files: int | None
    """Hard limit of open files of a process; None is unlimited."""
    threads: int | None
    """How many more threads this user may start; None is unlimited or unknown."""
    ray_processes: tuple[str, ...]
    """Heads and node daemons of Ray that run now: `<name> pid <n> of <user>`."""
    ray_address: str | None
    """RAY_ADDRESS of the environment."""
    is_ray_port_taken: bool


@dataclass(frozen=True)
class Volume:
    """The file system that holds a folder."""

    device: int
    total_bytes: int
    free_bytes: int

    @property
    def used_share(self) -> float:
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 1.0


def read_machine(environment: Mapping[str, str] | None = None) -> Machine:
    """Read everything once; takes a few seconds at most."""
    environment = os.environ if environment is None else environment
    gpus, problem = read_gpus(environment)
    return Machine(
        gpus=gpus,
        gpu_problem=problem,
        mig=read_mig(environment) if gpus else (),
        visible=environment.get("CUDA_VISIBLE_DEVICES"),
        cpus=_count_cpus(),
        memory_bytes=_available_memory(),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        open_files=_unless_unlimited(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        threads=_count_free_threads(),
        ray_processes=_find_ray_processes(),
        ray_address=environment.get("RAY_ADDRESS") or None,
        is_ray_port_taken=_is_port_taken(_RAY_PORT),
    )


def read_volume(folder: Path) -> Volume:
    """The volume of a folder, or of its nearest ancestor that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return Volume(folder.stat().st_dev, usage.total, usage.free)


# ---- CPUs, memory, limits ---------------------------------------------------------------------------------------------


def _count_cpus() -> int:
    cpus = len(os.sched_getaffinity(0))
    quota, _, period = _read_text(_cgroup() / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, min(cpus, int(quota) // int(period)))
    return cpus


def _available_memory() -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read_text(Path("/proc/meminfo")), re.MULTILINE)
    available = int(match[1]) * 1024 if match else None
    limit, used = (_read_text(_cgroup() / name) for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():
        inside = max(0, int(limit) - int(used))
        return inside if available is None else min(inside, available)
    return available


def _count_free_threads() -> int | None:
    """What is left of the limits on processes of this user and of this container."""
    left = []
    limit = _unless_unlimited(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if limit is not None:
        left.append(limit - _count_threads_of(os.getuid()))
    most, now = (_read_text(_cgroup() / name) for name in ("pids.max", "pids.current"))
    if most.isdigit() and now.isdigit():
        left.append(int(most) - int(now))
    return max(0, min(left)) if left else None


def _count_threads_of(user: int) -> int:
    threads = 0
    for process in _processes():
        status = _read_text(process / "status")
        owner, count = re.search(r"^Uid:\s+(\d+)", status, re.M), re.search(r"^Threads:\s+(\d+)", status, re.M)
        if owner and count and int(owner[1]) == user:
            threads += int(count[1])
    return threads


def _unless_unlimited(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _cgroup() -> Path:
    """The folder of this process's control group (version 2)."""
    match = re.search(r"^0::/?(.*)$", _read_text(Path("/proc/self/cgroup")), re.MULTILINE)
    folder = _CGROUP / match[1] if match else _CGROUP
    return folder if folder.is_dir() else _CGROUP


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace", encoding="utf-8").strip()
    except OSError:
        return ""


# ---- Ray --------------------------------------------------------------------------------------------------------------


def _find_ray_processes() -> tuple[str, ...]:
    found = []
    for process in _processes():
        name = _read_text(process / "comm")
        if name in ("gcs_server", "raylet"):
            try:
                owner = process.stat().st_uid
            except OSError:
                continue
            found.append(f"{name} pid {process.name} of user {owner}")
    return tuple(found)


def _processes() -> list[Path]:
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_port_taken(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(0.3)
        return client.connect_ex(("127.0.0.1", port)) == 0
