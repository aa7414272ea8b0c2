"""Errors a person meets: one line each, one exit code per class.

AgentError                 1
├── ConfigError            2   usage, configuration file, search space
├── PreflightError         3   the workspace cannot be used as it is
├── RunFolderError         4   a run folder, its ledger or a lock
├── StageError             5   a stage of the run failed
└── Interrupted          130   stopped by a person; the children are gone

A message says what happened, the value seen, where to look and what to do.
"""

import errno
import re
import shutil


class AgentError(Exception):
    """Base of everything the command line turns into one line."""

    exit_code = 1


class ConfigError(AgentError):
    """Wrong usage, configuration file or search space."""

    exit_code = 2


class PreflightError(AgentError):
    """The workspace cannot be used as it is."""

    exit_code = 3


class RunFolderError(AgentError):
    """A run folder, its ledger or a lock is not usable."""

    exit_code = 4


class StageError(AgentError):
    """A stage of the run failed."""

    exit_code = 5


class Interrupted(AgentError):
    """A person stopped the run."""

    exit_code = 130


_ADVICE = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space, the quota is used up",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EROFS: "choose a place that is not mounted read-only",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EIO: "check the disk",
}


def describe_os_error(error: OSError, place: object) -> str:
    """What the system refused, where, and what to do; `place` is said where the error itself names no file."""
    where, reason, number = error.filename, error.strerror or str(error), error.errno
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # of a whole tree: the first file tells
        _, where, reason = error.args[0][0]
        match = re.match(r"\[Errno (\d+)\] ([^:]*)", str(reason))
        number, reason = (int(match[1]), match[2]) if match else (None, reason)
    return f"{where or place}: {reason}; {_ADVICE.get(number or 0, 'check that path')}"
