"""The steps at which trials are judged. Pure, apart from what the workspace reads in train.sh."""

from agent.config import AgentConfig
from agent.errors import PreflightError
from agent.workspace import Workspace


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
