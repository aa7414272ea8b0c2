"""The workspace: every path of the task, checks before anything starts, and proof that only the allowed files changed."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from agent.errors import PreflightError
from trials.checkpoints import read_checkpoints
from trials.script import ScriptError, TrainScript
from verl_overlay import install

_Value = TypeVar("_Value")
_LARGE_FILE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class CheckResult:
    """One line of the preflight table."""

    name: str
    found: str
    problem: str | None = None
    """What is wrong and what to do; None when all is well."""


@dataclass(frozen=True)
class Workspace:
    """Paths of the task under one root folder."""

    root: Path

    @property
    def scripts(self) -> Path:
        return self.root / "task" / "scripts"

    @property
    def train_script(self) -> Path:
        return self.scripts / "train.sh"

    @property
    def inference_script(self) -> Path:
        return self.scripts / "inference.sh"

    @property
    def verl(self) -> Path:
        """The verl checkout; holds the package folder `verl/`."""
        return self.root / "task" / "repositories" / "verl"

    @property
    def core_algos(self) -> Path:
        """The only file of verl that may change."""
        return self.verl / "verl" / "trainer" / "ppo" / "core_algos.py"

    @property
    def merger(self) -> Path:
        return self.verl / "scripts" / "model_merger.py"

    @property
    def datasets(self) -> Path:
        return self.root / "data" / "datasets"

    @property
    def checkpoints(self) -> Path:
        return self.root / "data" / "checkpoints"

    @property
    def outputs(self) -> Path:
        return self.root / "data" / "outputs"

    @cached_property
    def script(self) -> TrainScript:
        """The parsed train.sh.

        Raises:
            PreflightError: unreadable or not understood.
        """
        try:
            return TrainScript(self.train_script.read_bytes().decode(), self.scripts)
        except OSError as error:
            raise PreflightError(f"{self.train_script}: {error.strerror}") from None
        except (ScriptError, UnicodeDecodeError) as error:
            raise PreflightError(f"{self.train_script}: {error}") from None

    def setting(self, key: str) -> str | None:
        """The value train.sh gives to a verl setting; variables resolved with ROOT-like paths of this workspace.

        Raises:
            PreflightError: the value cannot be known.
        """
        return self._read(self.script.get, key)

    def setting_int(self, key: str) -> int | None:
        """The same as an integer."""
        return self._read(self.script.get_int, key)

    def _read(self, get: Callable[[str, Mapping[str, str]], _Value], key: str) -> _Value:
        try:
            return get(key, os.environ)
        except ScriptError as error:
            raise PreflightError(f"{self.train_script}: {error}") from None

    def data_file(self, key: str, fallback: str) -> Path:
        """The parquet file that a `data.*_files` setting names, else the file of that name in data/datasets."""
        try:
            value = self.setting(key)
        except PreflightError:
            value = None
        if value and not value.startswith("["):
            return Path(value)
        found = sorted(self.datasets.glob(f"*/{fallback}"))
        return found[0] if found else self.datasets / fallback

    @property
    def train_file(self) -> Path:
        return self.data_file("data.train_files", "train.parquet")

    @property
    def dev_file(self) -> Path:
        return self.data_file("data.val_files", "dev.parquet")

    @property
    def test_file(self) -> Path:
        return self.dev_file.with_name("test.parquet")

    @property
    def base_model(self) -> Path:
        return Path(self.setting("actor_rollout_ref.model.path") or self.checkpoints)

    @cached_property
    def total_steps(self) -> int:
        """Training steps of the full schedule, from train.sh (and the rows of the training file)."""
        steps = self.setting_int("trainer.total_training_steps")
        if steps:
            return steps
        epochs, batch = self.setting_int("trainer.total_epochs"), self.setting_int("data.train_batch_size")
        if not epochs or not batch:
            raise PreflightError(
                f"{self.train_script}: sets neither trainer.total_training_steps nor both trainer.total_epochs and "
                "data.train_batch_size; add one so that the agent can plan"
            )
        return epochs * int(pq.read_metadata(self.train_file).num_rows // batch)

    @cached_property
    def save_freq(self) -> int:
        """Steps between the full run's checkpoints."""
        frequency = self.setting_int("trainer.save_freq")
        if not frequency or frequency < 1:
            raise PreflightError(
                f"{self.train_script}: trainer.save_freq={frequency} never saves a checkpoint; set it to a positive number"
            )
        return frequency

    def full_run_checkpoints(self, cwd: Path) -> Path:
        """Where the full run's checkpoints land when train.sh is started in `cwd`."""
        folder = self.setting("trainer.default_local_dir")
        if folder is None:
            project = self.setting("trainer.project_name") or "verl_examples"
            experiment = self.setting("trainer.experiment_name") or "gsm8k"
            folder = f"checkpoints/{project}/{experiment}"
        try:
            changed_to = self.script.working_folder(os.environ)
        except ScriptError as error:
            raise PreflightError(f"{self.train_script}: {error}") from None
        return Path(cwd, changed_to or "", folder)

    def dev_rows(self) -> dict[str, int]:
        """Dev data source → number of rows."""
        sources = pq.read_table(self.dev_file, columns=["data_source"]).column("data_source").to_pylist()
        return {source: sources.count(source) for source in dict.fromkeys(sources)}


