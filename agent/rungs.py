"""The steps at which trials are judged, and what a trial changes in train.sh for it. Pure, apart from reading train.sh."""

from collections.abc import Sequence
from pathlib import Path

from agent.config import AgentConfig
from agent.errors import PreflightError
from agent.workspace import Workspace
from trials.script import OverrideValue

_DELETES_NOTHING: dict[str, OverrideValue] = {
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.remove_previous_ckpt_in_save": False,
    "trainer.del_local_ckpt_after_load": False,
}
"""verl keeps the newest checkpoints, the agent the best: in a trial only the agent deletes."""


def plan_rungs(config: AgentConfig, workspace: Workspace) -> tuple[int, ...]:
    """The steps at which trials are judged.

    Raises:
        PreflightError: the configured steps do not fit the schedule of train.sh.
    """
    total = workspace.total_steps
    first = config.search.first_rung_steps or max(1, total // 8)
    last = config.search.last_rung_steps or max(first, total // 2 // first * first)
    if not first <= last <= total or last % first:
        raise PreflightError(
            f"search.first_rung_steps={first} and search.last_rung_steps={last} do not fit train.sh's {total} steps: the "
            "last must be a multiple of the first and at most the total"
        )
    steps, factor = [], config.search.reduction_factor
    step = first
    while step < last:
        steps.append(step)
        step *= factor
    return (*steps, last)


def trial_overrides(workspace: Workspace, rungs: Sequence[int], checkpoints: Path) -> dict[str, OverrideValue]:
    """What a short trial changes in train.sh: it is judged and saved at every rung, in a folder of its own."""
    overrides: dict[str, OverrideValue] = {
        "trainer.test_freq": rungs[0],
        "trainer.save_freq": rungs[0],
        "trainer.default_local_dir": str(checkpoints),
    }
    return overrides | {key: value for key, value in _DELETES_NOTHING.items() if key in workspace.script.overrides}
