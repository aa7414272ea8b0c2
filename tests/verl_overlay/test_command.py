"""``python -m verl_overlay``: list, show, install, check, revert, errors in one line, and the page of methods."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stand_ins import SOURCES, build_verl

from verl_overlay.__main__ import main, methods_page
from verl_overlay.configuration import knobs
from verl_overlay.install import read_configuration
from verl_overlay.presets import PRESETS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def core_algos(tmp_path: Path) -> Path:
    return build_verl(tmp_path / "tree", "registry")


def output(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[str]:
    """The lines of standard output; nothing may be on standard error."""
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of standard error of a command that fails."""
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_list_names_every_preset_and_every_knob(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "list")
    starts = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert starts == ["presets", *PRESETS, "knobs:", *(knob.key for knob in knobs())]
    assert (
        "clip_higher            DAPO's clip-higher (arXiv 2503.14476); inert with one update per rollout batch" in lines
    )
    assert "dr_grpo                Dr.GRPO (arXiv 2503.20783); not in verl 0.3 (always the token mean)" in lines
    (row,) = [line for line in lines if line.startswith("stare.fraction ")]
    assert row.split() == ["stare.fraction", "off", "0.1", "[1e-06,", "1]"]


@pytest.mark.parametrize("name", PRESETS)
def test_show_prints_formula_limits_and_knobs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    preset, lines = PRESETS[name], output(capsys, "show", name)
    assert lines[0] == f"{name}: {preset.title} ({preset.source})"
    facts = {line[2:12].strip(): line[12:] for line in lines[1:] if line.startswith("  ") and line[2] != " "}
    assert facts["formula"] == preset.formula and facts["acts on"] == preset.acts
    assert facts["inert"] == ("with one update per rollout batch" if preset.inert_on_policy else "never")
    assert facts["not in"] == (f"verl {preset.missing_in}" if preset.missing_in else "-")
    assert facts.get("note", "") == preset.note
    assert json.loads(facts["settings"]) == preset.settings
    assert ("schedule.steps" in facts.get("and", "")) is preset.needs_schedule
    shown = {line.split()[0] for line in lines if " off " in line and not line.startswith(" ")}
    assert set(preset.settings) <= shown <= {knob.key for knob in knobs()}


def test_install_check_and_revert(core_algos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    path, backup = str(core_algos), core_algos.parents[4] / "backup"
    assert output(capsys, "show", path, status=1) == [f"{path} holds no overlay"]
    assert output(capsys, "check", path, status=1) == [f"{path} holds no overlay"]
    (line,) = output(capsys, "install", path, "--preset", "stare_adaptive", "--backup", str(backup))
    assert line.startswith(f"{path}: installed, id ")
    assert output(capsys, "install", path, "--preset", "stare_adaptive") == [line.replace(": i", ": already i")]
    shown = json.loads("".join(output(capsys, "show", path)))
    assert shown == read_configuration(core_algos) and shown["control.knob"] == "stare"
    assert output(capsys, "check", path, "--python", sys.executable) == [f"{path}: the overlay is in force"]
    (other,) = output(capsys, "install", path, "--set", '{"clip_high": 0.28}')
    assert other != line and read_configuration(core_algos)["clip_high"] == 0.28
    assert output(capsys, "revert", path) == [f"{path}: reverted"]
    assert core_algos.read_text() == SOURCES["registry"]
    assert output(capsys, "revert", path) == [f"{path}: held no overlay"]
    (kept,) = backup.iterdir()
    assert kept.read_text() == SOURCES["registry"]


def test_a_preset_that_changes_over_the_run_needs_its_length(
    core_algos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(core_algos)
    assert "'schedule.steps' is 0" in failure(capsys, "install", path, "--preset", "par_stage")
    assert core_algos.read_text() == SOURCES["registry"]
    output(capsys, "install", path, "--preset", "par_stage", "--steps", "120")
    assert read_configuration(core_algos)["schedule.steps"] == 120.0


def test_force_needs_a_place_for_the_edited_file(core_algos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, backup = str(core_algos), core_algos.parents[4] / "backup"
    output(capsys, "install", path)
    core_algos.write_text(core_algos.read_text().replace("LOG_RATIO_LIMIT = 20.0", "LOG_RATIO_LIMIT = 2.0"))
    edited = core_algos.read_text()
    refusal = failure(capsys, "install", path)
    assert "edited by hand inside the overlay block" in refusal and "`install --force --backup DIR`" in refusal
    assert "--backup DIR" in failure(capsys, "install", path, "--force")
    assert core_algos.read_text() == edited
    output(capsys, "install", path, "--force", "--backup", str(backup))
    assert {file.suffix: file.read_text() for file in backup.iterdir()} == {
        ".edited": edited,
        ".original": SOURCES["registry"],
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["show", "stare"], "'stare' is neither a file nor a preset; presets are grpo, dr_grpo"),
        (["install", "FILE", "--preset", "dapo"], "preset 'dapo' is unknown; known are grpo, dr_grpo"),
        (["install", "FILE", "--set", "{"], "the argument of --set is not JSON"),
        (["install", "FILE", "--set", '{"clip_hihg": 1}'], "'clip_hihg' (value 1) is unknown"),
        (["install", "absent.py"], "cannot read absent.py"),
        (["revert", "absent.py"], "cannot read absent.py"),
        (["install", "tests"], "tests is not a file"),
        (["show", "tests"], "tests is not a file"),
    ],
)
def test_errors_are_one_line(
    core_algos: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(ROOT)
    assert reason in failure(capsys, *[str(core_algos) if word == "FILE" else word for word in arguments])
    assert core_algos.read_text() == SOURCES["registry"]


@pytest.mark.parametrize(
    "arguments", [[], ["instal"], ["install"], ["install", "FILE", "--preset", "grpo", "--set", "{}"]]
)
def test_usage_errors_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage" in capsys.readouterr().err


def test_the_page_of_methods_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/methods.md").read_text()
    assert page == methods_page(), "write it again: python -m verl_overlay list --markdown > docs/methods.md"
    assert output(capsys, "list", "--markdown") == page.splitlines()
    rows = [line.replace("\\|", "").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == list(PRESETS) and {len(row) for row in rows} == {8}


def run(redirection: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a shell of its own, its output redirected."""
    line = f'exec "{sys.executable}" -m verl_overlay "$@" {redirection}'
    variables = {**os.environ, **environment}
    return subprocess.run(
        ["bash", "-c", line, "-", *arguments], cwd=ROOT, env=variables, capture_output=True, text=True
    )


@pytest.mark.parametrize("redirection", [">/dev/full", "> >(true)"])
def test_an_output_that_takes_nothing_is_one_line(redirection: str) -> None:
    result = run(redirection, "list", "--markdown")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: standard output cannot be written: ") and result.returncode == 1
    assert run(">&-", "list").stderr == ""


def test_an_ascii_locale_does_not_matter(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    core_algos = build_verl(tmp_path / "tür", "registry")
    core_algos.write_text(core_algos.read_text() + "# für alle\n", encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    assert run("", "install", str(core_algos), **ascii_only).returncode == 0
    result = run("", "check", str(core_algos), **ascii_only)
    assert result.returncode == 0 and result.stdout.endswith("the overlay is in force\n"), result.stdout + result.stderr
