"""The source trees of the verl versions that the contract tests cover, fetched from the package index once and kept.

The files are those of the wheels: what a version's own code prints and writes is tested with that code, not from memory.
"""

import fcntl
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

VERSIONS = ("0.3.0.post1", "0.4.1", "0.5.0", "0.6.1", "0.7.1", "0.8.0", "0.9.1")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "grpo-tuning-agent" / "wheels"
_TIMEOUT_S = 120
_failures: dict[str, str] = {}
"""Version → why it could not be fetched: one wait per test session, not one per test."""


def wheel_tree(version: str) -> Path:
    """The folder of an unpacked wheel (holds `verl/`); read only. Skips the test when the wheel cannot be fetched."""
    assert version in VERSIONS
    tree = CACHE / f"v{version}"
    if not tree.is_dir():
        if version not in _failures:
            CACHE.mkdir(parents=True, exist_ok=True)
            with _locked(CACHE / ".lock"):
                _failures[version] = "" if tree.is_dir() else _fetch(version, tree)
        if _failures[version]:
            pytest.skip(f"verl {version} cannot be fetched: {_failures[version]}")
    return tree


def _fetch(version: str, tree: Path) -> str:
    """Download and unpack; the folder appears whole or not at all. Returns what went wrong, "" when nothing did."""
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--quiet", "--dest", str(CACHE)]
    command = [sys.executable, "-m", "pip", "download", *options, f"verl=={version}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"pip took longer than {_TIMEOUT_S} s"
    wheels = sorted(path for path in CACHE.glob("verl-*.whl") if re.match(rf"verl-{re.escape(version)}-", path.name))
    if result.returncode != 0 or not wheels:
        lines = result.stderr.strip().splitlines()
        return lines[-1][:200] if lines else f"pip ended with {result.returncode}"
    partial = tree.with_name(f"{tree.name}.partial")
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(partial)
    partial.rename(tree)
    return ""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Test processes side by side fetch a wheel once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
