"""Turn a verl checkpoint into a Hugging Face model: model_merger.py --local_dir global_step_N/actor.

Without --target_dir the model is written next to the shards' folder: global_step_N/merged. The work is done
by verl's own merger (python -m verl.model_merger merge), from the verl package beside this script's folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]  # holds the verl package


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--local_dir", type=Path, required=True, help="global_step_N/actor, with the shards")
    parser.add_argument("--target_dir", type=Path, help="default: LOCAL_DIR/../merged")
    parser.add_argument("--backend", default="fsdp", choices=["fsdp", "megatron"], help="default: fsdp")
    args = parser.parse_args()

    local_dir = args.local_dir.resolve()
    if not local_dir.is_dir():
        parser.error(f"no such folder: {local_dir}")
    target_dir = (args.target_dir or local_dir.parent / "merged").resolve()
    search_path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", args.backend]
    command += ["--local_dir", str(local_dir), "--target_dir", str(target_dir)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path), "HF_HUB_OFFLINE": "1"}
    code = subprocess.run(command, env=environment).returncode
    if code == 0:
        print(f"merged model: {target_dir}")
    return code


if __name__ == "__main__":
    sys.exit(main())
