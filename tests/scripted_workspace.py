"""A workspace whose trainer is a small script that obeys the border contract: command line, log, checkpoints, exit code.

Everything on the agent's side is real (Ray Tune, Optuna, processes, ledger, overlay installation into verl's real
core_algos.py); only the training itself is scripted, so that a whole run takes seconds.
"""

import json
import os
import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors.numpy import save_file

from verl_overlay import install
from wheels import wheel_tree

TRAIN_SH = """#!/usr/bin/env bash
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
DATA="$ROOT/data/datasets/math.8k"
export PYTHONPATH="$ROOT/task/repositories/verl"
exec python3 -m verl.trainer.main_ppo \\
  algorithm.adv_estimator=grpo \\
  data.train_files="'$DATA/train.parquet'" \\
  data.val_files="'$DATA/dev.parquet'" \\
  actor_rollout_ref.model.path="'$ROOT/data/checkpoints/base'" \\
  trainer.device=cpu \\
  trainer.project_name=scripted \\
  trainer.experiment_name=full \\
  trainer.total_training_steps=16 \\
  trainer.save_freq=4 \\
  trainer.test_freq=2 \\
  "$@"
"""

HOLD = """
import json, os, time
from pathlib import Path

behaviour = json.loads(os.environ.get("SCRIPTED", "{}"))

def hold(phase):
    # Wait in a phase for whatever the test does to us, once: `hold` is a folder in which each phase leaves a file.
    marker = Path(behaviour.get("hold", "/nowhere")) / phase
    if marker.parent.is_dir() and not marker.exists():
        marker.touch()
        time.sleep(3600)

"""

MAIN_PPO = """
import re, signal, sys, zipfile
from verl_overlay import install

options = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:])
here = Path(__file__).resolve().parents[1]
configuration = install.read_configuration(here / "trainer" / "ppo" / "core_algos.py")
if os.environ.get("VERL_OVERLAY"):
    configuration = json.loads(os.environ["VERL_OVERLAY"])
identity = install.configuration_identity(configuration)
total, test, save = (int(options["trainer." + key]) for key in ("total_training_steps", "test_freq", "save_freq"))
default = f"checkpoints/{options['trainer.project_name']}/{options['trainer.experiment_name']}"
folder = Path(options.get("trainer.default_local_dir", default).strip("'"))
tracker = folder / "latest_checkpointed_iteration.txt"
start = int(tracker.read_text()) if tracker.exists() else 0
if behaviour.get("ignore_term"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("some noise - step: not a step line", flush=True)
time.sleep(behaviour.get("startup_s", 0.1))
if not json.loads(os.environ.get("VERL_OVERLAY", "{}")):  # baseline or full run
    behaviour.pop("hold", None)
hold("start-up")

holds = configuration.get("token_rule") == "stare"
damped = float(configuration.get("negative_weight", 1.0))
for step in range(start, total + 1):
    if step > start:
        time.sleep(behaviour.get("step_s", 0.05))
    if step == 3:
        hold("step")
    if step == behaviour.get("crash_at"):
        print("ValueError: scripted crash")
        sys.exit(1)
    if step == behaviour.get("hang_at"):
        time.sleep(3600)
    fields = []
    if step > start:
        entropy = 0.4 * (0.85 if holds else 0.5 + 0.4 * (1 - damped)) ** (step / 4)
        if step >= behaviour.get("nan_from", 10**9):
            entropy = float("nan")
        fields += [f"actor/entropy:{entropy}", "actor/pg_loss:0.1", "actor/grad_norm:np.float64(0.5)"]
        fields += [f"actor/overlay/configuration_id:{identity}", "timing_s/step:0.05"]
    if step % test == 0 or step == total:
        if step == 6:
            hold("validation")
        accuracy = 0.3 + 0.4 * step / total
        fields += [f"val-core/a - b/acc/mean@1:np.float64({accuracy})", f"val-core/c/acc/mean@1:{accuracy}"]
    if step > start and (step % save == 0 or step == total):
        actor = folder / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True, exist_ok=True)
        for name in (actor / "model_world_size_1_rank_0.pt", actor.parent / "data.pt"):
            if step == 4 and name.name == "data.pt":
                hold("checkpoint")
            with zipfile.ZipFile(name, "w") as file:
                file.writestr("data", f"{step} {identity}")
                file.writestr("padding", bytes(behaviour.get("save_bytes", 0) // 2))
        tracker.write_text(str(step))
    if fields:
        print("\\x1b[36m(TaskRunner pid=7)\\x1b[0m step:%d - %s" % (step, " - ".join(fields)), flush=True)
"""

VERL = """
# Whatever is not here is an empty thing that can be called and subclassed: core_algos.py imports more than a stand-in has.
import importlib.abc, importlib.machinery, sys, types


class Thing:
    def __init__(self, *arguments, **named):
        pass

    def __call__(self, function):
        return function


class Stand(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Thing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.startswith("verl.") else None

    def create_module(self, spec):
        return Stand(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
"""

