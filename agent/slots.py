"""Slots: how many trials run side by side, on how many GPUs each. Pure, apart from reading train.sh.

A trial asks for all the GPUs that train.sh asks (it is *exact*), or for fewer: then it is a *proxy*, cheaper, and its score
is not trusted for a promotion before the configuration has been measured again in an exact trial. What verl would refuse
or silently change at a number of GPUs is refused here, before a trial is spent.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.config import AgentConfig
from agent.errors import PreflightError
from agent.workspace import Workspace
from trials.batching import BATCH_DEFAULTS, BATCH_SETTINGS, MICRO_TOTALS, batch_problems

_DEVICES = re.compile(r"(?:^|[\s;&])(?:export\s+)?CUDA_VISIBLE_DEVICES=(?!\"?\$\{?CUDA_VISIBLE_DEVICES\b)", re.M)


class SlotsBusy(PreflightError):
    """The nodes are large enough, but others hold what a trial asks."""


@dataclass(frozen=True)
class Ask:
    """What one trial reserves on one node."""

    gpus: int
    """0 where the CPU trains."""
    exact_gpus: int
    """What train.sh itself asks."""

    @property
    def is_proxy(self) -> bool:
        return self.gpus < self.exact_gpus

    @property
    def gpu_share(self) -> float:
        """Of train.sh's GPUs."""
        return self.gpus / self.exact_gpus if self.is_proxy else 1.0


ON_CPU = Ask(0, 0)


@dataclass(frozen=True)
class Node:
    """Resources of one living node of a Ray cluster."""

    name: str
    gpus: float
    gpus_free: float
    cpus: float
    cpus_free: float


@dataclass(frozen=True)
class Slots:
    """How many trials of one ask run side by side."""

    count: int
    cpus: int
    """What each of them reserves."""
    found: str
    """The numbers behind it."""


def plan_ask(settings: Mapping[str, int | None], gpus_per_trial: int | None, trains_on_cpu: bool) -> Ask:
    """What a trial reserves.

    Args:
        settings: trainer.nnodes and trainer.n_gpus_per_node of train.sh; None where it does not give one.
        gpus_per_trial: as configured; None is what train.sh asks.
        trains_on_cpu: train.sh says trainer.device=cpu.

    Raises:
        PreflightError: more than train.sh itself asks, several nodes for one trial, or GPUs where the CPU trains.
    """
    if trains_on_cpu:
        if gpus_per_trial is not None:
            raise PreflightError(
                f"search.gpus_per_trial={gpus_per_trial}, but train.sh says trainer.device=cpu: there are no GPUs to share; "
                "remove the key, search.concurrent says how many trials run side by side"
            )
        return ON_CPU
    nodes, exact = _given(settings, "trainer.nnodes"), _given(settings, "trainer.n_gpus_per_node")
    if nodes != 1:
        raise PreflightError(
            f"train.sh asks trainer.nnodes={nodes}; a trial runs on one node: use one that is large enough"
        )
    if gpus_per_trial is not None and gpus_per_trial > exact:
        raise PreflightError(
            f"search.gpus_per_trial={gpus_per_trial} is more than train.sh's trainer.n_gpus_per_node={exact}; choose at "
            "most that, or leave it out for exact trials"
        )
    return Ask(gpus_per_trial or exact, exact)


def proxy_overrides(settings: Mapping[str, str | None], ask: Ask) -> dict[str, int]:
    """What differs in a proxy's script: the number of GPUs, and micro-batches so that each GPU does the same work.

    Args:
        settings: the values of `BATCH_SETTINGS` in train.sh; None where it does not give one.
        ask: what a trial reserves.

    Raises:
        PreflightError: verl cannot train these batches on so many GPUs; every reason is named.
    """
    if not ask.is_proxy:
        return {}
    overrides = {"trainer.n_gpus_per_node": ask.gpus}
    for key in MICRO_TOTALS:
        total = settings.get(key)
        if total is not None and total.isdigit() and int(total) * ask.gpus % ask.exact_gpus == 0:
            overrides[key] = int(total) * ask.gpus // ask.exact_gpus
    given = {key: value for key, value in settings.items() if value is not None}
    problems = batch_problems({**BATCH_DEFAULTS, **given, **overrides})
    if problems:
        raise PreflightError(
            f"search.gpus_per_trial={ask.gpus} does not fit train.sh: {'; '.join(problems)}; choose another number of GPUs"
        )
    return overrides


