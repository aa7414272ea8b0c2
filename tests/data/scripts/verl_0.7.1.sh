#!/usr/bin/env bash
set -euo pipefail
IFS=$'\n\t'

cd "$(dirname "$0")/.."
NOW=$(date +%Y%m%d)

declare -a ARGS=(
    algorithm.adv_estimator=grpo            # group relative
    data.train_files=data/train.parquet
    data.val_files=data/dev.parquet

    # optimiser
    actor_rollout_ref.actor.optim.lr=1e-6
    'actor_rollout_ref.rollout.val_kwargs.temperature=0.6'
    "trainer.experiment_name=grpo_$NOW"
)
ARGS+=(trainer.save_freq=10 trainer.test_freq=5 \
    trainer.total_training_steps=100)

[[ -t 1 ]] && COLOR=1
(
    set -x
    uv run --no-sync python -m verl.trainer.main_ppo "${ARGS[@]}" trainer.n_gpus_per_node=8 "$@"
) 2>&1 | tee -a train.log
