"""The GPUs of this machine as nvidia-smi lists them, and which of them a program sees and can have. Unknown is None."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NVIDIA_SMI_LIMIT_S = 8.0


@dataclass(frozen=True)
class Gpu:
    """One device as nvidia-smi lists it."""

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    used_mib: int | None

    @property
    def is_free(self) -> bool:
        """Whether at most a tenth of its memory is in use; unknown use counts as free."""
        return not self.memory_mib or not self.used_mib or self.used_mib <= 0.1 * self.memory_mib


def read_gpus(environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...] | None, str]:
    """All devices of the machine, whatever CUDA_VISIBLE_DEVICES says; None with the reason when they are unknown."""
    fields = "index,uuid,name,memory.total,memory.used"
    text, problem = _ask_nvidia_smi(environment, [f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    if text is None:
        return None, problem
    gpus = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5 and parts[0].isdigit():
            gpus.append(Gpu(int(parts[0]), parts[1], parts[2], _integer(parts[3]), _integer(parts[4])))
    return tuple(gpus), ""


def read_mig(environment: Mapping[str, str]) -> tuple[str, ...]:
    """UUIDs of the MIG devices."""
    text, _ = _ask_nvidia_smi(environment, ["-L"])
    return tuple(re.findall(r"\(UUID: (MIG-[^)]+)\)", text or ""))


def _ask_nvidia_smi(environment: Mapping[str, str], arguments: list[str]) -> tuple[str | None, str]:
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return None, "nvidia-smi is not installed"
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, encoding="utf-8", errors="replace", timeout=_NVIDIA_SMI_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return None, f"nvidia-smi does not answer within {_NVIDIA_SMI_LIMIT_S:.0f} s"
    except OSError as error:
        return None, f"nvidia-smi cannot be started ({error.strerror})"
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        return None, f"nvidia-smi failed with exit code {done.returncode} ({said[0][:120]})"
    return done.stdout, ""


def _integer(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def select_visible(gpus: Sequence[Gpu], mig: Sequence[str], visible: str | None) -> tuple[list[Gpu | str], str | None]:
    """The devices that CUDA shows a program, by CUDA's rules, and what is wrong with the list (None: nothing).

    Indexes and UUIDs (or a unique beginning of one) may be mixed; the first entry that names no device ends the list; a
    repeated device makes CUDA refuse all of them. MIG devices are returned by their UUID.
    """
    if visible is None:
        return list(gpus), None
    if not visible.strip():
        return [], "CUDA_VISIBLE_DEVICES is set but empty, which hides every GPU; unset it"
    found: list[Gpu | str] = []
    for entry in (part.strip() for part in visible.split(",")):
        device = _find_device(gpus, mig, entry)
        if device is None:
            return found, (
                f"CUDA_VISIBLE_DEVICES={visible}: {entry!r} names no single device ({len(gpus)} GPUs here), and CUDA hides "
                "it and all that follow; correct or unset it"
            )
        if device in found:
            return [], f"CUDA_VISIBLE_DEVICES={visible}: {entry!r} is named twice, so CUDA shows no GPU; name each once"
        found.append(device)
    return found, None


def _find_device(gpus: Sequence[Gpu], mig: Sequence[str], entry: str) -> Gpu | str | None:
    if entry.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    if entry.startswith("MIG-"):
        slices = [uuid for uuid in mig if uuid.startswith(entry)]
        return slices[0] if len(slices) == 1 else None
    matches = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def held_gpus(needed: int, environment: Mapping[str, str]) -> str | None:
    """Why fewer than `needed` of the visible GPUs have their memory free; None when they are free or unknown.

    What vLLM leaves behind can hold memory for a while after its processes have gone.
    """
    gpus, _ = read_gpus(environment)
    visible, _ = select_visible(
        gpus or (), read_mig(environment) if gpus else (), environment.get("CUDA_VISIBLE_DEVICES")
    )
    held = [gpu for gpu in visible if isinstance(gpu, Gpu) and not gpu.is_free]
    if not held or len(visible) - len(held) >= needed:
        return None
    return ", ".join(f"GPU {gpu.index} has {gpu.used_mib} of {gpu.memory_mib} MiB in use" for gpu in held)
