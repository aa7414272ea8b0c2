"""The serving half of the fast start: forks Ray workers on request until the driver has ended.

The process that runs this has every heavy module imported, no thread started and Ray never initialised, so a
fork of it is a ready Ray worker at once.
"""

import array
import contextlib
import ctypes
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

GRACE_S = 5.0
POLL_S = 0.1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent, which has a single thread, ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class ForkServer:
    """Owns the listening socket and everything forked from it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._exit_code: int | None = None

    def close(self) -> None:
        self._listener.close()

    def fork_driver(self) -> int:
        """Fork the driver: 0 in the driver, its process id here. From now on orphans come to this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()
        parent = os.getpid()
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        driver = os.fork()
        if driver == 0:
            die_with(parent)
            self.close()
        return driver

    def serve(self, driver: int, clean_up: Callable[[], None]) -> NoReturn:
        """Fork workers until the driver ends, leave nothing behind, and end the way the driver did."""
        for number in FORWARDED:
            signal.signal(number, lambda received, _frame: _kill(driver, received))
        while not self._reap(driver):
            ready, _, _ = select.select([self._listener], [], [], POLL_S)
            if ready:
                self._answer()
        self.close()
        clean_up()
        _end_children(time.monotonic() + GRACE_S)
        _end_like(self._exit_code or 0)

    def _reap(self, driver: int) -> bool:
        """Collect ended children; true once the driver is among them."""
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if child == 0:
                return False
            if child == driver:
                self._exit_code = os.waitstatus_to_exitcode(status)
                return True

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            request, streams = _receive(connection)
            if request is not None:
                parent = os.getpid()
                try:
                    worker = os.fork()
                except OSError as error:
                    print(f"[verl_overlay.cpu] no worker forked: {error}", file=sys.stderr, flush=True)
                    worker = -1
                if worker == 0:
                    connection.close()
                    self.close()
                    _become_worker(request, streams, parent)
                with contextlib.suppress(OSError):
                    connection.sendall(b"1" if worker > 0 else b"0")
        for stream in streams:
            os.close(stream)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One request of fork_client.py: a JSON document and three file descriptors."""
    connection.settimeout(5.0)
    data, streams = b"", array.array("i")
    try:
        while not data.endswith(b"\0"):
            chunk, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(3 * streams.itemsize))
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    streams.frombytes(payload[: len(payload) - len(payload) % streams.itemsize])
            if not chunk:
                return None, list(streams)
            data += chunk
        return json.loads(data[:-1]), list(streams)
    except (OSError, ValueError):
        return None, list(streams)


def _become_worker(request: dict[str, Any], streams: list[int], parent: int) -> NoReturn:
    """What ray/_private/workers/setup_worker.py does, without a second interpreter."""
    code = 1
    try:
        die_with(parent)
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        for stream in streams:
            if stream > 2:
                os.close(stream)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        _reseed()
        code = _run_worker_script(request["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _reseed() -> None:
    """A forked generator would draw the same numbers in every worker; a started interpreter would not."""
    import numpy

    random.seed()
    numpy.random.seed()


def _run_worker_script(argv: list[str]) -> int:
    import atexit

    import ray._private.workers.setup_worker as setup_worker
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray.core.generated.common_pb2 import Language

    known, script = setup_worker.parser.parse_known_args(argv[1:])
    context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
    if context.command_prefix or context.override_worker_entrypoint:
        context.exec_worker(script, Language.Value(known.language))
    update_envs(context.env_vars)
    sys.argv, sys.path[0] = script, os.path.dirname(script[0])
    try:
        runpy.run_path(script[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        atexit._run_exitfuncs()
    return 0


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children() -> list[int]:
    """Process ids whose parent is this process."""
    me, found = str(os.getpid()), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8") as stat:
            if stat.read().rpartition(")")[2].split()[1] == me:
                found.append(int(name))
    return found


def _end_children(deadline: float) -> None:
    """Wait for the children (orphans included: this process is their sub-reaper), then kill what is left."""
    while True:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child:
            continue
        if time.monotonic() > deadline:
            for pid in _children():
                _kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _end_like(code: int) -> NoReturn:
    """Exit with the driver's code, or by the driver's signal."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if code < 0:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1.0)
    os._exit(code if code >= 0 else 128 - code)
