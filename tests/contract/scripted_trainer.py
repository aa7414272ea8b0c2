"""A trainer that behaves like one verl version at the border: its console logger, its checkpoints, its resume, and no model.

    python scripted_trainer.py <wheel tree> trainer.total_training_steps=8 …

The environment variable SCRIPTED holds its behaviour as JSON: step_s, steps_per_epoch, total_epochs, crash_at, die_at,
hang_at, nan_from, cut_save_at, ignore_term, leave_children, garbage; with `first_only`, a resumed one behaves well, with
`full_only`, a search trial does.
"""

import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from verl_overlay.install import configuration_identity, read_configuration
from verl_parts import TORCH, Trainer, load_logger, write_archive

SOURCES = ("a - b", "c")
RECORD = "children.txt"


def main(tree: Path, words: list[str]) -> int:
    options = dict(word.lstrip("+").split("=", 1) for word in words)
    behaviour = json.loads(os.environ.get("SCRIPTED", "{}"))
    total, test, save = (int(options[f"trainer.{name}"]) for name in ("total_training_steps", "test_freq", "save_freq"))
    default = f"checkpoints/{options.get('trainer.project_name')}/{options.get('trainer.experiment_name')}"
    local_dir = options.get("trainer.default_local_dir", default).strip("'")
    trainer = Trainer(tree, {"default_local_dir": local_dir}, behaviour.get("steps_per_epoch", total))
    console = Console(tree)
    trainer.load()
    start = trainer.global_steps
    is_search = "VERL_OVERLAY" in os.environ
    if (start and behaviour.get("first_only")) or (is_search and behaviour.get("full_only")):
        behaviour = {name: behaviour[name] for name in ("steps_per_epoch", "total_epochs") if name in behaviour}
    prepare(behaviour)
    console.log({**dev_metrics(tree, start, total)}, start)
    for _ in trainer.batches(behaviour.get("total_epochs", 1)):
        trainer.global_steps += 1
        step = trainer.global_steps
        time.sleep(behaviour.get("step_s", 0.05))
        act(behaviour, step)
        is_last = step >= total
        if step % save == 0 or is_last:
            if step == behaviour.get("cut_save_at"):
                TORCH.save = cut_save
            trainer.save()
        metrics = step_metrics(tree, step, is_nan=step >= behaviour.get("nan_from", math.inf))
        if step % test == 0 or is_last:
            metrics |= dev_metrics(tree, step, total)
        console.log(metrics, step)
        if is_last:
            break
    return 0


class Console:
    """The version's console logger behind Ray's name of the worker, beside a progress bar."""

    def __init__(self, tree: Path) -> None:
        self._logger = load_logger(tree).LocalLogger(print_to_console=True)

    def log(self, metrics: dict[str, object], step: int) -> None:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            self._logger.log(metrics, step)
        line = text.getvalue().splitlines()[-1]
        print(f"\x1b[36m(TaskRunner pid=7)\x1b[0m {line}", flush=True)
        print(f"\r\x1b[36m(TaskRunner pid=7)\x1b[0m Training Progress: | {step}", end="", file=sys.stderr, flush=True)


def step_metrics(tree: Path, step: int, is_nan: bool) -> dict[str, object]:
    is_old = tree.name == "v0.3.0.post1"
    return {
        "actor/entropy_loss" if is_old else "actor/entropy": math.nan if is_nan else 0.5,
        "actor/pg_loss": math.nan if is_nan else 0.125,
        "actor/grad_norm": np.float64("nan") if is_nan else np.float64(0.25),
        "actor/overlay/configuration_id": configuration_identity(read_own_configuration()),
        "timing_s/step": 0.05,
    }


def read_own_configuration() -> dict[str, object]:
    """What the overlay would run with: the environment's, else what is baked into core_algos.py."""
    import verl

    core_algos = Path(str(verl.__file__)).parent / "trainer" / "ppo" / "core_algos.py"
    if "VERL_OVERLAY" in os.environ or not core_algos.is_file():
        return dict(json.loads(os.environ.get("VERL_OVERLAY", "{}")))
    return read_configuration(core_algos)


def dev_metrics(tree: Path, step: int, total: int) -> dict[str, object]:
    accuracy = np.float64(0.25 + 0.5 * step / total)
    pattern = "val/test_score/{}" if tree.name == "v0.3.0.post1" else "val-core/{}/acc/mean@1"
    return {pattern.format(source): accuracy for source in SOURCES}


def cut_save(value: object, path: str) -> None:
    """Killed while the second rank's optimizer is being written."""
    if "optim_world_size_2_rank_1" in path:
        Path(path).write_bytes(b"PK\3\4cut")
        os.kill(os.getpid(), signal.SIGKILL)
    write_archive(value, path)


def prepare(behaviour: dict[str, object]) -> None:
    if behaviour.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour.get("leave_children"):
        # One in a session of its own, one orphaned by its parent, both deaf to TERM.
        deaf = ["bash", "-c", "trap '' TERM; while :; do sleep 1; done"]
        child = subprocess.Popen(deaf, start_new_session=True)
        orphan = subprocess.run(
            ["bash", "-c", "(trap '' TERM; exec sleep 600) >/dev/null & echo $!"], stdout=subprocess.PIPE
        )
        Path(RECORD).write_text(f"{child.pid} {int(orphan.stdout)}")
    if behaviour.get("garbage"):
        sys.stdout.buffer.write(b"\xff\xfe\x00 step:99 - \x80\nstep:98 - nothing\nstep: 97 - actor/entropy:1\n" * 200)
        sys.stdout.flush()


def act(behaviour: dict[str, object], step: int) -> None:
    """Whatever is to go wrong in this step."""
    if step == behaviour.get("crash_at"):
        print("\x1b[36m(TaskRunner pid=7)\x1b[0m torch.distributed.DistBackendError: scripted crash", flush=True)
        sys.exit(1)
    if step == behaviour.get("die_at"):
        os.kill(os.getpid(), signal.SIGKILL)
    if step == behaviour.get("hang_at"):
        time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
