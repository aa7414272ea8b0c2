#!/usr/bin/env bash
set -euxo pipefail

project_name='GRPO'
exp_name='Qwen2.5-1.5B-math'

adv_estimator=grpo

clip_ratio_low=0.2
clip_ratio_high=0.28

max_prompt_length=$((512 * 1))
max_response_length=$((1024 * 2))
n_resp_per_prompt=8
train_prompt_bsz=128
train_prompt_mini_bsz=64

# Paths
DATA_HOME=${DATA_HOME:-"${HOME}/data"}
MODEL_PATH=${MODEL_PATH:-"${DATA_HOME}/models/Qwen2.5-1.5B"}
CKPTS_DIR=${CKPTS_DIR:-"${DATA_HOME}/ckpts/${project_name}/${exp_name}"}
TRAIN_FILE=${TRAIN_FILE:-"${DATA_HOME}/math.8k/train.parquet"}
TEST_FILE=${TEST_FILE:-"${DATA_HOME}/gsm8k/dev.parquet"}

# Performance related
use_dynamic_bsz=True
actor_ppo_max_token_len=$((max_prompt_length + max_response_length))
offload=True

python3 -m verl.trainer.main_ppo \
    data.train_files="${TRAIN_FILE}" \
    data.val_files="${TEST_FILE}" \
    data.prompt_key=prompt \
    data.truncation='left' \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    data.train_batch_size=${train_prompt_bsz} \
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \
    algorithm.adv_estimator=${adv_estimator} \
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} \
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    +actor_rollout_ref.model.override_config.attention_dropout=0. \
    actor_rollout_ref.actor.use_dynamic_bsz=${use_dynamic_bsz} \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${train_prompt_mini_bsz} \
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \
    actor_rollout_ref.rollout.name=vllm \
    trainer.logger=['console'] \
    trainer.project_name="${project_name}" \
    trainer.experiment_name="${exp_name}" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="${NNODES:-1}" \
    trainer.val_before_train=True \
    trainer.test_freq=5 \
    trainer.save_freq=10 \
    trainer.total_epochs=10 \
    trainer.default_local_dir="${CKPTS_DIR}" \
    trainer.resume_mode=auto 2>&1 | tee "train_${exp_name}.log"
