"""The doctor: a zoo of planted defects, each found; all of them in one pass; a sound workspace without a warning."""

import dataclasses
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agent.checks import CheckResult, require_sound
from agent.config import AgentConfig, load_config
from agent.dataset import check_features, normalise_answer, read_dataset
from agent.doctor import check_all, read_colocation, read_demand, read_devices, require_healthy
from agent.errors import PreflightError
from agent.machine import Machine, Volume, read_machine
from agent.machine_checks import DISK, GIB, check_disks, check_machine, forecast_disks
from agent.rungs import trial_overrides
from agent.script_checks import check_script, read_reward_sources
from agent.workspace import Workspace, read_manifest
from scripted_workspace import make_rows
from trials.embedded.build import HERE as EMBEDDED
from trials.embedded.build import build_workspace
from trials.gpus import Gpu, read_gpus, select_visible
from wheels import VERSIONS, wheel_tree

ROOT = Path(__file__).parents[2]
DATA = Path("data/datasets/math.8k")
BASE = Path("data/checkpoints/base")
VERL = Path("task/repositories/verl")
GPUS = tuple(Gpu(index, f"GPU-{index}abc", "H100", 81920, 500) for index in range(8))
MACHINE = Machine(
    gpus=GPUS,
    gpu_problem="",
    mig=(),
    visible=None,
    cpus=64,
    memory_bytes=512 * GIB,
    shared_memory_bytes=64 * GIB,
    open_files=1048576,
    threads=100000,
    ray_processes=(),
    ray_address=None,
    is_ray_port_taken=False,
)


def examine(root: Path, machine: Machine = MACHINE, overrides: Sequence[str] = ()) -> dict[str, CheckResult]:
    config = load_config(None, [f"workspace={root}", f"runs={root.parent / 'runs'}", *overrides])
    return {result.name: result for result in check_all(config, Workspace(root), machine)}


def states(results: dict[str, CheckResult], state: str) -> set[str]:
    """Names of the checks in this state; how full the disks of the testing machine are is left out."""
    return {name for name, result in results.items() if result.state == state and not name.startswith(DISK)}


# ---- ways to break a workspace ----------------------------------------------------------------------------------------


def edit(path: Path | str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new))

    return change


def set_option(option: str) -> Callable[[Path], None]:
    return edit("task/scripts/train.sh", '  "$@"', f'  {option} \\\n  "$@"')


def remove(path: Path | str) -> Callable[[Path], None]:
    return lambda root: (root / path).unlink()


def write_table(split: str, **columns: Sequence[Any]) -> Callable[[Path], None]:
    """Five rows of a split with other columns; a column given as None is left out."""

    def change(root: Path) -> None:
        rows = make_rows(5, ("a",), split).to_dict("list")
        rows |= columns
        table = {name: value for name, value in rows.items() if value is not None}
        pq.write_table(pa.table(table), root / DATA / f"{split}.parquet")

    return change


def answers(split: str, value: Any) -> Callable[[Path], None]:
    return write_table(split, reward_model=[{"style": "rule", "ground_truth": value}] * 5)


def prompts(split: str, values: Sequence[Any]) -> Callable[[Path], None]:
    return write_table(split, prompt=values)


