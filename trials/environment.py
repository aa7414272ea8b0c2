"""The training environment: the Python environment that runs train.sh, the merger and inference.sh.

It may be the agent's own or another one with other versions of everything. It is never changed, and never imported from:
it is asked in one subprocess (`trials/probe.py`), which prints JSON.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trials.probe import MARK

_FIRST_ANSWER_S = 15.0
_TIMEOUT_S = 240.0
_PROBE = Path(__file__).with_name("probe.py")


class EnvironmentUnusable(Exception):
    """The training environment cannot be asked; says why and what to do."""


@dataclass(frozen=True)
class TrainingRequest:
    """What the training environment is asked beside what it is."""

    overrides: Sequence[str] | None = None
    """Of the training command; given, the effective configuration is composed."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Hydra's own options of the training command."""
    imports_verl: bool = False
    """Try to import core_algos.py, unless it is as released."""
    reward: tuple[str, str] | None = None
    """Try to load the reward function of this name from this file: (path, name)."""
    tokenizer: str | None = None
    """Try to load this tokenizer.json, and count the tokens of `texts`."""
    texts: Sequence[str] = ()


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
    faults: dict[str, str]
    """`core_algos`, `reward`, `tokenizer` → why it cannot be loaded; what can be, or was not tried, is not there."""
    tokens: tuple[int, ...] | None
    """Of each text that was asked about; None when they cannot be counted."""


def default_prefix(workspace: Path) -> Path | None:
    """The folder `conda` of a workspace, which brings its environment along; None when there is none."""
    folder = workspace / "conda"
    return folder if folder.is_dir() or folder.is_symlink() else None


def find_python(prefix: Path) -> Path | None:
    """The interpreter of a venv or conda prefix; None when there is none."""
    return next((path for name in ("python3", "python") if os.access(path := prefix / "bin" / name, os.X_OK)), None)


def read_training_environment(
    environment: Mapping[str, str], folder: Path, request: TrainingRequest | None = None
) -> TrainingEnvironment:
    """Ask the Python that programs of the workspace find first on PATH.

    Args:
        environment: what such a program inherits, with the PYTHONPATH that train.sh sets.
        folder: where train.sh calls Python; `python -m` imports from there first.
        request: what else to ask.

    Raises:
        EnvironmentUnusable: no Python, or it does not answer.
    """
    quiet = {**environment, "PYTHONDONTWRITEBYTECODE": "1"}
    _ask("", "", quiet, folder, _FIRST_ANSWER_S)  # one that hangs is known at once
    said = json.dumps(asdict(request or TrainingRequest()))
    output = _ask(_PROBE.read_text(encoding="utf-8"), said, quiet, folder, _TIMEOUT_S)
    answers = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    if not answers:
        raise EnvironmentUnusable(f"python3 of {_first_folder(quiet)} cannot be asked: no answer; try it")
    return _environment_from(json.loads(answers[-1]))


def _ask(program: str, said: str, environment: Mapping[str, str], folder: Path, limit_s: float) -> str:
    """What a program prints; when it was cut short, what it had printed by then."""
    where = _first_folder(environment)
    command = ["env", "python3", "-c", program]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        printed, complaint = process.communicate(said.encode(), limit_s)
        reason = (complaint.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    except subprocess.TimeoutExpired as error:
        printed, reason = error.output or b"", f"it did not answer within {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
    output = printed.decode(errors="replace")
    if process.wait() != 0 and MARK not in output:
        raise EnvironmentUnusable(
            f"python3 of {where} cannot be asked: {reason[:300]}; set training_env to one that works"
        )
    return output


def _first_folder(environment: Mapping[str, str]) -> str:
    return environment.get("PATH", "").split(os.pathsep)[0]


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
        faults=answer["faults"],
        tokens=None if answer["tokens"] is None else tuple(answer["tokens"]),
    )
