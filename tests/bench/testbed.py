"""A GRPO run in one process, in seconds: does a loss keep the policy's entropy, and what does it learn?

    python tests/bench/testbed.py --base ~/.cache/grpo-tuning-agent/testbed grpo clip_higher 'mine={"clip_high": 0.4}'

The overlay's own advantage and loss functions train a tiny network on the task of `warm_start.py`: 32 prompts × 8 answers
per step at temperature 1, four mini-batches of 64 answers, AdamW. The same seed gives the same numbers. It is a benchmark
and a source of learning curves, not a trainer: what holds here is a hypothesis elsewhere.
"""

import argparse
import json
import multiprocessing
import signal
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agent.objective import EntropyBand, entropy_score
from learner import Configuration, Learner, actor_configuration, read_arms
from tables import mean_and_error, print_table
from trials.embedded.problems import Problem
from verl_overlay.cpu.generator import SamplingParams, generate
from warm_start import (
    ANSWER_TOKENS,
    EOS,
    PAD,
    WarmStart,
    answer_log_probs,
    base_policy,
    is_right,
    new_policy,
    problems,
    prompt_of,
)  # fmt: skip

FINAL_SAMPLES = 4
COLUMNS = {
    "greedy": "greedy",
    "sampled": f"mean@{FINAL_SAMPLES}",
    "entropy_ratio": "H / H0",
    "entropy_area": "area",
    "score": "score",
}
"""Number of a run → its title in the table; area: under the entropy curve, nats × steps."""


@dataclass(frozen=True)
class Settings:
    """One run, the loss apart."""

    seed: int = 0
    steps: int = 120
    learning_rate: float = 4e-4
    prompts: int = 32
    answers: int = 8
    """Per prompt."""
    minibatch: int = 64
    """Answers per update."""
    eval_every: int = 10
    dev_problems: int = 500
    warm_start: WarmStart = field(default_factory=WarmStart)


@dataclass(frozen=True)
class Rollouts:
    """Answers to a list of problems, several each, in order; W is the longest answer's length, V the vocabulary."""

    sequences: torch.Tensor
    """Prompt and answer tokens, (B, 6 + W)."""
    mask: torch.Tensor
    """True on answer tokens, (B, W)."""
    log_prob: torch.Tensor
    """Of the answer tokens, nats, (B, W)."""
    entropy: torch.Tensor
    """Exact, nats, (B, W)."""
    rewards: torch.Tensor
    """1.0 for a right answer, (B,)."""

    @property
    def mean_entropy(self) -> float:
        """Nats per answer token."""
        return float(self.entropy[self.mask].mean())


@torch.no_grad()
def roll_out(policy: PreTrainedModel, chosen: list[Problem], answers: int, temperature: float = 1.0) -> Rollouts:
    """Let the policy answer each problem `answers` times."""
    policy.eval()
    repeated = [problem for problem in chosen for _ in range(answers)]
    prompts = [prompt_of(problem) for problem in repeated]
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=temperature)
    texts = [made.token_ids for made in generate(policy, prompts, [sampling] * len(prompts), {EOS}, PAD)]
    width = max(map(len, texts))
    padded = torch.tensor([text + [PAD] * (width - len(text)) for text in texts])
    mask = torch.arange(width) < torch.tensor([[len(text)] for text in texts])
    sequences = torch.cat([torch.tensor(prompts), padded], 1)
    log_probs = answer_log_probs(policy, sequences, width)
    return Rollouts(
        sequences=sequences,
        mask=mask,
        log_prob=log_probs.gather(2, padded[..., None]).squeeze(-1),
        entropy=-(log_probs.exp() * log_probs).sum(-1),
        rewards=torch.tensor([float(is_right(*pair)) for pair in zip(repeated, texts, strict=True)]),
    )


