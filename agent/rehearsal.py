"""A rehearsal: what a run would do, line by line, up to launching. Nothing is started, nothing is written."""

import difflib
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pyarrow import ArrowException

from agent.budget import RESERVE, BudgetPlan, Measured, plan_budget, submission_reserve
from agent.checks import CheckResult, require_sound
from agent.config import AgentConfig
from agent.doctor import check_task
from agent.errors import AgentError, PreflightError
from agent.merging import find_merger, merge_environment, working_folders
from agent.model_check import QUESTIONS
from agent.pipeline import Pipeline
from agent.run import BASELINE, FULL
from agent.run_folder import RunFolder
from agent.submission import inference_command
from agent.workspace import Workspace, changed_files, read_manifest
from trials.runner import TrialSpec, build_environment, child_environment
from verl_overlay import install

ASSUMED = Measured(start_up_s=300.0, step_s=60.0)
"""Used for the plan until a baseline on this workspace has measured something."""

_FIRST_TRIAL = "t001"


def rehearse(config: AgentConfig, folder: RunFolder, say: Callable[[str], None] = print) -> None:
    """Print checks, plan, commands, environments and script changes of a run.

    Raises:
        PreflightError: the run would be refused; everything that could be said has been printed.
    """
    workspace = Workspace(config.workspace)
    if not workspace.root.is_dir():
        raise PreflightError(f"there is no workspace at {workspace.root}; a rehearsal creates none, check the path")
    say(f"REHEARSAL of {folder.path.name} on {workspace.root}: nothing is started, nothing is written\n")
    before = read_manifest(workspace)
    task = check_task(config, workspace, folder.trial(BASELINE) / "checkpoints")
    checks = task.results
    say(_render_checks(checks))
    if task.rungs is None:
        require_sound(checks)
    try:
        pipeline = Pipeline(folder, config, on_event=lambda event: None)
        commands = _render_commands(pipeline)
    except (AgentError, OSError, ArrowException, AssertionError):
        require_sound(checks)
        raise
    if task.environment is not None:
        gpus = task.environment.gpus
        seen = "not known" if gpus is None else ", ".join(f"{name} ({size} MiB)" for name, size in gpus) or "none"
        say(f"GPUs that the training environment sees: {seen}\n")
    say(_render_plan(pipeline, *_find_measured(config, workspace)))
    for part in commands:
        say(part)
    changed = changed_files(before, read_manifest(workspace))
    same = f"{len(before)} files hashed before and after, none differs"
    say("PROOF  " + (f"the workspace changed meanwhile: {', '.join(changed[:5])}" if changed else same))
    require_sound(checks)


def _render_checks(checks: Sequence[CheckResult]) -> str:
    said = {"ok": "ok", "warning": "warning", "failed": "PROBLEM"}
    rows = [f"  {said[c.state]:8}{c.name:24}{c.problem or c.found}" for c in checks]
    return "\n".join(["CHECKS", *rows, ""])


# ---- plan -------------------------------------------------------------------------------------------------------------


