"""The report page: what it says, that it is well-formed, and that nothing from a file becomes markup."""

import json
import math
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agent.ledger import Event, Ledger, RunState, fold
from agent.objective import EntropyBand, judge
from agent.promotion import choose_promotion
from agent.report import read_curves, render_report, write_report
from trials.metrics import StepMetrics

H0, TOTAL, RUNGS = 0.62, 32, (4, 8, 16)
METHODS: dict[str, tuple[str, dict[str, Any], float, int]] = {
    # trial → origin, configuration, entropy lost per step, last step
    "t001": ("preset:clip_higher", {"clip_high": 0.28}, 0.045, 16),
    "t002": ("preset:stare", {"token_rule": "stare", "stare.step": 0.05}, 0.01, 16),
    "t003": ("preset:positive_damping", {"positive_weight": 0.5}, 0.16, 4),
    "t004": ("optuna", {"clip_high": 0.3312345, "token_rule": "kl_cov", "kl_cov.coef": 1.7}, 0.03, 16),
    "t005": ("optuna", {"clip_low": 0.11}, 0.2, 8),
    "t006": ("optuna", {"clip_high": 0.39, "negative_weight": 0.2}, -0.06, 4),
}
VOID = {"meta"}


class RunBuilder:
    """Writes a run folder as the agent does: ledger events and metrics.jsonl lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(folder / "ledger.jsonl")

    def append(self, event: str, **facts: Any) -> Event:
        return self.ledger.append(event, **facts)

    def state(self) -> RunState:
        return fold(self.ledger.read())

    def opened(self) -> None:
        self.append(
            "run_opened",
            versions={"verl": "0.9.1", "ray": "2.60.0", "python": "3.11.7"},
            config={"objective.collapsed": 0.05, "objective.exploded": 2.5},
            workspace="/data/workspace",
            total_steps=TOTAL,
            rungs=RUNGS,
        )
        self.append("driver_started", pid=4711)
        checks = [{"name": "training data", "found": "640 rows from openai/gsm8k", "problem": None}]
        self.append("workspace_checked", checks=checks)

    def started(self, trial: str, kind: str, origin: str, configuration: dict[str, Any], attempt: int = 1) -> None:
        self.append(
            "trial_started",
            trial=trial,
            kind=kind,
            origin=origin,
            configuration=configuration,
            attempt=attempt,
        )

    def trained(self, trial: str, loss: float, first: int, last: int, gain: float = 0.012, attempt: int = 1) -> None:
        """Metric lines of an attempt and a score at each rung, at every fourth step for the full run."""
        path = self.folder / "trials" / trial / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            for step in range(first, last + 1):
                values: dict[str, float] = {"attempt": attempt, "seconds": 21.5 + 3.25 * (step - first)}
                if step:
                    values |= {"actor/entropy": entropy_at(step, loss), "response_length/clip_ratio": step / 100}
                if step % 4 == 0:
                    values["val-core/openai/gsm8k/acc/mean@1"] = accuracy_at(step, gain)
                file.write(json.dumps(StepMetrics(step, values).to_record(), allow_nan=False) + "\n")
        for step in range(max(first, 1), last + 1):
            if step in RUNGS or (step % 4 == 0 and step > RUNGS[-1]):
                self.scored(trial, step, accuracy_at(step, gain), entropy_at(step, loss))

    def scored(self, trial: str, step: int, accuracy: float | None, entropy: float | None) -> None:
        judged = judge(accuracy, entropy, H0, step / TOTAL, EntropyBand())
        self.append(
            "trial_scored", trial=trial, step=step, accuracy=accuracy, entropy=entropy,
            objective=judged.value, reason=judged.reason, entropy_ratio=judged.entropy_ratio,
            forecast_ratio=judged.forecast_ratio, entropy_score=judged.entropy_score,
        )  # fmt: skip

    def ended(self, trial: str, outcome: str, reason: str = "", failure: str | None = None) -> None:
        self.append("trial_ended", trial=trial, outcome=outcome, failure=failure, reason=reason, seconds=73.4)

    def baseline(self) -> None:
        self.started("baseline", "baseline", "baseline", {})
        self.trained("baseline", 0.14, 0, 16, gain=0.010)
        self.ended("baseline", "completed", "interrupted as planned after step 16")
        self.append("stage_done", stage="baseline", seconds=80.2, initial_entropy=H0, start_up_s=21.5, step_s=3.25)
        self.append(
            "decision",
            what="budget",
            chosen={"search_ends_s": 3600.0},
            reason="21 s start-up, 3.25 s per step",
        )

    def search(self) -> None:
        for number, (trial, (origin, configuration, loss, last)) in enumerate(METHODS.items()):
            self.started(trial, "search", origin, configuration)
            self.trained(trial, loss, 0, last, gain=0.011 + 0.001 * (number % 3))
            asha = last < RUNGS[-1]
            reason = f"ASHA: objective 0.1 at step {last} is below the rung's cutoff" if asha else "as planned"
            self.ended(trial, "stopped" if asha else "completed", reason)
        self.started("t007", "search", "optuna", {"clip_high": 0.25})
        self.ended("t007", "failed", "ended with exit code 1 after step 0 of 16: CUDA out of memory", "out_of_memory")
        self.append("stage_done", stage="search", seconds=612.0)

    def full_run(self) -> None:
        promotion = choose_promotion(self.state().search_trials)
        assert promotion is not None
        self.append("decision", what="promotion", chosen=promotion.trial, reason=promotion.reason)
        configuration = self.state().trials[promotion.trial].configuration
        self.started("full", "full", f"promotion of {promotion.trial}", configuration)
        self.trained("full", 0.01, 0, TOTAL)
        self.ended("full", "completed", "all 32 steps done")
        self.append("stage_done", stage="full", seconds=142.0)

    def submission(self) -> None:
        folder = self.folder / "outputs"
        best = self.state().trials["full"].best
        assert best is not None
        chosen = {
            "step": best.step,
            "objective": best.objective,
            "accuracy": best.accuracy,
            "entropy": best.entropy,
        }
        self.append(
            "decision",
            what="checkpoint",
            chosen=best.step,
            reason=f"step {best.step} has the highest objective",
        )
        self.append("stage_done", stage="select", seconds=0.1, trial="full", reason="highest objective", **chosen)
        sha256 = {"math_results.parquet": "ab" * 32, "math_results_logits.pt": "cd" * 32}
        facts = {
            "samples": 128,
            "mean_entropy": 0.4711,
            "mean_tokens": 37.2,
            "accuracy": 0.5859375,
            "sha256": sha256,
        }
        self.append("stage_done", stage="validate", seconds=4.2, submission=facts)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / name for name in sha256]
        for path in paths:
            path.write_bytes(b"x" * 1500)
        self.append("published", paths=paths, sha256=sha256, trial="full", step=best.step)
        changed = ["task/repositories/verl/verl/trainer/ppo/core_algos.py"]
        self.append("run_finished", changed_files=changed, forbidden_changes=[], seconds=905.0)


def entropy_at(step: int, loss: float) -> float:
    """Nats per token."""
    return min(2.4, H0 * math.exp(-loss * step) + 0.02 * math.sin(1.7 * step) * math.exp(-abs(loss) * step))


def accuracy_at(step: int, gain: float) -> float:
    return 0.31 + gain * step


def build_whole_run(folder: Path) -> RunBuilder:
    run = RunBuilder(folder)
    run.opened()
    run.baseline()
    run.search()
    run.full_run()
    run.submission()
    return run


class Page(HTMLParser):
    """Checks nesting; collects tables (id → rows of texts), curves (chart → trial → path) and all text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.curves: dict[str, dict[str, str]] = {}
        self.text = ""
        self._rows: list[list[str]] = []
        self._chart = ""
        self.feed(page)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        assert not any(name.startswith("on") for name in given)
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "table":
            self._rows = self.tables[given["id"]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "svg":
            self._chart = given.get("id", "")
        elif tag == "path":
            self.curves.setdefault(self._chart, {})[given["data-trial"]] = given["d"]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.stack:
            self.text += data
        if "td" in self.stack or "th" in self.stack:
            self._rows[-1][-1] += data


def render(run: RunBuilder) -> Page:
    state = run.state()
    return Page(render_report(state, read_curves(run.folder, state.trials), "demo"))


@pytest.fixture
def whole(tmp_path: Path) -> RunBuilder:
    return build_whole_run(tmp_path / "demo")


def test_sections_come_in_the_promised_order(whole: RunBuilder) -> None:
    text = render(whole).text
    titles = [
        "Run demo",
        "Why: the decisions",
        "Curves",
        "Leaderboard",
        "Rungs",
        "Time",
        "Checks and proof",
        "Objective,",
    ]
    places = [text.index(title) for title in titles]
    assert places == sorted(places)


def test_headline_tells_method_checkpoint_baseline_and_submission(whole: RunBuilder) -> None:
    page = render(whole)
    score = whole.state().trials["full"].best
    assert score is not None
    header = page.text[: page.text.index("Why: the decisions")]
    assert "full · full run of stare" in page.text and "baseline · baseline, plain GRPO" in page.text
    assert "stare" in header and f"step {score.step}" in header
    assert "valid, published" in header and "0.586" in header
    rows = page.tables["comparison"][1:]
    assert [row[2] for row in rows] == ["32", "16", "16"]  # chosen, the same trial earlier, the baseline
    baseline = whole.state().trials["baseline"].last
    assert baseline is not None
    assert rows[2][3:5] == [f"{baseline.accuracy:.3f}", f"{baseline.entropy:.4f}"]


def test_leaderboard_has_the_numbers_of_the_ledger_in_the_order_of_the_promotion(whole: RunBuilder) -> None:
    state, page = whole.state(), render(whole)
    rows = {row[0].split()[0]: row for row in page.tables["leaderboard"][1:]}
    assert rows.keys() == state.trials.keys()
    for name, trial in state.trials.items():
        score = trial.last
        if score is None:
            assert rows[name][4:10] == ["–"] * 6
            continue
        assert rows[name][3] == str(score.step)
        assert rows[name][4:6] == [f"{score.accuracy:.3f}", f"{score.entropy:.4f}"]
        assert rows[name][6] == f"{score.entropy_ratio:.3f}"
        assert rows[name][9] == f"{score.objective:.4f}"
        assert rows[name][10] == f"{(score.step - 1.5) / 100:.3f}"  # the mean of four steps
    order = [name for name in rows if state.trials[name].kind == "search"]
    promotion = choose_promotion(state.search_trials)
    assert promotion is not None and order[0] == promotion.trial
    assert order[-1] == "t007"
    assert "stopped by ASHA at step 4" in rows["t003"][2]
    assert "failed (out_of_memory): ended with exit code 1" in rows["t007"][2]
    assert "promoted" in rows[promotion.trial][0] and "chosen" in rows["full"][0]


def test_every_curve_has_as_many_points_as_finite_values(whole: RunBuilder) -> None:
    page, state = render(whole), whole.state()
    curves = read_curves(whole.folder, state.trials)
    drawn = page.curves["chart-entropy"]
    assert drawn.keys() == {name for name, curve in curves.items() if curve}
    for name, path in drawn.items():
        finite = [m for m in curves[name] if m.entropy is not None and math.isfinite(m.entropy)]
        assert count_points(path) == len(finite)
    assert count_points(page.curves["chart-accuracy"]["baseline"]) == 5


def count_points(path: str) -> int:
    return path.count("M") + path.count("L")


def test_a_value_that_is_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run")
    run.opened()
    run.started("baseline", "baseline", "baseline", {})
    values = [0.6, math.nan, 0.5, math.inf, 0.4, 0.3]
    curve = [StepMetrics(step, {"actor/entropy": value}) for step, value in enumerate(values, start=1)]
    path = Page(render_report(run.state(), {"baseline": curve}, "demo")).curves["chart-entropy"]["baseline"]
    assert (path.count("M"), path.count("L")) == (3, 1)


def test_rungs_say_who_reached_them_and_who_was_stopped(whole: RunBuilder) -> None:
    rows = {row[0]: row for row in render(whole).tables["rungs"][1:]}
    assert [rows[str(rung)][1] for rung in RUNGS] == ["7", "5", "4"]
    assert rows["4"][3] == "t003, t006" and rows["8"][3] == "t005" and rows["16"][3] == "–"
    objectives = [float(part.split()[1]) for part in rows["16"][2].split(", ")]
    assert objectives == sorted(objectives, reverse=True)


def test_proof_names_files_digests_and_changes(whole: RunBuilder) -> None:
    write_report(whole.folder)
    page = Page((whole.folder / "report.html").read_text())
    assert page.tables["published"][1][2:] == ["1.5 kB", "ab" * 32]
    assert "core_algos.py" in page.text and "not allowed: none" in page.text
    assert "grants 3 evaluations; 0 were counted" in page.text
    assert ["verl", "0.9.1"] in page.tables["versions"]
    assert ["training data", "640 rows from openai/gsm8k", "ok"] in page.tables["checks"]


def test_page_loads_nothing_and_runs_nothing(whole: RunBuilder) -> None:
    path = write_report(whole.folder)
    page = path.read_text()
    assert not {"script", "link", "img", "iframe", "object", "a"} & set(Page(page).tags)
    assert "http://" not in page and "https://" not in page and "url(" not in page
    assert 'name="viewport"' in page and "prefers-color-scheme" in page
    assert [entry.name for entry in whole.folder.glob("*.partial")] == []


@pytest.mark.parametrize("done", range(6))
def test_every_prefix_of_a_run_can_be_reported(tmp_path: Path, done: int) -> None:
    run = RunBuilder(tmp_path / "run")
    stages = [run.opened, run.baseline, run.search, run.full_run, run.submission]
    for stage in stages[:done]:
        stage()
    if done == 0:
        run.append("driver_started")
    page = render(run)
    assert ("Not finished" in page.text) == (done < 5)


def test_every_single_event_prefix_can_be_reported(whole: RunBuilder) -> None:
    events = whole.ledger.read()
    curves = read_curves(whole.folder, whole.state().trials)
    for count in range(len(events)):
        Page(render_report(fold(events[:count]), curves, "demo"))


def test_a_trial_without_an_outcome_is_running_or_interrupted(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run")
    run.opened()
    run.baseline()
    run.started("t001", "search", "preset:clip_higher", {"clip_high": 0.28})
    run.trained("t001", 0.02, 0, 5)
    row = next(row for row in render(run).tables["leaderboard"] if row[0].startswith("t001"))
    assert row[2] == "running or interrupted"
    assert row[3] == "5 (judged at 4)"


def test_unknown_values_and_missing_metrics_are_dashes(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run")
    run.append("run_opened")
    run.started("baseline", "baseline", "baseline", {})
    run.scored("baseline", 4, None, None)
    run.append("stage_done", stage="baseline", initial_entropy=None)
    run.append("decision", what="budget")
    run.append("published")
    run.append("run_finished")
    page = render(run)
    assert page.tables["leaderboard"][1][4:9] == ["–"] * 5
    assert "budget: ––" in page.text


def test_text_from_files_is_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>\x1b[31m\x00"
    run = RunBuilder(tmp_path / "run")
    run.append(
        "run_opened",
        workspace=evil,
        versions={evil: evil},
        total_steps=TOTAL,
        rungs=RUNGS,
        config={"objective": evil},
    )
    run.append("workspace_checked", checks=[{"name": evil, "found": evil, "problem": evil}])
    run.started("t001", "search", f"preset:{evil}", {evil: evil})
    run.scored("t001", 4, 0.5, 0.6)
    run.ended("t001", "failed", evil, evil)
    run.append("decision", what=evil, chosen={evil: evil}, reason=evil)
    run.append("stage_done", stage=evil, seconds=1.0)
    run.append("published", paths=[evil], sha256={evil: evil}, trial=evil, step=evil)
    run.append("run_finished", changed_files=[evil], forbidden_changes=[evil])
    folder = tmp_path / "run" / "trials" / "t001"
    folder.mkdir(parents=True)
    source = """val-core/a" onload="b'<b>/acc/mean@1"""
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, source: 0.5, "actor/entropy": 0.6}) + "\n")
    page = Page(write_report(tmp_path / "run").read_bytes().decode())
    assert not {"script", "img", "b<"} & set(page.tags)
    assert "<script>alert('x')</script>" in page.text
    assert "\x1b" not in page.text and "\x00" not in page.text


def test_chromium_draws_the_page_without_sideways_scrolling(whole: RunBuilder, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    page, image = write_report(whole.folder), tmp_path / "page.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command = [chromium, *flags, "--window-size=1200,2400", f"--screenshot={image}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert image.read_bytes()[:4] == b"\x89PNG"
