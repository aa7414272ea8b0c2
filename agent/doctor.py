"""Everything that can be known to go wrong before a run starts, in one table: what was found and what to do.

Every check is made, whatever the others say, so that one look shows all defects. Nothing is written and no GPU is used.
"""

import ast
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from agent.batches import BATCH_DEFAULTS, BATCH_SETTINGS, DYNAMIC, batch_problems
from agent.checks import CheckResult, first_line, require_sound, warning
from agent.config import AgentConfig
from agent.dataset import (
    Dataset,
    check_answers,
    check_dataset,
    check_features,
    check_overlap,
    check_sample_ids,
    read_dataset,
    read_prompts,
)
from agent.errors import PreflightError
from agent.machine import Machine, read_machine
from agent.machine_checks import DISK, FREE_GPUS, Demand, check_machine
from agent.model_files import WeightsError, check_model, count_parameters, read_context
from agent.rungs import plan_rungs
from agent.token_counts import count_tokens_of
from agent.workspace import Workspace, find_vocabulary, read_text
from trials.checkpoints import read_checkpoints
from verl_overlay import install

_Value = TypeVar("_Value")
_STATES = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[red]failed[/]"}


def check_all(config: AgentConfig, workspace: Workspace, machine: Machine) -> list[CheckResult]:
    """All checks of a run: the workspace, the configuration against it, the machine against both."""
    results = check_workspace(workspace, config.training_env)
    results.append(_check_runs_folder(config.runs))
    rungs, rung_check = _check_rungs(config, workspace)
    results.append(rung_check)
    if config.training_env is not None:
        results.append(_check_training_env(config.training_env))
    return [*results, *check_machine(machine, read_demand(config, workspace, rungs))]


def require_healthy(config: AgentConfig, workspace: Workspace, *, is_resumed: bool = False) -> list[CheckResult]:
    """All checks before a run; those that did not pass are printed as a table. Returns the results.

    Args:
        config: of the run.
        workspace: its workspace.
        is_resumed: then what it wrote may fill the disk or train.sh's folder, and what it left behind may hold GPUs: a
            warning, because the run goes on from there and ends its leftovers first.

    Raises:
        PreflightError: at least one failed; the message lists every one.
    """
    results = check_all(config, workspace, read_machine())
    if is_resumed:
        results = [replace(result, is_fatal=False) if _is_own_doing(result.name) else result for result in results]
    remarkable = [result for result in results if result.state != "ok"]
    if remarkable:
        print_table(remarkable)
    require_sound(results)
    return results


def _is_own_doing(name: str) -> bool:
    return name in ("checkpoint folder", FREE_GPUS) or name.startswith(DISK)


def check_workspace(workspace: Workspace, training_env: Path | None = None) -> list[CheckResult]:
    """The checks that need neither the configuration nor the machine."""
    results = _check_paths(workspace)
    core_algos_is_there = workspace.core_algos.is_file() and os.access(workspace.core_algos, os.R_OK)
    if core_algos_is_there:
        results += [_check_overlay(workspace), _check_version(workspace)]
    if workspace.train_script.is_file():
        results += _check_script(workspace)
    return results + _check_data(workspace, training_env) + _check_base_model(workspace)


