"""verl's checkpoint folders: which are complete, which to keep.

verl writes `<folder>/global_step_<N>/{actor/…,data.pt}` and then, in place, `<folder>/latest_checkpointed_iteration.txt`.
After a kill the tracker can be empty or name a missing or half-written folder. A checkpoint is complete when its step is
not newer than the tracker and every rank's file is there, non-empty and a readable archive.
"""

import os
import re
import shutil
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
_STEP_FOLDER = re.compile(r"^global_step_(\d+)$")
_RANK_FILE = re.compile(r"^model_world_size_(\d+)_rank_(\d+)\.pt$")


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
        text = (folder / TRACKER).read_text().strip()
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
    """Why a checkpoint's files cannot be used, None when all ranks' files are there and readable."""
    ranks: dict[int, int] = {}
    for file in sorted((path / "actor").glob("model_world_size_*_rank_*.pt")):
        match = _RANK_FILE.match(file.name)
        if match:
            ranks[int(match[2])] = int(match[1])
    if not ranks:
        return "no model shards in actor/"
    sizes = set(ranks.values())
    if len(sizes) > 1:
        return f"shards of several world sizes {sorted(sizes)}"
    missing = set(range(sizes.pop())) - ranks.keys()
    if missing:
        return f"shard of rank {min(missing)} is missing"
    for file in [*(path / "actor").glob("*.pt"), *path.glob("data.pt")]:
        if file.stat().st_size == 0:
            return f"{file.name} is empty"
        if not zipfile.is_zipfile(file):
            return f"{file.name} is cut off"
    return None


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
            shutil.rmtree(checkpoint.path)
    steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.problem is None]
    if not steps:
        (folder / TRACKER).unlink(missing_ok=True)
        return None
    if read_tracker(folder) != steps[-1]:
        temporary = folder / f"{TRACKER}.tmp"
        with temporary.open("w") as file:
            file.write(str(steps[-1]))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / TRACKER)
    return steps[-1]


def delete_checkpoints(folder: Path, *, keep: Collection[int]) -> list[int]:
    """Delete all checkpoints that are complete and not to be kept; returns their steps."""
    deleted = []
    for checkpoint in read_checkpoints(folder):
        if checkpoint.problem is None and checkpoint.step not in keep:
            shutil.rmtree(checkpoint.path)
            deleted.append(checkpoint.step)
    return deleted
