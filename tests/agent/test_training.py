"""Whether verl would run with what is asked: checked on the rebuilt 8-GPU task, before a trial is spent."""

import shutil
from pathlib import Path

import pytest

from agent.checks import CheckResult
from agent.config import load_config
from agent.errors import ConfigError, PreflightError
from agent.training import check_training
from agent.workspace import Workspace, forbidden_changes
from eight_gpus import build_eight_gpu_workspace
from trials.script import OverrideValue

pytestmark = pytest.mark.usefixtures("verl_is_not_imported")

ASKED: dict[str, OverrideValue] = {
    "trainer.test_freq": 30,
    "trainer.save_freq": 30,
    "trainer.default_local_dir": "/r/t=0",
}
VERL = 'export PYTHONPATH="$WORKSPACE/task/repositories/verl"'


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_eight_gpu_workspace(tmp_path_factory.mktemp("eight") / "workspace")


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A copy whose script may be edited; verl, data and model are shared."""
    for name in ("task/repositories", "data", "conda"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(template / name)
    shutil.copytree(template / "task" / "scripts", tmp_path / "task" / "scripts")
    return tmp_path


def edit(root: Path, *replacements: tuple[str, str]) -> Workspace:
    script = root / "task" / "scripts" / "train.sh"
    text = script.read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    script.write_bytes(text.encode())
    return Workspace(root)


def check(workspace: Workspace) -> dict[str, CheckResult]:
    prefix = str(workspace.root / "conda")
    return {result.name: result for result in check_training(workspace, prefix, ASKED).results}


def test_the_task_as_it_is_has_no_problem(root: Path) -> None:
    results = check(Workspace(root))
    assert [result for result in results.values() if result.problem] == []
    assert results["settings relied on"].found.startswith(
        "actor.entropy_coeff=0, actor.clip_ratio=0.2 (verl's default)"
    )


def test_a_coefficient_that_the_script_leaves_to_verl_is_shown(root: Path) -> None:
    workspace = edit(root, ("    actor_rollout_ref.actor.entropy_coeff=0 \\\n", ""))
    assert "actor.entropy_coeff=0.001 (verl's default)" in check(workspace)["settings relied on"].found


def test_all_wrong_settings_are_named_at_once(root: Path) -> None:
    workspace = edit(
        root,
        ("actor_rollout_ref.actor.optim.lr=", "actor.optim.lr="),
        ("trainer.critic_warmup=0", "trainer.critic_warmpu=0"),
        ("trainer.nnodes=1", "+trainer.total_epoch=1"),
    )
    problem = check(workspace)["verl's configuration"].problem
    assert problem is not None
    assert "actor.optim.lr is not a setting of this verl; did you mean actor_rollout_ref.actor.optim.lr" in problem
    assert "trainer.critic_warmpu is not a setting of this verl; did you mean trainer.critic_warmup" in problem


def test_what_hydra_refuses_is_not_called_composed(root: Path) -> None:
    result = check(edit(root, ("trainer.nnodes=1", "trainer.nnodes=[1")))["verl's configuration"]
    assert result.found == "refused by Hydra" and "cannot be composed: " in str(result.problem)


def test_impossible_batches_are_refused(root: Path) -> None:
    workspace = edit(root, ("ppo_mini_batch_size=64", "ppo_mini_batch_size=48"), ("GPUS=8", "GPUS=5"))
    problem = check(workspace)["batch sizes"].problem
    assert problem is not None and "cannot be divided among 5 ranks" in problem
    assert "train_batch_size 128 is no multiple of ppo_mini_batch_size 48" in problem


def test_another_verl_than_the_workspaces_is_noticed(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree((root / "task/repositories/verl/verl").resolve(), other / "verl")
    workspace = edit(root, (VERL, f"export PYTHONPATH={other}"))
    problem = check(workspace)["verl in use"].problem
    assert problem is not None and problem.startswith(
        f"train.sh imports verl from {other}/verl, not from the workspace's"
    )


def test_a_verl_in_the_folder_that_the_script_changes_to_is_the_one_in_use(root: Path) -> None:
    workspace = edit(root, (VERL, 'cd "$WORKSPACE/task/repositories/verl"'))
    assert check(workspace)["verl in use"].problem is None


def test_a_python_path_that_cannot_be_told_is_left_to_the_first_step(root: Path) -> None:
    workspace = edit(root, (VERL, "export PYTHONPATH=$(find-verl)"))
    result = check(workspace)["verl in use"]
    assert result.problem is None and result.found.startswith("not known before the first step: line")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("GPUS=8", "GPUS=8\nsource /opt/conda/bin/activate verl", "line 9: `source /opt/conda/bin/activate verl`"),
        ("GPUS=8", "GPUS=8\nexport PATH=/opt/verl/bin:$PATH", "line 9: `export PATH=/opt/verl/bin:$PATH`"),
        ("python3 -m", "/opt/verl/bin/python3 -m", "line 14: `/opt/verl/bin/python3`"),
        ("python3 -m", "uv run --no-sync python3 -m", "line 14: `uv`"),
    ],
)
def test_a_python_that_the_script_chooses_itself_is_not_judged_by_another(
    root: Path, old: str, new: str, words: str
) -> None:
    workspace = edit(root, (old, new), (VERL, "true"), ("trainer.nnodes=1", "trainer.nnode=1"))
    results = check(workspace)
    assert results["verl in use"].problem is None and words in results["verl in use"].found
    assert results["verl's configuration"].problem is None
    assert results["verl's configuration"].found.startswith("not composed: it is not certain which verl")


def test_values_that_only_running_the_script_tells_are_left_out(root: Path) -> None:
    workspace = edit(root, ("experiment_name='qwen2.5-1.5b'", "experiment_name=run_$(date +%s)"))
    result = check(workspace)["verl's configuration"]
    assert result.problem is None and result.found.startswith("composed without 1 values that only running the script")


def test_what_cannot_work_in_bash_is_refused(root: Path) -> None:
    workspace = edit(root, ("\n", "\r\n"))
    problem = check(workspace)["training command"].problem
    assert problem is not None and "lines end in CR LF" in problem
    workspace = edit(root, ("$DATA/math.8k/dev", "datasets/dev"))
    problem = check(workspace)["training command"].problem
    assert problem is not None and "data.val_files=datasets/dev.parquet is relative" in problem


def test_an_environment_without_hydra_or_python_is_told(root: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python3").write_text("#!/bin/sh\nexec /nowhere/python\n")
    (prefix / "bin" / "python3").chmod(0o755)
    results = check_training(Workspace(root), str(prefix), ASKED)
    assert results.environment is None
    assert ["cannot be asked" in str(result.problem) for result in results.results] == [False, True, False]


def test_a_relative_training_environment_is_found_from_anywhere(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prefix = load_config(None, ["training_env=conda", f"workspace={root}"]).training_prefix()
    assert prefix == str(tmp_path / "conda") == load_config(None, [f"workspace={root}"]).training_prefix()
    with pytest.raises(ConfigError, match=r"training_env .*/data has no bin/python3; name the folder of a venv"):
        load_config(None, ["training_env=data"]).training_prefix()


def test_checkpoints_land_where_the_script_changes_to(root: Path) -> None:
    cwd = Path("/runs/full")
    assert Workspace(root).full_run_checkpoints(cwd) == cwd / "checkpoints/grpo/qwen2.5-1.5b"
    moved = edit(root, ("GPUS=8", 'GPUS=8\ncd "$DATA"'))
    saved = root / "data/datasets/checkpoints/grpo/qwen2.5-1.5b"
    assert moved.full_run_checkpoints(cwd) == saved
    changed = ["data/datasets/checkpoints/grpo/qwen2.5-1.5b/global_step_1/x", "data/datasets/new"]
    assert forbidden_changes(moved, changed, []) == ["data/datasets/new"]
    hidden = edit(root, ('cd "$DATA"', 'if true; then cd "$DATA"; fi'))
    with pytest.raises(PreflightError, match="changed under a condition in line 9"):
        hidden.full_run_checkpoints(cwd)