# ---- checks -----------------------------------------------------------------------------------------------------------


def check_workspace(workspace: Workspace) -> list[CheckResult]:
    """All preflight checks; nothing is written. The list is complete: one defect does not hide another."""
    results = [
        _check_root(workspace.root),
        _check_file("training script", workspace.train_script),
        _check_file("inference script", workspace.inference_script),
        _check_file("inference program", workspace.scripts / "inference.py"),
        _check_file("model merger", workspace.merger),
        _check_file("verl core_algos.py", workspace.core_algos, writable=True),
        _check_outputs(workspace.outputs),
        _check_folder("scripts folder", workspace.scripts),
    ]
    problems = {result.name for result in results if result.problem}
    if "training script" not in problems:
        results += _check_script(workspace)
    if "verl core_algos.py" not in problems:
        results.append(_check_overlay(workspace))
    return results


def require_sound(results: list[CheckResult]) -> None:
    """Raise one PreflightError that lists every problem.

    Raises:
        PreflightError: at least one check failed.
    """
    problems = [f"{result.name}: {result.problem}" for result in results if result.problem]
    if problems:
        raise PreflightError("the workspace cannot be used: " + " | ".join(problems) + " — nothing was changed")


def _check_file(name: str, path: Path, writable: bool = False) -> CheckResult:
    if not path.is_file():
        return CheckResult(name, "missing", f"{path} does not exist; restore it")
    if not _may(path, os.R_OK | (os.W_OK if writable else 0)):
        return CheckResult(name, "no permission", f"{path} is not {'writable' if writable else 'readable'}; chmod it")
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


def _check_outputs(path: Path) -> CheckResult:
    blocked = [name for name in ("math_results.parquet", "math_results_logits.pt") if (path / name).is_dir()]
    if blocked:
        return CheckResult("outputs folder", "blocked", f"{path / blocked[0]} is a folder; remove it")
    return _check_folder("outputs folder", path)


def _may(path: Path, mode: int) -> bool:
    """os.access, but without root's blanket yes: a file without any write bit is meant not to be written."""
    bits = path.stat().st_mode
    if mode & os.W_OK and not bits & 0o222:
        return False
    return os.access(path, mode)


