"""Which checkpoints are complete."""

import zipfile
from pathlib import Path

import pytest

from trials.checkpoints import (
    TRACKER,
    complete_steps,
    delete_checkpoints,
    read_checkpoints,
    read_tracker,
    repair_tracker,
)


def make(folder: Path, step: int, world_size: int = 2) -> Path:
    path = folder / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    files = [path / "actor" / f"model_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size)]
    for file in [*files, path / "actor" / f"optim_world_size_{world_size}_rank_0.pt", path / "data.pt"]:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("data", "x" * 100)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (20, 40):
        make(tmp_path, step)
    (tmp_path / TRACKER).write_text("40")
    return tmp_path


def test_whole_checkpoints_are_complete(folder: Path) -> None:
    assert complete_steps(folder) == [20, 40]
    assert complete_steps(folder / "nowhere") == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: (path / "actor" / "model_world_size_2_rank_1.pt").unlink(), "rank 1 is missing"),
        (lambda path: (path / "actor" / "model_world_size_2_rank_0.pt").write_bytes(b""), "is empty"),
        (lambda path: (path / "actor" / "optim_world_size_2_rank_0.pt").write_bytes(b"PK\3\4cut"), "cut off"),
        (lambda path: (path / "data.pt").write_bytes(b""), "data.pt is empty"),
        (lambda path: [file.unlink() for file in (path / "actor").iterdir()], "no model shards"),
        (lambda path: (path / "actor" / "model_world_size_4_rank_3.pt").write_bytes(b"x"), "several world sizes"),
    ],
)
def test_damaged_checkpoints_are_not(folder: Path, damage, problem: str) -> None:  # type: ignore[no-untyped-def]
    damage(folder / "global_step_40")
    assert complete_steps(folder) == [20]
    assert problem in (read_checkpoints(folder)[1].problem or "")
    assert repair_tracker(folder) == 20
    assert read_tracker(folder) == 20 and not (folder / "global_step_40").exists()


def test_a_folder_newer_than_the_tracker_is_an_unfinished_save(folder: Path) -> None:
    make(folder, 60)
    assert complete_steps(folder) == [20, 40]
    assert repair_tracker(folder) == 40
    assert not (folder / "global_step_60").exists()


@pytest.mark.parametrize("tracker", ["", "60", "forty", None, "40\n"])
def test_a_tracker_that_lies_is_repaired(folder: Path, tracker: str | None) -> None:
    if tracker is None:
        (folder / TRACKER).unlink()
    else:
        (folder / TRACKER).write_text(tracker)
    assert repair_tracker(folder) == 40
    assert read_tracker(folder) == 40 and complete_steps(folder) == [20, 40]


def test_nothing_complete_leaves_nothing_to_resume_from(tmp_path: Path) -> None:
    (tmp_path / "global_step_5" / "actor").mkdir(parents=True)
    (tmp_path / TRACKER).write_text("5")
    assert repair_tracker(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_not_kept_is_deleted(folder: Path) -> None:
    assert delete_checkpoints(folder, keep=[40]) == [20]
    assert complete_steps(folder) == [40]
