"""Files of tensors: the streaming entropy of a logits file, a data loader's place, and whether a merged model can be used.

The only module of the agent that imports torch.
"""

import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_ROWS_PER_CHUNK = 256
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")


class LogitsError(ValueError):
    """The file is not a list of 2-D float tensors that loads safely."""


@dataclass(frozen=True)
class SampleLogits:
    """Facts about one sample's logits."""

    tokens: int
    vocabulary: int
    mean_entropy: float
    """Nats per token; nan when a row is not finite."""
    non_finite_rows: int
    """Rows with NaN or +inf, or without any finite value. −inf (a masked token) is allowed."""


def read_sample_logits(path: Path) -> Iterator[SampleLogits]:
    """One SampleLogits per tensor of `math_results_logits.pt`, in order.

    The file is memory-mapped and read a few rows at a time, so memory stays bounded whatever the file's size.

    Raises:
        LogitsError: not loadable with weights_only, not a list, or an element that is not a 2-D float tensor on the CPU.
    """
    try:
        samples = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise LogitsError(f"{path} cannot be loaded as tensors only: {line}") from None
    if not isinstance(samples, list):
        raise LogitsError(f"{path} holds a {type(samples).__name__}, not a list of tensors")
    for index, tensor in enumerate(samples):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or not tensor.is_floating_point():
            seen = (
                f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            )
            raise LogitsError(f"{path}: sample {index} is {seen}, not a 2-D float tensor [tokens, vocabulary]")
        yield _examine(tensor)


def _examine(tensor: torch.Tensor) -> SampleLogits:
    total, bad = 0.0, 0
    for start in range(0, len(tensor), _ROWS_PER_CHUNK):
        rows = tensor[start : start + _ROWS_PER_CHUNK]
        entropy = row_entropy(rows)
        finite = torch.isfinite(entropy)
        bad += int((~finite).sum())
        total += float(entropy[finite].sum())
    tokens = int(tensor.shape[0])
    mean = total / tokens if tokens and not bad else float("nan")
    return SampleLogits(tokens, int(tensor.shape[1]), mean, bad)


def row_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of softmax(logits) per row in nats, float64; [rows, vocabulary] → [rows].

    −inf logits contribute nothing (0·log 0 = 0). A row with NaN or +inf, or with −inf only, gives nan.
    """
    log_probability = logits.double().log_softmax(-1)
    probability = log_probability.exp()
    terms = torch.where(probability > 0, probability * log_probability, torch.zeros_like(probability))
    entropy = -terms.sum(-1)
    return torch.where(torch.isnan(log_probability).any(-1), torch.full_like(entropy, float("nan")), entropy)


def read_batches_given(data_file: Path) -> int | None:
    """How many batches of the current epoch a checkpoint's data.pt says were given; None when it does not tell.

    verl saves there the state of torchdata's StatefulDataLoader, which differs with and without workers.
    """
    try:
        state = torch.load(data_file, map_location="cpu", weights_only=True)
        if "_num_yielded" in state:
            return int(state["_num_yielded"])
        return int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])
    except (OSError, RuntimeError, ValueError, EOFError, TypeError, KeyError, pickle.UnpicklingError):
        return None


def find_model_problem(model: Path, base: Path) -> str | None:
    """Why a merged Hugging Face model cannot be used, None when it can.

    It must have configuration, tokenizer and weights that agree: an index that names files which are there, as many layers
    and vocabulary rows as config.json says, floating-point numbers that are finite, every tensor of the base model with the
    same shape (a tied output layer may be absent), no adapters beside them, and at least one tensor that differs.
    """
    try:
        problem = _find_file_problem(model, base)
        if problem:
            return problem
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        merged, original = _tensor_index(model), _tensor_index(base)
        return (
            _find_config_problem(config, merged)
            or _find_base_problem(config, merged, original)
            or _find_number_problem(merged)
        )
    except (SafetensorError, OSError) as error:
        return f"its weights are not readable ({str(error)[:200]})"
    except ValueError as error:
        return f"its configuration is not readable ({str(error)[:200]})"


def _find_file_problem(model: Path, base: Path) -> str | None:
    """Missing files, before any is opened."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (model / name).is_file() or not (model / name).stat().st_size:
            return f"{name} is missing"
    has, needs = ([name for name in TOKENIZER_FILES if (folder / name).is_file()] for folder in (model, base))
    if needs and not has:
        return f"the tokenizer's {needs[0]} is missing"
    index = model / "model.safetensors.index.json"
    if index.is_file():
        parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [part for part in parts if not (model / part).is_file()]
        if missing:
            return f"{index.name} names {missing[0]}, which is missing ({len(missing)} of {len(parts)} files)"
    if not any(model.glob("*.safetensors")):
        return "it has no safetensors weights"
    return None


