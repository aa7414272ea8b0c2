"""A checkpoint's shards → a Hugging Face model, by whichever merger the verl checkout has, its result checked.

    form                                   arguments
    scripts/model_merger.py (a script)     --local_dir, and of --backend, --hf_model_path, --target_dir those it knows
    python -m verl.model_merger (0.4.1 …)  merge --backend fsdp --local_dir --target_dir
    scripts/legacy_model_merger.py         merge --backend fsdp --local_dir --target_dir

The merger works on a view of the checkpoint in the run's folder: links to the shards, copies of the small files, and what
the checkpoint lacks (older versions write no fsdp_config.json). So the checkpoint itself is never written to.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent.errors import AgentError, StageError
from agent.tensors import find_model_problem
from trials.checkpoints import read_world_size, recorded_world_size

_LIMIT_S = 3600.0
_OPTION = re.compile(r"""["'](--[\w-]+)["']""")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt")


class Runner(Protocol):
    """`agent.submission.run_logged` with run and environment filled in."""

    def __call__(
        self, command: list[str], *, what: str, log: Path, cwd: Path, timeout_s: float, environment: dict[str, str]
    ) -> None: ...


@dataclass(frozen=True)
class Merger:
    """How a verl checkout merges FSDP shards."""

    program: tuple[str, ...]
    """The command without arguments."""
    has_verbs: bool
    """Whether it wants the verb `merge` first."""
    options: frozenset[str]
    """The options it knows."""

    def command(self, shards: Path, target: Path) -> list[str]:
        """Arguments for shards in `shards` (with their configuration in `shards/huggingface`) and a model in `target`."""
        values = {
            "--backend": "fsdp",
            "--local_dir": str(shards),
            "--hf_model_path": str(shards / "huggingface"),
            "--target_dir": str(target),
        }
        known = [(option, value) for option, value in values.items() if option in self.options]
        return [*self.program, *(["merge"] if self.has_verbs else []), *(word for pair in known for word in pair)]


_VERB_OPTIONS = frozenset({"--backend", "--local_dir", "--target_dir"})


def find_merger(verl: Path) -> Merger | None:
    """The merger of a verl checkout, None when it has none. A script in the task's own place comes first."""
    script, legacy = verl / "scripts" / "model_merger.py", verl / "scripts" / "legacy_model_merger.py"
    if script.is_file():
        return _read_script(script)
    if (verl / "verl" / "model_merger" / "__main__.py").is_file():
        return Merger(("python3", "-m", "verl.model_merger"), True, _VERB_OPTIONS)
    return _read_script(legacy) if legacy.is_file() else None


def _read_script(path: Path) -> Merger:
    text = path.read_text(errors="replace", encoding="utf-8")
    program = ("python3", str(path))
    if "add_subparsers" in text or ("verl.model_merger" in text and "--local_dir" not in text):
        return Merger(program, True, _VERB_OPTIONS)  # the options of later versions, or a script that passes them on
    return Merger(program, False, frozenset({*_OPTION.findall(text), "--local_dir"}))


def merge_checkpoint(verl: Path, base: Path, actor: Path, target: Path, *, log: Path, run: Runner) -> None:
    """Turn a checkpoint's shards into a Hugging Face model at `target`.

    Args:
        verl: the verl checkout.
        base: the model that training started from.
        actor: the checkpoint's `actor` folder; not written to.
        target: where the model appears, whole or not at all.
        log: output of the merger.
        run: runs a command.

    Raises:
        StageError: there is no merger, it failed, or its result cannot be used.
    """
    merger = find_merger(verl)
    if merger is None:
        raise StageError(
            f"{verl} has no merger: neither scripts/model_merger.py nor verl/model_merger/ exists; restore one, then resume"
        )
    view, staging = working_folders(target)
    for folder in (view, staging):
        shutil.rmtree(folder, ignore_errors=True)
    _build_view(actor, base, view)
    command = merger.command(view, staging)
    try:
        run(command, what="the merge", log=log, cwd=verl, timeout_s=_LIMIT_S, environment=merge_environment(verl))
    except AgentError:
        for folder in (view, staging):  # half a model is of no use, and may be what fills the disk
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if "--target_dir" not in merger.options:
        (view / "huggingface").rename(staging)  # older scripts write beside the shards' configuration
    problem = find_model_problem(staging, base)
    if problem:
        raise StageError(f"the merged model at {staging} cannot be used: {problem}; see {log}")
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    shutil.rmtree(view)


def working_folders(target: Path) -> tuple[Path, Path]:
    """Beside the model to come: the view of the checkpoint, and the result until it has been checked."""
    return target.with_name(f"{target.name}.shards"), target.with_name(f"{target.name}.partial")


def merge_environment(verl: Path) -> dict[str, str]:
    """What a merger gets beside the environment of every program."""
    return {"PYTHONPATH": str(verl), "HF_HUB_OFFLINE": "1"}


def _build_view(actor: Path, base: Path, view: Path) -> None:
    """A folder that a merger of any version understands."""
    view.mkdir(parents=True)
    for shard in actor.glob("model_world_size_*_rank_*.pt"):
        (view / shard.name).symlink_to(shard.resolve())
    for file in actor.glob("*.json"):
        shutil.copy(file, view)
    if recorded_world_size(actor) is None:
        (view / "fsdp_config.json").write_text(json.dumps({"world_size": read_world_size(actor)}), encoding="utf-8")
    own = actor / "huggingface"
    for source in (base, own):  # what the checkpoint has wins over the base model's
        if source.is_dir():
            shutil.copytree(source, view / "huggingface", ignore=shutil.ignore_patterns(*_WEIGHTS), dirs_exist_ok=True)
