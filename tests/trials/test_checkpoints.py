"""Which checkpoints are complete."""

import zipfile
from pathlib import Path

import pytest

from trials.checkpoints import (
    TRACKER,
    bring_back,
    complete_steps,
    delete_checkpoints,
    delete_over_limit,
    describe_data_place,
    folder_bytes,
    list_problems,
    read_checkpoints,
    read_tracker,
    read_world_size,
    repair_tracker,
    set_back,
)


def make(folder: Path, step: int, world_size: int = 2) -> Path:
    path = folder / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    kinds = [(kind, rank) for kind in ("model", "optim", "extra_state") for rank in range(world_size)]
    files = [path / "actor" / f"{kind}_world_size_{world_size}_rank_{rank}.pt" for kind, rank in kinds]
    for file in [*files, path / "data.pt"]:
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
        (lambda path: (path / "actor" / "model_world_size_2_rank_1.pt").unlink(), "model shard of rank 1 is missing"),
        (lambda path: (path / "actor" / "optim_world_size_2_rank_1.pt").unlink(), "optim shard of rank 1 is missing"),
        (lambda path: (path / "actor" / "extra_state_world_size_2_rank_0.pt").unlink(), "extra_state shard of rank 0"),
        (lambda path: (path / "actor" / "extra_state_world_size_2_rank_0.pt").write_bytes(b""), "is empty"),
        (lambda path: (path / "data.pt").unlink(), "data.pt is missing: the save did not finish"),
        (lambda path: (path / "actor" / "fsdp_config.json").write_text('{"world_size": 8}'), "tells of 8 ranks"),
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


@pytest.mark.parametrize("tracker", ["", "60", "forty", None, "40\n", " 40 ", "-1", "\x00"])
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


def test_unfinished_checkpoints_of_an_ended_training_go_too(folder: Path) -> None:
    make(folder, 60)
    assert delete_checkpoints(folder, keep=[20]) == [40, 60]
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_20", TRACKER]


def test_a_checkpoint_without_optimizer_is_whole_where_none_was_saved(folder: Path) -> None:
    for file in (folder / "global_step_40" / "actor").glob("[oe]*.pt"):  # save_contents=[model]
        file.unlink()
    assert complete_steps(folder) == [20, 40]
    assert read_world_size(folder / "global_step_40" / "actor") == 2
    assert read_world_size(folder) is None


def test_an_unreadable_fsdp_config_is_no_reason_to_lose_a_checkpoint(folder: Path) -> None:
    (folder / "global_step_40" / "actor" / "fsdp_config.json").write_text("{")
    assert complete_steps(folder) == [20, 40]


def test_folders_with_other_names_and_a_trailing_slash(folder: Path) -> None:
    (folder / "global_step_x").mkdir()
    (folder / "global_step_50").write_text("a file")
    (folder / "global_step_40_backup").mkdir()
    assert complete_steps(Path(f"{folder}/")) == [20, 40]
    assert complete_steps(folder / "global_step_40") == []
    assert repair_tracker(folder) == 40
    assert (folder / "global_step_x").exists() and (folder / "global_step_50").exists()


def test_a_resume_that_makes_no_step_goes_one_checkpoint_back(folder: Path) -> None:
    make(folder, 60)
    (folder / TRACKER).write_text("60")
    assert set_back(folder, before=60) == 40
    assert read_tracker(folder) == 40 and complete_steps(folder) == [20, 40]  # what verl sees
    bring_back(folder)  # the retry failed before it saved anything
    assert read_tracker(folder) == 60 and complete_steps(folder) == [20, 40, 60]
    assert set_back(folder, before=40) == 20 and complete_steps(folder) == [20]  # … and that made no step, either
    bring_back(folder)
    assert read_tracker(folder) == 60 and complete_steps(folder) == [20, 40, 60]


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_was_put_aside_comes_back_unless_it_was_saved_again(folder: Path, is_whole: bool) -> None:
    (folder / "global_step_40" / "mark").write_text("first")
    assert set_back(folder, before=40) == 20
    again = make(folder, 40)
    if is_whole:
        (folder / TRACKER).write_text("40")
    else:
        (again / "actor" / "model_world_size_2_rank_1.pt").unlink()
    bring_back(folder)
    assert complete_steps(folder) == [20, 40] and read_tracker(folder) == 40
    assert (folder / "global_step_40" / "mark").exists() is not is_whole
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_20", "global_step_40", TRACKER]


def test_going_back_from_the_only_checkpoint_begins_anew(tmp_path: Path) -> None:
    make(tmp_path, 20)
    (tmp_path / TRACKER).write_text("20")
    assert set_back(tmp_path, before=20) is None
    assert not (tmp_path / TRACKER).exists() and complete_steps(tmp_path) == []
    bring_back(tmp_path)
    assert complete_steps(tmp_path) == [20] and read_tracker(tmp_path) == 20


def test_what_cannot_be_used_is_told_before_it_is_removed(folder: Path) -> None:
    (folder / "global_step_40" / "data.pt").unlink()
    assert list_problems(folder) == ["step 40 cannot be used: data.pt is missing: the save did not finish"]
    assert repair_tracker(folder) == 20 and list_problems(folder) == []


@pytest.mark.parametrize(
    ("step", "per_epoch", "given", "words"),
    [
        (10, 8, 2, "epoch 2 after 2 of 8 batches; by data.pt, 2 batches were given"),
        (16, 8, 8, "epoch 3 after 0 of 8 batches; by data.pt, 8 batches were given"),  # its iterator is used up
        (16, 8, 0, "epoch 3 after 0 of 8 batches; by data.pt, 0 batches were given"),
        (
            10,
            8,
            0,
            "epoch 2 after 2 of 8 batches; but by data.pt, 0 batches were given: questions are repeated or left out",
        ),
        (10, 8, None, "epoch 2 after 2 of 8 batches; data.pt does not tell its place"),
        (10, None, 3, "steps per epoch unknown; by data.pt, 3 batches were given"),
    ],
)
def test_the_place_in_the_data_is_told(step: int, per_epoch: int | None, given: int | None, words: str) -> None:
    assert describe_data_place(step, per_epoch, given) == words


def test_disk_is_kept_under_a_limit_by_losers_alone(folder: Path) -> None:
    make(folder, 60)
    (folder / TRACKER).write_text("60")
    make(folder, 80)  # being saved
    one = folder_bytes(folder / "global_step_20")
    assert delete_over_limit(folder, [40, 20], 10 * one) == []
    assert delete_over_limit(folder, [40, 20], 3 * one + 10) == [40]
    assert delete_over_limit(folder, [60, 80], 0) == []  # the newest complete one and the unfinished one stay
    assert complete_steps(folder) == [20, 60] and (folder / "global_step_80").exists()
    assert delete_over_limit(folder, [20], 0) == [20] and complete_steps(folder) == [60]


def test_a_removal_that_was_cut_short_leaves_no_checkpoint(folder: Path) -> None:
    (folder / "deleted_global_step_20").mkdir()
    (folder / "deleted_global_step_20" / "rest").write_text("x")
    assert delete_checkpoints(folder, keep=[40]) == [20]
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_40", TRACKER]
