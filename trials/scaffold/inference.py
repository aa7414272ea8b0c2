"""Answer test questions with a Hugging Face model and keep the logits of every generated token.

    inference.py generate MODEL TEST_PARQUET ANSWERS --response-tokens N
    inference.py logits MODEL ANSWERS OUTPUT_DIR

`generate` answers greedily, with vLLM, or with transformers where vLLM is not installed; ANSWERS holds one JSON object
per row: sample_id, prompt (token ids), response (token ids), text. `logits` makes a forward pass over each answer and writes

* ``math_results.parquet``: sample_id (int64) and output (string), one row per test row, in its order;
* ``math_results_logits.pt``: a list of float tensors [generated tokens, model vocabulary], in that order: the logits
  each generated token was chosen from, the final eos included.

Neither file appears before it is complete. Memory does not grow with the number of rows: one answer's logits are in memory
at a time and are written as they come.
"""

import argparse
import inspect
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

LOGITS_TYPE = torch.float32  # torch.bfloat16 halves the file and loses nothing where the model computes in bfloat16
BATCH = 16  # prompts that transformers answers together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    generate = stages.add_parser("generate")
    generate.add_argument("model", type=Path)
    generate.add_argument("test", type=Path)
    generate.add_argument("answers", type=Path)
    generate.add_argument("--response-tokens", type=int, required=True)
    logits = stages.add_parser("logits")
    logits.add_argument("model", type=Path)
    logits.add_argument("answers", type=Path)
    logits.add_argument("output", type=Path)
    options = parser.parse_args()
    if options.stage == "generate":
        write_answers(options.model, options.test, options.answers, options.response_tokens)
    else:
        write_results(options.model, options.answers, options.output)


# ---- generate ---------------------------------------------------------------------------------------------------------


def write_answers(model: Path, test: Path, target: Path, response_tokens: int) -> None:
    """One JSON line per test row, in its order."""
    table = pq.read_table(test)
    ids = table.column("sample_id").to_pylist() if "sample_id" in table.column_names else range(table.num_rows)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    chats = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for messages in table.column("prompt").to_pylist()
    )
    prompts = [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]
    answer = answer_with_vllm if find_spec("vllm") else answer_with_transformers
    with target.open("w", encoding="utf-8") as file:
        for sample_id, prompt, response in zip(ids, prompts, answer(model, prompts, response_tokens), strict=True):
            text = tokenizer.decode(response, skip_special_tokens=True)
            line = {"sample_id": sample_id, "prompt": prompt, "response": response, "text": text}
            file.write(json.dumps(line) + "\n")
    print(f"{len(prompts)} rows answered by {answer.__name__}", flush=True)


def answer_with_vllm(model: Path, prompts: list[list[int]], response_tokens: int) -> Iterator[list[int]]:
    """The greedy response to each prompt, its final eos included."""
    from vllm import LLM, SamplingParams

    context = getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None)
    longest = max(map(len, prompts)) + response_tokens
    longest = longest if context is None else min(longest, context)
    engine = LLM(model=str(model), max_model_len=longest, gpu_memory_utilization=0.85)
    greedy = SamplingParams(temperature=0.0, max_tokens=response_tokens)
    for result in engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy):
        yield list(result.outputs[0].token_ids)


def answer_with_transformers(model: Path, prompts: list[list[int]], response_tokens: int) -> Iterator[list[int]]:
    """The same with transformers, a few prompts at a time."""
    loaded = load_model(model)
    ends = loaded.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        width = max(map(len, batch))
        tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch], device=loaded.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=loaded.device)
        padding = loaded.generation_config.pad_token_id
        result = loaded.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=response_tokens,
            pad_token_id=padding if padding is not None else 0,
        )
        yield from (up_to_stop(row, stops) for row in result[:, width:].tolist())


def up_to_stop(response: list[int], stops: set[int]) -> list[int]:
    """The tokens up to and including the first that ends the answer, or all."""
    return next((response[: place + 1] for place, token in enumerate(response) if token in stops), response)


# ---- logits -----------------------------------------------------------------------------------------------------------


