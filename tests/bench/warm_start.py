"""The testbed's task and its base policy, small enough for seconds on one core.

The task is the embedded workspace's `last_digit` family (`trials/embedded/problems.py`): `7+5*3=` is to be answered with
steps of one of three styles and `Answer:\\boxed{6}`. Here each word is one token: a prompt has 6, an answer at most 16.
All styles are equally reliable, and a quarter of the steps are almost never shown right, so training has to explore.
The base policy is a Qwen2 network of 100,000 parameters, taught on the demonstrations: seeded, about two CPU minutes, kept
as a file.
"""

import hashlib
import json
import math
import os
import random
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel

from trials.embedded.problems import Demonstrator, Problem, demonstration, last_digit_problem
from trials.embedded.sft import build_qwen2

WORDS = ("<pad>", "<eos>", "Answer:\\boxed{", "}", "=", "+", "*", "\n", *"0123456789")
PAD, EOS, BOX, CLOSE = range(4)
TOKEN = {word: token for token, word in enumerate(WORDS)}
ANSWER_TOKENS = 16
RELIABILITY = (0.85, 0.50, 0.02)
DEMONSTRATORS = (
    Demonstrator(0.45, "{left}{operator}{right}={result}\n", RELIABILITY),
    Demonstrator(0.40, "{operator}{right}={result}\n", RELIABILITY),
    Demonstrator(0.15, "", RELIABILITY),
)
DEV_PROBLEMS = 500


@dataclass(frozen=True)
class WarmStart:
    """How the base policy is taught."""

    steps: int = 1200
    batch: int = 192
    learning_rate: float = 3e-3
    seed: int = 0


def encode(text: str) -> list[int]:
    """The tokens of a text made of the task's words."""
    return [TOKEN[word] for word in re.findall(r"Answer:\\boxed{|[^ ]", text, re.DOTALL)]


def prompt_of(problem: Problem) -> list[int]:
    """`7+5*3=`, 6 tokens."""
    first, second, third = problem.values
    return encode(f"{first}{problem.operators[0]}{second}{problem.operators[1]}{third}=")


def is_right(problem: Problem, answer: list[int]) -> bool:
    """True for an answer that ends with the only box, the right digit in it, and the end-of-sequence token."""
    return answer[-4:] == [BOX, TOKEN[str(problem.answer)], CLOSE, EOS] and answer.count(BOX) == 1


@cache
def problems() -> tuple[list[Problem], list[Problem]]:
    """(train, dev), disjoint; the same in every process."""
    rng = random.Random("testbed")
    distinct = list(dict.fromkeys(last_digit_problem(rng) for _ in range(30_000)))
    return distinct[DEV_PROBLEMS:], distinct[:DEV_PROBLEMS]


def new_policy() -> PreTrainedModel:
    """A Qwen2 with two layers and random weights."""
    return build_qwen2(len(WORDS), positions=64, eos=EOS, pad=PAD)


def answer_log_probs(policy: PreTrainedModel, sequences: torch.Tensor, width: int) -> torch.Tensor:
    """Log-probabilities of every token at the last `width` positions, nats, (B, width, vocabulary)."""
    logits = policy(input_ids=sequences[:, :-1], use_cache=False, logits_to_keep=width).logits
    return torch.log_softmax(logits, -1)


def base_policy(folder: Path, warm_start: WarmStart) -> Path:
    """The file with the base policy's weights in `folder`; made when it is not there."""
    key = hashlib.sha256(json.dumps(asdict(warm_start), sort_keys=True).encode()).hexdigest()[:12]
    path = folder / f"base-{key}.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"making the base policy {path}", flush=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(teach(warm_start).state_dict(), unfinished)
        unfinished.rename(path)
    return path


def teach(warm_start: WarmStart) -> PreTrainedModel:
    """Supervised training on fresh demonstrations of the train problems; warm-up, then cosine decay."""
    torch.manual_seed(warm_start.seed)
    rng = random.Random(warm_start.seed)
    policy, train = new_policy(), problems()[0]
    optimizer = torch.optim.AdamW(policy.parameters(), warm_start.learning_rate, betas=(0.9, 0.98), fused=True)
    for step in range(warm_start.steps):
        share = min(1.0, (step + 1) / 100) * (0.525 + 0.475 * math.cos(math.pi * step / warm_start.steps))
        for group in optimizer.param_groups:
            group["lr"] = warm_start.learning_rate * share
        loss = demonstration_loss(policy, rng.choices(train, k=warm_start.batch), rng)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return policy


def demonstration_loss(policy: PreTrainedModel, chosen: list[Problem], rng: random.Random) -> torch.Tensor:
    """Mean negative log-probability of one demonstration of each problem, nats per token."""
    answers = [[*encode(demonstration(problem, rng, DEMONSTRATORS)), EOS] for problem in chosen]
    width = max(map(len, answers))
    padded = torch.tensor([answer + [PAD] * (width - len(answer)) for answer in answers])
    sequences = torch.cat([torch.tensor([prompt_of(problem) for problem in chosen]), padded], 1)
    taken = answer_log_probs(policy, sequences, width).gather(2, padded[..., None]).squeeze(-1)
    mask = padded != PAD
    return -(taken * mask).sum() / mask.sum()