def good(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def copy_split(source: str, target: str, rows: int) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        first, second = (pd.read_parquet(root / DATA / f"{name}.parquet") for name in (source, target))
        second["prompt"] = [*first["prompt"][:rows], *second["prompt"][rows:]]
        second.to_parquet(root / DATA / f"{target}.parquet", index=False)

    return change


def long_prompt(root: Path) -> None:
    set_option("data.max_prompt_length=8")(root)
    prompts("dev", [good("12345678901"), good("12345678"), good("x"), good("y"), good("z")])(root)
    shutil.copy(EMBEDDED / "base/tokenizer.json", root / BASE)
    edit(BASE / "config.json", "32", "384")(root)


def newer_metadata(root: Path) -> None:
    path = root / DATA / "train.parquet"
    table = pq.read_table(path)
    features = {"prompt": {"feature": {"content": {"dtype": "string", "_type": "Value"}}, "_type": "List"}}
    info = json.dumps({"info": {"features": features}})
    pq.write_table(table.replace_schema_metadata({"huggingface": info}), path)


def damage_pages(root: Path) -> None:
    """Bytes within the data; the footer is whole."""
    path = root / DATA / "test.parquet"
    content = bytearray(path.read_bytes())
    content[4:300] = bytes(index * 7 % 251 for index in range(296))
    path.write_bytes(bytes(content))


def cut_weights(root: Path) -> None:
    path = root / BASE / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


def lost_shard(root: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (root / BASE / "model.safetensors.index.json").write_text(json.dumps(index))


def long_tokenizer(root: Path) -> None:
    tokens = {f"t{number}": number for number in range(40)}
    (root / BASE / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))


def old_checkpoint(root: Path) -> None:
    set_option(f"trainer.default_local_dir={root}/saves")(root)
    (root / "saves/global_step_4/actor").mkdir(parents=True)


def merger_module(root: Path) -> None:
    remove(VERL / "scripts/model_merger.py")(root)
    (root / VERL / "verl/model_merger").mkdir()
    (root / VERL / "verl/model_merger/__main__.py").touch()


def reward_file(text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / "reward.py").write_text(text)
        set_option(f"custom_reward_function.path={root / 'reward.py'}")(root)

    return change


PIPES = {
    "task/scripts/train.sh": "training script",
    "task/scripts/inference.sh": "inference script",
    "task/scripts/inference.py": "inference program",
    "data/datasets/math.8k/train.parquet": "training data",
    "data/datasets/math.8k/dev.parquet": "dev data",
    "data/datasets/math.8k/test.parquet": "test data",
    "data/checkpoints/base/config.json": "base model",
    "data/checkpoints/base/model.safetensors": "base model",
    "data/checkpoints/base/tokenizer.json": "vocabulary",
    "task/repositories/verl/verl/trainer/ppo/core_algos.py": "verl core_algos.py",
    "reward.py": "reward",
}


def foreign_reward_names(root: Path) -> None:
    folder = root / VERL / "verl/utils/reward_score"
    folder.mkdir(parents=True)
    text = 'def score(data_source):\n    if data_source in ["train", "a - b"] or data_source.startswith("aime"):\n'
    text += "        pass"
    (folder / "__init__.py").write_text(text)


def second_test_file(root: Path) -> None:
    (root / "data/datasets/other").mkdir()
    (root / "data/datasets/other/test.parquet").write_bytes((root / DATA / "test.parquet").read_bytes())
    edit("task/scripts/inference.py", "math.8k/test.parquet", "math.8k/{name}.parquet")(root)


def give_ids(values: Sequence[Any]) -> Callable[[Path], None]:
    return write_table("test", sample_id=values)


TRAIN_SH = "task/scripts/train.sh"
CORE = VERL / "verl/trainer/ppo/core_algos.py"
ZOO: dict[str, tuple[Callable[[Path], object], str, str, str]] = {
    # what is broken: (how, name of the check, state, words of the finding or of the fix)
    "no train.sh": (remove(TRAIN_SH), "training script", "failed", "does not exist"),
    "empty train.sh": (lambda w: (w / TRAIN_SH).write_text(""), "training script", "failed", "is empty"),
    "no inference.sh": (remove("task/scripts/inference.sh"), "inference script", "failed", "does not exist"),
    "no inference.py": (remove("task/scripts/inference.py"), "inference program", "failed", "does not exist"),
    "no merger": (remove(VERL / "scripts/model_merger.py"), "model merger", "failed", "has neither"),
    "merger is a module": (merger_module, "model merger", "ok", "python3 -m verl.model_merger"),
    "merger of another kind": (
        lambda w: (w / VERL / "scripts/model_merger.py").write_text("print(1)"),
        "model merger",
        "failed",
        "does not take --local_dir",
    ),
    "inference.sh is no bash": (
        lambda w: (w / "task/scripts/inference.sh").write_text("if true\n"),
        "inference script",
        "failed",
        "syntax error",
    ),
    "inference.sh with CRLF": (
        lambda w: (w / "task/scripts/inference.sh").write_bytes(b"true\r\n"),
        "inference script",
        "failed",
        "dos2unix",
    ),
    "inference.py is no Python": (
        lambda w: (w / "task/scripts/inference.py").write_text("def ("),
        "inference program",
        "failed",
        "not valid Python",
    ),
    "test data damaged within": (damage_pages, "test data", "failed", "not a readable parquet file"),
    "train.sh nested too deeply": (
        lambda w: (w / "task/scripts/train.sh").write_text("A=" + "${A:-" * 3000 + "\n"),
        "training script content",
        "failed",
        "",
    ),
    "core_algos read-only": (lambda w: (w / CORE).chmod(0o444), "verl core_algos.py", "failed", "not writable"),
    "loss of another shape": (edit(CORE, "def agg_loss(", "def other("), "overlay", "failed", "agg_loss"),
    "outputs read-only": (lambda w: (w / "data/outputs").chmod(0o555), "outputs folder", "failed", "not writable"),
    "a folder in the way": (
        lambda w: (w / "data/outputs/math_results.parquet").mkdir(),
        "outputs folder",
        "failed",
        "is a folder",
    ),
    "no verl command": (
        edit(TRAIN_SH, "verl.trainer.main_ppo", "x"),
        "training script content",
        "failed",
        "no command",
    ),
    "not grpo": (edit(TRAIN_SH, "estimator=grpo", "estimator=gae"), "algorithm", "failed", "adv_estimator=gae"),
    "no steps": (edit(TRAIN_SH, "total_training_steps=16", "x=1"), "training schedule", "failed", "total_epochs"),
    "never saves": (edit(TRAIN_SH, "save_freq=4", "save_freq=-1"), "checkpoint schedule", "failed", "never saves"),
    "checkpoints of another run": (old_checkpoint, "checkpoint folder", "failed", "would resume"),
    "value of a command": (set_option("trainer.n_gpus_per_node=$(nproc)"), "settings", "failed", "runs a command"),
    "relative path": (
        edit(TRAIN_SH, "'$DATA/train.parquet'", "data/train.parquet"),
        "settings",
        "failed",
        "not an absolute path",
    ),
    "no console log": (set_option("trainer.logger='[\"wandb\"]'"), "logger", "failed", "add console"),
    "batches that do not divide": (
        set_option("data.train_batch_size=10 trainer.n_gpus_per_node=4"),
        "batch sizes",
        "failed",
        "cannot be divided among 4 ranks",
    ),
    "micro batch too large": (
        set_option(
            "data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=5 "
            "trainer.n_gpus_per_node=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"
        ),
        "batch sizes",
        "failed",
        "÷ 8 ranks = 10 are fewer than ppo_micro_batch_size_per_gpu 16",
    ),
    "batch larger than the data": (
        set_option("data.train_batch_size=256 trainer.n_gpus_per_node=1"),
        "batch sizes",
        "failed",
        "the 128 training rows do not fill one batch",
    ),
    "a part of dev is scored": (set_option("data.val_max_samples=3"), "dev coverage", "failed", "scores a part of"),
    "dev prompts too long": (
        long_prompt,
        "prompt length",
        "failed",
        "1 dev prompts are longer than 8 tokens",
    ),
    "no dev file": (remove(DATA / "dev.parquet"), "dev data", "failed", "does not exist"),
    "not parquet": (
        lambda w: (w / DATA / "dev.parquet").write_bytes(b"PAR1 x"),
        "dev data",
        "failed",
        "not a readable",
    ),
    "no rows": (
        lambda w: pq.write_table(pq.read_table(w / DATA / "dev.parquet").slice(0, 0), w / DATA / "dev.parquet"),
        "dev data",
        "failed",
        "has no rows",
    ),
    "no reward_model": (
        write_table("train", reward_model=None),
        "training data",
        "failed",
        "['reward_model'] are missing",
    ),
    "reward_model null": (
        write_table("train", reward_model=[{"style": "r", "ground_truth": "1"}] * 4 + [None]),
        "training data",
        "failed",
        "train.parquet row 4: reward_model is null",
    ),
    "prompts null": (
        write_table(
            "train", prompt=pa.nulls(5, pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))
        ),
        "training data",
        "failed",
        "row 0: prompt is null",
    ),
    "prompt is text": (
        prompts("train", ["what is 1+1?"] * 5),
        "training data",
        "failed",
        "row 2: prompt is 'what is 1+1?'",
    ),
    "prompt without role": (
        prompts("train", [[{"content": "x"}]] * 5),
        "training data",
        "failed",
        "row 0: prompt holds {'content': 'x'}",
    ),
    "prompt empty": (
        prompts("dev", [good("x")] * 3 + [[]] + [good("y")]),
        "dev data",
        "failed",
        "dev.parquet row 3: prompt is []",
    ),
    "data_source empty": (
        write_table("dev", data_source=["a", "", "a", " ", "a"]),
        "dev data",
        "failed",
        "row 1: data_source is ''",
    ),
    "answer null": (
        write_table("dev", reward_model=[{"style": "r", "ground_truth": x} for x in ("1", None, "", "2", "3")]),
        "dev data",
        "failed",
        "row 2: reward_model has no ground_truth",
    ),
    "several answers": (
        answers("train", ["7", "8"]),
        "training data",
        "failed",
        "row 0: reward_model has no ground_truth",
    ),
    "answers of two kinds": (
        answers("dev", 7),
        "answers",
        "failed",
        "ground_truth holds numbers, the training file text",
    ),
    "answers are numbers": (
        lambda w: [answers(split, 7.0)(w) for split in ("train", "dev")],
        "answers",
        "warning",
        "7.0 → '7'",
    ),
    "answers are lists": (
        lambda w: [answers(split, ["7"])(w) for split in ("train", "dev")],
        "answers",
        "warning",
        "['7'] → '7'",
    ),
    "dev is training data": (copy_split("train", "dev", 20), "training and dev data", "failed", "20 of 30 dev rows"),
    "some dev questions trained": (
        copy_split("train", "dev", 3),
        "training and dev data",
        "warning",
        "3 of 30 dev rows",
    ),
    "test questions trained": (
        copy_split("train", "test", 2),
        "training and test data",
        "warning",
        "2 of 12 test rows",
    ),
    "test questions judged": (copy_split("dev", "test", 1), "dev and test data", "warning", "1 of 12 test rows"),
    "no test file": (remove(DATA / "test.parquet"), "test data", "failed", "does not exist"),
    "two test files": (second_test_file, "test data", "warning", "other/test.parquet could be meant as well"),
    "test prompt null": (
        prompts("test", [good("x")] * 4 + [None]),
        "test data",
        "failed",
        "test.parquet row 4: prompt is null",
    ),
    "ids repeated": (give_ids([3, 4, 3, 5, 6]), "test ids", "failed", "row 2 repeats 3 of row 0"),
    "ids are text": (give_ids(["a", "b", "c", "d", "e"]), "test ids", "failed", "row 0 has 'a'"),
    "data source without reward": (foreign_reward_names, "reward", "warning", "names no reward for 'c'"),
    "reward function lost": (
        set_option("custom_reward_function.path=/nowhere/reward.py"),
        "reward",
        "failed",
        "restore the reward function",
    ),
    "context too short": (
        lambda w: (
            edit(BASE / "config.json", "{", '{"max_position_embeddings": 100, ')(w),
            set_option("data.max_prompt_length=64 data.max_response_length=64")(w),
        ),
        "context length",
        "failed",
        "the lengths sum to 128 tokens",
    ),
    "no base model": (remove(BASE / "config.json"), "base model", "failed", "config.json does not exist"),
    "no vocabulary": (lambda w: (w / BASE / "config.json").write_text("{}"), "base model", "failed", "no vocab_size"),
    "no weights": (remove(BASE / "model.safetensors"), "base model", "failed", "neither *.safetensors nor *.bin"),
    "weights cut off": (cut_weights, "base model", "failed", "is cut off"),
    "a shard lost": (lost_shard, "base model", "failed", "model-00002-of-00002.safetensors is missing"),
    "tokenizer larger than the model": (long_tokenizer, "vocabulary", "failed", "knows 8 tokens that the model"),
    "tokenizer damaged": (
        lambda w: (w / BASE / "tokenizer.json").write_text('{"model": {"vocab"'),
        "vocabulary",
        "failed",
        "tokenizer.json is damaged",
    ),
    "tokenizer of no kind": (long_tokenizer, "tokenizer", "failed", "cannot be loaded (Exception: "),
    "reward function is no Python": (
        reward_file("def compute_score(:"),
        "reward",
        "failed",
        "cannot be loaded as verl does (SyntaxError: ",
    ),
    "reward function of another name": (
        reward_file("def score(): pass"),
        "reward",
        "failed",
        "has no function compute_score",
    ),
    "reward function raises": (reward_file("1 / 0"), "reward", "failed", "ZeroDivisionError: division by zero"),
    "core_algos raises": (
        lambda w: (w / CORE).write_text((w / CORE).read_text() + "\nraise ValueError('not today')\n"),
        "verl import",
        "failed",
        "ValueError: not today; correct it",
    ),
    "train.sh ends early": (
        edit(TRAIN_SH, "export PYTHONPATH", "exit 1\nexport PYTHONPATH"),
        "training command",
        "failed",
        "`exit 1` ends",
    ),
    "removes what the agent sets": (
        set_option("~trainer.default_local_dir"),
        "training command",
        "failed",
        "default_local_dir is removed with ~",
    ),
    "arithmetic without end": (
        set_option("trainer.n_gpus_per_node=$((9**9**9))"),
        "settings",
        "failed",
        "$((9**9**9)) is not understood",
    ),
    "train.sh of a megabyte": (
        lambda w: (w / TRAIN_SH).write_text("#" * 2**20),
        "training script content",
        "failed",
        "more than a training",
    ),
    "conda is broken": (
        lambda w: (w / "conda").mkdir(),
        "training environment",
        "failed",
        "conda has no bin/python3; restore it",
    ),
    "no tokenizer": (remove(BASE / "tokenizer_config.json"), "vocabulary", "failed", "tokenizer_config.json does not"),
}


