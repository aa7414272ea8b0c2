"""The command line: verbs → functions, errors → one line and an exit code.

Heavy packages are imported only by the verb that needs them, so that `--help` and usage errors are quick.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.errors import AgentError, ConfigError, Interrupted, describe_os_error

if TYPE_CHECKING:
    from agent.config import AgentConfig
    from agent.run_folder import RunFolder
    from agent.submission import Submission
    from agent.workspace import Workspace

_DESCRIPTION = """Find, within a fixed wall clock, the remedy against entropy collapse that fits your GRPO run.

Without a verb: start a run. The embedded workspace is created when none is there."""
_LONGEST_LINE = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if arguments is None:
        _require_utf8()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["run", *words]
    options = _parser().parse_args(words)
    try:
        try:
            options.verb(options)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except AgentError as error:
        return _fail(_one_line(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", Interrupted.exit_code)
    except OSError as error:
        return _fail(_one_line(_describe(error, options)), 1)
    return 0


def _fail(message: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return exit_code


def _describe(error: OSError, options: argparse.Namespace) -> str:
    if error.filename is None and _is_output_broken():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left must not fail again at exit
        return f"standard output cannot be written: {error.strerror}; give it a place with space"
    places = (vars(options).get(name) for name in ("target", "workspace", "runs"))
    again = "resume" if options.verb in (_run, _resume) else "try again"
    return f"{describe_os_error(error, next(filter(None, places), 'the run folder'))}, then {again}"


def _is_output_broken() -> bool:
    """Whether standard output is full or nobody reads it any more."""
    try:
        return sys.stdout is not None and os.write(sys.stdout.fileno(), b"\n") == 0
    except OSError:
        return True


def _require_utf8() -> None:
    """Begin again in Python's UTF-8 mode where the locale has another encoding, so that paths are what scripts call them."""
    is_other = sys.getfilesystemencoding() != "utf-8"
    if is_other and not sys.flags.ignore_environment and "utf8" not in sys._xoptions:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run_agent.py", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="verb")

    run = verbs.add_parser("run", help="start a new run (the default)")
    run.register("action", None, _Once)
    run.add_argument("--config", type=Path, metavar="FILE", help="configuration (YAML); every key: agent/config.py")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, e.g. search.trials=20")
    run.add_argument("--workspace", metavar="DIR", help="root of the task; short for --set workspace=DIR")
    run.add_argument("--name", help="name of the run folder; run-<n> by default")
    run.add_argument(
        "--rehearse", action="store_true", help="print commands, environment, script changes and plan; start nothing"
    )
    run.set_defaults(verb=_run)

    doctor = verbs.add_parser(
        "doctor", help="check workspace, configuration and machine; nothing is started or written"
    )
    doctor.register("action", None, _Once)
    doctor.add_argument("--config", type=Path, metavar="FILE", help="as for run")
    doctor.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for run")
    doctor.add_argument("--workspace", metavar="DIR", help="as for run")
    doctor.set_defaults(verb=_doctor)

    init = verbs.add_parser("init", help="create a workspace for your own model and data on GPUs")
    init.register("action", None, _Once)
    init.add_argument("target", type=Path, metavar="DIR", help="folder to create")
    init.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of the base model")
    for split in ("train", "dev", "test"):
        text = f"{split} data: parquet in verl's schema, or parquet or JSON lines with question and answer"
        init.add_argument(f"--{split}", type=Path, nargs="+", required=True, metavar="FILE", help=text)
    for name, low, high, text in (
        ("gpus", 1, 1024, "GPUs of one training; by default those of this machine"),
        ("steps", 1, 10**6, "training steps; by default two epochs, 40 to 400"),
        ("responses", 2, 1024, "responses to each prompt, compared with each other; by default 8"),
        ("response-tokens", 1, 10**6, "longest response; by default 2048"),
    ):
        init.add_argument(f"--{name}", type=_between(low, high), metavar="N", help=text)
    init.add_argument("--verl", type=Path, metavar="DIR", help="verl checkout to copy; by default the installed verl")
    init.add_argument("--training-env", type=Path, metavar="DIR", help="environment to copy verl from")
    init.add_argument("--copy-model", action="store_true", help="copy the model instead of linking to it")
    init.set_defaults(verb=_init)

    for name, verb, text in (
        ("resume", _resume, "go on with an interrupted run"),
        ("export", _export, "make and publish a submission from the best trial so far"),
        ("status", _status, "show a run's trials, from its files"),
        ("report", _report, "write report.html and optuna.db again"),
    ):
        sub = verbs.add_parser(name, help=text)
        sub.register("action", None, _Once)
        sub.add_argument("run", nargs="?", help="name or path of the run; the newest by default")
        sub.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of run folders")
        sub.set_defaults(verb=verb)
    verbs.choices["export"].add_argument(
        "--count-evaluation", action="store_true", help="count the submission as handed in; refused when none is left"
    )
    verbs.choices["resume"].add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="what a resumed run may change: more trials or hours",
    )
    return parser


