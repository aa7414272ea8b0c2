"""Real trainings on the embedded workspace: `python tests/bench/real_training.py FOLDER [ARM …] --seeds 3`.

verl's own trainer on the CPU, run by the project's own runner, every arm and seed for the whole schedule of train.sh
without checkpoints. Each run is written to FOLDER/results.jsonl as it ends; started again, finished runs of the same
overlay, configuration and seed are not repeated. FOLDER also keeps the workspace and each run's log.

What a seed reaches: the order of the prompts (`data.seed`), the answers (`rollout.seed`) and how they fall into
mini-batches (`actor.data_loader_seed`). All runs start from the same base model.
"""

import argparse
import json
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent.objective import EntropyBand, entropy_score
from agent.workspace import Workspace
from learner import Configuration, read_arms
from tables import mean_and_error, print_table
from trials.embedded.build import build_workspace
from trials.runner import ENTROPY_WINDOW_STEPS, Attempt, Ended, TrialSpec, read_history, validations
from verl_overlay import install

VALIDATE_EVERY = 6
TITLES = ["arm", "runs", "dev accuracy", "best dev accuracy", "H / H0", "area under H (nats × steps)", "score"]

Result = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training to do."""

    arm: str
    configuration: Configuration
    seed: int
    overlay: str
    """sha256 of the core_algos.py that trains."""

    @property
    def name(self) -> str:
        return f"{self.arm.replace(':', '_')}_{self.seed}"

    def matches(self, result: Result) -> bool:
        """Whether a result is this run's."""
        known = (result["arm"], result["configuration"], result["seed"], result["overlay"])
        return known == (self.arm, self.configuration, self.seed, self.overlay)


