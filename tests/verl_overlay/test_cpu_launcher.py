"""The fast start without training: who is the driver, what the head takes, what a fork server does."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl_overlay.cpu import launcher

CLIENT = str(Path(launcher.__file__).with_name("fork_client.py"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python3", "-m", "verl.trainer.main_ppo", "a=b"], True),
        (["python3", "-u", "-m", "verl.trainer.main_ppo"], True),
        (["python3", "-m", "verl.model_merger", "merge"], False),
        (["python3", "default_worker.py", "-m", "verl.trainer.main_ppo"], False),
        (["python3", "-m"], False),
    ],
)
def test_is_driver(argv: list[str], expected: bool) -> None:
    assert launcher.is_driver(argv) is expected


def test_head_options() -> None:
    overrides = ["trainer.nnodes=1", "ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.num_gpus=1"]
    assert launcher.head_options(overrides) == {"include_dashboard": False, "num_cpus": 16, "num_gpus": 1}
    with pytest.raises(launcher.PlainStart):
        launcher.head_options(["+ray_kwargs.ray_init.address=auto"])


def test_arm_does_nothing_outside_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launcher.SWITCH, "1")
    monkeypatch.setattr(launcher, "_FastStart", lambda missing: pytest.fail("not the driver"))
    launcher.arm()


def test_arm_says_why_it_is_a_plain_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(launcher.SWITCH, "1")
    monkeypatch.delenv("RAY_JOB_ID", raising=False)
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", launcher.MAIN_MODULE])
    launcher.arm()
    assert "plain start: RAY_JOB_ID must be set" in capsys.readouterr().err
    assert "RAY_RAYLET_PID" not in os.environ


def test_client_script_takes_paths_with_spaces(tmp_path: Path) -> None:
    script = tmp_path / "a b" / "python"
    script.parent.mkdir()
    client = launcher._write_client(script, str(tmp_path / "no socket"), sys.executable)
    done = subprocess.run([client, "-c", "import sys; print(sys.argv[1:])", "x y"], capture_output=True, text=True)
    assert done.stdout.strip() == "['x y']"


# A fork server by itself: the "driver" asks for one worker, which sleeps; then it ends or is killed.
SERVER = textwrap.dedent("""
    import importlib.util, os, subprocess, sys, time
    spec = importlib.util.spec_from_file_location("forkserver", sys.argv[1])
    forkserver = importlib.util.module_from_spec(spec); spec.loader.exec_module(forkserver)
    folder, mode = sys.argv[2:4]
    def work(argv):
        open(folder + "/worker", "w").write(str(os.getpid()))
        time.sleep(60)
    forkserver._run_worker_script = work
    forkserver.GRACE_S = 0.2
    server = forkserver.ForkServer(folder + "/s")
    driver = server.fork_driver()
    if driver:
        server.serve(driver, lambda: open(folder + "/cleaned", "w").close())
    client = [sys.executable, "-IS", sys.argv[4], folder + "/s", sys.executable]
    subprocess.run([*client, "/x/setup_worker.py"], check=True)
    open(folder + "/driver", "w").write(str(os.getpid()))
    time.sleep(60 if mode == "wait" else 0.5)
    os._exit(7)
""")


def _start(folder: Path, mode: str) -> "subprocess.Popen[bytes]":
    source = str(Path(launcher.__file__).with_name("forkserver.py"))
    return subprocess.Popen([sys.executable, "-c", SERVER, source, str(folder), mode, CLIENT])


def _read_pid(path: Path) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} never came")


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.fixture()
def folder() -> Iterator[Path]:
    """Not tmp_path, which is too long for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="vfs-") as name:
        yield Path(name)


def test_server_ends_with_the_drivers_code_and_takes_the_workers_along(folder: Path) -> None:
    server = _start(folder, "end")
    worker = _read_pid(folder / "worker")
    assert server.wait(10) == 7 and _gone(worker) and (folder / "cleaned").exists()


def test_killed_driver_takes_everything_along(folder: Path) -> None:
    server = _start(folder, "wait")
    worker, driver = _read_pid(folder / "worker"), _read_pid(folder / "driver")
    os.kill(driver, signal.SIGKILL)
    assert server.wait(10) == -signal.SIGKILL and _gone(worker)


def test_killed_server_takes_everything_along(folder: Path) -> None:
    server = _start(folder, "wait")
    worker, driver = _read_pid(folder / "worker"), _read_pid(folder / "driver")
    server.kill()
    assert server.wait(10) == -signal.SIGKILL and _gone(worker) and _gone(driver)


def test_signals_are_passed_on(folder: Path) -> None:
    server = _start(folder, "wait")
    worker = _read_pid(folder / "worker")
    server.terminate()
    assert server.wait(10) == -signal.SIGTERM and _gone(worker)
