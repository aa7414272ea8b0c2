"""What train.sh says, as `trials/script.py` parses it: can it be planned with, and does it fit data, model and verl?"""

import ast
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from agent.checks import CheckResult, first_line, warning
from agent.errors import PreflightError
from agent.model_files import read_context
from agent.workspace import Workspace, read_text
from search_spaces.plain_files import require_file
from trials.checkpoints import read_checkpoints
from trials.environment import TrainingEnvironment

_Value = TypeVar("_Value")


def known(read: Callable[[], _Value]) -> _Value | None:
    """The value, None where it cannot be known; the check of the settings says why."""
    try:
        return read()
    except (PreflightError, OSError, ValueError, pa.ArrowException):
        return None


def number(workspace: Workspace, key: str) -> int | None:
    """A setting of train.sh as an integer, None where it is not set or cannot be known."""
    return known(lambda: workspace.setting_int(key))


def read_setting(workspace: Workspace, key: str) -> str | None:
    """A setting of train.sh, None where it is not set or cannot be known."""
    return known(lambda: workspace.setting(key))


def check_script(workspace: Workspace) -> list[CheckResult]:
    """What can be said from train.sh alone."""
    try:
        overrides = workspace.script.overrides
    except PreflightError as error:
        return [CheckResult("training script content", "not understood", str(error))]
    return [
        _check_settings(workspace),
        *_check_schedule(workspace),
        _check_checkpoint_folder(workspace),
        _check_kept_checkpoints(workspace),
        _check_algorithm(overrides.get("algorithm.adv_estimator")),
        _check_logger(workspace),
        _check_dev_settings(workspace),
    ]


def _check_algorithm(estimator: str | None) -> CheckResult:
    if estimator != "grpo":
        problem = f"algorithm.adv_estimator={estimator}; the agent tunes grpo only"
        return CheckResult("algorithm", str(estimator), problem)
    return CheckResult("algorithm", "grpo")


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
    started_in = Path("/run")
    try:
        folder = workspace.full_run_checkpoints(started_in)
    except PreflightError as error:
        return CheckResult(name, "unknown", str(error))
    if folder.is_relative_to(started_in):
        return CheckResult(name, "in the run's folder")
    if read_checkpoints(folder):
        return CheckResult(name, "in use", f"{folder} holds checkpoints, which verl would resume from; move them away")
    return CheckResult(name, str(folder))


def count_kept_checkpoints(workspace: Workspace) -> int | None:
    """How many checkpoints verl keeps, the newest ones; None keeps all, or cannot be known."""
    if known(lambda: workspace.setting("trainer.remove_previous_ckpt_in_save")) in ("True", "true"):
        return 1
    kept = number(workspace, "trainer.max_actor_ckpt_to_keep")
    return kept if kept and kept > 0 else None


def _check_kept_checkpoints(workspace: Workspace) -> CheckResult:
    """Before 0.7.1, verl makes room for a checkpoint before it saves it: of a single one, nothing is left meanwhile."""
    name, kept = "checkpoints kept", count_kept_checkpoints(workspace)
    if kept is None:
        return CheckResult(name, "all")
    source = read_text(workspace.verl / "verl" / "utils" / "checkpoint" / "checkpoint_manager.py")
    version = workspace.verl_version or "of unknown version"
    if kept == 1 and source and "def register_checkpoint" not in source:
        problem = (
            f"verl {version} deletes the old checkpoint before it saves the new one: a full disk or a kill while it saves "
            "loses the whole full run; set trainer.max_actor_ckpt_to_keep=2 in train.sh"
        )
        return warning(name, "the newest 1", problem)
    return CheckResult(name, f"the newest {kept}, whether or not the best is among them")


def _check_logger(workspace: Workspace) -> CheckResult:
    loggers = read_setting(workspace, "trainer.logger")
    if loggers is not None and "console" not in loggers:
        problem = f"{workspace.train_script}: trainer.logger={loggers} writes no log that the agent reads; add console"
        return CheckResult("logger", loggers, problem)
    return CheckResult("logger", loggers or "verl's default")


def count_rows(file: Path) -> int | None:
    return known(lambda: int(pq.read_metadata(require_file(file)).num_rows))


