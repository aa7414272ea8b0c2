"""Files that people name are looked at before they are opened: a pipe or a device would block or never end."""

import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "is a folder",
    stat.S_IFIFO: "is a named pipe",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}


class NotAFile(OSError):
    """What has the name of a file is something else."""

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def require_file(path: Path) -> Path:
    """The path itself, if it is a plain file or a link to one.

    Raises:
        OSError: it is something else (`NotAFile`), or it cannot be looked at.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise NotAFile(0, f"{_KINDS.get(kind, 'is no file')}, not a file", str(path))
    return path
