"""A run's folder: its paths, its lock, and opening it new or for a resume."""

import fcntl
import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from agent.clock import SystemTime, TimeSource, boot_facts
from agent.config import AgentConfig, differences, digest, write_config
from agent.errors import ConfigError, RunFolderError
from agent.ledger import SCHEMA, Ledger, RunState, fold
from search_spaces.strict_yaml import YamlError, read_yaml
from trials.runner import short_scratch

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PACKAGES = ("ray", "optuna", "torch", "verl", "transformers", "pandas", "pyarrow", "math-verify", "numpy", "pydantic")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.path / "ledger.jsonl")

    @property
    def tag(self) -> str:
        """Marks all processes of the run."""
        return str(self.path)

    @property
    def ray_tmpdir(self) -> Path:
        """Where the agent's own Ray keeps its files during a search."""
        return short_scratch(self.tag)

    @property
    def tune(self) -> Path:
        """Tune's own files, worth nothing after a search."""
        return self.path / "tune"

    @property
    def stop_file(self) -> Path:
        return self.path / "stop_requested"

    @property
    def optuna(self) -> Path:
        """The search as an Optuna study: a view, written anew from the ledger."""
        return self.path / "optuna.db"

    @property
    def submission(self) -> Path:
        return self.path / "submission"

    @property
    def manifest(self) -> Path:
        """Hashes of the workspace's files before the run."""
        return self.path / "workspace_before.json"

    def trial(self, name: str) -> Path:
        return self.path / "trials" / name

    def read_state(self) -> RunState:
        """The fold of the ledger.

        Raises:
            RunFolderError: the ledger cannot be read or does not begin with run_opened.
        """
        state = fold(self.ledger.read())
        if state.opened is None:
            raise RunFolderError(f"{self.ledger.path} does not begin with run_opened; restore the file")
        return state

    def read_manifest(self) -> dict[str, str]:
        """Hashes of the workspace's files before the run.

        Raises:
            RunFolderError: missing or damaged.
        """
        try:
            return dict(json.loads(self.manifest.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise RunFolderError(
                f"{self.manifest} is missing or damaged; without it changes cannot be proven"
            ) from None

    def read_config(self) -> AgentConfig:
        """The resolved configuration the run was started with.

        Raises:
            RunFolderError: missing or damaged.
        """
        try:
            return AgentConfig.model_validate(read_yaml(self.path / "config.yaml"))
        except (YamlError, ValueError) as error:
            raise RunFolderError(f"{self.path}/config.yaml cannot be used: {error}") from None


class Lock:
    """An exclusive lock on a file that the kernel releases when its holder dies; nothing to clean up."""

    def __init__(self, path: Path, what: str, must_stop: Callable[[], bool] = lambda: True) -> None:
        """A lock that is held elsewhere is refused at once, or waited for until `must_stop`."""
        self._path, self._what, self._must_stop = path, what, must_stop
        self._file: IO[Any] | None = None

    def __enter__(self) -> "Lock":
        writable = os.access(self._path.parent, os.W_OK) and not self._path.exists()
        self._file = self._path.open("a" if writable else "r", encoding="utf-8")
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self
            except OSError:
                if self._must_stop():
                    self._file.close()
                    raise RunFolderError(f"{self._what} is in use by another agent; wait for it or stop it") from None
                time.sleep(0.5)

    def __exit__(self, *exception: object) -> None:
        assert self._file is not None
        self._file.close()


def is_locked(path: Path) -> bool:
    """Whether a living agent holds the lock."""
    try:
        with Lock(path, ""):
            return False
    except RunFolderError:
        return True
    except OSError:
        return False


def new_run_folder(config: AgentConfig, name: str | None) -> RunFolder:
    """The folder of a new run; `run-<n>` when no name is given. Nothing is created yet.

    Raises:
        ConfigError: a name that is not usable as a folder.
        RunFolderError: the folder exists already.
    """
    if name is None:
        taken = [int(path.name[4:]) for path in config.runs.glob("run-*") if path.name[4:].isdigit()]
        name = f"run-{max(taken, default=0) + 1}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name}: use letters, digits, dot, dash and underscore, at most 64")
    folder = RunFolder(config.runs / name)
    if folder.path.exists():
        raise RunFolderError(
            f"{folder.path} exists already; choose another --name, or go on with `python run_agent.py resume {folder.path}`"
        )
    return folder


def find_run_folder(runs: Path, name: str | None) -> RunFolder:
    """An existing run by name or path; the one with the newest ledger when none is given.

    Raises:
        RunFolderError: there is no such run.
    """
    if name is not None:
        for path in (Path(name), runs / name):
            if (path / "ledger.jsonl").is_file():
                return RunFolder(path.resolve())
        raise RunFolderError(f"no run '{name}': neither {name} nor {runs / name} has a ledger.jsonl")
    ledgers = sorted(runs.glob("*/ledger.jsonl"), key=lambda path: path.stat().st_mtime)
    if not ledgers:
        raise RunFolderError(f"no run in {runs}; start one with `python run_agent.py`")
    return RunFolder(ledgers[-1].parent.resolve())


def create_run_folder(
    folder: RunFolder, config: AgentConfig, facts: dict[str, Any], time_source: TimeSource | None = None
) -> None:
    """Create the folder with its configuration and the first event of its ledger.

    Raises:
        RunFolderError: not writable.
    """
    try:
        folder.path.mkdir(parents=True)
        write_config(config, folder.path / "config.yaml")
    except OSError as error:
        raise RunFolderError(f"cannot create {folder.path}: {error.strerror}; choose a writable --set runs=…") from None
    source = time_source or SystemTime()
    folder.ledger.append(
        "run_opened",
        time=round(source.wall_s(), 3),
        elapsed_s=0.0,
        schema=SCHEMA,
        fingerprint=config.fingerprint(),
        space_digest=space_digest(config),
        config=config.model_dump(mode="json"),
        versions=versions(),
        **boot_facts(source),
        **facts,
    )


def space_digest(config: AgentConfig) -> str:
    """Hash of the search space's content."""
    return digest(yaml.safe_load(config.space_path().read_text(encoding="utf-8")))


def require_same(state: RunState, config: AgentConfig, folder: RunFolder) -> None:
    """Refuse to resume with a configuration that differs in what must not change.

    Raises:
        RunFolderError: naming the differing keys with both values.
    """
    opened = state.opened or {}
    if opened.get("schema") != SCHEMA:
        raise RunFolderError(f"{folder.path} has ledger schema {opened.get('schema')}, this version knows {SCHEMA}")
    changes = differences(opened["fingerprint"], config.fingerprint())
    changed = [f"{key}: {before!r} → {now!r}" for key, (before, now) in changes.items()]
    if opened["space_digest"] != space_digest(config):
        changed.append(f"content of {config.space_path()}")
    if changed:
        raise RunFolderError(
            f"{folder.path} was started with another configuration ({'; '.join(changed)}); restore it or start a new run"
        )


def versions() -> dict[str, str]:
    """Versions of the packages of the agent's own environment."""
    found = {"python": platform.python_version(), "machine": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
