"""The report: one self-contained HTML page about a run, from its ledger and its trials' metrics.jsonl.

`render_report` is pure. Nothing is loaded from elsewhere and no script runs, so the page can be mailed and
still opens years later. It works on a run in any state; what is not known is shown as a dash.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.charts import Chart, Points, Series, Zone, draw_figure, draw_legend
from agent.ledger import Event, Ledger, RunState, Score, TrialState, fold
from agent.markup import (
    UNKNOWN,
    Markup,
    element,
    format_bytes,
    format_configuration,
    format_number,
    format_seconds,
    format_value,
    join,
    table,
)
from agent.objective import EntropyBand
from agent.promotion import choose_promotion
from trials.metrics import StepMetrics
from trials.runner import ENTROPY_WINDOW_STEPS, read_history

REPORT = "report.html"
BEST_DRAWN = 3
"""So many search trials get a colour of their own in the charts."""

Curves = Mapping[str, Sequence[StepMetrics]]
"""Trial → its steps, ascending."""


# ---- read and write ----------------------------------------------------------------------------------------


def write_report(run_folder: Path) -> Path:
    """Render `run_folder/report.html` from the run's files; the old page stays until the new one is whole.

    Raises:
        RunFolderError: the ledger is missing or damaged.
    """
    state = fold(Ledger(run_folder / "ledger.jsonl").read())
    _add_sizes(state.published)
    page = render_report(state, read_curves(run_folder, state.trials), run_folder.resolve().name)
    target, temporary = run_folder / REPORT, run_folder / f".{REPORT}.partial"
    try:
        temporary.write_bytes(page.encode("utf-8", "replace"))
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return target


def read_curves(run_folder: Path, trials: Iterable[str]) -> dict[str, list[StepMetrics]]:
    """Trial → its steps; a trial without a metrics file has none."""
    return {trial: read_history(run_folder / "trials" / trial) for trial in trials}


def _add_sizes(published: Iterable[Event]) -> None:
    """Look up the size in bytes of published files that are still there."""
    for event in published:
        paths = [Path(str(path)) for path in event.get("paths", [])]
        event.setdefault("bytes", {str(path): path.stat().st_size for path in paths if path.is_file()})


# ---- what the ledger says ----------------------------------------------------------------------------------


def describe_outcome(trial: TrialState) -> str:
    """How a trial ended, in words."""
    reason = f": {trial.reason}" if trial.reason else ""
    if trial.outcome is None:
        return "running or interrupted"
    if trial.outcome == "failed":
        return f"failed ({trial.failure or 'unknown'}){reason}"
    if trial.outcome == "stopped":
        where = f" at step {trial.last.step}" if trial.last else ""
        return f"stopped by ASHA{where}" if trial.reason.startswith("ASHA") else f"stopped{where}{reason}"
    return str(trial.outcome)


def describe_method(state: RunState, trial: TrialState) -> str:
    """The method a trial trains with; a promotion is followed back to the trial that was promoted."""
    seen = {trial.trial}
    while trial.origin.startswith(("promotion of ", "re-measurement of ")):
        parent = state.trials.get(trial.origin.split(" of ", 1)[1])
        if parent is None or parent.trial in seen:
            break
        seen.add(parent.trial)
        trial = parent
    if trial.kind == "baseline" or not trial.configuration:
        return "plain GRPO"
    if trial.origin.startswith("preset:"):
        return trial.origin.removeprefix("preset:")
    return f"found by Optuna ({trial.trial})" if trial.origin == "optuna" else trial.origin or trial.trial


def entropy_band(state: RunState) -> EntropyBand:
    """The band that the run was opened with, as multiples of H0."""
    config: Mapping[str, Any] = (state.opened or {}).get("config") or {}
    section = config.get("objective")
    nested: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    default, limits = EntropyBand(), {}
    for name in ("collapsed", "healthy_low", "healthy_high", "exploded"):
        value = nested.get(name, config.get(f"objective.{name}"))
        limits[name] = float(value) if isinstance(value, (int, float)) else getattr(default, name)
    return EntropyBand(**limits)


def rank_trials(trials: Iterable[TrialState]) -> list[TrialState]:
    """As the promotion compares them: usable ones first, then by step, then by the objective at that step."""
    return sorted(trials, key=_merit, reverse=True)


def _merit(trial: TrialState) -> tuple[bool, bool, int, float, float, float]:
    score = trial.last
    if score is None:
        return False, False, 0, 0.0, 0.0, -trial.started_s
    usable, accuracy = trial.outcome != "failed", score.accuracy or 0.0
    return usable, usable and score.objective > 0, score.step, score.objective, accuracy, -trial.started_s


def entropy_ratio(score: Score, reference: float | None) -> float | None:
    """h = entropy / H0."""
    if score.entropy_ratio is not None or score.entropy is None or not reference:
        return score.entropy_ratio
    return score.entropy / reference


def last_step(trial: TrialState, curve: Sequence[StepMetrics]) -> int | None:
    """The last step that a trial trained, as far as its files tell."""
    steps = [score.step for score in trial.scores] + [metrics.step for metrics in curve[-1:]]
    return max(steps, default=None)


def _rung_steps(state: RunState) -> list[int]:
    rungs = (state.opened or {}).get("rungs")
    if isinstance(rungs, (list, tuple)) and rungs:
        return sorted(int(rung) for rung in rungs)
    return sorted({score.step for trial in state.search_trials for score in trial.scores})


# ---- the page ----------------------------------------------------------------------------------------------


def render_report(state: RunState, curves: Curves, title: str) -> str:
    """The whole page.

    Args:
        state: the fold of the run's ledger.
        curves: trial → its steps; trials may be missing.
        title: the run's name.
    """
    leader = _find_leader(state)
    sections = [
        _headline(state, leader, title),
        _section("Why: the decisions", _decisions(state)),
        _section("Curves", _curves(state, curves, leader)),
        _section("Leaderboard", _leaderboard(state, curves)),
        _section("Rungs", _rungs(state)),
        _section("Time", _times(state, curves)),
        _section("Checks and proof", *_proof(state)),
        _section("Objective, versions, commands", *_reference(state, title)),
    ]
    head = [Markup(_HEAD), element("title", f"Run {title}"), element("style", Markup(_STYLE))]
    body = element("body", element("main", join(sections, "\n")))
    return "<!DOCTYPE html>\n" + element("html", join([element("head", join(head)), body], "\n"), lang="en") + "\n"


def _section(title: str, *parts: Markup) -> Markup:
    return element("section", join([element("h2", title), *parts], "\n"))


def _quiet(text: str) -> Markup:
    return element("p", text, class_="quiet")


# ---- headline ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leader:
    """The checkpoint the page is about: the chosen one, or the best score so far."""

    trial: TrialState
    score: Score
    final: bool


def _find_leader(state: RunState) -> _Leader | None:
    receipt = state.stages.get("select", {})
    chosen = state.trials.get(str(receipt.get("trial")))
    if chosen is not None:
        step, objective = int(receipt.get("step") or 0), float(receipt.get("objective") or 0.0)
        unscored = Score(step, objective, receipt.get("accuracy"), receipt.get("entropy"))
        return _Leader(chosen, chosen.score_at(step) or unscored, True)
    full = state.full_run
    promotion = choose_promotion([full] if full and full.scores else list(state.trials.values()))
    trial = state.trials[promotion.trial] if promotion else None
    return _Leader(trial, trial.last, False) if trial and trial.last else None


def _headline(state: RunState, leader: _Leader | None, title: str) -> Markup:
    parts = [element("h1", f"Run {title}"), _quiet(_status_line(state))]
    if leader is None:
        parts.append(element("p", "No trial has been validated yet, so there is no result.", class_="lead"))
    else:
        verdict = element("p", _verdict(state, leader), class_="lead")
        parts += [_cards(state, leader), verdict, _comparison(state, leader)]
    return element("header", join([*parts, _quiet(_NEWCOMER)], "\n"))


def _status_line(state: RunState) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(state.newest_s))
    workspace = (state.opened or {}).get("workspace")
    where = f" Workspace: {workspace}." if workspace else ""
    if state.finished is not None:
        return f"Finished at {when} after {format_seconds(state.elapsed_s)}.{where}"
    trouble = state.trouble or {}
    why = f" Stage {trouble['stage']} failed: {trouble.get('reason', '')}." if "stage" in trouble else ""
    return f"Not finished: this page shows what the ledger held at {when}.{why}{where}"


def _cards(state: RunState, leader: _Leader) -> Markup:
    score, submission = leader.score, _submission(state)
    h = format_number(entropy_ratio(score, state.initial_entropy), 2)
    role, place = ("Chosen", "checkpoint of") if leader.final else ("Leading", "best so far:")
    where = f"{leader.trial.trial}, step {score.step}"
    published = "published" if state.published else "not published"
    cards = [
        (
            f"{role} method",
            describe_method(state, leader.trial),
            f"{place} {where}",
        ),
        ("Dev accuracy", format_number(score.accuracy), "share of right answers, 0–1"),
        ("Policy entropy", format_number(score.entropy, 4), f"nats/token, {h} × untrained"),
        ("Submission", f"valid, {published}" if submission else "none yet", _samples(submission)),
        ("Test accuracy", format_number(submission.get("accuracy")), "only if the test file has answers"),
    ]
    return element("div", join(_card(*card) for card in cards), class_="cards")


def _card(label: str, value: str, note: str) -> Markup:
    parts = [element("span", label), element("b", value), element("small", note)]
    return element("div", join(parts), class_="card")


def _submission(state: RunState) -> Mapping[str, Any]:
    """What the validation found; empty before."""
    return state.stages.get("validate", {}).get("submission") or {}


def _samples(submission: Mapping[str, Any]) -> str:
    return f"{submission.get('samples', UNKNOWN)} samples" if submission else "no validated files"


def _find_rivals(state: RunState, leader: _Leader) -> tuple[Score, Score] | None:
    """Leader and baseline at one step: the leader's own, else the last one that both have a score at."""
    baseline = state.baseline
    if baseline is None or baseline is leader.trial:
        return None
    if same := baseline.score_at(leader.score.step):
        return leader.score, same
    pairs = [(ours, theirs) for ours in leader.trial.scores if (theirs := baseline.score_at(ours.step))]
    return max(pairs, key=lambda pair: pair[0].step, default=None)


