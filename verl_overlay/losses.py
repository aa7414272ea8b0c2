"""The parts of the overlay's policy loss, pure torch, and their composition.

Order: sign weights -> shaping of the token's advantage -> ratio and clip rule -> token weights -> extra term
-> aggregation. Each part has an off value; with all parts off verl's own loss is called.

Every loss here is a sum over tokens of a value that depends on the parameters only through that token's
log-probability. So each part gives, per token, the loss and its slope, the derivative by the token's
log-probability, both in closed form; one autograd node hands the slopes to the backward pass. This is exact,
it is what the tests check, and it keeps one tensor for the backward pass instead of one per operation.

Shapes and units: B sequences in the micro-batch, T response positions; all tensors are (B, T). Log-probabilities
in nats at the rollout temperature. Weights carry no unit. Selections, means and quantiles are local to the
micro-batch, as in verl and in the authors' codes.

Numerics: half-precision inputs are computed in float32; whatever stands in masked positions (NaN, inf) is
replaced by 0 before it is used; the log-ratio is clamped to +-20 as in verl. Two host synchronisations per
call, where verl's own loss has three.

The source of this module becomes part of the block in verl's ``core_algos.py``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl_overlay.configuration import OverlayConfiguration
from verl_overlay.control import ControlState

LOG_RATIO_LIMIT = 20.0
SURPRISAL_LIMIT = 50.0
"""Nats; no sampled token is rarer in single precision."""
SHAPING_SURPRISAL_LIMIT = 10.0
"""Nats; a single rarer token must not dominate a bonus."""

Loss = tuple[torch.Tensor, dict[str, float]]


@dataclass(frozen=True)
class ClipBounds:
    """verl's clip settings: distances below and above 1, and the dual clip's bound; None where verl has none."""

    low: float
    high: float
    dual: float | None


@dataclass
class Tokens:
    """What the parts see of a micro-batch, without gradients and with 0 in masked positions; (B, T) tensors."""

    old: torch.Tensor
    new: torch.Tensor
    """Log-probabilities, at least -50."""
    advantages: torch.Tensor
    """As the trainer gave them; selections look at these."""
    log_ratio: torch.Tensor
    ratio: torch.Tensor
    mask: torch.Tensor
    count: int
    """N, the number of response tokens."""
    entropy: float
    """Mean entropy of the behaviour policy, nats."""

    def probability(self) -> torch.Tensor:
        """pi of the sampled tokens, at most 1, (B, T)."""
        return self.new.clamp(max=0.0).exp_()

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over response tokens of ``values`` that are 0 elsewhere; a scalar, 0 when there are none."""
        return values.sum() / (self.count + 1e-8)


@dataclass
class TokenLosses:
    """Per-token loss, its derivative by the log-probability, and where a clip or bound took effect; (B, T)."""

    values: torch.Tensor
    slopes: torch.Tensor
    clipped: torch.Tensor
    bounded: torch.Tensor | None = None


class _WithSlopes(torch.autograd.Function):
    """``values`` as a function of ``log_prob`` with the derivative ``slopes``; all (B, T)."""

    @staticmethod
    def forward(ctx: Any, log_prob: torch.Tensor, values: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slopes)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (slopes,) = ctx.saved_tensors
        return gradients[0] * slopes, None, None


def top_positions(values: torch.Tensor, excluded: torch.Tensor, count: int) -> torch.Tensor:
    """Flat positions of the ``count`` largest ``values``, excluded ones last; equal ones as torch's ``topk`` takes them.

    Args:
        values: (B, T).
        excluded: (B, T) bool.
        count: of positions.
    """
    keys = values.masked_fill(excluded, -math.inf).flatten()
    return torch.topk(keys, min(count, keys.numel()), sorted=False).indices