def _find_measured(config: AgentConfig, workspace: Workspace) -> tuple[Measured, str]:
    """The times of the newest baseline on this workspace, else assumed ones; with their origin."""
    ledgers = sorted(config.runs.glob("*/ledger.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    for ledger in ledgers:
        try:
            state = RunFolder(ledger.parent).read_state()
        except AgentError:
            continue
        receipt, opened = state.stages.get("baseline"), state.opened or {}
        if receipt and receipt.get("step_s") and opened.get("workspace") == str(workspace.root):
            return Measured.from_receipt(receipt), f"MEASURED by {ledger.parent.name}"
    return ASSUMED, "ASSUMED, nothing was measured here yet"


def _render_plan(pipeline: Pipeline, measured: Measured, origin: str) -> str:
    config, schedule, ask, slots = pipeline.config, pipeline.schedule, pipeline.ask, _expected_slots(pipeline)
    trial = measured.on_share(ask.gpu_share)
    exact_s, trial_s = (schedule.trial_s(times, schedule.rungs[-1]) for times in (measured, trial))
    again = config.search.remeasured_proxies if ask.is_proxy else 0
    submission_s = submission_reserve(pipeline.limits, None, None, None)
    budget = plan_budget(
        limits=pipeline.limits,
        elapsed_s=exact_s + submission_s,
        training_done_s=exact_s,
        submission_s=submission_s,
        measured=measured,
        trial_measured=trial,
        schedule=schedule,
        slots=slots,
        gpu_share=ask.gpu_share,
        remeasured=again,
    )
    total_steps = schedule.total_steps
    phases = [(exact_s, f"baseline {BASELINE}: plain GRPO to step {schedule.rungs[-1]} of {total_steps}")]
    submission = "submission: merge, inference.sh, validation, publication, and a second inference if one fails"
    phases.append((submission_s, f"its {submission}"))
    phases.append(_search_time(config, budget, trial_s, slots))
    if again:
        phases.append((RESERVE * again * exact_s, f"re-measurement of {again} proxies on {ask.exact_gpus} GPUs"))
    phases += [
        (budget.final_s, _final_note(budget, total_steps)),
        (submission_s, "the last submission, likewise"),
    ]
    lines, clock = [], 0.0
    for seconds, what in phases:
        lines.append(f"  {_clock(clock)} – {_clock(clock + seconds)}  {what}")
        clock += seconds
    rungs = ", ".join(map(str, pipeline.rungs))
    head = [
        f"PLAN of {config.budget.total_hours:g} h, of which training at most {config.budget.training_hours:g} h",
        f"  times {origin}: {measured.start_up_s:.0f} s from launch to first step, {measured.step_s:.1f} s per step",
        f"  trials are judged at steps {rungs}; one that leads nothing at a step is stopped there",
    ]
    margin = f"{_span(pipeline.limits.margin_s)} before the limit is the latest"
    return "\n".join([*head, *lines, f"  {_clock(clock)}          done at the latest by these times; {margin}\n"])


def _expected_slots(pipeline: Pipeline) -> int:
    """Trials side by side: what the configuration says, else what the GPUs of train.sh hold."""
    ask = pipeline.ask
    held = ask.exact_gpus // ask.gpus if ask.gpus else pipeline.slots
    return pipeline.config.search.concurrent or max(1, held)


def _search_time(config: AgentConfig, budget: BudgetPlan, trial_s: float, slots: int) -> tuple[float, str]:
    """How long the search lasts if no trial is stopped early, and what to say about it."""
    search = config.search
    window_s = max(0.0, budget.search_ends_s)
    rounds = min(math.ceil(search.trials / slots), math.floor(window_s / trial_s))
    fits = min(search.trials, rounds * slots)
    text = f"search: {fits} of {search.trials} trials fit, {slots} side by side, each {_span(trial_s)} at most"
    if fits < search.trials:
        text += f"; the others start only in time that stopped trials leave over (window {_span(window_s)})"
    return (rounds * trial_s if fits == search.trials else window_s), text


def _final_note(budget: BudgetPlan, total_steps: int) -> str:
    if not budget.full_run_fits:
        return f"NO FULL RUN: {_span(budget.full_run_s)} do not fit; the leading trial goes on as far as time allows"
    return f"full run: train.sh itself, {total_steps} steps (15 % reserve included)"


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60:3d}:{minutes % 60:02d}"


def _span(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


# ---- commands ---------------------------------------------------------------------------------------------------------


def _render_commands(pipeline: Pipeline) -> list[str]:
    """Every program that a run starts in the workspace, in order."""
    workspace, folder = pipeline.workspace, pipeline.folder
    baseline = pipeline.short_trial(BASELINE, 1, "baseline", {})
    common = build_environment(baseline, os.environ)
    space = pipeline.space
    preset = next(iter(space.presets), None)
    first = pipeline.short_trial(_FIRST_TRIAL, 1, "search", space.preset_parameters(preset) if preset else {})
    full = pipeline.full_run_spec(1, {}, time_limit_s=0.0)
    model = folder.submission / f"{FULL}_step_<best>" / "model"
    actor = pipeline.full_run_checkpoints() / "global_step_<best>" / "actor"
    merger, (view, staging) = find_merger(workspace.verl), working_folders(model)
    assert merger is not None  # one of the checks
    child = child_environment(os.environ, pipeline.config.training_prefix(), folder.tag)
    presets = [f"  {name:26}{point.source}" for name, point in space.presets.items()]
    return [
        _render_overlay(workspace, folder),
        _render_trial("2. BASELINE", baseline, workspace, os.environ),
        _render_trial(f"3. SEARCH, first trial ({preset or 'sampled'})", first, workspace, common),
        "\n".join(["  first the published points, then points that the sampler chooses:", *presets, ""]),
        _render_trial("4. FULL RUN (the promoted configuration is baked into core_algos.py)", full, workspace, common),
        _render_program(
            f"5. MERGE of {actor} (links to its shards in {view}; the model is checked, renamed to model/, and answers "
            f"{QUESTIONS} dev questions)",
            merger.command(view, staging),
            workspace.verl,
            {**child, **merge_environment(workspace.verl)},
        ),
        _render_program(
            "6. INFERENCE",
            inference_command(workspace, model),
            workspace.scripts,
            {**child, "OUTPUT_DIR": str(model.with_name("results"))},
        ),
        f"7. PUBLICATION\n  both validated files to {workspace.outputs}; what lies there moves to "
        f"{folder.submission / 'previous_1'}\n",
    ]


def _render_overlay(workspace: Workspace, folder: RunFolder) -> str:
    lines = install.render_block({}).count("\n")
    return (
        f"1. OVERLAY\n  {workspace.core_algos}\n  gets {lines} lines at its end, everything off; the original is kept in "
        f"{folder.path / 'original'}\n"
    )


def _render_trial(title: str, spec: TrialSpec, workspace: Workspace, compared_with: Mapping[str, str]) -> str:
    end = "by itself" if spec.stop_step is None else f"interrupted from outside after step {spec.stop_step}"
    lines = [title, f"  {_command(['bash', spec.script_path], Path(spec.cwd))}", f"  ends      {end}"]
    lines += _changes(compared_with, build_environment(spec, os.environ))
    return "\n".join(
        [*lines, _diff(workspace.train_script, workspace.script.text, Path(spec.script_path), spec.script)]
    )


def _render_program(title: str, command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    return "\n".join([title, f"  {_command(command, folder)}", *_changes(os.environ, environment), ""])


def _command(command: Sequence[str], folder: Path) -> str:
    return f"cd {shlex.quote(str(folder))} && {shlex.join(command)}"


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The environment's changes only, as shell words."""
    changed = [
        f"  set       {name}={shlex.quote(after[name])}" for name in sorted(after) if before.get(name) != after[name]
    ]
    return [*changed, *(f"  unset     {name}" for name in sorted(before.keys() - after.keys()))]


def _diff(path: Path, text: str, new_path: Path, new_text: str) -> str:
    lines = difflib.unified_diff(
        text.splitlines(keepends=True), new_text.splitlines(keepends=True), str(path), str(new_path), n=1
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
