"""Everything that can be known to go wrong before a run starts, in one table: what was found and what to do.

Every check is made, whatever the others say, so that one look shows all defects. Nothing is written and no GPU is used.
"""

import ast
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agent.budget import read_limits, submission_reserve, training_left
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
)
from agent.errors import ConfigError, PreflightError
from agent.machine import Machine, read_machine
from agent.machine_checks import DISK, FREE_GPUS, Demand, check_machine
from agent.merging import find_merger
from agent.model_files import WeightsError, check_model, count_parameters
from agent.rungs import plan_rungs, trial_overrides
from agent.script_checks import (
    check_context,
    check_reward,
    check_script,
    count_kept_checkpoints,
    known,
    number,
)
from agent.slots import read_ask, read_proxy_overrides
from agent.training import TrainingCheck, check_training
from agent.view import print_page
from agent.workspace import Workspace, find_vocabulary, read_text
from search_spaces.plain_files import require_file
from trials.batching import BATCH_DEFAULTS
from trials.environment import TrainingEnvironment
from verl_overlay import install

_Value = TypeVar("_Value")
_STATES = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[red]failed[/]"}


@dataclass(frozen=True)
class TaskChecks:
    """The checks of a task, without those of the machine, and what they found on the way."""

    results: list[CheckResult]
    rungs: tuple[int, ...] | None
    """None: they cannot be planned."""
    environment: TrainingEnvironment | None
    """None: it cannot be asked."""


def check_task(config: AgentConfig, workspace: Workspace, checkpoints: Path) -> TaskChecks:
    """The workspace, its training environment and the configuration against both.

    Args:
        config: of the run.
        workspace: its workspace.
        checkpoints: where a trial saves.
    """
    rungs, rung_check = _check_rungs(config, workspace)
    asked = trial_overrides(workspace, rungs, checkpoints) if rungs else {}
    try:
        training = check_training(workspace, config.training_prefix(), asked)
    except ConfigError as error:
        training = TrainingCheck(None, [CheckResult("training environment", "no Python", str(error))])
    results = [*check_workspace(workspace, training.environment), rung_check, *training.results]
    return TaskChecks(results, rungs, training.environment)


def check_all(config: AgentConfig, workspace: Workspace, machine: Machine) -> list[CheckResult]:
    """All checks of a run: the workspace, the configuration against it, the machine against both."""
    task = check_task(config, workspace, config.runs / "checkpoints")
    results = [*task.results, _check_hours(config), _check_runs_folder(config.runs)]
    if config.search.gpus_per_trial is not None:
        results.append(_check_slots(config, workspace))
    return [*results, *check_machine(machine, read_demand(config, workspace, task.rungs))]


def _check_hours(config: AgentConfig) -> CheckResult:
    """Whether anything is left of the hours once those of a submission, by its limits, are taken off."""
    limits = read_limits(config)
    kept_s = submission_reserve(limits, None, None, None)
    left_s, _ = training_left(limits, 0.0, 0.0, kept_s)
    found = f"{config.budget.total_hours:g} h, of these {config.budget.training_hours:g} h of training"
    problem = (
        f"budget.total_hours={config.budget.total_hours:g} leaves nothing to train: {kept_s / 60:.0f} min are kept for "
        f"merge, two inferences and validation, {limits.margin_s / 60:.0f} min as a margin; give more hours or lower "
        "budget.inference_minutes"
    )
    return CheckResult("hours", found, None if left_s > 0 else problem)


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
    return name in ("checkpoint folder", "hours", FREE_GPUS) or name.startswith(DISK)


def check_workspace(workspace: Workspace, environment: TrainingEnvironment | None = None) -> list[CheckResult]:
    """The checks that need neither the configuration nor the machine; `environment` is None where it cannot be asked."""
    results = _check_paths(workspace)
    core_algos_is_there = workspace.core_algos.is_file() and os.access(workspace.core_algos, os.R_OK)
    if core_algos_is_there:
        results += [_check_overlay(workspace), _check_version(workspace)]
    if workspace.train_script.is_file():
        results += check_script(workspace)
    return results + _check_data(workspace, environment) + _check_base_model(workspace)