MERGER = """
import argparse, shutil
import numpy as np
from safetensors.numpy import load_file, save_file
parser = argparse.ArgumentParser()
parser.add_argument("--local_dir", required=True)
parser.add_argument("--target_dir", required=True)
options = parser.parse_args()
base = Path(__file__).resolve().parents[4] / "data" / "checkpoints" / "base"
shutil.copytree(base, options.target_dir)
if "full" in options.local_dir:
    hold("merge")
weights = load_file(base / "model.safetensors")
save_file({name: value + np.float32(0.5) for name, value in weights.items()}, Path(options.target_dir) / "model.safetensors")
"""

INFERENCE_SH = """#!/usr/bin/env bash
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
sleep "${SCRIPTED_INFERENCE_S:-0}"
exec python3 "$HERE/inference.py" "$1" "${OUTPUT_DIR:-$HERE/../../data/outputs}"
"""

INFERENCE_PY = """
import sys
import pandas as pd, torch
root = Path(__file__).resolve().parents[2]
test = pd.read_parquet(root / "data/datasets/math.8k/test.parquet")
out = Path(sys.argv[2])
results = pd.DataFrame({"sample_id": test["sample_id"], "output": [r"Answer:\\\\boxed{1}"] * len(test)})
results.to_parquet(out / "math_results.parquet", index=False)
if "full" in sys.argv[1]:
    hold("inference")
torch.save([torch.randn(behaviour.get("tokens", 3), 32) for _ in range(len(test))], out / "math_results_logits.pt")
"""


def make_rows(count: int, sources: tuple[str, ...], split: str) -> pd.DataFrame:
    """Rows in verl's schema."""
    rows = [
        {
            "data_source": sources[index % len(sources)],
            "prompt": [{"role": "user", "content": f"{split} {index}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(index % 3)},
            "extra_info": {"split": split, "index": index},
        }
        for index in range(count)
    ]
    return pd.DataFrame(rows)


ON_GPUS = """trainer.n_gpus_per_node=8 \\
  actor_rollout_ref.rollout.n=8 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
  data.train_batch_size=128 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"""
"""What takes the place of trainer.device=cpu; the scripted trainer looks at none of it but asks for the GPUs."""


def build_scripted_workspace(root: Path, on_gpus: bool = False) -> Path:
    """Create the workspace at `root`; `on_gpus` asks 8 GPUs in train.sh."""
    spec = find_spec("verl")
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parent
    verl = root / "task" / "repositories" / "verl"
    (verl / "verl" / "trainer" / "ppo").mkdir(parents=True)
    shutil.copy(installed / "trainer" / "ppo" / "core_algos.py", verl / "verl" / "trainer" / "ppo")
    (verl / "verl" / "__init__.py").write_text(VERL)
    for package in ("verl/trainer", "verl/trainer/ppo"):
        (verl / package / "__init__.py").touch()
    (verl / "verl" / "trainer" / "main_ppo.py").write_text(HOLD + MAIN_PPO)
    (verl / "scripts").mkdir()
    (verl / "scripts" / "model_merger.py").write_text(HOLD + MERGER)
    scripts = root / "task" / "scripts"
    scripts.mkdir()
    for name, text in (("train.sh", TRAIN_SH), ("inference.sh", INFERENCE_SH), ("inference.py", HOLD + INFERENCE_PY)):
        (scripts / name).write_text(text.replace("trainer.device=cpu", ON_GPUS) if on_gpus else text)
    data = root / "data" / "datasets" / "math.8k"
    data.mkdir(parents=True)
    make_rows(128, ("train",), "train").to_parquet(data / "train.parquet", index=False)
    make_rows(30, ("a - b", "c", "c"), "dev").to_parquet(data / "dev.parquet", index=False)
    test = make_rows(12, ("test",), "test")
    test["sample_id"] = np.arange(100, 112)
    test.to_parquet(data / "test.parquet", index=False)
    base = root / "data" / "checkpoints" / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps({"vocab_size": 32, "model_type": "qwen2"}))
    (base / "tokenizer_config.json").write_text("{}")
    save_file({"model.embed_tokens.weight": np.zeros((32, 4), np.float32)}, base / "model.safetensors")
    (root / "data" / "outputs").mkdir()
    return root


def install_trainer(root: Path, version: str) -> None:
    """Let the workspace at `root` train with the scripted trainer of a verl version; see tests/contract.

    Where the workspace has a core_algos.py, it becomes that version's, if the overlay can be installed into it.
    """
    program = Path(__file__).parent / "contract" / "scripted_trainer.py"
    package = root / "task" / "repositories" / "verl" / "verl"
    (package / "trainer").mkdir(parents=True, exist_ok=True)
    (root / "task" / "scripts").mkdir(exist_ok=True)
    for folder in (package, package / "trainer"):
        (folder / "__init__.py").touch()
    lines = ["import runpy, sys", f"sys.argv.insert(1, {str(wheel_tree(version))!r})"]
    lines.append(f"runpy.run_path({str(program)!r}, run_name='__main__')")
    (package / "trainer" / "main_ppo.py").write_text("\n".join(lines))
    core_algos = package / "trainer" / "ppo" / "core_algos.py"
    if core_algos.is_file():
        own = wheel_tree(version) / "verl" / "trainer" / "ppo" / "core_algos.py"
        with suppress(install.OverlayError):
            install.require_supported(own)
            shutil.copy(own, core_algos)


def agent_environment(**behaviour: object) -> dict[str, str]:
    """The environment of an agent process whose trainers behave so."""
    return {**os.environ, "SCRIPTED": json.dumps(behaviour)}
