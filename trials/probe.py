"""Runs in the training environment: tells what it is, composes verl's configuration and tries there what training loads.

Read from stdin: one JSON object, the fields of `TrainingRequest` in `trials/environment.py`. Printed on lines that begin
with `MARK`: one JSON object, the last one counts; the same file names its fields. Standard library at import. Nothing is
written, no GPU is used.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

OVERLAY = b"\n\n\n# >>> verl_overlay"
"""Where the block begins; that it is whole is for the agent to check."""
MARK = "grpo-tuning-agent probe: "
LOAD_LIMIT_S = 90
PACKAGES = (
    "verl", "ray", "torch", "transformers", "vllm", "hydra-core", "tensordict", "numpy", "flash-attn", "datasets",
    "math-verify",
)  # fmt: skip
GROUP = re.compile(r"[+~]{0,2}[\w./-]+[@/][\w./@-]*(=.*)?", re.DOTALL)


def versions(verl: str | None) -> dict[str, str]:
    """Package → version of what is installed; of verl, what is imported."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if verl and os.path.isfile(path := os.path.join(verl, "version", "version")):
        with open(path, encoding="utf-8") as file:  # a checkout's own version, not that of an installed verl behind it
            found["verl"] = file.read().strip()
    return found


def gpus() -> list[list[Any]] | None:
    """[name, MiB] of every GPU that torch sees; None when there is no torch to ask."""
    if not (shutil.which("nvidia-smi") or os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")):
        return []
    try:
        import torch
    except Exception:
        return None
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [[each.name, each.total_memory // 2**20] for each in properties]


def find_package(name: str) -> str | None:
    """The folder of a package, found without importing it; None when it is not there."""
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return os.path.abspath(folders[0]) if folders else None


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key → value of every leaf; an empty mapping is a leaf."""
    if not isinstance(node, dict) or not node:
        return {prefix[:-1]: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat.update(flatten(value, f"{prefix}{key}."))
    return flat


def branches(flat: dict[str, Any]) -> set[str]:
    """Every key of a configuration, those of sections included."""
    return {".".join(key.split(".")[:length]) for key in flat for length in range(1, key.count(".") + 2)}


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def compose(verl: str, request: dict[str, Any]) -> dict[str, Any]:
    """verl's configuration with and without the overrides.

    `known` are verl's own keys, `unknown` the overridden keys that are not among them, `values` the effective ones.
    """
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    flags = request.get("flags", {})
    home = os.path.join(verl, "trainer")
    folder = os.path.join(home, flags.get("--config-path") or flags.get("-cp") or "config")
    name = flags.get("--config-name") or flags.get("-cn") or "ppo_trainer"
    extra = flags.get("--config-dir") or flags.get("-cd")
    if not os.path.isdir(folder):
        return {"error": None, "missing": folder}
    overrides = request["overrides"]
    groups = [f"hydra.searchpath=[file://{extra}]"] if extra else []
    groups += [word for word in overrides if GROUP.fullmatch(word) or os.path.isdir(os.path.join(folder, key_of(word)))]
    with initialize_config_dir(os.path.abspath(folder), version_base=None):
        try:
            base = flatten(OmegaConf.to_container(compose(name, groups)))
            known = branches(base)
            plain = [word for word in overrides if word not in groups and not word.startswith("hydra.")]
            unknown = [key_of(word) for word in plain if not word.startswith("+") and key_of(word) not in known]
            rest = [word for word in plain if key_of(word) not in unknown]
            composed = compose(name, [*groups, *rest])
        except Exception as error:  # Hydra's own message is the answer
            return {"error": " ".join(str(error).split())[:500]}
    return {"error": None, "known": sorted(known), "unknown": unknown, "values": flatten(resolved(composed, OmegaConf))}


def resolved(config: Any, omega: Any) -> Any:
    """With interpolations replaced; as written where that needs verl's own resolvers."""
    try:
        return omega.to_container(config, resolve=True)
    except Exception:
        return omega.to_container(config)


# ---- what training loads ----------------------------------------------------------------------------------------------


def is_as_released(path: str) -> bool:
    """Whether a file, but for the overlay's block, is byte for byte one of the installed verl: nothing is to be tried."""
    try:
        files = importlib.metadata.files("verl") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    with open(path, "rb") as file:
        digest = (
            base64.urlsafe_b64encode(hashlib.sha256(file.read().partition(OVERLAY)[0]).digest()).rstrip(b"=").decode()
        )
    return any(each.hash is not None and each.hash.value == digest for each in files)


def import_core_algos() -> None:
    importlib.import_module("verl.trainer.ppo.core_algos")


def load_reward(path: str, function: str) -> None:
    """As verl loads the file of custom_reward_function."""
    spec = importlib.util.spec_from_file_location("custom_module", path)
    if spec is None or spec.loader is None:
        raise ImportError("is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_module"] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise AttributeError(f"has no function {function}")


def count_tokens(path: str, texts: list[str]) -> list[int]:
    """Tokens of each text, chat template and special tokens not included."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [len(text.ids) for text in tokenizer.encode_batch(texts, add_special_tokens=False)]


def attempts(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """Name → what is tried; a fault of one is an answer, too."""
    tried: dict[str, Callable[[], None]] = {}
    if request.get("tokenizer") and importlib.util.find_spec("tokenizers"):
        tried["tokenizer"] = lambda: answer.update(tokens=count_tokens(request["tokenizer"], request["texts"]))
    if request.get("reward"):
        tried["reward"] = lambda: load_reward(*request["reward"])
    core_algos = answer["core_algos"]
    if request.get("imports_verl") and core_algos and not is_as_released(core_algos):
        tried["core_algos"] = import_core_algos
    return tried


def find_fault(action: Callable[[], None]) -> str | None:
    """Why an action fails, within a limit of time; None when it works. Its own way to end Python counts as well."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"takes longer than {LOAD_LIMIT_S} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LOAD_LIMIT_S)
    try:
        action()
    except BaseException as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    finally:
        signal.alarm(0)
    return None


def main() -> None:
    request = json.load(sys.stdin)
    verl = find_package("verl")
    core_algos = os.path.join(verl, "trainer", "ppo", "core_algos.py") if verl else None
    answer: dict[str, Any] = {
        "python": sys.executable,
        "prefix": sys.prefix,
        "python_version": platform.python_version(),
        "versions": versions(verl),
        "gpus": gpus(),
        "core_algos": core_algos if core_algos and os.path.isfile(core_algos) else None,
        "faults": {},
        "tokens": None,
    }
    if request.get("overrides") is not None and verl:
        try:
            answer["configuration"] = compose(verl, request)
        except ImportError as error:
            answer["configuration"] = {"error": None, "missing": str(error)}
    for name, action in attempts(request, answer).items():
        answer["faults"][name] = "it ends Python, or never comes back"
        say(answer)
        fault = find_fault(action)
        answer["faults"].pop(name)
        answer["faults"] |= {name: fault} if fault else {}
    say(answer)


def say(answer: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(answer, default=str)}", flush=True)


if __name__ == "__main__":
    main()