def render_table(results: Sequence[CheckResult]) -> Table:
    """The table that a person reads."""
    table = Table(show_lines=False, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for result in results:
        table.add_row(result.name, _STATES[result.state], escape(result.found), escape(result.problem or ""))
    return table


def print_table(results: Sequence[CheckResult]) -> None:
    """Write the table to standard output; wide enough to be searched when that is not a terminal."""
    console = Console()
    print_page(Console(width=None if console.is_terminal else 200), render_table(results))


# ---- paths ------------------------------------------------------------------------------------------------------------


def _check_paths(workspace: Workspace) -> list[CheckResult]:
    return [
        _check_root(workspace.root),
        _check_file("training script", workspace.train_script),
        _check_bash("inference script", workspace.inference_script),
        _check_python("inference program", workspace.scripts / "inference.py"),
        _check_merger(workspace),
        _check_file("verl core_algos.py", workspace.core_algos, writable=True),
        _check_outputs(workspace.outputs),
        _check_folder("scripts folder", workspace.scripts),
        _check_home(),
    ]


def _check_file(name: str, path: Path, writable: bool = False) -> CheckResult:
    try:
        require_file(path)
    except FileNotFoundError:
        return CheckResult(name, "missing", f"{path} does not exist; restore it")
    except OSError as error:
        return CheckResult(name, "no file", f"{path}: {error.strerror}; restore it")
    if not _may(path, os.R_OK | (os.W_OK if writable else 0)):
        return CheckResult(name, "no permission", f"{path} is not {'writable' if writable else 'readable'}; chmod it")
    if path.stat().st_size == 0:
        return CheckResult(name, "empty", f"{path} is empty; restore it")
    return CheckResult(name, str(path))


def _check_bash(name: str, path: Path) -> CheckResult:
    """A script that runs only hours later must at least be one for bash."""
    result = _check_file(name, path)
    if result.problem is not None:
        return result
    if b"\r\n" in path.read_bytes():
        return CheckResult(name, "CRLF", f"{path} has Windows line ends, which bash does not take; run dos2unix on it")
    done = subprocess.run(
        ["bash", "-n", str(path)], capture_output=True, encoding="utf-8", errors="replace", timeout=20
    )
    if done.returncode != 0:
        return CheckResult(
            name, "no bash script", f"{path}: {(done.stderr.strip().splitlines() or ['bash -n fails'])[0][:200]}"
        )
    return result


def _check_python(name: str, path: Path) -> CheckResult:
    result = _check_file(name, path)
    if result.problem is not None:
        return result
    try:
        ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return CheckResult(name, "no Python", f"{path} is not valid Python: {first_line(error)}; restore it")
    return result


def _check_folder(name: str, path: Path) -> CheckResult:
    if os.path.lexists(path) and not path.is_dir():
        return CheckResult(name, "no folder", f"{path} is not a folder; move it away and create one")
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
    """verl's repositories have the merger as a script or as the module verl.model_merger; see agent/merging.py."""
    name = "model merger"
    merger = find_merger(workspace.verl)
    if merger is None:
        problem = f"{workspace.verl} has neither scripts/model_merger.py nor verl/model_merger/; restore one"
        return CheckResult(name, "missing", problem)
    script = Path(merger.program[-1])
    if script.is_file():
        result = _check_file(name, script)
        if result.problem is None and not any(word in read_text(script) for word in ("local_dir", "verl.model_merger")):
            return CheckResult(name, "unknown form", f"{script} does not take --local_dir; use verl's own merger")
        return result
    return CheckResult(name, " ".join(merger.program))


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
    version = workspace.verl_version
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


# ---- data and model ---------------------------------------------------------------------------------------------------


def _check_data(workspace: Workspace, environment: TrainingEnvironment | None) -> list[CheckResult]:
    train, dev = read_dataset(workspace.train_files), read_dataset(workspace.dev_files)
    test = read_dataset([workspace.test_file], required=["prompt"])
    results = [check_dataset("training data", train), check_dataset("dev data", dev), _check_test(workspace, test)]
    if test.problem is None:
        results.append(check_sample_ids(test))
    if train.answers and dev.answers:
        results.append(check_answers(train, dev))
    results += check_overlap({"training": train, "dev": dev, "test": test})
    version = environment.versions.get("datasets") if environment else None
    results.append(check_features([train, dev, test], version))
    if workspace.train_script.is_file():
        results.append(check_reward(workspace, {*train.sources, *dev.sources}, environment))
    return results


def _check_test(workspace: Workspace, test: Dataset) -> CheckResult:
    result = check_dataset("test data", test)
    others = workspace.test_candidates[1:]
    if result.problem is None and others:
        problem = f"{', '.join(map(str, others))} could be meant as well; name the file in inference.sh"
        return warning("test data", f"{result.found} in {test.paths[0]}", problem)
    return result


def _check_base_model(workspace: Workspace) -> list[CheckResult]:
    try:
        model = workspace.base_model
    except PreflightError as error:
        return [CheckResult("base model", "unknown", str(error))]
    return [*check_model(model, find_vocabulary(model)), check_context(workspace, model)]


# ---- configuration ----------------------------------------------------------------------------------------------------


def _check_rungs(config: AgentConfig, workspace: Workspace) -> tuple[tuple[int, ...] | None, CheckResult]:
    try:
        rungs = plan_rungs(config, workspace)
    except (PreflightError, OSError, pa.ArrowException) as error:
        return None, CheckResult("rungs", "none", first_line(error))
    return rungs, CheckResult("rungs", f"trials are judged at steps {', '.join(map(str, rungs))}")


def _check_slots(config: AgentConfig, workspace: Workspace) -> CheckResult:
    """Trials on fewer GPUs than train.sh asks: verl must be able to train its batches on them."""
    try:
        ask = read_ask(config, workspace)
        read_proxy_overrides(workspace, ask)
    except PreflightError as error:
        return CheckResult("slots", f"{config.search.gpus_per_trial} GPUs per trial", str(error))
    return CheckResult("slots", f"{ask.gpus} of {ask.exact_gpus} GPUs per trial")


def read_demand(config: AgentConfig, workspace: Workspace, rungs: tuple[int, ...] | None) -> Demand:
    """What a run asks of the machine; what cannot be known is None."""

    device = known(lambda: workspace.setting("trainer.device")) or "cuda"
    model = known(lambda: workspace.base_model)
    steps, every = known(lambda: workspace.total_steps), known(lambda: workspace.save_freq)
    kept = count_kept_checkpoints(workspace)
    gpus = number(workspace, "trainer.n_gpus_per_node")
    full_run_saves = -(-steps // every) if steps and every else None
    trial_saves = rungs[-1] // rungs[0] if rungs else None
    test = read_dataset([workspace.test_file], required=["prompt"])
    return Demand(
        device=device,
        gpus_per_node=gpus if gpus is not None or device == "cpu" else BATCH_DEFAULTS["trainer.n_gpus_per_node"],
        nodes=number(workspace, "trainer.nnodes") or 1,
        concurrent=config.search.concurrent or 1,
        cluster=config.ray_address,
        cpus_per_gpu=read_colocation(workspace.verl),
        ray_cpus=number(workspace, "ray_kwargs.ray_init.num_cpus") or number(workspace, "ray_init.num_cpus"),
        parameters=_count_parameters(model) if model else None,
        trial_checkpoints=trial_saves,
        full_run_checkpoints=min(full_run_saves, kept + 1) if full_run_saves and kept else full_run_saves,
        test_rows=test.rows or None,
        response_tokens=number(workspace, "data.max_response_length"),
        vocabulary=find_vocabulary(model) if model else None,
        devices=read_devices(read_text(workspace.train_script)),
        runs=config.runs,
        full_run_folder=known(lambda: workspace.full_run_checkpoints(config.runs)) or config.runs,
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
