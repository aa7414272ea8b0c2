"""`init`: a workspace for people's own model and data, checked by the doctor and really run where a CPU allows it."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from agent.cli import main
from agent.config import load_config
from agent.doctor import check_all
from agent.errors import PreflightError
from agent.machine import Machine, read_machine
from agent.machine_checks import DISK
from agent.questions import INSTRUCTION, read_questions
from agent.scaffold import SPLITS, Request, build_scaffold, needs_reward
from agent.submission import score_outputs, validate_submission
from agent.tensors import read_sample_logits
from agent.workspace import Workspace
from trials.batching import batch_problems, propose_batches
from trials.embedded.build import HERE as EMBEDDED
from trials.embedded.data import write_splits
from trials.gpus import Gpu
from trials.scaffold.inference import LogitsFile
from wheels import VERSIONS, wheel_tree

ROOT = Path(__file__).parents[2]
MODEL = EMBEDDED / "base"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded splits, in verl's schema."""
    folder = tmp_path_factory.mktemp("splits")
    write_splits(folder)
    return folder


def request(data: Path, target: Path, **changes: Any) -> Request:
    files = {split: (data / f"{split}.parquet",) for split in ("train", "dev", "test")}
    return Request(**{"target": target, "model": MODEL, "gpus": 2, "response_tokens": 24, **files, **changes})


