"""Versions of packages in the training environment, read from its files without starting its Python."""

from importlib.metadata import distributions
from pathlib import Path

_FOLDERS = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")


def find_package_version(package: str, training_env: Path | None) -> str | None:
    """The version of an installed package; None when it is not found.

    Args:
        package: its distribution's name.
        training_env: prefix of a venv or conda environment; None is the agent's own environment.
    """
    if training_env is None:
        found = distributions(name=package)
    else:
        folders = [str(path) for pattern in _FOLDERS for path in training_env.glob(pattern)]
        found = distributions(name=package, path=folders)
    return next((distribution.version for distribution in found), None)
