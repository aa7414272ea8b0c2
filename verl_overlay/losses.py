"""The parts of the overlay's policy loss, pure torch, and their composition.

Order of composition: sign weights -> token weights -> ratio and clip rule -> extra terms -> aggregation. Each
part has an off value; with all parts off the composed loss equals verl's ``compute_policy_loss_vanilla`` bit
for bit, in value and gradient.

Shapes and units: B sequences in the micro-batch, T response positions. ``old_log_prob``, ``log_prob`` and
``advantages`` are (B, T) floats; log-probabilities in nats at the rollout temperature; ``mask`` is (B, T)
bool, true on response tokens. Weights multiply token losses and carry no unit. Selections, means and
quantiles are local to the micro-batch, as in verl and in the authors' codes.

Numerics: half-precision inputs are computed in float32; whatever stands in masked positions (NaN, inf) is
replaced before it is used; the log-ratio is clamped to +-20 as in verl. There is one host synchronisation per
call, for the metrics; Clip-Cov needs two more, as in verl, to draw from a list of candidates.

The source of this module becomes part of the block in verl's ``core_algos.py``.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from verl_overlay.configuration import OverlayConfiguration, configuration_id
from verl_overlay.control import ControlState

LOG_RATIO_LIMIT = 20.0

Loss = tuple[torch.Tensor, dict[str, Any]]


def clean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` in float32 or wider, with 0 in masked positions; no gradient reaches those.

    Args:
        values, mask: (B, T).
    """
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return torch.where(mask, wide, torch.zeros_like(wide))


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over response tokens, a scalar; 0 when there are none. The same arithmetic as verl's.

    Args:
        values: (B, T) without NaN in response positions.
        mask: (B, T).
    """
    kept = torch.where(mask, values, torch.zeros_like(values))
    return (kept * mask).sum() / (mask.sum() + 1e-8)


def clamped_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor) -> torch.Tensor:
    """``clip(log pi - log mu, -20, 20)``, (B, T), nats."""
    return torch.clamp(log_prob - old_log_prob, min=-LOG_RATIO_LIMIT, max=LOG_RATIO_LIMIT)


def clipped_surrogate(
    advantages: torch.Tensor, ratio: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's token loss ``max(-A r, -A clip(r, 1 - low, 1 + high))``, arXiv 1707.06347.

    Args:
        advantages, ratio: (B, T).
        low, high: clip distances; unequal ones are DAPO's clip-higher, arXiv 2503.14476.

    Returns:
        The token loss and a bool of where the clipped branch is the larger, both (B, T).
    """
    free = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    return torch.maximum(free, clipped), torch.gt(clipped, free)


