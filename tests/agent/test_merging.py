"""Merging: the call that a checkout's merger understands, a checkpoint that stays as it was, a result that is checked."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agent.errors import StageError
from agent.merging import find_merger, merge_checkpoint
from agent.submission import run_logged
from agent.tensors import find_model_problem

SAVE = """
import argparse, json, shutil
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file

def merge(local_dir, config, target):
    assert not list(local_dir.glob("optim_*")) and not list(config.glob("*.safetensors"))
    shards = sorted(local_dir.glob("model_world_size_2_rank_*.pt"))
    parts = [np.load(shard) for shard in shards]
    target.mkdir(exist_ok=True)
    if config != target:
        shutil.copytree(config, target, dirs_exist_ok=True)
    save_file({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, target / "model.safetensors")
"""
# The command lines that mergers of verl's history had; each writes what verl's would write.
LOCAL_DIR_ONLY = (
    SAVE
    + """
parser = argparse.ArgumentParser()
parser.add_argument('--local_dir', type=str, required=True, help="The path for your saved model")
parser.add_argument("--hf_upload_path", default=False, type=str)
folder = Path(parser.parse_args().local_dir)
merge(folder, folder / "huggingface", folder / "huggingface")
"""
)
FLAGS = (
    SAVE
    + """
parser = argparse.ArgumentParser()
parser.add_argument("--backend", type=str, required=True, choices=["fsdp", "megatron"])
parser.add_argument("--hf_model_path", type=str, required=True)
parser.add_argument("--local_dir", type=str, required=True)
parser.add_argument("--target_dir", required=False, default="tmp", type=str)
args = parser.parse_args()
merge(Path(args.local_dir), Path(args.hf_model_path), Path(args.target_dir))
"""
)
VERBS = (
    SAVE
    + """
parser = argparse.ArgumentParser()
base = argparse.ArgumentParser(add_help=False)
base.add_argument("--backend", required=True)
base.add_argument("--local_dir", required=True)
verbs = parser.add_subparsers(dest="operation", required=True)
verb = verbs.add_parser("merge", parents=[base])
verb.add_argument("--target_dir", default="tmp")
args = parser.parse_args()
folder = Path(args.local_dir)
assert json.loads((folder / "fsdp_config.json").read_text())["world_size"] == 2
merge(folder, folder / "huggingface", Path(args.target_dir))
"""
)
FORMS = {
    "script, --local_dir only": ("scripts/model_merger.py", LOCAL_DIR_ONLY),
    "script with flags": ("scripts/model_merger.py", FLAGS),
    "script with verbs": ("scripts/model_merger.py", VERBS),
    "module": ("verl/model_merger/__main__.py", VERBS),
    "legacy script": ("scripts/legacy_model_merger.py", VERBS),
    "script that passes on": ("scripts/model_merger.py", "runpy.run_module('verl.model_merger', run_name='__main__')"),
}  # fmt: skip
CONFIG = {"vocab_size": 4, "num_hidden_layers": 1, "tie_word_embeddings": True}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    zeros = {"model.embed_tokens.weight": np.zeros((4, 2)), "model.layers.0.mlp.weight": np.zeros((2, 2))}
    save_file(zeros, folder / "model.safetensors")
    return folder


def write_checkpoint(folder: Path, *, age: str) -> Path:
    """An actor folder of two ranks as an old (nothing but shards), middle (with huggingface/) or new verl leaves it."""
    actor = folder / "global_step_4" / "actor"
    actor.mkdir(parents=True)
    for rank in range(2):
        shard = {
            "model.embed_tokens.weight": np.full((2, 2), rank + 1.0),
            "model.layers.0.mlp.weight": np.full((1, 2), 5.0),
        }
        with (actor / f"model_world_size_2_rank_{rank}.pt").open("wb") as file:
            np.savez(file, **shard)
        (actor / f"optim_world_size_2_rank_{rank}.pt").touch()
    if age != "old":
        (actor / "huggingface").mkdir()
        (actor / "huggingface" / "config.json").write_text(json.dumps({**CONFIG, "from": "checkpoint"}))
        (actor / "huggingface" / "model.safetensors").write_text("left by an earlier merge")
    if age == "new":
        (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    return actor


def write_verl(folder: Path, form: str) -> Path:
    name, text = FORMS[form]
    files = {name: text}
    if form == "script that passes on":
        files["verl/model_merger/__main__.py"] = VERBS
        files[name] = f"import runpy, sys\nsys.path.insert(0, {str(folder)!r})\n{text}"
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    if (folder / "verl").is_dir():
        for package in ("verl", "verl/model_merger"):
            (folder / package / "__init__.py").touch()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def merge(verl: Path, base: Path, actor: Path, target: Path) -> None:
    run = functools.partial(run_logged, run_tag=str(target))
    merge_checkpoint(verl, base, actor, target, log=target.with_name("merge.log"), run=run)


@pytest.mark.parametrize("age", ["old", "middle", "new"])
@pytest.mark.parametrize("form", FORMS)
def test_every_merger_merges_checkpoints_of_every_age(tmp_path: Path, base: Path, form: str, age: str) -> None:
    actor = write_checkpoint(tmp_path / "checkpoints", age=age)
    before = contents(actor)
    (tmp_path / "submission").mkdir()
    target = tmp_path / "submission" / "model"
    merge(write_verl(tmp_path / "verl root", form), base, actor, target)
    weights = load_file(target / "model.safetensors")
    assert weights["model.embed_tokens.weight"].tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]
    assert (json.loads((target / "config.json").read_text()).get("from") == "checkpoint") is (age != "old")
    assert contents(actor) == before  # nothing was written into the checkpoint
    assert sorted(path.name for path in target.parent.iterdir()) == ["merge.log", "merge.process.json", "model"]


def test_which_merger_is_taken(tmp_path: Path) -> None:
    verl = tmp_path / "verl"
    assert find_merger(verl) is None
    for form in ("legacy script", "module", "script with flags"):
        write_verl(verl, form)
        merger = find_merger(verl)
        assert merger is not None
        expected = (
            ("python3", "-m", "verl.model_merger") if form == "module" else ("python3", str(verl / FORMS[form][0]))
        )
        assert merger.program == expected
        assert "--target_dir" in merger.command(tmp_path, tmp_path)  # its default is a folder "tmp" somewhere


def test_a_checkout_without_merger_is_told_in_one_line(tmp_path: Path, base: Path) -> None:
    actor = write_checkpoint(tmp_path / "checkpoints", age="new")
    with pytest.raises(StageError, match=r"has no merger: neither scripts/model_merger\.py nor verl/model_merger/"):
        merge(tmp_path / "verl", base, actor, tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FLAGS.replace("save_file({", "(lambda *_: None)({"), "no safetensors weights"),
        (FLAGS + "raise RuntimeError('cannot merge')", "exit code 1: RuntimeError: cannot merge"),
        (FLAGS.replace("np.concatenate([part[name]", "np.concatenate([part[name] * 0"), "nothing was trained"),
    ],
)  # fmt: skip
def test_a_bad_merge_leaves_no_model(tmp_path: Path, base: Path, text: str, message: str) -> None:
    verl = tmp_path / "verl"
    (verl / "scripts").mkdir(parents=True)
    (verl / "scripts" / "model_merger.py").write_text(text)
    actor = write_checkpoint(tmp_path / "checkpoints", age="new")
    with pytest.raises(StageError) as caught:
        merge(verl, base, actor, tmp_path / "model")
    assert message in str(caught.value) and not (tmp_path / "model").exists()


# ---- what a merged model must be --------------------------------------------------------------------------------------


def rewrite(model: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    save_file(change(load_file(model / "model.safetensors")), model / "model.safetensors")


def with_config(**values: object) -> Callable[[Path], None]:
    return lambda model: (model / "config.json").write_text(json.dumps({**CONFIG, **values})) and None


def shard(model: Path, missing: bool) -> None:
    """As two files with an index, the second one lost."""
    names = {
        "model.embed_tokens.weight": "model-00001.safetensors",
        "model.layers.0.mlp.weight": "model-00002.safetensors",
    }
    weights = load_file(model / "model.safetensors")
    for name, file in names.items():
        save_file({name: weights[name]}, model / file)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    if missing:
        (model / "model-00002.safetensors").unlink()


MODELS: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "as merged": (lambda m: None, None),
    "in two files": (lambda m: shard(m, missing=False), None),
    "one of two files lost": (
        lambda m: shard(m, missing=True), "names model-00002.safetensors, which is missing (1 of 2 files)"),
    "index cut off": (lambda m: (m / "model.safetensors.index.json").write_text("{"), "configuration is not readable"),
    "no config": (lambda m: (m / "config.json").unlink(), "config.json is missing"),
    "empty config": (lambda m: (m / "config.json").write_text(""), "config.json is missing"),
    "no vocabulary": (lambda m: (m / "tokenizer.json").unlink(), "the tokenizer's tokenizer.json is missing"),
    "weights cut off": (
        lambda m: (m / "model.safetensors").write_bytes((m / "model.safetensors").read_bytes()[:-8]), "not readable"),
    "empty weights": (lambda m: (m / "model.safetensors").write_bytes(b""), "not readable"),
    "not a number": (
        lambda m: rewrite(m, lambda w: {**w, "model.layers.0.mlp.weight": np.full((2, 2), np.nan)}),
        "model.layers.0.mlp.weight holds values that are not finite"),
    "integers": (
        lambda m: rewrite(m, lambda w: {n: v.astype(np.int32) for n, v in w.items()}), "is torch.int32, not a floating"),
    "adapter beside": (
        lambda m: rewrite(m, lambda w: {**w, "base_model.model.lora_A": np.ones((2, 2))}), "lora_A belongs"),
    "fewer layers than configured": (with_config(num_hidden_layers=2), "it has 1 layers, config.json says 2"),
    "another vocabulary": (with_config(vocab_size=5), "has 4 rows, config.json says vocab_size 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_is_checked(tmp_path: Path, base: Path, name: str) -> None:
    change, problem = MODELS[name]
    model = tmp_path / "model"
    shutil.copytree(base, model)
    rewrite(model, lambda weights: {name: value + 1 for name, value in weights.items()})
    change(model)
    seen = find_model_problem(model, base)
    assert seen is None if problem is None else problem in (seen or ""), seen


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_output_layer_may_be_absent_only_where_it_is_tied(tmp_path: Path, base: Path, is_tied: bool) -> None:
    rewrite(base, lambda weights: {**weights, "lm_head.weight": np.zeros((4, 2))})
    model = tmp_path / "model"
    shutil.copytree(base, model)
    rewrite(model, lambda weights: {name: value + 1 for name, value in weights.items() if name != "lm_head.weight"})
    with_config(tie_word_embeddings=is_tied)(model)
    assert find_model_problem(model, base) == (None if is_tied else "tensor lm_head.weight is missing (1 in all)")