# ---- verbs ------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> None:
    from agent.doctor import require_healthy
    from agent.run_folder import create_run_folder, new_run_folder
    from agent.workspace import Workspace, read_manifest

    config = _load_config(options)
    config.training_prefix()
    folder = new_run_folder(config, options.name)
    if options.rehearse:
        from agent.rehearsal import rehearse

        rehearse(config, folder)
        return
    _create_embedded_workspace(config)
    workspace = Workspace(config.workspace)
    checks = require_healthy(config, workspace)
    from agent.rungs import plan_rungs

    rungs = plan_rungs(config, workspace)
    with ExitStack() as locks:
        _lock_workspace(locks, workspace)
        before = read_manifest(workspace)
        facts = {"workspace": str(workspace.root), "total_steps": workspace.total_steps, "rungs": rungs}
        create_run_folder(folder, config, facts)
        folder.manifest.write_text(json.dumps(before, indent=1), encoding="utf-8")
        folder.ledger.append("workspace_checked", checks=[vars(check) for check in checks])
        _lock_run(locks, folder)
        _execute(folder, config)


def _resume(options: argparse.Namespace) -> None:
    from agent.config import AgentConfig, differences, load_config, write_config
    from agent.doctor import require_healthy
    from agent.run_folder import find_run_folder, require_same
    from agent.workspace import Workspace

    folder = find_run_folder(options.runs, options.run)
    before: AgentConfig = folder.read_config()
    config = before
    if options.set:
        config = load_config(folder.path / "config.yaml", options.set)
    with ExitStack() as locks:
        _lock_run(locks, folder)
        state = folder.read_state()
        require_same(state, config, folder)
        changed = differences(before.flat(), config.flat())
        late = [key for key in changed if key != "budget.inference_minutes"]
        if late and state.full_run is not None:
            raise ConfigError(f"the full run has begun, so {', '.join(late)} cannot change any more; start a new run")
        workspace = Workspace(config.workspace)
        require_healthy(config, workspace, is_resumed=True)
        _lock_workspace(locks, workspace)
        if changed:
            folder.ledger.append("configuration_changed", changed=changed)
            write_config(config, folder.path / "config.yaml")
        _execute(folder, config)


def _doctor(options: argparse.Namespace) -> None:
    from agent.doctor import check_all, print_table
    from agent.errors import PreflightError
    from agent.machine import read_machine
    from agent.workspace import Workspace

    config = _load_config(options)
    if not config.workspace.is_dir():
        raise PreflightError(f"there is no workspace at {config.workspace}; check the path or create one with init")
    results = check_all(config, Workspace(config.workspace), read_machine())
    print_table(results)
    states = [result.state for result in results]
    failed, warnings = states.count("failed"), states.count("warning")
    print(f"{len(results)} checks, {failed} failed, {warnings} warnings")
    if failed:
        names = ", ".join(result.name for result in results if result.state == "failed")
        raise PreflightError(f"{failed} of {len(results)} checks failed: {names}; the table says what to do")


def _init(options: argparse.Namespace) -> None:
    from agent.scaffold import Request, build_scaffold
    from trials.gpus import read_gpus

    gpus = options.gpus
    if gpus is None:
        found, _ = read_gpus(os.environ)
        gpus = len(found) if found else 8
    request = Request(
        target=options.target,
        model=options.model,
        train=tuple(options.train),
        dev=tuple(options.dev),
        test=tuple(options.test),
        gpus=gpus,
        steps=options.steps,
        responses=options.responses or 8,
        response_tokens=options.response_tokens,
        verl=options.verl,
        training_env=options.training_env,
        copy_model=options.copy_model,
    )
    print("\n".join(build_scaffold(request)))
    print(f"next: python run_agent.py doctor --workspace {options.target}")


def _execute(folder: "RunFolder", config: "AgentConfig") -> None:
    from agent.pipeline import Pipeline
    from agent.report import write_report
    from agent.view import View

    with View(folder.path) as view:
        try:
            submission = Pipeline(folder, config, view.event).execute()
        except AgentError:
            with suppress(OSError, AgentError):  # the error that stopped the run is the one to show
                write_report(folder.path)
            raise
    _tell(submission, folder.path / "report.html")


