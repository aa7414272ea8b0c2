"""What verl will really run with, compared with what was asked. Pure."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from trials.environment import EffectiveConfiguration

RELIED_ON = (
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "algorithm.use_kl_in_reward",
    "algorithm.norm_adv_by_std_in_grpo",
)
"""Settings that decide what a method's comparison means; verl's defaults for them differ between versions."""


def configuration_problems(
    effective: EffectiveConfiguration, asked: Mapping[str, Any], added: Sequence[str]
) -> list[str]:
    """Every reason why verl would not run with what was asked; empty when it would.

    Args:
        effective: as the training environment composed it.
        asked: key → value of the settings that the agent depends on.
        added: keys that the script adds with `+`.
    """
    if effective.error:
        return [f"verl's configuration cannot be composed: {effective.error}"]
    problems = [
        f"{key} is not a setting of this verl; {_suggestion(key, effective.known)}" for key in effective.unknown
    ]
    for key in added:
        real = [known for known in effective.known if known.endswith(f".{key}")]
        if real and key not in effective.known:
            problems.append(f"+{key} adds a setting that verl does not read; the one it reads is {real[0]}")
    for key, value in asked.items():
        if key in effective.unknown:
            continue
        if key not in effective.values:
            problems.append(f"{key}={value} was asked, but verl's configuration has no such value")
        elif not _same(value, effective.values[key]):
            problems.append(f"{key}={value} was asked, but verl would run with {effective.values[key]}")
    return problems


def relied_on(effective: EffectiveConfiguration, set_by_script: Mapping[str, str]) -> dict[str, str]:
    """Key → value, with a note where the value is verl's default rather than the script's."""
    found = {}
    for key in RELIED_ON:
        if key in effective.values:
            origin = "" if key in set_by_script else " (verl's default)"
            found[key] = f"{effective.values[key]}{origin}"
    return found


def nearest_keys(key: str, known: Sequence[str], count: int = 3) -> list[str]:
    """The known keys that were probably meant: the same under another parent first, then similar spellings."""
    leaf = key.rsplit(".", 1)[-1]
    moved = [other for other in known if other.endswith(f".{key}")]
    same_leaf = [other for other in known if other.rsplit(".", 1)[-1] == leaf]
    same_leaf.sort(key=lambda other: -difflib.SequenceMatcher(None, key, other).ratio())
    similar = difflib.get_close_matches(key, known, n=count, cutoff=0.8)
    return list(dict.fromkeys([*moved, *similar, *same_leaf]))[:count]


def _suggestion(key: str, known: Sequence[str]) -> str:
    nearest = nearest_keys(key, known)
    return f"did you mean {' or '.join(nearest)}?" if nearest else "remove it, or add it on purpose as +" + key


def _same(asked: Any, effective: Any) -> bool:
    if isinstance(asked, bool) or isinstance(effective, bool):
        return asked is effective
    if isinstance(asked, (int, float)) and isinstance(effective, (int, float)):
        return asked == effective
    return bool(asked == effective)
