"""Small editions of the chaos programs: a few random kills, and one hit in every phase, each of another kind."""

from pathlib import Path

import random_kills
from kill_matrix import ROWS, run_chain

DIAGONAL = {
    "start-up": "Ctrl-C once",
    "step": "SIGTERM",
    "checkpoint": "SIGKILL",
    "validation": "actor kill",
    "merge": "Ctrl-C twice",
    "inference": "OOM kill",
    "publish": "SIGKILL",
}


def test_a_few_random_kills_lose_repeat_and_leave_nothing(tmp_path: Path) -> None:
    assert random_kills.main(kills=6, seed=3, trials=3, folder=tmp_path) == 0


def test_a_run_that_is_hit_in_every_phase_ends_with_a_valid_submission(tmp_path: Path) -> None:
    told = run_chain(tmp_path, "diagonal", [(phase, ROWS[name]) for phase, name in DIAGONAL.items()])
    assert not [f"{phase}: {cell}" for phase, cell in told.items() if cell.startswith("!")], told
    assert told["validation"] == told["inference"] == "goes on" and "exit -9" in told["checkpoint"]
