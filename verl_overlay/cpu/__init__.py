"""verl 0.9.1 on a machine without accelerators.

Same trainer, advantage, loss, FSDP2 engine, reward, checkpoints; different generator.

verl loads this package itself, at the end of `import verl`, and no verl file is edited:

    VERL_USE_EXTERNAL_MODULES=verl_overlay.cpu   load this package
    VERL_PLATFORM=cpu                            pick the device platform registered here
    VERL_ENGINE_DEVICE=cuda                      EngineRegistry then picks the stock FSDP engine
    VERL_CPU_FAST_START=1                        optional: fork workers from one warm process (launcher.py)

It registers the platform `cpu` and the rollout `torch_cpu`. Every metric is computed by verl's own code.
"""

from typing import Any

from verl_overlay.cpu import device, launcher, patches

__all__ = ["device", "launcher", "patches"]


def _load_replica() -> Any:
    from verl_overlay.cpu.rollout import TorchCPUReplica

    return TorchCPUReplica


def _register_rollout() -> None:
    """The adapter registry has no public way in (verl/workers/rollout/base.py: _ROLLOUT_REGISTRY)."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[("torch_cpu", "async")] = "verl_overlay.cpu.rollout.ServerAdapter"
    RolloutReplicaRegistry.register("torch_cpu", _load_replica)


patches.apply()
_register_rollout()
launcher.arm()
