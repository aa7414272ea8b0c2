"""The workspace: every path of the task, and proof that only the allowed files changed."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq
import yaml

from agent.errors import PreflightError
from search_spaces.plain_files import require_file
from trials.script import ScriptError, TrainScript

_Value = TypeVar("_Value")
_LARGE_FILE_BYTES = 64 * 2**20


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
    def verl_version(self) -> str:
        """As the checkout tells it, empty when it does not."""
        return read_text(self.verl / "verl" / "version" / "version").strip()

    @property
    def core_algos(self) -> Path:
        """The only file of verl that may change."""
        return self.verl / "verl" / "trainer" / "ppo" / "core_algos.py"

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
            return TrainScript(require_file(self.train_script).read_bytes().decode(), self.scripts)
        except OSError as error:
            raise PreflightError(f"{self.train_script}: {error.strerror}") from None
        except (ScriptError, UnicodeDecodeError, RecursionError, MemoryError) as error:
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

    def data_files(self, key: str, fallback: str) -> tuple[Path, ...]:
        """The parquet files that a `data.*_files` setting names, else the files of that name in data/datasets."""
        try:
            value = self.setting(key)
        except PreflightError:
            value = None
        if value:
            return tuple(Path(name) for name in _listed_names(value))
        return tuple(sorted(self.datasets.glob(f"*/{fallback}"))) or (self.datasets / fallback,)

    @property
    def train_files(self) -> tuple[Path, ...]:
        return self.data_files("data.train_files", "train.parquet")

    @property
    def dev_files(self) -> tuple[Path, ...]:
        return self.data_files("data.val_files", "dev.parquet")

    @cached_property
    def test_candidates(self) -> tuple[Path, ...]:
        """Where the test questions may be, the likeliest first.

        Parquet files whose `<folder>/<file>` the inference scripts name; else `test.parquet` beside a dev file, then any
        other in data/datasets. Never a file that trains or judges.
        """
        used = {*self.train_files, *self.dev_files}
        files = [path for path in sorted(self.datasets.glob("*/*.parquet")) if path not in used]
        texts = [read_text(path) for path in (self.inference_script, self.scripts / "inference.py")]
        named = [path for path in files if any(f"{path.parent.name}/{path.name}" in text for text in texts)]
        beside = [path for path in (file.with_name("test.parquet") for file in self.dev_files) if path not in used]
        others = [path for path in files if path.name == "test.parquet"]
        there = named or [path for path in (*beside, *others) if path.is_file()]
        return tuple(dict.fromkeys(there)) or tuple(beside) or (self.datasets / "test.parquet",)

    @property
    def test_file(self) -> Path:
        return self.test_candidates[0]

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
        return epochs * self._batches(batch)

    @cached_property
    def steps_per_epoch(self) -> int | None:
        """Steps for which the training data last; None where train.sh does not tell it."""
        batch = self.setting_int("data.train_batch_size")
        is_plain = self.setting("data.gen_batch_size") is None
        is_whole = self.setting("data.filter_overlong_prompts") not in ("True", "true")
        return self._batches(batch) if batch and is_plain and is_whole else None

    def _batches(self, size: int) -> int:
        return sum(int(pq.read_metadata(require_file(file)).num_rows) for file in self.train_files) // size

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
        rows: Counter[str] = Counter()
        for file in self.dev_files:
            rows.update(pq.read_table(require_file(file), columns=["data_source"]).column("data_source").to_pylist())
        return dict(rows)


# ---- reads -----------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """A script's text, empty when it cannot be read."""
    try:
        return require_file(path).read_text(errors="replace", encoding="utf-8")
    except OSError:
        return ""


def _listed_names(value: str) -> list[str]:
    """The names in a Hydra value: one, or a list in brackets."""
    if not value.startswith("["):
        return [value]
    try:
        names = yaml.safe_load(value)
    except yaml.YAMLError:
        return [value]
    return [str(name) for name in names] if isinstance(names, list) and names else [value]


def find_vocabulary(model: Path) -> int | None:
    """The vocabulary size in a model's config.json (also of its text part), None when it names none."""
    try:
        config = json.loads(require_file(model / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return size if isinstance(size, int) else None


def read_sample_ids(path: Path) -> list[int]:
    """The ids of the test rows in order: column `sample_id` if there is one, else the row number.

    Raises:
        PreflightError: ids that are not unique integers.
    """
    table = pq.read_table(require_file(path))
    if "sample_id" not in table.column_names:
        return list(range(table.num_rows))
    ids = table.column("sample_id").to_pylist()
    wrong = next((value for value in ids if isinstance(value, bool) or not isinstance(value, int)), None)
    if wrong is not None or len(set(ids)) != len(ids):
        seen = f"value {wrong!r}" if wrong is not None else "a repeated id"
        raise PreflightError(f"{path}: sample_id must hold unique integers, found {seen}")
    return [int(value) for value in ids]


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
    if stat.st_size > _LARGE_FILE_BYTES or not path.is_file():
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
