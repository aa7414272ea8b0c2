"""Whole runs of the agent on trainers that print, save and resume as a verl version does, up to the published submission."""

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agent.ledger import Ledger, fold
from scripted_workspace import agent_environment, build_scripted_workspace, install_trainer

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def run_agent(folder: Path, *settings: str, **behaviour: object) -> subprocess.CompletedProcess[str]:
    flags = [word for setting in ("search.trials=1", "search.concurrent=1", *settings) for word in ("--set", setting)]
    return subprocess.run(
        [sys.executable, str(ROOT / "run_agent.py"), *flags], cwd=folder, env=agent_environment(**behaviour),
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip


CASES: dict[str, tuple[dict[str, object], list[str | None], list[int]]] = {
    # version: behaviour of the full run, failures of its attempts, checkpoints that it leaves
    "0.3.0.post1": ({"cut_save_at": 8}, ["killed", None], [4, 8, 12, 16]),
    "0.7.1": ({"die_at": 9, "steps_per_epoch": 8, "total_epochs": 2}, ["killed", "no_progress", None], [4, 8, 12, 16]),
    "0.9.1": ({"hang_at": 14, "leave_children": True, "ignore_term": True}, ["stall", None], [16]),
}
SETTINGS = {"0.7.1": "data.train_batch_size=16", "0.9.1": "trainer.max_actor_ckpt_to_keep=2"}
"""Of train.sh; 0.9.1 has a limit for checkpoints, too."""
RESUMED: dict[str, list[tuple[str, str]]] = {
    "0.3.0.post1": [
        (
            "full from step 4",
            "step 8 cannot be used: newer than the tracker (4): the save did not finish; steps per epoch unknown; data.pt "
            "does not tell its place",
        )
    ],
    "0.7.1": [
        ("full from step 8", "epoch 2 after 0 of 8 batches; data.pt does not tell its place"),
        (
            "full from step 4",
            "the attempt that went on from step 8 made no step; epoch 1 after 4 of 8 batches; data.pt does not tell its "
            "place",
        ),
    ],
    "0.9.1": [("full from step 12", "steps per epoch unknown; data.pt does not tell its place")],
}
"""What the ledger tells of each resume; the data.pt of these trainers is not torch's."""


@pytest.mark.parametrize("version", CASES)
def test_a_full_run_that_fails_goes_on_and_is_submitted(tmp_path: Path, version: str) -> None:
    behaviour, failures, steps = CASES[version]
    install_trainer(build_scripted_workspace(tmp_path / "workspace"), version)
    settings = ["search.stall_timeout_s=2"]
    if version == "0.9.1":
        settings.append("budget.checkpoint_gb=1e-9")
    script = tmp_path / "workspace" / "task" / "scripts" / "train.sh"
    script.write_text(script.read_text().replace("save_freq=4", f"save_freq=4 {SETTINGS.get(version, '')}"))
    result = run_agent(tmp_path, *settings, first_only=True, full_only=True, step_s=0.05, **behaviour)
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "run-1"
    events = Ledger(run / "ledger.jsonl").read()
    ends = ("attempt_failed", "trial_ended")
    ended = [event for event in events if event["event"] in ends and event["trial"] == "full"]
    assert [event["failure"] for event in ended] == failures and ended[-1]["step"] == 16
    checkpoints = run / "trials" / "full" / "checkpoints" / "scripted" / "full"
    assert sorted(int(path.name.rpartition("_")[2]) for path in checkpoints.glob("global_step_*")) == steps
    assert not list(checkpoints.glob("aside_*"))
    state = fold(events)
    resumed = [decision for decision in state.decisions if decision["what"] == "resume"]
    assert [(decision["chosen"], decision["reason"]) for decision in resumed] == RESUMED[version]
    assert RESUMED[version][-1][1] in (run / "report.html").read_text()
    short = (run / "trials" / "t000" / "attempt_1" / "train.sh").read_text()
    assert ("trainer.max_actor_ckpt_to_keep=null" in short) is (version == "0.9.1")
    assert state.stages["select"]["step"] == 16 and [event["trial"] for event in state.published] == ["t000", "full"]
    assert pq.ParquetFile(tmp_path / "workspace" / "data" / "outputs" / "math_results.parquet").read().num_rows == 12
