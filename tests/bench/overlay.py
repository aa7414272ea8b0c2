"""The overlay's policy loss as one plain function, and arms: the named configurations that a benchmark compares.

An arm on a command line is the name of a preset, or `NAME={...}` with a flat JSON configuration.
"""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage

from verl_overlay.configuration import OverlayError, parse_configuration
from verl_overlay.control import ControlState
from verl_overlay.losses import composed_policy_loss

CLIP_DISTANCE, DUAL_CLIP = 0.2, 3.0
"""verl's defaults: clip distance on both sides, and the bound of dual clip."""

Configuration = dict[str, Any]


def presets() -> dict[str, Configuration]:
    """Name → flat configuration of every preset."""
    return {
        "grpo": {},
        "clip_higher": {"clip_high": 0.28},
        "negative_damped": {"negative_weight": 0.3},
        "clip_cov": {"token_rule": "clip_cov", "clip_cov.ratio": 0.05, "clip_cov.lower": 0.5},
        "kl_cov": {"token_rule": "kl_cov", "kl_cov.ratio": 0.05},
        "stare": {"token_rule": "stare"},
    }


def read_arms(texts: Sequence[str]) -> dict[str, Configuration]:
    """Name → flat configuration of the arms named on a command line; every preset when there are none.

    Raises:
        SystemExit: an unknown preset, or text that is no configuration.
    """
    known = presets()
    arms: dict[str, Configuration] = {}
    for text in texts:
        name, given, configuration = text.partition("=")
        if not given and name not in known:
            raise SystemExit(f"error: arm {name!r} is no preset; known are {', '.join(known)}; or write NAME={{...}}")
        try:
            arms[name] = json.loads(configuration) if given else known[name]
            parse_configuration(arms[name], where=f"arm {name!r}")
        except (ValueError, OverlayError) as error:
            raise SystemExit(f"error: arm {text!r}: {error}") from None
    return arms or known


class Learner:
    """The overlay in one training process: its state, and the number of the rollout batch it is at."""

    def __init__(self, configuration: Configuration) -> None:
        self.batch = 0
        self._state = ControlState(parse_configuration(configuration), rollout_batch_id=lambda: str(self.batch))

    def advantages(
        self, rewards: torch.Tensor, mask: torch.Tensor, groups: np.ndarray, entropy: torch.Tensor
    ) -> torch.Tensor:
        """Advantages of a rollout batch, (B, T).

        Args:
            rewards: one per response, (B,).
            mask: (B, T) bool.
            groups: the prompt that each response answers, (B,).
            entropy: exact token entropies of the policy that was sampled from, nats, (B, T).
        """
        last = mask.sum(1) - 1
        token_rewards = torch.zeros(mask.shape).scatter(1, last[:, None], rewards[:, None])
        return compute_grpo_outcome_advantage(token_rewards, mask, groups)[0]

    def loss(
        self, old_log_prob: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Loss and metrics of one mini-batch, all (B, T); the mean over its tokens."""
        self._state.begin_call()
        return composed_policy_loss(
            old_log_prob, log_prob, advantages, mask, "token-mean", actor_configuration(mask), None,
            state=self._state, aggregate=agg_loss,
        )  # fmt: skip


def actor_configuration(mask: torch.Tensor) -> Any:
    """What a policy loss reads of verl's actor configuration, for a mini-batch that is not split."""
    batch = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    values = {"clip_ratio": CLIP_DISTANCE, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": DUAL_CLIP}
    configuration = SimpleNamespace(**values, global_batch_info=batch)
    configuration.get = values.get
    return configuration
