"""verl's rules on batch sizes: what its trainer refuses at start, or worse, accepts and turns into NaN. Pure."""

from collections.abc import Mapping

BATCH_DEFAULTS: Mapping[str, int] = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "data.train_batch_size": 1024,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
}
"""What verl takes for a setting that train.sh does not give, in all versions."""
MICRO_PER_GPU = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz"
BATCH_SETTINGS = (*BATCH_DEFAULTS, MICRO_PER_GPU)


def batch_problems(settings: Mapping[str, int | None], gpus: int) -> list[str]:
    """Why verl could not train with these batches on so many GPUs; [] when it can.

    `settings`: the values of `BATCH_SETTINGS` in train.sh, None where it does not give one, and of `DYNAMIC` (1 is true).
    """
    train, responses, mini, parallel = (
        _given(settings, key)
        for key in (
            "data.train_batch_size",
            "actor_rollout_ref.rollout.n",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
        )
    )
    problems = []
    if parallel < 1 or gpus % parallel:
        problems.append(f"tensor_model_parallel_size {parallel} does not divide {gpus} GPUs")
    if train * responses % gpus:
        problems.append(f"train_batch_size {train} × n {responses} is not a multiple of {gpus} GPUs")
    if mini > train:
        problems.append(f"ppo_mini_batch_size {mini} is more than train_batch_size {train}")
    if mini * responses % gpus:
        problems.append(f"ppo_mini_batch_size {mini} × n {responses} is not a multiple of {gpus} GPUs")
    elif not settings.get(DYNAMIC) and (micro := settings.get(MICRO_PER_GPU)) is not None:
        share = mini * responses // gpus
        if micro < 1 or share % micro:
            problems.append(f"a micro-batch of {micro} per GPU does not divide the mini-batch of {share} per GPU")
    return problems


def _given(settings: Mapping[str, int | None], key: str) -> int:
    value = settings.get(key)
    return BATCH_DEFAULTS[key] if value is None else value


def propose_batches(rows: int, gpus: int) -> tuple[int, int]:
    """(prompts per step, prompts per optimizer step) that keep the rules for any number of responses.

    At most 128 prompts a step and at least eight steps an epoch, where the rows allow it.

    Raises:
        ValueError: fewer rows than GPUs.
    """
    if rows < gpus:
        raise ValueError(f"{rows} training rows are fewer than the {gpus} GPUs; verl needs one row for each")
    train = gpus
    while train * 2 <= min(128, rows // 8):
        train *= 2
    return train, train // 4 if train % (4 * gpus) == 0 else train
