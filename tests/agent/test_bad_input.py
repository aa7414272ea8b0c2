"""Bad input: one clear line, a non-zero exit code, and nothing changed on disk."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from agent.config import load_config
from agent.errors import ConfigError
from agent.workspace import Workspace, read_manifest
from scripted_workspace import build_scripted_workspace, make_rows

ROOT = Path(__file__).parents[2]
DATA = "data/datasets/math.8k"


def run_agent(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "run_agent.py"), *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def assert_refused(result: subprocess.CompletedProcess[str], exit_code: int, *words: str) -> None:
    assert result.returncode == exit_code, result.stdout + result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0]


def mixed_answers(workspace: Path) -> None:
    rows = make_rows(6, ("a - b", "c"), "dev")
    rows["reward_model"] = [{"style": "rule", "ground_truth": index} for index in range(6)]
    rows.to_parquet(workspace / DATA / "dev.parquet", index=False)


def null_prompt(workspace: Path) -> None:
    rows = make_rows(6, ("a - b", "c"), "dev")
    rows.loc[3, "prompt"] = None
    rows.to_parquet(workspace / DATA / "dev.parquet", index=False)


def without_reward(workspace: Path) -> None:
    make_rows(6, ("a",), "train").drop(columns="reward_model").to_parquet(workspace / DATA / "train.parquet")


def repeated_ids(workspace: Path) -> None:
    path = workspace / DATA / "test.parquet"
    table = pd.read_parquet(path)
    table["sample_id"] = 5
    table.to_parquet(path, index=False)


def edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(workspace: Path) -> None:
        file = workspace / path
        file.write_text(file.read_text().replace(old, new))

    return change


CORE = "task/repositories/verl/verl/trainer/ppo/core_algos.py"
DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no train.sh": (lambda w: (w / "task/scripts/train.sh").unlink(), ("train.sh does not exist",)),
    "no inference.sh": (lambda w: (w / "task/scripts/inference.sh").unlink(), ("inference.sh does not exist",)),
    "no merger": (
        lambda w: (w / "task/repositories/verl/scripts/model_merger.py").unlink(),
        ("has neither scripts/model_merger.py nor verl/model_merger/",),
    ),
    "no dev data": (lambda w: (w / DATA / "dev.parquet").unlink(), ("dev.parquet does not exist",)),
    "no base model": (
        lambda w: (w / "data/checkpoints/base/config.json").unlink(),
        ("base/config.json does not exist",),
    ),
    "broken parquet": (
        lambda w: (w / DATA / "dev.parquet").write_bytes(b"PAR1 nonsense"),
        ("dev.parquet is not a readable",),
    ),
    "empty parquet": (lambda w: (w / DATA / "train.parquet").write_bytes(b""), ("train.parquet is not a readable",)),
    "mixed answers": (mixed_answers, ("dev.parquet", "ground_truth holds numbers, the training file text")),
    "null prompt": (null_prompt, ("dev.parquet row 3", "prompt")),
    "no reward column": (without_reward, ("train.parquet", "['reward_model'] are missing")),
    "repeated ids": (repeated_ids, ("test.parquet", "sample_id must hold unique integers")),
    "a folder in the way": (
        lambda w: (w / "data/outputs/math_results.parquet").mkdir(),
        ("math_results.parquet is a folder",),
    ),
    "no vocabulary": (lambda w: (w / "data/checkpoints/base/config.json").write_text("{}"), ("names no vocab_size",)),
    "outputs not writable": (lambda w: (w / "data/outputs").chmod(0o555), ("data/outputs is not writable",)),
    "core_algos not writable": (lambda w: (w / CORE).chmod(0o444), ("core_algos.py is not writable",)),
    "core_algos edited": (edit(CORE, "def agg_loss(", "def other_loss("), ("agg_loss",)),
    "two commands": (
        edit("task/scripts/train.sh", "exec python3", "python3 -m verl.trainer.main_ppo a=1\nexec python3"),
        ("several verl commands",),
    ),
    "not grpo": (edit("task/scripts/train.sh", "estimator=grpo", "estimator=gae"), ("adv_estimator=gae",)),
    "never saves": (edit("task/scripts/train.sh", "save_freq=4", "save_freq=-1"), ("save_freq=-1 never saves",)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_workspace_is_refused(workspace: Path, name: str) -> None:
    damage, words = DAMAGE[name]
    damage(workspace)
    before = read_manifest(Workspace(workspace))
    assert_refused(run_agent(workspace.parent), 3, *words)
    (workspace / "data/outputs").chmod(0o755)
    assert read_manifest(Workspace(workspace)) == before
    assert os.listdir(workspace.parent) == ["workspace"]


def test_all_defects_are_named_at_once(workspace: Path) -> None:
    for name in ("no inference.sh", "broken parquet", "no merger"):
        DAMAGE[name][0](workspace)
    assert_refused(run_agent(workspace.parent), 3, "inference.sh", "dev.parquet", "model_merger.py")


CONFIGS = [
    ("searhc: {trials: 3}", "searhc: unknown key"),
    ("search: {trails: 3}", "search.trails: unknown key"),
    ("search: {trials: 1e-6}", "search.trials"),
    ("search: {trials: 0}", "search.trials"),
    ("search: {trials: '8'}", "search.trials"),
    ("budget: {total_hours: 48:00:00}", "'48:00:00' is a clock time"),
    ("budget: {total_hours: no}", "budget.total_hours"),
    ("budget: {total_hours: true}", "budget.total_hours"),
    ("seed: 4294967296", "seed"),
    ("training_env: nowhere", "has no bin/python3"),
    ("objective: {collapsed: 0.9}", "does not hold"),
    ("search: {trials: 3}\nsearch: {trials: 4}", "line 2: the key 'search' appears twice"),
    ("search: {space: nowhere.yaml}", "nowhere.yaml"),
    ("search: [", "not valid YAML"),
    ("search: " + "[" * 5000 + "]" * 5000, "is nested too deeply"),
    ("# " + "x" * 2**20, "more than a configuration's 1048576"),
    ("search: {last_rung_steps: 7, first_rung_steps: 2}", "must be a multiple"),
    ("budget: {total_hours: 0.1}", "leaves nothing to train: 35 min are kept"),
]


@pytest.mark.parametrize(("text", "message"), CONFIGS)
def test_a_wrong_configuration_is_refused(workspace: Path, text: str, message: str) -> None:
    (workspace.parent / "agent.yaml").write_text(text)
    before = read_manifest(Workspace(workspace))
    result = run_agent(workspace.parent, "--config", "agent.yaml")
    assert_refused(result, 3 if "multiple" in message or "35 min" in message else 2, message)
    assert read_manifest(Workspace(workspace)) == before and sorted(os.listdir(workspace.parent)) == [
        "agent.yaml",
        "workspace",
    ]


def test_scientific_notation_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text("objective: {collapsed: 1e-6}\nbudget: {total_hours: 4.8e1}\n")
    config = load_config(tmp_path / "agent.yaml")
    assert config.objective.collapsed == 1e-6 and config.budget.total_hours == 48.0


def test_paths_are_relative_to_the_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text("workspace: task\nruns: out\n")
    config = load_config(tmp_path / "agent.yaml", ["search.trials=3"])
    assert config.workspace == tmp_path / "task" and config.runs == tmp_path / "out" and config.search.trials == 3
    with pytest.raises(ConfigError, match=r"write section\.key=value"):
        load_config(None, ["search.trials"])


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("--workspace", "nowhere"), 3, "there is no workspace at"),
        (("resume",), 4, "no run in"),
        (("resume", "nothing"), 4, "no run 'nothing'"),
        (("export", "nothing"), 4, "no run 'nothing'"),
        (("status",), 4, "no run in"),
        (("--name", "../x"), 2, "--name ../x"),
        (("--name", "x\n"), 2, "--name x"),
        (("--set", "search={a: 1, a: 2}"), 2, "the key 'a' appears twice"),
        (("--set", "workspace=~nosuchuser/x"), 2, "home directory"),
        (("--config", "/dev/zero"), 2, "/dev/zero: cannot be read (is a device, not a file)"),
        (("--set", "search.space=/dev/zero"), 2, "/dev/zero: cannot be read (is a device, not a file)"),
        (("--config", "/proc/self"), 2, "cannot be read (is a folder, not a file)"),
    ],
)
def test_wrong_usage_is_refused(tmp_path: Path, arguments: tuple[str, ...], exit_code: int, message: str) -> None:
    assert_refused(run_agent(tmp_path, *arguments), exit_code, message)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("redirection", [">/dev/full", "> >(true)"])
def test_an_output_that_takes_nothing_is_one_line(workspace: Path, redirection: str) -> None:
    (workspace / DATA / "dev.parquet").unlink()
    line = f'exec "{sys.executable}" "{ROOT / "run_agent.py"}" doctor --workspace "{workspace}" {redirection}'
    result = subprocess.run(["bash", "-c", line], cwd=workspace.parent, capture_output=True, text=True)
    assert_refused(result, 1, "standard output cannot be written: ")


def test_an_ascii_locale_does_not_matter(tmp_path: Path) -> None:
    root = build_scripted_workspace(tmp_path / "tür")
    (root / CORE).write_text((root / CORE).read_text() + "# für alle\n", encoding="utf-8")
    command = [sys.executable, str(ROOT / "run_agent.py"), "doctor", "--workspace", str(root)]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", env=environment)
    assert result.returncode == 0 and f"{root}/data/checkpoints/base" in result.stdout, result.stderr


def test_a_path_that_is_no_text_is_refused(workspace: Path) -> None:
    odd = workspace.rename(Path(os.fsdecode(os.fsencode(workspace) + b"\xff")))
    assert_refused(run_agent(odd.parent, "--workspace", str(odd)), 2, "workspace\\udcff is not UTF-8")
