"""The agent in one environment, verl in another with other versions of ray, torch and transformers: a whole run.

Two real virtual environments, built once and kept in ~/.cache; they take 8 GB and minutes, the run takes minutes more:

    GRPO_AGENT_SLOW_TESTS=1 pytest tests/agent/test_two_environments.py
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agent.ledger import Ledger
from trials.embedded.build import build_workspace
from wheels import CACHE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("GRPO_AGENT_SLOW_TESTS" not in os.environ, reason="slow: set GRPO_AGENT_SLOW_TESTS=1"),
]
ROOT = Path(__file__).parents[2]
TRAINING = {"ray": ("2.58.1", "2.58.0"), "transformers": ("5.9.0", "5.8.1")}
"""What the training environment has in another version than this one: the first that differs."""
AGENT = {"torch": ("2.14.1", "2.12.1"), "transformers": ("5.8.1", "5.7.0")}
NOT_NEEDED = re.compile(r"grpo-tuning-agent|pytest.*|hypothesis|ruff|mypy.*|pandas-stubs|types-.*|pip|setuptools", re.I)
TWO_STEPS = {
    "total_training_steps=48": "total_training_steps=2", "save_freq=6": "save_freq=1", "test_freq=12": "test_freq=2",
    "lr_warmup_steps=3": "lr_warmup_steps=1",
}  # fmt: skip


def other_versions(wanted: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Package → the first version that is not the installed one."""
    here = {package: importlib.metadata.version(package).split("+")[0] for package in wanted}
    return {package: next(v for v in versions if v != here[package]) for package, versions in wanted.items()}


def build(name: str, *installs: list[str]) -> Path:
    """A virtual environment, complete or not there; the test is skipped where it cannot be built."""
    prefix = CACHE.parent / "environments" / name
    if (prefix / "complete").exists():
        return prefix
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(prefix)], check=True)
    for arguments in installs:
        command = [str(prefix / "bin" / "pip"), "install", "-q", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"{name} cannot be built: {done.stderr.strip().splitlines()[-1][:300]}")
    (prefix / "complete").touch()
    return prefix


@pytest.fixture(scope="module")
def training_env() -> Path:
    """Everything as here, but another ray and transformers; without the project itself."""
    changed = other_versions(TRAINING)
    here = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    pins = [
        f"{name}=={version}" for name, version in here.items() if name not in changed and not NOT_NEEDED.match(name)
    ]
    pins += [f"{name}=={version}" for name, version in changed.items()]
    return build("training-" + "-".join(changed.values()), ["--no-deps", *sorted(pins)])


@pytest.fixture(scope="module")
def agent_env() -> Path:
    """What pyproject.toml declares for the agent, and a transformers that it does not need; no verl."""
    changed = other_versions(AGENT)
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("\ndependencies = [") : text.index("\n]", text.index("\ndependencies = ["))]
    declared = [d for d in re.findall(r'^\s+"([^"]+)"', block, re.M) if not d.startswith("torch")]
    pins = [f"{name}=={version}" for name, version in changed.items()]
    return build("agent-" + "-".join(changed.values()), [*pins, *declared])


def packages(prefix: Path) -> str:
    return subprocess.run([prefix / "bin" / "pip", "freeze"], capture_output=True, text=True, check=True).stdout


def versions_of(prefix: Path) -> dict[str, str]:
    return dict(line.split("==") for line in packages(prefix).splitlines() if "==" in line)


def files_of(prefix: Path) -> Iterator[tuple[str, int]]:
    """Every file but Python's own caches, with its size."""
    for path in sorted(prefix.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path), path.stat().st_size


def test_a_run_of_real_trainings_from_another_environment(agent_env: Path, training_env: Path, tmp_path: Path) -> None:
    agent, training = versions_of(agent_env), versions_of(training_env)
    assert all(agent[package] != training[package] for package in ("ray", "torch", "transformers"))
    assert "verl" not in agent and "optuna" in agent
    workspace = build_workspace(tmp_path / "workspace")
    script = workspace / "task" / "scripts" / "train.sh"
    text = script.read_text()
    for before, after in TWO_STEPS.items():
        text = text.replace(before, after)
    script.write_text(text)
    before = [packages(agent_env), packages(training_env), list(files_of(training_env))]

    options = {"training_env": training_env, "search.trials": 1, "search.concurrent": 1}
    command = [str(agent_env / "bin" / "python"), str(ROOT / "run_agent.py"), "run", "--workspace", str(workspace)]
    environment = {
        **os.environ,
        "PATH": f"{agent_env / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(agent_env),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*command, *(word for key, value in options.items() for word in ("--set", f"{key}={value}"))],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

    assert [packages(agent_env), packages(training_env), list(files_of(training_env))] == before
    run = tmp_path / "runs" / "run-1"
    events = Ledger(run / "ledger.jsonl").read()
    opened, checked = events[0], events[1]
    assert opened["versions"]["ray"] == agent["ray"] and opened["versions"]["torch"].startswith(agent["torch"])
    said = next(check["found"] for check in checked["checks"] if check["name"] == "training environment")
    for package in ("verl", "ray", "torch", "transformers"):
        assert f"{package} {training[package]}" in said
    ended = {event["trial"]: event for event in events if event["event"] == "trial_ended"}
    assert (ended["full"]["outcome"], ended["full"]["step"]) == ("completed", 2)
    assert ended["t000"]["outcome"] == ended["t001"]["outcome"] == "completed"
    assert {"merge", "inference", "validate"} <= {event["stage"] for event in events if event["event"] == "stage_done"}
    assert (workspace / "data" / "outputs" / "math_results_logits.pt").is_file()
    for trial in ("t000", "t001", "full"):
        child = json.loads((run / "trials" / trial / "attempt_1" / "env.json").read_text())
        assert child["PATH"].split(os.pathsep)[0] == str(training_env / "bin") and child["VIRTUAL_ENV"] == str(
            training_env
        )
        assert str(agent_env) not in json.dumps(child) and "PYTHONPATH" not in child
        log = (run / "trials" / trial / "attempt_1" / "log").read_text()
        assert str(agent_env) not in log and f"Ray {training['ray']}" in log