def _verdict(state: RunState, leader: _Leader) -> str:
    """The result in words, compared with the baseline at one step only."""
    if not any(trial.scores for trial in state.trials.values() if trial.kind != "baseline"):
        return "Only plain GRPO has been validated so far."
    if not leader.trial.configuration:
        return "Plain GRPO is ahead: no other method has done better at the same step."
    rivals = _find_rivals(state, leader)
    if rivals is None:
        return "The GRPO baseline has no score at a step that this trial has too; nothing can be compared yet."
    ours, theirs = rivals
    text = f"At step {ours.step}, {describe_method(state, leader.trial)} against plain GRPO: dev accuracy "
    text += f"{format_number(ours.accuracy)} against {format_number(theirs.accuracy)}, policy entropy "
    text += f"{format_number(ours.entropy, 4)} against {format_number(theirs.entropy, 4)} nats/token."
    if ours.step != leader.score.step:
        text += f" The baseline has no score at step {leader.score.step}; {ours.step} is the last that both have."
    return text


def _comparison(state: RunState, leader: _Leader) -> Markup:
    rows = [("Chosen checkpoint" if leader.final else "Best so far", leader.trial.trial, leader.score)]
    rivals = _find_rivals(state, leader)
    if rivals is not None and rivals[0] is not leader.score:
        rows.append(("The same trial, earlier", leader.trial.trial, rivals[0]))
    if rivals is not None and state.baseline is not None:
        rows.append(("GRPO baseline, same step", state.baseline.trial, rivals[1]))
    cells = [(what, trial, score.step, *_numbers(state, score)) for what, trial, score in rows]
    headers = "what | trial | step | dev accuracy | policy entropy (nats/token) | h = entropy/H0 | objective"
    return table("comparison", headers, cells, numeric=range(2, 7))