def test_a_sound_workspace_has_no_remarks(workspace: Path) -> None:
    results = examine(workspace)
    assert states(results, "failed") | states(results, "warning") == set()


@pytest.mark.parametrize("name", ZOO)
def test_a_planted_defect_is_found(workspace: Path, name: str) -> None:
    damage, check, state, words = ZOO[name]
    damage(workspace)
    manifest = read_manifest(Workspace(workspace))
    result = examine(workspace)[check]
    (workspace / "data/outputs").chmod(0o755)
    assert (result.state, words in f"{result.found} {result.problem}") == (state, True), result
    assert read_manifest(Workspace(workspace)) == manifest


def test_what_is_no_file_is_refused_before_it_is_opened(workspace: Path) -> None:
    reward_file("def compute_score(): pass")(workspace)
    for path, name in PIPES.items():
        place = workspace / path
        before = place.read_bytes() if place.exists() else None
        place.unlink(missing_ok=True)
        os.mkfifo(place)
        result = examine(workspace)[name]
        assert result.state == "failed" and "is a named pipe" in f"{result.found} {result.problem}", (path, result)
        read_manifest(Workspace(workspace))
        place.unlink()
        if before is not None:
            place.write_bytes(before)


TOGETHER = [
    "no inference.sh", "merger of another kind", "loss of another shape", "not grpo", "never saves", "value of a command",
    "no console log", "prompt is text", "data_source empty", "ids repeated", "weights cut off", "tokenizer larger than the "
    "model", "a part of dev is scored", "reward function lost",
]  # fmt: skip


