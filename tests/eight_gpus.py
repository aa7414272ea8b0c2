"""The reference case rebuilt: a task on one node with 8 GPUs, as far as it can be without the GPUs and the weights.

verl's package is that of the 0.3.0.post1 wheel, Hydra configuration and core_algos.py included; the merger has the command
line of its repository; the model is Qwen2.5-1.5B's config.json and a stand-in for the weights; the data sets have the
names and the schema of the task.
"""

import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np

from scripted_workspace import INFERENCE_PY, INFERENCE_SH, make_rows
from wheels import wheel_tree

TRAIN_SH = Path(__file__).parent / "data" / "scripts" / "workspace_8_gpus.sh"

MERGER = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="fsdp")
parser.add_argument("--hf_model_path", default=None)
parser.add_argument("--local_dir", required=True)
"""


def build_eight_gpu_workspace(root: Path) -> Path:
    """Create it at `root`, with a training environment of its own in `conda/`; returns `root`."""
    verl = root / "task" / "repositories" / "verl"
    shutil.copytree(wheel_tree("0.3.0.post1") / "verl", verl / "verl")
    (verl / "scripts").mkdir()
    (verl / "scripts" / "model_merger.py").write_text(MERGER)
    scripts = root / "task" / "scripts"
    scripts.mkdir()
    shutil.copy(TRAIN_SH, scripts / "train.sh")
    (scripts / "inference.sh").write_text(INFERENCE_SH)
    (scripts / "inference.py").write_text(INFERENCE_PY)
    rows = {
        "math.8k/train": make_rows(256, ("math",), "train"),
        "math.8k/dev": make_rows(40, ("openai/gsm8k", "amc23"), "dev"),
        "math.8k/test": make_rows(20, ("math500",), "test").assign(sample_id=np.arange(20)),
    }
    for name, frame in rows.items():
        path = root / "data" / "datasets" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(path, index=False)
    model = root / "data" / "checkpoints" / "Qwen2.5-1.5B"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536}))
    (model / "tokenizer_config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(_safetensors_of_one_number())
    (root / "data" / "outputs").mkdir()
    python = root / "conda" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    (root / "conda" / "conda-meta").mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return root


def _safetensors_of_one_number() -> bytes:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)
