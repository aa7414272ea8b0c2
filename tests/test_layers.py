"""The layers of the architecture hold: who imports whom, and who may import the heavy packages."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agent", "search_spaces", "trials", "verl_overlay")
ALLOWED = {
    "search_spaces": set(),
    "trials": {"search_spaces"},
    "agent": {"search_spaces", "trials", "verl_overlay"},
    "verl_overlay": set(),
}
HEAVY = {
    "ray": {"agent/cluster.py", "agent/search.py", "trials/trainable.py"},
    "optuna": {"agent/search.py"},
    "torch": {
        "agent/tensors.py",
        "trials/probe.py",
        "trials/answering.py",
    },  # these two run in the training environment
    "verl": set(),
}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def test_packages_import_only_leftwards() -> None:
    for path in sources():
        package = path.relative_to(ROOT).parts[0]
        for name in imports(path):
            other = name.split(".")[0]
            if other in PACKAGES and other != package:
                assert other in ALLOWED[package], f"{path.relative_to(ROOT)} imports {name}"
                if package == "agent" and other == "verl_overlay":
                    assert name in ("verl_overlay", "verl_overlay.install"), f"{path} imports {name}"


def test_heavy_packages_stay_where_they_belong() -> None:
    for path in sources():
        relative = str(path.relative_to(ROOT))
        if relative.startswith(("verl_overlay/", "trials/embedded/", "trials/scaffold/")):
            continue  # inside the training environment
        for name in imports(path):
            package = name.split(".")[0]
            if package in HEAVY:
                assert relative in HEAVY[package], f"{relative} imports {name}"


def depends_on_locale(call: ast.Call) -> bool:
    """Whether a call reads or writes text in whatever encoding the locale names."""
    name = ast.unparse(call.func)
    keywords = {keyword.arg for keyword in call.keywords}
    if "encoding" in keywords or name.startswith(("os.open", "safe_open", "self._zip")):
        return False
    if name.endswith((".read_text", ".write_text")):
        return len(call.args) < 2 if name.endswith("write_text") else not call.args
    if name in ("open", "os.fdopen") or name.endswith(".open"):
        modes = [
            word.value for word in (*call.args, *(k.value for k in call.keywords)) if isinstance(word, ast.Constant)
        ]
        return not any("b" in str(mode) for mode in modes)
    return bool(keywords & {"text", "universal_newlines"})


def test_text_is_utf8_whatever_the_locale() -> None:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and depends_on_locale(node):
                raise AssertionError(f"{path.relative_to(ROOT)}:{node.lineno} names no encoding: {ast.unparse(node)}")


def test_no_catch_all_module_names() -> None:
    names = {path.name for path in sources()}
    assert not names & {"utils.py", "util.py", "helpers.py", "common.py", "base.py", "manager.py", "misc.py"}


@pytest.mark.parametrize(
    "statement", ["import agent.cli; agent.cli._parser()", "import verl_overlay.install", "import agent.config"]
)
def test_light_modules_do_not_load_heavy_packages(statement: str) -> None:
    program = (
        f"{statement}; import sys; print([m for m in ('torch', 'ray', 'optuna', 'verl', 'pandas') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert output.strip() == "[]"
