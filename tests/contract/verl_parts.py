"""Pieces of a verl version's own code, taken out of its source so that they run without torch, Ray and a model.

What runs is the version's text: its console logger, `_save_checkpoint` and `_load_checkpoint` of its trainer, the
`save_checkpoint` of its FSDP manager and `find_latest_ckpt_path`. Only what surrounds them is replaced: tensors by small
values, `torch.save` by a zip archive (as torch writes), the two ranks by a loop, the data loader by a counter that resumes
as torchdata's does. The epochs of `fit` (400 lines that need a model) are followed by what its loop's header says.
"""

import __future__

import ast
import builtins
import importlib.util
import json
import os
import pickle
import sys
import types
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

WORLD_SIZE = 2


class Anything:
    """Stands for whatever a piece of code touches that does not matter here."""

    def __getattr__(self, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *arguments: object, **options: object) -> "Anything":
        return Anything()

    def __enter__(self) -> "Anything":
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Config(dict):  # type: ignore[type-arg]
    """A configuration that is read like OmegaConf's: by attribute, by item, by `get`."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return Config(self[name]) if isinstance(self[name], dict) else self[name]


def load_logger(tree: Path) -> types.ModuleType:
    """The module with the version's console logger; torch, which other parts of it need, is not imported."""
    path = tree / "verl" / "utils" / "logger" / "aggregate_logger.py"
    spec = importlib.util.spec_from_file_location("aggregate_logger", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    hidden = sys.modules.get("torch")
    sys.modules["torch"] = types.ModuleType("torch")
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["torch"]
        if hidden is not None:
            sys.modules["torch"] = hidden
    return module


def take(path: Path, *names: str, **known: object) -> dict[str, Any]:
    """Functions, methods and classes of a source file by name, with `known` as their globals and Anything for the rest."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", None) in names]
    first = {node.name: node for node in reversed(found)}  # type: ignore[attr-defined]
    assert first.keys() == set(names), f"{path} lacks {set(names) - first.keys()}"
    for node in first.values():
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    module = ast.Module(body=list(first.values()), type_ignores=[])
    code = compile(module, str(path), "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    namespace: dict[str, Any] = {name: Anything() for name in _names(code) if not hasattr(builtins, name)}
    namespace.update(known)
    exec(code, namespace)
    return {name: namespace[name] for name in names}


def _names(code: CodeType) -> set[str]:
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*nested)


def write_archive(value: object, path: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", pickle.dumps(value))


def read_archive(path: str, **options: object) -> Any:
    with zipfile.ZipFile(path) as archive:
        return pickle.loads(archive.read("data"))


def _make_folder(path: str) -> str:
    os.makedirs(path, exist_ok=True)
    return path


TORCH = SimpleNamespace(save=write_archive, load=read_archive, distributed=Anything())


class Loader:
    """Batches of an epoch; saves and restores its place as torchdata's StatefulDataLoader does: a place at the end of an
    epoch gives an empty iteration, the next one is whole."""

    def __init__(self, length: int) -> None:
        self._length, self._given, self._next = length, 0, 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        first, self._next = self._next, 0
        for number in range(first, self._length):
            self._given = number + 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = self._given = state["given"]


class _Saved:
    """A model's configuration or its tokenizer."""

    def __init__(self, name: str, content: dict[str, object]) -> None:
        self._name, self._content = name, content

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / self._name).write_text(json.dumps(self._content))


@contextmanager
def _no_state(*arguments: object, **options: object) -> Iterator[None]:
    yield


