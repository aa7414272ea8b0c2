"""The overlay in one process as a benchmark drives it, and arms: the named configurations that a benchmark compares.

An arm on a command line is the name of a preset (`python -m verl_overlay list`), `space:NAME` for a preset of the
default search space, whose shares and targets suit short runs, or `NAME={...}` with a flat JSON configuration.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage, compute_policy_loss_vanilla

from search_spaces.space import read_space, shipped_space
from verl_overlay.configuration import OverlayError, parse_configuration
from verl_overlay.control import ControlState
from verl_overlay.entry import Overlay
from verl_overlay.presets import PRESETS
from verl_overlay.sidefiles import SideFiles

CLIP_DISTANCE, DUAL_CLIP = 0.2, 3.0
"""verl's defaults: clip distance on both sides, and the bound of dual clip."""

Configuration = dict[str, Any]


def read_arms(texts: Sequence[str], steps: int) -> dict[str, Configuration]:
    """Name → flat configuration of the arms named on a command line; every preset when there are none.

    Args:
        steps: rollout batches of a run, for the schedules.

    Raises:
        SystemExit: an unknown name, or text that is no configuration.
    """
    known = {name: preset.complete(steps) for name, preset in PRESETS.items()}
    space = read_space(shipped_space("overlay"))
    length = {"schedule.steps": steps}
    known |= {f"space:{name}": space.configuration(space.preset_parameters(name)) | length for name in space.presets}
    arms: dict[str, Configuration] = {}
    for text in texts or PRESETS:
        name, given, configuration = text.partition("=")
        if not given and name not in known:
            raise SystemExit(f"error: arm {name!r} is unknown; known are {', '.join(known)}; or write NAME={{...}}")
        try:
            arms[name] = json.loads(configuration) if given else known[name]
            parse_configuration(arms[name], where=f"arm {name!r}")
        except (ValueError, OverlayError) as error:
            raise SystemExit(f"error: arm {text!r}: {error}") from None
    return arms


class Learner:
    """The overlay of trainer and worker in one process: verl's calls in verl's order."""

    def __init__(self, configuration: Configuration, folder: Path | None = None) -> None:
        """`folder` takes the overlay's side files; without one it estimates the mean entropy by the surprisal."""
        self._batch = 0
        state = ControlState(parse_configuration(configuration), lambda: str(self._batch), SideFiles(folder))
        self._overlay = Overlay(state, compute_policy_loss_vanilla, compute_grpo_outcome_advantage, agg_loss)

    def advantages(
        self, rewards: torch.Tensor, mask: torch.Tensor, groups: np.ndarray, entropy: torch.Tensor
    ) -> torch.Tensor:
        """Advantages of a new rollout batch, (B, T).

        Args:
            rewards: one per response, (B,).
            mask: (B, T) bool.
            groups: the prompt that each response answers, (B,).
            entropy: exact token entropies of the policy that was sampled from, nats, (B, T).
        """
        self._batch += 1
        self._overlay.notice_entropy(entropy, mask, "verl.trainer.ppo.ray_trainer")
        last = mask.sum(1) - 1
        token_rewards = torch.zeros(mask.shape).scatter(1, last[:, None], rewards[:, None])
        return self._overlay.grpo_advantage(token_rewards, mask, groups)[0]

    def loss(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        actor: Any,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss and metrics of one mini-batch; all tensors (B, T), `actor` from `actor_configuration`."""
        return self._overlay.loss_registry(old_log_prob, log_prob, advantages, mask, "token-mean", actor)


def actor_configuration(mask: torch.Tensor) -> Any:
    """What a policy loss reads of verl's actor configuration, for a mini-batch that is not split."""
    batch = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    values = {"clip_ratio": CLIP_DISTANCE, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": DUAL_CLIP}
    configuration = SimpleNamespace(**values, global_batch_info=batch)
    configuration.get = values.get
    return configuration