def select_top(values: torch.Tensor, group: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest ``values`` in ``group``, or all of a smaller group; (B, T) bool."""
    selected = torch.zeros_like(group)
    selected.view(-1)[top_positions(values, ~group, count)] = True
    return selected & group


# ---- sign weights and shaping ----


def sign_weights(advantages: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
    """Weights ``positive`` where A > 0, ``negative`` where A < 0, 1 where A = 0, (B, T).

    The positive one is PAR's lambda, arXiv 2511.05993; the negative one is its mirror.
    """
    weights = torch.ones_like(advantages)
    weights.masked_fill_(advantages > 0, positive)
    return weights.masked_fill_(advantages < 0, negative)


def shaped_advantages(
    advantages: torch.Tensor, tokens: Tokens, coef: float, configuration: OverlayConfiguration
) -> torch.Tensor:
    """The advantages with the configured term, (B, T); s = surprisal ``-old_log_prob``, at most 10 nats.

    - bonus: ``A + coef (s - H)``, the score-function form of an entropy bonus: E[(s - H) grad log pi] = grad H.
      Skywork-OR1, arXiv 2505.22312, controls such a coefficient.
    - repo_r: ``A + coef |A| s``, never across 0; REPO-R, arXiv 2603.11682.
    - entropy_advantage: ``A + min(coef s, |A| / kappa)``; arXiv 2506.14758 with the surprisal in place of the
      token's entropy, which the loss does not see.
    - progrpo: ``A - coef (c - mean c)`` where A > 0, c the mean probability of the response's ``share`` least
      probable tokens; a reduced form of ProGRPO, arXiv 2602.05281, without its prompt confidence.
    """
    c = configuration
    if c.shaping == "progrpo":
        term = -coef * centred_confidence(tokens, c.shaping_share)
        return advantages + term.expand_as(advantages).masked_fill(advantages <= 0, 0.0)
    surprisal = (-tokens.old).clamp_(max=SHAPING_SURPRISAL_LIMIT)
    if c.shaping == "bonus":
        return advantages + surprisal.sub_(tokens.entropy).mul_(coef).masked_fill_(~tokens.mask, 0.0)
    if c.shaping == "entropy_advantage":
        return advantages + torch.minimum(surprisal.mul_(coef), advantages.abs() / c.shaping_kappa)
    factor = 1.0 + torch.sign(advantages).mul_(surprisal).mul_(coef)
    return advantages * factor.clamp_(min=0.0)


def centred_confidence(tokens: Tokens, share: float) -> torch.Tensor:
    """Mean probability of each response's ``ceil(share n)`` least probable tokens minus its batch mean, (B, 1)."""
    outside = ~tokens.mask
    lengths = tokens.mask.sum(dim=-1, keepdim=True)
    counts = torch.ceil(lengths.double() * share - 1e-9).long()
    most = math.ceil(tokens.mask.shape[-1] * share - 1e-9)
    # every row gives its `most` lowest: what a short response lacks is filled up with columns of probability 0
    is_filling = torch.arange(most, device=outside.device) < most - counts
    filling = torch.where(is_filling, -math.inf, math.inf).to(tokens.old.dtype)
    keys = torch.cat([tokens.old.masked_fill(outside, math.inf), filling], dim=-1)
    lowest = torch.topk(keys, most, dim=-1, largest=False, sorted=False).values.exp_().sum(dim=-1, keepdim=True)
    confidence = lowest / counts.clamp(min=1)
    filled = (lengths > 0).to(confidence.dtype)
    return (confidence - (confidence * filled).sum() / filled.sum().clamp(min=1)) * filled


# ---- ratio and clip rules ----


def ratio_losses(
    advantages: torch.Tensor, tokens: Tokens, rule: str, clip: ClipBounds, low: float, high: float
) -> TokenLosses:
    """Per-token losses of a rule that depends on the importance ratio r.

    - dual_clip: ``max(-A r, -A clip(r, 1 - low, 1 + high))``, arXiv 1707.06347, and for A < 0 at most ``-A c``,
      arXiv 1912.09729. Unequal distances are DAPO's clip-higher, arXiv 2503.14476. clip: without the bound c.
    - none: ``-A r``.
    - gspo: clip with the sequence's ratio ``exp(mean log r)``, arXiv 2507.18071.
    - cispo: ``-A sg[clip(r)] log pi``, arXiv 2506.13585.

    Args:
        advantages: (B, T), 0 in masked positions.
        clip: its dual bound is used.
        low, high: clip distances in force.
    """
    if rule == "cispo":
        weight = tokens.ratio.clamp(1 - low, 1 + high)
        slopes = -weight * advantages
        return TokenLosses(slopes * tokens.new, slopes, weight != tokens.ratio)
    ratio = _sequence_ratio(tokens) if rule == "gspo" else tokens.ratio
    free = -advantages * ratio
    if rule == "none":
        return TokenLosses(free, free, torch.zeros_like(tokens.mask))
    limited = -advantages * ratio.clamp(1 - low, 1 + high)
    clipped = limited > free
    losses = TokenLosses(torch.maximum(free, limited), free.masked_fill_(clipped, 0.0), clipped)
    if rule == "dual_clip" and clip.dual is not None:
        ceiling = limited.copy_(advantages).mul_(-clip.dual)
        losses.bounded = (losses.values > ceiling) & (advantages < 0)
        losses.values = torch.where(losses.bounded, ceiling, losses.values)
        losses.slopes.masked_fill_(losses.bounded, 0.0)
    return losses


def _sequence_ratio(tokens: Tokens) -> torch.Tensor:
    """GSPO's ``exp(min(mean_t log r, 10))`` of each response, (B, T)."""
    lengths = tokens.mask.sum(dim=-1, keepdim=True).clamp(min=1)
    mean = tokens.log_ratio.sum(dim=-1, keepdim=True) / lengths
    return mean.clamp(max=10.0).exp().expand_as(tokens.ratio)


def ce_gppo_losses(
    advantages: torch.Tensor, tokens: Tokens, low: float, high: float, configuration: OverlayConfiguration
) -> TokenLosses:
    """CE-GPPO, arXiv 2509.20712: no clipped token loses its gradient.

    ``-A k r`` with k = ``beta1 (1 - low) / sg[r]`` where A < 0 and r < 1 - low, ``beta2 (1 + high) / sg[r]`` where
    A > 0 and r > 1 + high, else 1.

    Args:
        advantages: (B, T), 0 in masked positions.
        low, high: clip distances.
        configuration: reads ``ce_gppo.low`` (beta1) and ``ce_gppo.high`` (beta2).
    """
    below = (advantages < 0) & (tokens.ratio < 1 - low)
    above = (advantages > 0) & (tokens.ratio > 1 + high)
    effective = tokens.ratio.masked_fill(below, configuration.ce_gppo_low * (1 - low))
    slopes = effective.masked_fill_(above, configuration.ce_gppo_high * (1 + high)).mul_(advantages).neg_()
    return TokenLosses(slopes, slopes, below | above)


# ---- token weights ----


def covariances(tokens: Tokens) -> torch.Tensor:
    """``(A - mean A)(log pi - mean log pi)``, means over response tokens, (B, T). arXiv 2505.22617."""
    centred = tokens.advantages - tokens.mean(tokens.advantages)
    return centred.mul_(tokens.new - tokens.mean(tokens.new)).masked_fill_(~tokens.mask, 0.0)


def clip_cov_weights(tokens: Tokens, clipped: torch.Tensor, configuration: OverlayConfiguration) -> torch.Tensor:
    """Clip-Cov, arXiv 2505.22617: weight 0 on randomly drawn tokens of high covariance, 1 elsewhere, (B, T).

    Candidates have ``lower < cov < upper`` and are not already clipped; ``max(1, floor(ratio N))`` of them
    are drawn with torch's default CPU generator, exactly as verl's ``clip_cov`` loss draws them.

    Args:
        clipped: (B, T) bool, where the clipped branch is taken.
        configuration: reads the ``clip_cov`` knobs.
    """
    c = configuration
    covariance = covariances(tokens)
    weights = torch.ones_like(covariance)
    within = (covariance > c.clip_cov_lower) & (covariance < c.clip_cov_upper)
    candidates = torch.nonzero(within & tokens.mask & ~clipped)
    if len(candidates) > 0:
        count = max(1, int(c.clip_cov_ratio * tokens.count))
        drawn = candidates[torch.randperm(len(candidates))[:count]]
        weights[drawn[:, 0], drawn[:, 1]] = 0.0
    return weights


def surprising_weights(
    tokens: Tokens, signs: tuple[int, int], fraction: float, amplify: float, damp: float
) -> torch.Tensor:
    """Weights of the most surprising tokens of each advantage sign, (B, T).

    ``amplify`` on the ``ceil(fraction n+)`` tokens of highest surprisal ``-log pi`` among the n+ tokens with
    A > 0, ``damp`` on the ``ceil(fraction n-)`` among those with A < 0, 1 elsewhere. STARE's variant C2,
    arXiv 2606.19236; O1 has damp 1. With damp 0 and amplify 1 it is the loss-only part of Lp-Reg,
    arXiv 2510.03222, without its KL towards a filtered distribution.

    Args:
        signs: (n+, n-).
    """
    surprisal = -tokens.new
    weights = torch.ones_like(surprisal)
    groups = ((tokens.advantages <= 0, signs[0], amplify), (tokens.advantages >= 0, signs[1], damp))
    for others, size, weight in groups:
        if weight != 1.0 and size > 0:
            count = max(1, math.ceil(fraction * size - 1e-9))
            weights.view(-1)[top_positions(surprisal, others, count)] = weight
    return weights


def cw_weights(tokens: Tokens, width: float) -> torch.Tensor:
    """CW-GRPO, arXiv 2605.11538: ``exp(-cov^2 / (2 sigma^2))`` with mean 1 over response tokens, (B, T).

    sigma is ``width`` times the standard deviation of the covariances; the paper's estimator is not public.
    """
    covariance = covariances(tokens)
    spread = tokens.mean((covariance - tokens.mean(covariance)).masked_fill_(~tokens.mask, 0.0).square_())
    kernel = covariance.square_().mul_(-0.5).div_(width**2 * spread + 1e-12).exp_().masked_fill_(~tokens.mask, 0.0)
    return kernel / (tokens.mean(kernel) + 1e-12)


def steer_weights(tokens: Tokens, lowest: float) -> torch.Tensor:
    """STEER, arXiv 2510.10150: ``exp(-k |Omega|)`` in [lowest, 1], (B, T).

    ``Omega = A r (1 - pi)^2 (log pi + H)``, ``k = -ln(lowest) / max(max |Omega|, 0.02)``. H is the mean entropy, as
    the loss does not see each token's; the size of Omega enters, not its sign.
    """
    change = tokens.probability().neg_().add_(1.0).square_().mul_(tokens.new + tokens.entropy)
    change.mul_(tokens.ratio).mul_(tokens.advantages).abs_()
    rate = math.log(lowest) / change.max().clamp(min=0.02) if change.numel() else 0.0
    return change.mul_(rate).exp_()


def opefo_weights(tokens: Tokens, limit: float) -> torch.Tensor:
    """OPEFO, arXiv 2605.11491, surrogate: ``1 + lambda`` where a token raises the entropy, ``1 - lambda`` where not.

    The first-order change is taken as ``D = -A pi (log pi + H)`` with the mean entropy H. lambda makes its sum 0:
    ``(|S-| - S+) / (|S-| + S+)``, limited to +-``limit``; S+ and S- are the sums of positive and negative D. (B, T).
    """
    change = tokens.probability().mul_(tokens.new + tokens.entropy).mul_(tokens.advantages).neg_()
    total, absolute = change.sum(), change.abs().sum()
    balance = (-total / (absolute + 1e-12)).clamp(-limit, limit)
    return torch.sign(change).mul_(balance).add_(1.0)


def high_entropy_weights(tokens: Tokens, share: float) -> torch.Tensor:
    """80/20, arXiv 2506.01939, by surprisal: ``N / k`` on the k = ``ceil(share N)`` most surprising tokens, else 0."""
    count = max(1, math.ceil(share * tokens.count - 1e-9))
    outside = ~tokens.mask
    weights = torch.zeros_like(tokens.new)
    weights.view(-1)[top_positions(-tokens.new, outside, count)] = tokens.count / count
    return weights.masked_fill_(outside, 0.0)


# ---- extra terms ----


def kl_cov_selection(tokens: Tokens, ratio: float, low_surprisal_only: bool) -> torch.Tensor:
    """The ``max(1, floor(ratio N))`` response tokens of highest covariance, (B, T) bool. arXiv 2505.22617.

    Args:
        low_surprisal_only: among tokens of surprisal below the mean entropy; the loss-only part of SENT,
            arXiv 2512.04359, whose coefficients are not public.
    """
    group = tokens.mask
    if low_surprisal_only:
        group = group & (tokens.new > -tokens.entropy)
    return select_top(covariances(tokens), group, max(1, int(ratio * tokens.count)))


def _token_weights(
    tokens: Tokens, clipped: torch.Tensor, state: ControlState, signs: tuple[int, int]
) -> torch.Tensor | None:
    """The weights of the configured token rule, None when it has no effect now."""
    c = state.configuration
    if c.token_rule == "clip_cov":
        return clip_cov_weights(tokens, clipped, c)
    if c.token_rule == "stare" and state.is_below_target:
        return surprising_weights(tokens, signs, c.stare_fraction, state.amplify, state.damp)
    if c.token_rule == "lp_reg":
        return surprising_weights(tokens, signs, c.lp_reg_fraction, 1.0, 0.0)
    if c.token_rule == "cw":
        return cw_weights(tokens, c.cw_width)
    if c.token_rule == "steer":
        return steer_weights(tokens, c.steer_lowest)
    if c.token_rule == "opefo":
        return opefo_weights(tokens, c.opefo_limit)
    if c.token_rule == "high_entropy" and not c.uses_exact_token_entropy:
        return high_entropy_weights(tokens, c.high_entropy_share)
    return None


def _add_extra_term(losses: TokenLosses, tokens: Tokens, state: ControlState) -> torch.Tensor | None:
    """Add the configured extra term in place; returns where it acts."""
    c = state.configuration
    if c.extra_term in ("kl_cov", "sent"):
        selected = kl_cov_selection(tokens, c.kl_cov_ratio, c.extra_term == "sent")
        scale = selected.to(losses.values.dtype) * state.kl_coef
        losses.values = losses.values + scale * tokens.log_ratio.abs()
        losses.slopes = losses.slopes + scale * torch.sign(tokens.log_ratio)
        return selected
    if c.extra_term == "entropic":
        selected = (tokens.new > math.log(max(c.entropic_probability, 1e-30))) & tokens.mask
        term = tokens.advantages.abs().mul_(tokens.ratio).mul_(-state.entropic_coefficient())
        term.masked_fill_(~selected, 0.0)
        losses.values, losses.slopes = losses.values + term, losses.slopes + term
        return selected
    return None


def batch_share(tokens: int, batch_info: Mapping[str, Any]) -> float:
    """This micro-batch's share of the tokens of its mini-batch on this rank.

    Args:
        tokens: response tokens of the micro-batch.
        batch_info: verl's ``config.global_batch_info``; without ``batch_num_tokens`` the share is 1.
    """
    total = batch_info.get("batch_num_tokens")
    if total is None:
        return 1.0 if tokens > 0 else 0.0
    return tokens * (batch_info.get("dp_size") or 1) / max(float(total), 1.0)


def composed_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    clip: ClipBounds,
    batch_info: Mapping[str, Any],
    rollout_is_weights: torch.Tensor | None = None,
    *,
    state: ControlState,
    aggregate: Callable[..., torch.Tensor],
) -> Loss:
    """All parts in order, on one micro-batch.

    Args:
        old_log_prob, log_prob, advantages: (B, T); the gradient goes to ``log_prob``.
        response_mask: (B, T), bool or number.
        loss_agg_mode: passed to ``aggregate`` unless the configuration says otherwise.
        clip: verl's clip settings.
        batch_info: verl's ``global_batch_info``, forwarded to ``aggregate``.
        rollout_is_weights: (B, T) or None, multiplied to the token losses.
        state: configuration and moving values; updated unless gradients are disabled.
        aggregate: verl's ``agg_loss``.

    Returns:
        The scalar loss, and metrics as Python floats.
    """
    c, trains = state.configuration, torch.is_grad_enabled()
    wide = log_prob.float() if log_prob.dtype in (torch.float16, torch.bfloat16) else log_prob
    with torch.no_grad():
        tokens, signs, old_mean = _read_tokens(old_log_prob, wide, advantages, response_mask)
        share = batch_share(tokens.count, batch_info)
        if trains:
            state.observe(old_mean, share)
        tokens.entropy = old_mean if state.entropy is None else state.entropy
        losses, touched = _token_losses(tokens, clip, state, signs)
        if rollout_is_weights is not None:
            trust = rollout_is_weights.to(wide.dtype).masked_fill(~tokens.mask, 0.0)
            losses.values, losses.slopes = losses.values * trust, losses.slopes * trust
    loss = aggregate(
        loss_mat=_WithSlopes.apply(wide, losses.values, losses.slopes),  # type: ignore[no-untyped-call]
        loss_mask=response_mask,
        loss_agg_mode=loss_agg_mode if c.aggregation == "verl" else c.aggregation,
        **batch_info,
    )
    metrics = _measured(tokens, losses, touched) | _moving_metrics(state, tokens.entropy)
    if trains:
        state.end_call(share)
    return loss, metrics


