"""Errors a person meets: one line each, one exit code per class.

AgentError                 1
├── ConfigError            2   usage, configuration file, search space
├── PreflightError         3   the workspace cannot be used as it is
├── RunFolderError         4   a run folder, its ledger or a lock
├── StageError             5   a stage of the run failed
└── Interrupted          130   stopped by a person; the children are gone

A message says what happened, the value seen, where to look and what to do.
"""


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
