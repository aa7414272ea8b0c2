#!/usr/bin/env bash
# Answer the test split with a merged model: inference.sh MODEL_DIR
# Results go to data/outputs of the workspace, or to $OUTPUT_DIR when that is set.
set -euo pipefail

if [ "$#" -ne 1 ]; then
    echo "usage: inference.sh MODEL_DIR" >&2
    exit 2
fi
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data=$(cd "$scripts/../../data" && pwd)

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" "$scripts/inference.py" "$1" "$data/datasets/math.8k/test.parquet" "${OUTPUT_DIR:-$data/outputs}"