def _numbers(state: RunState, score: Score) -> tuple[str, str, str, str]:
    h = format_number(entropy_ratio(score, state.initial_entropy))
    return (
        format_number(score.accuracy),
        format_number(score.entropy, 4),
        h,
        format_number(score.objective, 4),
    )


def _decisions(state: RunState) -> Markup:
    """Each decision with its reason, in order."""
    if not state.decisions:
        return _quiet("Nothing has been decided yet.")
    return element("ol", join(map(_decision, state.decisions)), class_="decisions")


def _decision(event: Event) -> Markup:
    chosen = join([element("b", f"{event.get('what', UNKNOWN)}: "), format_value(event.get("chosen"))])
    return element("li", join([chosen, _quiet(event.get("reason") or UNKNOWN)]))


# ---- curves ------------------------------------------------------------------------------------------------


def entropy_points(curve: Sequence[StepMetrics]) -> Points:
    """Policy entropy of each training step, nats per token."""
    return [(metrics.step, metrics.entropy) for metrics in curve if metrics.entropy is not None]


def cut_off_share(curve: Sequence[StepMetrics]) -> float | None:
    """Mean share of answers that were cut off at the longest length, over the last training steps; None when unknown."""
    shares = [metrics.get("response_length/clip_ratio") for metrics in curve if metrics.is_training_step]
    known = [share for share in shares[-ENTROPY_WINDOW_STEPS:] if share is not None]
    return statistics.fmean(known) if known else None


