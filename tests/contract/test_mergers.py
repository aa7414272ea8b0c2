"""The mergers of the verl versions themselves: each understands the call that it gets, and those that run here merge."""

import argparse
import ast
import functools
import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agent.merging import find_merger, merge_checkpoint
from agent.submission import run_logged
from agent.tensors import find_model_problem
from wheels import VERSIONS, wheel_tree

BASE = Path(__file__).parents[2] / "trials" / "embedded" / "base"
MODULE = VERSIONS[1:]
LEGACY = VERSIONS[2:]
RUNS_HERE = ("0.7.1", "0.9.1")
"""Versions whose merger can be imported with the newest transformers (0.8.0's is the same as 0.7.1's)."""


def parse_like(path: Path, function: str, words: list[str]) -> argparse.Namespace:
    """What the argument parser in a function of a verl file makes of `words`; the rest of the file is not run."""
    nodes = ast.walk(ast.parse(path.read_text()))
    body = next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function).body
    end = next(index for index, node in enumerate(body) if "parse_args()" in ast.unparse(node))
    namespace: dict[str, object] = {"argparse": argparse}
    before, sys.argv = sys.argv, ["merger", *words]
    try:
        exec(compile(ast.Module(body=body[: end + 1], type_ignores=[]), str(path), "exec"), namespace)
    finally:
        sys.argv = before
    return namespace["args"]  # type: ignore[return-value]


@pytest.mark.parametrize("version", MODULE)
def test_the_module_understands_the_call(version: str, tmp_path: Path) -> None:
    tree = wheel_tree(version)
    merger = find_merger(tree)
    assert merger is not None and merger.program == ("python3", "-m", "verl.model_merger")
    words = merger.command(tmp_path / "shards", tmp_path / "model")[len(merger.program) :]
    args = parse_like(tree / "verl" / "model_merger" / "base_model_merger.py", "parse_args", words)
    assert (args.operation, args.backend) == ("merge", "fsdp")
    assert (args.local_dir, args.target_dir) == (str(tmp_path / "shards"), str(tmp_path / "model"))


@pytest.mark.parametrize("version", LEGACY)
def test_the_legacy_script_understands_the_call(version: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "legacy_model_merger.py"
    shutil.copy(wheel_tree(version) / "scripts" / script.name, script)
    merger = find_merger(tmp_path)
    assert merger is not None and merger.program == ("python3", str(script))
    args = parse_like(script, "main", merger.command(tmp_path / "shards", tmp_path / "model")[len(merger.program) :])
    assert (args.operation, args.backend, args.hf_model_path) == ("merge", "fsdp", None)
    assert (args.local_dir, args.target_dir) == (str(tmp_path / "shards"), str(tmp_path / "model"))


def test_the_oldest_wheel_has_no_merger() -> None:
    assert find_merger(wheel_tree(VERSIONS[0])) is None  # it came with the repository only


@pytest.mark.parametrize("version", RUNS_HERE)
def test_a_real_merge_of_an_old_checkpoint(version: str, tmp_path: Path) -> None:
    """Nothing but shards, as 0.3.0.post1 leaves them without `hf_model`: what the newer merger wants is put beside them."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("verl")
    actor = tmp_path / "global_step_4" / "actor"
    actor.mkdir(parents=True)
    trained = {name: value + 0.25 for name, value in load_file(BASE / "model.safetensors").items()}
    torch.save(trained, actor / "model_world_size_1_rank_0.pt")
    run = functools.partial(run_logged, run_tag=str(tmp_path))
    model = tmp_path / "model"
    merge_checkpoint(wheel_tree(version), BASE, actor, model, log=tmp_path / "log", run=run)
    assert find_model_problem(model, BASE) is None
    merged = load_file(model / "model.safetensors")
    assert all(torch.equal(merged[name], value.bfloat16()) for name, value in trained.items() if name in merged)
    assert len(merged) >= len(trained) - 1  # a tied output layer is not stored
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 384
    assert [path.name for path in actor.iterdir()] == ["model_world_size_1_rank_0.pt"]
