"""Will verl run with what the agent asks? train.sh, its training environment and the effective configuration, checked once.

Everything that costs a trial to find out later is asked here in one subprocess of the training environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.checks import CheckResult
from agent.dataset import read_prompts
from agent.errors import PreflightError
from agent.script_checks import count_rows, known, number, read_reward_setting, read_setting
from agent.workspace import Workspace
from search_spaces.plain_files import require_file
from trials.batching import BATCH_DEFAULTS, BATCH_SETTINGS, batch_problems
from trials.effective import configuration_problems, relied_on
from trials.environment import EnvironmentUnusable, TrainingEnvironment, TrainingRequest, read_training_environment
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
        workspace: to train in; a train.sh that is not understood leaves only the environment itself to be asked.
        prefix: of the training environment; None is the agent's own.
        asked: what a trial changes in train.sh.
    """
    inherited = child_environment(os.environ, prefix, run_tag="check")
    try:
        script = TrainScript(workspace.script.render(asked), workspace.scripts)
    except PreflightError:
        return _check_environment_alone(inherited)
    except ScriptError as error:
        found = CheckResult("training command", "cannot be changed", f"{workspace.train_script}: {error}")
        alone = _check_environment_alone(inherited)
        return TrainingCheck(alone.environment, [found, *alone.results])
    results = [_check_problems(script, inherited)]
    arguments, unknown = script.arguments(inherited)
    request = _build_request(workspace, script, arguments, inherited)
    try:
        environment = read_training_environment(
            _as_script_sets_it(script, inherited), _folder_of_command(script, inherited), request
        )
    except EnvironmentUnusable as error:
        results.append(CheckResult("training environment", "unusable", str(error)))
        return TrainingCheck(None, [*results, _check_batches(workspace, None)])
    results += [_check_packages(script, environment), _check_verl_in_use(workspace, script, environment, inherited)]
    if _is_certain(workspace, environment):
        results += [_check_import(workspace, environment)] if request.imports_verl else []
        results += _check_configuration(script, environment, asked, unknown)
    else:
        results.append(CheckResult("verl's configuration", "not composed: it is not certain which verl is in use"))
    results += [_check_batches(workspace, environment), _check_prompt_length(workspace, request, environment)]
    if request.tokenizer:
        results.append(_check_tokenizer(request.tokenizer, environment))
    return TrainingCheck(environment, results)


def _check_environment_alone(inherited: Mapping[str, str]) -> TrainingCheck:
    try:
        environment = read_training_environment(inherited, Path("/"))
    except EnvironmentUnusable as error:
        return TrainingCheck(None, [CheckResult("training environment", "unusable", str(error))])
    return TrainingCheck(environment, [CheckResult("training environment", describe(environment))])


def _build_request(
    workspace: Workspace, script: TrainScript, arguments: list[str], inherited: Mapping[str, str]
) -> TrainingRequest:
    """What to ask. Nothing is loaded with a Python, or a PYTHONPATH, that may not be those of train.sh."""
    model, limit = known(lambda: workspace.base_model), number(workspace, "data.max_prompt_length")
    tokenizer = known(lambda: str(require_file(model / "tokenizer.json"))) if model else None
    doubtful = [text for text in read_prompts(workspace.dev_files) if limit and len(text.encode()) > limit]
    if _find_other_python(script, inherited):
        return TrainingRequest(arguments, script.flags(inherited), tokenizer=tokenizer, texts=doubtful)
    path, function = read_reward_setting(workspace)
    reward = known(lambda: (str(require_file(Path(path))), function)) if path else None
    return TrainingRequest(arguments, script.flags(inherited), True, reward, tokenizer, doubtful)


def _find_other_python(script: TrainScript, inherited: Mapping[str, str]) -> str | None:
    """Why the training command may import other things than the Python that is asked; None when it does not."""
    if other := script.other_python():
        return f"{other} may choose another Python"
    try:
        script.variable("PYTHONPATH", inherited)
    except ScriptError as error:
        return str(error)
    return None


def describe(environment: TrainingEnvironment) -> str:
    """One line: prefix and versions."""
    versions = [f"{name} {environment.versions[name]}" for name in _SHOWN if name in environment.versions]
    return f"{environment.prefix}: Python {environment.python_version}, {', '.join(versions) or 'no verl'}"