def _check_script(workspace: Workspace) -> list[CheckResult]:
    try:
        script = workspace.script
        steps, save_freq = workspace.total_steps, workspace.save_freq
    except PreflightError as error:
        return [CheckResult("training script content", "not understood", str(error))]
    except (OSError, pa.ArrowException) as error:
        return [
            CheckResult("training script content", "no step count", f"{workspace.train_file}: {_first_line(error)}")
        ]
    if steps < 1:
        return [
            CheckResult(
                "training schedule", f"{steps} steps", f"{workspace.train_script}: {steps} steps cannot be trained"
            )
        ]
    results = [CheckResult("training schedule", f"{steps} steps, a checkpoint every {save_freq}")]
    results.append(_check_checkpoint_folder(workspace))
    if script.overrides.get("algorithm.adv_estimator") != "grpo":
        value = script.overrides.get("algorithm.adv_estimator")
        results.append(
            CheckResult("algorithm", str(value), f"algorithm.adv_estimator={value}; the agent tunes grpo only")
        )
    results.append(_check_model(workspace))
    train, dev = _check_parquet("training data", workspace.train_file), _check_parquet("dev data", workspace.dev_file)
    results += [train, dev, _check_test(workspace.test_file)]
    if train.problem is None and dev.problem is None:
        results.append(_check_answer_types(workspace))
    return results


def _check_answer_types(workspace: Workspace) -> CheckResult:
    """Training and dev answers must be of one type, or the reward compares text with numbers."""
    name = "answer types"
    train, dev = (_kinds_of_answers(path) for path in (workspace.train_file, workspace.dev_file))
    if train != dev:
        return CheckResult(
            name,
            "mixed",
            f"{workspace.dev_file}: ground_truth holds {dev}, the training file {train}; write both as text",
        )
    return CheckResult(name, train)


def _kinds_of_answers(path: Path) -> str:
    rewards = pq.read_table(path, columns=["reward_model"]).column("reward_model").to_pylist()
    return " and ".join(sorted({_kind_of_answer(reward["ground_truth"]) for reward in rewards}))


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


def _check_model(workspace: Workspace) -> CheckResult:
    try:
        path = workspace.base_model
    except PreflightError as error:
        return CheckResult("base model", "unknown", str(error))
    if not (path / "config.json").is_file():
        return CheckResult("base model", "missing", f"{path}/config.json does not exist; put the base model there")
    if find_vocabulary(path) is None:
        return CheckResult("base model", "no vocab_size", f"{path}/config.json is not JSON or names no vocab_size")
    return CheckResult("base model", str(path))


def find_vocabulary(model: Path) -> int | None:
    """The vocabulary size in a model's config.json (also of its text part), None when it names none."""
    try:
        config = json.loads((model / "config.json").read_text())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def _check_parquet(name: str, path: Path) -> CheckResult:
    """Schema and rows of a file in verl's format."""
    table, problem = _read_table(path)
    if table is None:
        return CheckResult(name, "unreadable", problem)
    missing = {"data_source", "prompt", "reward_model"} - set(table.column_names)
    if missing:
        return CheckResult(name, "wrong schema", f"{path}: columns {sorted(missing)} are missing; write verl's schema")
    if table.num_rows == 0:
        return CheckResult(name, "empty", f"{path} has no rows")
    for row, record in enumerate(table.select(["data_source", "prompt", "reward_model"]).to_pylist()):
        complaint = _row_problem(record)
        if complaint:
            return CheckResult(name, "bad row", f"{path} row {row}: {complaint}")
    kinds = _kinds_of_answers(path)
    if " and " in kinds:
        return CheckResult(name, "mixed answers", f"{path}: ground_truth mixes {kinds}; write every answer as text")
    sources = dict.fromkeys(table.column("data_source").to_pylist())
    return CheckResult(name, f"{table.num_rows} rows from {', '.join(map(str, sources))}")


def _row_problem(record: dict[str, Any]) -> str | None:
    if not record["data_source"]:
        return "data_source is empty; the reward function is chosen by it"
    messages = record["prompt"]
    if not messages or not all(isinstance(m, dict) and m.get("content") for m in messages):
        return f"prompt is not a list of messages with content (value: {str(messages)[:80]!r})"
    reward = record["reward_model"]
    if not isinstance(reward, dict) or reward.get("ground_truth") in (None, ""):
        return f"reward_model has no ground_truth (value: {str(reward)[:80]!r})"
    return None


