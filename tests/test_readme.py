"""README and docs are true: files, links, verbs, configuration, version."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent.config import load_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_listing_names_every_source_file() -> None:
    readme = PAGES[0].read_text()
    listing = readme[readme.index("## The source") :]
    for package in ("agent", "trials", "verl_overlay"):
        for path in (ROOT / package).glob("*.py"):
            if not path.name.startswith("__") and path.name != "errors.py":
                assert path.name in listing, f"{package}/{path.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_dead_local_links_or_paths(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for target in re.findall(r"`((?:agent|trials|tests|verl_overlay|search_spaces)/[\w./-]+\.\w+)`", text):
        assert (ROOT / target).exists(), target


def test_every_command_of_the_readme_is_understood() -> None:
    verbs = set(re.findall(r"python run_agent\.py (\w+)", PAGES[0].read_text()))
    assert verbs == {"doctor", "init", "resume", "export", "status", "report"}
    for verb in ("run", *verbs):
        result = subprocess.run(
            [sys.executable, "run_agent.py", verb, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0 and "usage" in result.stdout


def test_the_configuration_of_the_readme_loads(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "agent.yaml").write_text(block[1])
    assert load_config(tmp_path / "agent.yaml").search.trials == 40


def test_version_and_changelog_agree() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    top = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version is not None and top is not None and version[1] == top[1]
