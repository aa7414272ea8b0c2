"""What a person sees in the terminal, live and plain."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from agent.ledger import Event, Ledger, fold
from agent.report import read_curves
from agent.view import View, describe_event, render_status, sparkline
from trials.metrics import StepMetrics


def build_events(ledger: Ledger) -> list[Event]:
    """A run in the middle of its search."""
    events = [
        ledger.append("run_opened", workspace="/data/workspace", total_steps=32, rungs=[4, 8, 16]),
        ledger.append("driver_started", pid=1),
        ledger.append("workspace_checked", checks=[{"name": "model", "found": "x", "problem": None}]),
        ledger.append("stage_started", stage="baseline"),
        start(ledger, "baseline", "baseline", {}),
        score(ledger, "baseline", 16, 0.5, 0.0612),
        end(ledger, "baseline", "completed"),
        ledger.append("stage_done", stage="baseline", seconds=75.0, initial_entropy=0.62),
        ledger.append("decision", what="budget", chosen="search for at most 3600 s", reason="3 s per step"),
        ledger.append("stage_started", stage="search"),
        start(ledger, "t001", "preset:stare", {"token_rule": "stare"}),
        score(ledger, "t001", 4, 0.4, 0.61),
        start(ledger, "t002", "optuna", {"clip_high": 0.312345}),
        end(ledger, "t002", "failed", "bad_configuration", "line one\nline [red]two\x1b[31m"),
    ]
    return events


def start(ledger: Ledger, trial: str, origin: str, configuration: dict[str, Any]) -> Event:
    kind = "baseline" if trial == "baseline" else "search"
    return ledger.append("trial_started", trial=trial, kind=kind, origin=origin, configuration=configuration, attempt=1)


def score(ledger: Ledger, trial: str, step: int, accuracy: float, entropy: float) -> Event:
    return ledger.append(
        "trial_scored", trial=trial, step=step, objective=accuracy / 2, accuracy=accuracy, entropy=entropy
    )


def end(ledger: Ledger, trial: str, outcome: str, failure: str | None = None, reason: str = "") -> Event:
    return ledger.append("trial_ended", trial=trial, outcome=outcome, failure=failure, reason=reason, seconds=70.0)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    build_events(Ledger(tmp_path / "ledger.jsonl"))
    folder = tmp_path / "trials" / "t001"
    folder.mkdir(parents=True)
    lines = [json.dumps(StepMetrics(step, {"actor/entropy": 0.62 - 0.05 * step}).to_record()) for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return tmp_path


def text_of(renderable: RenderableType, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    environment = {"TERM": "xterm-256color"}
    return Console(file=file, force_terminal=True, width=120, height=40, _environ=environment), file


def test_plain_mode_prints_one_line_with_the_time_per_event(tmp_path: Path) -> None:
    file = io.StringIO()
    events = build_events(Ledger(tmp_path / "ledger.jsonl"))
    with View(tmp_path, Console(file=file)) as view:
        for event in events:
            view.event(event)
        view.event({"event": "of a newer agent", "time": 0.0})
    lines = file.getvalue().splitlines()
    assert len(lines) == len(events) - 1  # driver_started is of no interest
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in lines)
    texts = [line[9:] for line in lines]
    assert texts[0] == "run opened: /data/workspace, 32 steps, rungs 4, 8, 16"
    assert texts[1] == "workspace checked: 1 checks, no problem"
    assert "baseline step 16: accuracy 0.500, entropy 0.0612 nats/token, objective 0.2500" in texts
    assert "t001 started (preset:stare): token_rule=stare" in texts
    assert texts[-1] == "t002 failed (bad_configuration) after 1 min 10 s – line one line [red]two"


def test_plain_mode_shows_what_it_cannot_encode_as_question_marks(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with View(tmp_path, Console(file=io.TextIOWrapper(raw, encoding="ascii"))) as view:
        view.event({"event": "decision", "time": 0.0, "what": "budget", "chosen": "×", "reason": "é"})
        assert b"decision budget: ? ? ?" in raw.getvalue()


def test_plain_mode_does_not_hide_errors(tmp_path: Path) -> None:
    file = io.StringIO()
    file.close()
    with pytest.raises(ValueError), View(tmp_path, Console(file=file, force_terminal=False)) as view:
        view.event({"event": "interrupted", "time": 0.0})


@pytest.mark.parametrize("event", ["interrupted", "published", "run_finished", "stage_done", "overlay_installed"])
def test_an_event_without_facts_is_a_line(event: str) -> None:
    assert describe_event({"event": event, "time": 0.0})


@pytest.mark.parametrize(("alive", "word"), [(True, "running"), (False, "interrupted")])
def test_a_trial_without_an_outcome_runs_or_was_interrupted(run_folder: Path, alive: bool, word: str) -> None:
    state = fold(Ledger(run_folder / "ledger.jsonl").read())
    text = text_of(render_status(state, alive=alive))
    row = next(line for line in text.splitlines() if line.startswith("t001"))
    assert word in row and "0.400" in row and "0.2000" in row
    assert ("resume" in text) == (not alive)
    assert "failed: bad_configuration" in text and "2 of 3 trials ended" in text


def test_status_draws_the_entropy_of_the_metrics_file(run_folder: Path) -> None:
    state = fold(Ledger(run_folder / "ledger.jsonl").read())
    text = text_of(render_status(state, alive=True, curves=read_curves(run_folder, state.trials)))
    row = next(line for line in text.splitlines() if line.startswith("t001"))
    assert " 5 " in row and "0.3700" in row and sparkline([0.57, 0.52, 0.47, 0.42, 0.37], 0.62) in row


def test_status_of_an_empty_and_of_a_long_run(tmp_path: Path) -> None:
    assert "not started" in text_of(render_status(fold([]), alive=False))
    ledger = Ledger(tmp_path / "ledger.jsonl")
    build_events(ledger)
    for number in range(3, 40):
        start(ledger, f"t{number:03d}", "optuna", {})
        end(ledger, f"t{number:03d}", "completed")
    text = text_of(render_status(fold(ledger.read()), alive=True, rows=8))
    assert "… and 32 more trials" in text
    assert "t001" in text and "baseline" in text and "t039" in text


def test_sparkline_spans_zero_to_the_reference() -> None:
    assert sparkline([]) == "" == sparkline([float("nan")])
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.5], reference=1.0) == "▅"
    assert len(sparkline([0.1] * 500)) == 12
    assert sparkline([0.0, 0.0]) == "▁▁"


def test_live_view_shows_the_table_and_the_messages(run_folder: Path) -> None:
    console, file = terminal()
    with View(run_folder, console) as view:
        for event in Ledger(run_folder / "ledger.jsonl").read():
            view.event(event)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "preset:stare" in text and "stage search" in text
    assert "line one line [red]two" in text


def test_live_view_survives_a_failing_draw_and_draws_again(run_folder: Path, monkeypatch: Any) -> None:
    console, file = terminal()
    monkeypatch.setattr("agent.view._DRAW_EVERY_S", 0.01)
    ledger = run_folder / "ledger.jsonl"
    kept = ledger.read_bytes()
    ledger.write_text('{"damaged\n{"event": "driver_started"}\n')
    with View(run_folder, console) as view:
        time.sleep(0.1)
        view.event({"event": "stage_started", "stage": "search", "time": 0.0})
        ledger.write_bytes(kept)
        deadline = time.monotonic() + 10
        while "t001" not in file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "t001" in file.getvalue()


def test_live_view_of_a_run_that_fails_ends_with_interrupted_trials(run_folder: Path) -> None:
    console, file = terminal()
    with pytest.raises(RuntimeError), View(run_folder, console):
        raise RuntimeError("a stage failed")
    assert "interrupted" in file.getvalue()
