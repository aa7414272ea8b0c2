#!/bin/bash
set -x
SCRIPT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null 2>&1 && pwd)"
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
: "${STEPS:=120}" "${SEED:=1}"
: ${GPUS:=8}

if [ -n "${DEBUG:-}" ]; then
    export HYDRA_FULL_ERROR=1
fi

HYDRA_FULL_ERROR=1 RAY_DEDUP_LOGS=0 python -u -m verl.trainer.main_ppo \
    --config-path="$SCRIPT_DIR/config" --config-name='ppo_trainer' \
    `# what is learned` \
    algorithm.adv_estimator=grpo \
    "data.train_files=$ROOT/data/train set.parquet" \
    data.val_files=$ROOT/data/dev.parquet \
    data.train_batch_size=64 data.seed=$SEED \
    `# how` \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.checkpoint.contents='[model,optimizer,extra]' \
    ++trainer.total_training_steps=${STEPS} \
    ~trainer.ray_wait_register_center_timeout \
    trainer.n_gpus_per_node=$GPUS \
    trainer.experiment_name="run_$(date +%s)" \
    trainer.save_freq=20 \
    trainer.test_freq=5 ${EXTRA:-} "$@" > >(tee "$SCRIPT_DIR/log") 2>&1
status=$?
echo "ended with $status"
exit $status
