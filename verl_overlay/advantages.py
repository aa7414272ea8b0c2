"""The parts of the advantage: one value per response from the rewards of its group, on the trainer's process.

verl's newer trainers keep one advantage per response (they broadcast the first token's), so everything that
differs between the tokens of a response acts in the policy loss. The two parts that need the exact entropy of
each token are the exception: they act here, and only in the trainers that keep token-level advantages.

Shapes and units: B responses, T positions. ``token_level_rewards`` (B, T); the reward of a response is its sum.
``response_mask`` (B, T), bool or number. ``index`` (B,) names the group (the prompt) of each response.

The source of this module becomes part of the block in verl's ``core_algos.py``.
"""

import math
from typing import Any

import numpy as np
import torch

from verl_overlay.configuration import OverlayConfiguration, OverlayError, component_sums


def group_numbers(index: Any) -> tuple[torch.Tensor, int]:
    """The group of each response as a number (B,), and how many groups there are."""
    _, numbers = np.unique(np.asarray(index).astype(str), return_inverse=True)
    return torch.as_tensor(numbers.reshape(-1)), int(numbers.max()) + 1 if numbers.size else 0


def group_mean_std(scores: torch.Tensor, groups: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sample standard deviation of each response's group, both (B,).

    As in verl, a group of one has mean 0 and standard deviation 1.

    Args:
        scores, groups: (B,).
        count: number of groups.
    """
    wide = scores.double()
    sizes = torch.bincount(groups, minlength=count).double()
    mean = torch.zeros(count, dtype=wide.dtype).index_add_(0, groups, wide) / sizes
    squares = torch.zeros(count, dtype=wide.dtype).index_add_(0, groups, (wide - mean[groups]) ** 2)
    std = (squares / (sizes - 1).clamp(min=1)).sqrt()
    alone = sizes == 1
    mean, std = mean.masked_fill(alone, 0.0), std.masked_fill(alone, 1.0)
    return mean[groups].to(scores.dtype), std[groups].to(scores.dtype)


def group_quantile(scores: torch.Tensor, groups: torch.Tensor, count: int, level: float) -> torch.Tensor:
    """QAE's baseline, arXiv 2509.22611: ``inf{x: F(x) >= K}`` of each response's group, (B,).

    That is the ``ceil(K n)``-th smallest reward; an interpolated quantile would be a reward that nobody got.
    A group of one has baseline 0, as verl's mean.

    Args:
        scores, groups: (B,).
        count: number of groups.
        level: K in (0, 1].
    """
    order = np.lexsort((scores.numpy(force=True), groups.numpy()))
    ordered = scores[torch.as_tensor(order)]
    sizes = torch.bincount(groups, minlength=count)
    starts = torch.cumsum(sizes, 0) - sizes
    ranks = torch.ceil(sizes.double() * level - 1e-9).long().clamp(min=1)
    baseline = ordered[starts + ranks - 1].masked_fill(sizes == 1, 0.0)
    return baseline[groups]


def decoded_components(scores: torch.Tensor, components: tuple[float, ...]) -> torch.Tensor:
    """The components that each reward is the sum of, (K, B): component k's value where present, else 0.

    Args:
        scores: (B,).
        components: K values whose subsets have different sums.

    Raises:
        OverlayError: a reward is the sum of no subset.
    """
    sums = torch.tensor(component_sums(components), dtype=torch.float64)
    distance, subset = (scores.double()[:, None] - sums[None]).abs().min(dim=1)
    if bool((distance > 4e-4).any()):
        value = float(scores[int(distance.argmax())])
        raise OverlayError(
            f"a reward is {value:g}, which is no sum of advantage.components {list(components)}; GDPO needs rewards "
            "that identify their components. Look at the reward function, or set advantage.components to null."
        )
    bits = torch.arange(len(components))[:, None]
    present = (subset[None] >> bits & 1).to(scores.dtype)
    return present * torch.tensor(components, dtype=scores.dtype)[:, None]


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` over response tokens, sample variance; (B, T). Below two tokens: x."""
    count = mask.sum()
    if count < 2:
        return values
    mean = (values * mask).sum() / (count + 1e-8)
    variance = (((values - mean) ** 2) * mask).sum() / (count + 1e-8) * (count / (count - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def group_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    normalise_std: bool = True,
    *,
    configuration: OverlayConfiguration,
) -> torch.Tensor:
    """GRPO's advantage, arXiv 2402.03300, with the configured baseline, normalisation and components; (B, T).

    - mean: ``(R - mean) / (std + epsilon)``; without the division it is Dr.GRPO's, arXiv 2503.20783.
    - quantile: ``(R - Q_K) / (std + epsilon)``, QAE, arXiv 2509.22611.
    - sign: ``+1`` where R > ``advantage.correct_above``, else ``-1``; with the sign weights W-REINFORCE, NSR
      and PSR, arXiv 2506.01347.
    - components: GDPO, arXiv 2601.05242: each component normalised in its group, weighted, summed, whitened
      over the tokens of the batch.

    Args:
        epsilon: added to the standard deviation.
        normalise_std: verl's ``norm_adv_by_std_in_grpo``, used unless ``advantage.std`` is on or off.

    Raises:
        OverlayError: rewards that the configured components cannot explain.
    """
    c = configuration
    scores = token_level_rewards.sum(dim=-1).float().cpu()
    groups, count = group_numbers(index)
    by_std = normalise_std if c.advantage_std == "verl" else c.advantage_std == "on"

    def normalised(values: torch.Tensor) -> torch.Tensor:
        mean, std = group_mean_std(values, groups, count)
        if c.advantage_baseline == "quantile":
            mean = group_quantile(values, groups, count, c.advantage_quantile)
        return (values - mean) / (std + epsilon) if by_std else values - mean

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.to(response_mask.device).unsqueeze(-1) * response_mask

    if c.advantage_baseline == "sign":
        return spread(torch.where(scores > c.advantage_correct_above, 1.0, -1.0))
    if c.advantage_components is None:
        return spread(normalised(scores))
    parts = decoded_components(scores, c.advantage_components)
    weights = c.advantage_component_weights or (1.0,) * len(parts)
    total = sum(weight * normalised(part) for weight, part in zip(weights, parts, strict=True))
    return whitened(spread(torch.as_tensor(total)), response_mask) * response_mask


def with_token_entropy(
    advantages: torch.Tensor, entropy: torch.Tensor, response_mask: torch.Tensor, *, configuration: OverlayConfiguration
) -> torch.Tensor:
    """The parts that see the exact entropy of each token; (B, T).

    - high_entropy, arXiv 2506.01939: ``A N / k`` on the k tokens of highest entropy among the N response tokens
      of the batch, 0 elsewhere. ``k = ceil(share N)``.
    - entropy_advantage, arXiv 2506.14758: ``A + min(coef H, |A| / kappa)``.

    Args:
        advantages, entropy: (B, T); entropy in nats.
        response_mask: (B, T).
    """
    c, mask = configuration, response_mask > 0
    if c.shaping == "entropy_advantage":
        bonus = torch.minimum(c.shaping_coef * entropy, advantages.abs() / c.shaping_kappa)
        advantages = advantages + torch.where(mask, bonus, torch.zeros_like(bonus))
    if c.token_rule == "high_entropy":
        total = int(mask.sum())
        count = max(1, math.ceil(c.high_entropy_share * total - 1e-9))
        keys = torch.where(mask, entropy, torch.full_like(entropy, -math.inf)).flatten()
        kept = torch.zeros_like(keys, dtype=torch.bool)
        kept[torch.argsort(keys, descending=True, stable=True)[:count]] = True
        advantages = torch.where(kept.view_as(mask) & mask, advantages * (total / count), torch.zeros_like(advantages))
    return advantages