def run_init(cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run_agent.py"), "init", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def write_lines(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def big_machine(gpus: int) -> Machine:
    found = tuple(Gpu(index, f"GPU-{index}", "H100", 81920, 0) for index in range(gpus))
    here = read_machine({"PATH": "/nowhere"})
    return dataclasses.replace(
        here, gpus=found, gpu_problem="", cpus=64, memory_bytes=2**39, shared_memory_bytes=2**36, ray_processes=(),
        is_ray_port_taken=False, open_files=None, threads=None,
    )  # fmt: skip


def test_the_doctor_passes_what_init_made(data: Path, tmp_path: Path) -> None:
    files = [word for split in ("train", "dev", "test") for word in (f"--{split}", data / f"{split}.parquet")]
    result = run_init(tmp_path, "own work", "--model", MODEL, *files, "--gpus", 2, "--response-tokens", 24)
    assert result.returncode == 0, result.stderr
    assert "128 prompts × 8 responses a step on 2 GPUs, mini batches of 32" in result.stdout
    workspace = Workspace(tmp_path / "own work")
    config = load_config(None, [f"workspace={workspace.root}", f"runs={tmp_path / 'runs'}", "search.concurrent=1"])
    on_gpus = check_all(config, workspace, big_machine(2))
    assert [check for check in on_gpus if check.state != "ok" and not check.name.startswith(DISK)] == []
    if shutil.which("nvidia-smi") is None:
        here = {check.name: check for check in check_all(config, workspace, read_machine())}
        assert here["GPUs"].state == "failed" and "nvidia-smi is not installed" in str(here["GPUs"].problem)
    assert workspace.base_model.resolve() == MODEL.resolve() and workspace.total_steps == 46
    assert pq.read_table(workspace.test_file).num_rows == 200


def test_inference_answers_on_a_cpu_and_its_logits_are_right(data: Path, tmp_path: Path) -> None:
    small = {}
    for split, rows in (("train", 64), ("dev", 8), ("test", 20)):
        pq.write_table(pq.read_table(data / f"{split}.parquet").slice(0, rows), tmp_path / f"{split}.parquet")
        small[split] = (tmp_path / f"{split}.parquet",)
    build_scaffold(request(data, tmp_path / "own", **small))
    workspace, output = Workspace(tmp_path / "own"), tmp_path / "results"
    command = ["bash", str(workspace.inference_script), str(workspace.base_model)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OUTPUT_DIR": str(output)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "20 rows answered by answer_with_transformers" in result.stdout
    assert sorted(path.name for path in output.iterdir()) == ["math_results.parquet", "math_results_logits.pt"]
    submission = validate_submission(output, workspace.test_file, MODEL)
    assert submission.samples == 20 and 0.2 < submission.mean_entropy < 0.35
    texts = pq.read_table(output / "math_results.parquet").column("output").to_pylist()
    assert submission.accuracy == score_outputs(workspace.test_file, texts) and submission.accuracy > 0.2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    logits = torch.load(output / "math_results_logits.pt", weights_only=True)
    greedy = [tokenizer.decode(sample.argmax(-1), skip_special_tokens=True) for sample in logits]
    assert greedy == texts  # each token was chosen from the logits in its row


# ---- logits file ------------------------------------------------------------------------------------------------------


def test_tensors_written_one_by_one_load_like_a_saved_list(tmp_path: Path) -> None:
    tensors = [torch.randn(3, 7), torch.randn(0, 7), torch.randn(2, 7).bfloat16(), torch.randn(5, 7).half()]
    file = LogitsFile(tmp_path / "logits.pt")
    for tensor in tensors:
        file.add(tensor.t().contiguous().t())  # not contiguous
    file.close()
    for mapped in (False, True):
        loaded = torch.load(tmp_path / "logits.pt", weights_only=True, mmap=mapped)
        assert type(loaded) is list and len(loaded) == 4
        for tensor, original in zip(loaded, tensors, strict=True):
            assert tensor.dtype == original.dtype and torch.equal(tensor, original)
            assert tensor.data_ptr() % 64 == 0 or not mapped or not len(tensor)


MEMORY = """
import json, resource, sys
from pathlib import Path
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from trials.scaffold.inference import write_results

folder = Path(sys.argv[1])
config = Qwen2Config(vocab_size=32768, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1)
Qwen2ForCausalLM(config).save_pretrained(folder / "model")
peaks = []
for rows in (2, 60):
    with (folder / "answers").open("w") as file:
        for row in range(rows):
            answer = {"sample_id": row, "prompt": [1] * 8, "response": [2] * 64, "text": "x"}
            file.write(json.dumps(answer) + "\\n")
    write_results(folder / "model", folder / "answers", folder)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(json.dumps(peaks))
"""


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    small, large = json.loads(result.stdout.splitlines()[-1])  # KiB
    assert (tmp_path / "math_results_logits.pt").stat().st_size > 60 * 64 * 32768 * 4
    assert large - small < 64 * 1024  # of 480 MiB
    assert [sample.tokens for sample in read_sample_logits(tmp_path / "math_results_logits.pt")] == [64] * 60


# ---- data -------------------------------------------------------------------------------------------------------------


def test_questions_and_answers_become_verls_schema(tmp_path: Path) -> None:
    records = [
        {"question": "1+1?", "answer": "It is two.\n#### 2"},
        {"problem": "2+2?", "answer": 4.0},
        {"question": "x", "answer": ["7"]},
    ]
    questions = read_questions(write_lines(tmp_path / "gsm.jsonl", records), split="train")
    assert questions.is_converted
    assert [row["reward_model"]["ground_truth"] for row in questions.rows] == ["2", "4", "7"]
    assert questions.rows[0]["prompt"] == [{"role": "user", "content": f"1+1?\n{INSTRUCTION}"}]
    assert questions.rows[1]["data_source"] == "gsm" and questions.rows[2]["extra_info"] == {
        "split": "train",
        "index": 2,
    }
    pq.write_table(pa.Table.from_pylist([{"question": "1+1?", "answer": "2"}]), tmp_path / "p.parquet")
    assert read_questions(tmp_path / "p.parquet", split="dev").rows[0]["reward_model"]["ground_truth"] == "2"


def test_a_test_file_may_lack_answers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [{"question": "1+1?"}])
    assert read_questions(path, split="test").rows[0]["reward_model"]["ground_truth"] is None
    with pytest.raises(PreflightError, match="line 1: answer or ground_truth is None, not one answer"):
        read_questions(path, split="dev")


BAD_DATA: dict[str, tuple[list[object], str]] = {
    "not JSON": ([{"question": "a", "answer": "1"}, "{nonsense"], "line 2: not JSON: '{nonsense'"),
    "no object": (["[1]"], "line 1: not a JSON object"),
    "no question": ([{"answer": "1"}], "line 1: question or problem is None, not text"),
    "empty question": ([{"question": " ", "answer": "1"}], "line 1: question or problem is ' '"),
    "no answer": (
        [{"question": "a", "answer": "1"}] * 2 + [{"question": "b"}],
        "line 3: answer or ground_truth is None",
    ),
    "two answers": ([{"question": "a", "answer": ["1", "2"]}], "line 1: answer or ground_truth is ['1', '2']"),
    "answer is an object": (
        [{"question": "a", "answer": {"x": 1}}],
        "answer or ground_truth is {'x': 1}, not one answer",
    ),
    "answer in lists": ([{"question": "a", "answer": [["7"]]}], "answer or ground_truth is [['7']], not one answer"),
    "source is an object": (
        [{"question": "a", "answer": "1", "data_source": {"x": 1}}],
        "data_source is {'x': 1}, not text",
    ),
    "half a character": (['{"question": "\\ud800", "answer": "1"}'], "holds half of a character"),
    "half a character in an answer": (['{"question": "a", "answer": "\\udfff"}'], "holds half of a character"),
    "nested without end": (['{"question": ' + "[" * 100_000 + "]" * 100_000 + "}"], "line 1: nested too deeply"),
    "nested question": (['{"question": ' + "[" * 500 + "]" * 500 + "}"], "line 1: question or problem is [[[[[["),
    "long value": ([{"question": ["x" * 10_000] * 1000}], "line 1: question or problem is ['xxx"),
    "content is a list": (
        [{"data_source": "a", "prompt": [{"role": "user", "content": ["x"]}], "reward_model": {"ground_truth": "1"}}],
        "not a message with role and content as text",
    ),
    "many": ([{"question": "a"}] * 9, "; and 6 more; correct the file"),
    "nothing": ([], "has no rows"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_rows_are_refused_by_number(tmp_path: Path, name: str) -> None:
    records, words = BAD_DATA[name]
    with pytest.raises(PreflightError, match=re.escape(words)):
        read_questions(write_lines(tmp_path / "x.jsonl", records), split="train")


def test_rows_in_verls_schema_are_checked_too(data: Path, tmp_path: Path) -> None:
    rows = pq.read_table(data / "dev.parquet").to_pylist()[:4]
    rows[2]["data_source"], rows[3]["prompt"] = "", None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dev.parquet")
    with pytest.raises(PreflightError, match=r"row 2: data_source is ''; .*row 3: prompt is null"):
        read_questions(tmp_path / "dev.parquet", split="dev")


def test_several_dev_files_keep_their_names(data: Path, tmp_path: Path) -> None:
    more = write_lines(tmp_path / "amc23.jsonl", [{"question": f"{n}?", "answer": n} for n in range(5)])
    build_scaffold(request(data, tmp_path / "own", dev=(data / "dev.parquet", more)))
    workspace = Workspace(tmp_path / "own")
    assert workspace.dev_rows() == {"reasoning_gym/chain_sum": 100, "modular/last_digit": 100, "amc23": 5}
    assert workspace.script.overrides["custom_reward_function.name"] == "compute_score"
    assert (workspace.scripts / "reward.py").is_file()


def test_known_data_keeps_verls_own_reward(data: Path, tmp_path: Path) -> None:
    rows = [{**row, "data_source": "openai/gsm8k"} for row in pq.read_table(data / "train.parquet").to_pylist()[:64]]
    path = tmp_path / "gsm8k.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    pq.write_table(pa.Table.from_pylist(rows[:32]), tmp_path / "dev.parquet")
    build_scaffold(request(data, tmp_path / "own", train=(path,), dev=(tmp_path / "dev.parquet",)))
    workspace = Workspace(tmp_path / "own")
    assert not any("reward" in key for key in workspace.script.overrides)
    assert not (workspace.scripts / "reward.py").exists()
    converted = read_questions(write_lines(tmp_path / "q.jsonl", [{"question": "a", "answer": 1}]), split="dev")
    splits = {split: read_questions(path, split=split) for split in ("train", "test")}
    assert needs_reward(workspace.verl / "verl", {**splits, "dev": converted})


def test_ids_of_test_rows_are_kept_or_refused(data: Path, tmp_path: Path) -> None:
    def test_file(*ids: object) -> Path:
        rows = [{"question": f"{n}?", "answer": n, "sample_id": value} for n, value in enumerate(ids)]
        return write_lines(tmp_path / "t.jsonl", rows)

    build_scaffold(request(data, tmp_path / "own", test=(test_file(30, 10, 20),)))
    assert pq.read_table(Workspace(tmp_path / "own").test_file).column("sample_id").to_pylist() == [30, 10, 20]
    for ids, words in (((1, 1), "row 1 is 1"), ((1, None), "row 1 is None"), (("a", "b"), "row 0 is 'a'")):
        with pytest.raises(PreflightError, match=words):
            build_scaffold(request(data, tmp_path / "other", test=(test_file(*ids),)))
    assert not (tmp_path / "other").exists()


def test_lengths_follow_from_data_and_model(data: Path, tmp_path: Path) -> None:
    """The embedded model holds 512 tokens, the embedded questions take few of them."""
    build_scaffold(request(data, tmp_path / "own", response_tokens=None))
    workspace = Workspace(tmp_path / "own")
    lengths = [workspace.setting_int(f"data.max_{part}_length") for part in ("prompt", "response")]
    assert lengths == [128, 384] and "RESPONSE_TOKENS:-384}" in workspace.inference_script.read_text()
    with pytest.raises(PreflightError, match="holds 512 tokens, too few for 128 of prompt and 400 of response"):
        build_scaffold(request(data, tmp_path / "other", response_tokens=400))


# ---- refusals ---------------------------------------------------------------------------------------------------------


def few_rows(data: Path, folder: Path) -> dict[str, Any]:
    path = write_lines(folder / "few.jsonl", [{"question": "a", "answer": 1}])
    return {"train": (path,)}


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


REFUSALS: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], str]] = {
    "no model": (
        lambda d, t: {"model": Path("Qwen/Qwen2.5-1.5B")},
        "no config.json there; give the folder of a downloaded",
    ),
    "no file": (lambda d, t: {"dev": (t / "nowhere.parquet",)}, "nowhere.parquet cannot be read"),
    "other format": (lambda d, t: {"dev": (MODEL / "config.json.txt",)}, "give a .parquet or .jsonl file"),
    "no verl there": (lambda d, t: {"verl": t}, "no verl/trainer/ppo/core_algos.py there"),
    "no verl in the environment": (lambda d, t: {"training_env": t}, "verl is not installed in"),
    "fewer rows than GPUs": (few_rows, "1 training rows are fewer than the 2 GPUs"),
    "dev is train": (
        lambda d, t: {"dev": (d / "train.parquet",)},
        "are the same; give every split questions of its own",
    ),
    "one file twice": (lambda d, t: {"train": (d / "train.parquet",) * 2}, "are the same"),
    "test has the content of dev": (
        lambda d, t: {"test": (Path(shutil.copy(d / "dev.parquet", d / "copy.parquet")),)},
        "are the same",
    ),
    "huge id": (
        lambda d, t: {"test": (write_lines(d / "ids.jsonl", [{"question": "a", "sample_id": 2**63}]),)},
        "sample_id of test row 0 is 9223372036854775808",
    ),
    "a pipe": (lambda d, t: {"dev": (pipe(d / "pipe.parquet"),)}, "pipe.parquet is a named pipe, not a file"),
    "no merger": (lambda d, t: {"verl": wheel_tree("0.3.0.post1")}, "give --verl a checkout that has one"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_used_is_refused_and_nothing_is_left(data: Path, tmp_path: Path, name: str) -> None:
    changes, words = REFUSALS[name]
    arguments = changes(data, tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(PreflightError, match=re.escape(words)):
        build_scaffold(request(data, tmp_path / "own", **arguments))
    assert sorted(os.listdir(tmp_path)) == before


def test_existing_files_are_never_overwritten(data: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    files = [word for split in ("train", "dev", "test") for word in (f"--{split}", data / f"{split}.parquet")]
    result = run_init(tmp_path, "own", "--model", MODEL, *files)
    assert result.returncode == 3 and len(result.stderr.splitlines()) == 1
    assert "exists and is not an empty folder" in result.stderr
    assert os.listdir(tmp_path) == ["own"] and os.listdir(tmp_path / "own") == ["notes.txt"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--gpus=0", "argument --gpus: 0 is not a number from 1 to 1024"),
        ("--gpus=1000000000", "is not a number from 1 to 1024"),
        ("--steps=-1", "argument --steps: -1 is not"),
        ("--steps=1000000000000", "is not a number from 1 to 1000000"),
        ("--responses=x", "argument --responses: x is not a number from 2"),
        ("--responses=1", "argument --responses: 1 is not a number from 2"),
        ("--train=x.jsonl", "--train is given twice; give it once"),
        ("--model=x", "--model is given twice"),
    ],
)
def test_wrong_options_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, words: str
) -> None:
    files = [word for split in SPLITS for word in (f"--{split}", str(data / f"{split}.parquet"))]
    with pytest.raises(SystemExit) as raised:
        main(["init", str(tmp_path / "own"), "--model", str(MODEL), *files, option])
    assert raised.value.code == 2 and words in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_disk_that_takes_nothing_is_one_line(data: Path, tmp_path: Path) -> None:
    files = [str(word) for split in SPLITS for word in (f"--{split}", data / f"{split}.parquet")]
    line = 'ulimit -f 40; exec "$@"'  # no file may grow beyond 40 KiB
    program = [sys.executable, str(ROOT / "run_agent.py"), "init", "own", "--model", str(MODEL), *files]
    result = subprocess.run(["bash", "-c", line, "-", *program], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 3 and os.listdir(tmp_path) == []
    (said,) = result.stderr.splitlines()
    assert "File too large; raise the limit of a file's size (ulimit -f); no workspace was created" in said
    assert str(tmp_path) in said and len(said) < 500


def test_a_target_in_a_file_is_one_line(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match=r"file: File exists; check that path; no workspace was created"):
        build_scaffold(request(data, tmp_path / "file" / "own"))


def test_a_mark_of_byte_order_is_no_part_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "1+1?", "answer": "2"}\n')
    assert read_questions(tmp_path / "x.jsonl", split="train").rows[0]["reward_model"]["ground_truth"] == "2"


# ---- scripts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 64, 500, 7473, 100_000])
@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 6, 8])
def test_proposed_batches_keep_verls_rules(rows: int, gpus: int) -> None:
    train, mini = propose_batches(rows, gpus)
    for responses in (1, 5, 8):
        settings = {
            "data.train_batch_size": train, "actor_rollout_ref.rollout.n": responses,
            "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": 1, "trainer.n_gpus_per_node": gpus,
        }  # fmt: skip
        assert batch_problems(settings) == []
    assert train <= max(128, gpus) and train <= rows and (rows < 1024 or train > 64)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_verl_composes_the_script(data: Path, tmp_path: Path, version: str) -> None:
    build_scaffold(request(data, tmp_path / "own", gpus=8))
    workspace = Workspace(tmp_path / "own")
    overrides = []
    for key in workspace.script.overrides:
        value = workspace.setting(key)
        quoted = f"'{value}'" if str(value).startswith("/") else value
        overrides.append(f"{key}={quoted}")
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(wheel_tree(version) / "verl/trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides)
    assert (config.data.train_batch_size, config.trainer.n_gpus_per_node, config.trainer.total_training_steps) == (
        128,
        8,
        46,
    )
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 32 and config.actor_rollout_ref.rollout.name == "vllm"
    assert config.trainer.get("val_before_train", True) is True
    assert config.custom_reward_function.path == str(workspace.scripts / "reward.py")