def _read_tokens(
    old_log_prob: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> tuple[Tokens, tuple[int, int], float]:
    """The cleaned micro-batch, its numbers of tokens with A > 0 and A < 0, and its mean surprisal in nats."""
    mask = response_mask if response_mask.dtype == torch.bool else response_mask > 0
    outside = ~mask
    old = old_log_prob.to(log_prob.dtype).masked_fill(outside, 0.0)
    new = log_prob.masked_fill(outside, 0.0)
    adv = advantages.to(log_prob.dtype).masked_fill(outside, 0.0)
    log_ratio = (new - old).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    old, new = old.clamp_(min=-SURPRISAL_LIMIT), new.clamp_(min=-SURPRISAL_LIMIT)
    counted = torch.stack([mask.sum(), (adv > 0).sum(), (adv < 0).sum()]).double()
    total, positives, negatives, old_sum = torch.cat([counted, old.sum().double()[None]]).tolist()
    tokens = Tokens(old, new, adv, log_ratio, log_ratio.exp(), mask, int(total), 0.0)
    return tokens, (int(positives), int(negatives)), -old_sum / max(total, 1.0)


def _token_losses(
    tokens: Tokens, clip: ClipBounds, state: ControlState, signs: tuple[int, int]
) -> tuple[TokenLosses, torch.Tensor | None]:
    """Everything up to aggregation, and a (B, T) bool of the tokens that a part treats differently (None: none)."""
    c, advantages = state.configuration, tokens.advantages
    touched: list[torch.Tensor] = []
    positive, negative = state.weights()
    if (positive, negative) != (1.0, 1.0):
        weights = sign_weights(advantages, positive, negative)
        touched.append(weights != 1.0)
        advantages = advantages * weights
    if c.shapes_the_loss and (state.is_below_target or not c.shaping_below_target):
        shaped = shaped_advantages(advantages, tokens, state.coef, c)
        touched.append(shaped != advantages)
        advantages = shaped
    low = clip.low if c.clip_low is None else c.clip_low
    high = clip.high if state.clip_high is None else state.clip_high
    if c.ratio_rule == "ce_gppo":
        losses = ce_gppo_losses(advantages, tokens, low, high, c)
    else:
        losses = ratio_losses(advantages, tokens, c.ratio_rule, clip, low, high)
    rule = _token_weights(tokens, losses.clipped, state, signs)
    if rule is not None:
        touched.append((rule != 1.0) & tokens.mask)
        losses.values, losses.slopes = losses.values * rule, losses.slopes * rule
    extra = _add_extra_term(losses, tokens, state)
    if extra is not None:
        touched.append(extra)
    if c.ratio_rule not in ("gspo", "cispo"):
        losses.slopes = losses.slopes.masked_fill(tokens.log_ratio.abs() >= LOG_RATIO_LIMIT, 0.0)
    anywhere = touched[0] if touched else None
    for part in touched[1:]:
        anywhere = anywhere | part if anywhere is not None else part
    return losses, anywhere


def _measured(tokens: Tokens, losses: TokenLosses, touched: torch.Tensor | None) -> dict[str, float]:
    """verl's three metrics and the share of tokens that the overlay treats differently; one synchronisation."""
    zero = tokens.log_ratio.new_zeros(())
    sums = {
        "actor/pg_clipfrac": losses.clipped.sum(),
        "actor/ppo_kl": -tokens.log_ratio.sum(),
        "actor/pg_clipfrac_lower": zero if losses.bounded is None else losses.bounded.sum(),
        "overlay/reweighted_share": zero if touched is None else touched.sum(),
    }
    numbers = torch.stack([value.double() for value in sums.values()]).tolist()
    return {name: number / (tokens.count + 1e-8) for name, number in zip(sums, numbers, strict=True)}


def _moving_metrics(state: ControlState, entropy: float) -> dict[str, float]:
    """The entropy that the parts see, and what is in force during this call of the parts that are on."""
    c = state.configuration
    positive, negative = state.weights()
    metrics = {
        "overlay/entropy_estimate": entropy,
        "overlay/entropy_exact": float(state.exact_entropy is not None),
    }
    if c.positive_schedule != "constant" or c.sign_gate != "none" or (positive, negative) != (1.0, 1.0):
        metrics |= {"overlay/positive_weight": positive, "overlay/negative_weight": negative}
    if c.shaping != "none":
        metrics["overlay/shaping_coef"] = state.coef
    if c.token_rule == "stare":
        metrics |= {"overlay/stare_amplify": state.amplify, "overlay/stare_damp": state.damp}
    if c.extra_term in ("kl_cov", "sent"):
        metrics["overlay/kl_cov_coef"] = state.kl_coef
    if c.extra_term == "entropic":
        metrics["overlay/entropic_coefficient"] = state.entropic_coefficient()
    if state.clip_high is not None:
        metrics["overlay/clip_high"] = state.clip_high
    if state.moves:
        metrics["overlay/rollout_batches"] = state.steps
        if c.uses_target:
            metrics["overlay/target_entropy"] = -1.0 if state.target is None else state.target
    return metrics


def counter_metrics(state: ControlState) -> dict[str, float]:
    """``overlay/calls``, training calls in this process, and ``overlay/configuration_id``, what is in force.

    verl prefixes metrics with ``actor/`` and reports means over micro-batches, ranks and mini-batches of a step. It
    treats keys that contain ``max`` or ``min`` differently, so none of the overlay's does.
    """
    return {
        "overlay/calls": float(state.calls),
        "overlay/configuration_id": float(state.configuration_id),
    }
