"""verl's rules for batch sizes, checked before a trial is spent. Pure.

One training step takes `data.train_batch_size` prompts with `rollout.n` responses each; the actor updates on mini-batches
of `actor.ppo_mini_batch_size` prompts, spread over the GPUs and cut into micro-batches. Where a division leaves a rest or
nothing, verl stops late, or (before 0.4) trains on NaN. https://github.com/verl-project/verl/issues/405
"""

import re
from collections.abc import Mapping
from typing import Any

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def batch_problems(settings: Mapping[str, Any], verl_version: str | None = None) -> list[str]:
    """Every rule that a point breaks, with its numbers; empty when verl can train with it.

    Args:
        settings: dotted key → value (numbers may be text). A rule whose values are not all there is not checked.
        verl_version: from 0.8 on, log probabilities are computed in whole micro-batches, too; None checks what holds for
            every version.
    """
    read = _Reader(settings)
    gpus, model_parallel = read.gpus(), read.model_parallel()
    train, mini, samples = (
        read("data.train_batch_size"),
        read(f"{_ACTOR}.ppo_mini_batch_size"),
        read(f"{_ROLLOUT}.n", 1),
    )
    problems = []
    if gpus and model_parallel and gpus % model_parallel:
        problems.append(f"{gpus} GPUs cannot be divided into groups of {model_parallel} (model or sequence parallel)")
        return problems
    ranks = gpus // model_parallel if gpus and model_parallel else None
    if gpus and (tensor := read(f"{_ROLLOUT}.tensor_model_parallel_size")) and gpus % tensor:
        problems.append(f"rollout.tensor_model_parallel_size={tensor} does not divide the {gpus} GPUs")
    if train and samples and ranks and train * samples % ranks:
        problems.append(
            f"train_batch_size {train} × n {samples} = {train * samples} responses cannot be divided among {ranks} ranks"
        )
    if train and mini and mini > train:
        problems.append(f"ppo_mini_batch_size {mini} is larger than train_batch_size {train}")
    elif train and mini and train % mini:
        problems.append(f"train_batch_size {train} is no multiple of ppo_mini_batch_size {mini}")
    if mini and samples and ranks:
        problems += _mini_batch_problems(read, mini, samples, ranks)
    if train and samples and ranks and train * samples % ranks == 0 and _is_at_least(verl_version, (0, 8)):
        problems += _log_prob_problems(read, train * samples // ranks)
    return problems


def _mini_batch_problems(read: "_Reader", mini: int, samples: int, ranks: int) -> list[str]:
    """A rank's share of a mini-batch, and its micro-batches."""
    total = mini * samples
    name = f"ppo_mini_batch_size {mini} × n {samples} = {total} responses"
    if total < ranks:
        return [f"{name} leave nothing for some of {ranks} ranks"]
    if total % ranks:
        return [f"{name} cannot be divided among {ranks} ranks"]
    share, problems = total // ranks, []
    if read.text(f"{_ACTOR}.use_dynamic_bsz") == "true":
        return []
    micro, per = read(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"), "ppo_micro_batch_size_per_gpu"
    if micro is None and (whole := read(f"{_ACTOR}.ppo_micro_batch_size")):
        if mini % whole:
            problems.append(f"ppo_mini_batch_size {mini} is no multiple of ppo_micro_batch_size {whole}")
        micro, per = whole // ranks, f"ppo_micro_batch_size {whole} ÷ {ranks} ranks ="
        if micro == 0:
            return [*problems, f"ppo_micro_batch_size {whole} leaves nothing for some of {ranks} ranks"]
    if micro and share < micro:
        problems.append(
            f"{name} ÷ {ranks} ranks = {share} are fewer than {per} {micro}: no gradient step would be taken"
        )
    elif micro and share % micro:
        problems.append(f"{name} ÷ {ranks} ranks = {share} are no multiple of {per} {micro}")
    return problems


def _log_prob_problems(read: "_Reader", share: int) -> list[str]:
    """A rank's responses must be whole micro-batches where their log probabilities are computed."""
    needs_reference = "true" in (read.text(f"{_ACTOR}.use_kl_loss"), read.text("algorithm.use_kl_in_reward"))
    problems = []
    for section in (_ROLLOUT, _REF) if needs_reference else (_ROLLOUT,):
        micro = read(f"{section}.log_prob_micro_batch_size_per_gpu")
        if micro and share % micro and read.text(f"{section}.log_prob_use_dynamic_bsz") != "true":
            name = f"{section.rsplit('.', 1)[-1]}.log_prob_micro_batch_size_per_gpu {micro}"
            problems.append(f"{share} responses per rank are no multiple of {name}")
    return problems


def _is_at_least(version: str | None, least: tuple[int, int]) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return match is not None and (int(match[1]), int(match[2])) >= least


class _Reader:
    """Settings as numbers; None for what is not there or no integer."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def __call__(self, key: str, default: int | None = None) -> int | None:
        value = self._settings.get(key)
        if value is None or isinstance(value, bool):
            return default
        try:
            return int(str(value))
        except ValueError:
            return None

    def text(self, key: str) -> str:
        return str(self._settings.get(key, "")).lower()

    def gpus(self) -> int | None:
        nodes, each = self("trainer.nnodes", 1), self("trainer.n_gpus_per_node")
        return nodes * each if nodes and each else None

    def model_parallel(self) -> int | None:
        """GPUs that share one copy of the actor."""
        if self.text(f"{_ACTOR}.strategy") != "megatron":
            return self(f"{_ACTOR}.ulysses_sequence_parallel_size", 1)
        sizes = [
            self(f"{_ACTOR}.megatron.{kind}_parallel_size", 1) for kind in ("tensor_model", "pipeline_model", "context")
        ]
        product = 1
        for size in sizes:
            product *= size or 1
        return product