def accuracy_points(trial: TrialState, curve: Sequence[StepMetrics]) -> Points:
    """Dev accuracy of each validated step; with several data sources only the ledger knows their mean."""
    points: dict[int, float] = {}
    for metrics in curve:
        sources = list(metrics.dev_accuracies().values())
        if len(sources) == 1:
            points[metrics.step] = sources[0]
    points.update({score.step: score.accuracy for score in trial.scores if score.accuracy is not None})
    return sorted(points.items())


def _curves(state: RunState, curves: Curves, leader: _Leader | None) -> Markup:
    entropy = _series(state, lambda trial: entropy_points(curves.get(trial.trial, [])))
    accuracy = _series(state, lambda trial: accuracy_points(trial, curves.get(trial.trial, [])))
    steps = [step for series in entropy + accuracy for step, _ in series.points]
    if not steps:
        return _quiet("No step has been measured yet.")
    x_max = float(max(steps) or 1)
    charts = [_entropy_chart(state, entropy, x_max, leader), _accuracy_chart(state, accuracy, x_max, leader)]
    figures = element("div", join(map(draw_figure, charts)), class_="charts")
    return join([draw_legend(entropy), figures, _quiet(_CURVES_NOTE)])


def _series(state: RunState, points: Callable[[TrialState], Points]) -> list[Series]:
    """The lines in drawing order: the last is drawn on top."""
    styles = {trial.trial: "rest" for trial in state.search_trials}
    usable = [trial for trial in state.search_trials if trial.scores and trial.outcome != "failed"]
    for place, trial in reversed([*enumerate(rank_trials(usable)[:BEST_DRAWN], start=1)]):
        del styles[trial.trial]
        styles[trial.trial] = f"best{place}"
    styles.update({trial.trial: "baseline" for trial in [state.baseline] if trial})
    styles.update({trial.trial: "full" for trial in [state.full_run] if trial})
    return [
        Series(name, f"{name} · {_role(state, state.trials[name])}", style, points(state.trials[name]))
        for name, style in styles.items()
    ]


def _role(state: RunState, trial: TrialState) -> str:
    prefix = {"baseline": "baseline, ", "full": "full run of "}.get(trial.kind, "")
    return prefix + describe_method(state, trial)


def _highest(series: Sequence[Series]) -> float:
    """The highest finite value, within what a scale can show."""
    values = [value for line in series for _, value in line.points if math.isfinite(value)]
    return min(max([0.0, *values]), 1e9)


