"""train.sh → trial script."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from trials.script import ScriptError, TrainScript, differing_overrides, quote_value

EMBEDDED = Path(__file__).parents[2] / "trials" / "embedded" / "train.sh"

SCRIPT = """#!/bin/bash
# python3 -m verl.trainer.main_ppo in a comment
ROOT=/r
STEPS="${STEPS:-64}"
python3 -m verl.trainer.main_ppo \\
  data.train_files="$ROOT/data/x y.parquet" \\
  trainer.test_freq=8 \\
  trainer.logger='["console"]' \\
  +trainer.extra=1 \\
  trainer.total_training_steps=$STEPS \\
  "$@" 2>&1 | tee log
echo done
"""


def run_with_echo(script: str, tmp_path: Path) -> list[str]:
    """The arguments that the training command of a script really gets, as bash sees them."""
    path = tmp_path / "t.sh"
    path.write_text(script.replace("exec python3 -m", "python3 -m").replace("python3 -m", "printf '%s\\0'"))
    output = subprocess.run(["bash", str(path)], capture_output=True, check=True, cwd=tmp_path).stdout.decode()
    return output.split("\0")[:-1]


def test_overrides_and_variables_are_read() -> None:
    script = TrainScript(SCRIPT)
    assert script.get("data.train_files") == "/r/data/x y.parquet"
    assert script.get_int("trainer.total_training_steps") == 64
    assert script.get_int("trainer.total_training_steps", {"STEPS": "9"}) == 9
    assert script.get("trainer.logger") == '["console"]'
    assert script.get("trainer.extra") == "1"
    assert script.get("trainer.save_freq") is None


def test_only_the_named_overrides_differ(tmp_path: Path) -> None:
    before = TrainScript(SCRIPT)
    after = before.render({"trainer.test_freq": 4, "trainer.default_local_dir": "/a b/lr=1e-6,k='x'"})
    assert differing_overrides(SCRIPT, after) == {
        "trainer.test_freq": ("8", "4"),
        "trainer.default_local_dir": (None, quote_value("/a b/lr=1e-6,k='x'")),
    }
    old, new = run_with_echo(SCRIPT, tmp_path), run_with_echo(after, tmp_path)
    assert new == [word.replace("test_freq=8", "test_freq=4") for word in old[: -0 or None]] + [
        "trainer.default_local_dir=" + quote_value("/a b/lr=1e-6,k='x'")
    ]


def test_rendering_nothing_changes_nothing() -> None:
    assert TrainScript(SCRIPT).render({}) == SCRIPT
    text = EMBEDDED.read_text()
    assert TrainScript(text).render({}) == text


def test_the_embedded_script_is_understood() -> None:
    script = TrainScript(EMBEDDED.read_text())
    assert script.get("data.val_files", {"ROOT": "/w"}) == "/w/data/datasets/math.8k/dev.parquet"
    assert script.get_int("trainer.total_training_steps")
    rendered = script.render({"trainer.test_freq": 99})
    assert list(differing_overrides(script.text, rendered)) == ["trainer.test_freq"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), max_size=20))
def test_any_text_survives_bash_and_hydra(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    script = TrainScript("python3 -m verl.trainer.main_ppo a=1\n").render({"key": value})
    argument = run_with_echo(script, tmp_path_factory.mktemp("s"))[-1]
    parsed = OverridesParser.create().parse_override(argument)
    seen = parsed.value()
    assert getattr(seen, "text", seen) == value


@pytest.mark.parametrize("value", [1, 0.5, 1e-6, True, None])
def test_typed_values_survive_hydra(value: object) -> None:
    parsed = OverridesParser.create().parse_override(f"key={quote_value(value)}")  # type: ignore[arg-type]
    assert parsed.value() == value and type(parsed.value()) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello\n", "no command runs"),
        ("python3 -m verl.trainer.main_ppo a=1\npython3 -m verl.trainer.main_ppo a=2\n", "in lines 1, 2"),
        ("python3 -m verl.trainer.main_ppo \\\n  a=1 \\\n  a=2\n", r"line 3: a is set again \(first in line 2\)"),
        ("python3 -m verl.trainer.main_ppo a='x\n", "line 1: a quote is opened"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        TrainScript(text)


def test_values_that_cannot_be_known_are_refused() -> None:
    script = TrainScript("python3 -m verl.trainer.main_ppo a=$NOWHERE b=$(date) c=x\n")
    with pytest.raises(ScriptError, match=r"line 1: a=\$NOWHERE uses \$NOWHERE"):
        script.get("a")
    with pytest.raises(ScriptError, match="runs a command"):
        script.get("b")
    with pytest.raises(ScriptError, match="c=x is not an integer"):
        script.get_int("c")


def test_other_differences_are_noticed() -> None:
    with pytest.raises(ScriptError, match="more than their overrides"):
        differing_overrides(SCRIPT, SCRIPT.replace("echo done", "echo else"))
