"""Progress in the terminal: a live table where there is one, else one plain line per event.

The live table is drawn from the run folder by a thread of its own; a failing draw is tried again at the next
tick and never reaches the run. Texts from logs are shown without control characters and never
read as markup.
"""

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent.clock import SystemTime, start_run_clock
from agent.ledger import Event, Ledger, RunState, TrialState, fold
from agent.markup import format_configuration, format_number, format_seconds, format_value
from agent.report import (
    Curves,
    describe_outcome,
    entropy_points,
    last_step,
)
from trials.metrics import StepMetrics
from trials.runner import read_history

SPARK_WIDTH = 12
_BARS = "▁▂▃▄▅▆▇█"
_DRAW_EVERY_S = 0.5
_MESSAGES = 6
_ROWS = 14
_COLUMNS: dict[str, dict[str, Any]] = {
    "trial": {"min_width": 8},
    "origin": {},
    "state": {},
    "step": {"min_width": 4, "justify": "right"},
    "accuracy": {"min_width": 8, "justify": "right"},
    "entropy": {"min_width": 7, "justify": "right"},
    "": {"min_width": 12},
    "objective": {"min_width": 9, "justify": "right"},
}
"""Where the terminal is narrow, the words are folded and not the numbers; entropy is in nats per token."""
_COLOURS = {"completed": "green", "stopped": "yellow", "failed": "red"}
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class View:
    """What a person sees of a run; use it as a context manager around the run.

    Args:
        run_folder: holds ledger.jsonl and trials/.
        console: where to draw; by default standard output.
    """

    def __init__(self, run_folder: Path, console: Console | None = None) -> None:
        self._folder = run_folder
        self._console = console or Console()
        self._live: Live | None = None
        self._messages: deque[str] = deque(maxlen=_MESSAGES)
        self._stage = ""
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._keep_drawing, name="view", daemon=True)
        self._curves: dict[str, tuple[tuple[int, int], list[StepMetrics]]] = {}

    def __enter__(self) -> "View":
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._enough.set()
            self._thread.join()
            self._draw(alive=error is None)
            with suppress(Exception):
                self._live.stop()

    def event(self, record: Event) -> None:
        """Tell of an event of the ledger."""
        if record["event"] in ("stage_started", "stage_done"):
            self._stage = clean(record.get("stage", "")) if record["event"] == "stage_started" else ""
        message = describe_event(record)
        if message is None:
            return
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.get('time')))} {message}"
        if self._live is not None:
            self._messages.append(line)
            return
        file = self._console.file
        encoding = getattr(file, "encoding", None) or sys.getdefaultencoding()
        print(line.encode(encoding, "replace").decode(encoding), file=file, flush=True)

    # ---- live ----------------------------------------------------------------------------------------------

    def _keep_drawing(self) -> None:
        while not self._enough.wait(_DRAW_EVERY_S):
            self._draw()

    def _draw(self, alive: bool = True) -> None:
        with suppress(Exception):
            assert self._live is not None
            self._live.update(self._picture(alive), refresh=True)

    def _picture(self, alive: bool) -> RenderableType:
        state = fold(Ledger(self._folder / "ledger.jsonl").read())
        rows = max(3, min(_ROWS, self._console.height - _MESSAGES - 6))
        curves, stage = self._read_curves(state), self._stage if alive else ""
        status = render_status(state, alive, curves, stage, rows)
        messages = [Text(message, no_wrap=True, overflow="ellipsis", style="dim") for message in list(self._messages)]
        return Group(status, *messages)

    def _read_curves(self, state: RunState) -> Curves:
        """Read the metrics again where the file has changed."""
        for trial in state.trials:
            path = self._folder / "trials" / trial / "metrics.jsonl"
            with suppress(FileNotFoundError):
                stat = path.stat()
                mark = (stat.st_mtime_ns, stat.st_size)
                if trial not in self._curves or self._curves[trial][0] != mark:
                    self._curves[trial] = (mark, read_history(path.parent))
        return {trial: curve for trial, (_, curve) in self._curves.items()}


# ---- status ------------------------------------------------------------------------------------------------