def _entropy_chart(state: RunState, series: Sequence[Series], x_max: float, leader: _Leader | None) -> Chart:
    reference, band, highest = state.initial_entropy, entropy_band(state), _highest(series)
    caption, zone = "Falling towards 0 means that the model always writes the same: entropy collapse.", None
    if reference:
        highest = max(1.3 * band.healthy_high * reference, min(highest, band.exploded * reference))
        zone = Zone(*(r * reference for r in (band.healthy_low, band.healthy_high, 1.0, band.collapsed)))
        caption += f" H0 = {reference:.4f} nats/token is the untrained model. The shaded band, "
        caption += f"{band.healthy_low:g} to {band.healthy_high:g} × H0, gets the full entropy score; below the "
        caption += "dashed line it is 0."
    return Chart(
        name="entropy", title="Policy entropy", y_title="policy entropy (nats/token)", caption=caption,
        series=series, x_max=x_max, y_max=1.05 * highest or 1.0, rungs=_rung_steps(state),
        ring=(leader.score.step, leader.score.entropy) if leader else None, zone=zone,
    )  # fmt: skip


def _accuracy_chart(state: RunState, series: Sequence[Series], x_max: float, leader: _Leader | None) -> Chart:
    return Chart(
        name="accuracy", title="Dev accuracy", y_title="dev accuracy (0–1)", series=series,
        caption="Share of the dev problems that are answered right; validated every few steps.",
        x_max=x_max, y_max=min(1.0, 1.1 * _highest(series)) or 1.0, rungs=_rung_steps(state),
        ring=(leader.score.step, leader.score.accuracy) if leader else None,
    )  # fmt: skip


# ---- tables ------------------------------------------------------------------------------------------------


def _leaderboard(state: RunState, curves: Curves) -> Markup:
    headers = "trial | origin | outcome | last step | dev accuracy | policy entropy (nats/token) | "
    headers += "h = entropy/H0 | forecast h | entropy score | objective | cut off | attempts | time | configuration"
    ranked = rank_trials(state.trials.values())
    rows = [_leaderboard_row(state, trial, curves.get(trial.trial, [])) for trial in ranked]
    note = "Sorted as the promotion compares: highest step first, then objective. Numbers: last validation; cut off: share "
    note += (
        "of answers that were as long as allowed in the last training steps – many of them can drive the entropy up."
    )
    return join([table("leaderboard", headers, rows, numeric=range(3, 13)), _quiet(note)])


def _leaderboard_row(state: RunState, trial: TrialState, curve: Sequence[StepMetrics]) -> list[Any]:
    score = trial.last or Score(0, math.nan, None, None)
    trained, (accuracy, entropy, h, objective) = last_step(trial, curve), _numbers(state, score)
    judged = f" (judged at {score.step})" if trial.scores and trained != score.step else ""
    return [
        join([element("b", trial.trial), *_badges(state, trial)], " "),
        trial.label,
        element("div", describe_outcome(trial), class_="words"),
        f"{format_value(trained)}{judged}",
        accuracy,
        entropy,
        h,
        format_number(score.forecast_ratio),
        format_number(score.entropy_score),
        objective,
        format_number(cut_off_share(curve)),
        trial.attempts,
        format_seconds(trial.training_s or None),
        element("code", format_configuration(trial.configuration)),
    ]


def _badges(state: RunState, trial: TrialState) -> list[Markup]:
    promotions = [event.get("chosen") for event in state.decisions if event.get("what") == "promotion"]
    badges = ["promoted"] if trial.trial in promotions else []
    if state.stages.get("select", {}).get("trial") == trial.trial:
        badges.append("chosen")
    return [element("span", badge, class_="badge") for badge in badges]


def _rungs(state: RunState) -> Markup:
    headers = "rung (step) | trials that reached it | objectives, best first | stopped here"
    rows = [_rung_row(state, rung) for rung in _rung_steps(state)]
    note = "At a rung the trials are compared by their objective at that step; ASHA stops the weaker ones."
    return join([table("rungs", headers, rows, numeric={0, 1}), _quiet(note)])


