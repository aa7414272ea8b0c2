"""Every way to end a run in each of its phases, and what became of it.

    python tests/chaos/kill_matrix.py            # all cells, one run per row; prints a table
    python tests/chaos/kill_matrix.py --rows "Ctrl-C once" --phases merge publish

A row is one run that is hit in one phase after the other and resumed wherever it stopped. Trainer, merger and inference wait
in the phase to be hit; a publication is paused by SIGSTOP while its files are being copied. Exit code 1 when a cell is not
as it must be or a row's run ends with anything lost, repeated, left over or invalid.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from arena import TIMEOUT_S, Run, build, faults, settings, wait_until

PHASES = ("start-up", "step", "checkpoint", "validation", "merge", "inference", "publish")
IN_TRAINER = PHASES[:4]
PUBLISHING = ".math_results_logits.pt.publishing"
MOST_EXIT_S, MOST_TWICE_S = 30.0, 10.0
OOM_LINE = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"


def interrupt(run: Run) -> None:
    """Ctrl-C as a terminal sends it: to the whole process group."""
    assert run.driver is not None
    os.killpg(run.driver.pid, signal.SIGINT)


def interrupt_twice(run: Run) -> None:
    interrupt(run)
    time.sleep(0.5)
    assert run.driver is not None
    if run.driver.poll() is None:
        interrupt(run)


def send(number: int) -> Callable[[Run], None]:
    def hit(run: Run) -> None:
        assert run.driver is not None
        run.driver.send_signal(number)

    return hit


def kill_actor(run: Run) -> None:
    """The Ray worker of the trial that trains; between two calls it has another title."""
    victims: list[int] = []

    def is_found() -> bool:
        victims[:] = pids_of(run, "worker")
        return bool(victims)

    wait_until(is_found)
    os.kill(victims[0], signal.SIGKILL)


def kill_for_memory(run: Run) -> None:
    """As the kernel does, after Ray has said so in the log."""
    (pid,) = pids_of(run, "trainer") or [pid for pid in pids_of(run, "stage") if is_python(pid)]
    with open(f"/proc/{pid}/fd/2", "a") as log:
        log.write(OOM_LINE)
    os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Row:
    """A way to end a run."""

    hit: Callable[[Run], None]
    exit_codes: tuple[int, ...]
    """Of the driver; () where it must go on."""
    phases: tuple[str, ...] = PHASES
    most_s: float = MOST_EXIT_S


ROWS = {
    "Ctrl-C once": Row(interrupt, (130,)),
    "Ctrl-C twice": Row(interrupt_twice, (130, -signal.SIGINT), most_s=MOST_TWICE_S),  # a shell tells both as 130
    "SIGTERM": Row(send(signal.SIGTERM), (130,)),
    "SIGKILL": Row(send(signal.SIGKILL), (-signal.SIGKILL,)),
    "actor kill": Row(kill_actor, (), IN_TRAINER),
    "OOM kill": Row(kill_for_memory, (), PHASES[:-1]),
}


def run_row(folder: Path, name: str, phases: list[str]) -> dict[str, str]:
    """Hit one run in these phases; phase → what happened, with a leading ! where it must not."""
    row = ROWS[name]
    return run_chain(folder, name, [(phase, row) for phase in phases if phase in row.phases])


def run_chain(folder: Path, name: str, hits: list[tuple[str, Row]]) -> dict[str, str]:
    """Hit one run in each of these phases, in the order of PHASES; phase → what happened, at last under "end"."""
    markers = build(folder) / "held"
    markers.mkdir()
    for phase in PHASES:
        if phase not in [hit for hit, _ in hits]:
            (markers / phase).touch()
    behaviour = {"hold": str(markers), "step_s": 0.02, "tokens": 20000}
    options = (*settings(folder, 5), "search.concurrent=1", "search.failures_in_a_row=9")
    run = Run(folder, name.replace(" ", "-"), behaviour, options)
    run.start()
    try:
        told = {phase: hit_in_phase(run, markers, phase, row) for phase, row in hits}
        resumes = run.finish()
    finally:
        run.abandon()
    found = dict(faults(run))
    left = run.wait_for_silence()
    told["end"] = (
        f"{'!' if found or left else ''}valid submission after {resumes} more resumes {found or ''} {left or ''}"
    )
    return told


def hit_in_phase(run: Run, markers: Path, phase: str, row: Row) -> str:
    """Wait for the phase, hit, and resume if that ended the driver."""
    assert run.driver is not None
    if phase == "publish":
        pause_in_publication(run)
    else:
        wait_until(lambda: (markers / phase).exists() or run.driver.poll() is not None, TIMEOUT_S)  # type: ignore[union-attr]
        if not (markers / phase).exists():
            return f"! the driver ended before: {run.output[-300:]}"
    started = time.monotonic()
    row.hit(run)
    if phase == "publish":
        run.driver.send_signal(signal.SIGCONT)
    if not row.exit_codes:
        time.sleep(1.0)
        code = run.driver.poll()
        return "goes on" if code is None else f"! exit {code}"
    code = run.wait()
    seconds = time.monotonic() - started
    left = run.wait_for_silence()
    codes = (*row.exit_codes, 0) if phase == "publish" else row.exit_codes
    is_wrong = code not in codes or seconds > row.most_s or bool(left) or "Traceback" in run.output
    if code != 0:
        run.resume()
    return f"{'!' if is_wrong else ''}exit {code} in {seconds:.1f} s{f', left: {left}' if left else ''}"


def pause_in_publication(run: Run) -> None:
    """Stop the driver while it copies the files of the second publication to data/outputs/."""
    assert run.driver is not None
    wait_until(lambda: run.count("stage_done", stage="full_run") == 1 or run.driver.poll() is not None, TIMEOUT_S)  # type: ignore[union-attr]
    file = run.folder / "workspace" / "data" / "outputs" / PUBLISHING
    deadline = time.monotonic() + TIMEOUT_S
    while not file.exists():
        assert time.monotonic() < deadline and run.driver.poll() is None, "no publication was seen"
        time.sleep(0.0005)
    run.driver.send_signal(signal.SIGSTOP)


def pids_of(run: Run, role: str) -> list[int]:
    return [pid for pid, its_role in run.processes().items() if its_role == role]


def is_python(pid: int) -> bool:
    return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]


def print_table(told: dict[str, dict[str, str]], phases: list[str]) -> None:
    """Markdown: a line per row, a column per phase."""
    columns = [*phases, "end"]
    print("| hit | " + " | ".join(columns) + " |\n|---" * 1 + "|---" * len(columns) + "|")
    for name, cells in told.items():
        print(f"| {name} | " + " | ".join(cells.get(column, "–") for column in columns) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    options = parser.parse_args()
    started = time.monotonic()
    told = {}
    for name in options.rows:
        told[name] = run_row(Path(tempfile.mkdtemp(prefix="matrix-")), name, options.phases)
        print(name, told[name], file=sys.stderr, flush=True)
    print_table(told, options.phases)
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(cell.startswith("!") for cells in told.values() for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