def _check_dev_settings(workspace: Workspace) -> CheckResult:
    """Every dev row must be scored: the agent weighs data sources by their rows."""
    name = "dev coverage"
    most = known(lambda: workspace.setting_int("data.val_max_samples"))
    rows = sum(count_rows(file) or 0 for file in workspace.dev_files)
    if most is not None and 0 <= most < rows:
        problem = f"{workspace.train_script}: data.val_max_samples={most} scores a part of {rows} rows; remove it"
        return CheckResult(name, f"{most} of {rows} rows", problem)
    return CheckResult(name, f"all {rows} rows")


# ---- train.sh against data, model and verl --------------------------------------------------------------------------


def check_context(workspace: Workspace, model: Path) -> CheckResult:
    """Prompt and response must fit the model's positions, or vLLM refuses to start."""
    name = "context length"
    context = read_context(model)
    lengths = [number(workspace, f"data.max_{part}_length") for part in ("prompt", "response")]
    prompt, response = lengths
    found = f"model {context or 'unknown'}, prompt {prompt or 'unknown'} + response {response or 'unknown'}"
    if context and prompt and response and prompt + response > context:
        problem = f"{workspace.train_script}: the lengths sum to {prompt + response} tokens, the model holds {context}"
        return CheckResult(name, found, problem)
    return CheckResult(name, found)


def read_reward_setting(workspace: Workspace) -> tuple[str | None, str]:
    """The file of train.sh's own reward function (None: it has none, or it cannot be known), and the function's name."""
    overrides = known(lambda: workspace.script.overrides) or {}
    key = next((key for key in overrides if key.endswith("custom_reward_function.path")), "")
    path = read_setting(workspace, key) if key else None
    function = read_setting(workspace, key.removesuffix("path") + "name")
    return (path if path and path.startswith("/") else None), function or "compute_score"


def check_reward(workspace: Workspace, sources: Iterable[str], environment: TrainingEnvironment | None) -> CheckResult:
    """Without a reward function of the script, verl chooses one by data source and raises for names it does not know."""
    name = "reward"
    overrides = known(lambda: workspace.script.overrides) or {}
    own = [value for key, value in overrides.items() if key.endswith("custom_reward_function.path") and value != "null"]
    if own:
        path, function = read_reward_setting(workspace)
        problem, is_fatal = _find_reward_problem(Path(path), function, environment) if path else (None, True)
        return CheckResult(name, path or own[0], problem, is_fatal)
    if any("reward_manager" in key or "reward_model.enable" in key for key in overrides):
        return CheckResult(name, "chosen by train.sh")
    rewarded = read_reward_sources(workspace.verl / "verl")
    if not rewarded:
        return CheckResult(name, "verl's own, data sources unknown")
    strange = [source for source in sources if not is_known_source(source, rewarded)]
    if strange:
        file = workspace.verl / "verl" / _REWARDS
        problem = (
            f"{file} names no reward for {', '.join(map(repr, strange))}; set custom_reward_function.path in train.sh"
        )
        return warning(name, "verl's own, by data source", problem)
    return CheckResult(name, "verl's own, by data source")


def _find_reward_problem(path: Path, function: str, environment: TrainingEnvironment | None) -> tuple[str | None, bool]:
    """(what is wrong with the file of the reward function, whether it stops training)."""
    try:
        text = require_file(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return f"{path} does not exist; restore the reward function", True
    except OSError as error:
        return f"{path}: {error.strerror}; restore the reward function", True
    if environment and (fault := environment.faults.get("reward")):
        return (
            f"{path} cannot be loaded as verl does ({fault}); correct it, or custom_reward_function in train.sh",
            True,
        )
    if environment and "math_verify" in text and "math-verify" not in environment.versions:
        return f"{path} needs math-verify, which the training environment lacks; pip install math-verify", False
    return None, True


_REWARDS = Path("utils/reward_score/__init__.py")


def is_known_source(source: str, known: set[tuple[str, bool]]) -> bool:
    """Whether a data source is among those of `read_reward_sources`."""
    return any(source == name or (is_beginning and source.startswith(name)) for name, is_beginning in known)


def read_reward_sources(package: Path) -> set[tuple[str, bool]]:
    """Data sources that the reward functions of a verl package name, with True for a mere beginning; from their source."""
    try:
        tree = ast.parse(require_file(package / _REWARDS).read_bytes())
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
