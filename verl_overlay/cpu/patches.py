"""Three places where verl takes an accelerator for granted, each with the verl line that makes it needed."""

from typing import Any


def apply() -> None:
    """Called once per process, before verl's trainer and engine modules are imported."""
    _dedupe_process_group_backend()
    _no_pinned_memory()
    _batched_cross_entropy()


def _dedupe_process_group_backend() -> None:
    """verl/utils/distributed.py:63 and :89 build f"cpu:gloo,{device}:{backend}"; with device `cpu` that names
    cpu twice and torch refuses it."""
    import torch.distributed as dist

    original = dist.init_process_group
    if getattr(original, "_verl_overlay_cpu", False):
        return

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return original("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    init_process_group._verl_overlay_cpu = True  # type: ignore[attr-defined]
    dist.init_process_group = init_process_group  # type: ignore[assignment]


def _no_pinned_memory() -> None:
    """verl/workers/engine/fsdp/transformer_impl.py:462 builds the reference policy with
    CPUOffloadPolicy(pin_memory=True), and pinning memory needs an accelerator."""
    import torch.distributed.fsdp as fsdp

    base: Any = fsdp.CPUOffloadPolicy
    if getattr(base, "_verl_overlay_cpu", False):
        return

    class CPUOffloadPolicyWithoutPinning(base):  # type: ignore[misc]
        """The stock policy with pin_memory always off."""

        _verl_overlay_cpu = True

        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory=False)

    fsdp.CPUOffloadPolicy = CPUOffloadPolicyWithoutPinning  # type: ignore[misc]


def _batched_cross_entropy() -> None:
    """Without flash-attn, verl/utils/torch_functional.py:107 (logprobs_from_logits_v2) loops over the rows in
    Python. Give it a cross entropy where it looks for flash-attn's (line 129): the same number, in one call.
    VERL_DISABLE_FLASH_ATTN_CE=1, verl's own switch, undoes this."""
    import verl.utils.torch_functional as verl_functional
    from torch.nn import functional

    if verl_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        return

    def cross_entropy_loss(logits: Any, labels: Any, **_: Any) -> tuple[Any, None]:
        return functional.cross_entropy(logits, labels, reduction="none"), None

    verl_functional.cross_entropy_loss = cross_entropy_loss
    verl_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True
