#!/usr/bin/env bash
# GRPO, Qwen2.5-1.5B, synchronous trainer
set -xeuo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-1.5B}
GPUS=${GPUS:-8}
ROLLOUT_N=8

DATA=(
    data.train_files=${TRAIN_FILE:-$HOME/data/math.8k/train.parquet}
    data.val_files="['$HOME/data/gsm8k/dev.parquet','$HOME/data/amc23/dev.parquet']"
    data.train_batch_size=128
    data.truncation='error'
)

ACTOR=(
    actor_rollout_ref.model.path=${MODEL_PATH}
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$((64 / GPUS))
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.entropy_coeff=0
)

ROLLOUT=(actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=$ROLLOUT_N)

TRAINER=(
    trainer.logger='["console","file"]'
    trainer.n_gpus_per_node=${GPUS}
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=4
)

EXTRA=(
)

python3 -m verl.trainer.main_ppo_sync \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${TRAINER[@]}" \
    "${EXTRA[@]}" \
    "$@"
