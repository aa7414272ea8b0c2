"""The guard: nothing of a command outlives its caller."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trials.guard import CANNOT_WRITE, RUN_TAG, Guarded, sweep, sweep_holders

NASTY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1] + "/grandchild", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
open(sys.argv[1] + "/child", "w").write(str(os.getpid()))
time.sleep(600)
"""

CALLER = """
import os, signal, sys, time
from pathlib import Path
from trials.guard import Guarded
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell hands it down as ignored
folder = Path(sys.argv[1])
guarded = Guarded([sys.executable, str(folder / "nasty.py"), str(folder)], log=folder / "log", env=dict(os.environ),
                  cwd=folder, record=folder / "record", grace_s=0.3)
(folder / "ready").touch()
time.sleep(600)
"""


def wait_for(condition, timeout_s: float = 15.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def pids_in(folder: Path) -> list[int]:
    wait_for(lambda: all((folder / name).exists() and (folder / name).read_text() for name in ("child", "grandchild")))
    return [int((folder / name).read_text()) for name in ("child", "grandchild")]


def start(command: list[str], folder: Path, **options: float) -> Guarded:
    return Guarded(command, log=folder / "log", env=dict(os.environ), cwd=folder, record=folder / "record", **options)


def test_exit_code_and_output_arrive(tmp_path: Path) -> None:
    guarded = start(["bash", "-c", "echo out; echo err >&2; pwd; exit 7"], tmp_path)
    wait_for(lambda: guarded.poll() is not None)
    assert guarded.poll() == 7
    assert (tmp_path / "log").read_text() == f"out\nerr\n{tmp_path}\n"
    assert set(json.loads((tmp_path / "record").read_text())) == {"guard_pid", "pid", "started_s"}
    guarded.close()


def test_a_command_that_does_not_exist_is_an_exit_code(tmp_path: Path) -> None:
    guarded = start(["/no/such/program"], tmp_path)
    wait_for(lambda: guarded.poll() is not None)
    assert guarded.poll() == 127 and "cannot start" in (tmp_path / "log").read_text()


def test_stop_ends_a_command_that_ignores_term_and_hides_in_a_new_session(tmp_path: Path) -> None:
    (tmp_path / "nasty.py").write_text(NASTY)
    guarded = start([sys.executable, str(tmp_path / "nasty.py"), str(tmp_path)], tmp_path, grace_s=0.3)
    pids = pids_in(tmp_path)
    assert all(map(is_alive, pids))
    assert guarded.stop(timeout_s=20) is not None
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_killed_caller(tmp_path: Path, number: int) -> None:
    (tmp_path / "nasty.py").write_text(NASTY)
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(tmp_path)], stderr=subprocess.DEVNULL)
    pids = pids_in(tmp_path)
    wait_for(lambda: (tmp_path / "ready").exists())
    caller.send_signal(number)
    caller.wait(30)
    wait_for(lambda: not any(map(is_alive, pids)))


def test_sweep_ends_tagged_processes_and_no_others(tmp_path: Path) -> None:
    tag = str(tmp_path)
    tagged, other, longer = (
        subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_TAG: value}) for value in (tag, "another", tag + "x")
    )
    try:
        wait_for(lambda: Path(f"/proc/{tagged.pid}/comm").read_text() == "sleep\n")
        assert sweep(tag) == [tagged.pid]
        assert tagged.wait(5) == -signal.SIGTERM
        assert other.poll() is None and longer.poll() is None
    finally:
        for process in (tagged, other, longer):
            process.kill()
            process.wait()


def test_a_killed_guard_is_noticed_and_its_command_is_swept(tmp_path: Path) -> None:
    env = {**os.environ, RUN_TAG: str(tmp_path)}
    guarded = Guarded(["sleep", "600"], log=tmp_path / "log", env=env, cwd=tmp_path, record=tmp_path / "record")
    wait_for((tmp_path / "record").exists)
    record = json.loads((tmp_path / "record").read_text())
    os.kill(record["guard_pid"], signal.SIGKILL)
    wait_for(lambda: guarded.poll() is not None)
    assert guarded.poll() == -signal.SIGKILL
    assert is_alive(record["pid"])
    assert record["pid"] in sweep(str(tmp_path))
    wait_for(lambda: not is_alive(record["pid"]))


def test_the_scratch_folder_goes_with_the_command_even_when_the_caller_is_killed(tmp_path: Path) -> None:
    (tmp_path / "nasty.py").write_text(NASTY)
    (tmp_path / "scratch").mkdir()
    program = CALLER.replace("grace_s=0.3", "grace_s=0.3, scratch=folder / 'scratch'")
    caller = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.DEVNULL)
    pids_in(tmp_path)
    caller.kill()
    caller.wait(30)
    wait_for(lambda: not (tmp_path / "scratch").exists())


def test_processes_of_ray_that_hold_a_deleted_file_of_a_folder_are_found_and_no_others(tmp_path: Path) -> None:
    processes = []
    for name, title in (("ours", "ray::Agent"), ("ours", "tail"), ("ours2", "ray::Agent")):
        (tmp_path / name).mkdir(exist_ok=True)
        with (tmp_path / name / "log").open("w") as log:
            processes.append(subprocess.Popen([title, "600"], executable="/usr/bin/sleep", stdout=log))
    try:
        (tmp_path / "ours" / "log").unlink()
        assert sweep_holders(tmp_path / "ours") == [processes[0].pid]
        assert processes[0].wait(5) == -signal.SIGTERM
        assert processes[1].poll() is None and processes[2].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_full_disk_leaves_no_unguarded_command(tmp_path: Path) -> None:
    (tmp_path / "record.tmp").symlink_to("/dev/full")
    tag = {**os.environ, RUN_TAG: str(tmp_path)}
    guarded = Guarded(["sleep", "600"], log=tmp_path / "log", env=tag, cwd=tmp_path, record=tmp_path / "record")
    wait_for(lambda: guarded.poll() is not None)
    assert guarded.poll() == CANNOT_WRITE
    assert sweep(str(tmp_path)) == []