def print_page(console: Console, page: RenderableType) -> None:
    """Print to standard output; rich itself would end silently when nobody reads it."""
    with console.capture() as text:
        console.print(page)
    print(text.get(), end="")


def render_status(
    state: RunState, alive: bool, curves: Curves | None = None, stage: str = "", rows: int | None = None
) -> RenderableType:
    """Header and table of trials.

    Args:
        state: the fold of the ledger.
        alive: whether the driver is alive; a trial without an outcome is running then, else interrupted.
        curves: trial → its steps, for the sparkline and the last step.
        stage: the stage under way; by default what the state tells.
        rows: show at most so many trials; by default all.
    """
    curves = curves or {}
    trials = _shown(state, rows)
    reference = state.initial_entropy
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for name, style in _COLUMNS.items():
        table.add_column(name, no_wrap=name not in ("origin", "state"), overflow="fold", **style)
    for trial in trials:
        table.add_row(*_row(trial, curves.get(trial.trial, []), reference, alive))
    hidden = len(state.trials) - len(trials)
    more = [Text(f"… and {hidden} more trials; all of them are in the report", style="dim")] if hidden else []
    return Group(_header(state, alive, stage), table, *more)


def _shown(state: RunState, rows: int | None) -> list[TrialState]:
    """At most `rows` trials: those without an outcome first, then baseline and full run, then the newest."""
    trials = list(state.trials.values())
    if rows is None or len(trials) <= rows:
        return trials
    order = sorted(trials, key=lambda trial: (trial.outcome is not None, trial.kind == "search", -trial.started_s))
    kept = {trial.trial for trial in order[:rows]}
    return [trial for trial in trials if trial.trial in kept]


def _header(state: RunState, alive: bool, stage: str) -> Text:
    """One line: elapsed time, stage, trials, whether the driver is there."""
    ended = sum(trial.outcome is not None for trial in state.trials.values())
    parts = [format_seconds(_elapsed_s(state, alive)), stage_name(state, alive, stage)]
    parts += [
        f"{ended} of {len(state.trials)} trials ended",
        f"{format_seconds(state.training_s)} of training",
    ]
    if not alive and state.finished is None:
        parts.append("the agent is not running; `python run_agent.py resume` goes on")
    return Text(" · ".join(parts), style="bold")


def stage_name(state: RunState, alive: bool, stage: str = "") -> str:
    """What the run is doing, in words."""
    if state.finished is not None:
        return "finished"
    if stage:
        return f"stage {stage}"
    kinds = {trial.kind for trial in state.trials.values() if trial.outcome is None}
    current = next((kind for kind in ("full", "remeasure", "search", "baseline") if kind in kinds), None)
    if current is not None:
        name = "full_run" if current == "full" else current
        return f"stage {name}" if alive else f"interrupted in stage {name}"
    last = next(reversed(state.stages), None)
    return f"after stage {clean(last)}" if last else "starting" if alive else "not started"


def _elapsed_s(state: RunState, alive: bool) -> float | None:
    """Seconds since the run was opened, up to now or to the newest event."""
    if state.opened is None:
        return None
    if alive and state.finished is None:
        return start_run_clock(state, SystemTime()).elapsed_s()
    return state.elapsed_s


def _row(trial: TrialState, curve: Sequence[StepMetrics], reference: float | None, alive: bool) -> list[Text]:
    score, entropies = trial.last, [value for _, value in entropy_points(curve)]
    entropy = entropies[-1] if entropies else score.entropy if score else None
    outcome = trial.outcome or ("running" if alive else "interrupted")
    state = f"{outcome}: {trial.failure}" if trial.outcome == "failed" and trial.failure else outcome
    cells = [
        trial.trial,
        trial.label,
        state,
        format_value(last_step(trial, curve)),
        format_number(score.accuracy if score else None),
        format_number(entropy, 4),
        sparkline(entropies, reference),
        format_number(score.objective if score else None, 4),
    ]
    texts = [Text(clean(cell)) for cell in cells]
    texts[2].stylize(_COLOURS.get(outcome, "cyan"))
    return texts


