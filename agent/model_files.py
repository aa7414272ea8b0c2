"""A Hugging Face model's folder: parameters, vocabulary, tokenizer length, damage. Headers are read, never weights."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from agent.checks import CheckResult
from search_spaces.plain_files import NotAFile, require_file

INDEX = "model.safetensors.index.json"


class WeightsError(ValueError):
    """A weights file is damaged or missing; the message names it."""


def count_parameters(model: Path) -> int | None:
    """Numbers in all safetensors files; None when the folder has none.

    Raises:
        WeightsError: a file is cut off, or one that the index names is missing.
    """
    files = _weight_files(model)
    return sum(_count_in_file(file) for file in files) if files else None


def _weight_files(model: Path) -> list[Path]:
    index = read_json(model / INDEX)
    if index is None:
        return sorted(model.glob("*.safetensors"))
    files = sorted({model / name for name in index.get("weight_map", {}).values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightsError(
            f"{model / missing[0]} is missing ({len(missing)} of {len(files)} files); copy the model again"
        )
    return files


def _count_in_file(file: Path) -> int:
    try:
        size = require_file(file).stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header: dict[str, Any] = json.loads(opened.read(length)) if length < size else {}
        if not header:
            raise ValueError("no header")
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
        parameters = sum(int(math.prod(entry["shape"])) for entry in tensors)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read ({error.strerror}); copy it again") from None
    except (struct.error, ValueError, AttributeError, KeyError, TypeError):
        raise WeightsError(f"{file} is not a safetensors file; copy it again") from None
    if size < end:
        raise WeightsError(f"{file} is cut off ({size} of {end} bytes); copy it again")
    return parameters


def count_tokens(model: Path) -> int | None:
    """The tokenizer's length: its highest id + 1. None when neither tokenizer.json nor vocab.json says it."""
    tokenizer = read_json(model / "tokenizer.json")
    try:
        vocabulary = tokenizer["model"]["vocab"] if tokenizer else (read_json(model / "vocab.json") or [])
        added = [entry["id"] for entry in (tokenizer or {}).get("added_tokens", [])]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return int(max([*ids, *added])) + 1
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def read_context(model: Path) -> int | None:
    """Tokens that the model's positions hold; None when config.json does not say, or scales them."""
    config = read_json(model / "config.json") or {}
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    scaling = [part.get(name) for part in parts for name in ("rope_scaling", "rope_parameters")]
    kinds = [entry.get("rope_type", entry.get("type", "default")) for entry in scaling if isinstance(entry, dict)]
    if any(kind != "default" for kind in kinds):
        return None
    sizes = [part.get("max_position_embeddings") for part in parts]
    return next((size for size in sizes if isinstance(size, int)), None)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None when the file is missing or holds something else."""
    try:
        content = json.loads(require_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


# ---- checks -----------------------------------------------------------------------------------------------------------


def check_model(model: Path, vocabulary: int | None) -> list[CheckResult]:
    """Configuration, weights, tokenizer.

    Args:
        model: its folder.
        vocabulary: the `vocab_size` of its configuration; None when it names none.
    """
    if kind := _find_kind(model / "config.json"):
        return [CheckResult("base model", "no file", f"{kind}; copy the model again")]
    if not (model / "config.json").is_file():
        hint = (
            "put the base model there" if model.is_absolute() else "write the absolute path of a folder with the model"
        )
        return [CheckResult("base model", "missing", f"{model}/config.json does not exist; {hint}")]
    if vocabulary is None:
        problem = f"{model}/config.json is not JSON or names no vocab_size"
        return [CheckResult("base model", "no vocab_size", problem)]
    return [_check_weights(model), _check_tokenizer(model, vocabulary)]


def _find_kind(path: Path) -> str | None:
    """What is there in place of a file; None for a file and for nothing."""
    try:
        require_file(path)
    except NotAFile as error:
        return str(error)
    except OSError:
        pass
    return None


def _check_weights(model: Path) -> CheckResult:
    try:
        parameters = count_parameters(model)
    except WeightsError as error:
        return CheckResult("base model", "damaged", str(error))
    if parameters is None:
        if not any(model.glob("*.bin")):
            problem = f"{model} holds neither *.safetensors nor *.bin; put the weights there"
            return CheckResult("base model", "no weights", problem)
        return CheckResult("base model", f"{model}, number of parameters unknown (no safetensors)")
    return CheckResult("base model", f"{model}, {parameters / 1e6:,.1f} million parameters")


def _check_tokenizer(model: Path, vocabulary: int) -> CheckResult:
    name = "vocabulary"
    if not (model / "tokenizer_config.json").is_file():
        return CheckResult(
            name, "no tokenizer", f"{model}/tokenizer_config.json does not exist; copy the tokenizer's files"
        )
    tokens = count_tokens(model)
    if tokens is None and (file := model / "tokenizer.json").exists():
        problem = f"{_find_kind(file) or f'{file} is damaged'}; copy the tokenizer again"
        return CheckResult(name, f"model {vocabulary}, tokenizer unknown", problem)
    if tokens is None:
        return CheckResult(name, f"model {vocabulary}, tokenizer unknown (no tokenizer.json)")
    found = f"model {vocabulary}, tokenizer {tokens}"
    if tokens > vocabulary:
        more = tokens - vocabulary
        problem = f"the tokenizer knows {more} tokens that the model at {model} has no row for; resize its embeddings"
        return CheckResult(name, found, problem)
    return CheckResult(name, found)
