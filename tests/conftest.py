"""Fixtures that several test files share."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from trials.environment import TrainingEnvironment, TrainingRequest, read_training_environment

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "contract"))
from scripted_workspace import build_scripted_workspace


@pytest.fixture(scope="module")
def verl_is_not_imported() -> Iterator[None]:
    """The training environment does not try to import verl, which takes seconds; tests of the doctor see that it does."""

    def ask(environment: Mapping[str, str], folder: Path, request: TrainingRequest) -> TrainingEnvironment:
        return read_training_environment(environment, folder, replace(request, imports_verl=False))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent.training.read_training_environment", ask)
        yield


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A scripted workspace."""
    return build_scripted_workspace(tmp_path / "workspace")