def _rung_row(state: RunState, rung: int) -> tuple[int, int, Markup, str]:
    trials = [trial for trial in state.trials.values() if trial.kind != "full"]
    reached = [(score.objective, trial.trial) for trial in trials if (score := trial.score_at(rung))]
    reached.sort(key=lambda pair: -pair[0])
    objectives = ", ".join(f"{name} {format_number(value, 4)}" for value, name in reached)
    ended = [t.trial for t in trials if t.outcome == "stopped" and t.last and t.last.step == rung]
    return (
        rung,
        len(reached),
        element("div", objectives or UNKNOWN, class_="words"),
        ", ".join(ended) or UNKNOWN,
    )


def _times(state: RunState, curves: Curves) -> Markup:
    rows: list[tuple[Any, ...]] = [_stage_row(state, stage) for stage in state.stage_seconds]
    rows += [_trial_time_row(trial, curves.get(trial.trial, [])) for trial in state.trials.values()]
    starts = f"the agent was started {len(state.drivers)} times" if len(state.drivers) != 1 else ""
    budget = (state.opened or {}).get("config", {}).get("budget", {})
    hours = {name: f"limit {budget[name]:g} h" if name in budget else "" for name in ("training_hours", "total_hours")}
    rows.append((element("b", "training, all trials"), format_seconds(state.training_s), "", hours["training_hours"]))
    starts = "; ".join(filter(None, (starts, hours["total_hours"])))
    rows.append((element("b", "wall clock"), format_seconds(state.elapsed_s), "", starts))
    return table("times", "what | time | of it start-up | training steps", rows, numeric={1, 2})


def _stage_row(state: RunState, stage: str) -> tuple[Any, ...]:
    receipt, seconds = state.stages[stage], format_seconds(state.stage_seconds[stage])
    per_step = f"{format_number(receipt['step_s'], 2)} s per step" if receipt.get("step_s") is not None else ""
    return f"stage {stage}", seconds, format_seconds(receipt.get("start_up_s")), per_step


def _trial_time_row(trial: TrialState, curve: Sequence[StepMetrics]) -> tuple[Any, ...]:
    start_up_s, steps_s, count = split_time(curve)
    steps = f"{count} in {format_seconds(steps_s)}" if count else ""
    return f"trial {trial.trial}", format_seconds(trial.training_s or None), format_seconds(start_up_s), steps


def split_time(curve: Sequence[StepMetrics]) -> tuple[float | None, float | None, int]:
    """Seconds to the first training step, from there to the last, and how many steps; sums over attempts."""
    attempts: dict[float, list[float]] = {}
    for metrics in curve:
        seconds = metrics.get("seconds")
        if metrics.is_training_step and seconds is not None:
            attempts.setdefault(metrics.get("attempt") or 0.0, []).append(seconds)
    if not attempts:
        return None, None, 0
    spans = attempts.values()
    return sum(map(min, spans)), sum(max(span) - min(span) for span in spans), sum(map(len, spans))


# ---- proof and reference -----------------------------------------------------------------------------------


def _describe_evaluations(state: RunState) -> str:
    budget = ((state.opened or {}).get("config") or {}).get("budget") or {}
    return (
        f"The task grants {budget.get('evaluations', 3)} evaluations; {len(state.evaluations)} were counted in this run, by "
        "`export --count-evaluation`. The agent itself spends none: it checks and publishes files."
    )


def _proof(state: RunState) -> list[Markup]:
    finished = state.finished or {}
    facts = [
        join([element("b", "Files changed in the workspace: "), _files(finished.get("changed_files"))]),
        join([element("b", "Changes that are not allowed: "), _files(finished.get("forbidden_changes"))]),
    ]
    return [
        element("h3", "Preflight checks"),
        _checks(state),
        element("h3", "Workspace"),
        element("ul", join(element("li", fact) for fact in facts)),
        element("h3", "Submission"),
        _published(state),
        element("p", _submission_facts(_submission(state))),
        *_model_check(state.stages.get("merge", {}).get("check")),
        element("p", _describe_evaluations(state)),
    ]


def _files(files: Any) -> Markup:
    if files is None:
        return Markup("not known yet")
    return join((element("code", format_value(name)) for name in files), ", ") if files else Markup("none")


