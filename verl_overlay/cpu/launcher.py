"""Fast start of `python3 -m verl.trainer.main_ppo`: import everything once, fork driver and Ray workers.

A plain start imports torch, transformers, Ray and verl anew in the driver and in every Ray worker. With
VERL_CPU_FAST_START=1

    1. while the driver is still importing, a private Ray head starts next to it (ray_head.py);
    2. when verl is about to run its main function, this process imports what the workers need and forks: the
       child is the driver and goes on as if nothing had happened;
    3. the parent serves Ray's requests for workers (forkserver.py), which Ray makes through fork_client.py
       instead of starting an interpreter, and ends the way the driver ends, leaving no process behind.

Whatever is missing before the fork means a plain start, with one line that says why. Ray reads RAY_JOB_ID and
RAY_RAYLET_PID when it is imported, which is before this module is: the calling script sets them to the id of
the first job of a fresh cluster and to its own process id, which workers then watch in place of the raylet's.
"""

import contextlib
import functools
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SWITCH = "VERL_CPU_FAST_START"
MAIN_MODULE = "verl.trainer.main_ppo"
RAY_VERSION = "2.60."
NEEDED_AT_IMPORT = ("RAY_JOB_ID", "RAY_RAYLET_PID")
SOCKET_PATH_LIMIT = 100
HEAD_WAIT_S = 60.0
HEAD_OPTIONS = ("num_cpus", "num_gpus", "include_dashboard", "object_store_memory")
PRELOAD = (
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp",
    "verl.utils.tracking",
    "verl.utils.dataset.rl_dataset",
    "verl.experimental.reward_loop.reward_manager",
    "verl_overlay.cpu.rollout",
    "verl_overlay.cpu.batched",
    "verl_overlay.cpu.sampler",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "torchdata.stateful_dataloader",
    "hydra._internal.hydra",
    "uvicorn",
    "ray._private.async_compat",
    "ray._private.runtime_env.setup_hook",
    "ray._private.workers.setup_worker",
)


class PlainStart(Exception):
    """Why the fast start is not possible here."""


def is_driver(orig_argv: Sequence[str]) -> bool:
    """True for `python [options] -m verl.trainer.main_ppo …`."""
    for index, word in enumerate(orig_argv[1:], 1):
        if word == "-m":
            return list(orig_argv[index + 1 : index + 2]) == [MAIN_MODULE]
        if not word.startswith("-"):
            return False
    return False


def head_options(overrides: Sequence[str]) -> dict[str, Any]:
    """RayParams for the `ray_kwargs.ray_init.*` overrides; PlainStart for one the head does not take."""
    options: dict[str, Any] = {"include_dashboard": False}
    for override in overrides:
        key, separator, value = override.lstrip("+~").partition("=")
        if not key.startswith("ray_kwargs."):
            continue
        name = key.removeprefix("ray_kwargs.ray_init.")
        if not separator or name not in HEAD_OPTIONS:
            raise PlainStart(f"{key} is not an option the early Ray head takes")
        options[name] = json.loads(value.lower())
    return options


def arm() -> None:
    """Called when verl loads this package: in the driver, start the Ray head and hook verl's main."""
    if os.environ.get(SWITCH) != "1" or not is_driver(sys.orig_argv):
        return
    missing = [name for name in NEEDED_AT_IMPORT if os.environ.pop(name, None) is None]
    try:
        start = _FastStart(missing)
    except Exception as error:
        _say_plain(error)
        return
    _before_main(start.split)


def _say_plain(error: Exception) -> None:
    reason = str(error) if isinstance(error, PlainStart) else repr(error)
    print(f"[verl_overlay.cpu] plain start: {reason}", file=sys.stderr, flush=True)


