"""Start a command so that nothing of it outlives the caller, whatever kills the caller.

    caller ──liveness pipe (end of file = the caller is gone or wants a stop)──▶ guard
    guard  ──status pipe (exit code of the command)──▶ caller

The guard is a detached process of its own (Ray kills the direct children of a dying worker, so a supervisor must not be
one) and a sub-reaper: descendants that call setsid or fork twice are re-parented to it and found in /proc. On a stop it
sends TERM to every descendant, waits `grace_s`, then sends KILL until none is left. Only then does it report.

A guard that is itself killed leaves its command behind: `sweep` finds processes by a tag in their environment.
Linux only. This file is also the guard's program and imports nothing outside the standard library.
"""

import ctypes
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

RUN_TAG = "GRPO_AGENT_RUN"
"""Environment variable that marks every process of a run with the run's folder."""

CANNOT_WRITE = 74
"""Exit code when the guard cannot write its files (EX_IOERR of sysexits.h); the command was not left running."""

ATTEMPT_TAG = "GRPO_AGENT_ATTEMPT"
"""Environment variable that marks every process of one attempt."""

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


class Guarded:
    """A running command under guard."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        cwd: Path,
        record: Path,
        scratch: Path | None = None,
        grace_s: float = 2.0,
    ) -> None:
        """Start `command`.

        Args:
            command: program and arguments.
            log: file to which stdout and stderr are appended.
            env: the whole environment of the command.
            cwd: its working directory.
            scratch: folder that is removed once nothing of the command is left, with what Ray has running there.
            record: file that gets `{"guard_pid": …, "pid": …, "started_s": …}` as JSON.
            grace_s: seconds between TERM and KILL on a stop.
        """
        live_read, self._live = os.pipe()
        self._status, status_write = os.pipe()
        os.set_blocking(self._status, False)
        self._received = b""
        self._exit_code: int | None = None
        spec = {
            "command": list(command),
            "log": str(log),
            "cwd": str(cwd),
            "record": str(record),
            "scratch": str(scratch or ""),
            "grace_s": grace_s,
            "live": live_read,
            "status": status_write,
        }
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), json.dumps(spec)],
                pass_fds=(live_read, status_write),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                check=True,
            )
        finally:
            os.close(live_read)
            os.close(status_write)

    def poll(self) -> int | None:
        """The command's exit code once nothing of it is left, else None. A killed guard counts as −9."""
        if self._exit_code is None:
            try:
                received = os.read(self._status, 4096)
            except BlockingIOError:
                return None
            self._received += received
            if self._received.endswith(b"\n"):
                self._exit_code = int(self._received)
            elif not received:
                self._exit_code = -signal.SIGKILL
        return self._exit_code

    def stop(self, timeout_s: float = 60.0) -> int | None:
        """End the command with all its descendants; returns its exit code, None if it is still there after the timeout."""
        if self._live >= 0:
            os.close(self._live)
            self._live = -1
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self._exit_code

    def close(self) -> None:
        """Stop if need be and release the pipes."""
        self.stop()
        if self._status >= 0:
            os.close(self._status)
            self._status = -1


def sweep(tag: str, *, variable: str = RUN_TAG, grace_s: float = 3.0) -> list[int]:
    """End every process whose environment has `GRPO_AGENT_RUN=<tag>` (or another variable), except this one.

    Returns the process ids that were ended. Used at start-up, when no driver of the run is alive (its lock is free), to
    remove what a killed guard or a killed Ray head left behind. Processes are never chosen by name.
    """
    return _sweep(lambda pid: _has_tag(pid, f"{variable}={tag}"), grace_s)


def sweep_holders(folder: Path, *, grace_s: float = 3.0) -> list[int]:
    """End every process of a run that holds a file below `folder` open, also a deleted one; returns their process ids.

    Ray's helpers overwrite their environment with a title, so their tag cannot be read; their logs give them away. Whoever
    else looks at such a file is left alone.
    """
    return _sweep(lambda pid: _is_of_a_run(pid) and _holds_file(pid, f"{folder}/"), grace_s)


def _sweep(is_meant: Callable[[int], bool], grace_s: float) -> list[int]:
    ended: set[int] = set()
    deadline = time.monotonic() + grace_s
    while True:
        found = [pid for pid in _pids() if pid != os.getpid() and is_meant(pid) and _is_alive(pid)]
        if not found or time.monotonic() > deadline + 10:
            return sorted(ended)
        for pid in found:
            _signal(pid, signal.SIGKILL if time.monotonic() > deadline or pid in ended else signal.SIGTERM)
        ended.update(found)
        time.sleep(0.2)


def _has_tag(pid: int, tag: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return tag.encode() in environ.split(b"\0")


def _is_of_a_run(pid: int) -> bool:
    """Whether a process has a run's tag or a title by Ray."""
    try:
        environ, command = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline"))
    except OSError:
        return False
    return command.startswith(b"ray::") or any(word.startswith(f"{RUN_TAG}=".encode()) for word in environ.split(b"\0"))


def _holds_file(pid: int, prefix: str) -> bool:
    links = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(links):
            with suppress(OSError):
                if os.readlink(f"{links}/{name}").startswith(prefix):
                    return True
    return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on, [] when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace", encoding="utf-8")
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def _is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def _descendants() -> list[int]:
    """All living descendants of this process, children first."""
    parent: dict[int, int] = {}
    alive: set[int] = set()
    for pid in _pids():
        fields = _stat(pid)
        if fields:
            parent[pid] = int(fields[1])
            if fields[0] not in ("Z", "X"):
                alive.add(pid)
    found: list[int] = []
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, its_parent in parent.items() if its_parent in generation}
        found += [pid for pid in generation if pid in alive]
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _end_descendants(grace_s: float, tick: Callable[[], object]) -> None:
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while left := _descendants():
        for pid in left:
            if time.monotonic() > deadline:
                _signal(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                _signal(pid, signal.SIGTERM)
        time.sleep(_POLL_S)
        tick()
        _reap()


def _write_record(path: str, guard_pid: int, pid: int) -> None:
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({"guard_pid": guard_pid, "pid": pid, "started_s": time.time()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


def _guard(text: str) -> None:
    spec = json.loads(text)
    if os.fork():
        os._exit(0)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        exit_code = _run_command(spec)
    except OSError as error:
        exit_code = CANNOT_WRITE if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES) else 127
        with suppress(OSError):
            os.write(2, f"cannot start {spec['command'][0]}: {error}\n".encode())
        _end_descendants(0.5, _reap)
    if spec["scratch"]:
        sweep_holders(Path(spec["scratch"]))
        shutil.rmtree(spec["scratch"], ignore_errors=True)
    with suppress(BrokenPipeError):
        os.write(spec["status"], f"{exit_code}\n".encode())
    os._exit(0)


def _run_command(spec: dict[str, Any]) -> int:
    """Run the command until it ends or the caller is gone, then end what is left of it; returns its exit code."""
    with open(spec["log"], "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    process = subprocess.Popen(
        spec["command"], cwd=spec["cwd"], stdin=subprocess.DEVNULL, preexec_fn=_restore_signals, start_new_session=True
    )
    _write_record(spec["record"], os.getpid(), process.pid)
    poller = select.poll()
    poller.register(spec["live"], select.POLLIN | select.POLLHUP)
    while process.poll() is None and not poller.poll(200):
        pass
    _end_descendants(spec["grace_s"] if process.poll() is None else 0.5, process.poll)
    exit_code = process.poll()
    return -signal.SIGTERM if exit_code is None else exit_code


def _restore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    _guard(sys.argv[1])
