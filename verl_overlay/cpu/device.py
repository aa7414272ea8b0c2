"""A verl device platform for machines without any accelerator."""

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.cpu
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _memory_info(*_: Any, **__: Any) -> tuple[int, int]:
    """Free and total bytes, in the order of torch.cuda.mem_get_info."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _device_module() -> types.ModuleType:
    """torch.cpu plus the memory and random-state functions that verl calls on `torch.<device>`."""
    module = types.ModuleType("verl_overlay.cpu.device_module")
    module.__dict__.update({k: v for k, v in torch.cpu.__dict__.items() if not k.startswith("__")})
    extra: dict[str, Any] = {
        "is_available": lambda: True,
        "mem_get_info": _memory_info,
        "get_device_name": lambda *a, **k: "CPU",
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
    }
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        extra[name] = lambda *a, **k: 0
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_per_process_memory_fraction"):
        extra[name] = lambda *a, **k: None
    module.__dict__.update(extra)
    return module


_DEVICE_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """What verl asks of a device, answered for a CPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        """verl hands this to Tensor.to() and FSDP, where an int would mean cuda:<int>."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is only one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU operations are synchronous."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """There is no caching allocator to set."""

    def empty_cache(self) -> None:
        """There is no caching allocator to empty."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """verl only counts "GPU" or "NPU" (ResourcePoolManager._check_resource_available), so worker slots
        are Ray "GPU" resources declared by ray.init(num_gpus=N), with no device behind them."""
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