def write_results(model: Path, answers: Path, output: Path) -> None:
    """Both result files."""
    loaded = load_model(model)
    ids: list[int] = []
    texts: list[str] = []
    logits = LogitsFile(output / "math_results_logits.pt.partial")
    with answers.open(encoding="utf-8") as file:
        for line in file:
            answer = json.loads(line)
            ids.append(answer["sample_id"])
            texts.append(answer["text"])
            logits.add(response_logits(loaded, answer["prompt"], answer["response"]).to(LOGITS_TYPE))
    logits.close()
    table = pa.table({"sample_id": pa.array(ids, pa.int64()), "output": pa.array(texts, pa.string())})
    pq.write_table(table, output / "math_results.parquet.partial")
    for name in ("math_results_logits.pt", "math_results.parquet"):
        (output / f"{name}.partial").replace(output / name)
    print(f"{len(ids)} answers written to {output}", flush=True)


@torch.inference_mode()
def response_logits(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Logits that each response token was chosen from, [response tokens, vocabulary], on the CPU."""
    tokens = torch.tensor([prompt + response], device=model.device)
    options = {}
    for name in ("logits_to_keep", "num_logits_to_keep"):  # without it, the prompt's logits are computed, too
        if name in inspect.signature(model.forward).parameters:
            options = {name: len(response) + 1}
            break
    logits = model(input_ids=tokens, use_cache=False, **options).logits[0]
    chosen_from: torch.Tensor = logits[-len(response) - 1 : -1].cpu()
    return chosen_from


def load_model(model: Path) -> Any:
    """On the GPU in bfloat16 if there is one, else on the CPU in single precision."""
    device, precision = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    return AutoModelForCausalLM.from_pretrained(model).to(device, precision).eval()


class LogitsFile:
    """A list of tensors in the format of `torch.save`, written one tensor at a time.

    The format is a zip archive, stored: `data/<n>` holds the numbers of tensor n, aligned to 64 bytes so that the file
    can be mapped into memory; `data.pkl`, written last, is the list itself, which refers to them.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)
        self._tensors: list[_StoredTensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Append a 2-D tensor; its memory is free again afterwards."""
        tensor = tensor.contiguous()
        key = str(len(self._tensors))
        with self._zip.open(self._aligned(f"archive/data/{key}"), "w", force_zip64=True) as record:
            record.write(tensor.view(torch.uint8).numpy().reshape(-1).data)
        self._tensors.append(_StoredTensor(key, tensor.dtype, tensor.shape[0], tensor.shape[1]))

    def close(self) -> None:
        """Write the list and end the file."""
        with self._zip.open("archive/data.pkl", "w") as record:
            _Pickler(record, protocol=2).dump(self._tensors)
        self._zip.writestr("archive/byteorder", "little")
        self._zip.writestr("archive/version", "3\n")
        self._zip.close()
        self._file.close()

    def _aligned(self, name: str) -> zipfile.ZipInfo:
        entry = zipfile.ZipInfo(name)
        header = 30 + len(name) + 20 + 4  # fixed part, name, sizes in 64 bits, head of the padding
        padding = -(self._file.tell() + header) % 64
        entry.extra = b"FB" + struct.pack("<H", padding) + bytes(padding)
        return entry


class _Storage:
    """Refers to a record of the archive."""

    def __init__(self, key: str, dtype: torch.dtype, numbers: int) -> None:
        kinds = {torch.float32: "FloatStorage", torch.bfloat16: "BFloat16Storage", torch.float16: "HalfStorage"}
        self.identity = ("storage", getattr(torch, kinds[dtype]), key, "cpu", numbers)


class _StoredTensor:
    """Pickles as a tensor whose numbers lie in the archive."""

    def __init__(self, key: str, dtype: torch.dtype, rows: int, columns: int) -> None:
        self._storage = _Storage(key, dtype, rows * columns)
        self._shape = (rows, columns)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = torch._utils._rebuild_tensor_v2  # type: ignore[attr-defined]
        return rebuild, (self._storage, 0, self._shape, (self._shape[1], 1), False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, _Storage) else None


if __name__ == "__main__":
    main()
