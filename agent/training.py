"""Will verl run with what the agent asks? train.sh, its training environment and the effective configuration, checked once.

Everything that costs a trial to find out later is asked here in one subprocess of the training environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.checks import CheckResult
from agent.workspace import Workspace
from trials.batching import batch_problems
from trials.effective import configuration_problems, relied_on
from trials.environment import EnvironmentUnusable, TrainingEnvironment, read_training_environment
from trials.runner import child_environment
from trials.script import OverrideValue, ScriptError, TrainScript

_NEEDED = ("torch", "ray", "transformers")
_SHOWN = ("verl", "ray", "torch", "transformers", "vllm")


@dataclass(frozen=True)
class TrainingCheck:
    """What the training environment answered, and what follows."""

    environment: TrainingEnvironment | None
    """None when it cannot be asked."""
    results: list[CheckResult]


def check_training(workspace: Workspace, prefix: str | None, asked: Mapping[str, OverrideValue]) -> TrainingCheck:
    """Ask the training environment about the script of a trial; nothing is written and no GPU is used.

    Args:
        workspace: its train.sh has been understood.
        prefix: of the training environment; None is the agent's own.
        asked: what a trial changes in train.sh.
    """
    inherited = child_environment(os.environ, prefix, run_tag="check")
    script = TrainScript(workspace.script.render(asked), workspace.scripts)
    results = [_check_problems(script, inherited)]
    arguments, unknown = script.arguments(inherited)
    try:
        environment = read_training_environment(
            _as_script_sets_it(script, inherited),
            _folder_of_command(script, inherited),
            arguments,
            script.flags(inherited),
        )
    except EnvironmentUnusable as error:
        return TrainingCheck(None, [*results, CheckResult("training environment", "unusable", str(error))])
    missing = [name for name in _NEEDED if name not in environment.versions] if not script.other_python() else []
    problem = f"{environment.python} has no {', '.join(missing)}; install what verl needs, or set training_env"
    results.append(CheckResult("training environment", describe(environment), problem if missing else None))
    results.append(_check_verl_in_use(workspace, script, environment, inherited))
    if _is_certain(workspace, environment):
        results += _check_configuration(script, environment, asked, unknown)
    else:
        results.append(CheckResult("verl's configuration", "not composed: it is not certain which verl is in use"))
    results.append(_check_batches(environment, arguments))
    return TrainingCheck(environment, results)


def describe(environment: TrainingEnvironment) -> str:
    """One line: prefix and versions."""
    versions = [f"{name} {environment.versions[name]}" for name in _SHOWN if name in environment.versions]
    return f"{environment.prefix}: Python {environment.python_version}, {', '.join(versions) or 'no verl'}"


def _check_problems(script: TrainScript, inherited: Mapping[str, str]) -> CheckResult:
    problems = script.problems(inherited)
    return CheckResult("training command", f"line {script.command_line}", " | ".join(problems) or None)


def _as_script_sets_it(script: TrainScript, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment with the PYTHONPATH under which the training command runs."""
    try:
        path = script.variable("PYTHONPATH", inherited)
    except ScriptError:
        path = None
    return {**inherited, "PYTHONPATH": path} if path else dict(inherited)


def _folder_of_command(script: TrainScript, inherited: Mapping[str, str]) -> Path:
    try:
        folder = Path(script.working_folder(inherited) or "/")
    except ScriptError:
        folder = Path("/")
    return folder if folder.is_absolute() and folder.is_dir() else Path("/")


def _check_verl_in_use(
    workspace: Workspace, script: TrainScript, environment: TrainingEnvironment, inherited: Mapping[str, str]
) -> CheckResult:
    """The overlay acts in the workspace's verl: it must be the one that train.sh imports."""
    name, seen = "verl in use", environment.core_algos
    if other := script.other_python():
        return CheckResult(name, f"not known before the first step: {other} may choose another Python")
    try:
        script.variable("PYTHONPATH", inherited)
    except ScriptError as error:
        return CheckResult(name, f"not known before the first step: {error}")
    if seen is None:
        return CheckResult(
            name,
            "none",
            f"python3 of {environment.prefix} finds no verl with train.sh's PYTHONPATH; let train.sh export "
            f"PYTHONPATH={workspace.verl}, or set training_env",
        )
    if seen.resolve() != workspace.core_algos.resolve():
        return CheckResult(
            name,
            str(seen),
            f"train.sh imports verl from {seen.parents[2]}, not from the workspace's {workspace.verl}; let it export "
            f"PYTHONPATH={workspace.verl}",
        )
    return CheckResult(name, str(seen))


def _is_certain(workspace: Workspace, environment: TrainingEnvironment) -> bool:
    """Whether the verl that was asked is the workspace's, which train.sh is to run."""
    seen = environment.core_algos
    return seen is not None and seen.resolve() == workspace.core_algos.resolve()


def _check_configuration(
    script: TrainScript, environment: TrainingEnvironment, asked: Mapping[str, OverrideValue], unknown: list[str]
) -> list[CheckResult]:
    name, effective = "verl's configuration", environment.configuration
    if effective is None:
        return [CheckResult(name, "not composed: this verl brings no Hydra configuration, or Hydra is missing")]
    problems = configuration_problems(effective, asked, script.added_keys)
    found = f"composed, {len(effective.values)} values; verl has every key that is set"
    if unknown:
        found = f"composed without {len(unknown)} values that only running the script can tell: {unknown[0]}"
    results = [CheckResult(name, found, " | ".join(problems) or None)]
    settings = relied_on(effective, script.overrides)
    if settings:
        listed = ", ".join(f"{key.split('.', 1)[1]}={value}" for key, value in settings.items())
        results.append(CheckResult("settings relied on", listed))
    return results


def _check_batches(environment: TrainingEnvironment, arguments: list[str]) -> CheckResult:
    effective = environment.configuration
    settings: dict[str, Any] = dict(argument.lstrip("+").split("=", 1) for argument in arguments if "=" in argument)
    if effective is not None and effective.values:
        settings = effective.values
    problems = batch_problems(settings, environment.versions.get("verl"))
    return CheckResult("effective batch sizes", "as verl needs them", " | ".join(problems) or None)