def read_ask(config: AgentConfig, workspace: Workspace) -> Ask:
    """What a search trial reserves, as train.sh and the configuration say.

    Raises:
        PreflightError: as `plan_ask`, or a value of train.sh cannot be read.
    """
    if workspace.setting("trainer.device") == "cpu":
        return plan_ask({}, config.search.gpus_per_trial, trains_on_cpu=True)
    settings = {key: workspace.setting_int(key) for key in ("trainer.nnodes", "trainer.n_gpus_per_node")}
    return plan_ask(settings, config.search.gpus_per_trial, trains_on_cpu=False)


def read_proxy_overrides(workspace: Workspace, ask: Ask) -> dict[str, int]:
    """`proxy_overrides` of the workspace's train.sh.

    Raises:
        PreflightError: as `proxy_overrides`, or a value of train.sh cannot be read.
    """
    if not ask.is_proxy:
        return {}
    return proxy_overrides({key: workspace.setting(key) for key in BATCH_SETTINGS}, ask)


def require_open_devices(script: str) -> None:
    """Trials side by side need a script that takes its GPUs from CUDA_VISIBLE_DEVICES as it finds it.

    Raises:
        PreflightError: naming the line that sets it.
    """
    for number, line in enumerate(script.splitlines(), start=1):
        if not line.lstrip().startswith("#") and _DEVICES.search(line):
            raise PreflightError(
                f"train.sh line {number} sets CUDA_VISIBLE_DEVICES itself ({line.strip()[:80]}), so all trials would share "
                "the same GPUs; write ${CUDA_VISIBLE_DEVICES:-…} or remove the line"
            )


def count_slots(nodes: Sequence[Node], ask: Ask, at_most: int | None) -> Slots:
    """How many trials of this ask the nodes hold, now and at all.

    Args:
        nodes: the living nodes.
        ask: with at least one GPU.
        at_most: search.concurrent.

    Raises:
        PreflightError: no node is large enough; asked, total and free numbers are named.
        SlotsBusy: others hold the GPUs; likewise.
    """
    found = ", ".join(
        f"{node.name} has {node.gpus:g} GPUs ({node.gpus_free:g} free) and {node.cpus:g} CPUs ({node.cpus_free:g} free)"
        for node in nodes
    )
    asked = f"a trial asks {ask.gpus} GPUs on one node"
    large = [node for node in nodes if node.gpus >= ask.gpus and node.cpus >= 1]
    if not large:
        raise PreflightError(f"{asked}, but none is that large: {found or 'no living node'}; set search.gpus_per_trial")
    cpus = min((max(1, int(node.cpus_free // (node.gpus_free // ask.gpus))) for node in large if node.gpus_free >= ask.gpus),
               default=1)  # fmt: skip
    free = sum(int(min(node.gpus_free // ask.gpus, node.cpus_free // cpus)) for node in large)
    total = sum(int(node.gpus // ask.gpus) for node in large)
    if not free:
        raise SlotsBusy(f"{asked} and {cpus} CPUs, but others hold them: {found}; wait for them or stop them")
    count = free if at_most is None else min(free, at_most)
    return Slots(
        count, cpus, f"{asked} and {cpus} CPUs: {count} slots used, {free} free, {total} by GPUs in all; {found}"
    )


def _given(settings: Mapping[str, int | None], key: str) -> int:
    value = settings.get(key)
    return BATCH_DEFAULTS[key] if value is None else value
