"""verl's checkpoint folders: which are complete, which to keep.

verl writes, in this order: `<folder>/global_step_<N>/actor/{model,optim,extra_state}_world_size_<W>_rank_<R>.pt` of every
rank, the configuration for the merger (`huggingface/`; from 0.4.1 `fsdp_config.json`), `global_step_<N>/data.pt`, and then,
in place, `<folder>/latest_checkpointed_iteration.txt`. After a kill the tracker can be empty or name a missing or
half-written folder. A checkpoint is complete when its step is not newer than the tracker, every kind of file that was
saved is there for every rank, non-empty and a readable archive, and data.pt, the last file, is there, too.
"""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
_STEP_FOLDER = re.compile(r"^global_step_(\d+)$")
_RANK_FILE = re.compile(r"^(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt$")
_ASIDE, _DELETED = "aside_", "deleted_"
"""Prefixes of step folders that verl must not see, and of those that are being removed."""


@dataclass(frozen=True)
class Checkpoint:
    """One `global_step_<N>` folder."""

    step: int
    path: Path
    problem: str | None
    """Why it cannot be used; None when it is complete."""

    @property
    def actor(self) -> Path:
        """The folder with the policy's shards."""
        return self.path / "actor"


def read_tracker(folder: Path) -> int | None:
    """The step in verl's tracker file; None when it is missing, empty or not a number."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None


def read_checkpoints(folder: Path) -> list[Checkpoint]:
    """All checkpoints of a folder by step, complete or not; [] when there is no such folder."""
    if not folder.is_dir():
        return []
    tracked = read_tracker(folder)
    found = []
    for entry in folder.iterdir():
        match = _STEP_FOLDER.match(entry.name)
        if match and entry.is_dir():
            step = int(match[1])
            if tracked is not None and step > tracked:
                problem: str | None = f"newer than the tracker ({tracked}): the save did not finish"
            else:
                problem = find_problem(entry)
            found.append(Checkpoint(step, entry, problem))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def find_problem(path: Path) -> str | None:
    """Why a checkpoint's files cannot be used, None when all that its save writes is there and readable."""
    ranks: dict[str, set[int]] = {}
    sizes: set[int] = set()
    for file in (path / "actor").glob("*.pt"):
        if match := _RANK_FILE.match(file.name):
            ranks.setdefault(match[1], set()).add(int(match[3]))
            sizes.add(int(match[2]))
    if "model" not in ranks:
        return "no model shards in actor/"
    if len(sizes) > 1:
        return f"shards of several world sizes {sorted(sizes)}"
    size = sizes.pop()
    for kind, found in sorted(ranks.items()):
        if missing := set(range(size)) - found:
            return f"{kind} shard of rank {min(missing)} is missing"
    if not (path / "data.pt").is_file():
        return "data.pt is missing: the save did not finish"
    for file in [*sorted((path / "actor").glob("*.pt")), path / "data.pt"]:
        if not zipfile.is_zipfile(file):
            return f"{file.name} is {_kind_of_damage(file)}"
    recorded = recorded_world_size(path / "actor")
    if recorded is not None and recorded != size:
        return f"fsdp_config.json tells of {recorded} ranks, the shards of {size}"
    return None


def _kind_of_damage(file: Path) -> str:
    try:
        return "cut off" if file.stat().st_size else "empty"
    except FileNotFoundError:
        return "gone: verl is deleting this checkpoint"


def read_world_size(actor: Path) -> int | None:
    """Over how many ranks a policy is sharded, from the names of its files; None without shards."""
    matches = (_RANK_FILE.match(file.name) for file in sorted(actor.glob("model_*.pt")))
    return next((int(match[2]) for match in matches if match), None)


def recorded_world_size(actor: Path) -> int | None:
    """What fsdp_config.json says; None when it is missing or not readable."""
    try:
        size = json.loads((actor / "fsdp_config.json").read_text(encoding="utf-8"))["world_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if isinstance(size, int) else None


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    return [checkpoint.step for checkpoint in read_checkpoints(folder) if checkpoint.problem is None]


def repair_tracker(folder: Path) -> int | None:
    """Make verl's own resume safe: drop unfinished saves and let the tracker name the newest complete checkpoint.

    Returns that step, or None when there is none: then nothing is left that verl could resume from.
    """
    checkpoints = read_checkpoints(folder)
    for checkpoint in checkpoints:
        if checkpoint.problem is not None:
            remove_folder(checkpoint.path)
    steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.problem is None]
    _point_tracker(folder, steps[-1] if steps else None)
    return steps[-1] if steps else None


