#!/usr/bin/env bash
# Answer the test questions with a merged model: inference.sh MODEL_DIR
# Results go to data/outputs of the workspace, or to $OUTPUT_DIR when that is set.
set -euo pipefail

if [ "$#" -ne 1 ]; then
    echo "usage: inference.sh MODEL_DIR" >&2
    exit 2
fi
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data=$(cd "$scripts/../../data" && pwd)
test="$data/datasets/main/test.parquet"
output="${OUTPUT_DIR:-$data/outputs}"
python="${PYTHON:-python3}"

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$output"
answers=$(mktemp "$output/.answers.XXXXXX")
trap 'rm -f "$answers"' EXIT

# Two processes: what vLLM holds of the GPU is free again before the forward pass.
"$python" "$scripts/inference.py" generate "$1" "$test" "$answers" --response-tokens "${RESPONSE_TOKENS:-@RESPONSE_TOKENS@}"
"$python" "$scripts/inference.py" logits "$1" "$answers" "$output"
