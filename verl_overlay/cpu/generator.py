"""Batched sampling from a transformers causal language model, in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GREEDY_BELOW = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How one answer is sampled; temperature 0 is greedy, top_k <= 0 and top_p 1 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True)
class Generation:
    """One answer; log_probs are of the distribution sampled from (temperature, top-k and top-p applied)."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool


class _Rows:
    """The sampling settings of the rows still being generated, as tensors."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        temperature = torch.tensor([p.temperature for p in params])
        self.greedy = temperature <= GREEDY_BELOW
        self.temperature = torch.where(self.greedy, torch.ones_like(temperature), temperature)
        self.top_k = torch.tensor([p.top_k if p.top_k > 0 else 2**31 for p in params])
        self.top_p = torch.tensor([p.top_p for p in params])
        self.limit = torch.tensor([p.max_tokens for p in params])

    def select(self, index: Tensor) -> None:
        for name, value in vars(self).items():
            setattr(self, name, value[index])

    def filtered_log_probs(self, logits: Tensor) -> Tensor:
        """Log-probabilities after temperature, top-k and top-p."""
        logits = logits.float() / self.temperature[:, None]
        if bool((self.top_k < logits.shape[-1]).any()) or bool((self.top_p < 1).any()):
            ordered, order = logits.sort(-1, descending=True)
            probs = ordered.softmax(-1)
            keep = (probs.cumsum(-1) - probs) < self.top_p[:, None]
            keep &= torch.arange(logits.shape[-1]) < self.top_k[:, None]
            keep[:, 0] = True
            ordered = ordered.masked_fill(~keep, float("-inf"))
            logits = torch.empty_like(logits).scatter(-1, order, ordered)
        return logits.log_softmax(-1)

    def draw(self, log_probs: Tensor) -> Tensor:
        if bool(self.greedy.all()):
            return log_probs.argmax(-1)
        sampled = torch.multinomial(log_probs.exp(), 1).squeeze(-1)
        return torch.where(self.greedy, log_probs.argmax(-1), sampled)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, prompts flush right so that all answers start in the same column."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], dtype=torch.long)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], dtype=torch.long)
    return ids, mask


@torch.inference_mode()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    eos_ids: set[int],
    pad_id: int,
) -> list[Generation]:
    """One answer per prompt. Rows that have ended are dropped from the batch once they make up half of it."""
    count = len(prompts)
    rows, eos = _Rows(params), torch.tensor(sorted(eos_ids))
    ids, mask = left_pad(prompts, pad_id)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    steps = int(rows.limit.max())
    tokens = torch.full((count, steps), pad_id, dtype=torch.long)
    log_probs = torch.zeros((count, steps))
    length, finished = torch.zeros(count, dtype=torch.long), torch.zeros(count, dtype=torch.bool)
    alive, row, cache = torch.ones(count, dtype=torch.bool), torch.arange(count), None
    for step in range(steps):
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        cache = out.past_key_values
        log_dist = rows.filtered_log_probs(out.logits[:, -1])
        token = rows.draw(log_dist)
        target = row[alive]
        tokens[target, step] = token[alive]
        log_probs[target, step] = log_dist.gather(-1, token[:, None]).squeeze(-1)[alive]
        length[target] = step + 1
        ended = alive & torch.isin(token, eos)
        finished[row[ended]] = True
        alive = alive & ~ended & (step + 1 < rows.limit)
        left = int(alive.sum())
        if left == 0:
            break
        if left * 2 <= len(alive):
            index = alive.nonzero().squeeze(-1)
            cache.batch_select_indices(index)
            rows.select(index)
            mask, position, token = mask[index], position[index], token[index]
            row, alive = row[index], alive[index]
        ids = token[:, None]
        mask = torch.cat([mask, torch.ones((len(row), 1), dtype=torch.long)], dim=-1)
        position = position[:, -1:] + 1
    columns = zip(tokens.tolist(), log_probs.tolist(), length.tolist(), finished.tolist(), strict=True)
    return [Generation(t[:n], lp[:n], end) for t, lp, n, end in columns]
