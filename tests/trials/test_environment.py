"""The training environment is asked, not imported; the agent's own environment does not reach it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from agent.config import load_config
from agent.errors import ConfigError
from trials import environment as environment_module
from trials.effective import configuration_problems, nearest_keys, relied_on
from trials.environment import (
    EnvironmentUnusable,
    TrainingEnvironment,
    TrainingRequest,
    default_prefix,
    find_python,
    read_training_environment,
)
from trials.runner import child_environment
from trials.script import quote_value
from wheels import VERSIONS, wheel_tree


def ask(verl: Path | None = None, *overrides: str, flags: dict[str, str] | None = None) -> TrainingEnvironment:
    environment = child_environment(os.environ, None, "test")
    if verl is not None:
        environment["PYTHONPATH"] = str(verl)
    return read_training_environment(environment, Path("/"), TrainingRequest(list(overrides), flags or {}))


# ---- what it is -------------------------------------------------------------------------------------------------------


def test_it_tells_versions_and_where_verl_is_imported_from(tmp_path: Path) -> None:
    package = tmp_path / "verl"
    (package / "trainer" / "ppo").mkdir(parents=True)
    (package / "version").mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('verl is not to be imported')")
    (package / "trainer" / "ppo" / "core_algos.py").touch()
    (package / "version" / "version").write_text("9.8.7\n")
    found = ask(tmp_path, "a.b=1")
    assert found.core_algos == package / "trainer" / "ppo" / "core_algos.py"
    assert found.versions["verl"] == "9.8.7" and found.versions["ray"] and found.versions["torch"]
    assert found.python_version == ".".join(map(str, sys.version_info[:3]))
    assert Path(found.prefix) == Path(sys.prefix) and found.configuration is None


def test_a_folder_in_which_python_starts_comes_first(tmp_path: Path) -> None:
    (tmp_path / "verl" / "trainer" / "ppo").mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").touch()
    (tmp_path / "verl" / "trainer" / "ppo" / "core_algos.py").touch()
    found = read_training_environment(child_environment(os.environ, None, "test"), tmp_path)
    assert found.core_algos == tmp_path / "verl" / "trainer" / "ppo" / "core_algos.py"


def test_another_environment_answers_for_itself(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True)
    environment = child_environment(os.environ, str(tmp_path / "other"), "test")
    found = read_training_environment(environment, Path("/"), TrainingRequest(["a=1"]))
    assert Path(found.prefix) == tmp_path / "other" and found.python.startswith(str(tmp_path / "other"))
    assert found.versions == {} and found.core_algos is None and found.configuration is None
    assert list((tmp_path / "other").rglob("__pycache__")) == []


def test_one_that_cannot_be_asked_is_named(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'libcrypt.so.1: cannot open shared object file' >&2\nexit 127\n")
    python.chmod(0o755)
    with pytest.raises(
        EnvironmentUnusable, match=rf"python3 of {tmp_path}/bin cannot be asked: libcrypt.*training_env"
    ):
        read_training_environment(child_environment(os.environ, str(tmp_path), "test"), Path("/"))


def test_one_that_hangs_is_named_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nsleep 61 &\necho $! >{tmp_path}/child\nwait\n")
    python.chmod(0o755)
    monkeypatch.setattr("trials.environment._FIRST_ANSWER_S", 1.0)
    with pytest.raises(EnvironmentUnusable, match="it did not answer within 1 s; set training_env to one that works"):
        read_training_environment(child_environment(os.environ, str(tmp_path), "test"), Path("/"))
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/cmdline")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_bytes():  # not a zombie's
        assert time.monotonic() < deadline
        time.sleep(0.05)


CORE_ALGOS = {
    "raise RuntimeError('two\\nlines')": "RuntimeError: two lines",
    "import sys; sys.exit(0)": "SystemExit: 0",
    "import os; os._exit(0)": "it ends Python, or never comes back",
    "import signal, os; os.kill(os.getpid(), signal.SIGKILL)": "it ends Python, or never comes back",
    "import nowhere": "ModuleNotFoundError: No module named 'nowhere'",
    "while True: pass": "TimeoutError: takes longer than 1 s",
    "print('grpo')": None,
}


@pytest.mark.parametrize("text", CORE_ALGOS)
def test_what_verl_imports_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    package = tmp_path / "verl" / "trainer" / "ppo"
    package.mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").touch()
    (package / "core_algos.py").write_text(text)
    probe = tmp_path / "probe.py"
    probe.write_text(
        environment_module._PROBE.read_text(encoding="utf-8").replace("LOAD_LIMIT_S = 90", "LOAD_LIMIT_S = 1")
    )
    monkeypatch.setattr("trials.environment._PROBE", probe)
    environment = {**child_environment(os.environ, None, "test"), "PYTHONPATH": str(tmp_path)}
    found = read_training_environment(environment, Path("/"), TrainingRequest(imports_verl=True))
    assert found.faults == ({"core_algos": CORE_ALGOS[text]} if CORE_ALGOS[text] else {})
    assert found.versions["ray"]


def test_the_workspaces_conda_folder_is_the_default(tmp_path: Path) -> None:
    assert default_prefix(tmp_path) is None
    python = tmp_path / "conda" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    config = load_config(None, [f"workspace={tmp_path}"])
    with pytest.raises(ConfigError, match=r"conda has no bin/python3; restore it, or set training_env to"):
        config.training_prefix()  # not executable: never the next Python on PATH
    python.chmod(0o755)
    assert default_prefix(tmp_path) == tmp_path / "conda" and find_python(tmp_path / "conda") == python


# ---- what reaches it --------------------------------------------------------------------------------------------------


def test_nothing_of_the_agents_environment_leaks_in(tmp_path: Path) -> None:
    own = {
        "VIRTUAL_ENV": "/agent", "VIRTUAL_ENV_PROMPT": "agent", "PYTHONPATH": "/agent", "PYTHONHOME": "/agent",
        "CONDA_PREFIX": "/agent", "CONDA_SHLVL": "1", "CONDA_DEFAULT_ENV": "agent", "_CE_M": "", "RAY_ADDRESS": "a:1",
        "RAY_JOB_ID": "1", "VERL_OVERLAY": "{}", "VERL_OVERLAY_FOLDER": "/x", "PYTHONUSERBASE": "/agent",
    }  # fmt: skip
    inherited = {**own, "HOME": "/h", "CUDA_VISIBLE_DEVICES": "1", "PATH": f"{sys.prefix}/bin:/usr/bin:/bin:/usr/bin"}
    child = child_environment(inherited, str(tmp_path), "run")
    assert not own.keys() & child.keys()
    assert child["PATH"] == f"{tmp_path}/bin:/usr/bin:/bin" and child["CUDA_VISIBLE_DEVICES"] == "1"
    assert child_environment(inherited, None, "run")["PATH"] == f"{sys.prefix}/bin:/usr/bin:/bin"


def test_it_is_as_if_the_training_environment_were_activated(tmp_path: Path) -> None:
    (tmp_path / "conda" / "conda-meta").mkdir(parents=True)
    child = child_environment({}, str(tmp_path / "conda"), "run")
    assert child["CONDA_PREFIX"] == str(tmp_path / "conda") and "VIRTUAL_ENV" not in child
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    child = child_environment({"CONDA_PREFIX": "/agent"}, str(tmp_path / "venv"), "run")
    assert child["VIRTUAL_ENV"] == str(tmp_path / "venv") and "CONDA_PREFIX" not in child


# ---- the effective configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_composes_without_a_gpu(version: str) -> None:
    folder = "/r/train_lr=1e-6,kl=0.01/a'b ${x}"
    asked = {"trainer.test_freq": 7, "trainer.default_local_dir": folder}
    overrides = [f"{key}={quote_value(value)}" for key, value in asked.items()]  # type: ignore[arg-type]
    found = ask(wheel_tree(version), *overrides, "algorithm.adv_estimator=grpo", "trainer.tset_freq=1")
    assert found.versions["verl"] == version
    effective = found.configuration
    assert effective is not None and effective.error is None and effective.unknown == ("trainer.tset_freq",)
    assert effective.values["trainer.default_local_dir"] == folder and effective.values["trainer.test_freq"] == 7
    (problem,) = configuration_problems(effective, asked, [])
    assert problem.startswith("trainer.tset_freq is not a setting of this verl; did you mean trainer.test_freq")
    default = {"0.3.0.post1": 0.001}.get(version, 0)
    assert effective.values["actor_rollout_ref.actor.entropy_coeff"] == default
    noted = relied_on(effective, {"algorithm.adv_estimator": "grpo"})
    assert noted["actor_rollout_ref.actor.entropy_coeff"] == f"{default} (verl's default)"


@pytest.fixture(scope="module")
def newest() -> Path:
    return wheel_tree("0.9.1")


def test_a_wrong_parent_is_found_with_the_right_one(newest: Path) -> None:
    effective = ask(newest, "actor.optim.lr=1e-6").configuration
    assert effective is not None and effective.unknown == ("actor.optim.lr",)
    (problem,) = configuration_problems(effective, {"actor.optim.lr": 1e-6}, [])
    assert "actor.optim.lr is not a setting of this verl; did you mean actor_rollout_ref.actor.optim.lr" in problem


def test_an_added_setting_that_verl_does_not_read_is_found(newest: Path) -> None:
    added = [
        "actor.optim.lr",
        "actor_rollout_ref.model.override_config.attn_implementation",
        "ray_kwargs.ray_init.num_gpus",
    ]
    effective = ask(newest, *(f"+{key}=1" for key in added)).configuration
    assert effective is not None and effective.unknown == ()
    assert configuration_problems(effective, {}, added) == [
        "+actor.optim.lr adds a setting that verl does not read; the one it reads is actor_rollout_ref.actor.optim.lr"
    ]


def test_a_value_that_does_not_arrive_is_found(newest: Path) -> None:
    effective = ask(newest, "trainer.test_freq=7", "trainer.test_freq=9").configuration  # the later one wins
    assert effective is not None
    assert configuration_problems(effective, {"trainer.test_freq": 7}, []) == [
        "trainer.test_freq=7 was asked, but verl would run with 9"
    ]
    assert configuration_problems(effective, {"trainer.test_freq": 9, "trainer.no": 1}, []) == [
        "trainer.no=1 was asked, but verl's configuration has no such value"
    ]
    text = ask(newest, "data.train_files=None").configuration
    assert text is not None and text.values["data.train_files"] == "None"
    assert len(configuration_problems(text, {"data.train_files": None}, [])) == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.default_local_dir=/r/lr=1e-6", "mismatched input '='"),
        ("data.train_files=a.parquet,b.parquet", "quote the value"),
        ("~trainer.no_such_key", "trainer.no_such_key"),
    ],
)
def test_what_hydra_refuses_is_told_in_its_words(newest: Path, override: str, words: str) -> None:
    effective = ask(newest, override).configuration
    assert effective is not None
    (problem,) = configuration_problems(effective, {}, [])
    assert words in problem and "\n" not in problem


def test_groups_other_configurations_and_removed_keys_are_understood(newest: Path) -> None:
    overrides = ["actor@actor_rollout_ref.actor=megatron_actor", "~trainer.nnodes", "hydra.run.dir=/tmp/x"]
    effective = ask(newest, *overrides).configuration
    assert effective is not None and effective.error is None and effective.unknown == ()
    assert "trainer.nnodes" not in effective.values
    assert effective.values["actor_rollout_ref.actor.strategy"] == "megatron"
    named = ask(newest, "trainer.test_freq=7", flags={"--config-name": "ppo_megatron_trainer"}).configuration
    assert named is not None and named.values["actor_rollout_ref.actor.strategy"] == "megatron"


def test_the_subprocess_composes_as_hydra_does(newest: Path) -> None:
    overrides = ["trainer.test_freq=7", "actor_rollout_ref.rollout.n=5", "+data.new={a:1,b:[x,null]}"]
    effective = ask(newest, *overrides).configuration
    with initialize_config_dir(str(newest / "verl" / "trainer" / "config"), version_base=None):
        expected = compose("ppo_trainer", overrides)
    assert effective is not None and effective.values["data.new.b"] == ["x", None] and len(effective.values) > 500
    for key, value in effective.values.items():
        if value == "???":  # verl demands it from the script
            continue
        real = OmegaConf.select(expected, key)
        assert value == (OmegaConf.to_container(real) if OmegaConf.is_config(real) else real), key


def test_nearest_keys_put_the_same_name_elsewhere_first() -> None:
    known = ["a.optim.lr", "critic.optim.lr", "a.optim.lr_warmup", "data.shuffle"]
    assert nearest_keys("optim.lr", known)[0] == "a.optim.lr"
    assert nearest_keys("a.optim.lr_warmpu", known) == ["a.optim.lr_warmup"]
    assert nearest_keys("x.y", known) == []