def _check_packages(script: TrainScript, environment: TrainingEnvironment) -> CheckResult:
    missing = [name for name in _NEEDED if name not in environment.versions] if not script.other_python() else []
    problem = f"{environment.python} has no {', '.join(missing)}; install what verl needs, or set training_env"
    return CheckResult("training environment", describe(environment), problem if missing else None)


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
    if other := _find_other_python(script, inherited):
        return CheckResult(name, f"not known before the first step: {other}")
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
    found = f"composed, {len(effective.values)} values" + ("" if problems else "; verl has every key that is set")
    if effective.error:
        found = "refused by Hydra"
    elif unknown:
        found = f"composed without {len(unknown)} values that only running the script can tell: {unknown[0]}"
    results = [CheckResult(name, found, " | ".join(problems) or None)]
    settings = relied_on(effective, script.overrides)
    if settings:
        listed = ", ".join(f"{key.split('.', 1)[1]}={value}" for key, value in settings.items())
        results.append(CheckResult("settings relied on", listed))
    return results


def _check_import(workspace: Workspace, environment: TrainingEnvironment) -> CheckResult:
    name, fault = "verl import", environment.faults.get("core_algos")
    if fault is None:
        return CheckResult(name, "core_algos.py is as released, or can be imported")
    problem = (
        f"{workspace.core_algos} cannot be imported by {environment.python}: {fault}; correct it, or what it imports"
    )
    return CheckResult(name, "fails", problem)


def _check_tokenizer(path: str, environment: TrainingEnvironment) -> CheckResult:
    name, fault = "tokenizer", environment.faults.get("tokenizer")
    if fault is None:
        return CheckResult(name, path if environment.tokens is not None else f"{path}, not tried (no tokenizers there)")
    return CheckResult(name, "damaged", f"{path} cannot be loaded ({fault}); copy the tokenizer again")


def _check_prompt_length(
    workspace: Workspace, request: TrainingRequest, environment: TrainingEnvironment
) -> CheckResult:
    """Every dev prompt must fit, or it stops verl, is cut, or (with filter_overlong_prompts) is not scored."""
    name, limit, counts = "prompt length", number(workspace, "data.max_prompt_length"), environment.tokens
    if limit is None:
        return CheckResult(name, "data.max_prompt_length unknown")
    found = f"at most {limit} tokens"
    if not request.texts:
        return CheckResult(name, f"{found}; no dev prompt has more bytes than that")
    if counts is None:
        found += f"; {len(request.texts)} dev prompts may have more (their tokens cannot be counted here)"
        return CheckResult(name, found)
    found += f"; the longest dev prompt has {max(counts)} without its chat template"
    over = sum(count > limit for count in counts)
    if over:
        filtered = read_setting(workspace, "data.filter_overlong_prompts") in ("True", "true")
        effect = "would not be scored" if filtered else "stop verl or are cut"
        problem = f"{over} dev prompts are longer than {limit} tokens and {effect}; raise data.max_prompt_length"
        return CheckResult(name, found, problem)
    return CheckResult(name, found)


# ---- batch sizes ------------------------------------------------------------------------------------------------------


def _check_batches(workspace: Workspace, environment: TrainingEnvironment | None) -> CheckResult:
    """The batch sizes that verl would really take: composed where they can be, else train.sh's and verl's defaults."""
    name, version = "batch sizes", environment.versions.get("verl") if environment else None
    effective = environment.configuration.values if environment and environment.configuration else {}
    settings = effective or _read_batch_settings(workspace)
    if settings is None:
        return CheckResult(name, "not set by train.sh")
    problems = batch_problems(settings, version)
    train = str(settings.get("data.train_batch_size"))
    rows = sum(count_rows(file) or 0 for file in workspace.train_files)
    if train.isdigit() and 0 < rows < int(train):
        problems.append(f"the {rows} training rows do not fill one batch of {train}")
    nodes, each = (settings.get(f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node"))
    found = f"{train} prompts a step on {nodes} × {each} ranks"
    return CheckResult(name, found, f"{workspace.train_script}: {'; '.join(problems)}" if problems else None)


def _read_batch_settings(workspace: Workspace) -> dict[str, Any] | None:
    """As train.sh gives them, with verl's defaults; None when it leaves the batch, or the ranks of a CPU, open."""
    given = {key: value for key in BATCH_SETTINGS if (value := read_setting(workspace, key)) is not None}
    is_cpu = read_setting(workspace, "trainer.device") == "cpu"
    needed = {"data.train_batch_size", *(["trainer.n_gpus_per_node"] if is_cpu else [])}
    return {**BATCH_DEFAULTS, **given} if needed <= given.keys() else None
