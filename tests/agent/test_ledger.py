"""The ledger: durable, torn tails, fold."""

import json
import os
from pathlib import Path

import pytest

from agent.errors import RunFolderError
from agent.ledger import Ledger, fold


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_events_come_back_in_order_with_non_finite_as_null(ledger: Ledger) -> None:
    ledger.append("a", value=1.5, bad=float("nan"), nested={"x": [float("inf"), 2]}, path=Path("/x"))
    ledger.append("b")
    first, second = ledger.read()
    assert (
        first["value"] == 1.5 and first["bad"] is None and first["nested"] == {"x": [None, 2]} and first["path"] == "/x"
    )
    assert second["event"] == "b"


def test_a_torn_tail_is_skipped_and_closed_before_the_next_event(ledger: Ledger) -> None:
    ledger.append("a")
    with ledger.path.open("ab") as file:
        file.write(b'{"event": "torn", "ti')
    assert [event["event"] for event in ledger.read()] == ["a"]
    ledger.append("b")
    ledger.append("c")
    assert [event["event"] for event in ledger.read()] == ["a", "b", "c"]
    assert all(json.loads(line) for line in ledger.path.read_text().splitlines() if line != '{"event": "torn", "ti')


def test_damage_in_the_middle_is_refused_with_its_line(ledger: Ledger) -> None:
    for event in "abc":
        ledger.append(event)
    lines = ledger.path.read_text().splitlines()
    ledger.path.write_text("\n".join([lines[0], "garbage", lines[2]]) + "\n")
    with pytest.raises(RunFolderError, match="line 2 is damaged"):
        ledger.read()


def test_a_full_disk_leaves_the_ledger_as_it_was() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with pytest.raises(RunFolderError, match="cannot write to /dev/full: No space left"):
        Ledger(full).append("a")


def test_a_failed_append_is_taken_back(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.append("a")
    before = ledger.path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunFolderError, match="No space left"):
        ledger.append("b", text="x" * 1000)
    assert ledger.path.read_bytes() == before


def test_fold_follows_attempts_scores_and_ends(ledger: Ledger) -> None:
    start = {"trial": "t001", "kind": "search", "configuration": {"clip_high": 0.3}, "origin": "optuna"}
    ledger.append("trial_started", attempt=1, **start)
    ledger.append("trial_scored", trial="t001", step=8, objective=0.1, accuracy=0.2, entropy=0.3)
    ledger.append("trial_started", attempt=2, **start)
    ledger.append("trial_scored", trial="t001", step=8, objective=0.2, accuracy=0.2, entropy=0.3)
    ledger.append("trial_scored", trial="t001", step=16, objective=0.15, accuracy=0.2, entropy=0.3)
    running = fold(ledger.read()).trials["t001"]
    assert running.outcome is None and running.attempts == 2
    assert [(score.step, score.objective) for score in running.scores] == [(8, 0.2), (16, 0.15)]
    assert running.best is not None and running.best.step == 8
    assert running.last is not None and running.last.step == 16
    ledger.append("trial_ended", trial="t001", outcome="completed", seconds=12.5)
    ledger.append("stage_done", stage="baseline", initial_entropy=0.4, seconds=1)
    ledger.append("an event of a later version", trial="t009")
    state = fold(ledger.read())
    assert state.trials["t001"].outcome == "completed" and state.training_s == 12.5 and state.initial_entropy == 0.4


@pytest.mark.parametrize(
    "line", ['{"event": "trial_scored", "time": 1, "trial": "t9"}', '{"event": "trial_started", "time": 1}']
)
def test_an_event_that_lacks_facts_is_named(ledger: Ledger, line: str) -> None:
    ledger.append("a")
    with ledger.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunFolderError, match=r"event 2 of the ledger .* is not complete"):
        fold(ledger.read())
