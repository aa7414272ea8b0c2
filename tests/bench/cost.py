"""What the overlay's loss costs beside verl's own: `python tests/bench/cost.py [ARM …]`.

One micro-batch of 8 responses with up to 4096 tokens, float32, one thread. Measured is the loss function alone, forward
and backward down to the log-probabilities: in training, the model and the log-softmax over the vocabulary come on top
and make the difference smaller.

Time: CPU time of the process. In every round each arm runs right after verl's `compute_policy_loss_vanilla`; the ratio is
the median over rounds of the ratio within a round, so that a busy machine slows both.
Memory: peak of the tensor allocations made during forward and backward, the inputs not counted, from the allocator's
events in torch's profiler: exact and repeatable, unlike the resident size of the process.
Limits: 1.10 for arms that select tokens without sorting, 1.25 for those that sort (seen in the operators that ran).
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

from learner import Learner, actor_configuration, read_arms

ROWS, TOKENS = 8, 4096
STEPS = 1000
"""Rollout batches of a run, for the schedules."""
LIMIT, LIMIT_WITH_SORT = 1.10, 1.25
SORTS = {"aten::sort", "aten::argsort", "aten::topk", "aten::kthvalue", "aten::quantile", "aten::median"}

Step = Callable[[], None]


@dataclass(frozen=True)
class Cost:
    """What one arm costs, as multiples of verl's loss."""

    arm: str
    sorts: bool
    milliseconds: float
    time_ratio: float
    mebibytes: float
    memory_ratio: float

    @property
    def limit(self) -> float:
        return LIMIT_WITH_SORT if self.sorts else LIMIT

    @property
    def is_within(self) -> bool:
        return max(self.time_ratio, self.memory_ratio) <= self.limit


def make_batch(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Old and new log-probabilities, advantages (one group of 8, half of it right) and mask, each (ROWS, TOKENS).

    The mean surprisal is 0.12 nats: most tokens are certain, and the parts that wait for a low entropy are at work.
    """
    generator = torch.Generator().manual_seed(seed)
    old = -2.0 * torch.rand(ROWS, TOKENS, generator=generator) ** 15
    new = (old + 0.1 * torch.randn(ROWS, TOKENS, generator=generator)).clamp(max=0.0)
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (ROWS,), generator=generator)
    mask = torch.arange(TOKENS) < lengths[:, None]
    signs = torch.where(torch.arange(ROWS) % 2 == 0, 1.0, -1.0)
    return old, new.requires_grad_(), 0.935 * signs[:, None] * mask, mask


def vanilla_step() -> Step:
    """Forward and backward of verl's own loss."""
    old, new, advantages, mask = make_batch()
    actor = actor_configuration(mask)

    def step() -> None:
        compute_policy_loss_vanilla(old, new, advantages, mask, "token-mean", actor)[0].backward()
        new.grad = None

    return step


def overlay_step(learner: Learner) -> Step:
    """Forward and backward of the overlay's loss."""
    old, new, advantages, mask = make_batch()
    actor = actor_configuration(mask)

    def step() -> None:
        learner.loss(old, new, advantages, mask, actor)[0].backward()
        new.grad = None

    return step


def seconds_of(step: Step) -> float:
    """CPU time of one step."""
    started = time.process_time_ns()
    step()
    return (time.process_time_ns() - started) / 1e9


def peak_of(step: Step) -> tuple[int, set[str]]:
    """Largest sum of living tensor allocations made within a step, bytes; and the names of the operators that ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    living = peak = 0
    for event in events:
        if event.name() == "[memory]":
            living += event.nbytes()
            peak = max(peak, living)
    return peak, {event.name() for event in events}


def measure(steps: dict[str, Step], rounds: int) -> list[Cost]:
    """The cost of each arm, all rounds interleaved with verl's own loss."""
    vanilla = vanilla_step()
    for step in (vanilla, *steps.values()):
        for _ in range(5):
            step()
    gc.disable()
    seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in steps}
    for number in range(rounds):
        for arm, step in steps.items():
            if number % 2:  # neither side is always the first
                mine, base = seconds_of(step), seconds_of(vanilla)
            else:
                base, mine = seconds_of(vanilla), seconds_of(step)
            seconds[arm].append((mine, base))
    gc.enable()
    vanilla_peak, _ = peak_of(vanilla)
    return [cost_of(arm, seconds[arm], peak_of(step), vanilla_peak) for arm, step in steps.items()]


def cost_of(arm: str, seconds: list[tuple[float, float]], peak: tuple[int, set[str]], vanilla_peak: int) -> Cost:
    """Put one arm's measurements together."""
    return Cost(
        arm=arm,
        sorts=bool(peak[1] & SORTS),
        milliseconds=1e3 * statistics.median(mine for mine, _ in seconds),
        time_ratio=statistics.median(mine / base for mine, base in seconds),
        mebibytes=peak[0] / 2**20,
        memory_ratio=peak[0] / vanilla_peak,
    )


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("arms", nargs="*", metavar="ARM", help="preset, or NAME={...}; every preset when none is given")
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = {arm: overlay_step(Learner(configuration)) for arm, configuration in read_arms(args.arms, STEPS).items()}
    costs = measure({"(verl itself)": vanilla_step(), **steps}, args.rounds)
    print(f"| arm | sorts | ms | time / verl | MiB | memory / verl | limit | within |\n|{'---|' * 8}")
    for cost in costs:
        time_, memory = (
            f"{cost.milliseconds:.2f} | {cost.time_ratio:.2f}",
            f"{cost.mebibytes:.2f} | {cost.memory_ratio:.2f}",
        )
        verdict = "yes" if cost.is_within else "**no**"
        print(f"| {cost.arm} | {'yes' if cost.sorts else 'no'} | {time_} | {memory} | {cost.limit:.2f} | {verdict} |")


if __name__ == "__main__":
    main()