def test_all_defects_are_found_in_one_pass(workspace: Path) -> None:
    for name in TOGETHER:
        ZOO[name][0](workspace)
    results = examine(workspace, dataclasses.replace(MACHINE, cpus=1, threads=10, open_files=256))
    expected = {ZOO[name][1] for name in TOGETHER} | {"threads", "open files"}
    assert expected <= states(results, "failed")
    for name in TOGETHER:
        _, check, _, words = ZOO[name]
        assert words in f"{results[check].found} {results[check].problem}"
    with pytest.raises(PreflightError) as raised:
        require_sound(results.values())
    assert all(f"{name}: " in str(raised.value) for name in expected)


def run_doctor(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run_agent.py"), "doctor", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment})


def test_the_command_shows_one_table_and_fails_with_3(workspace: Path) -> None:
    for name in TOGETHER:
        ZOO[name][0](workspace)
    result = run_doctor(workspace.parent, "--workspace", "workspace")
    assert result.returncode == 3
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in result.stdout.splitlines() if "│" in line
    }
    for name in TOGETHER:
        assert rows[ZOO[name][1]] == "failed"
    assert len(result.stderr.splitlines()) == 1 and "checks failed: " in result.stderr
    assert re.search(r"^\d+ checks, \d+ failed, \d+ warnings$", result.stdout, re.MULTILINE)
    assert os.listdir(workspace.parent) == ["workspace"]


