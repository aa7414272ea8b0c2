"""train.sh → trial script: what is read is what bash hands to the trainer, and only the named overrides change."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from trials.script import ScriptError, TrainScript, differing_overrides, parse_value, quote_value

EMBEDDED = Path(__file__).parents[2] / "trials" / "embedded" / "train.sh"
PUBLISHED = sorted((Path(__file__).parents[1] / "data" / "scripts").glob("*.sh"))

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

LAUNCHER = """#!/bin/bash
# Stands for python3, uv …: writes the trainer's arguments.
while [ $# -gt 0 ]; do
  case "$1" in verl.trainer.main*|*/verl/trainer/main_*.py) shift; printf '%s\\0' "$@" >"$ARGUMENTS"; exit 0 ;; esac
  shift
done
exit 1
"""

AWKWARD = st.lists(st.sampled_from(["'", '"', "\\", "${", "$", "}", "a", ",", "=", " "]), max_size=8).map("".join)
TEXT = AWKWARD | st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=20)


def run_in_bash(text: str, folder: Path, *arguments: str) -> tuple[list[str], str]:
    """The arguments that the trainer gets when bash runs a script, and the folder it is run in."""
    programs, scripts = folder / "bin", folder / "task" / "scripts"
    for path in (programs, scripts):
        path.mkdir(parents=True, exist_ok=True)
    for name in ("python", "python3", "uv", "torchrun"):
        (programs / name).write_text(LAUNCHER.replace("#!/bin/bash", '#!/bin/bash\npwd >"$ARGUMENTS.cwd"'))
        (programs / name).chmod(0o755)
    script = scripts / "train.sh"
    script.write_bytes(text.encode())
    environment = {**environment_of(folder), "ARGUMENTS": str(folder / "arguments")}
    (folder / "arguments").unlink(missing_ok=True)
    subprocess.run(["bash", str(script), *arguments], cwd=folder, env=environment, capture_output=True, timeout=30)
    output = (folder / "arguments").read_text() if (folder / "arguments").exists() else ""
    return output.split("\0")[:-1], (folder / "arguments.cwd").read_text().strip()


def environment_of(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": "/home/some one"}


def effective(argument: str) -> object:
    """The value that a program reads from its configuration after Hydra applied an override."""
    seen = OverridesParser.create().parse_override(argument).value()
    return OmegaConf.create({"key": getattr(seen, "text", seen)}).key


# ---- published scripts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PUBLISHED, EMBEDDED], ids=lambda path: path.stem)
def test_what_is_read_is_what_bash_hands_over(path: Path, tmp_path: Path) -> None:
    # A value that holds a blank and is not quoted is another test.
    text = path.read_text().replace("$HOME", "/home/x").replace("${HOME}", "/home/x").replace("_$(date +%s)", "")
    text = text.replace("MEMORY=0.9", "true").replace("_$NOW", "")
    script = TrainScript(text, tmp_path / "task" / "scripts")
    seen, folder = run_in_bash(text, tmp_path)
    assert len(seen) >= 8
    read, unknown = script.arguments(environment_of(tmp_path))
    assert unknown == [] and read == [word for word in seen if not word.startswith("--config")]
    assert (script.working_folder(environment_of(tmp_path)) or str(tmp_path)) == folder
    assert script.render({}) == text


@pytest.mark.parametrize("path", [*PUBLISHED, EMBEDDED], ids=lambda path: path.stem)
def test_only_the_named_overrides_of_a_published_script_differ(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    before, after = TrainScript(text), TrainScript(text).render({"trainer.test_freq": 99})
    assert differing_overrides(text, after) == {"trainer.test_freq": (before.overrides["trainer.test_freq"], "99")}
    old, new = text.split("\n"), after.split("\n")
    assert len(old) == len(new) and sum(a != b for a, b in zip(old, new, strict=True)) == 1
    added = "trainer.new=" + quote_value("/a b/lr=1e-6,k='x'")
    rendered = before.render({"trainer.test_freq": 99, "trainer.new": "/a b/lr=1e-6,k='x'"})
    (seen, _), (was, _) = run_in_bash(rendered, tmp_path, "a=1"), run_in_bash(text, tmp_path, "a=1")
    expected = [re.sub("test_freq=.*", "test_freq=99", word) for word in was]
    expected.insert(len(was) - (was[-1] == "a=1"), added)
    clock = re.compile(r"_\d{9,}$")
    assert [clock.sub("", word) for word in seen] == [clock.sub("", word) for word in expected]


def test_values_of_published_scripts() -> None:
    def read(version: str, key: str, **environment: str) -> str | None:
        path = next(path for path in PUBLISHED if path.stem == f"verl_{version}")
        return TrainScript(path.read_text(), Path("/w/task/scripts")).get(key, {"HOME": "/home/x", **environment})

    assert (
        read("0.3.0.post1", "data.val_files") == "['/home/x/data/gsm8k/dev.parquet', '/home/x/data/amc23/dev.parquet']"
    )
    assert read("0.3.0.post1", "trainer.logger") == "[console]"
    assert read("0.4.1", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu") == "2560"
    assert read("0.4.1", "trainer.default_local_dir", DATA_HOME="/d") == "/d/ckpts/GRPO/Qwen2.5-1.5B-math"
    assert read("0.5.0", "data.train_files") == "/w/task/data/train set.parquet"
    assert read("0.5.0", "trainer.total_training_steps") == "120"
    assert read("0.5.0", "trainer.total_training_steps", STEPS="7") == "7"
    assert read("0.5.0", "trainer.ray_wait_register_center_timeout") is None
    assert read("0.6.1", "actor_rollout_ref.rollout.multi_turn.tool_config_path") == "null"
    assert read("0.7.1", "trainer.total_training_steps") == "100"
    assert read("0.8.0", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", GPUS="4") == "16"
    assert read("0.8.0", "data.train_files", TRAIN_FILE="/t.parquet") == "/t.parquet"
    assert read("0.9.1", "actor_rollout_ref.model.path") == "Qwen/Qwen2.5-1.5B"
    with pytest.raises(
        ScriptError, match=r"line 26: actor_rollout_ref.rollout.gpu_memory.* under a condition in line 15"
    ):
        read("0.9.1", "actor_rollout_ref.rollout.gpu_memory_utilization")


def test_dev_files_may_be_a_list() -> None:
    script = TrainScript('python3 -m verl.trainer.main_ppo a="[\'/a, b.p\', \\"/c.p\\", /d.p]" b=/x c=[]\n')
    assert script.get_list("a") == ["/a, b.p", "/c.p", "/d.p"]
    assert script.get_list("b") == ["/x"] and script.get_list("c") == [] and script.get_list("d") is None


# ---- values -----------------------------------------------------------------------------------------------------------


def test_overrides_and_variables_are_read() -> None:
    script = TrainScript(SCRIPT)
    assert script.get("data.train_files") == "/r/data/x y.parquet"
    assert script.get_int("trainer.total_training_steps") == 64
    assert script.get_int("trainer.total_training_steps", {"STEPS": "9"}) == 9
    assert script.get("trainer.logger") == '["console"]'
    assert script.get("trainer.extra") == "1" and script.line("trainer.extra") == 9
    assert script.get("trainer.save_freq") is None


def test_only_the_named_overrides_differ(tmp_path: Path) -> None:
    before = TrainScript(SCRIPT)
    after = before.render({"trainer.test_freq": 4, "trainer.default_local_dir": "/a b/lr=1e-6,k='x'"})
    assert differing_overrides(SCRIPT, after) == {
        "trainer.test_freq": ("8", "4"),
        "trainer.default_local_dir": (None, quote_value("/a b/lr=1e-6,k='x'")),
    }
    (old, _), (new, _) = run_in_bash(SCRIPT, tmp_path), run_in_bash(after, tmp_path)
    assert new == [word.replace("test_freq=8", "test_freq=4") for word in old] + [
        "trainer.default_local_dir=" + quote_value("/a b/lr=1e-6,k='x'")
    ]


def test_the_embedded_script_is_understood() -> None:
    script = TrainScript(EMBEDDED.read_text(), Path("/w/task/scripts"))
    assert script.get("data.val_files") == "/w/data/datasets/math.8k/dev.parquet"
    assert script.get_int("trainer.total_training_steps") and script.problems() == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@settings(max_examples=60, deadline=None)
@given(TEXT)
def test_any_text_survives_bash_and_hydra(value: str) -> None:
    script = TrainScript("python3 -m verl.trainer.main_ppo a=1\n").render({"key": value})
    with tempfile.TemporaryDirectory() as folder:
        argument = run_in_bash(script, Path(folder))[0][-1]
    assert effective(argument) == value
    assert TrainScript(script).get("key") == value


WRITTEN = st.lists(
    st.sampled_from(["a b", "${X}", "${X:-d e}", "'q'", '"', "\\", "#", "{a}", "[1,2]", "é", "$(x)", "="]), max_size=5
)


@settings(max_examples=60, deadline=None)
@given(pieces=WRITTEN, style=st.sampled_from(["'", '"', "\\"]), array=st.booleans())
def test_any_way_to_quote_is_read_as_bash_reads_it(pieces: list[str], style: str, array: bool) -> None:
    text = "k.v=" + "".join(pieces)
    if style == "'":
        written = "'" + text.replace("'", "'\\''") + "'"
    elif style == '"':
        written = '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$(", "\\$(") + '"'
    else:
        written = re.sub(r"([^\w=.])", r"\\\1", text)
    use = '"${A[@]}"' if array else written
    script = f"A=(  # why\n  {written}\n)\nX='x  y'\npython3 -m verl.trainer.main_ppo a=1 {use}\n"
    with tempfile.TemporaryDirectory() as folder:
        seen, _ = run_in_bash(script, Path(folder))
    if array and style == '"' and "${X" in "".join(pieces):
        return  # X is set after the array
    assert TrainScript(script).arguments() == (seen, [])


@settings(max_examples=200)
@given(TEXT)
def test_quoting_has_an_inverse(value: str) -> None:
    assert parse_value(quote_value(value)) == value


@settings(max_examples=200)
@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()))
def test_typed_values_survive_hydra(value: int | float | bool | None) -> None:
    parsed = OverridesParser.create().parse_override(f"key={quote_value(value)}")
    assert parsed.value() == value and type(parsed.value()) is type(value)


def test_carriage_returns_are_kept_and_reported() -> None:
    text = SCRIPT.replace("\n", "\r\n")
    script = TrainScript(text)
    assert script.get("trainer.logger") == '["console"]' and script.get_int("trainer.total_training_steps") == 64
    rendered = script.render({"trainer.test_freq": 4, "trainer.save_freq": 4})
    assert rendered.count("\n") == rendered.count("\r\n") == text.count("\n") + 1
    assert script.problems()[0].startswith("line 1: lines end in CR LF")


def test_relative_paths_are_reported_unless_the_script_changes_to_a_folder() -> None:
    text = "python3 -m verl.trainer.main_ppo \\\n data.train_files=data/x.parquet actor_rollout_ref.model.path=Qwen/Q\n"
    (problem,) = TrainScript(text).problems()
    assert problem.startswith("line 2: data.train_files=data/x.parquet is relative to wherever the script is started")
    moved = TrainScript('cd "$(dirname "$0")"/../..\n' + text, Path("/w/task/scripts"))
    assert moved.problems() == [] and moved.working_folder() == "/w"
    (problem,) = TrainScript("if true; then cd /x; fi\n" + text).problems()
    assert "changed under a condition in line 1" in problem


@pytest.mark.parametrize(
    ("front", "is_other"),
    [
        ("python -u -m", False), ("python3 -m", False), ("torchrun --standalone --nproc_per_node=1 -m", False),
        ("exec python3 -m", False), ("A=1 B='x y' python3 -m", False), ("env A=1 python3 -m", False),
        ("set -x; time python3 -m", False), ("true && nohup python3 -m", False), ("! python3 -m", False),
        ("if python3 -m", False), ("uv run --no-sync python -m", True), ('"${LAUNCH[@]}" -m', True),
        ("PATH=$PATH:/x python3 -m", True), ("source /dev/null\npython3 -m", True),
    ],
)  # fmt: skip
def test_whatever_stands_in_front_of_the_module(front: str, is_other: bool, tmp_path: Path) -> None:
    end = "; then true; fi" if front.startswith("if") else " |& tee log"
    text = f"LAUNCH=(python3)\n{front} verl.trainer.main_ppo a=1 'b=x y'{end}\n"
    assert run_in_bash(text, tmp_path)[0] == ["a=1", "b=x y"]
    script = TrainScript(text)
    assert script.arguments() == (["a=1", "b=x y"], []) and (script.other_python() is not None) == is_other


def test_a_script_may_be_called_by_its_path_in_the_checkout(tmp_path: Path) -> None:
    text = "python3 /w/verl/trainer/main_ppo.py a=1 b=2\n"
    assert run_in_bash(text, tmp_path)[0] == ["a=1", "b=2"] == TrainScript(text).arguments()[0]


# ---- refusals ---------------------------------------------------------------------------------------------------------

RUN = "python3 -m verl.trainer.main_ppo"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello\n", "no command runs"),
        (f"{RUN} a=1\n{RUN} a=2\n", "in lines 1, 2"),
        (f"{RUN} \\\n  a=1 \\\n  a=2\n", r"line 3: a is set again \(first in line 2\)"),
        (f"{RUN} a='x\n", "line 1: a quote is opened"),
        (f"A=(a=1\n{RUN} \n", "line 1: an array is opened"),
        (f"if true; then\n{RUN} a=1\n", "line 1: `if` is opened"),
        (f"{RUN} \\\n  a.b=1 \\\n  # why\n  c.d=2 \\\n  e.f=3\n", "line 4: `c.d=2` is not a part of the training command"),
        (f"{RUN} \\\n  a.b=1 \\\n\n  c.d=2\n", "line 4: `c.d=2` is not a part of the training command, which ends"),
        (f"{RUN} a.b=1 \\ # why\n  c.d=2\n", "line 1: `\\\\ #` is not an override"),
        (f"for lr in 1 2; do\n{RUN} a=$lr\ndone\n", r"line 2: the training command runs in a loop \(line 1\)"),
        (f"nohup {RUN} a=1 > log 2>&1 &\n", "line 1: the training command runs in the background"),
        (f"ray job submit -- {RUN} a=1\n", "line 1: ray job submit runs the training where"),
        (f"ssh node {RUN} a=1\n", "line 1: ssh runs"),
        (f'CMD="{RUN} a=1"\n$CMD\n', "line 1: the training command is kept in a string"),
        (f"bash -c '{RUN} a=1'\n", "line 1: the training command is kept in a string"),
        (f'{RUN} a=1 \\\n  "${{ARGS[@]}}"\n', "line 2: the array ARGS is not set"),
        (f'A=a=1\n{RUN} "${{A[@]}}"\n', "line 1: A, used as an array in line 2, is set as plain text"),
        (f'X="a=1 b=2"\n{RUN} $X\n', r"line 2: `\$X` is not an override"),
        (f"{RUN} a.{{b,c}}=1\n", "line 1: `a.{b,c}=1` is not an override"),
        (f"{RUN} a={{b,c}}\n", "line 1: bash expands the braces"),
        (f"{RUN} $KEY=1\n", r"line 1: `\$KEY=1` is not an override"),
        (f"{RUN} trainer/x\n", "line 1: `trainer/x` is not an override"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        TrainScript(text)


@pytest.mark.parametrize(
    ("front", "value", "message"),
    [
        ("", "$NOWHERE", r"line 2: a=\$NOWHERE: \$NOWHERE is not set"),
        ("", "$(date)", r"line 2: .* runs a command; write the value itself"),
        ("X=$(git rev-parse --show-toplevel)", "$X/y", "runs a command"),
        ("X='1 2'", "$X", r"is '1 2' and not quoted, so that bash splits it"),
        ("[ -z x ] && X=1", "$X", "set under a condition in line 1"),
        ("X=5", "${X%.*}", "is not understood"),
        ("X=1.5", "$((X * 2))", "is no integer"),
        ("X=(1 2)", "$X", r"\$X is an array \(line 1\)"),
        ("", "$1", r"\$1 is not set"),
        ("", "${X:?missing}", "is not set"),
    ],
)
def test_values_that_cannot_be_known_are_refused(front: str, value: str, message: str) -> None:
    script = TrainScript(f"{front}\n{RUN} a={value}\n")
    with pytest.raises(ScriptError, match=message):
        script.get("a")


def test_an_integer_is_required_where_the_agent_plans() -> None:
    with pytest.raises(ScriptError, match="c=x is not an integer"):
        TrainScript(f"{RUN} c=x\n").get_int("c")


def test_arrays_that_depend_on_a_condition_are_copied_and_not_touched() -> None:
    text = f"""A=(a.b=1 c.d=2)
