"""Runs in the training environment: loads a merged model with transformers and lets it answer a few prompts.

``python3 answering.py REQUEST.json ANSWER.json``; standard library at import. The request is made, and the answer judged, by
`agent/model_check.py`; both are one JSON object. The answer has one of

* ``problem``: why the model cannot be used;
* ``unchecked``: why nothing can be said about it here;
* ``texts``, ``finished``, ``tokens``, ``mean_entropy``, ``non_finite_tokens`` …: what it answered.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BYTES_PER_PARAMETER = 2  # bfloat16, on a GPU
MEMORY_FACTOR = 2.0  # free GPU memory, as multiples of the weights, for the keys and values of the answers beside them


class UnusableModel(Exception):
    """The model cannot be what was trained; the text says why."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What the model of a request answers; see `agent/model_check.py` for the request's fields."""
    try:
        import transformers
        from transformers import AutoTokenizer
    except ImportError as error:
        return {"unchecked": f"the training environment cannot import transformers ({error})"}
    path, trusted = Path(request["model"]), bool(request["trust_remote_code"])
    if complaint := find_unknown_type(path, trusted):
        if find_unknown_type(Path(request["base"]), trusted):
            return {"unchecked": f"{complaint}, nor the base model's"}
        return {"problem": complaint}
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=trusted)
    model = load_model(path, trusted)
    return {
        **generate(model, tokenizer, request),
        "model_class": type(model).__name__,
        "transformers": transformers.__version__,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def find_unknown_type(path: Path, trusted: bool) -> str | None:
    """Why transformers does not know the kind of model that config.json names, None when it does."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    except (KeyError, ValueError, OSError):
        named = json.loads((path / "config.json").read_text(encoding="utf-8"))
        kind = ", ".join(map(str, named.get("architectures") or [])) or "no architecture"
        return f"transformers does not know its architecture ({kind}, model_type {named.get('model_type')!r})"
    return None


def load_model(path: Path, trusted: bool) -> Any:
    """The model on the first GPU that has room, else on the CPU.

    Raises:
        UnusableModel: the files lack tensors that its class has, or have them in other shapes; transformers would make
            such ones up.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model, seen = AutoModelForCausalLM.from_pretrained(
        path, torch_dtype="auto", trust_remote_code=trusted, output_loading_info=True, ignore_mismatched_sizes=True
    )
    name = type(model).__name__
    if missing := sorted(seen["missing_keys"]):
        raise UnusableModel(f"{name} has a tensor {missing[0]}, which the files lack ({len(missing)} in all)")
    if mismatched := sorted(str(each[0]) for each in seen["mismatched_keys"]):
        raise UnusableModel(f"{name} has another shape of {mismatched[0]} than the files ({len(mismatched)} in all)")
    needed = MEMORY_FACTOR * BYTES_PER_PARAMETER * sum(tensor.numel() for tensor in model.parameters())
    if torch.cuda.is_available() and torch.cuda.mem_get_info(0)[0] > needed:
        return model.to("cuda:0", torch.bfloat16).eval()
    return model.to(torch.float32).eval()


class EntropyMeter:
    """Sums the entropy, nats, of the raw logits of every token that is generated; stands among the logits processors."""

    def __init__(self, prompt_tokens: int, stops: Any, temperature: float) -> None:
        self._prompt_tokens, self._stops, self._temperature = prompt_tokens, stops, temperature
        self.tokens = self.non_finite = 0
        self.total = 0.0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Both per row: the tokens so far, and the logits of the next one; the logits are returned as they are."""
        import torch

        generated = input_ids[:, self._prompt_tokens :]
        is_running = ~torch.isin(generated, self._stops).any(-1)
        log_probability = (scores[is_running].float() / self._temperature).log_softmax(-1)
        terms = torch.where(log_probability.isneginf(), 0.0, log_probability.exp() * log_probability)
        entropy = -terms.sum(-1)
        self.tokens += len(entropy)
        self.non_finite += int((~entropy.isfinite()).sum())
        self.total += float(entropy[entropy.isfinite()].sum())
        return scores.nan_to_num()


def generate(model: Any, tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Answers to all prompts of the request as one batch, until each ends, is as long as allowed, or time is over."""
    import torch
    from transformers import GenerationConfig

    chats = [
        tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=False, **request["chat_template_options"]
        )
        for prompt in request["prompts"]
    ]
    own_stops = getattr(model.generation_config, "eos_token_id", None)
    stops = {tokenizer.eos_token_id, *(own_stops if isinstance(own_stops, list) else [own_stops])} - {None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stops, default=0)
    tokenizer.pad_token_id = pad
    inputs = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    meter = EntropyMeter(length, torch.tensor(sorted(stops), device=model.device), request["entropy_temperature"])
    # In place of what lies beside the model: its penalties and cuts are not those of the training.
    model.generation_config = GenerationConfig(
        max_new_tokens=request["response_tokens"], max_time=request["seconds"], eos_token_id=sorted(stops) or None,
        pad_token_id=pad, do_sample=False,
    )  # fmt: skip
    if request["temperature"] > 0:
        sampling = {"temperature": request["temperature"], "top_p": request["top_p"], "top_k": max(request["top_k"], 0)}
        model.generation_config.update(do_sample=True, **sampling)
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = model.generate(**inputs, logits_processor=[meter])[:, length:].tolist()
    ends = [next((place for place, token in enumerate(row) if token in stops), len(row)) for row in rows]
    return {
        "texts": [tokenizer.decode(row[:end], skip_special_tokens=True) for row, end in zip(rows, ends, strict=True)],
        "finished": [end < len(row) or end >= request["response_tokens"] for row, end in zip(rows, ends, strict=True)],
        "tokens": meter.tokens,
        "mean_entropy": meter.total / meter.tokens if meter.tokens > meter.non_finite else None,
        "non_finite_tokens": meter.non_finite,
    }


def main(request_file: Path, answer_file: Path) -> None:
    try:
        found = answer(json.loads(request_file.read_text(encoding="utf-8")))
    except UnusableModel as error:
        found = {"problem": str(error)}
    except Exception as error:  # whatever a library does not like: the inference will tell
        line = (str(error).strip().splitlines() or ["no details"])[0][:300]
        found = {"unchecked": f"{type(error).__name__}: {line}"}
    answer_file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
