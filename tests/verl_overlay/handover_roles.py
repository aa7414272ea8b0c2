"""verl's order of calls with the overlay, one real Ray actor per role: a script, see ``test_handover.py``.

Usage: ``python handover_roles.py CORE_ALGOS_PY FOLDER RAY_FOLDER`` with that verl first on PYTHONPATH. The last line of
standard output is ``RESULT`` and a JSON object: name of a scenario -> what was seen.
"""

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ray

GUIDED = {"positive_weight": 0.0, "control.knob": "positive_weight", "target.entropy": 0.2}
EXACT_TOKENS = {"token_rule": "high_entropy", "high_entropy.share": 0.25, "token_entropy": "exact"}
BONUS = {"shaping": "entropy_advantage", "shaping.coef": 0.5, "shaping.kappa": 2.0, "token_entropy": "exact"}
MASK = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
ENTROPY = [[0.1, 0.9, 0.2, 99.0], [0.3, 0.8, 0.4, 0.5], [0.6, 99.0, 99.0, 99.0]]
REWARDS = [[0, 0, 1.0, 0], [0, 0, 0, 0.0], [0.5, 0, 0, 0]]
GROUPS = ["a", "a", "b"]
RAY_TRAINER, V1 = "verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base"


class Role:
    """A process of verl's with its own ``core_algos``."""

    def load(self, core_algos: str, values: dict[str, Any], folder: str, resumed_step: int = 0) -> None:
        """Start anew, as a process that begins with this environment."""
        os.environ.update(
            VERL_OVERLAY=json.dumps(values), VERL_OVERLAY_FOLDER=folder, VERL_OVERLAY_RESUMED_STEP=str(resumed_step)
        )
        import verl.trainer.ppo.core_algos as imported

        assert imported.__file__ == core_algos
        self.core = ModuleType(imported.__name__)
        self.core.__file__ = core_algos
        exec(compile(Path(core_algos).read_text(), core_algos, "exec"), self.core.__dict__)

    def aggregate(self, module: str, values: list[list[float]]) -> float:
        """``agg_loss`` of token entropies, called from a module of this name."""
        import torch

        space = {"__name__": module, "agg_loss": self.core.agg_loss}
        exec("def metric(values, mask):\n    return agg_loss(values, mask, 'token-mean')", space)
        return float(space["metric"](torch.tensor(values), torch.tensor(MASK)))  # type: ignore[operator]


@ray.remote
class Trainer(Role):
    """The trainer's process: entropies, then advantages."""

    def advantage(self) -> list[list[float]] | str:
        import numpy as np
        import torch

        index = np.array(GROUPS, dtype=object)
        try:
            found = self.core.compute_grpo_outcome_advantage(torch.tensor(REWARDS), torch.tensor(MASK), index)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return [[float(value) for value in row] for row in found[0]]


@ray.remote
class Worker(Role):
    """A worker's process: one remote call per rollout batch, all micro-batches inside."""

    def update_actor(self, surprisal: float, micro_batches: int = 2) -> list[dict[str, float]]:
        import torch
        from verl.workers.config import ActorConfig

        config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1)
        old, advantages = torch.full((3, 4), -surprisal), torch.tensor([[1.0], [-1.0], [1.0]]).expand(3, 4)
        shown = []
        for _ in range(micro_batches):
            leaf = old.clone().requires_grad_()
            loss, metrics = self.core.get_policy_loss_fn("vanilla")(
                old, leaf, advantages, torch.tensor(MASK).bool(), "token-mean", config
            )
            loss.backward()
            shown.append({key: value for key, value in metrics.items() if key.startswith("overlay/")})
        return shown

    def positive(self) -> float:
        return float(self.core._overlay.state.positive)


def constant(value: float) -> list[list[float]]:
    """Token entropies with this mean over response tokens."""
    return [[value if kept else 99.0 for kept in row] for row in MASK]


def hand_over(trainer: Any, worker: Any, core_algos: str, folder: str) -> dict[str, Any]:
    """Four rollout batches; an entropy is published before the worker's process begins, and for the second and fourth."""
    ray.get(trainer.load.remote(core_algos, GUIDED, folder))
    stale = ray.get(trainer.aggregate.remote(RAY_TRAINER, constant(0.9)))
    ray.get(worker.load.remote(core_algos, GUIDED, folder))
    batches = [ray.get(worker.update_actor.remote(1.0))]
    metric = ray.get(trainer.aggregate.remote(RAY_TRAINER, constant(0.5)))
    batches.append(ray.get(worker.update_actor.remote(1.0)))
    own = ray.get(worker.aggregate.remote("verl.workers.utils.losses", constant(7.0)))
    batches.append(ray.get(worker.update_actor.remote(1.0)))
    published = json.loads((Path(folder) / "entropy.json").read_text())["entropy"]
    ray.get(trainer.aggregate.remote(V1, constant(0.125)))
    batches.append(ray.get(worker.update_actor.remote(1.0)))
    aggregated = {"stale": stale, "metric": metric, "own": own, "published": published}
    return {"batches": batches, "aggregated": aggregated, "records": records_in(folder)}


def records_in(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "overlay.jsonl").read_text().splitlines()]


def resume(worker: Any, core_algos: str, folder: str) -> dict[str, Any]:
    """What a worker starts from that goes on after step 0, 2 or 3, and one with another configuration."""
    starts = {}
    for name, values, step in (
        ("0", GUIDED, 0),
        ("2", GUIDED, 2),
        ("3", GUIDED, 3),
        ("other", {**GUIDED, "target.entropy": 0.3}, 2),
    ):
        ray.get(worker.load.remote(core_algos, values, folder, step))
        starts[name] = ray.get(worker.positive.remote())
    ray.get(worker.load.remote(core_algos, GUIDED, folder, 2))
    batches = [ray.get(worker.update_actor.remote(1.0, 1))[0] for _ in range(2)]
    return {"starts": starts, "batches": batches, "records": records_in(folder)[-2:]}


def token_entropy(trainer: Any, core_algos: str, folder: str) -> dict[str, Any]:
    """The advantage with exact token entropies, in the trainers that hand them over and those that do not."""
    seen: dict[str, Any] = {}
    for name, values in (("high_entropy", EXACT_TOKENS), ("entropy_advantage", BONUS), ("plain", {})):
        ray.get(trainer.load.remote(core_algos, values, folder))
        ray.get(trainer.aggregate.remote(RAY_TRAINER, ENTROPY))
        seen[name] = ray.get(trainer.advantage.remote())
        seen[f"{name} again"] = ray.get(trainer.advantage.remote())
        ray.get(trainer.aggregate.remote(V1, ENTROPY))
        seen[f"{name} in the other trainer"] = ray.get(trainer.advantage.remote())
    return seen | {"records": records_in(folder)}


def main(core_algos: str, folder: str, ray_folder: str) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=ray_folder)
    trainer, worker = Trainer.remote(), Worker.remote()  # type: ignore[attr-defined]
    seen = {"hand over": hand_over(trainer, worker, core_algos, f"{folder}/mean")}
    seen["resume"] = resume(worker, core_algos, f"{folder}/mean")
    seen["token entropy"] = token_entropy(trainer, core_algos, f"{folder}/tokens")
    print("RESULT " + json.dumps(seen))
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