B=(e.f=1)
if [ "$DEVICE" = npu ]; then
  A+=(c.d=3 g.h=4)
  B=(e.f=2)
fi
{RUN} x.y=0 "${{A[@]}}" "${{B[@]}}"
"""
    script = TrainScript(text)
    assert script.overrides == {"a.b": "1", "x.y": "0"}
    known, reasons = script.arguments()
    assert sorted(known) == ["a.b=1", "x.y=0"] and len(reasons) == 3
    rendered = script.render({"a.b": 5, "new.key": 6})
    assert differing_overrides(text, rendered) == {"a.b": ("1", "5"), "new.key": (None, "6")}
    for key, line in (("c.d", 4), ("e.f", 5), ("g.h", 4)):
        with pytest.raises(ScriptError, match=f"line {line}: {key} is set under a condition"):
            script.get(key)
        with pytest.raises(ScriptError, match="the agent has to set it, set it outside"):
            script.render({key: 1})


def test_a_removed_key_cannot_be_set() -> None:
    with pytest.raises(ScriptError, match=r"line 1: a\.b is removed with ~"):
        TrainScript(f"{RUN} ~a.b\n").render({"a.b": 1})


def test_other_differences_are_noticed() -> None:
    with pytest.raises(ScriptError, match="more than their overrides"):
        differing_overrides(SCRIPT, SCRIPT.replace("echo done", "echo else"))


# ---- scripts that would take for ever, or end early -------------------------------------------------------------------

COMMAND = "python3 -m verl.trainer.main_ppo a.b=$X\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("X=$((9**9**9))\n", "$((9**9**9)) is not understood"),
        ("X=$((2**63))\n", "is not understood"),
        ("X=$((" + "-" * 20000 + "1))\n", "is not understood"),
        ("A=xx\n" + "".join("A=$A$A\n" for _ in range(60)) + "X=$A\n", "$A is longer than 65536 characters"),
        ("A=\n" + "".join("A=$A$A\n" for _ in range(60)) + "X=1$A\n", ""),
        ("A=1\n" + "A=$A\n" * 2000 + "X=$A\n", "recursion"),
        ("# " + "x" * 2**20 + "\nX=1\n", "are more than a training script's 65536"),
        ("".join(f"X{i}=1\n" for i in range(3000)) + "X=()\n: " + '"${X[@]}" ' * 2000 + "\nX=1\n", ""),
    ],
)
def test_no_script_takes_long(text: str, words: str) -> None:
    start = time.process_time()
    try:
        assert (TrainScript(text + COMMAND).get("a.b"), words) == ("1", "")
    except ScriptError as error:
        assert words and words in str(error)
    assert time.process_time() - start < 2


def test_arithmetic_is_bashs() -> None:
    for said in ("-7/2", "-7%3", "7%-3", "2**62", "2**0", "(1+2)*-3", "9223372036854775807/3"):
        known = TrainScript(f"X=$(({said}))\n{COMMAND}").get("a.b")
        assert known == subprocess.check_output(["bash", "-c", f"echo $(({said}))"], text=True).strip()


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("exit 1", 1),
        ("set -e\nexit", 2),
        ("{ exit 0; }", 1),
        ("exec bash other.sh", 1),
        ("exec >log 2>&1", None),
        ("[ -d /x ] || exit 1", None),
        ("if [ ! -d /x ]; then\n  exit 1\nfi", None),
        ("fail() { exit 1; }", None),
        ("( exit 1 )", None),
        ("case $1 in -h) exit 0 ;; esac", None),
    ],
)
def test_a_script_that_ends_before_it_trains_is_named(before: str, line: int | None) -> None:
    script = TrainScript(f"{before}\n{COMMAND}exit 0\n")
    problems = [problem for problem in script.problems({}) if "ends the script" in problem]
    assert [problem.split(":")[0] for problem in problems] == ([f"line {line}"] if line else [])
    if line:
        said = subprocess.run(["bash", "-c", script.text.replace(COMMAND, "echo trained")], capture_output=True)
        assert said.stdout == b""
