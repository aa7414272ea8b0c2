"""The overlay by hand: list and show methods, install, check and revert the block in a ``core_algos.py``."""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_overlay.configuration import (
    Knob,
    OverlayError,
    full_configuration,
    knobs,
    parse_configuration,
    read_configuration_text,
)
from verl_overlay.install import check, install, is_installed, read_configuration, revert
from verl_overlay.presets import PRESETS, Preset


def knob_line(knob: Knob) -> str:
    """Name, off value, range, meaning and source of one knob."""
    values = f"[{knob.low:g}, {knob.high:g}]" if "number" in knob.kind else "true | false"
    values = " | ".join(knob.choices) if knob.kind == "choice" else values
    return f"{knob.key:28} off {json.dumps(knob.off):12} {values}\n{'':32} {knob.meaning} ({knob.source})"


def preset_line(name: str, preset: Preset) -> str:
    """Name, title and source of one preset, with what limits it."""
    limits = [
        *(["inert with one update per rollout batch"] if preset.inert_on_policy else []),
        *([f"not in verl {preset.missing_in}"] if preset.missing_in else []),
    ]
    return f"{name:22} {preset.title} ({preset.source}){'; ' if limits else ''}{'; '.join(limits)}"


def preset_page(name: str, preset: Preset) -> str:
    """Everything about one preset: formula, where it acts, limits, and its knobs with defaults and ranges."""
    lines = [
        f"{name}: {preset.title} ({preset.source})",
        f"  formula   {preset.formula}",
        f"  acts on   {preset.acts}",
        f"  inert     {'with one update per rollout batch' if preset.inert_on_policy else 'never'}",
        f"  not in    {'verl ' + preset.missing_in if preset.missing_in else '-'}",
    ]
    lines += [f"  note      {preset.note}"] if preset.note else []
    lines.append(f"  settings  {json.dumps(dict(preset.settings))}")
    lines += ["  and       schedule.steps, the number of rollout batches of the run"] if preset.needs_schedule else []
    related = _related_knobs(preset)
    return "\n".join([*lines, *(["", "its knobs:"] if related else []), *map(knob_line, related)])


def _related_knobs(preset: Preset) -> list[Knob]:
    """The knobs a preset sets, and those that tune what it turns on."""
    words = {key.split(".")[0] for key in preset.settings} | {str(value) for value in preset.settings.values()}
    words |= {"target"} if "control" in words or words & {"stare", "entropic"} else set()
    words |= {"kl_cov"} if "sent" in words else set()
    words |= {"band"} if "sign_gate" in words else set()
    return [knob for knob in knobs() if knob.key in preset.settings or knob.key.split(".")[0] in words]