def _before_main(action: Callable[[], None]) -> None:
    """Run `action` when verl's main function is called (main_ppo.py: @hydra.main). By then nothing is half
    imported any more, which matters: a fork in the middle of an import would inherit its locks."""
    import hydra

    original = hydra.main

    @functools.wraps(original)
    def main(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        hydra.main = original
        decorate = original(*args, **kwargs)

        def decorator(task: Any) -> Any:
            run = decorate(task)

            @functools.wraps(run)
            def start(*run_args: Any, **run_kwargs: Any) -> Any:
                action()
                return run(*run_args, **run_kwargs)

            return start

        return decorator

    hydra.main = main


class _FastStart:
    """The early Ray head, and the fork to come."""

    def __init__(self, missing: list[str]) -> None:
        import ray

        if missing:
            raise PlainStart(f"{' and '.join(missing)} must be set before Ray is imported")
        if not ray.__version__.startswith(RAY_VERSION):
            raise PlainStart(f"Ray {ray.__version__} is not {RAY_VERSION}x")
        options = head_options(sys.argv[1:])
        self._python = sys.executable
        self._folder = _private_folder()
        self._socket = str(self._folder / "s")
        self._address = self._folder / "address"
        self._client = _write_client(self._folder / "python", self._socket, self._python)
        self._head = self._start_head(options)

    def _start_head(self, options: dict[str, Any]) -> "subprocess.Popen[bytes]":
        script = Path(__file__).with_name("ray_head.py")
        command = [self._python, str(script), str(self._address), self._client, json.dumps(options)]
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)

    def split(self) -> None:
        """Preload and fork. Returns in the driver, or for a plain start; the parent never returns."""
        from verl_overlay.cpu.forkserver import ForkServer

        try:
            _preload()
            if threading.active_count() > 1:
                raise PlainStart(f"threads are running: {[t.name for t in threading.enumerate()]}")
            server = ForkServer(self._socket)
            driver = server.fork_driver()
        except Exception as error:
            self._clean_up()
            _say_plain(error)
            return
        if driver:
            server.serve(driver, self._clean_up)
        self._go_on_as_driver()

    def _go_on_as_driver(self) -> None:
        """Leave the head's lifeline to the parent; verl's ray.init() (main_ppo.py: run_ppo) joins it."""
        assert self._head.stdin is not None
        self._head.stdin.close()
        sys.executable = self._client
        import ray

        original = ray.init

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            ray.init = original
            address = self._wait_for_head()
            if address is None:
                _say_plain(PlainStart("the early Ray head did not come up; Ray starts its own"))
                sys.executable = self._python  # its workers are started, not forked
                return original(*args, **kwargs)
            kwargs = {k: v for k, v in kwargs.items() if k not in HEAD_OPTIONS}
            return original(*args, **{**kwargs, "address": address})

        ray.init = init

    def _wait_for_head(self) -> str | None:
        deadline = time.monotonic() + HEAD_WAIT_S
        while time.monotonic() < deadline:
            if self._address.exists():
                return self._address.read_text(encoding="utf-8")
            if not _is_alive(self._head.pid):
                return None
            time.sleep(0.02)
        return None

    def _clean_up(self) -> None:
        """Closing the lifeline makes the head stop its processes and end."""
        assert self._head.stdin is not None
        with contextlib.suppress(OSError):
            self._head.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> Path:
    """A short folder of our own next to Ray's files: the path of a socket has to stay under 108 bytes."""
    for parent in (os.environ.get("RAY_TMPDIR"), None):
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="vfs-", dir=parent))
            if len(os.fsencode(folder / "s")) < SOCKET_PATH_LIMIT:
                return folder
            folder.rmdir()
    raise PlainStart("no folder with a short enough path for a socket")


def _write_client(path: Path, socket_path: str, python: str) -> str:
    """The command Ray takes for its interpreter: a shell script, as no `#!` line takes a path with spaces."""
    client = str(Path(__file__).with_name("fork_client.py"))
    words = " ".join(shlex.quote(word) for word in (python, "-IS", client, socket_path, python))
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def _preload() -> None:
    """Import what driver and workers will need; one that is missing is only slower, so never an error."""
    for name in PRELOAD:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
