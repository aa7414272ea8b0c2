"""Files beside the training, in the folder that the environment variable ``VERL_OVERLAY_FOLDER`` names.

``entropy.json``
    The exact mean entropy of the behaviour policy. verl's trainer computes the entropy of every response token
    together with the old log-probabilities and aggregates it for its own metric, in one process; the policy
    loss runs in others. This file carries the mean from the one to the others, once per rollout batch.
``overlay.jsonl``
    One JSON object per line: ``control`` (state of the controllers, once per rollout batch), ``advantage``
    (once per call) and, where verl's loss returns no metrics, ``loss`` (once per call). Written by rank 0.

Without the variable nothing is written, and the policy loss falls back to its own estimate of the entropy.
Writing never stops a training: a full disk costs the records, not the run.

Standard library only: the source of this module becomes part of the block in verl's ``core_algos.py``.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "VERL_OVERLAY_FOLDER"
RESUMED_STEP_VARIABLE = "VERL_OVERLAY_RESUMED_STEP"
RECORDS_NAME = "overlay.jsonl"


@dataclass
class SideFiles:
    """The side files of one training process; without a folder every method does nothing."""

    folder: Path | None = None
    resumed_step: int = 0
    """Training steps before this process began, when it goes on from a checkpoint."""
    started: float = field(default_factory=time.time)
    _published: int = 0
    _last_seen: float = 0.0

    def publish_entropy(self, entropy: float) -> None:
        """Make the mean entropy (nats) of the current rollout batch known to the other processes."""
        if self.folder is None:
            return
        self._published += 1
        text = json.dumps({"entropy": entropy, "batch": self._published, "time": time.time()})
        temporary = self.folder / f"entropy.{os.getpid()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.folder / "entropy.json")
        except OSError:
            return

    def new_entropy(self) -> float | None:
        """The mean entropy (nats) that was published since the last look, None when there is no newer one."""
        if self.folder is None:
            return None
        try:
            found = json.loads((self.folder / "entropy.json").read_text(encoding="utf-8"))
            entropy, written = float(found["entropy"]), float(found["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if written < self.started or written == self._last_seen:
            return None
        self._last_seen = written
        return entropy

    def append(self, kind: str, **values: Any) -> None:
        """Append one record to ``overlay.jsonl``, when this is rank 0."""
        if self.folder is None or os.environ.get("RANK", "0") != "0":
            return
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **values}) + "\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / RECORDS_NAME, "a", encoding="utf-8") as stream:
                stream.write(line)
        except OSError:
            return

    def last_control(self, configuration_id: int) -> dict[str, Any] | None:
        """The latest ``control`` record of this configuration up to the step that the training resumes from."""
        found: dict[str, Any] | None = None
        for record in read_records(self.folder) if self.folder is not None and self.resumed_step else []:
            if record.get("kind") == "control" and record.get("configuration_id") == configuration_id:
                if record.get("step", 0) <= self.resumed_step:
                    found = record
        return found


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All records of a folder's ``overlay.jsonl``; lines that were torn by a kill are left out."""
    try:
        lines = (folder / RECORDS_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def side_files_of_environment() -> SideFiles:
    """The side files that the environment variables name."""
    folder = os.environ.get(FOLDER_VARIABLE, "").strip()
    step = os.environ.get(RESUMED_STEP_VARIABLE, "").strip()
    return SideFiles(Path(folder) if folder else None, int(step) if step.isdigit() else 0)