def _export(options: argparse.Namespace) -> None:
    from agent.pipeline import Pipeline
    from agent.run_folder import find_run_folder, is_locked, require_same
    from agent.view import View
    from agent.workspace import Workspace

    folder = find_run_folder(options.runs, options.run)
    config = folder.read_config()
    require_same(folder.read_state(), config, folder)
    with ExitStack() as locks:
        alone = not is_locked(folder.path / "lock")
        if alone:
            _lock_run(locks, folder)
            _lock_workspace(locks, Workspace(config.workspace))
        with View(folder.path) as view:
            pipeline = Pipeline(folder, config, view.event, alone=alone)
            if options.count_evaluation:
                pipeline.require_evaluation()
            submission = pipeline.export()
            counted = pipeline.count_evaluation() if options.count_evaluation else None
    _tell(submission, folder.path / "report.html")
    if counted:
        print(counted)


def _status(options: argparse.Namespace) -> None:
    from rich.console import Console

    from agent.report import read_curves
    from agent.run_folder import find_run_folder, is_locked
    from agent.view import print_page, render_status

    folder = find_run_folder(options.runs, options.run)
    state = folder.read_state()
    curves = read_curves(folder.path, state.trials)
    print_page(Console(), render_status(state, alive=is_locked(folder.path / "lock"), curves=curves))


def _report(options: argparse.Namespace) -> None:
    from agent.report import write_report
    from agent.run_folder import find_run_folder
    from agent.search import write_study

    folder = find_run_folder(options.runs, options.run)
    write_study(folder.read_state(), folder.optuna, folder.path.name)
    print(write_report(folder.path))


def _between(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not a number from {low} to {high}")
        return int(text)

    return read


class _Once(argparse.Action):
    """Stores an option's value; an option that is given twice is refused, as only one of its values could count."""

    _is_given = False

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if self._is_given:
            parser.error(f"{option_string or self.dest} is given twice; give it once, with all its values behind it")
        self._is_given = True
        setattr(namespace, self.dest, values)


# ---- parts ------------------------------------------------------------------------------------------------------------


def _load_config(options: argparse.Namespace) -> "AgentConfig":
    """The configuration of `run` and `doctor`, its search space checked."""
    from agent.config import load_config

    overrides = [*options.set, *([f"workspace={options.workspace}"] if options.workspace else [])]
    config = load_config(options.config, overrides)
    config.read_space()
    return config


def _create_embedded_workspace(config: "AgentConfig") -> None:
    from agent.config import AgentConfig
    from agent.errors import PreflightError

    if config.workspace.exists():
        return
    if config.workspace != AgentConfig().workspace.resolve():
        raise PreflightError(f"there is no workspace at {config.workspace}; check the path")
    from trials.embedded.build import build_workspace

    print(f"creating the embedded workspace in {config.workspace}", flush=True)
    try:
        build_workspace(config.workspace, _verl_of_training_environment(config))
    except (ModuleNotFoundError, FileExistsError) as error:
        raise PreflightError(str(error)) from None


def _verl_of_training_environment(config: "AgentConfig") -> Path | None:
    """verl's package folder in the training environment; None when that is the agent's own."""
    from agent.errors import PreflightError
    from trials.environment import EnvironmentUnusable, read_training_environment
    from trials.runner import child_environment

    prefix = config.training_prefix()
    if prefix is None:
        return None
    try:
        environment = read_training_environment(child_environment(os.environ, prefix, run_tag=""), Path("/"))
    except EnvironmentUnusable as error:
        raise PreflightError(str(error)) from None
    if environment.core_algos is None:
        raise PreflightError(f"{prefix} has no verl; install verl==0.9.1 there or set another training_env")
    return environment.core_algos.parents[2]


def _lock_run(locks: ExitStack, folder: "RunFolder") -> None:
    from agent.run_folder import Lock

    locks.enter_context(Lock(folder.path / "lock", f"the run {folder.path}"))


def _lock_workspace(locks: ExitStack, workspace: "Workspace") -> None:
    from agent.run_folder import Lock

    locks.enter_context(Lock(workspace.train_script, f"the workspace {workspace.root}"))


def _tell(submission: "Submission", report: Path) -> None:
    accuracy = "" if submission.accuracy is None else f", test accuracy {submission.accuracy:.3f}"
    print(f"valid submission of {submission.samples} samples published{accuracy}; report: {report}")


def _one_line(message: object) -> str:
    """A message without line ends; of a very long one the beginning, and the end, which says what to do."""
    text = " ".join(str(message).split())
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 200]} … {text[-200:]}"
