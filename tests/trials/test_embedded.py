"""The embedded workspace: its files, its data, its base model and its scripts."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import trials.embedded.build as build_module
from trials.embedded.build import build_workspace
from trials.embedded.data import build_splits
from trials.embedded.problems import CHAIN_SUM, LAST_DIGIT, Problem, demonstration
from trials.grading import compute_score

EMBEDDED = Path(build_module.__file__).parent
BASE = EMBEDDED / "base"
RESULTS = ["math_results.parquet", "math_results_logits.pt"]
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 24  # the limits in train.sh


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_workspace(tmp_path_factory.mktemp("a place") / "workspace")


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Problem]]:
    return build_splits()


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BASE)


# --- the folder


def test_layout(workspace: Path) -> None:
    for name in (
        "task/repositories/verl/verl/__init__.py",
        "task/repositories/verl/verl/trainer/ppo/core_algos.py",
        "task/repositories/verl/scripts/model_merger.py",
        "task/scripts/train.sh",
        "task/scripts/inference.sh",
        "task/scripts/inference.py",
        "task/scripts/reward.py",
        "data/checkpoints/tiny-qwen2/model.safetensors",
        "data/checkpoints/tiny-qwen2/tokenizer.json",
        *(f"data/datasets/math.8k/{split}.parquet" for split in ("train", "dev", "test")),
    ):
        assert (workspace / name).is_file(), name
    assert (workspace / "task" / "plugins" / "verl_overlay" / "cpu" / "__init__.py").is_file()
    assert list((workspace / "data" / "outputs").iterdir()) == []
    assert not list(workspace.rglob("__pycache__"))
    assert os.access(workspace / "task" / "scripts" / "train.sh", os.X_OK)
    assert workspace.stat().st_mode & 0o777 == 0o755


def test_an_existing_folder_with_content_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        build_workspace(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(build_module, "write_splits", fail)
    with pytest.raises(OSError, match="disk full"):
        build_workspace(tmp_path / "workspace")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_fill", lambda root, verl: (root / "file").write_text("x"))
    target = tmp_path / "workspace"
    target.mkdir()
    assert build_workspace(target) == target
    assert [path.name for path in tmp_path.iterdir()] == ["workspace"]


def test_package_stays_light_and_apart() -> None:
    """Importing the builder loads nothing heavy, and no file here imports verl or the agent."""
    command = (
        "import sys, trials.embedded.build, trials.grading; "
        "print({'torch', 'transformers', 'reasoning_gym', 'pandas', 'math_verify'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", command], cwd=EMBEDDED.parents[1], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
    for path in [*EMBEDDED.glob("*.py"), EMBEDDED.parent / "grading.py"]:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert not {name.split(".")[0] for name in names} & {"verl", "agent", "verl_overlay"}, path.name


# --- the data


def test_splits_are_disjoint_balanced_and_reproducible(splits: dict[str, list[Problem]]) -> None:
    seen = [problem.question for problems in splits.values() for problem in problems]
    assert len(seen) == len(set(seen))
    sizes = {split: len(problems) for split, problems in splits.items()}
    assert sizes == {"train": 3000, "dev": 200, "test": 200}
    for problems in splits.values():
        assert Counter(problem.source for problem in problems) == {
            CHAIN_SUM: len(problems) // 2,
            LAST_DIGIT: len(problems) // 2,
        }
    assert build_splits() == splits


def test_parquet_files_have_verl_schema(workspace: Path, splits: dict[str, list[Problem]]) -> None:
    for split, problems in splits.items():
        path = workspace / "data" / "datasets" / "math.8k" / f"{split}.parquet"
        rows = pd.read_parquet(path)
        expected = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        assert list(rows.columns) == expected + (["sample_id"] if split == "test" else [])
        for index, (row, problem) in enumerate(zip(rows.to_dict("records"), problems, strict=True)):
            assert list(row["prompt"]) == [{"role": "user", "content": problem.question}]
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(problem.answer)}
            assert row["extra_info"] == {"split": split, "index": index}
    assert str(pq.read_schema(path).field("sample_id").type) == "int64"


def test_answers_agree_with_python(splits: dict[str, list[Problem]]) -> None:
    for problem in splits["dev"]:
        (a, b, c), (first, second) = problem.values, problem.operators
        value = eval(f"({a} {first} {b}) {second} {c}")
        assert problem.answer == (value % 10 if problem.source == LAST_DIGIT else value)


def test_demonstrators_are_partly_right_and_differ(splits: dict[str, list[Problem]]) -> None:
    rng = random.Random(0)
    pairs = [(problem, demonstration(problem, rng)) for problem in splits["train"]]
    accuracy = sum(compute_score(p.source, text, str(p.answer)) for p, text in pairs) / len(pairs)
    assert 0.2 < accuracy < 0.5
    assert len({demonstration(splits["dev"][0], rng) for _ in range(50)}) > 10


# --- the base model


def test_tokenizer_is_qwen2s_and_loses_nothing(tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    for text in ("3+4=7\nAnswer:\\boxed{7}", "  tabs\t\n\nand ünïcode ∑ 漢字", "123 + 4 = 127", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_prompts_and_responses_fit(splits: dict[str, list[Problem]], tokenizer) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(1)
    for problem in (*splits["dev"], *splits["test"]):
        messages = [{"role": "user", "content": problem.question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_start|>assistant\n")
        assert len(tokenizer.encode(text)) <= PROMPT_TOKENS
        response = demonstration(problem, rng)
        assert len(tokenizer.encode(response)) < RESPONSE_TOKENS  # one more for the eos
        assert tokenizer.decode(tokenizer.encode(response)) == response


def test_base_model_is_small_and_wider_than_its_tokenizer(tokenizer) -> None:  # type: ignore[no-untyped-def]
    config = json.loads((BASE / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["vocab_size"] > len(tokenizer)
    assert (BASE / "model.safetensors").stat().st_size < 4 * 2**20


# --- the scripts


@pytest.fixture(scope="module")
def outputs(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    run_inference(workspace, OUTPUT_DIR=str(folder))
    return folder


def run_inference(workspace: Path, **environment: str) -> None:
    command = [str(workspace / "task/scripts/inference.sh"), str(workspace / "data/checkpoints/tiny-qwen2")]
    inherited = {name: value for name, value in os.environ.items() if name != "OUTPUT_DIR"}
    environment = {**inherited, "PYTHON": sys.executable, **environment}
    subprocess.run(command, check=True, cwd="/", capture_output=True, env=environment)


def test_inference_writes_results_in_test_order(workspace: Path, outputs: Path) -> None:
    table = pq.read_table(outputs / "math_results.parquet")
    assert table.schema.names == ["sample_id", "output"]
    assert [str(kind) for kind in table.schema.types] == ["int64", "string"]
    test = pq.read_table(workspace / "data/datasets/math.8k/test.parquet").to_pylist()
    assert table["sample_id"].to_pylist() == [row["sample_id"] for row in test]
    scores = [
        compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])
        for row, text in zip(test, table["output"].to_pylist(), strict=True)
    ]
    assert 0.2 < sum(scores) / len(scores) < 0.8
    assert sorted(path.name for path in outputs.iterdir()) == RESULTS


def test_logits_explain_the_greedy_tokens(outputs: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    texts = pq.read_table(outputs / "math_results.parquet")["output"].to_pylist()
    logits = torch.load(outputs / "math_results_logits.pt", weights_only=True)
    vocabulary = json.loads((BASE / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    assert len(logits) == len(texts)
    for text, rows in zip(texts, logits, strict=True):
        assert rows.dtype == torch.float32 and rows.shape[1] == vocabulary and torch.isfinite(rows).all()
        assert rows.untyped_storage().nbytes() == rows.numel() * 4
        tokens = rows.argmax(-1).tolist()
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
        assert tokens[-1] == tokenizer.eos_token_id or len(tokens) == RESPONSE_TOKENS


def test_inference_writes_to_the_workspace_by_default(workspace: Path) -> None:
    folder = workspace / "data" / "outputs"
    run_inference(workspace)
    assert sorted(path.name for path in folder.iterdir()) == RESULTS
    for path in folder.iterdir():
        path.unlink()


def test_inference_without_a_model_explains_itself(workspace: Path) -> None:
    result = subprocess.run([workspace / "task/scripts/inference.sh"], capture_output=True, text=True)
    assert result.returncode == 2 and "usage" in result.stderr


def test_merger_refuses_a_missing_folder(workspace: Path) -> None:
    script = workspace / "task/repositories/verl/scripts/model_merger.py"
    result = subprocess.run([sys.executable, script, "--local_dir", "/nowhere/actor"], capture_output=True, text=True)
    assert result.returncode == 2 and "/nowhere/actor" in result.stderr
