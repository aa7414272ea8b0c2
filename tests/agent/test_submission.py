"""Submission files: validation finds every defect, publication never loses anything."""

import errno
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from agent.errors import StageError
from agent.submission import LOGITS, RESULTS, is_published, publish, run_inference, run_logged, validate_submission
from agent.tensors import find_model_problem, read_sample_logits, row_entropy
from agent.workspace import Workspace

VOCABULARY = 24


@pytest.fixture
def case(tmp_path: Path) -> Path:
    """A test file, a model configuration and a valid submission in `results/`."""
    answers = [{"style": "rule", "ground_truth": text} for text in ("7", "1/2", "5")]
    test = pd.DataFrame(
        {"prompt": [[{"role": "user", "content": "?"}]] * 3, "reward_model": answers, "sample_id": [4, 2, 9]}
    )
    test.to_parquet(tmp_path / "test.parquet", index=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    (tmp_path / "results").mkdir()
    write_results(tmp_path)
    write_logits(tmp_path, [torch.zeros(n, VOCABULARY) for n in (2, 3, 1)])
    return tmp_path


def write_results(case: Path, **columns: object) -> None:
    table: dict[str, object] = {
        "sample_id": [4, 2, 9],
        "output": [r"\boxed{7}", r"\boxed{0.5}", r"\boxed{6}"],
        **columns,
    }
    pd.DataFrame(table).to_parquet(case / "results" / RESULTS, index=False)


def write_logits(case: Path, value: object) -> None:
    torch.save(value, case / "results" / LOGITS)


def validate(case: Path):  # type: ignore[no-untyped-def]
    return validate_submission(case / "results", case / "test.parquet", case / "model")


def test_a_valid_submission_is_described(case: Path) -> None:
    submission = validate(case)
    assert submission.samples == 3 and submission.mean_tokens == 2
    assert submission.accuracy == pytest.approx(2 / 3)
    assert submission.mean_entropy == pytest.approx(np.log(VOCABULARY))  # uniform logits


def uniform(*tokens: int) -> list[torch.Tensor]:
    return [torch.zeros(n, VOCABULARY) for n in tokens]


def with_value(value: float) -> list[torch.Tensor]:
    logits = uniform(2, 3, 1)
    logits[1][2, 5] = value
    return logits


def hidden_index(case: Path) -> None:
    frame = pd.DataFrame({"sample_id": [4, 2, 9], "output": ["a", "b", "c"]}).sample(frac=1, random_state=1)
    frame.to_parquet(case / "results" / RESULTS)


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "other order": (lambda c: write_results(c, sample_id=[2, 4, 9]), "row 0 has sample_id 2, the test file has 4"),
    "ids as text": (lambda c: write_results(c, sample_id=["4", "2", "9"]), "not an integer"),
    "ids as floats": (lambda c: write_results(c, sample_id=[4.0, 2.0, 9.0]), "sample_id is double"),
    "null output": (lambda c: write_results(c, output=["a", None, "c"]), "output of row 1 is null"),
    "numbers as output": (lambda c: write_results(c, output=[1, 2, 3]), "output is int64"),
    "third column": (lambda c: write_results(c, extra=[1, 2, 3]), "has columns"),
    "hidden index": (hidden_index, "__index_level_0__"),
    "rows missing": (
        lambda c: pq.write_table(pa.table({"sample_id": [4], "output": ["a"]}), c / "results" / RESULTS),
        "has 1 rows, the test file 3",
    ),
    "no parquet": (lambda c: (c / "results" / RESULTS).write_text("x"), "is not readable"),
    "tokenizer's width": (
        lambda c: write_logits(c, [torch.zeros(2, VOCABULARY - 1)] * 3),
        "has 23 columns, the model 24",
    ),
    "one sample less": (lambda c: write_logits(c, uniform(2, 3)), "has 2 samples"),
    "stacked": (lambda c: write_logits(c, torch.zeros(3, 2, VOCABULARY)), "holds a Tensor, not a list"),
    "arrays": (lambda c: write_logits(c, [np.zeros((2, VOCABULARY))] * 3), "cannot be loaded as tensors only"),
    "integers": (lambda c: write_logits(c, [torch.zeros(2, VOCABULARY, dtype=torch.int64)] * 3), "not a 2-D float"),
    "flat": (lambda c: write_logits(c, [torch.zeros(VOCABULARY)] * 3), "sample 0 is (24,)"),
    "nan": (lambda c: write_logits(c, with_value(float("nan"))), "sample 1 has 1 rows that are not finite"),
    "inf": (lambda c: write_logits(c, with_value(float("inf"))), "sample 1 has 1 rows that are not finite"),
    "empty sample": (lambda c: write_logits(c, uniform(2, 0, 1)), "sample 1 has no rows, but its output"),
    "cut off": (
        lambda c: (c / "results" / LOGITS).write_bytes((c / "results" / LOGITS).read_bytes()[:200]),
        "cannot be",
    ),
    "missing": (lambda c: (c / "results" / LOGITS).unlink(), "cannot be loaded"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_is_named(case: Path, name: str) -> None:
    damage, message = DEFECTS[name]
    damage(case)
    with pytest.raises(StageError) as caught:
        validate(case)
    assert message in str(caught.value)


def test_masked_tokens_are_allowed_and_count_as_probability_zero() -> None:
    logits = torch.full((3, VOCABULARY), -float("inf"))
    logits[0, :4] = 1.0  # uniform over four tokens
    logits[1, 0] = 5.0  # certain
    entropy = row_entropy(logits)
    assert entropy[0] == pytest.approx(np.log(4)) and entropy[1] == 0.0
    assert torch.isnan(entropy[2])  # nothing but −inf is no distribution


def test_entropy_agrees_with_the_naive_formula_and_with_bf16_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    logits = torch.randn(600, 50)
    probability = logits.double().softmax(-1)
    expected = -(probability * probability.log()).sum(-1).mean()
    torch.save([logits, logits.bfloat16()], tmp_path / LOGITS)
    exact, rounded = read_sample_logits(tmp_path / LOGITS)
    assert exact.mean_entropy == pytest.approx(float(expected), abs=1e-9)
    assert rounded.mean_entropy == pytest.approx(float(expected), abs=1e-2) and rounded.tokens == 600


def own_memory() -> int:
    """Bytes that are not pages of a mapped file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_a_large_file_is_read_without_being_loaded(tmp_path: Path) -> None:
    torch.save([torch.zeros(2, 150_000) for _ in range(80)], tmp_path / LOGITS)
    used = []
    for sample in read_sample_logits(tmp_path / LOGITS):
        assert sample.mean_entropy == pytest.approx(np.log(150_000))
        used.append(own_memory())
    assert (tmp_path / LOGITS).stat().st_size > 95e6 and max(used) - used[0] < 40e6
    (tmp_path / LOGITS).unlink()


def test_publishing_keeps_what_it_replaces(case: Path) -> None:
    outputs = case / "outputs"
    outputs.mkdir()
    (outputs / RESULTS).write_text("older")
    publish(validate(case), outputs, case / "previous")
    assert (case / "previous" / RESULTS).read_text() == "older"
    assert sorted(path.name for path in outputs.iterdir()) == sorted([RESULTS, LOGITS])
    assert (outputs / LOGITS).read_bytes() == (case / "results" / LOGITS).read_bytes()


def test_a_failed_publication_replaces_nothing(case: Path) -> None:
    outputs = case / "outputs"
    (outputs / LOGITS).mkdir(parents=True)  # a folder where the file should go
    (outputs / RESULTS).write_text("older")
    with pytest.raises(StageError, match="cannot publish"):
        publish(validate(case), outputs, case / "previous")
    assert (outputs / RESULTS).read_text() == "older"
    assert sorted(path.name for path in outputs.iterdir()) == sorted([RESULTS, LOGITS])


def write_model(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_merged_models_without_trained_weights_are_refused(tmp_path: Path) -> None:
    tensors = {
        "embed": np.zeros((4, 2), np.float32),
        "layer": np.ones((2, 2), np.float32),
        "lm_head.weight": np.zeros((4, 2)),
    }
    base = write_model(tmp_path / "base", tensors)
    trained = {"embed": tensors["embed"] + 1, "layer": tensors["layer"]}  # tied: no lm_head of its own
    cases = {
        "good": (trained, None),
        "half": ({name: value.astype(np.float16) for name, value in trained.items()}, None),
        "same": (tensors, "every tensor equals the base model's"),
        "missing": ({"embed": trained["embed"]}, "tensor layer is missing"),
        "shape": (
            {**trained, "layer": np.ones((2, 3), np.float32)},
            "tensor layer has shape (2, 3), the base has (2, 2)",
        ),
        "lora": (
            {f"base_model.model.{name}": value for name, value in trained.items()},
            "base_model.model.embed belongs to",
        ),
        "empty": ({}, "no safetensors weights"),
    }
    for name, (weights, problem) in cases.items():
        seen = find_model_problem(write_model(tmp_path / name, weights), base)
        assert seen is None if problem is None else problem in (seen or ""), name
    (tmp_path / "good" / "model.safetensors").write_bytes(b"cut")
    assert "not readable" in (find_model_problem(tmp_path / "good", base) or "")
    (tmp_path / "half" / "tokenizer_config.json").unlink()
    assert find_model_problem(tmp_path / "half", base) == "tokenizer_config.json is missing"


def test_published_files_and_those_of_the_run_are_independent(case: Path) -> None:
    outputs = case / "outputs"
    outputs.mkdir()
    submission = validate(case)
    publish(submission, outputs, case / "previous")
    assert is_published(submission, outputs)
    with (outputs / LOGITS).open("r+b") as file:  # as a program does that writes in place
        file.write(b"changed")
    assert not is_published(submission, outputs)
    assert is_published(submission, case / "results")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("copies", [0, 1, 3])
def test_a_publication_that_fails_changes_nothing(
    case: Path, monkeypatch: pytest.MonkeyPatch, number: int, copies: int
) -> None:
    outputs, submission = case / "outputs", validate(case)
    outputs.mkdir()
    for name in (RESULTS, LOGITS):
        (outputs / name).write_text(f"older {name}")
    done: list[Path] = []

    def copy(source: Path, target: Path) -> None:
        """The volume is full after so many copies."""
        target.write_bytes(source.read_bytes()[: None if len(done) < copies else 7])
        if len(done) == copies:
            raise OSError(number, os.strerror(number))
        done.append(target)

    with monkeypatch.context() as patch:
        patch.setattr("agent.submission._copy", copy)
        with pytest.raises(
            StageError, match=f"cannot publish to .*: {os.strerror(number)}; the validated files are in"
        ):
            publish(submission, outputs, case / "previous")
    assert {path.name: path.read_text() for path in outputs.iterdir()} == {
        name: f"older {name}" for name in (RESULTS, LOGITS)
    }
    assert not (case / "previous").exists()
    publish(submission, outputs, case / "previous")
    assert is_published(submission, outputs)


def test_half_an_inference_leaves_nothing_behind(workspace: Path) -> None:
    """It may be what fills the disk; and what lies in data/outputs/ must not look like a submission."""
    task = Workspace(workspace)
    (task.scripts / "inference.py").write_text("")
    text = 'echo half > "$(dirname "$0")/../../data/outputs/{}"\necho "[Errno 122] Disk quota exceeded"\nexit 1\n'
    task.inference_script.write_text(text.format(LOGITS))
    with pytest.raises(StageError, match=r"inference.sh failed with exit code 1: \[Errno 122\] Disk quota exceeded"):
        infer(workspace, timeout_s=60.0)
    assert list(task.outputs.iterdir()) == []
    task.inference_script.write_text(f'echo half > "$OUTPUT_DIR/{LOGITS}"\nexit 1\n')
    with pytest.raises(StageError):
        infer(workspace, timeout_s=60.0)
    assert list((workspace.parent / "results").iterdir()) == []


@pytest.mark.parametrize("exit_code", [0, 3])
def test_an_inference_that_ignores_output_dir_never_costs_the_older_submission(workspace: Path, exit_code: int) -> None:
    task = Workspace(workspace)
    for name in (RESULTS, LOGITS):
        (task.outputs / name).write_text(f"older {name}")
    (task.scripts / "inference.py").write_text("")
    writes = "\n".join(f'echo new > "$(dirname "$0")/../../data/outputs/{name}"' for name in (RESULTS, LOGITS))
    task.inference_script.write_text(f"{writes}\nexit {exit_code}\n")
    target = workspace.parent / "results"
    run = functools.partial(run_logged, run_tag=str(workspace))
    arguments = {"log": workspace.parent / "log", "timeout_s": 60.0, "run": run}
    if exit_code:
        with pytest.raises(StageError, match=r"inference.sh failed with exit code 3"):
            run_inference(task, workspace, target, **arguments)  # type: ignore[arg-type]
    else:
        run_inference(task, workspace, target, **arguments)  # type: ignore[arg-type]
        assert (target / RESULTS).read_text() == "new\n"
    assert {path.name: path.read_text() for path in task.outputs.iterdir()} == {
        name: f"older {name}" for name in (RESULTS, LOGITS)
    }


@pytest.mark.parametrize("answers", [None, ["a", "b", "c"], [{"style": "rule"}] * 3])
def test_without_answers_in_the_test_file_there_is_no_accuracy(case: Path, answers: object) -> None:
    test = pd.read_parquet(case / "test.parquet").drop(columns="reward_model")
    if answers is not None:
        test["reward_model"] = answers
    test.to_parquet(case / "test.parquet", index=False)
    assert validate(case).accuracy is None


def infer(workspace: Path, timeout_s: float) -> None:
    run = functools.partial(run_logged, run_tag=str(workspace))
    results, log = workspace.parent / "results", workspace.parent / "log"
    run_inference(Workspace(workspace), workspace / "model", results, log=log, timeout_s=timeout_s, run=run)


def test_an_inference_beyond_its_time_is_stopped(workspace: Path) -> None:
    task = Workspace(workspace)
    task.inference_script.write_text("echo $$ > pid; sleep 600")
    with pytest.raises(StageError, match=r"inference\.sh took longer than 1 s and was stopped"):
        infer(workspace, timeout_s=1.0)
    assert not Path(f"/proc/{(task.scripts / 'pid').read_text().strip()}").exists()


def test_an_inference_that_leaves_one_file_is_not_enough(workspace: Path) -> None:
    task = Workspace(workspace)
    task.inference_script.write_text(f'echo x > "$OUTPUT_DIR/{RESULTS}"')
    with pytest.raises(StageError, match=f"ended well but left no {LOGITS}"):
        infer(workspace, timeout_s=60.0)
