"""Merged models on dev questions: the real tiny Qwen2 in the training environment, whole and damaged by merges."""

import functools
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent.errors import StageError
from agent.model_check import QUESTIONS, build_request, check_merged_model, compare, grade, read_dev_rows
from agent.report import _model_check
from agent.submission import run_logged
from agent.tensors import row_entropy
from agent.workspace import Workspace
from trials.embedded.build import build_workspace
from trials.embedded.inference import respond
from trials.grading import compute_score

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(build_workspace(tmp_path_factory.mktemp("model check") / "workspace"))


@pytest.fixture
def model(embedded: Workspace, tmp_path: Path) -> Path:
    """As a merger leaves it: the base model itself, which is tied and has no lm_head."""
    shutil.copytree(embedded.base_model, tmp_path / "model")
    return tmp_path / "model"


def check(workspace: Workspace, model: Path, accuracy: float | None = 0.6, **options: Any) -> dict[str, Any]:
    run = functools.partial(run_logged, run_tag=str(model), **options)
    return check_merged_model(workspace, model, accuracy, 0.26, run)


def configure(model: Path, **values: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **values}))


def rewrite(model: Path, change: Callable[[Weights], object]) -> None:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def lose_head(model: Path) -> None:
    configure(model, tie_word_embeddings=False)


def renew_head(model: Path) -> None:
    """As transformers makes a missing one up, and saved like that."""
    lose_head(model)
    torch.manual_seed(1)
    rewrite(model, lambda weights: weights.update({"lm_head.weight": 0.02 * torch.randn(384, 64)}))


