"""``python -m verl_overlay list`` prints every knob, ``show FILE`` what is baked into a core_algos.py."""

import json
import sys
from pathlib import Path

from verl_overlay.configuration import Knob, OverlayError, knobs
from verl_overlay.install import is_installed, read_configuration

USAGE = "usage: python -m verl_overlay list | show CORE_ALGOS_PY"


def knob_line(knob: Knob) -> str:
    """Name, off value, range, meaning and source of one knob."""
    values = f"[{knob.low:g}, {knob.high:g}]" if "number" in knob.kind else "true | false"
    values = " | ".join(knob.choices) if knob.kind == "choice" else values
    off = json.dumps(knob.off)
    return f"{knob.key:32} off {off:8} {values:34} {knob.meaning} ({knob.source})"


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status: 0 done, 1 the file is at fault, 2 usage."""
    try:
        if arguments == ["list"]:
            print("\n".join(knob_line(knob) for knob in knobs()))
            return 0
        if len(arguments) == 2 and arguments[0] == "show":
            path = Path(arguments[1])
            installed = is_installed(path)
            print(json.dumps(read_configuration(path), indent=2) if installed else f"{path} holds no overlay")
            return 0 if installed else 1
    except OverlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
