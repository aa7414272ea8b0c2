"""Kill anything of small searches at random moments, resume until they are finished, and count what must not be.

    python tests/chaos/random_kills.py --kills 100

Victims: the driver, a trainer, its guard, a Ray worker, Ray's own raylet or GCS (once there are workers: a Ray that cannot
start takes its own half minute to say so). Moments and victims follow from `--seed`, as far as a process of that role is
alive then. Exit code 1 when any count is not 0.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from agent.ledger import RunState
from arena import ORPHANS_S, Run, build, faults, settings

ROLES = ("driver", "trainer", "guard", "worker", "ray")
SEEDS = 2
"""So many undisturbed runs are made for comparison."""
MEAN_PAUSE_S = 1.5
COUNTED = (
    "lost finished trials", "repeated finished trials", "orphans", "invalid ledgers", "different trials",
    "leftover scripts", "leftover files", "invalid submissions",
)  # fmt: skip


class Killer:
    """Kills up to a number of processes, each role about equally often."""

    def __init__(self, kills: int, seed: int) -> None:
        self.left = kills
        self.killed: Counter[str] = Counter()
        self.orphans = 0
        self._random = random.Random(seed)

    def torment(self, run: Run) -> None:
        """Start a run and kill in it until it is finished."""
        run.start()
        while True:
            self._pause(run)
            assert run.driver is not None
            code = run.driver.poll()
            if code is None and self.left:
                self._kill_one(run)
            elif code is None:
                run.wait()
            elif code == 0:
                break
            else:
                self._after_a_death(run)
                run.resume() if run.events() else run.start()
        self._count_orphans(run)

    def _pause(self, run: Run) -> None:
        deadline = time.monotonic() + self._random.expovariate(1 / MEAN_PAUSE_S)
        assert run.driver is not None
        while time.monotonic() < deadline and run.driver.poll() is None:
            time.sleep(0.05)

    def _kill_one(self, run: Run) -> None:
        alive = {pid: role for pid, role in sorted(run.processes().items()) if role in ROLES}
        if "worker" not in alive.values():
            alive = {pid: role for pid, role in alive.items() if role != "ray"}
        if not alive or not run.events():
            return
        role = min(sorted(set(alive.values())), key=lambda role: (self.killed[role], self._random.random()))
        if self._random.random() < 0.5:  # else the driver, which is always there, would be the only victim early on
            role = self._random.choice(sorted(set(alive.values())))
        if role == "driver" and self.killed["driver"] > 1 + min(self.killed[other] for other in ROLES):
            return
        pid = self._random.choice([pid for pid, its_role in alive.items() if its_role == role])
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.killed[role] += 1
            self.left -= 1
            print(f"{time.strftime('%H:%M:%S')} {run.name}: {role} {pid} after {run.events()[-1]['event']}", flush=True)

    def _after_a_death(self, run: Run) -> None:
        """Half the time resume at once, into what is still dying."""
        if self._random.random() < 0.5:
            self._count_orphans(run)

    def _count_orphans(self, run: Run) -> None:
        left = run.wait_for_silence()
        if left:
            print(f"{run.name}: left after {ORPHANS_S:.0f} s: {left}", flush=True)
        self.orphans += len(left)


def undisturbed(folder: Path, trials: int, seed: int) -> RunState:
    """The run that the disturbed ones are compared with."""
    run = Run(folder, f"whole-{seed}", settings=settings(folder, trials, seed))
    run.start()
    assert run.wait() == 0, run.output
    return run.state()


def main(kills: int, seed: int, trials: int, folder: Path) -> int:
    """Returns how much was found that must not be."""
    started = time.monotonic()
    build(folder)
    references = [undisturbed(folder, trials, number) for number in range(min(SEEDS, 1 + kills // 20))]
    killer, found, runs = Killer(kills, seed), Counter[str](), 0
    while killer.left:
        number = runs % len(references)
        run = Run(folder, f"run-{runs}", {"step_s": 0.2}, settings(folder, trials, number))
        try:
            killer.torment(run)
        finally:
            run.abandon()
        runs += 1
        of_run = faults(run, references[number])
        if of_run:
            print(f"{run.name}: {dict(of_run)}", flush=True)
        found += of_run
    found["orphans"] = killer.orphans
    print(f"{kills} kills in {runs} runs of {trials} trials: {dict(killer.killed)}, {time.monotonic() - started:.0f} s")
    for name in COUNTED:
        print(f"{found[name]:4d} {name}")
    return found.total()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=6, help="search trials of each run")
    parser.add_argument("--folder", type=Path, help="where to work; a new temporary folder by default")
    options = parser.parse_args()
    chosen = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    sys.exit(min(1, main(options.kills, options.seed, options.trials, chosen)))
