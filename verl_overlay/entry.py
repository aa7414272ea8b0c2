"""verl's call shapes: what stands between verl's names and the overlay's parts.

verl's policy loss has had three shapes. ``three``: ``compute_policy_loss(old_log_prob, log_prob, advantages,
eos_mask, cliprange)`` returns (loss, clip share, kl), always token-mean (0.3). ``four``: the same name with
both clip distances, the dual clip's bound and the aggregation returns a fourth number (0.4, 0.5).
``registry``: ``compute_policy_loss_vanilla`` with verl's actor configuration returns (loss, metrics), reached through
a registry (0.6.1 and later).

The source of this module becomes part of the block in verl's ``core_algos.py``.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from verl_overlay.advantages import group_advantages, with_token_entropy
from verl_overlay.configuration import OverlayConfiguration, OverlayError, impossible_without_aggregation
from verl_overlay.control import ControlState
from verl_overlay.losses import ClipBounds, Loss, composed_policy_loss, counter_metrics


class Overlay:
    """The overlay in one process: verl's own functions, and the state of this process.

    Args:
        state: of this process.
        vanilla, grpo, aggregate: verl's policy loss, GRPO advantage and ``agg_loss`` (None in verl 0.3).

    Raises:
        OverlayError: the configuration needs what this verl does not have.
    """

    def __init__(
        self,
        state: ControlState,
        vanilla: Callable[..., Any],
        grpo: Callable[..., Any],
        aggregate: Callable[..., Any] | None,
    ) -> None:
        reasons = impossible_without_aggregation(state.configuration) if aggregate is None else []
        if reasons:
            raise OverlayError(f"{'; '.join(reasons)}. Change the configuration, or use verl 0.4 or later.")
        self.state, self.vanilla, self.grpo = state, vanilla, grpo
        self.aggregate = token_mean if aggregate is None else aggregate
        self._token_entropy: torch.Tensor | None = None
        self._advantage_calls = 0

    # ---- policy loss ----

    def loss_three(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        eos_mask: torch.Tensor,
        cliprange: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """verl 0.3's ``compute_policy_loss``."""
        self._begin()
        if self.state.configuration.loss_is_off:
            values = self.vanilla(old_log_prob, log_prob, advantages, eos_mask, cliprange)
            self._record(values[0], {})
            return values[0], values[1], values[2]
        clip = ClipBounds(cliprange, cliprange, None)
        composed = self._compose(old_log_prob, log_prob, advantages, eos_mask, "token-mean", clip, {}, None)
        self._record(*composed)
        return composed[0], _metric(composed, "actor/pg_clipfrac"), _metric(composed, "actor/ppo_kl")

    def loss_four(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        cliprange: float | None = None,
        cliprange_low: float | None = None,
        cliprange_high: float | None = None,
        clip_ratio_c: float = 3.0,
        loss_agg_mode: str = "token-mean",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """verl 0.4's and 0.5's ``compute_policy_loss``."""
        self._begin()
        tensors = (old_log_prob, log_prob, advantages, response_mask)
        if self.state.configuration.loss_is_off:
            values = self.vanilla(*tensors, cliprange, cliprange_low, cliprange_high, clip_ratio_c, loss_agg_mode)
            self._record(values[0], {})
            return values[0], values[1], values[2], values[3]
        low = cliprange if cliprange_low is None else cliprange_low
        high = cliprange if cliprange_high is None else cliprange_high
        if low is None or high is None:
            raise OverlayError("compute_policy_loss was called without a clip range; look at actor.clip_ratio")
        composed = self._compose(*tensors, loss_agg_mode, ClipBounds(low, high, clip_ratio_c), {}, None)
        self._record(*composed)
        names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
        first, second, third = (_metric(composed, name) for name in names)
        return composed[0], first, second, third

    def loss_registry(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> Loss:
        """verl 0.6.1's and later ``compute_policy_loss_vanilla``; the metrics reach verl's console line."""
        self._begin()
        tensors = (old_log_prob, log_prob, advantages, response_mask)
        if self.state.configuration.loss_is_off:
            loss, metrics = self.vanilla(*tensors, loss_agg_mode, config, rollout_is_weights)
        else:
            batch_info = dict(getattr(config, "global_batch_info", None) or {})
            clip = clip_bounds(config)
            loss, metrics = self._compose(*tensors, loss_agg_mode, clip, batch_info, rollout_is_weights)
        return loss, metrics | counter_metrics(self.state)

    def _begin(self) -> None:
        if torch.is_grad_enabled():
            self.state.begin_call()

    def _compose(self, *arguments: Any) -> Loss:
        return composed_policy_loss(*arguments, state=self.state, aggregate=self.aggregate)

    def _record(self, loss: torch.Tensor, metrics: dict[str, float]) -> None:
        """Where verl's loss returns no metrics, they go to the side file."""
        if torch.is_grad_enabled() and self.state.side_files.folder is not None:
            counters = counter_metrics(self.state)
            self.state.side_files.append("loss", **{"actor/pg_loss": loss.item(), **metrics, **counters})

    # ---- advantage ----

    def grpo_advantage(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """verl's ``compute_grpo_outcome_advantage``, any version."""
        c = self.state.configuration
        self._advantage_calls += 1
        entropy, self._token_entropy = self._token_entropy, None
        if c.advantage_is_off:
            advantages, returns = self.grpo(*arguments, **named)
            return advantages, returns
        order = ("token_level_rewards", "response_mask", "index", "epsilon", "norm_adv_by_std_in_grpo", "config")
        given = dict(zip(order, arguments, strict=False)) | named
        mask: torch.Tensor = given["response_mask" if "response_mask" in given else "eos_mask"]
        advantages = group_advantages(
            given["token_level_rewards"],
            mask,
            given["index"],
            given.get("epsilon", 1e-6),
            given.get("norm_adv_by_std_in_grpo", True),
            configuration=c,
        )
        if c.uses_exact_token_entropy:
            if entropy is None or entropy.shape != mask.shape:
                raise OverlayError(
                    "token_entropy is 'exact', but this trainer hands no token entropies to the advantage: verl 0.3, "
                    "the trainers that keep one advantage per response (0.8's main_ppo_sync, 0.9's default), and "
                    "rollout correction in bypass mode have none. Set token_entropy to 'surprisal'."
                )
            advantages = with_token_entropy(advantages, entropy, mask, configuration=c)
        if self._advantage_calls == 1:
            print(f"[verl_overlay] GRPO advantage in force: {_advantage_summary(c)}", flush=True)
        nonzero = ((advantages != 0) & (mask > 0)).sum() / (mask > 0).sum().clamp(min=1)
        self.state.side_files.append(
            "advantage",
            call=self._advantage_calls,
            configuration_id=self.state.configuration_id,
            nonzero_share=float(nonzero),
        )
        return advantages, advantages

    # ---- mean entropy ----

    def aggregate_loss(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """verl's ``agg_loss``; the trainer's call with the token entropies is noticed on the way."""
        given = dict(zip(("loss_mat", "loss_mask"), arguments, strict=False)) | named
        caller = sys._getframe(1).f_back or sys._getframe(1)  # behind the function of this name in core_algos.py
        self.notice_entropy(given.get("loss_mat"), given.get("loss_mask"), str(caller.f_globals.get("__name__")))
        result: torch.Tensor = self.aggregate(*arguments, **named)
        return result

    def notice_entropy(self, values: Any, mask: Any, caller: str) -> None:
        """Publish the mean of a matrix of token entropies, and keep the matrix where the advantage may use it.

        Only the trainer aggregates a matrix that needs no gradient and lies on the CPU, and only entropies; the
        workers' calls come from ``verl.workers``. The trainers that keep token-level advantages live in
        modules named ``ray_trainer``; others broadcast one value per response.

        Args:
            values, mask: (B, T); values in nats.
            caller: name of the calling module.
        """
        wanted = self.state.side_files.folder is not None or self.state.configuration.uses_exact_token_entropy
        if not wanted or not isinstance(values, torch.Tensor) or not isinstance(mask, torch.Tensor):
            return
        if values.requires_grad or values.device.type != "cpu" or values.shape != mask.shape:
            return
        if caller.startswith(("verl.workers", "verl.trainer.distillation", "verl.trainer.ppo.core_algos")):
            return
        kept = torch.where(mask > 0, values, torch.zeros_like(values))
        mean = float(kept.double().sum() / max(int((mask > 0).sum()), 1))
        if mean >= 0.0:
            self.state.side_files.publish_entropy(mean)
        self._token_entropy = kept if caller.endswith("ray_trainer") else None


def token_mean(loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str) -> torch.Tensor:
    """The aggregation of verl 0.3: mean over response tokens; ``loss_agg_mode`` can only be token-mean."""
    return (loss_mat * loss_mask).sum() / (loss_mask.sum() + 1e-8)


def clip_bounds(config: Any) -> ClipBounds:
    """The clip settings of verl's actor configuration."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    bound = config.get("clip_ratio_c", 3.0)
    if bound <= 1.0:
        raise OverlayError(f"actor.clip_ratio_c is {bound}; dual-clip PPO needs a value above 1")
    return ClipBounds(low, high, bound)


def _metric(composed: Loss, name: str) -> torch.Tensor:
    return torch.tensor(composed[1][name])


def _advantage_summary(c: OverlayConfiguration) -> str:
    parts = [f"baseline {c.advantage_baseline}", f"std {c.advantage_std}"]
    if c.advantage_components is not None:
        parts.append(f"components {list(c.advantage_components)}")
    if c.uses_exact_token_entropy:
        parts.append("exact token entropy")
    return ", ".join(parts)
