"""The training environment: the Python environment that runs train.sh, the merger and inference.sh.

It may be the agent's own or another one with other versions of everything. It is never changed, and never imported from:
it is asked in one subprocess (`trials/probe.py`), which prints JSON.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMEOUT_S = 180.0
_PROBE = Path(__file__).with_name("probe.py")


class EnvironmentUnusable(Exception):
    """The training environment cannot be asked; says why and what to do."""


@dataclass(frozen=True)
class EffectiveConfiguration:
    """verl's configuration as the training environment's own Hydra composes it."""

    known: tuple[str, ...]
    """verl's keys, those of sections included, without the script's overrides."""
    unknown: tuple[str, ...]
    """Overridden keys that verl does not have."""
    values: dict[str, Any]
    """Dotted key → value of every leaf, overrides applied."""
    error: str | None
    """Hydra's message when it refuses the overrides; the other fields are then empty."""


@dataclass(frozen=True)
class TrainingEnvironment:
    """What the training environment says about itself."""

    python: str
    prefix: str
    python_version: str
    versions: dict[str, str]
    """Package → version of verl, ray, torch, transformers, vllm …, as far as installed."""
    gpus: tuple[tuple[str, int], ...] | None
    """Name and MiB of every GPU that it sees; None when it has no torch to ask."""
    core_algos: Path | None
    """verl's core_algos.py as this environment would import it; None without verl."""
    configuration: EffectiveConfiguration | None
    """None when it was not asked for, or when there is no verl or no Hydra to compose it."""


def default_prefix(workspace: Path) -> Path | None:
    """The environment that a workspace brings along in its folder `conda`; None when there is none."""
    folder = workspace / "conda"
    return folder if find_python(folder) else None


def find_python(prefix: Path) -> Path | None:
    """The interpreter of a venv or conda prefix; None when there is none."""
    return next((path for name in ("python3", "python") if os.access(path := prefix / "bin" / name, os.X_OK)), None)


def read_training_environment(
    environment: Mapping[str, str],
    folder: Path,
    overrides: Sequence[str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> TrainingEnvironment:
    """Ask the Python that programs of the workspace find first on PATH.

    Args:
        environment: what such a program inherits, with the PYTHONPATH that train.sh sets.
        folder: where train.sh calls Python; `python -m` imports from there first.
        overrides: of the training command; given, the effective configuration is composed.
        flags: Hydra's own options of the training command.

    Raises:
        EnvironmentUnusable: no Python, or it does not answer.
    """
    request = {} if overrides is None else {"overrides": list(overrides), "flags": dict(flags or {})}
    quiet = {**environment, "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["python3", "-c", _PROBE.read_text(encoding="utf-8")]
    where = environment.get("PATH", "").split(os.pathsep)[0]
    try:
        done = subprocess.run(
            ["env", *command], input=json.dumps(request), env=quiet, cwd=folder, capture_output=True, encoding="utf-8",
            timeout=_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise EnvironmentUnusable(f"python3 of {where} did not answer within {_TIMEOUT_S:.0f} s; try it") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EnvironmentUnusable(f"python3 of {where} cannot be asked: {reason}; set training_env to one that works")
    return _environment_from(json.loads(lines[-1]))


def _environment_from(answer: dict[str, Any]) -> TrainingEnvironment:
    composed = answer.get("configuration")
    configuration = None
    if composed is not None and "missing" not in composed:
        configuration = EffectiveConfiguration(
            known=tuple(composed.get("known", ())),
            unknown=tuple(composed.get("unknown", ())),
            values=composed.get("values", {}),
            error=composed["error"],
        )
    gpus = answer["gpus"]
    return TrainingEnvironment(
        python=answer["python"],
        prefix=answer["prefix"],
        python_version=answer["python_version"],
        versions=answer["versions"],
        gpus=None if gpus is None else tuple((name, size) for name, size in gpus),
        core_algos=Path(answer["core_algos"]) if answer["core_algos"] else None,
        configuration=configuration,
    )
