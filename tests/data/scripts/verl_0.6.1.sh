#!/usr/bin/env bash
set -xeuo pipefail

export PYTHONPATH="$(pwd)${PYTHONPATH:+:$PYTHONPATH}"
ulimit -c 0

train() {
    local tag=${1:-none}
    echo "training $tag with python3 -m verl.trainer.main_ppo"
    env -u WANDB_API_KEY python3 -m verl.trainer.main_ppo \
        algorithm.adv_estimator=grpo \
        algorithm.use_kl_in_reward=False \
        data.train_files=/data/math.8k/train.parquet data.val_files='["/data/gsm8k/dev.parquet", "/data/amc23/dev.parquet"]' \
        actor_rollout_ref.actor.entropy_coeff=0 \
        actor_rollout_ref.rollout.multi_turn.tool_config_path=null \
        custom_reward_function.path=/data/reward.py \
        trainer.total_training_steps=100 \
        trainer.save_freq=10 \
        trainer.test_freq=-1
}

cat > /dev/null <<NOTE
an unmatched ' quote and python3 -m verl.trainer.main_ppo in a here-document
NOTE
train "$@"
