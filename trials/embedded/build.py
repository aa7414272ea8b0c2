"""Build the embedded workspace: ``python -m trials.embedded.build TARGET``.

The folder has the layout of the user's real task, so what works on one works on the other: a verl repository,
scripts to train and to answer the test questions, data sets, a base model, an empty output folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from trials.embedded.data import write_splits

HERE = Path(__file__).resolve().parent
GRADING = HERE.parent / "grading.py"
OVERLAY = HERE.parents[1] / "verl_overlay"  # beside this package, installed or not
BASE_MODEL = "tiny-qwen2"
DATASET = "math.8k"
_NO_CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")


def build_workspace(target: Path, verl: Path | None = None) -> Path:
    """Create the workspace at ``target``, completely or not at all, and return its absolute path.

    ``verl`` is the package folder to copy; by default the one installed beside this module. Refuses a target that exists
    and is not an empty folder (FileExistsError), and a missing verl (ModuleNotFoundError).
    """
    return build_folder(target, lambda root: _fill(root, verl or _installed_verl()))


def build_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Create a folder, completely or not at all, and return its absolute path.

    Refuses a target that exists and is not an empty folder (FileExistsError); when ``fill`` fails, nothing is left.
    """
    target = target.absolute()
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise FileExistsError(f"{target} exists and is not an empty folder; choose another for the workspace")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fill(unfinished)
        unfinished.chmod(0o755)  # mkdtemp's folders are private
        os.rename(unfinished, target)  # replaces an empty folder
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return target


def _fill(root: Path, verl: Path) -> None:
    copy_verl(verl, root / "task" / "repositories" / "verl")
    shutil.copytree(OVERLAY, root / "task" / "plugins" / "verl_overlay", ignore=_NO_CACHES)
    _copy_scripts(root / "task" / "scripts")
    datasets = root / "data" / "datasets" / DATASET
    datasets.mkdir(parents=True)
    write_splits(datasets)
    shutil.copytree(HERE / "base", root / "data" / "checkpoints" / BASE_MODEL)
    (root / "data" / "outputs").mkdir()


def copy_verl(package: Path, repository: Path) -> None:
    """A verl package and a merger script that calls its merger, laid out like verl's git repository."""
    shutil.copytree(package, repository / "verl", ignore=_NO_CACHES)
    (repository / "scripts").mkdir()
    shutil.copy(HERE / "model_merger.py", repository / "scripts")


def _copy_scripts(scripts: Path) -> None:
    scripts.mkdir(parents=True)
    for name in ("train.sh", "inference.sh", "inference.py"):
        shutil.copy(HERE / name, scripts)
    shutil.copy(GRADING, scripts / "reward.py")
    for script in scripts.glob("*.sh"):
        script.chmod(0o755)


def _installed_verl() -> Path:
    """Where verl lies, found without importing it."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the embedded workspace needs verl; install the 'embedded' extra (verl 0.9.1)")
    return Path(spec.origin).parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the embedded workspace.")
    parser.add_argument("target", type=Path, help="folder to create")
    print(build_workspace(parser.parse_args().target))


if __name__ == "__main__":
    main()
