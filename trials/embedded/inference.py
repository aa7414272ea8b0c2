"""Answer the test split with a merged model, greedily: ``inference.py MODEL TEST_PARQUET OUTPUT_DIR``.

Writes two files, each complete or absent:

* ``math_results.parquet``: ``sample_id`` (int64) and ``output`` (string), one row per test row, in its order;
* ``math_results_logits.pt``: a list of float32 tensors [generated tokens, model vocabulary], in that order:
  the raw logits each generated token was chosen from, the final eos included.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

RESPONSE_TOKENS = 24  # as in train.sh
BATCH = 256  # prompts generated together


def main(model_dir: Path, test_file: Path, output_dir: Path) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = pq.read_table(test_file, columns=["sample_id", "prompt"]).to_pylist()
    texts, logits = respond(model_dir, [row["prompt"] for row in rows])
    output_dir.mkdir(parents=True, exist_ok=True)
    _write_table([row["sample_id"] for row in rows], texts, output_dir / "math_results.parquet")
    temporary = output_dir / "math_results_logits.pt.partial"
    torch.save(logits, temporary)
    temporary.replace(output_dir / "math_results_logits.pt")
    print(f"{len(rows)} answers written to {output_dir}")


def respond(model_dir: Path, prompts: list[list[dict[str, str]]]) -> tuple[list[str], list[torch.Tensor]]:
    """The greedy response to each chat prompt, and its logits."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    texts: list[str] = []
    logits: list[torch.Tensor] = []
    for start in range(0, len(prompts), BATCH):
        chats = [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            for prompt in prompts[start : start + BATCH]
        ]
        inputs = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)
        result = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=RESPONSE_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = result.sequences[:, inputs["input_ids"].shape[1] :]
        rows = torch.stack(result.logits, dim=1)
        for row, response in enumerate(tokens):
            length = _generated(response.tolist(), tokenizer.eos_token_id)
            texts.append(tokenizer.decode(response[:length], skip_special_tokens=True))
            logits.append(rows[row, :length].float().clone())  # a view would save the whole batch with it
    return texts, logits


def _generated(response: list[int], eos: int) -> int:
    """The number of generated tokens: up to and including the first eos, or all."""
    return response.index(eos) + 1 if eos in response else len(response)


def _write_table(sample_ids: list[int], texts: list[str], target: Path) -> None:
    table = pa.table({"sample_id": pa.array(sample_ids, pa.int64()), "output": pa.array(texts, pa.string())})
    temporary = target.with_name(target.name + ".partial")
    pq.write_table(table, temporary)
    temporary.replace(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