def test_it_answers_and_is_measured_as_the_inference_would(embedded: Workspace, model: Path) -> None:
    facts = check(embedded, model)
    rows = read_dev_rows(embedded)
    texts, logits = respond(model, [row["prompt"] for row in rows])
    told = json.loads((model.parent / "model_check_answer.json").read_text())
    assert len(rows) == QUESTIONS and told["texts"] == texts and told["finished"] == [True] * QUESTIONS
    assert facts["tokens"] == sum(map(len, logits)) and facts["answers"] == QUESTIONS
    assert facts["entropy"] == pytest.approx(float(row_entropy(torch.cat(logits)).mean()), rel=1e-4)
    scores = [
        compute_score("", text, row["reward_model"]["ground_truth"]) for row, text in zip(rows, texts, strict=True)
    ]
    assert facts["accuracy"] == sum(scores) / QUESTIONS and 0.2 < facts["accuracy"] < 0.9
    assert facts["problem"] is None and facts["trainer_entropy"] == 0.26
    settings = {what: (training, checked) for what, training, checked in facts["settings"]}
    training, checked = settings["sampling"]
    assert training.startswith("do_sample False, temperature verl's default") and checked == "greedy"
    assert settings["longest answer"] == ("24", "24 tokens") and settings["generator"][0] == "torch_cpu"
    page = "".join(_model_check(facts))
    assert "agree within" in page and "torch_cpu" in page and f"{facts['accuracy']:.3f}" in page


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "head lost": (lose_head, r"Qwen2ForCausalLM has a tensor lm_head\.weight, which the files lack \(1 in all\)"),
    "head made up": (renew_head, r"its entropy is 5\.\d+ nats per token over \d+ tokens, the trainer logged 0\.26 \(more"),
    "unknown kind": (
        lambda model: configure(model, model_type="qwen9", architectures=["Qwen9ForCausalLM"]),
        r"transformers does not know its architecture \(Qwen9ForCausalLM, model_type 'qwen9'\)",
    ),
    "another model's config": (
        lambda model: configure(model, intermediate_size=256),
        r"Qwen2ForCausalLM has another shape of model\.layers\.0\.mlp\.down_proj\.weight than the files \(6 in all\)",
    ),
    "not a number": (
        lambda model: rewrite(model, lambda weights: weights["model.norm.weight"].fill_(math.nan)),
        r"the logits of all \d+ tokens that it generated are not finite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_model_that_is_not_what_was_trained_is_refused(embedded: Workspace, model: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(model)
    with pytest.raises(StageError, match=message):
        check(embedded, model)


def test_what_cannot_be_said_stops_nothing(
    embedded: Workspace, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean = tmp_path / "lean" / "bin" / "python3"
    lean.parent.mkdir(parents=True)
    lean.write_text(f'#!/bin/sh\nexec "{sys.executable}" -ES "$@"\n')  # without what is installed
    lean.chmod(0o755)
    facts = check(embedded, model, training_env=str(tmp_path / "lean"))
    assert "cannot import transformers (No module named 'transformers')" in facts["unchecked"]
    monkeypatch.setattr("agent.model_check._LIMIT_S", 0.2)
    assert "the check of the merged model took longer than 0 s" in check(embedded, model)["unchecked"]
    (model / "tokenizer.json").unlink()
    facts = check(embedded, model)
    assert facts == {"unchecked": "the model has no tokenizer files"}
    assert "not tried on dev questions: the model has no tokenizer files." in "".join(_model_check(facts))


def answered(right: int, of: int = 32, **values: object) -> dict[str, Any]:
    texts = [rf"\boxed{{{int(index < right)}}}" for index in range(of)]
    usual = {"texts": texts, "finished": [True] * of, "tokens": 640, "mean_entropy": 0.3, "non_finite_tokens": 0}
    return {**usual, **values}


@pytest.mark.parametrize(
    ("answer", "accuracy", "entropy", "problem", "note"),
    [
        (answered(16), 0.6, 0.3, None, "agree within 0.260, three standard errors on 32"),
        (answered(8), 0.6, 0.3, None, "differ by 0.350, more than the 0.260 that chance explains on 32"),
        (answered(0), 0.0, 0.3, None, "agree within 0.066"),
        (answered(2, of=4), 0.6, 0.3, None, "not compared: 4 answers finished"),
        (answered(16), None, None, None, "not compared: 32 answers finished, the trainer's is None"),
        (answered(16, mean_entropy=2.95), 0.6, 0.3, "gibberish", "agree"),
        (answered(16, mean_entropy=2.85), 0.6, 0.3, None, "agree"),
        (answered(16, mean_entropy=9.0), 0.6, None, None, "agree"),
        (answered(16, mean_entropy=None, non_finite_tokens=640), 0.6, 0.3, "all 640 tokens", "agree"),
        (answered(16, non_finite_tokens=3), 0.6, 0.3, None, "agree"),  # padding, in some kernels
    ],
)  # fmt: skip
def test_only_gibberish_is_refused_and_a_gap_is_told(
    answer: dict[str, Any], accuracy: float | None, entropy: float | None, problem: str | None, note: str
) -> None:
    rows = [{"reward_model": {"ground_truth": "1"}}] * len(answer["texts"])
    seen = compare(answer, grade(rows, answer), accuracy, entropy)
    assert note in seen.note
    assert seen.problem is None if problem is None else problem in (seen.problem or "")


def test_unfinished_answers_count_for_nothing() -> None:
    rows = [{"reward_model": {"ground_truth": "1"}}] * 32
    seen = compare(half := answered(16, finished=[True] * 16 + [False] * 16), grade(rows, half), 0.9, 0.3)
    assert (seen.accuracy, seen.answers) == (1.0, 16)


def test_the_request_samples_as_the_script_validates(embedded: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    shutil.copytree(embedded.root / "task" / "scripts", root / "task" / "scripts")
    script = root / "task" / "scripts" / "train.sh"
    options = [
        "val_kwargs.do_sample=True", "val_kwargs.temperature=0.6", "val_kwargs.top_p=0.95", "val_kwargs.top_k=20",
        "temperature=0.8",
    ]  # fmt: skip
    words = [f"actor_rollout_ref.rollout.{option}" for option in options]
    words += ["+data.apply_chat_template_kwargs.enable_thinking=False", "data.max_response_length=1024"]
    lines = [
        line for line in script.read_text().splitlines() if not any(word.split("=")[0] + "=" in line for word in words)
    ]
    script.write_text("\n".join([*lines[:-1], f"  {' '.join(words)} \\", lines[-1]]))
    request = build_request(Workspace(root), tmp_path / "model", [])
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "entropy_temperature": 0.8, "response_tokens": 1024}
    assert expected.items() <= request.items() and request["chat_template_options"] == {"enable_thinking": False}