def list_problems(folder: Path) -> list[str]:
    """Which checkpoints cannot be used, and why."""
    return [f"step {each.step} cannot be used: {each.problem}" for each in read_checkpoints(folder) if each.problem]


def describe_data_place(step: int, steps_per_epoch: int | None, given: int | None) -> str:
    """Where in the training data a trainer goes on from the checkpoint of a step.

    Args:
        step: of the checkpoint.
        steps_per_epoch: None when unknown.
        given: batches of the current epoch that its data.pt says were given; None when it does not tell.
    """
    told = "data.pt does not tell its place" if given is None else f"by data.pt, {given} batches were given"
    if not steps_per_epoch:
        return f"steps per epoch unknown; {told}"
    epoch, batch = divmod(step, steps_per_epoch)
    place = f"epoch {epoch + 1} after {batch} of {steps_per_epoch} batches"
    if given is None or given % steps_per_epoch == batch:
        return f"{place}; {told}"
    return f"{place}; but {told}: questions are repeated or left out"


def set_back(folder: Path, before: int) -> int | None:
    """Let verl resume from the newest complete checkpoint before a step; later ones are put aside, `bring_back` undoes it.

    verl 0.7.1, for one, finds its data used up when it resumes exactly at the end of an epoch: it makes no step and
    reports success. Returns the step to resume from, or None when verl will begin anew.
    """
    complete = complete_steps(folder)
    for step in complete:
        if step >= before:
            (folder / f"global_step_{step}").rename(folder / f"{_ASIDE}global_step_{step}")
    earlier = [step for step in complete if step < before]
    _point_tracker(folder, earlier[-1] if earlier else None)
    return earlier[-1] if earlier else None


def bring_back(folder: Path) -> None:
    """Bring back what `set_back` put aside, unless verl has saved that step again meanwhile."""
    for aside in sorted(folder.glob(f"{_ASIDE}global_step_*")):
        original = folder / aside.name.removeprefix(_ASIDE)
        step = int(original.name.removeprefix("global_step_"))
        if step in complete_steps(folder):
            remove_folder(aside)
            continue
        if original.exists():
            remove_folder(original)
        aside.rename(original)
        if step > (read_tracker(folder) or 0):
            _point_tracker(folder, step)


def _point_tracker(folder: Path, step: int | None) -> None:
    """Let verl's tracker name a step; None removes it."""
    if step is None:
        (folder / TRACKER).unlink(missing_ok=True)
    elif read_tracker(folder) != step:
        temporary = folder / f"{TRACKER}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(str(step))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / TRACKER)


def delete_checkpoints(folder: Path, *, keep: Collection[int]) -> list[int]:
    """Delete all checkpoints of an ended training that are not to be kept, unfinished ones, too; returns their steps."""
    deleted = [checkpoint for checkpoint in read_checkpoints(folder) if checkpoint.step not in keep]
    for checkpoint in deleted:
        remove_folder(checkpoint.path)
    return [checkpoint.step for checkpoint in deleted]


def delete_over_limit(folder: Path, losers: Sequence[int], limit_bytes: float) -> list[int]:
    """Delete checkpoints of a running training until its folder is within a limit; returns their steps.

    Args:
        folder: the folder of step folders.
        losers: steps that cannot win any more, those to go first in front. Unfinished checkpoints and the newest complete
            one, from which verl would resume, stay in any case.
        limit_bytes: what the folder may hold.
    """
    deletable = complete_steps(folder)[:-1]
    deleted: list[int] = []
    for step in losers:
        if folder_bytes(folder) <= limit_bytes:
            break
        if step in deletable:
            remove_folder(folder / f"global_step_{step}")
            deleted.append(step)
    return deleted


def folder_bytes(folder: Path) -> int:
    """Sum of the sizes of all files below a folder; files that vanish meanwhile do not count."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


def remove_folder(path: Path) -> None:
    """Remove a folder. Renamed first: a removal that is cut short must not leave what looks like a whole checkpoint."""
    doomed = path.with_name(_DELETED + path.name)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)