def train_step(
    policy: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    learner: Learner,
    chosen: list[Problem],
    settings: Settings,
) -> dict[str, float]:
    """One rollout batch and its updates; returns what was seen on the way."""
    rollouts = roll_out(policy, chosen, settings.answers)
    groups = np.arange(len(rollouts.mask)) // settings.answers
    advantages = learner.advantages(rollouts.rewards, rollouts.mask, groups, rollouts.entropy)
    policy.train()
    width = rollouts.mask.shape[1]
    seen: list[dict[str, float]] = []
    for rows in torch.randperm(len(rollouts.mask)).split(settings.minibatch):
        sequences, mask = rollouts.sequences[rows], rollouts.mask[rows]
        tokens = sequences[:, -width:, None]
        log_prob = answer_log_probs(policy, sequences, width).gather(2, tokens).squeeze(-1)
        loss, metrics = learner.loss(
            rollouts.log_prob[rows], log_prob, advantages[rows], mask, actor_configuration(mask)
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        seen.append({**metrics, "grad_norm": float(norm)})
    means = {name: statistics.fmean(each[name] for each in seen) for name in seen[-1]}
    return {"reward": float(rollouts.rewards.mean()), "entropy": rollouts.mean_entropy, **means}


def run(arm: str, configuration: Configuration, settings: Settings, base: Path) -> dict[str, Any]:
    """Train one policy from the base policy; returns final numbers and curves, JSON-serialisable."""
    torch.manual_seed(settings.seed)
    policy = new_policy()
    policy.load_state_dict(torch.load(base, weights_only=True))
    dev = problems()[1][: settings.dev_problems]
    initial = roll_out(policy, dev, FINAL_SAMPLES).mean_entropy
    with TemporaryDirectory() as folder:
        steps = train(policy, Learner(configuration, Path(folder)), dev, settings)
    final = roll_out(policy, dev, FINAL_SAMPLES)
    ratio, sampled = final.mean_entropy / initial, float(final.rewards.mean())
    return {
        "arm": arm,
        "configuration": configuration,
        "settings": asdict(settings),
        "seed": settings.seed,
        "initial_entropy": initial,
        "greedy": steps[-1]["greedy"],
        "sampled": sampled,
        "entropy_ratio": ratio,
        "entropy_area": float(np.trapezoid([seen["entropy"] for seen in steps])),
        "score": sampled * entropy_score(ratio, EntropyBand()),
        "steps": steps,
    }


def train(policy: PreTrainedModel, learner: Learner, dev: list[Problem], settings: Settings) -> list[dict[str, float]]:
    """All steps, with the greedy dev accuracy now and then; returns what was seen at each."""
    optimizer = torch.optim.AdamW(policy.parameters(), settings.learning_rate, weight_decay=0.01, fused=True)
    prompts, order = problems()[0], np.random.default_rng(settings.seed)
    steps: list[dict[str, float]] = []
    for step in range(1, settings.steps + 1):
        chosen = [prompts[index] for index in order.choice(len(prompts), settings.prompts, replace=False)]
        seen = {"step": step, **train_step(policy, optimizer, learner, chosen, settings)}
        if step % settings.eval_every == 0 or step == settings.steps:
            seen["greedy"] = float(roll_out(policy, dev, 1, temperature=0.0).rewards.mean())
        steps.append(seen)
    return steps


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("arms", nargs="*", metavar="ARM", help="preset, or NAME={...}; every preset when none is given")
    parser.add_argument("--base", type=Path, required=True, help="folder that keeps the base policy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file to write the runs with their curves to, JSON lines")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the pool's exit, which ends its processes
    torch.set_num_threads(1)
    arms = read_arms(args.arms, args.steps)
    base = base_policy(args.base, WarmStart())
    seeds = [Settings(seed=seed, steps=args.steps, learning_rate=args.lr) for seed in range(args.seeds)]
    jobs = [(arm, configuration, settings, base) for settings in seeds for arm, configuration in arms.items()]
    runs: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(args.processes, torch.set_num_threads, (1,)) as pool:
        for result in pool.imap_unordered(run_job, jobs):
            runs.append(result)
            print(f"{result['arm']} seed {result['seed']}: {numbers_of(result)}", flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    print(f"\nH0 {runs[0]['initial_entropy']:.3f} nats; area in nats × steps; ± standard error of {args.seeds} seeds")
    print_table(["arm", *COLUMNS.values()], [row_of(arm, runs) for arm in arms])


def run_job(job: tuple[str, Configuration, Settings, Path]) -> dict[str, Any]:
    """`run` with its arguments in a tuple, as a pool hands them over."""
    return run(*job)


def numbers_of(result: dict[str, Any]) -> str:
    """The final numbers of one run on a line."""
    return "  ".join(f"{title} {result[name]:.3f}" for name, title in COLUMNS.items())


def row_of(arm: str, runs: list[dict[str, Any]]) -> list[str]:
    """One arm's line of the table."""
    own = [each for each in runs if each["arm"] == arm]
    return [arm, *(mean_and_error([each[name] for each in own]) for name in COLUMNS)]


if __name__ == "__main__":
    main()
