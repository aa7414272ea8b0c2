"""Disk space: what a run still writes, what must stay free for it, and what may be deleted to make room. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agent.checks import format_bytes
from agent.ledger import TrialState
from agent.machine import Volume
from agent.promotion import losing_steps
from trials.checkpoints import Checkpoint

GIB = 2**30
_CHECKPOINT_BYTES = 12
"""Per parameter: weights and two optimizer moments in single precision."""
_MERGED_BYTES = 4
_LOGIT_BYTES = 4
_RESERVE_BYTES = GIB // 4


class Need(NamedTuple):
    """Something that will be written."""

    folder: Path
    what: str
    size: int | None
    """Bytes; None when unknown."""
    is_ceiling: bool = False
    """It may turn out to be much less."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of the single things that a run writes; None is unknown."""

    checkpoint: int | None = None
    """One checkpoint of a training, optimizer included."""
    model: int | None = None
    """The merged policy."""
    logits: int | None = None
    """Of all test answers, as the run measured them."""
    longest_logits: int | None = None
    """The same if every answer were as long as allowed."""


def estimate_sizes(
    parameters: int | None, test_rows: int | None, response_tokens: int | None, vocabulary: int | None
) -> Sizes:
    """What can be said before anything has been measured."""
    return Sizes(
        checkpoint=product(parameters, _CHECKPOINT_BYTES),
        model=product(parameters, _MERGED_BYTES),
        longest_logits=product(test_rows, response_tokens, vocabulary, _LOGIT_BYTES),
    )


def product(*factors: int | None) -> int | None:
    """None as soon as one factor is unknown."""
    result = 1
    for factor in factors:
        if factor is None:
            return None
        result *= factor
    return result


def reserve_bytes(volume: Volume) -> int:
    """What stays free in any case, for ledger, logs and other programs: a hundredth, at most a quarter of a GiB."""
    return min(_RESERVE_BYTES, volume.total_bytes // 100)


def group_by_volume(needs: Iterable[Need], volume_of: Callable[[Path], Volume]) -> list[tuple[Volume, list[Need]]]:
    """The needs of each volume, in the order in which the volumes are met first."""
    groups: dict[int, tuple[Volume, list[Need]]] = {}
    for need in needs:
        volume = volume_of(need.folder)
        groups.setdefault(volume.device, (volume, []))[1].append(need)
    return list(groups.values())


def add_up(volume: Volume, needs: Iterable[Need]) -> tuple[int, int]:
    """Bytes that a volume must have free for sure, and at most; the reserve included, unknown sizes not."""
    reserve, needs = reserve_bytes(volume), list(needs)
    most = reserve + sum(need.size or 0 for need in needs)
    return most - sum(need.size or 0 for need in needs if need.is_ceiling), most


class Shortage(NamedTuple):
    """A volume with less free than needed."""

    folder: Path
    free_bytes: int
    needed_bytes: int
    """The reserve included."""
    what: str
    is_certain: bool
    """False: only if the ceilings were reached."""

    def __str__(self) -> str:
        free, needed = format_bytes(self.free_bytes), format_bytes(self.needed_bytes)
        return f"the volume of {self.folder} has {free} free, {needed} are needed for {self.what}"


def find_shortages(needs: Iterable[Need], volume_of: Callable[[Path], Volume]) -> list[Shortage]:
    """The volumes on which the needs do not fit beside the reserve."""
    shortages = []
    for volume, items in group_by_volume(needs, volume_of):
        certain, most = add_up(volume, items)
        if volume.free_bytes < most:
            parts = [f"{need.what} ({format_bytes(need.size)})" for need in items if need.size]
            parts.append(f"a reserve of {format_bytes(reserve_bytes(volume))}")
            is_certain = volume.free_bytes < certain
            shortages.append(Shortage(items[0].folder, volume.free_bytes, most, " + ".join(parts), is_certain))
    return shortages


# ---- what may be deleted ----------------------------------------------------------------------------------------------


class Deletion(NamedTuple):
    """Something that a run can do without."""

    what: str
    path: Path


def plan_checkpoint_deletions(
    trials: Sequence[TrialState], checkpoints: Mapping[str, Sequence[Checkpoint]], chosen: Mapping[str, int]
) -> list[Deletion]:
    """Checkpoints that may go, those to go first in front.

    1. those of failed trials, the oldest first;
    2. those of trials that ended without leading, the worst first;
    3. those of a leader beside its chosen one, and those of a running training that can no longer be chosen.

    What is chosen stays, and of a running training the newest complete checkpoint and all that is unfinished.

    Args:
        trials: all of the run.
        checkpoints: trial → what lies in its folder.
        chosen: trial → step of what may become the submission.
    """
    others = [trial for trial in trials if trial.outcome is not None and trial.trial not in chosen]
    failed = sorted((trial for trial in others if trial.outcome == "failed"), key=lambda trial: trial.started_s)
    worse = sorted((trial for trial in others if trial.outcome != "failed"), key=_rank)
    plan = [
        Deletion(f"{kind} {trial.trial}'s checkpoint of step {checkpoint.step}", checkpoint.path)
        for kind, group in (("failed", failed), ("loser", worse))
        for trial in group
        for checkpoint in checkpoints.get(trial.trial, ())
    ]
    for trial in trials:
        if trial not in others:
            own = {checkpoint.step: checkpoint for checkpoint in checkpoints.get(trial.trial, ())}
            steps = _steps_to_spare(trial, own, chosen.get(trial.trial))
            plan += [Deletion(f"{trial.trial}'s unneeded checkpoint of step {s}", own[s].path) for s in steps]
    return plan


def _rank(trial: TrialState) -> tuple[int, float]:
    return (trial.last.step, trial.last.objective) if trial.last else (0, 0.0)


def _steps_to_spare(trial: TrialState, own: Mapping[int, Checkpoint], chosen: int | None) -> list[int]:
    complete = [step for step, checkpoint in own.items() if checkpoint.problem is None]
    steps = losing_steps(trial.scores, complete)
    unfinished = [step for step in own if step not in complete]
    if trial.outcome is None:
        idle = [] if trial.open_since_s is not None else unfinished
        return [*idle, *(step for step in steps if step not in (chosen, max(complete)))]
    return [*unfinished, *(step for step in steps if step != chosen)]


def plan_submission_deletions(folder: Path, needed: Collection[Path]) -> list[Deletion]:
    """What superseded submissions of a run may lose, after the checkpoints: their models, then their results.

    Args:
        folder: the run's folder of submissions. What a person had in data/outputs/ before (`previous_<n>`) stays.
        needed: folders of submissions that are published, chosen or in work.
    """
    superseded = [path for path in sorted(folder.glob("*_step_*")) if path not in needed]
    plan = [Deletion(f"the merged model of superseded {path.name}", path / "model") for path in superseded]
    plan += [Deletion(f"the results of superseded {path.name}", path / "results") for path in superseded]
    return [deletion for deletion in plan if deletion.path.exists()]
