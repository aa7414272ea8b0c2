"""The run's own Ray: when its processes are killed, nothing of it is left and nobody waits for it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.errors import StageError
from trials.runner import short_scratch

DRIVER = """
import os, signal, sys, time
from pathlib import Path
from agent.cluster import Engine
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
engine = Engine(address=None, cpu_slots=1, folder=Path(sys.argv[1]), log=Path(sys.argv[2]), name=sys.argv[2])
with engine:
    os.kill(os.getpid(), signal.SIGTERM)
    print("ready", flush=True)
    while engine.lost_process() is None:
        time.sleep(0.1)
    print("lost", engine.lost_process(), flush=True)
    time.sleep(5)  # as if in a call to a Ray that no longer answers
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    folder = short_scratch(str(tmp_path))
    words = [sys.executable, "-c", DRIVER, str(folder), str(tmp_path / "ray.log")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["asked\n", "ready\n"]  # Ray's own handler would abort
    yield process, folder
    process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def ray_processes(folder: Path) -> dict[int, str]:
    """Living processes with an open file below the folder: pid → command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and any(
                os.readlink(link).startswith(f"{folder}/") for link in (entry / "fd").iterdir()
            ):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("victims", "code", "words"),
    [
        (("raylet/raylet",), 0, ("lost raylet\n", "asked\n")),
        (("gcs/gcs_server",), StageError.exit_code, ("error: Ray's gcs_server died (killed?); its last words: ",)),
        (("gcs/gcs_server", "raylet/raylet", "driver"), -signal.SIGKILL, ()),
    ],
)
def test_nothing_of_ray_is_left(
    driver: tuple["subprocess.Popen[str]", Path], victims: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    process, folder = driver
    bystander = subprocess.Popen(["tail", "-f", str(next((folder).glob("session_2*/logs/gcs_server.out")))])
    try:
        found = ray_processes(folder)
        assert any("DashboardAgent" in command for command in found.values())
        for pid in [pid for name in victims for pid, command in found.items() if name in command]:
            os.kill(pid, signal.SIGKILL)
        if "driver" in victims:
            process.kill()
        output, _ = process.communicate(timeout=20)
        assert process.returncode == code and all(word in output for word in words)
        deadline = time.monotonic() + 10
        while (left := ray_processes(folder).keys() - {bystander.pid}) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left and bystander.poll() is None
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not folder.exists()
    finally:
        bystander.kill()
        bystander.wait()