def checkpoint_writer(tree: Path) -> Any:
    """`save_checkpoint(local_path, …)` of the version's FSDP manager, called once per rank as its workers would."""
    path = tree / "verl" / "utils" / "checkpoint" / "fsdp_checkpoint_manager.py"
    names = ["save_checkpoint"] + (["FSDPConfig"] if "class FSDPConfig" in path.read_text() else [])
    parts = take(
        path, *names,
        torch=TORCH, os=os, json=json, warnings=warnings, asdict=asdict, dataclass=dataclass, local_mkdir_safe=_make_folder,
        get_fsdp_state_ctx=_no_state, fsdp_version=lambda model: 2, log_with_rank=lambda *_, **__: None,
        print=lambda *_, **__: None,
    )  # fmt: skip
    model = SimpleNamespace(state_dict=lambda: {"weight": 1.0}, can_generate=lambda: False)
    model.config = _Saved("config.json", {"vocab_size": 32, "model_type": "qwen2"})
    model._fsdp_wrapped_module = model
    every = dict.fromkeys(("should_save_model", "should_save_optimizer", "should_save_extra"), True)
    never = dict.fromkeys(("should_save_hf_model", "should_save_lora_only"), False)

    def save(local_path: str, *rest: object, **options: object) -> None:
        for rank in range(WORLD_SIZE):
            manager = SimpleNamespace(
                rank=rank, world_size=WORLD_SIZE, model=model, optimizer=Anything(), lr_scheduler=Anything(),
                processing_class=_Saved("tokenizer_config.json", {}), previous_saved_paths=[], local_mkdir=_make_folder,
                checkpoint_contents=["model", "hf_model", "optimizer", "extra"], get_rng_state=lambda: 0, **every, **never,
                ensure_checkpoint_capacity=Anything(), register_checkpoint=Anything(), _save_lora_train_meta=Anything(),
            )  # fmt: skip
            manager.optimizer = SimpleNamespace(state_dict=lambda: {"state": 0})
            manager.lr_scheduler = SimpleNamespace(state_dict=lambda: {"last": 0})
            parts["save_checkpoint"](manager, local_path, *rest, **options)

    return save


class Trainer:
    """The version's own `_save_checkpoint` and `_load_checkpoint` around a policy of two files."""

    def __init__(self, tree: Path, config: dict[str, Any], steps_per_epoch: int) -> None:
        self.global_steps, self.use_critic, self.trainer_mode = 0, False, "sync"
        defaults = {"default_hdfs_dir": None, "resume_mode": "auto", "del_local_ckpt_after_load": False}
        self.config = Config(
            trainer={**defaults, **config}, actor_rollout_ref={"actor": {"checkpoint": {}}, "rollout": {}}
        )
        self.train_dataloader = Loader(steps_per_epoch)
        self.checkpoint_callback = Anything()
        self.actor_rollout_wg = SimpleNamespace(
            save_checkpoint=checkpoint_writer(tree), load_checkpoint=lambda *_, **__: None
        )
        _stub_module("verl.utils.fs", local_mkdir_safe=_make_folder)
        manager = tree / "verl" / "utils" / "checkpoint" / "checkpoint_manager.py"
        tracker = take(
            manager, "find_latest_ckpt_path", "get_checkpoint_tracker_filename", os=os, print=lambda *_: None,
            torch=SimpleNamespace(distributed=SimpleNamespace(is_initialized=lambda: False)),
        )  # fmt: skip
        source = trainer_source(tree)
        self._own = take(
            source, "_save_checkpoint", "_load_checkpoint", "fit",
            torch=TORCH, os=os, print=lambda *_: None, find_latest_ckpt_path=tracker["find_latest_ckpt_path"],
        )  # fmt: skip
        self._fit = ast.get_source_segment(source.read_text(), _function(source, "fit")) or ""

    def save(self) -> None:
        self._own["_save_checkpoint"](self)

    def load(self) -> None:
        """Sets `global_steps` and the data loader's place as the version does."""
        self._own["_load_checkpoint"](self)

    def batches(self, total_epochs: int) -> Iterator[int]:
        """The batches of the version's training loop after `load`."""
        if "while current_epoch" in self._fit:  # the V1 trainer starts its iterator again when it is used up
            while True:
                yield from self.train_dataloader
        first = 0
        if "range(current_epoch, self.config.trainer.total_epochs)" in self._fit:
            first = self.global_steps // len(self.train_dataloader)
        else:
            assert "range(self.config.trainer.total_epochs)" in self._fit
        for _ in range(first, total_epochs):
            yield from self.train_dataloader


def trainer_source(tree: Path) -> Path:
    """The file with the trainer that `verl.trainer.main_ppo` of this version runs."""
    newest = tree / "verl" / "trainer" / "ppo" / "v1" / "trainer_base.py"
    return newest if newest.is_file() else tree / "verl" / "trainer" / "ppo" / "ray_trainer.py"


def _function(path: Path, name: str) -> ast.FunctionDef:
    nodes = ast.walk(ast.parse(path.read_text()))
    return next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)


def _stub_module(name: str, **content: object) -> None:
    parents = name.split(".")
    for depth in range(1, len(parents) + 1):
        sys.modules.setdefault(".".join(parents[:depth]), types.ModuleType(".".join(parents[:depth])))
    for key, value in content.items():
        setattr(sys.modules[name], key, value)