def _kind_of_answer(answer: Any) -> str:
    """What kind of value an answer is, in words."""
    if isinstance(answer, bool):
        return "booleans"
    if isinstance(answer, (int, float)):
        return "numbers"
    return "lists" if isinstance(answer, list) else "text" if isinstance(answer, str) else type(answer).__name__


def _check_test(path: Path) -> CheckResult:
    table, problem = _read_table(path)
    if table is None:
        return CheckResult("test data", "unreadable", problem)
    if "prompt" not in table.column_names or table.num_rows == 0:
        return CheckResult("test data", "wrong schema", f"{path}: needs a prompt column and at least one row")
    try:
        read_sample_ids(path)
    except PreflightError as error:
        return CheckResult("test data", "bad ids", str(error))
    return CheckResult("test data", f"{table.num_rows} rows")


def read_sample_ids(path: Path) -> list[int]:
    """The ids of the test rows in order: column `sample_id` if there is one, else the row number.

    Raises:
        PreflightError: ids that are not unique integers.
    """
    table = pq.read_table(path)
    if "sample_id" not in table.column_names:
        return list(range(table.num_rows))
    ids = table.column("sample_id").to_pylist()
    wrong = next((value for value in ids if isinstance(value, bool) or not isinstance(value, int)), None)
    if wrong is not None or len(set(ids)) != len(ids):
        seen = f"value {wrong!r}" if wrong is not None else "a repeated id"
        raise PreflightError(f"{path}: sample_id must hold unique integers, found {seen}")
    return [int(value) for value in ids]


def _read_table(path: Path) -> tuple[pa.Table | None, str]:
    if not path.is_file():
        return None, f"{path} does not exist; restore it"
    try:
        return pq.read_table(path), ""
    except (pa.ArrowException, OSError, ValueError) as error:
        return None, f"{path} is not a readable parquet file ({_first_line(error)}); write it again"


def _check_overlay(workspace: Workspace) -> CheckResult:
    try:
        if install.is_installed(workspace.core_algos):
            return CheckResult("overlay", "installed by an earlier run")
        install.require_supported(workspace.core_algos)
    except install.OverlayError as error:
        return CheckResult("overlay", "refused", str(error))
    return CheckResult("overlay", "can be installed")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# ---- proof of what changed --------------------------------------------------------------------------------------------


def read_manifest(workspace: Workspace) -> dict[str, str]:
    """Relative path → SHA-256 of every file below task/ and data/; very large files by size and modification time."""
    folders = (workspace.root / "task", workspace.root / "data")
    return {str(path.relative_to(workspace.root)): _digest(path) for folder in folders for path in _files(folder)}


def _files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        yield from (Path(folder) / name for name in names)


def _digest(path: Path) -> str:
    try:
        stat = path.stat()
    except OSError as error:  # a dangling link
        return f"unreadable: {error.strerror}"
    if stat.st_size > _LARGE_FILE_BYTES:
        return f"size {stat.st_size}, modified {stat.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def changed_files(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Paths whose content differs, that were added or that are gone, sorted."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def forbidden_changes(workspace: Workspace, changed: list[str], generated: list[str]) -> list[str]:
    """Changes that the task's rules do not allow.

    Allowed are core_algos.py, data/outputs/, generated scripts and the folder into which train.sh itself saves.
    """
    saves = workspace.full_run_checkpoints(Path("/"))
    if saves.is_relative_to(workspace.root):
        inside = str(saves.relative_to(workspace.root)) + "/"
        changed = [path for path in changed if not path.startswith(inside)]
    allowed = {str(workspace.core_algos.relative_to(workspace.root)), *generated}
    outputs = str(workspace.outputs.relative_to(workspace.root)) + "/"
    return [path for path in changed if path not in allowed and not path.startswith(outputs)]