def test_the_command_refuses_a_workspace_that_is_not_there(tmp_path: Path) -> None:
    result = run_doctor(tmp_path, "--workspace", "nowhere")
    assert result.returncode == 3 and "there is no workspace at" in result.stderr and os.listdir(tmp_path) == []


def test_the_embedded_workspace_passes_without_a_warning(tmp_path: Path) -> None:
    root = build_workspace(tmp_path / "embedded work space")
    results = examine(root)
    assert states(results, "failed") | states(results, "warning") == set()
    assert results["dev coverage"].found == "all 200 rows"
    assert results["vocabulary"].found == "model 384, tokenizer 354"
    assert results["verl"].found == "version 0.9.1"
    assert run_doctor(tmp_path, "--workspace", root.name).returncode == 0


def test_a_training_environment_without_python_is_named(workspace: Path, tmp_path: Path) -> None:
    result = examine(workspace, overrides=[f"training_env={tmp_path}"])["training environment"]
    assert result.state == "failed" and "has no bin/python3" in str(result.problem)


def test_rungs_that_do_not_fit_are_named(workspace: Path) -> None:
    result = examine(workspace, overrides=["search.first_rung_steps=3", "search.last_rung_steps=7"])["rungs"]
    assert result.state == "failed" and "must be a multiple" in str(result.problem)


def test_a_run_stops_before_anything_is_started(workspace: Path) -> None:
    ZOO["prompt is text"][0](workspace)
    command = [sys.executable, str(ROOT / "run_agent.py"), "--workspace", str(workspace)]
    result = subprocess.run(command, cwd=workspace.parent, capture_output=True, text=True)
    assert result.returncode == 3 and "row 2: prompt is" in result.stderr and "training data" in result.stdout
    assert os.listdir(workspace.parent) == ["workspace"]


# ---- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (7, "7"),
        ("7", "7"),
        (7.0, "7"),
        (["7"], "7"),
        ([7.0], "7"),
        (0.5, "0.5"),
        (" x ", "x"),
        (["7", "8"], None),
        (None, None),
        (float("nan"), None),
        (True, None),
        ("", None),
        ([], None),
    ],
)
def test_answers_become_text(answer: object, text: str | None) -> None:
    assert normalise_answer(answer) == text


def test_prompts_as_arrays_of_messages_are_accepted(workspace: Path) -> None:
    path = workspace / DATA / "train.parquet"
    frame = pd.read_parquet(path)
    assert type(frame["prompt"][0]).__name__ == "ndarray"
    frame.to_parquet(path, index=False)
    assert examine(workspace)["training data"].state == "ok"