def _configuration(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.preset is not None:
        if arguments.preset not in PRESETS:
            raise OverlayError(f"preset {arguments.preset!r} is unknown; known are {', '.join(PRESETS)}")
        preset = PRESETS[arguments.preset].complete(arguments.steps)
        return full_configuration(parse_configuration(preset, f"preset {arguments.preset}"))
    return full_configuration(read_configuration_text(arguments.set, "the argument of --set"))


def _show(subject: str) -> int:
    if subject in PRESETS:
        print(preset_page(subject, PRESETS[subject]))
        return 0
    path = Path(subject)
    if not path.exists():
        raise OverlayError(f"{subject!r} is neither a file nor a preset; presets are {', '.join(PRESETS)}")
    installed = is_installed(path)
    print(json.dumps(read_configuration(path), indent=2) if installed else f"{path} holds no overlay")
    return 0 if installed else 1


def _check(path: Path, python: str) -> int:
    problems = check(path, python)
    print("\n".join(problems) if problems else f"{path}: the overlay is in force")
    return 1 if problems else 0


def _install(arguments: argparse.Namespace) -> int:
    if arguments.force and arguments.backup is None:
        raise OverlayError("--force replaces an edited file; name a folder for the edited one with --backup DIR")
    report = install(arguments.core_algos, _configuration(arguments), arguments.backup, arguments.force)
    print(f"{report.path}: {'installed' if report.changed else 'already installed'}, id {report.configuration_id}")
    return 0


def methods_page() -> str:
    """The page docs/methods.md: one row per preset."""
    rows = [
        "# Methods",
        "",
        "Written by `python -m verl_overlay list --markdown` from `verl_overlay/presets.py`; edit that file.",
        "",
        "A preset is a point in the space of the overlay's knobs, named after the paper it comes from. r is the ratio of",
        "new to old probability of a token, A its advantage, H the mean entropy in nats, N the number of response tokens.",
        "*Inert on-policy*: does nothing while each rollout batch is used for one update, as r is then exactly 1.",
        "`python -m verl_overlay show PRESET` prints a preset's knobs with their ranges.",
        "",
        "| preset | method | source | formula | acts on | inert on-policy | not in verl | note |",
        "|---|---|---|---|---|---|---|---|",
        *(_methods_row(name, preset) for name, preset in PRESETS.items()),
    ]
    return "\n".join(rows) + "\n"


def _methods_row(name: str, preset: Preset) -> str:
    inert = "yes" if preset.inert_on_policy else ""
    note = "; ".join([*(["needs `schedule.steps`"] if preset.needs_schedule else []), *filter(None, [preset.note])])
    cells = (
        f"`{name}`",
        preset.title,
        _linked(preset.source),
        preset.formula,
        preset.acts,
        inert,
        preset.missing_in,
        note,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _linked(source: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", source)


def _list(markdown: bool) -> int:
    if markdown:
        print(methods_page(), end="")
        return 0
    print("presets (show PRESET for its formula and knobs):")
    print("\n".join(preset_line(name, preset) for name, preset in PRESETS.items()))
    print("\nknobs:")
    print("\n".join(knob_line(knob) for knob in knobs()))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m verl_overlay", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="every preset and every knob")
    listing.add_argument("--markdown", action="store_true", help="the table of presets, as in docs/methods.md")
    show = verbs.add_parser("show", help="a preset, or what is baked into a core_algos.py")
    show.add_argument("subject", metavar="PRESET|CORE_ALGOS_PY")
    for verb, text in (
        ("install", "append the block, or replace the one that is there"),
        ("check", "prove that the block acts"),
        ("revert", "restore the bytes from before"),
    ):
        sub = verbs.add_parser(verb, help=text)
        sub.add_argument("core_algos", type=Path, metavar="CORE_ALGOS_PY")
        if verb == "install":
            source = sub.add_mutually_exclusive_group()
            source.add_argument("--preset", help="bake a preset in")
            source.add_argument("--set", default="{}", metavar="JSON", help="bake a JSON object of knobs in")
            sub.add_argument("--steps", type=float, default=0.0, help="rollout batches of the run, for schedules")
            sub.add_argument("--backup", type=Path, metavar="DIR", help="keep the original bytes there")
            sub.add_argument("--force", action="store_true", help="also when the block was edited; needs --backup")
        if verb == "check":
            sub.add_argument("--python", default=sys.executable, help="the interpreter that runs the training")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status: 0 done, 1 the file is at fault; usage errors exit with 2."""
    chosen = build_parser().parse_args(arguments)
    try:
        status = _carry_out(chosen)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except OverlayError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(
            f"error: standard output cannot be written: {error.strerror}; give it a place with space", file=sys.stderr
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left unwritten must not fail again at exit
    return 1


def _carry_out(chosen: argparse.Namespace) -> int:
    if chosen.verb == "list":
        return _list(chosen.markdown)
    if chosen.verb == "show":
        return _show(chosen.subject)
    if chosen.verb == "check":
        return _check(chosen.core_algos, chosen.python)
    if chosen.verb == "install":
        return _install(chosen)
    print(f"{chosen.core_algos}: {'reverted' if revert(chosen.core_algos) else 'held no overlay'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