class Bench:
    """The folder of a comparison."""

    def __init__(self, folder: Path) -> None:
        """Build the workspace unless it is there, and install the overlay, everything off."""
        self.folder = folder.absolute()
        root = self.folder / "workspace"
        self.workspace = Workspace(root if root.exists() else build_workspace(root))
        self.overlay = install.install(self.workspace.core_algos, {}, self.folder / "original").installed_sha256
        self.stop_file = self.folder / "stop"
        self.stop_file.unlink(missing_ok=True)
        self._lock = threading.Lock()

    @property
    def total_steps(self) -> int:
        return self.workspace.total_steps

    def results(self) -> list[Result]:
        """What is in results.jsonl."""
        try:
            lines = (self.folder / "results.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def missing(self, arms: dict[str, Configuration], seeds: int) -> list[Run]:
        """The runs that have not been completed yet, all arms of a seed before the next seed."""
        wanted = [Run(arm, arms[arm], seed, self.overlay) for seed in range(1, seeds + 1) for arm in arms]
        completed = [result for result in self.results() if result["outcome"] == "completed"]
        return [run for run in wanted if not any(run.matches(result) for result in completed)]

    def train(self, run: Run) -> Result:
        """Do one run and append its result."""
        attempt = Attempt(self._spec(run))
        try:
            ended = next(event for event in attempt.events() if isinstance(event, Ended))
        finally:
            attempt.close()
        result = {"arm": run.arm, "configuration": run.configuration, "seed": run.seed, "overlay": run.overlay}
        result |= {"outcome": ended.outcome, "reason": ended.reason, "seconds": round(ended.seconds, 1)}
        result |= self._curves(run)
        with self._lock, (self.folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        return result

    def _spec(self, run: Run) -> TrialSpec:
        folder = self._run_folder(run)
        number = 1 + len(list(folder.glob("attempt_*")))
        (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run that did not end
        script = self.workspace.script.render(
            {
                "data.seed": run.seed,
                "actor_rollout_ref.rollout.seed": run.seed,
                "actor_rollout_ref.actor.data_loader_seed": run.seed,
                "trainer.test_freq": VALIDATE_EVERY,
                "trainer.save_freq": -1,
            }
        )
        return TrialSpec(
            trial=run.name,
            attempt=number,
            folder=str(folder),
            script=script,
            script_path=str(self.workspace.scripts / f"train_bench_{run.name}.sh"),
            cwd=str(folder),
            configuration=run.configuration,
            configuration_id=install.configuration_identity(run.configuration),
            needs_advantage=install.acts_on_advantage(run.configuration),
            stop_step=None,
            total_steps=self.total_steps,
            dev_rows=self.workspace.dev_rows(),
            run_tag=str(self.folder),
            environment={"OMP_NUM_THREADS": "1"},
            stop_file=str(self.stop_file),
        )

    def _run_folder(self, run: Run) -> Path:
        folder = self.folder / "runs" / run.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _curves(self, run: Run) -> dict[str, list[list[float | None]]]:
        """[step, dev accuracy] of every validation and [step, nats] of every training step."""
        history = read_history(self._run_folder(run))
        dev = [[seen.step, seen.accuracy] for seen in validations(history, self.workspace.dev_rows())]
        entropy = [[seen.step, seen.entropy] for seen in history if seen.is_training_step]
        return {"dev": dev, "entropy": entropy}


def train_all(bench: Bench, runs: list[Run], concurrent: int) -> Iterator[Result]:
    """Do the runs, `concurrent` at a time; Ctrl-C ends those that are running and keeps the others for the next start."""
    with ThreadPoolExecutor(concurrent) as pool:
        futures = [pool.submit(bench.train, run) for run in runs]
        try:
            yield from (future.result() for future in as_completed(futures))
        except KeyboardInterrupt:
            for future in futures:
                future.cancel()
            bench.stop_file.touch()
            raise SystemExit(130) from None


def table(results: list[Result], arms: dict[str, Configuration], overlay: str) -> list[list[str]]:
    """One row per arm over its completed runs with this overlay; H0 is the mean entropy of all runs' first step."""
    usable = [result for result in results if result["outcome"] == "completed" and result["overlay"] == overlay]
    usable = [result for result in usable if arms.get(result["arm"]) == result["configuration"]]
    if not usable:
        return []
    initial = statistics.fmean(result["entropy"][0][1] for result in usable)
    rows = []
    for arm in arms:
        own = [numbers_of(result, initial) for result in usable if result["arm"] == arm]
        if own:
            rows.append([arm, str(len(own)), *(mean_and_error(values) for values in zip(*own, strict=True))])
    return rows


def numbers_of(result: Result, initial_entropy: float) -> tuple[float, ...]:
    """Final and best dev accuracy, H / H0 over the last steps, area under the entropy curve by trapezoids, and the
    objective of the final policy: dev accuracy × entropy score."""
    accuracies = [accuracy for _, accuracy in result["dev"]]
    entropies = [entropy for _, entropy in result["entropy"]]
    ratio = statistics.fmean(entropies[-ENTROPY_WINDOW_STEPS:]) / initial_entropy
    score = accuracies[-1] * entropy_score(ratio, EntropyBand())
    return accuracies[-1], max(accuracies), ratio, float(np.trapezoid(entropies)), score


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "arms", nargs="*", metavar="ARM", help="preset, space:PRESET or NAME={...}; default: all presets"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--concurrent", type=int, default=1)
    args = parser.parse_args()
    bench = Bench(args.folder)
    arms = read_arms(args.arms, bench.total_steps)
    runs = bench.missing(arms, args.seeds)
    print(f"{len(runs)} runs to do", flush=True)
    for result in train_all(bench, runs, args.concurrent):
        print(f"{result['arm']} seed {result['seed']}: {result['outcome']} in {result['seconds']} s", flush=True)
        if result["outcome"] != "completed":
            print(f"  {result['reason']}", flush=True)
    print_table(TITLES, table(bench.results(), arms, bench.overlay))


if __name__ == "__main__":
    main()
