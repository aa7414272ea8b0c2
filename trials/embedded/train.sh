#!/usr/bin/env bash
# GRPO with verl on the embedded task, on a machine without accelerators.
#
#   train.sh [key=value …]      further verl settings go to the end and win
#
# Same shape as a training script for a GPU box. What only a CPU needs is the block "CPU" and the settings marked so.
# Logs go to the console; checkpoints go to checkpoints/<project>/<experiment> under the current folder.
set -euo pipefail

# <workspace>/task/scripts/train.sh: every path hangs on the place of this file, none on the current folder.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
VERL="$ROOT/task/repositories/verl"
PLUGINS="$ROOT/task/plugins"                      # what lets verl train without accelerators
DATA="$ROOT/data/datasets/math.8k"
BASE="$ROOT/data/checkpoints/tiny-qwen2"
REWARD="$ROOT/task/scripts/reward.py"

export PYTHONPATH="$VERL:$PLUGINS${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false
export RAY_DEDUP_LOGS=0
export RAY_USAGE_STATS_ENABLED=0

# --- CPU: verl loads our plugin by its own hook; same trainer, loss and engine, a generator in plain torch.
export VERL_PLATFORM=cpu
export VERL_ENGINE_DEVICE=cuda                    # picks verl's stock FSDP engine
export VERL_USE_EXTERNAL_MODULES="verl_overlay.cpu${VERL_USE_EXTERNAL_MODULES:+,$VERL_USE_EXTERNAL_MODULES}"
unset CUDA_VISIBLE_DEVICES                        # empty is not the same: verl would see zero slots
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"     # a tiny model gains nothing from more, its neighbours lose
export TRANSFER_QUEUE_ENABLE=1
export TQ_NUM_THREADS="${TQ_NUM_THREADS:-1}"
export RAY_prestart_worker_first_driver=0
export TMPDIR="${RAY_TMPDIR:-${TMPDIR:-/tmp}}"   # a trial's scratch files go with its Ray's

# --- CPU: fork Ray's workers from one warm process (0 is the plain start). Ray reads these two when it is imported.
export VERL_CPU_FAST_START="${VERL_CPU_FAST_START:-1}"
if [[ "$VERL_CPU_FAST_START" == 1 ]]; then
  export RAY_JOB_ID=01000000 RAY_RAYLET_PID=$$
fi

exec python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="'$DATA/train.parquet'" \
  data.val_files="'$DATA/dev.parquet'" \
  data.train_batch_size=16 \
  data.val_batch_size=256 \
  data.max_prompt_length=32 \
  data.max_response_length=24 \
  data.shuffle=True \
  data.seed=1 \
  data.dataloader_num_workers=0 \
  data.filter_overlong_prompts=False \
  actor_rollout_ref.model.path="'$BASE'" \
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
  actor_rollout_ref.model.use_remove_padding=False \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 \
  actor_rollout_ref.actor.fsdp_config.use_torch_compile=False \
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32 \
  +actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32 \
  actor_rollout_ref.actor.use_torch_compile=False \
  actor_rollout_ref.actor.optim.lr=3e-4 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=3 \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.clip_ratio=0.2 \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=torch_cpu \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=False \
  actor_rollout_ref.rollout.val_kwargs.n=1 \
  actor_rollout_ref.rollout.agent.num_workers=1 \
  +actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_overlay.cpu.batched.BatchedAgentLoopManager \
  reward.num_workers=0 \
  reward.custom_reward_function.path="'$REWARD'" \
  reward.custom_reward_function.name=compute_score \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
  trainer.v1.sampler.custom_sampler.path=pkg://verl_overlay.cpu.sampler \
  trainer.v1.sampler.custom_sampler.name=FastPollReplayBuffer \
  trainer.device=cpu \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=1 \
  trainer.logger='["console"]' \
  trainer.project_name=embedded \
  trainer.experiment_name=trial \
  trainer.total_epochs=1000 \
  trainer.total_training_steps=48 \
  trainer.save_freq=6 \
  trainer.test_freq=12 \
  trainer.val_before_train=True \
  ray_kwargs.ray_init.num_cpus=16 \
  +ray_kwargs.ray_init.num_gpus=1 \
  +ray_kwargs.ray_init.include_dashboard=False \
  +ray_kwargs.ray_init.object_store_memory=268435456 \
  "$@"