def _checks(state: RunState) -> Markup:
    checks = (state.checks or {}).get("checks") or []
    rows = [
        (check.get("name"), element("div", check.get("found"), class_="words"), _problem(check)) for check in checks
    ]
    return table("checks", "check | found | problem", rows)


def _problem(check: Mapping[str, Any]) -> str:
    problem = check.get("problem")
    if not problem:
        return "ok"
    return str(problem) if check.get("is_fatal", True) else f"warning: {problem}"


def _published(state: RunState) -> Markup:
    rows = [_published_row(event, str(path)) for event in state.published for path in event.get("paths", [])]
    return table("published", "published file | from | size | sha256", rows, numeric={2})


def _published_row(event: Event, path: str) -> tuple[Any, ...]:
    origin = f"{event.get('trial', UNKNOWN)}, step {event.get('step', UNKNOWN)}"
    size, sha256 = _of_file(event.get("bytes"), path), _of_file(event.get("sha256"), path)
    return element("code", path), origin, format_bytes(size), element("code", sha256)


def _of_file(facts: Any, path: str) -> Any:
    """A fact about one file, keyed by its path or by its name."""
    return facts.get(path, facts.get(Path(path).name)) if isinstance(facts, Mapping) else None


def _submission_facts(submission: Mapping[str, Any]) -> str:
    if not submission:
        return "No submission has been validated."
    tokens = format_number(submission.get("mean_tokens"), 1)
    text = f"Validated: {_samples(submission)}, {tokens} tokens per answer, "
    text += f"policy entropy {format_number(submission.get('mean_entropy'), 4)} nats/token over all of them, "
    return text + f"test accuracy {format_number(submission.get('accuracy'))}."


def _model_check(check: Mapping[str, Any] | None) -> list[Markup]:
    """Training and merged model side by side."""
    if check is None:
        return []
    if "unchecked" in check:
        return [element("p", f"The merged model was not tried on dev questions: {check['unchecked']}.")]
    rows = [
        ("dev accuracy", format_number(check["trainer_accuracy"]), format_number(check["accuracy"])),
        ("entropy (nats/token)", format_number(check["trainer_entropy"], 4), format_number(check["entropy"], 4)),
        *check["settings"],
    ]
    facts = f"The merged model, tried on dev questions before the inference: {check['note']}."
    return [element("p", facts), table("merged", "what | in the training | merged model", rows)]


def _reference(state: RunState, title: str) -> list[Markup]:
    band, reference = entropy_band(state), format_number(state.initial_entropy, 4)
    rise = f"clip(ln(h/{band.collapsed:g}) / ln({band.healthy_low:g}/{band.collapsed:g}), 0, 1)"
    fall = f"clip(ln(h/{band.healthy_high:g}) / ln({band.exploded:g}/{band.healthy_high:g}), 0, 1)"
    formula = f"objective = dev accuracy × E(h),   h = policy entropy / H0,   H0 = {reference} nats/token\n"
    formula += f"E(h) = {rise}\n       · (1 − {fall})"
    versions = ((state.opened or {}).get("versions") or {}).items()
    commands = "\n".join(f"python run_agent.py {verb} {title}" for verb in ("resume", "export", "status", "report"))
    return [
        element("pre", formula),
        element("p", _FORECAST),
        table("versions", "package | version", [(name, format_value(value)) for name, value in versions]),
        element("p", "To go on, to publish the best so far, to look, and to write this page again:"),
        element("pre", commands),
    ]


_NEWCOMER = """In words: GRPO trains a language model by rewarding right answers. It tends to become too sure
of itself – its policy entropy, the mean uncertainty about the next token, falls towards zero – and then it
stops exploring. A run tries other loss variants (methods) in short trials, stops the weak ones early, and
trains the best one in full. Dev accuracy is measured on problems that are not trained on."""

_CURVES_NOTE = """Ring: the checkpoint of the headline, its entropy a mean over the last steps. Dotted
vertical lines: rungs. Each line is one trial with one seed; small differences can be chance."""


