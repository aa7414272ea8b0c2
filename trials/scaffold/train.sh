#!/usr/bin/env bash
# GRPO with verl and vLLM on @GPUS@ GPUs.
#
#   train.sh [key=value …]      further verl settings go to the end and win
#
# Logs go to the console; checkpoints go to checkpoints/<project>/<experiment> under the current folder.
set -euo pipefail

# <workspace>/task/scripts/train.sh: every path hangs on the place of this file, none on the current folder.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
VERL="$ROOT/task/repositories/verl"
DATA="$ROOT/data/datasets/main"
BASE="$ROOT/data/checkpoints/@MODEL@"

export PYTHONPATH="$VERL${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false
export RAY_DEDUP_LOGS=0

exec python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="'$DATA/train.parquet'" \
  data.val_files="'$DATA/dev.parquet'" \
  data.train_batch_size=@TRAIN_BATCH@ \
  data.max_prompt_length=@PROMPT_TOKENS@ \
  data.max_response_length=@RESPONSE_TOKENS@ \
  data.filter_overlong_prompts=False \
  data.truncation=error \
  actor_rollout_ref.model.path="'$BASE'" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=@MINI_BATCH@ \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=@TOKENS_PER_GPU@ \
  actor_rollout_ref.actor.clip_ratio=0.2 \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=@RESPONSES@ \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=False \
  actor_rollout_ref.rollout.val_kwargs.n=1 \
@REWARD@  trainer.logger='["console"]' \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=@GPUS@ \
  trainer.project_name=grpo \
  trainer.experiment_name=@MODEL@ \
  trainer.total_epochs=@EPOCHS@ \
  trainer.total_training_steps=@STEPS@ \
  trainer.save_freq=@SAVE_FREQ@ \
  trainer.test_freq=@SAVE_FREQ@ \
  "$@"