def test_a_reward_without_its_package_is_named(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(*_):\n    from math_verify import verify")
    set_option(f"custom_reward_function.path={tmp_path / 'reward.py'}")(workspace)
    assert examine(workspace)["reward"].state == "ok"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    results = examine(workspace, overrides=[f"training_env={tmp_path / 'env'}"])
    assert results["reward"].state == "warning" and "pip install math-verify" in str(results["reward"].problem)
    assert "has no torch, ray, transformers" in str(results["training environment"].problem)


def test_files_of_newer_datasets_are_read_and_flagged(workspace: Path) -> None:
    newer_metadata(workspace)
    results = examine(workspace)
    assert results["parquet metadata"].found.startswith("feature List (datasets 4) in train.parquet")
    assert results["training data"].state == "ok"
    read = read_dataset([workspace / DATA / "train.parquet"])
    states = [check_features([read], version).state for version in ("3.6.0", "4.1.0", None)]
    assert states == ["failed", "ok", "warning"]


def test_several_dev_files_count_together(workspace: Path) -> None:
    make_rows(7, ("more",), "more").to_parquet(workspace / DATA / "more.parquet", index=False)
    files = f"['{workspace / DATA}/dev.parquet','{workspace / DATA}/more.parquet']"
    edit(TRAIN_SH, "\"'$DATA/dev.parquet'\"", f'"{files}"')(workspace)
    results = examine(workspace)
    assert results["dev coverage"].found == "all 37 rows" and states(results, "failed") == set()
    assert Workspace(workspace).dev_rows() == {"a - b": 10, "c": 20, "more": 7}


def test_the_file_that_inference_names_is_the_test(workspace: Path) -> None:
    (workspace / "data/datasets/other").mkdir()
    (workspace / DATA / "test.parquet").rename(workspace / "data/datasets/other/questions.parquet")
    edit("task/scripts/inference.py", "math.8k/test.parquet", "other/questions.parquet")(workspace)
    assert examine(workspace)["test data"].state == "ok"
    assert Workspace(workspace).test_file == workspace / "data/datasets/other/questions.parquet"


def test_a_header_longer_than_its_file_is_no_model(workspace: Path) -> None:
    (workspace / BASE / "model.safetensors").write_bytes(struct.pack("<Q", 10**12) + b"{}")
    assert "is not a safetensors file" in str(examine(workspace)["base model"].problem)


def test_rewards_of_the_real_verl_are_read(workspace: Path, tmp_path: Path) -> None:
    verl = Workspace(build_workspace(tmp_path / "embedded")).verl
    sources = read_reward_sources(verl / "verl")
    assert ("openai/gsm8k", False) in sources and ("aime", True) in sources and ("math", False) in sources
    assert read_colocation(verl) == 3


# ---- machine ----------------------------------------------------------------------------------------------------------


def gpu_workspace(root: Path, gpus: int = 8) -> None:
    edit(TRAIN_SH, "  trainer.device=cpu \\\n", "")(root)
    set_option(f"trainer.n_gpus_per_node={gpus}")(root)


def machine_results(root: Path, machine: Machine, *overrides: str) -> dict[str, CheckResult]:
    return examine(root, machine, ["search.concurrent=1", *overrides])


def test_eight_free_gpus_pass(workspace: Path) -> None:
    gpu_workspace(workspace)
    results = machine_results(workspace, MACHINE)
    assert states(results, "failed") == set()
    assert results["GPUs"].found == "asked 8 (1 trials × 8), on the machine 8, visible 8"
    assert results["free GPUs"].found.startswith("8 of 8 visible: 0 H100 80/80 GiB free, 1 H100")


BUSY = (*GPUS[:5], dataclasses.replace(GPUS[5], used_mib=40000), *GPUS[6:])
GPU_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "seven of eight": (
        {"gpus": GPUS[:7]},
        "only 7 GPUs are visible; add some, or set trainer.n_gpus_per_node=7",
    ),
    "two visible": ({"visible": "0,1"}, "only 2 GPUs are visible"),
    "empty list": ({"visible": ""}, "set but empty, which hides every GPU; unset it"),
    "minus one": ({"visible": "-1"}, "'-1' names no single device"),
    "cut by an index": ({"visible": "0,1,9,2"}, "'9' names no single device (8 GPUs here)"),
    "repeated": ({"visible": "0,1,1"}, "'1' is named twice"),
    "repeated by uuid": ({"visible": "0,GPU-0abc"}, "'GPU-0abc' is named twice"),
    "ambiguous uuid": ({"visible": "GPU-"}, "'GPU-' names no single device"),
    "MIG": ({"visible": "MIG-aa,MIG-bb", "mig": ("MIG-aa", "MIG-bb")}, "NCCL cannot join MIG slices"),
    "no driver": ({"gpus": None, "gpu_problem": "nvidia-smi is not installed"}, "nvidia-smi is not installed"),
}


@pytest.mark.parametrize("name", GPU_FAULTS)
def test_gpus_are_counted(workspace: Path, name: str) -> None:
    gpu_workspace(workspace)
    changes, words = GPU_FAULTS[name]
    result = machine_results(workspace, dataclasses.replace(MACHINE, **changes))["GPUs"]
    assert result.state == "failed" and words in str(result.problem)


def test_a_gpu_in_use_is_named(workspace: Path) -> None:
    gpu_workspace(workspace)
    result = machine_results(workspace, dataclasses.replace(MACHINE, gpus=BUSY))["free GPUs"]
    assert result.state == "failed" and "5 H100 41/80 GiB free IN USE" in result.found
    assert "only 7 of 8 visible GPUs are free; end what runs there, or set trainer.n_gpus_per_node=7" in str(
        result.problem
    )
    edit(TRAIN_SH, "n_gpus_per_node=8", "n_gpus_per_node=4")(workspace)
    assert machine_results(workspace, dataclasses.replace(MACHINE, gpus=BUSY))["free GPUs"].state == "ok"


def test_devices_that_the_script_names_count(workspace: Path) -> None:
    gpu_workspace(workspace)
    edit(TRAIN_SH, "export PYTHONPATH", "export CUDA_VISIBLE_DEVICES=0,1,2,3\nexport PYTHONPATH")(workspace)
    assert "only 4 GPUs are visible" in str(machine_results(workspace, MACHINE)["GPUs"].problem)
    assert read_devices("export CUDA_VISIBLE_DEVICES=${DEVICES:-0}") is None
    assert read_devices('# CUDA_VISIBLE_DEVICES=3\n  CUDA_VISIBLE_DEVICES="2" # mine') == "2"


def test_a_resumed_run_may_have_filled_the_disk_itself(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_workspace(workspace)
    old_checkpoint(workspace)
    monkeypatch.setattr("agent.doctor.read_machine", lambda: dataclasses.replace(MACHINE, gpus=BUSY))
    config = load_config(None, [f"workspace={workspace}", "search.concurrent=1"])
    with pytest.raises(PreflightError, match=r"checkpoint folder: .*\| free GPUs: only 7"):
        require_healthy(config, Workspace(workspace))
    results = {result.name: result.state for result in require_healthy(config, Workspace(workspace), is_resumed=True)}
    assert results["checkpoint folder"] == results["free GPUs"] == "warning"


def test_a_smaller_plan_is_offered_when_trials_do_not_fit_side_by_side(workspace: Path) -> None:
    gpu_workspace(workspace, 4)
    result = examine(workspace, MACHINE, ["search.concurrent=3"])["GPUs"]
    assert result.state == "failed" and "or set search.concurrent=2" in str(result.problem)


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("2,0", [2, 0]),
        (" 1 , GPU-5 ", [1, 5]),
        ("3,-1,4", [3]),
        ("0,0", []),
        ("", []),
    ],
)
def test_visible_devices_follow_cuda(visible: str | None, indexes: list[int]) -> None:
    devices, _ = select_visible(GPUS, (), visible)
    assert [device.index for device in devices if isinstance(device, Gpu)] == indexes