def dual_clip(advantages: torch.Tensor, losses: torch.Tensor, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Dual-clip PPO, arXiv 1912.09729: ``min(loss, -A c)`` where A < 0.

    Args:
        advantages, losses: (B, T).
        bound: c, a ratio above 1 (``clip_ratio_c``).

    Returns:
        The token loss and a bool of where the bound acts, both (B, T).
    """
    ceiling = -advantages * bound
    bounded = torch.min(ceiling, losses)
    return torch.where(advantages < 0, bounded, losses), torch.gt(losses, ceiling) & (advantages < 0)


def sign_weights(advantages: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
    """Weights ``positive`` where A > 0, ``negative`` where A < 0, 1 where A = 0, (B, T).

    The positive one is PAR's lambda, arXiv 2511.05993; the negative one is its mirror.
    """
    weights = torch.ones_like(advantages)
    weights = torch.where(advantages > 0, positive, weights)
    return torch.where(advantages < 0, negative, weights)


def select_top(values: torch.Tensor, group: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The ``count`` largest ``values`` within ``group``; of equal ones the earlier positions.

    Args:
        values: (B, T).
        group: (B, T) bool.
        count: scalar tensor, so that no host synchronisation is needed.

    Returns:
        (B, T) bool, a subset of ``group``.
    """
    keys = torch.where(group, values, torch.full_like(values, -math.inf)).flatten()
    order = torch.argsort(keys, descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(order.numel(), device=order.device)
    return (ranks < count).view_as(group) & group


def covariances(advantages: torch.Tensor, log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``(A - mean A)(log pi - mean log pi)``, means over response tokens, (B, T). arXiv 2505.22617."""
    fixed = log_prob.detach()
    return (advantages - masked_mean(advantages, mask)) * (fixed - masked_mean(fixed, mask))


def clip_cov_weights(
    covariance: torch.Tensor,
    clipped: torch.Tensor,
    mask: torch.Tensor,
    configuration: OverlayConfiguration,
) -> torch.Tensor:
    """Clip-Cov, arXiv 2505.22617: weight 0 on randomly drawn tokens of high covariance, 1 elsewhere, (B, T).

    Candidates have ``lower < cov < upper`` and are not already clipped; ``max(1, floor(ratio N))`` of them
    are drawn with torch's default CPU generator, exactly as verl's ``clip_cov`` loss draws them.

    Args:
        covariance: (B, T).
        clipped: (B, T) bool, where PPO's clipped branch is taken.
        mask: (B, T) bool with N response tokens.
        configuration: reads the ``clip_cov`` knobs.
    """
    c = configuration
    weights = torch.ones_like(covariance)
    within = (covariance > c.clip_cov_lower) & (covariance < c.clip_cov_upper)
    candidates = torch.nonzero(within & mask & ~clipped)
    if len(candidates) > 0:
        count = max(1, int(c.clip_cov_ratio * mask.sum().item()))
        drawn = candidates[torch.randperm(len(candidates))[:count]]
        weights[drawn[:, 0], drawn[:, 1]] = 0.0
    return weights


def kl_cov_selection(covariance: torch.Tensor, mask: torch.Tensor, ratio: float) -> torch.Tensor:
    """KL-Cov, arXiv 2505.22617: the ``max(1, floor(ratio N))`` response tokens of highest covariance.

    Args:
        covariance: (B, T).
        mask: (B, T) bool with N response tokens.
        ratio: share of tokens.

    Returns:
        (B, T) bool. The loss adds ``coef |log pi - log mu|`` there and clips nowhere.
    """
    count = torch.floor(mask.sum().double() * ratio).clamp(min=1)
    return select_top(covariance, mask, count)


def stare_weights(
    advantages: torch.Tensor,
    log_prob: torch.Tensor,
    mask: torch.Tensor,
    gate: torch.Tensor,
    amplify: float,
    damp: float,
    fraction: float,
) -> torch.Tensor:
    """STARE (variant C2), arXiv 2606.19236: weights of the most surprising tokens of each sign, (B, T).

    While the entropy is below its target: W on the ``ceil(P n+)`` tokens of highest surprisal ``-log pi``
    among the n+ tokens with A > 0, M on the ``ceil(P n-)`` among those with A < 0, 1 elsewhere. Else 1.

    Args:
        advantages, log_prob: (B, T).
        mask: (B, T) bool.
        gate: scalar bool tensor, entropy below target.
        amplify, damp, fraction: W, M, P.
    """
    surprisal = -log_prob.detach()
    weights = torch.ones_like(surprisal)
    for group, weight in ((mask & (advantages > 0), amplify), (mask & (advantages < 0), damp)):
        count = torch.ceil(group.sum().double() * fraction - 1e-9).clamp(min=1)
        weights = torch.where(select_top(surprisal, group, count) & gate, weight, weights)
    return weights


def blended_entropy(
    entropy_sum: float, entropy_weight: float, surprisal: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the bias-corrected moving average of the surprisal estimate; half-life one mini-batch.

    ``k = 2^-share``; ``sum <- k sum + (1 - k) surprisal``; ``weight <- k weight + (1 - k)``. The estimate is
    their quotient.

    Args:
        entropy_sum: nats.
        entropy_weight: 0 before the first call.
        surprisal: scalar, masked mean of ``-old_log_prob``, nats.
        share: scalar, this micro-batch's share of its mini-batch's tokens.
    """
    new = -torch.expm1(-math.log(2.0) * share)
    return (1 - new) * entropy_sum + new * surprisal, (1 - new) * entropy_weight + new


def batch_share(mask: torch.Tensor, batch_info: dict[str, Any]) -> torch.Tensor:
    """This micro-batch's share of the tokens of its mini-batch on this rank, a scalar.

    Args:
        mask: (B, T) bool.
        batch_info: verl's ``config.global_batch_info``; without ``batch_num_tokens`` the share is 1.
    """
    tokens = mask.sum().float()
    total = batch_info.get("batch_num_tokens")
    if total is None:
        return (tokens > 0).float()
    return tokens * ((batch_info.get("dp_size") or 1) / max(float(total), 1.0))


def clip_bounds(config: Any, configuration: OverlayConfiguration) -> tuple[float, float, float]:
    """(lower distance, upper distance, dual-clip bound): the overlay's where set, else verl's.

    Args:
        config: verl's actor configuration.
        configuration: reads ``clip_low`` and ``clip_high``.
    """
    low = config.clip_ratio_low if config.clip_ratio_low is not None else config.clip_ratio
    high = config.clip_ratio_high if config.clip_ratio_high is not None else config.clip_ratio
    bound = config.get("clip_ratio_c", 3.0)
    assert bound > 1.0, f"actor.clip_ratio_c is {bound}; dual-clip PPO needs a value above 1"
    return (
        low if configuration.clip_low is None else configuration.clip_low,
        high if configuration.clip_high is None else configuration.clip_high,
        bound,
    )


def composed_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: torch.Tensor | None,
    *,
    state: ControlState,
    aggregate: Callable[..., torch.Tensor],
) -> Loss:
    """All parts in order, on one micro-batch.

    The clip rule follows from ``token_rule``: dual clip for ``none`` and ``stare``; the two-sided clip alone
    for ``clip_cov``; no clip for ``kl_cov``. The latter two are the authors' losses. Sign weights act on the
    policy gradient term, not on KL-Cov's extra term.

    Args:
        old_log_prob, log_prob, advantages: (B, T).
        response_mask: (B, T), bool or number.
        loss_agg_mode: passed to ``aggregate``.
        config: verl's actor configuration.
        rollout_is_weights: (B, T) or None.
        state: configuration, weights and estimates; updated unless gradients are disabled.
        aggregate: verl's ``agg_loss``.

    Returns:
        The scalar loss, and metrics as Python floats.
    """
    c = state.configuration
    mask = response_mask > 0
    old, new, adv = clean(old_log_prob, mask), clean(log_prob, mask), clean(advantages, mask)
    batch_info: dict[str, Any] = dict(getattr(config, "global_batch_info", None) or {})
    share = batch_share(mask, batch_info)
    surprisal = masked_mean(-old.detach(), mask).float()
    entropy_sum, entropy_weight = blended_entropy(state.entropy_sum, state.entropy_weight, surprisal, share)
    entropy = entropy_sum / entropy_weight.clamp(min=1e-12)

    low, high, bound = clip_bounds(config, c)
    log_ratio = clamped_log_ratio(new, old)
    ratio = torch.exp(log_ratio)
    losses, clipped = clipped_surrogate(adv, ratio, low, high)
    bounded = torch.zeros_like(mask)
    weights = sign_weights(adv, state.positive_weight, c.negative_weight)
    touched = weights != 1.0
    if c.token_rule in ("none", "stare"):
        losses, bounded = dual_clip(adv, losses, bound)
    if c.token_rule == "stare":
        gate = entropy < c.stare_target_entropy
        token_weights = stare_weights(adv, new, mask, gate, state.amplify, state.damp, c.stare_fraction)
        weights, touched = weights * token_weights, touched | (token_weights != 1.0)
    elif c.token_rule == "clip_cov":
        token_weights = clip_cov_weights(covariances(adv, new, mask), clipped, mask, c)
        weights, touched = weights * token_weights, touched | (token_weights != 1.0)
    elif c.token_rule == "kl_cov":
        losses, clipped = -adv * ratio, torch.zeros_like(mask)
    losses = losses * weights
    if c.token_rule == "kl_cov":
        selected = kl_cov_selection(covariances(adv, new, mask), mask, c.kl_cov_ratio)
        losses = losses + torch.where(selected, c.kl_cov_coef * log_ratio.abs(), torch.zeros_like(losses))
        touched = touched | selected
    if rollout_is_weights is not None:
        losses = losses * clean(rollout_is_weights, mask)
    loss = aggregate(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **batch_info)

    measured = {
        "actor/pg_clipfrac": masked_mean(clipped.float(), mask),
        "actor/ppo_kl": masked_mean(-log_ratio, mask),
        "actor/pg_clipfrac_lower": masked_mean(bounded.float(), mask),
        "overlay/entropy_estimate": entropy,
        "overlay/reweighted_share": masked_mean(touched.float(), mask),
    }
    tail = [entropy_sum, entropy_weight, share]
    numbers = torch.stack([value.detach().float() for value in [*measured.values(), *tail]]).tolist()
    metrics = dict(zip(measured, numbers, strict=False)) | _weight_metrics(state)
    if torch.is_grad_enabled():
        state.end_call(*numbers[len(measured) :])
    return loss, metrics


def _weight_metrics(state: ControlState) -> dict[str, float]:
    """The weights in force during this call, for the parts that are on."""
    c = state.configuration
    metrics: dict[str, float] = {}
    if c.positive_weight != 1.0 or c.positive_control == "entropy_guided":
        metrics["overlay/positive_weight"] = state.positive_weight
    if c.negative_weight != 1.0:
        metrics["overlay/negative_weight"] = c.negative_weight
    if c.token_rule == "stare":
        metrics["overlay/stare_amplify"] = state.amplify
        metrics["overlay/stare_damp"] = state.damp
    if state.is_controlled:
        metrics["overlay/controller_steps"] = state.steps
    return metrics


def overlay_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    state: ControlState,
    aggregate: Callable[..., torch.Tensor],
    vanilla: Callable[..., Loss],
) -> Loss:
    """The loss verl calls: verl's own function when everything is off, else the composed one; calls counted.

    The first arguments are those of a policy loss of verl 0.6.1 and later; see ``composed_policy_loss``.

    Metrics always hold ``overlay/calls``, the number of training calls in this process, and
    ``overlay/configuration_id``, which names the configuration in force. verl prefixes them with ``actor/``
    and reports means over micro-batches, ranks and mini-batches of a step. It treats keys that contain
    ``max`` or ``min`` differently, so none does.

    Args:
        state: of this process.
        aggregate: verl's ``agg_loss``.
        vanilla: verl's ``compute_policy_loss_vanilla``.
    """
    if torch.is_grad_enabled():
        state.begin_call()
    arguments = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    if state.configuration.is_off:
        loss, metrics = vanilla(*arguments)
    else:
        loss, metrics = composed_policy_loss(*arguments, state=state, aggregate=aggregate)
    counters = {
        "overlay/calls": float(state.calls),
        "overlay/configuration_id": float(configuration_id(state.configuration)),
    }
    return loss, metrics | counters