def _find_config_problem(config: dict[str, Any], merged: dict[str, Path]) -> str | None:
    """Whether names and sizes of the tensors are those of config.json."""
    if not merged:
        return "its weights hold no tensors"
    adapter = next((name for name in merged if name.startswith("base_model.") or ".lora_" in name), None)
    if adapter:
        return f"tensor {adapter} belongs to an adapter that was not folded into the weights"
    layers = {match[1] for name in merged if (match := _LAYER.match(name))}
    expected = config.get("num_hidden_layers")
    if layers and isinstance(expected, int) and len(layers) != expected:
        return f"it has {len(layers)} layers, config.json says {expected}"
    embedding, vocabulary = merged.get("model.embed_tokens.weight"), config.get("vocab_size")
    if embedding and vocabulary and (rows := _shape(embedding, "model.embed_tokens.weight")[0]) != vocabulary:
        return f"model.embed_tokens.weight has {rows} rows, config.json says vocab_size {vocabulary}"
    return None


def _find_base_problem(config: dict[str, Any], merged: dict[str, Path], original: dict[str, Path]) -> str | None:
    """Whether it is the base model with other numbers; a base without safetensors has nothing to compare with."""
    is_tied = config.get("tie_word_embeddings") is not False
    missing = [name for name in original if name not in merged and not (is_tied and name == "lm_head.weight")]
    if missing:
        return f"tensor {missing[0]} is missing ({len(missing)} in all)"
    shared = [name for name in original if name in merged]
    wrong = next((name for name in shared if _shape(merged[name], name) != _shape(original[name], name)), None)
    if wrong:
        return f"tensor {wrong} has shape {_shape(merged[wrong], wrong)}, the base has {_shape(original[wrong], wrong)}"
    if shared and not any(_differs(merged[name], original[name], name) for name in shared):
        return "every tensor equals the base model's: nothing was trained"
    return None


def _find_number_problem(merged: dict[str, Path]) -> str | None:
    """A tensor that is not of a floating-point type, or not finite."""
    for name, file in merged.items():
        with safe_open(str(file), framework="pt") as opened:
            tensor = opened.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            return f"tensor {name} is {tensor.dtype}, not a floating-point type of 16 bits or more"
        if not bool(torch.isfinite(tensor).all()):
            return f"tensor {name} holds values that are not finite"
    return None


def _tensor_index(model: Path) -> dict[str, Path]:
    """Tensor name → the safetensors file that holds it."""
    index: dict[str, Path] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(str(file), framework="numpy") as opened:
            index.update(dict.fromkeys(opened.keys(), file))
    return index


def _shape(file: Path, name: str) -> tuple[int, ...]:
    with safe_open(str(file), framework="numpy") as opened:
        return tuple(opened.get_slice(name).get_shape())


def _differs(one: Path, other: Path, name: str) -> bool:
    with safe_open(str(one), framework="pt") as first, safe_open(str(other), framework="pt") as second:
        return not bool((first.get_tensor(name).float() == second.get_tensor(name).float()).all())