def sparkline(values: Sequence[float], reference: float | None = None, width: int = SPARK_WIDTH) -> str:
    """Values over the steps as bars from 0 to the highest value, or to the reference if that is higher."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    count = min(width, len(finite))
    picked = [finite[round(i * (len(finite) - 1) / max(1, count - 1))] for i in range(count)]
    top = max([*finite, reference or 0.0])
    return "".join(_BARS[min(7, max(0, int(value / top * 8)))] if top > 0 else _BARS[0] for value in picked)


# ---- events in words ---------------------------------------------------------------------------------------


def clean(text: Any) -> str:
    """Any text on one line, without control characters."""
    plain = _ANSI.sub("", str(text))
    return " ".join("".join(c if c.isprintable() else " " for c in plain).split())


def describe_event(record: Mapping[str, Any]) -> str | None:
    """One line about an event; None for those that a person does not care about."""
    describe = _DESCRIPTIONS.get(str(record["event"]))
    return clean(describe(record)) if describe else None


def _run_opened(record: Mapping[str, Any]) -> str:
    steps = f"{record.get('total_steps', '?')} steps, rungs {format_value(record.get('rungs'))}"
    return f"run opened: {record.get('workspace', 'workspace')}, {steps}"


def _checked(record: Mapping[str, Any]) -> str:
    checks = record.get("checks") or []
    problems = [f"{check.get('name')}: {check.get('problem')}" for check in checks if check.get("problem")]
    return f"workspace checked: {len(checks)} checks, " + (" | ".join(problems) or "no problem")


def _trial_started(record: Mapping[str, Any]) -> str:
    again = f", attempt {record['attempt']}" if record.get("attempt", 1) != 1 else ""
    configuration = format_configuration(record.get("configuration") or {})
    origin = record.get("origin") or record.get("kind")
    scale = f", proxy on {record.get('gpus')} GPUs" if record.get("is_proxy") else ""
    return f"{record['trial']} started ({origin}{scale}{again}): {configuration}"


def _trial_scored(record: Mapping[str, Any]) -> str:
    accuracy, entropy = format_number(record.get("accuracy")), format_number(record.get("entropy"), 4)
    numbers = f"accuracy {accuracy}, entropy {entropy} nats/token, "
    numbers += f"objective {format_number(record.get('objective'), 4)}"
    return f"{record['trial']} step {record.get('step')}: {numbers}"


def _trial_ended(record: Mapping[str, Any]) -> str:
    trial = TrialState(str(record["trial"]), "", {}, outcome=record.get("outcome"), failure=record.get("failure"))
    reason = f" – {record['reason']}" if record.get("reason") else ""
    return f"{trial.trial} {describe_outcome(trial)} after {format_seconds(record.get('seconds'))}{reason}"


def _slots_planned(record: Mapping[str, Any]) -> str:
    kind = f"proxies of train.sh's {record.get('exact_gpus')} GPUs" if record.get("is_proxy") else "exact trials"
    return f"{record.get('slots')} slots for {kind}: {record.get('found', '')}"


def _decision(record: Mapping[str, Any]) -> str:
    return f"decision {record.get('what')}: {format_value(record.get('chosen'))} – {record.get('reason', '')}"


_DESCRIPTIONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "run_opened": _run_opened,
    "workspace_checked": _checked,
    "overlay_installed": lambda record: "overlay installed in core_algos.py",
    "trial_started": _trial_started,
    "trial_scored": _trial_scored,
    "trial_ended": _trial_ended,
    "attempt_failed": lambda record: f"{record['trial']}: {record.get('reason')}; it is started again",
    "attempt_lost": lambda record: f"{record['trial']}: {record.get('reason')}",
    "slots_planned": _slots_planned,
    "decision": _decision,
    "stage_started": lambda record: f"stage {record.get('stage')} …",
    "stage_done": lambda record: f"stage {record.get('stage')} done in {format_seconds(record.get('seconds'))}",
    "published": lambda record: f"published {format_value(record.get('paths'))}",
    "configuration_changed": lambda record: f"configuration changed: {format_value(record.get('changed'))}",
    "evaluation_counted": lambda record: f"counted as an evaluation: {record.get('trial')} step {record.get('step')}",
    "run_finished": lambda record: f"run finished after {format_seconds(record.get('seconds'))}",
    "interrupted": lambda record: f"interrupted {record.get('reason', '')} – `python run_agent.py resume` goes on",
}
