"""Keeps the volumes of a run from filling: deletes what the run can do without, and asks for an orderly stop in time."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.checks import format_bytes
from agent.disk import Deletion, Need, Shortage, find_shortages
from agent.errors import AgentError, StageError
from agent.machine import Volume, read_volume
from trials.checkpoints import folder_bytes, remove_folder

_LOOK_S = 1.0
_PLAN_AGAIN_S = 15.0
_NAMED = 3


class DiskGuard:
    """Room for what a run writes next. Deletions are told to `record` as decisions."""

    def __init__(
        self,
        folder: Path,
        watched: Sequence[Path],
        plan: Callable[[], list[Deletion]],
        record: Callable[..., object],
        stop: Callable[[], None],
        volume_of: Callable[[Path], Volume] = read_volume,
    ) -> None:
        """
        Args:
            folder: the run's folder.
            watched: folders on whose volumes a reserve must stay free at any time.
            plan: what may be deleted now, in this order.
            record: appends an event to the ledger.
            stop: asks for an orderly stop of whatever the run does.
            volume_of: the volume of a folder.
        """
        self._folder, self._watched, self._plan = folder, watched, plan
        self._record, self._stop, self._volume_of = record, stop, volume_of
        self._needs: list[Need] = []
        self._planned_s = -_PLAN_AGAIN_S
        self.lock = threading.RLock()
        """Whoever deletes checkpoints holds it."""
        self.problem: str | None = None
        """Why the guard asked for a stop."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look now, and then once a second in a thread of its own: the phases of a run wait in different ways."""
        self.look()
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_LOOK_S):
                self.look()

        thread = threading.Thread(target=watch, name="disk guard", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def look(self) -> None:
        """Make room for the needs of this phase; without even the reserve, ask for a stop."""
        if self.problem is not None:
            return
        try:
            if self.is_full() or time.monotonic() - self._planned_s > _PLAN_AGAIN_S:
                self._make_room(self._needs)
            full = find_shortages(self._reserves, self._volume_of)
            if full:
                self._give_up(f"stopped before a disk is full: {self._tell(full[0])}")
        except (AgentError, OSError) as error:
            self._give_up(str(error))

    def has_room(self) -> bool:
        """Whether the needs of this phase fit, after deletions if need be."""
        try:
            return not any(shortage.is_certain for shortage in self._make_room(self._needs))
        except (AgentError, OSError) as error:
            self._give_up(str(error))
            return False

    def is_full(self) -> bool:
        """Whether not even the reserve is free."""
        return bool(find_shortages(self._reserves, self._volume_of))

    def _give_up(self, problem: str) -> None:
        self.problem = self.problem or problem
        self._stop()

    def require(self, needs: Sequence[Need]) -> None:
        """Begin a phase with these needs.

        Raises:
            StageError: they do not fit, whatever may be deleted; the message tells what is free, needed and could go.
        """
        self._needs = list(needs)
        for shortage in self._make_room(self._needs):
            if shortage.is_certain:
                raise StageError(self._tell(shortage))

    def _make_room(self, needs: Sequence[Need]) -> list[Shortage]:
        """Delete in the planned order as long as a need does not fit and a deletion helps; returns what is left lacking."""
        with self.lock:
            everything = [*needs, *self._reserves]
            shortages = find_shortages(everything, self._volume_of)
            for deletion in self._plan() if shortages else ():
                short = {self._volume_of(shortage.folder).device: shortage for shortage in shortages}
                if shortage := short.get(self._volume_of(deletion.path).device):
                    self._delete(deletion, shortage)
                    shortages = find_shortages(everything, self._volume_of)
            self._planned_s = time.monotonic() if shortages else -_PLAN_AGAIN_S
            return shortages

    @property
    def _reserves(self) -> list[Need]:
        return [Need(folder, "", 0) for folder in self._watched]

    def _delete(self, deletion: Deletion, shortage: Shortage) -> None:
        size = folder_bytes(deletion.path)
        with suppress(FileNotFoundError):  # its own trainer was quicker
            remove_folder(deletion.path)
        self._record(
            "decision", what="emergency deletion", chosen=deletion.what, freed_bytes=size,
            reason=f"{format_bytes(size)} freed: {shortage}",
        )  # fmt: skip

    def _tell(self, shortage: Shortage) -> str:
        """One line: volume, free, needed, and what a person could delete."""
        device = self._volume_of(shortage.folder).device
        others = {*self._folder.parent.iterdir(), *self._folder.glob("submission/previous_*")} - {self._folder}
        on_volume = [path for path in others if path.is_dir() and self._volume_of(path).device == device]
        sizes = {path: folder_bytes(path) for path in on_volume}
        largest = sorted(sizes, key=lambda path: -sizes[path])[:_NAMED]
        named = ", ".join(f"{path} ({format_bytes(sizes[path])})" for path in largest)
        hint = f", e.g. {named}," if named else ""
        return f"{shortage}; the run itself can delete nothing more — free space{hint} then resume"