def fake_nvidia_smi(folder: Path, body: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_nvidia_smi_is_read(tmp_path: Path) -> None:
    lines = "0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 4\\n1, GPU-bb, NVIDIA H100 80GB HBM3, [N/A], [N/A]"
    gpus, problem = read_gpus(fake_nvidia_smi(tmp_path, f"printf '{lines}\\n'"))
    assert gpus == (
        Gpu(0, "GPU-aa", "NVIDIA H100 80GB HBM3", 81559, 4),
        Gpu(1, "GPU-bb", "NVIDIA H100 80GB HBM3", None, None),
    )
    assert problem == ""


@pytest.mark.parametrize(
    ("body", "words"),
    [("echo 'No devices were found'; exit 6", "exit code 6 (No devices"), ("sleep 60", "does not answer")],
)
def test_a_sick_nvidia_smi_means_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    monkeypatch.setattr("trials.gpus._NVIDIA_SMI_LIMIT_S", 0.5)
    gpus, problem = read_gpus(fake_nvidia_smi(tmp_path, body))
    assert gpus is None and words in problem


def test_too_few_cpus_for_the_placement_group_fail(workspace: Path) -> None:
    gpu_workspace(workspace)
    (workspace / VERL / "verl/trainer/ppo/ray_trainer.py").write_text(
        "class ResourcePoolManager:\n    # max_colocate_count=9 is a comment\n    x = f(max_colocate_count=1)\n"
    )
    few = machine_results(workspace, dataclasses.replace(MACHINE, cpus=2))["CPUs"]
    assert few.state == "failed" and "ask for 9" in few.found and "would wait for ever" in str(few.problem)
    assert machine_results(workspace, dataclasses.replace(MACHINE, cpus=9))["CPUs"].state == "ok"
    shared = examine(workspace, dataclasses.replace(MACHINE, cpus=10), ["search.concurrent=2"])["CPUs"]
    assert shared.state == "warning"
    set_option("ray_kwargs.ray_init.num_cpus=4")(workspace)
    assert "Ray has 4 CPUs" in str(machine_results(workspace, MACHINE)["CPUs"].problem)


MACHINE_FAULTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "few open files": ({"open_files": 256}, "open files", "failed", "ulimit -n 16384"),
    "low open files": ({"open_files": 4096}, "open files", "warning", "ulimit -n 16384"),
    "few threads": ({"threads": 100}, "threads", "failed", "can't start new thread"),
    "low threads": ({"threads": 2000}, "threads", "warning", "pids limit"),
    "little shared memory": ({"shared_memory_bytes": 64 * 2**20}, "shared memory", "warning", "--shm-size"),
    "little memory": ({"memory_bytes": 2 * GIB}, "memory", "failed", "free memory"),
    "foreign head": ({"is_ray_port_taken": True}, "other Ray clusters", "warning", "it may hold GPUs"),
    "foreign address": ({"ray_address": "10.0.0.1:6379"}, "other Ray clusters", "warning", "it may hold GPUs"),
}


@pytest.mark.parametrize("name", MACHINE_FAULTS)
def test_limits_and_neighbours(workspace: Path, name: str) -> None:
    gpu_workspace(workspace)
    changes, check, state, words = MACHINE_FAULTS[name]
    result = machine_results(workspace, dataclasses.replace(MACHINE, **changes))[check]
    assert result.state == state and words in str(result.problem)


def test_a_low_limit_of_the_shell_is_seen(workspace: Path) -> None:
    program = f"ulimit -n 300; exec {sys.executable} {ROOT / 'run_agent.py'} doctor --workspace {workspace}"
    result = subprocess.run(["bash", "-c", program], cwd=workspace.parent, capture_output=True, text=True)
    assert result.returncode == 3 and "checks failed: open files" in result.stderr
    assert "at most 300 per process" in result.stdout and "ulimit -n 4096" in result.stdout


def test_several_nodes_are_refused(workspace: Path) -> None:
    gpu_workspace(workspace)
    set_option("trainer.nnodes=2")(workspace)
    assert "would wait for ever" in str(machine_results(workspace, MACHINE)["nodes"].problem)


def test_a_listener_on_rays_port_is_seen() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", 6379))
            server.listen()
        except OSError:
            pass  # somebody else listens: as good
        machine = read_machine({"PATH": os.environ["PATH"], "RAY_ADDRESS": "somewhere:1", "CUDA_VISIBLE_DEVICES": ""})
    assert machine.is_ray_port_taken and machine.ray_address == "somewhere:1" and machine.visible == ""
    assert machine.cpus >= 1 and machine.memory_bytes is not None and machine.memory_bytes > 2**20


