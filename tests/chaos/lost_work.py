"""What a SIGKILL of the driver costs: steps that a log shows and the run's facts do not, and seconds until it trains again.

    python tests/chaos/lost_work.py --rounds 5

Exit code 1 when more than one step per running trial is lost, or when the first new step comes more than 10 s later than
the trainer's own start-up takes.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from arena import Run, build, logged_steps, settings, wait_until
from trials.runner import read_history

MOST_LOST, MOST_WAIT_S = 1, 10.0


def measure(run: Run) -> tuple[int, float]:
    """Kill the driver in the middle of its trials and resume: steps lost of the worst trial, seconds until a new attempt
    is launched by the resumed driver."""
    wait_until(lambda: len(training(run)) == 2 and all(logged_steps(run, trial) for trial in training(run)), 120)
    time.sleep(0.7)
    trials = training(run)
    assert run.driver is not None
    run.driver.kill()
    run.wait()
    run.wait_for_silence()
    logged = {trial: set(logged_steps(run, trial)) for trial in trials}
    started = time.time()
    attempts = len(launches(run))
    run.resume()
    wait_until(lambda: len(launches(run)) > attempts, 120)
    recorded = {trial: {m.step for m in read_history(run.path / "trials" / trial)} for trial in trials}
    return max(len(logged[trial] - recorded[trial]) for trial in trials), max(launches(run)) - started


def training(run: Run) -> list[str]:
    """Search trials that have been started and have not ended."""
    return [trial.trial for trial in run.state().search_trials if trial.outcome is None]


def launches(run: Run) -> list[float]:
    """When each attempt's script was started, seconds since the epoch."""
    records = run.path.glob("trials/*/attempt_*/process.json")
    return sorted(float(json.loads(record.read_text())["started_s"]) for record in records)


def main(rounds: int) -> int:
    folder = build(Path(tempfile.mkdtemp(prefix="lost-")))
    run = Run(folder, "run-0", {"step_s": 0.5}, settings(folder, 2 * rounds + 2))
    run.start()
    worst = 0
    for number in range(1, rounds + 1):
        lost, wait_s = measure(run)
        worst += lost > MOST_LOST or wait_s > MOST_WAIT_S
        print(
            f"kill {number}: {lost} step lines lost in a trial, next attempt {wait_s:.1f} s after `resume`", flush=True
        )
    run.finish()
    return min(worst, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    sys.exit(main(parser.parse_args().rounds))