def render_table(results: Sequence[CheckResult]) -> Table:
    """The table that a person reads."""
    table = Table(show_lines=False, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for result in results:
        table.add_row(result.name, _STATES[result.state], _escape(result.found), _escape(result.problem or ""))
    return table


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def print_table(results: Sequence[CheckResult]) -> None:
    """Write the table to standard output; wide enough to be searched when that is not a terminal."""
    console = Console()
    Console(width=None if console.is_terminal else 200).print(render_table(results))


# ---- paths ------------------------------------------------------------------------------------------------------------


def _check_paths(workspace: Workspace) -> list[CheckResult]:
    return [
        _check_root(workspace.root),
        _check_file("training script", workspace.train_script),
        _check_file("inference script", workspace.inference_script),
        _check_file("inference program", workspace.scripts / "inference.py"),
        _check_merger(workspace),
        _check_file("verl core_algos.py", workspace.core_algos, writable=True),
        _check_outputs(workspace.outputs),
        _check_folder("scripts folder", workspace.scripts),
        _check_home(),
    ]


def _check_file(name: str, path: Path, writable: bool = False) -> CheckResult:
    if not path.is_file():
        return CheckResult(name, "missing", f"{path} does not exist; restore it")
    if not _may(path, os.R_OK | (os.W_OK if writable else 0)):
        return CheckResult(name, "no permission", f"{path} is not {'writable' if writable else 'readable'}; chmod it")
    if path.stat().st_size == 0:
        return CheckResult(name, "empty", f"{path} is empty; restore it")
    return CheckResult(name, str(path))


def _check_folder(name: str, path: Path) -> CheckResult:
    if not path.is_dir():
        return CheckResult(name, "missing", f"{path} does not exist; create it")
    if not _may(path, os.W_OK | os.X_OK):
        return CheckResult(name, "no permission", f"{path} is not writable; chmod it")
    return CheckResult(name, str(path))


def _check_root(root: Path) -> CheckResult:
    if "'" in str(root) or "\n" in str(root):
        return CheckResult(
            "workspace", str(root), f"{root}: Hydra cannot take a path with an apostrophe; move the workspace"
        )
    return CheckResult("workspace", str(root))


def _check_merger(workspace: Workspace) -> CheckResult:
    """verl's repositories have the merger as scripts/model_merger.py or as the module verl.model_merger."""
    name = "model merger"
    is_module = any((workspace.verl / "verl" / place).is_file() for place in _MERGER_MODULES)
    if not workspace.merger.exists() and is_module:
        fix = "`run_agent.py init` writes one that calls it"
        problem = f"{workspace.merger} does not exist; this verl's merger is `python -m verl.model_merger`: {fix}"
        return CheckResult(name, "module only", problem)
    result = _check_file(name, workspace.merger)
    if result.problem is None and "local_dir" not in read_text(workspace.merger):
        return CheckResult(name, "unknown form", f"{workspace.merger} does not take --local_dir; use verl's own merger")
    return result


_MERGER_MODULES = ("model_merger/__main__.py", "model_merger.py")


def _check_outputs(path: Path) -> CheckResult:
    blocked = [name for name in ("math_results.parquet", "math_results_logits.pt") if (path / name).is_dir()]
    if blocked:
        return CheckResult("outputs folder", "blocked", f"{path / blocked[0]} is a folder; remove it")
    return _check_folder("outputs folder", path)


def _check_home() -> CheckResult:
    """Ray writes a token into the home folder at every start."""
    home = Path(os.environ.get("HOME", "/"))
    if not home.is_dir() or not _may(home, os.W_OK):
        return CheckResult(
            "home folder", str(home), f"HOME={home} is not a writable folder, and Ray needs one; set HOME"
        )
    return CheckResult("home folder", str(home))


def _check_runs_folder(runs: Path) -> CheckResult:
    nearest = runs
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not _may(nearest, os.W_OK):
        return CheckResult("runs folder", str(runs), f"{nearest} is not a writable folder; chmod it or set runs")
    return CheckResult("runs folder", str(runs))


def _check_training_env(prefix: Path) -> CheckResult:
    python = prefix / "bin" / "python3"
    if not os.access(python, os.X_OK):
        return CheckResult(
            "training environment", str(prefix), f"{python} cannot be executed; name a venv or conda prefix"
        )
    return CheckResult("training environment", str(prefix))


def _may(path: Path, mode: int) -> bool:
    """os.access, but without root's blanket yes: a file without any write bit is meant not to be written."""
    bits = path.stat().st_mode
    if mode & os.W_OK and not bits & 0o222:
        return False
    return os.access(path, mode)


# ---- verl -------------------------------------------------------------------------------------------------------------


def _check_overlay(workspace: Workspace) -> CheckResult:
    try:
        if install.is_installed(workspace.core_algos):
            return CheckResult("overlay", "installed by an earlier run")
        install.require_supported(workspace.core_algos)
    except install.OverlayError as error:
        return CheckResult("overlay", "refused", str(error))
    return CheckResult("overlay", "can be installed")


def _check_version(workspace: Workspace) -> CheckResult:
    version = read_text(workspace.verl / "verl" / "version" / "version").strip()
    return CheckResult("verl", f"version {version}" if version else "version unknown (no verl/version/version)")


def read_colocation(verl: Path) -> int | None:
    """CPUs that verl's placement group asks for with each GPU, read in its source; None when it is not found there."""
    for file in ("trainer/ppo/ray_trainer.py", "single_controller/ray/base.py"):
        _, found, manager = read_text(verl / "verl" / file).partition("class ResourcePoolManager")
        match = (
            re.search(r"^[^#\n]*\bmax_colocate_count(?:: int)?\s*=\s*(\d+)\s*(?:[,)]|$)", manager, re.MULTILINE)
            if found
            else None
        )
        if match:
            return int(match[1])
    return None


# ---- train.sh ---------------------------------------------------------------------------------------------------------


def _known(read: Callable[[], _Value]) -> _Value | None:
    """The value, None where it cannot be known; the check of the settings says why."""
    try:
        return read()
    except (PreflightError, OSError, ValueError, pa.ArrowException):
        return None


def _number(workspace: Workspace, key: str) -> int | None:
    return _known(lambda: workspace.setting_int(key))


def _check_script(workspace: Workspace) -> list[CheckResult]:
    try:
        overrides = workspace.script.overrides
    except PreflightError as error:
        return [CheckResult("training script content", "not understood", str(error))]
    estimator = overrides.get("algorithm.adv_estimator")
    return [
        _check_settings(workspace),
        *_check_schedule(workspace),
        _check_checkpoint_folder(workspace),
        CheckResult("algorithm", "grpo")
        if estimator == "grpo"
        else CheckResult(
            "algorithm", str(estimator), f"algorithm.adv_estimator={estimator}; the agent tunes grpo only"
        ),
        _check_logger(workspace),
        _check_batches(workspace),
        _check_dev_settings(workspace),
    ]


_NUMBERS = (
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
)
_PATHS = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")


def _check_settings(workspace: Workspace) -> CheckResult:
    """Every value that the agent plans with can be read, and no path depends on the current folder."""
    name, problems = "settings", []
    for key in (*_NUMBERS, *_PATHS, "trainer.device", "trainer.logger"):
        try:
            value = workspace.setting_int(key) if key in _NUMBERS else workspace.setting(key)
        except PreflightError as error:
            problems.append(str(error))
            continue
        if key in _PATHS and isinstance(value, str) and not value.startswith(("/", "[")):
            problems.append(
                f"{workspace.train_script}: {key}={value} is not an absolute path; trials run in folders of their own"
            )
    if problems:
        return CheckResult(name, f"{len(problems)} cannot be used", "; ".join(problems))
    return CheckResult(name, "all understood")


def _check_schedule(workspace: Workspace) -> list[CheckResult]:
    name, results = "training schedule", []
    try:
        steps = workspace.total_steps
        if steps < 1:
            problem = f"{workspace.train_script}: {steps} steps cannot be trained"
            results.append(CheckResult(name, f"{steps} steps", problem))
        else:
            results.append(CheckResult(name, f"{steps} steps"))
    except PreflightError as error:
        results.append(CheckResult(name, "unknown", str(error)))
    except (OSError, pa.ArrowException) as error:
        results.append(
            CheckResult(name, "unknown", f"rows of the training data cannot be counted: {first_line(error)}")
        )
    try:
        results.append(CheckResult("checkpoint schedule", f"one every {workspace.save_freq} steps"))
    except PreflightError as error:
        results.append(CheckResult("checkpoint schedule", "none", str(error)))
    return results


def _check_checkpoint_folder(workspace: Workspace) -> CheckResult:
    """A fixed checkpoint folder must be empty: verl would resume from what lies there."""
    name = "checkpoint folder"
    try:
        folder = workspace.setting("trainer.default_local_dir")
    except PreflightError as error:
        return CheckResult(name, "unknown", str(error))
    if folder is None or not Path(folder).is_absolute():
        return CheckResult(name, "in the run's folder")
    if read_checkpoints(Path(folder)):
        return CheckResult(name, "in use", f"{folder} holds checkpoints, which verl would resume from; move them away")
    return CheckResult(name, folder)


def _check_logger(workspace: Workspace) -> CheckResult:
    loggers = _known(lambda: workspace.setting("trainer.logger"))
    if loggers is not None and "console" not in loggers:
        problem = f"{workspace.train_script}: trainer.logger={loggers} writes no log that the agent reads; add console"
        return CheckResult("logger", loggers, problem)
    return CheckResult("logger", loggers or "verl's default")


def _check_batches(workspace: Workspace) -> CheckResult:
    """On the CPU plugin and with verl's defaults, one process stands for one GPU."""
    settings = {key: _number(workspace, key) for key in BATCH_SETTINGS}
    settings[DYNAMIC] = _known(lambda: workspace.setting(DYNAMIC)) in ("True", "true")
    train, gpus = settings["data.train_batch_size"], _count_ranks(workspace)
    if train is None or gpus is None:
        return CheckResult("batch sizes", "not set by train.sh")
    problems = batch_problems(settings, gpus)
    rows = sum(_count_rows(file) or 0 for file in workspace.train_files)
    if 0 < rows < train:
        problems.append(f"the {rows} training rows do not fill one batch of {train}")
    found = f"{train} prompts a step on {gpus} ranks"
    if problems:
        return CheckResult("batch sizes", found, f"{workspace.train_script}: {'; '.join(problems)}")
    return CheckResult("batch sizes", found)


def _count_ranks(workspace: Workspace) -> int | None:
    """GPUs of one trial (processes where the CPU trains); None when the CPU trains and train.sh does not say."""
    each = _number(workspace, "trainer.n_gpus_per_node")
    if each is None:
        if _known(lambda: workspace.setting("trainer.device")) == "cpu":
            return None
        each = BATCH_DEFAULTS["trainer.n_gpus_per_node"]
    return max(1, each * (_number(workspace, "trainer.nnodes") or 1))


def _count_rows(file: Path) -> int | None:
    return _known(lambda: int(pq.read_metadata(file).num_rows))


def _check_dev_settings(workspace: Workspace) -> CheckResult:
    """Every dev row must be scored: the agent weighs data sources by their rows."""
    name = "dev coverage"
    most = _known(lambda: workspace.setting_int("data.val_max_samples"))
    rows = sum(_count_rows(file) or 0 for file in workspace.dev_files)
    if most is not None and 0 <= most < rows:
        problem = f"{workspace.train_script}: data.val_max_samples={most} scores a part of {rows} rows; remove it"
        return CheckResult(name, f"{most} of {rows} rows", problem)
    return CheckResult(name, f"all {rows} rows")


# ---- data and model ---------------------------------------------------------------------------------------------------


def _check_data(workspace: Workspace, training_env: Path | None) -> list[CheckResult]:
    train, dev = read_dataset(workspace.train_files), read_dataset(workspace.dev_files)
    test = read_dataset([workspace.test_file], required=["prompt"])
    results = [check_dataset("training data", train), check_dataset("dev data", dev), _check_test(workspace, test)]
    if test.problem is None:
        results.append(check_sample_ids(test))
    if train.answers and dev.answers:
        results.append(check_answers(train, dev))
    results += check_overlap({"training": train, "dev": dev, "test": test})
    results.append(check_features([train, dev, test], read_package_version("datasets", training_env)))
    results.append(_check_prompt_length(workspace, training_env))
    if workspace.train_script.is_file():
        results.append(_check_reward(workspace, {*train.sources, *dev.sources}))
    return results


def _check_test(workspace: Workspace, test: Dataset) -> CheckResult:
    result = check_dataset("test data", test)
    others = workspace.test_candidates[1:]
    if result.problem is None and others:
        problem = f"{', '.join(map(str, others))} could be meant as well; name the file in inference.sh"
        return warning("test data", f"{result.found} in {test.paths[0]}", problem)
    return result


def _check_prompt_length(workspace: Workspace, training_env: Path | None) -> CheckResult:
    """Every dev prompt must fit, or it stops verl, is cut, or (with filter_overlong_prompts) is not scored."""
    name = "prompt length"
    limit = _number(workspace, "data.max_prompt_length")
    if limit is None:
        return CheckResult(name, "data.max_prompt_length unknown")
    doubtful = [text for text in read_prompts(workspace.dev_files) if len(text.encode()) > limit]
    found = f"at most {limit} tokens"
    if not doubtful:
        return CheckResult(name, f"{found}; no dev prompt has more bytes than that")
    model = _known(lambda: workspace.base_model)
    counts = count_tokens_of(doubtful, model, training_env) if model else None
    if counts is None:
        return CheckResult(
            name, f"{found}; {len(doubtful)} dev prompts may have more (their tokens cannot be counted here)"
        )
    found += f"; the longest dev prompt has {max(counts)} without its chat template"
    over = sum(count > limit for count in counts)
    if over:
        filtered = _known(lambda: workspace.setting("data.filter_overlong_prompts")) in ("True", "true")
        effect = "would not be scored" if filtered else "stop verl or are cut"
        problem = f"{over} dev prompts are longer than {limit} tokens and {effect}; raise data.max_prompt_length"
        return CheckResult(name, found, problem)
    return CheckResult(name, found)


def _check_reward(workspace: Workspace, sources: Iterable[str]) -> CheckResult:
    """Without a reward function of the script, verl chooses one by data source and raises for names it does not know."""
    name = "reward"
    overrides = _known(lambda: workspace.script.overrides) or {}
    own = [value for key, value in overrides.items() if key.endswith("custom_reward_function.path") and value != "null"]
    if own:
        path = _known(lambda: workspace.setting(next(key for key in overrides if key.endswith("reward_function.path"))))
        if path is not None and Path(path).is_absolute() and not Path(path).is_file():
            return CheckResult(name, path, f"{path} does not exist; restore the reward function")
        return CheckResult(name, path or own[0])
    if any("reward_manager" in key or "reward_model.enable" in key for key in overrides):
        return CheckResult(name, "chosen by train.sh")
    known = read_reward_sources(workspace.verl / "verl")
    if not known:
        return CheckResult(name, "verl's own, data sources unknown")
    strange = [source for source in sources if not is_known_source(source, known)]
    if strange:
        file = workspace.verl / "verl" / _REWARDS
        problem = (
            f"{file} names no reward for {', '.join(map(repr, strange))}; set custom_reward_function.path in train.sh"
        )
        return warning(name, "verl's own, by data source", problem)
    return CheckResult(name, "verl's own, by data source")


_REWARDS = Path("utils/reward_score/__init__.py")


def is_known_source(source: str, known: set[tuple[str, bool]]) -> bool:
    """Whether a data source is among those of `read_reward_sources`."""
    return any(source == name or (is_beginning and source.startswith(name)) for name, is_beginning in known)


def read_reward_sources(package: Path) -> set[tuple[str, bool]]:
    """Data sources that the reward functions of a verl package name, with True for a mere beginning; from their source."""
    try:
        tree = ast.parse((package / _REWARDS).read_text())
    except (OSError, SyntaxError, ValueError):
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "data_source":
            names = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            found |= {(name, False) for name in names if isinstance(name, str)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "data_source.startswith":
            names = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            found |= {(name, True) for name in names if isinstance(name, str)}
    return found


def _check_base_model(workspace: Workspace) -> list[CheckResult]:
    try:
        model = workspace.base_model
    except PreflightError as error:
        return [CheckResult("base model", "unknown", str(error))]
    return [*check_model(model, find_vocabulary(model)), _check_context(workspace, model)]


def _check_context(workspace: Workspace, model: Path) -> CheckResult:
    """Prompt and response must fit the model's positions, or vLLM refuses to start."""
    name = "context length"
    context = read_context(model)
    lengths = [_number(workspace, f"data.max_{part}_length") for part in ("prompt", "response")]
    prompt, response = lengths
    found = f"model {context or 'unknown'}, prompt {prompt or 'unknown'} + response {response or 'unknown'}"
    if context and prompt and response and prompt + response > context:
        problem = f"{workspace.train_script}: the lengths sum to {prompt + response} tokens, {model} holds {context}; lower one"
        return CheckResult(name, found, problem)
    return CheckResult(name, found)


def read_package_version(package: str, training_env: Path | None) -> str | None:
    """The version of a package in the training environment, from its files; None when it is not installed there."""
    folders = [str(path) for path in training_env.glob("lib/python3*/site-packages")] if training_env else None
    found = distributions(name=package, path=folders) if folders is not None else distributions(name=package)
    return next((distribution.version for distribution in found), None)


# ---- configuration ----------------------------------------------------------------------------------------------------


def _check_rungs(config: AgentConfig, workspace: Workspace) -> tuple[tuple[int, ...] | None, CheckResult]:
    try:
        rungs = plan_rungs(config, workspace)
    except (PreflightError, OSError, pa.ArrowException) as error:
        return None, CheckResult("rungs", "none", first_line(error))
    return rungs, CheckResult("rungs", f"trials are judged at steps {', '.join(map(str, rungs))}")


def read_demand(config: AgentConfig, workspace: Workspace, rungs: tuple[int, ...] | None) -> Demand:
    """What a run asks of the machine; what cannot be known is None."""

    device = _known(lambda: workspace.setting("trainer.device")) or "cuda"
    model = _known(lambda: workspace.base_model)
    steps, every = _known(lambda: workspace.total_steps), _known(lambda: workspace.save_freq)
    kept = _number(workspace, "trainer.max_actor_ckpt_to_keep")
    gpus = _number(workspace, "trainer.n_gpus_per_node")
    full_run_saves = -(-steps // every) if steps and every else None
    trial_saves = rungs[-1] // rungs[0] if rungs else None
    test = read_dataset([workspace.test_file], required=["prompt"])
    return Demand(
        device=device,
        gpus_per_node=gpus if gpus is not None or device == "cpu" else BATCH_DEFAULTS["trainer.n_gpus_per_node"],
        nodes=_number(workspace, "trainer.nnodes") or 1,
        concurrent=config.search.concurrent,
        cpus_per_gpu=read_colocation(workspace.verl),
        ray_cpus=_number(workspace, "ray_kwargs.ray_init.num_cpus") or _number(workspace, "ray_init.num_cpus"),
        parameters=_count_parameters(model) if model else None,
        trial_checkpoints=min(trial_saves, kept) if trial_saves and kept else trial_saves,
        full_run_checkpoints=min(full_run_saves, kept) if full_run_saves and kept else full_run_saves,
        test_rows=test.rows or None,
        response_tokens=_number(workspace, "data.max_response_length"),
        vocabulary=find_vocabulary(model) if model else None,
        devices=read_devices(read_text(workspace.train_script)),
        runs=config.runs,
        full_run_folder=_known(lambda: workspace.full_run_checkpoints(config.runs)) or config.runs,
        outputs=workspace.outputs,
    )


def read_devices(script: str) -> str | None:
    """CUDA_VISIBLE_DEVICES where a script sets it to a plain value; None where it does not or computes it."""
    assigned = re.findall(r"^\s*(?:export\s+)?CUDA_VISIBLE_DEVICES=([^\s;#]*)", script, re.MULTILINE)
    value = assigned[-1].strip("\"'") if assigned else None
    return None if value is None or "$" in value else value


def _count_parameters(model: Path) -> int | None:
    try:
        return count_parameters(model)
    except (WeightsError, OSError):
        return None
