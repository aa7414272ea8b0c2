"""What the plugin registers with verl and patches in it."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")


def test_plain_cross_entropy_gives_the_same_log_probs_as_verl_does() -> None:
    import verl.utils.torch_functional as verl_functional

    import verl_overlay.cpu  # noqa: F401

    torch.manual_seed(0)
    logits, labels = torch.randn(3, 7, 50), torch.randint(0, 50, (3, 7))
    fast = verl_functional.logprobs_from_logits(logits, labels)
    slow = verl_functional.logprobs_from_logits_v2(logits, labels)
    assert torch.allclose(fast, slow, atol=2e-6)


SCRIPT = """
import verl, torch, torch.distributed as dist
from verl.utils.device import get_device_name, get_resource_name, get_nccl_backend
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.utils.import_utils import load_extern_object, load_class_from_fqn
assert (get_device_name(), get_resource_name(), get_nccl_backend()) == ("cpu", "GPU", "gloo")
assert get_rollout_class("torch_cpu").__name__ == "ServerAdapter"
assert get_rollout_replica_class("torch_cpu").__name__ == "TorchCPUReplica"
assert load_extern_object("pkg://verl_overlay.cpu.sampler", "FastPollReplayBuffer")
assert load_class_from_fqn("verl_overlay.cpu.batched.BatchedAgentLoopManager")
from torch.distributed.fsdp import CPUOffloadPolicy
assert CPUOffloadPolicy(pin_memory=True).pin_memory is False
dist.init_process_group("cpu:gloo,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
print("all registered")
"""


def test_verl_loads_the_plugin_through_its_own_hook() -> None:
    hook = {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_overlay.cpu",
        "VERL_CPU_FAST_START": "1",
    }
    environment = {**os.environ, **hook, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "all registered" in done.stdout, done.stderr[-2000:]