_FORECAST = """Before the end of the schedule the forecast h^g is judged instead of h: g = 2 up to half of the
steps, then falling to 1. The full run's checkpoints are judged by h itself."""

_HEAD = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""

_STYLE = """
:root{--bg:#fff;--ink:#1a1a1a;--quiet:#5c5c5c;--edge:#d9d9d9;--card:#f5f5f3;--grid:#e8e8e8;--rest:#b5b5b5;
--band:#eaf3ea;--full:#d55e00;--best1:#0072b2;--best2:#009e73;--best3:#aa4499;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--bg:#161618;--ink:#ececec;--quiet:#a5a5a5;--edge:#3a3a3d;
--card:#212124;--grid:#2a2a2d;--rest:#6a6a70;--band:#1d2b22;--full:#ff8c42;--best1:#56b4e9;
--best2:#2fcf9f;--best3:#e39bcb}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:1.2rem 1rem 3rem}
h1{font-size:1.5rem;margin:.2rem 0;overflow-wrap:anywhere}h2{font-size:1.2rem;margin:2.2rem 0 .6rem}
h3{font-size:1rem;margin:1.2rem 0 .4rem}
p{max-width:46rem;overflow-wrap:anywhere}.quiet,figcaption{color:var(--quiet);font-size:.9rem}
.lead{font-size:1.1rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:.7rem;margin:1rem 0}
.card{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:.6rem .8rem;min-width:0}
.card span,.card small{display:block;color:var(--quiet);font-size:.85rem}
.card b{font-size:1.1rem;overflow-wrap:anywhere}
.scroll{overflow-x:auto;border:1px solid var(--edge);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:.4rem .5rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--edge)}
tbody tr:last-child td{border-bottom:0}
th{background:var(--card);font-weight:600;vertical-align:bottom}
th.n,td.n{text-align:right}td.n{white-space:nowrap}
.words{min-width:12.5rem;max-width:34rem;overflow-wrap:anywhere}
#comparison td:first-child,#leaderboard td:first-child{white-space:nowrap}
#leaderboard td:first-child,#leaderboard th:first-child{position:sticky;left:0}
#leaderboard td:first-child{background:var(--bg)}
#leaderboard td:last-child code{display:block;min-width:34rem}
#checks td:last-child{min-width:12rem;overflow-wrap:anywhere}#published td:last-child{min-width:18rem}
.decisions{padding-left:1.3rem;max-width:60rem}.decisions p{margin:.1rem 0 .8rem;max-width:none}
code,pre{font:.85rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
code{overflow-wrap:anywhere}pre{overflow-x:auto;background:var(--card);padding:.7rem .9rem;border-radius:8px}
.badge{border:1px solid var(--full);color:var(--full);border-radius:99px;padding:0 .45rem;font-size:.75rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:1rem 1.5rem}
figure{margin:0;min-width:0}figure svg{width:100%;max-width:640px;height:auto;display:block}
.legend{max-width:none;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.9rem}
.legend span{display:inline-flex;align-items:center;gap:.4rem;min-width:0}.legend svg{flex:none}
svg text{fill:var(--quiet);font-size:13px}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.grid{stroke:var(--grid)}.axis{stroke:var(--quiet)}.rung{stroke:var(--quiet);stroke-dasharray:1 4}
.band{fill:var(--band)}.h0{stroke:var(--quiet)}.floor{stroke:var(--quiet);stroke-dasharray:5 4}
.ring{fill:none;stroke:var(--ink);stroke-width:1.6}
.line.rest{stroke:var(--rest);stroke-width:1}.dot.rest{fill:var(--rest)}
.line.baseline{stroke:var(--ink);stroke-width:2.4}.dot.baseline{fill:var(--ink)}
.line.full{stroke:var(--full);stroke-width:2.8}.dot.full{fill:var(--full)}
.line.best1{stroke:var(--best1)}.dot.best1{fill:var(--best1)}
.line.best2{stroke:var(--best2);stroke-dasharray:7 3}.dot.best2{fill:var(--best2)}
.line.best3{stroke:var(--best3);stroke-dasharray:2.5 2.5}.dot.best3{fill:var(--best3)}
"""
