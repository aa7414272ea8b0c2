"""How busy does a search keep its slots? Real Ray, Tune, Optuna and processes; simulated GPUs, scripted trainers.

    python tests/bench/slots.py --gpus-per-trial 2 --trials 41        # starts a Ray with 8 GPUs that are not there
    python tests/bench/slots.py --read runs/run-1                     # the same numbers of any run's folder

A slot is busy while a training process is alive in it that the trial needs: from its start until the agent has read its last
step and ends it. What is lost for the start of workers, between two trials and for the end of processes is idle. The window
reaches from the start of the first search trial to the start of the last one: after that there is nothing to fill a slot
with. Within the busy time, what passes between the last line of the log and its reading is told, too: the agent waits a
moment whether the rest of a line follows.
"""

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from agent.ledger import Ledger  # noqa: E402
from scripted_workspace import agent_environment, build_scripted_workspace  # noqa: E402
from trials.trainable import read_place  # noqa: E402


@dataclass(frozen=True)
class Busy:
    """One attempt of a trial in its slot; seconds since the epoch."""

    slot: str
    started_s: float
    ended_s: float
    last_line_s: float
    """When the last line was written to the log; at most `ended_s`."""


@dataclass(frozen=True)
class Occupancy:
    """How busy the slots were."""

    window_s: float
    share: float
    """Busy slot-seconds of all slot-seconds in the window, 0..1."""
    ramp_s: float
    """Idle slot-seconds before a slot's first trial."""
    between_s: float
    """Idle slot-seconds between two trials of a slot."""
    gaps_s: tuple[float, ...]
    """The gaps between two trials, ascending."""
    tail_s: float
    """Idle slot-seconds after a slot's last trial."""


def measure(attempts: Sequence[Busy], slots: int) -> Occupancy:
    """Occupancy from the first start to the last start. A slot that never had a trial is idle all the time."""
    begin, end = min(a.started_s for a in attempts), max(a.started_s for a in attempts)
    rows: dict[str, list[Busy]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.started_s):
        rows.setdefault(attempt.slot, []).append(attempt)
    busy = sum(max(0.0, min(a.ended_s, end) - a.started_s) for a in attempts)
    ramp = sum(row[0].started_s - begin for row in rows.values()) + (slots - len(rows)) * (end - begin)
    gaps = [max(0.0, b.started_s - a.ended_s) for row in rows.values() for a, b in itertools.pairwise(row)]
    tail = sum(max(0.0, end - row[-1].ended_s) for row in rows.values())
    window = end - begin
    share = busy / (slots * window) if window else 1.0
    return Occupancy(window, share, ramp, sum(gaps), tuple(sorted(gaps)), tail)


def read_attempts(run: Path) -> tuple[list[Busy], int]:
    """The attempts of a run's search trials, and the number of slots it had."""
    events = Ledger(run / "ledger.jsonl").read()
    slots = next(int(event["slots"]) for event in reversed(events) if event["event"] == "slots_planned")
    found = []
    for event in events:
        if event["event"] == "trial_started" and event["kind"] == "search":
            folder = run / "trials" / event["trial"] / f"attempt_{event['attempt']}"
            place = read_place(folder)
            if place is not None and (folder / "process.json").exists():
                started = float(json.loads((folder / "process.json").read_text())["started_s"])
                line = (folder / "log").stat().st_mtime
                steps = folder.parent / "metrics.jsonl"
                read = steps.stat().st_mtime if steps.exists() else line
                found.append(Busy(f"{place.node_id[:6]}:{place.gpus}", started, max(read, line), line))
    return found, slots


def describe(attempts: Sequence[Busy], slots: int) -> str:
    """The numbers in words."""
    seen = measure(attempts, slots)
    strict = measure([replace(attempt, ended_s=attempt.last_line_s) for attempt in attempts], slots)
    gaps = seen.gaps_s or (0.0,)
    lengths = sorted(attempt.ended_s - attempt.started_s for attempt in attempts)
    total = slots * seen.window_s
    lines = [
        f"{len(attempts)} trials on {slots} slots, window {seen.window_s:.1f} s; a trial takes {lengths[0]:.1f} to "
        f"{lengths[-1]:.1f} s, median {statistics.median(lengths):.1f} s",
        f"busy: {100 * seen.share:.1f} % of {total:.0f} slot-seconds; up to the last log lines {100 * strict.share:.1f} %",
        f"idle: {100 * seen.ramp_s / total:.1f} % before a slot's first trial, {100 * seen.between_s / total:.1f} % between "
        f"trials, {100 * seen.tail_s / total:.1f} % after a slot's last trial",
        f"gap between two trials: median {statistics.median(gaps):.2f} s, largest {gaps[-1]:.2f} s",
    ]
    return "\n".join(lines)


def run_search(folder: Path, address: str, behaviour: Mapping[str, float], settings: Sequence[str]) -> Path:
    """Run the agent on a scripted workspace until its search is done; returns the run's folder."""
    build_scripted_workspace(folder / "workspace", on_gpus=True)
    overrides = [f"ray_address={address}", "workspace=workspace", *settings]
    command = [sys.executable, str(ROOT / "run_agent.py"), *(word for key in overrides for word in ("--set", key))]
    process = subprocess.Popen(command, cwd=folder, env=agent_environment(**behaviour))
    run = folder / "runs" / "run-1"
    while process.poll() is None and not _search_is_done(run):
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    return run


def _search_is_done(run: Path) -> bool:
    path = run / "ledger.jsonl"
    return path.exists() and '"stage": "search", "inputs"' in path.read_text()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, metavar="RUN", help="print the numbers of a run that is there")
    parser.add_argument("--gpus-per-trial", type=int, default=2)
    parser.add_argument("--trials", type=int, default=41)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for the run; by default a temporary one")
    parser.add_argument("--step-s", type=float, default=1.0, help="a trial has at most eight steps")
    options = parser.parse_args()
    if options.read:
        print(describe(*read_attempts(options.read)))
        return
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 16, "num_gpus": 8, "include_dashboard": False, "object_store_memory": 80 * 2**20},
    )
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep or Path(temporary)
            settings = (f"search.gpus_per_trial={options.gpus_per_trial}", f"search.trials={options.trials}")
            run = run_search(folder, cluster.address, {"step_s": options.step_s, "startup_s": 1.0}, settings)
            print(describe(*read_attempts(run)))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
