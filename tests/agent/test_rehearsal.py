"""A rehearsal on the rebuilt 8-GPU task says everything and changes nothing."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent.config import AgentConfig, load_config
from agent.errors import PreflightError
from agent.ledger import Ledger
from agent.pipeline import Pipeline
from agent.rehearsal import rehearse
from agent.run_folder import RunFolder
from eight_gpus import build_eight_gpu_workspace
from trials.runner import build_environment

pytestmark = pytest.mark.usefixtures("verl_is_not_imported")

ROOT = Path(__file__).parents[2]


def snapshot(root: Path) -> dict[str, tuple[str, int]]:
    """Path → hash and modification time of every file, and of every folder its time."""
    found = {}
    for path in sorted(root.rglob("*")):
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path.relative_to(root))] = (content, path.stat().st_mtime_ns)
    return found


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_eight_gpu_workspace(tmp_path_factory.mktemp("eight") / "workspace")


def configure(workspace: Path, **options: str) -> AgentConfig:
    settings = {"workspace": str(workspace), "runs": str(workspace.parent / "runs"), "search.trials": "40"}
    return load_config(None, [f"{key}={value}" for key, value in {**settings, **options}.items()])


def rehearsal_of(config: AgentConfig, name: str = "run-1") -> str:
    said: list[str] = []
    rehearse(config, RunFolder(config.runs / name), said.append)
    return "\n".join(said)


@pytest.fixture(scope="module")
def text(workspace: Path) -> str:
    return rehearsal_of(configure(workspace, **{"search.concurrent": "1"}))


def section(text: str, title: str) -> str:
    start = text.index(f"\n{title}")
    end = re.compile(r"\n(?:\d\. |PROOF)").search(text, start + 5)
    return text[start : end.start() if end else len(text)]


def test_the_command_exits_0_and_changes_nothing(workspace: Path) -> None:
    before = snapshot(workspace.parent)
    command = [sys.executable, str(ROOT / "run_agent.py"), "run", "--workspace", str(workspace), "--rehearse"]
    done = subprocess.run(command, cwd=workspace.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"REHEARSAL of run-1 on {workspace}: nothing is started, nothing is written")
    assert re.search(r"PROOF  \d{3} files hashed before and after, none differs\n$", done.stdout)
    assert snapshot(workspace.parent) == before and not (workspace.parent / "runs").exists()


def test_it_names_what_the_training_environment_is_and_does(text: str, workspace: Path) -> None:
    assert re.search(rf"ok +verl in use +{workspace}/task/repositories/verl/verl/trainer/ppo/core_algos.py", text)
    assert re.search(r"ok +training environment .*: Python 3\.\d+\.\d+, verl 0\.3\.0\.post1, ray ", text)
    assert "entropy_coeff=0," in text and "temperature=1.0 (verl's default)" in text
    assert re.search(r"ok +verl's configuration +composed, \d{3} values; verl has every key that is set", text)
    assert re.search(r"ok +batch sizes +128 prompts a step on 1 × 8 ranks", text)
    assert re.search(r"ok +training schedule +240 steps\n +ok +checkpoint schedule +one every 20 steps", text)


def test_the_plan_adds_up(text: str) -> None:
    plan = text[text.index("PLAN of 48 h") : text.index("\n1. OVERLAY")]
    assert "ASSUMED, nothing was measured here yet: 300 s from launch to first step, 60.0 s per step" in plan
    assert "judged at steps 30, 60, 120" in plan
    # baseline 300 s + 120 × 60 s = 125 min; full run 1.15 × (300 s + 240 × 60 s) = 282 min; merge 10, two
    # inferences 20, validation 5 min as long as nothing was measured
    # training 24 h − 125 min − 282 min = 1033 min for the search: 8 of 40 trials of 125 min
    rows = re.findall(r"^ +(\d+:\d\d) – +(\d+:\d\d)  (.*)$", plan, re.M)
    assert [(start, end) for start, end, _ in rows] == [
        ("0:00", "2:05"),
        ("2:05", "2:40"),
        ("2:40", "19:53"),
        ("19:53", "24:35"),
        ("24:35", "25:10"),
    ]
    assert rows[2][2].startswith("search: 8 of 40 trials fit, 1 side by side, each 2.1 h at most")


def test_a_full_run_that_does_not_fit_is_said(workspace: Path) -> None:
    said = rehearsal_of(configure(workspace, **{"budget.training_hours": "4.0"}))
    assert "NO FULL RUN: 4.1 h do not fit; the leading trial goes on as far as time allows" in said


def test_times_that_an_earlier_run_measured_are_used(workspace: Path, tmp_path: Path) -> None:
    config = configure(workspace, runs=str(tmp_path / "runs"))
    (config.runs / "run-1").mkdir(parents=True)
    ledger = Ledger(config.runs / "run-1" / "ledger.jsonl")
    ledger.append("run_opened", workspace=str(workspace), fingerprint={}, schema=1)
    ledger.append("stage_done", stage="baseline", inputs="", start_up_s=120.0, step_s=30.5, initial_entropy=0.4)
    assert "MEASURED by run-1: 120 s from launch to first step, 30.5 s per step" in rehearsal_of(config, "run-2")


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
@pytest.mark.parametrize(
    ("title", "trial", "changed"),
    [
        ("2. BASELINE", "t000", {"trainer.test_freq=10": "30", "trainer.save_freq=20": "30"}),
        ("3. SEARCH", "t001", {"trainer.test_freq=10": "30", "trainer.save_freq=20": "30"}),
        ("4. FULL RUN", "full", {"trainer.test_freq=10": "20"}),
    ],
)
def test_the_plan_can_be_followed_line_by_line(
    text: str, workspace: Path, tmp_path: Path, title: str, trial: str, changed: dict[str, str]
) -> None:
    part = section(text, title)
    run = workspace.parent / "runs" / "run-1"
    script = workspace / "task" / "scripts" / f"train_run-1_{trial}.sh"
    assert f"  cd {run}/trials/{trial} && bash {script}\n" in part
    difference = part[part.index("--- ") :].split("\n\n")[0] + "\n"
    removed = re.findall(r"^-    (\S+) \\$", difference, re.M)
    assert removed == list(sorted(changed, key=difference.index))
    target = tmp_path / "train.sh"
    target.write_text((workspace / "task" / "scripts" / "train.sh").read_text())
    subprocess.run(["patch", "-s", str(target)], input=difference, text=True, check=True)
    pipeline = Pipeline(RunFolder(run), configure(workspace), lambda event: None)
    spec = pipeline.full_run_spec(1, {}, 0.0) if trial == "full" else pipeline.short_trial(trial, 1, "baseline", {})
    assert target.read_text() == spec.script
    if trial != "full":
        assert f"+    trainer.default_local_dir={run}" not in difference
        assert f"  trainer.default_local_dir={run}/trials/{trial}/checkpoints" in difference


def test_the_environment_is_given_by_its_changes(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_JOB_ID": "7", "PYTHONPATH": "/agent", "PYTHONHOME": "/agent",
             "CONDA_PREFIX": "/agent", "CONDA_DEFAULT_ENV": "agent", "VIRTUAL_ENV": "/agent"}  # fmt: skip
    for name, value in agent.items():
        monkeypatch.setenv(name, value)
    part = section(rehearsal_of(configure(workspace)), "2. BASELINE")
    said = dict(re.findall(r"^  set       (\w+)=(.*)$", part, re.M))
    gone = re.findall(r"^  unset     (\w+)$", part, re.M)
    assert said["RAY_ADDRESS"] == "local" and said["CONDA_PREFIX"] == str(workspace / "conda")
    assert said["PATH"].startswith(f"{workspace}/conda/bin:") and said["VERL_OVERLAY"] == "'{}'"
    assert set(gone) >= {"CONDA_DEFAULT_ENV", "PYTHONHOME", "PYTHONPATH", "RAY_JOB_ID", "VIRTUAL_ENV"}
    assert all(name.startswith(("CONDA_", "PYTHON", "RAY_", "VIRTUAL_ENV")) for name in gone)
    pipeline = Pipeline(RunFolder(workspace.parent / "runs" / "run-1"), configure(workspace), lambda event: None)
    child = build_environment(pipeline.short_trial("t000", 1, "baseline", {}), dict.fromkeys(agent, "x"))
    assert {name for name in agent if name in child} == {"RAY_ADDRESS", "CONDA_PREFIX"}


def test_merge_and_inference_are_given_as_they_will_run(text: str, workspace: Path) -> None:
    run = workspace.parent / "runs" / "run-1"
    merge = section(text, "5. MERGE")
    actor = f"{run}/trials/full/checkpoints/grpo/qwen2.5-1.5b/global_step_<best>/actor"
    verl = workspace / "task" / "repositories" / "verl"
    view = f"{run}/submission/full_step_<best>/model.shards"
    arguments = f"--backend fsdp --local_dir '{view}' --hf_model_path '{view}/huggingface'"
    command = f"python3 {verl}/scripts/model_merger.py {arguments}"
    assert f"5. MERGE of {actor} (links to its shards in {view};" in merge and f"  cd {verl} && {command}\n" in merge
    assert "--target_dir" not in merge and f"PYTHONPATH={verl}\n" in merge
    inference = section(text, "6. INFERENCE")
    assert f"bash {workspace}/task/scripts/inference.sh '{run}/submission/full_step_<best>/model'\n" in inference
    assert f"OUTPUT_DIR='{run}/submission/full_step_<best>/results'" in inference


def test_all_problems_are_printed_and_the_exit_code_is_that_of_the_workspace(workspace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "workspace"
    shutil.copytree(workspace, broken)
    script = broken / "task" / "scripts" / "train.sh"
    text = script.read_text().replace("trainer.critic_warmup=0", "actor.optim.lr=1e-6")
    script.write_text(text.replace("trainer.n_gpus_per_node=$GPUS", "trainer.n_gpus_per_node=7"))
    said: list[str] = []
    with pytest.raises(PreflightError) as raised:
        rehearse(configure(broken), RunFolder(tmp_path / "runs" / "run-1"), said.append)
    assert "actor.optim.lr is not a setting of this verl; did you mean actor_rollout_ref.actor.optim.lr" in str(
        raised.value
    )
    assert "1024 responses cannot be divided among 7 ranks" in str(raised.value)
    assert "PROBLEM verl's configuration" in "\n".join(said) and "2. BASELINE" in "\n".join(said)
    with pytest.raises(PreflightError, match="there is no workspace at"):
        rehearse(configure(tmp_path / "nowhere"), RunFolder(tmp_path / "runs" / "run-1"), said.append)
