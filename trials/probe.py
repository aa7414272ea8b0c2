"""Runs in the training environment: tells what it is and composes verl's configuration there. Standard library at import.

Read from stdin: one JSON object, `{}` or `{"overrides": ["key=value", …], "flags": {"--config-name": "…"}}`. Printed as the
last line: one JSON object; `trials/environment.py` names its fields. Nothing is written, no GPU is used.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from typing import Any

PACKAGES = ("verl", "ray", "torch", "transformers", "vllm", "hydra-core", "tensordict", "numpy", "flash-attn")
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
    }
    if "overrides" in request and verl:
        try:
            answer["configuration"] = compose(verl, request)
        except ImportError as error:
            answer["configuration"] = {"error": None, "missing": str(error)}
    print("\n" + json.dumps(answer, default=str))


if __name__ == "__main__":
    main()
