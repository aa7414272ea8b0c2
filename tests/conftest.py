"""Fixtures that several test files share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "contract"))
from scripted_workspace import build_scripted_workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A scripted workspace."""
    return build_scripted_workspace(tmp_path / "workspace")