def test_disks_are_forecast_for_qwen_on_math500(workspace: Path) -> None:
    demand = read_demand(AgentConfig(workspace=workspace), Workspace(workspace), (2, 4, 8))
    assert (demand.trial_checkpoints, demand.full_run_checkpoints, demand.vocabulary) == (4, 4, 32)
    assert (demand.parameters, demand.test_rows, demand.response_tokens) == (128, 12, None)
    demand = dataclasses.replace(
        demand, device="cuda", concurrent=1, parameters=1_543_714_304, trial_checkpoints=4, full_run_checkpoints=10,
        test_rows=500, response_tokens=2048, vocabulary=151_936, runs=Path("/big"), full_run_folder=Path("/big/full"),
        outputs=Path("/out"),
    )  # fmt: skip
    sizes = {what: size for _, what, size, _ in forecast_disks(demand)}
    checkpoint = 1_543_714_304 * 12
    assert sizes["checkpoints of 2 trials"] == 8 * checkpoint
    assert sizes["the full run's checkpoints"] == 10 * checkpoint
    assert sizes["logits"] == sizes["the published copy of the logits"] == 500 * 2048 * 151_936 * 4

    def volumes(temp: int, results: int) -> Callable[[Path], Volume]:
        def volume_of(folder: Path) -> Volume:
            if folder.is_relative_to("/big"):
                return Volume(1, 4000 * GIB, results)
            return Volume(2, 4000 * GIB, 3000 * GIB) if folder == Path("/out") else Volume(3, 5 * GIB, temp)

        return volume_of

    def judge(temp: int, results: int) -> list[str]:
        return [result.state for result in check_disks(demand, volumes(temp, results))]

    assert judge(4 * GIB, 3900 * GIB) == ["ok", "ok", "warning"]  # results roomy, Ray's temporary folder small
    assert judge(9 * GIB, 400 * GIB) == ["warning", "ok", "ok"]  # checkpoints fit, the longest answers would not
    assert judge(2**20, 300 * GIB) == ["failed", "ok", "failed"]


def kept_checkpoints(root: Path) -> CheckResult:
    return next(result for result in check_script(Workspace(root)) if result.name == "checkpoints kept")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_single_checkpoint_is_lost_by_a_save_that_fails_in_old_versions(workspace: Path, version: str) -> None:
    """The wheel's own checkpoint manager is what is looked at; the disk must hold one more checkpoint than is kept."""
    set_option("trainer.max_actor_ckpt_to_keep=1")(workspace)
    package, tree = workspace / "task/repositories/verl/verl", wheel_tree(version) / "verl"
    for file in ("utils/checkpoint/checkpoint_manager.py", "version/version"):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree / file, package / file)
    result = kept_checkpoints(workspace)
    is_old = version in ("0.3.0.post1", "0.4.1", "0.5.0", "0.6.1")
    assert result.state == ("warning" if is_old else "ok")
    if is_old:
        assert result.found == "the newest 1" and f"verl {version} deletes the old checkpoint" in str(result.problem)
        assert "set trainer.max_actor_ckpt_to_keep=2" in str(result.problem)
    demand = read_demand(AgentConfig(workspace=workspace), Workspace(workspace), (2, 4, 8))
    assert (demand.trial_checkpoints, demand.full_run_checkpoints) == (4, 2)


def test_in_a_trial_verl_deletes_no_checkpoint(workspace: Path) -> None:
    set_option("+trainer.remove_previous_ckpt_in_save=True trainer.max_actor_ckpt_to_keep=3")(workspace)
    assert kept_checkpoints(workspace).found == "the newest 1, whether or not the best is among them"
    asked = trial_overrides(Workspace(workspace), (2, 4, 8), Path("/checkpoints"))
    assert asked["trainer.remove_previous_ckpt_in_save"] is False and asked["trainer.max_actor_ckpt_to_keep"] is None
    assert "trainer.del_local_ckpt_after_load" not in asked


def test_a_cluster_is_not_judged_by_this_machine(workspace: Path) -> None:
    gpu_workspace(workspace)
    demand = dataclasses.replace(
        read_demand(AgentConfig(workspace=workspace), Workspace(workspace), (2, 4, 8)), cluster="10.0.0.1:6379"
    )
    results = check_machine(dataclasses.replace(MACHINE, gpus=None, cpus=1, threads=1), demand)
    assert results[0].found == "of the Ray cluster at 10.0.0.1:6379, counted when it is joined"
    assert all(result.state != "failed" for result in results)


def test_a_large_disk_that_is_nearly_full_is_no_failure(workspace: Path) -> None:
    demand = read_demand(AgentConfig(workspace=workspace), Workspace(workspace), (2, 4, 8))
    (result,) = check_disks(demand, lambda folder: Volume(1, 4000 * GIB, 160 * GIB))
    assert result.state == "ok" and result.found.startswith("160.0 GiB free")
    (result,) = check_disks(demand, lambda folder: Volume(1, 4000 * GIB, 30 * GIB))
    assert result.state == "warning" and "99.2% full: Ray refuses to spill objects" in str(result.problem)
    assert all(result.state != "failed" for result in check_machine(MACHINE, demand))
