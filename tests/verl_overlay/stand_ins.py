"""Small stand-ins for verl's ``core_algos.py``, one per call shape, with its functions in a few lines each.

They make the installer's refusals and the faults that ``check`` must find cheap to build; that the overlay works in
verl itself is tested with verl's wheels.
"""

from pathlib import Path

_LOSS = """
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp({clip}))
"""
_SYMMETRIC = "1 - cliprange, 1 + cliprange"
_DUAL = "    losses = torch.where(advantages < 0, torch.minimum(losses, -3.0 * advantages), losses)\n"
_REGISTRY = f'''\
"""A stand-in for the file of verl 0.6.1 and later."""

import torch

LOSSES = {{}}


def register_policy_loss(name):
    def keep(function):
        LOSSES[name] = function
        return function

    return keep


def get_policy_loss_fn(name):
    return LOSSES[name]


def agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None):
    return (loss_mat * loss_mask).sum() / (batch_num_tokens or loss_mask.sum()) * dp_size


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):{_LOSS.format(clip="1 - config.clip_ratio, 1 + config.clip_ratio")}{_DUAL}\
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {{}}


def compute_grpo_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True, config=None
):
    scores = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return scores, scores
'''
_FOUR = f'''\
"""A stand-in for the file of verl 0.4 and 0.5."""

import torch


def agg_loss(loss_mat, loss_mask, loss_agg_mode):
    return (loss_mat * loss_mask).sum() / loss_mask.sum()


def compute_policy_loss(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    cliprange=None,
    cliprange_low=None,
    cliprange_high=None,
    clip_ratio_c=3.0,
    loss_agg_mode="token-mean",
):{_LOSS.format(clip="1 - cliprange_low, 1 + cliprange_high")}{_DUAL}\
    return agg_loss(losses, response_mask, loss_agg_mode), losses.sum(), losses.sum(), losses.sum()


def compute_grpo_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True
):
    scores = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return scores, scores
'''
_THREE = f'''\
"""A stand-in for the file of verl 0.3."""

import torch


def compute_policy_loss(old_log_prob, log_prob, advantages, eos_mask, cliprange):{_LOSS.format(clip=_SYMMETRIC)}\
    return (losses * eos_mask).sum() / eos_mask.sum(), losses.sum(), losses.sum()


def compute_grpo_outcome_advantage(token_level_rewards, eos_mask, index, epsilon=1e-6):
    scores = token_level_rewards.sum(-1, keepdim=True) * eos_mask
    return scores, scores
'''
SOURCES = {"registry": _REGISTRY, "four": _FOUR, "three": _THREE}
ACTORS = {
    "registry": "from verl.trainer.ppo.core_algos import get_policy_loss_fn\n\nloss = get_policy_loss_fn('vanilla')\n",
    "four": "from verl.trainer.ppo.core_algos import compute_policy_loss\n\nloss = compute_policy_loss\n",
    "three": "from verl.trainer.ppo import core_algos\n\nloss = core_algos.compute_policy_loss\n",
}


def build_verl(root: Path, shape: str) -> Path:
    """A package ``verl`` of this call shape in ``root``; returns its ``core_algos.py``."""
    for package in ("verl", "verl/trainer", "verl/trainer/ppo", "verl/workers", "verl/workers/actor"):
        (root / package).mkdir(parents=True, exist_ok=True)
        (root / package / "__init__.py").touch()
    (root / "verl/workers/actor/dp_actor.py").write_text(ACTORS[shape])
    core_algos = root / "verl/trainer/ppo/core_algos.py"
    core_algos.write_text(SOURCES[shape])
    return core_algos
