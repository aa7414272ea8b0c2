#!/usr/bin/env bash
# GRPO | Qwen2.5-1.5B | FSDP
set -xeuo pipefail

DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
BACKEND=${BACKEND:-vllm}
GPUS=${GPUS:-8}
MEMORY=${MEMORY:-0.6}

case "${DEVICE}" in
    gpu)
        ;;
    npu)
        export TASK_QUEUE_ENABLE=2
        MEMORY=0.9
        ;;
    *)
        echo "Unsupported DEVICE=${DEVICE}" >&2
        exit 1
        ;;
esac

ACTOR=(
    actor_rollout_ref.model.path=${MODEL_PATH:-Qwen/Qwen2.5-1.5B}
    actor_rollout_ref.actor.optim.lr=${ACTOR_LR:-1e-6}
    actor_rollout_ref.rollout.gpu_memory_utilization=${MEMORY}
    actor_rollout_ref.rollout.name=${BACKEND}
)
TRAINER=(
    trainer.logger='["console"]'
    trainer.n_gpus_per_node=${GPUS}
    trainer.save_freq=20
    trainer.test_freq=5
)

LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ] && { [ "${BACKEND}" = vllm ] || [ "${BACKEND}" = sglang ]; }; then
    LAUNCH=(uv run --frozen --no-sync python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=/data/train.parquet \
    "${ACTOR[@]}" \
    "${TRAINER[@]}" \
    "$@"
