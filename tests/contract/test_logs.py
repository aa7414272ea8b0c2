"""What each verl version's own loggers print and write is read back: every name, every number, whatever surrounds it."""

import importlib.util
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trials.metrics import LineJoiner, StepMetrics, parse_file_line, parse_line
from wheels import VERSIONS, wheel_tree

ROUNDED = ("0.3.0.post1", "0.4.1")
"""Versions whose console shows three decimals."""
FILE_LOGGER = ("0.7.1", "0.8.0", "0.9.1")
"""Versions whose file logger is written at once."""
SOURCES = ("openai/gsm8k", "AMC 2023 - hard", "hf:org/set - v1.5")
ROWS = {"openai/gsm8k": 30, "AMC 2023 - hard": 10, "hf:org/set - v1.5": 60}
ACCURACIES = (0.5, 0.25, 1.0)
DEV = 0.3 * 0.5 + 0.1 * 0.25 + 0.6 * 1.0


def load(version: str, file: str) -> ModuleType:
    """A module of a wheel by its file, without the package around it."""
    path = wheel_tree(version) / "verl" / "utils" / file
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{version.replace('.', '_')}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dev_metrics(version: str) -> dict[str, object]:
    if version == "0.3.0.post1":
        return {f"val/test_score/{source}": np.float64(a) for source, a in zip(SOURCES, ACCURACIES, strict=True)}
    found: dict[str, object] = {}
    for source, accuracy in zip(SOURCES, ACCURACIES, strict=True):
        found[f"val-core/{source}/acc/mean@4"] = np.float64(accuracy)
        found[f"val-core/{source}/acc/maj@4/mean"] = np.float64(0.9)
        found[f"val-aux/{source}/reward/mean@4"] = 0.1
    return found


def step_metrics(version: str) -> dict[str, object]:
    """One step's metrics with every kind of number that verl logs, and kinds that its console leaves out."""
    entropy = "actor/entropy_loss" if version == "0.3.0.post1" else "actor/entropy"
    return {
        entropy: 0.61234567, "actor/pg_loss": -1.5e-05, "actor/grad_norm": np.float64(0.125), "actor/lr": 1e-06,
        "critic/score/mean": np.float32(0.1), "global_seqlen/min": 1234567, "prompt_length/max": np.int64(512),
        "perf/mfu": math.nan, "perf/throughput": math.inf, "actor/kl": np.float64("-inf"), "perf/max_memory": 3e22,
        "training/epoch": 0, "timing_s/step": 12.75, "actor/name": "text", "actor/none": None, **dev_metrics(version),
    }  # fmt: skip


def print_line(version: str, metrics: dict[str, object], step: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that the version's console logger prints."""
    capsys.readouterr()
    load(version, "logger/aggregate_logger.py").LocalLogger(print_to_console=True).log(metrics, step)
    return capsys.readouterr().out.splitlines()[-1]


def expected(version: str, value: object) -> float:
    number = float(str(value) if isinstance(value, np.float32) else value)  # type: ignore[arg-type]
    return float(f"{number:.3f}") if version in ROUNDED else number


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    wheel_tree(value)
    return value


def test_every_name_and_number_of_the_console(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = step_metrics(version)
    seen = parse_line(print_line(version, metrics, 7, capsys))
    assert seen is not None and seen.step == 7 and seen.is_training_step
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float, np.number))}
    assert seen.values.keys() == numbers.keys()
    for name, value in numbers.items():
        assert seen.values[name] == pytest.approx(expected(version, value), nan_ok=True, abs=0, rel=1e-12), name
    assert seen.entropy == expected(version, 0.61234567) and seen.step_s == 12.75
    assert seen.dev_accuracies() == dict(zip(SOURCES, ACCURACIES, strict=True))
    assert seen.dev_accuracy(ROWS) == pytest.approx(DEV)


def test_an_explicit_dev_metric_is_taken_alone(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen = parse_line(print_line(version, step_metrics(version), 7, capsys))
    assert seen is not None
    chosen = next(name for name in dev_metrics(version) if "AMC" in name)
    assert seen.dev_accuracy(ROWS, chosen) == 0.25 and seen.is_validated(chosen)
    assert seen.dev_accuracy(ROWS, "val-core/other/acc/mean@1") is None and not seen.is_validated("val-core/other")


def test_what_is_not_printed_is_unknown_and_not_zero(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen = parse_line(print_line(version, {"actor/pg_loss": 0.0, "critic/score/mean": 0.0}, 3, capsys))
    assert seen is not None and seen.values["actor/pg_loss"] == 0.0
    assert seen.entropy is None and seen.step_s is None and seen.dev_accuracy(ROWS) is None
    part = parse_line(print_line(version, dict(list(dev_metrics(version).items())[:1]), 3, capsys))
    assert part is not None and part.is_validated() and part.dev_accuracy(ROWS) is None  # part of the dev set
    nothing = parse_line(print_line(version, {"actor/entropy": math.nan}, 3, capsys))
    assert nothing is not None and nothing.entropy is not None and math.isnan(nothing.entropy)


CYAN, RESET = "\x1b[36m", "\x1b[0m"
BAR = "Training Progress:  10%|█         | 3/30 [01:02<09:18, 20.68s/it]"
SURROUNDINGS: dict[str, Callable[[str], str]] = {
    "a worker's name": lambda line: f"(TaskRunner pid=812) {line}",
    "a worker on another node": lambda line: f"{CYAN}(TaskRunner pid=812, ip=10.0.0.7){RESET} {line}",
    "an actor's repr": lambda line: f"(main_task pid=4101) {line}",
    "repetition": lambda line: f"{CYAN}(TaskRunner pid=812){RESET} {line}{CYAN} [repeated 9x across cluster]{RESET}",
    "a bar before": lambda line: f"{BAR}\r{line}",
    "a bar glued before": lambda line: f"\r{BAR}{line}",
    "a bar after": lambda line: f"{line}\r{BAR}",
    "a bar and a name": lambda line: f"(TaskRunner pid=812) \r{BAR}\r{line}\r\n",
    "a time stamp": lambda line: f"2026-03-01 12:00:00,123 INFO {line}",
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_do_not_matter(version: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = print_line(version, dev_metrics(version) | {"actor/entropy": 0.5, "timing_s/gen": 1.25}, 12, capsys)
    assert parse_line(SURROUNDINGS[name](line)) == parse_line(line)


@pytest.mark.parametrize("prefix", ["", "(TaskRunner pid=812) "])
@pytest.mark.parametrize("width", [37, 80, 132])
def test_wrapped_lines_are_put_together(
    version: str, prefix: str, width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A narrow terminal or a log collector cuts at a fixed width."""
    lines = [print_line(version, step_metrics(version), step, capsys) for step in (7, 8)]
    joiner = LineJoiner()
    found: list[StepMetrics] = []
    for line in ["before", *lines, "after the steps"]:
        for start in range(0, len(line), width):
            found += joiner.push(prefix + line[start : start + width])
    whole = [parse_line(line) for line in lines]
    assert [str(metrics) for metrics in found + joiner.flush()] == [str(metrics) for metrics in whole]


@pytest.mark.parametrize("version", FILE_LOGGER)
def test_the_file_logger_is_read_where_it_is_live(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("orjson")
    path = tmp_path / "verl.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    metrics = {name: value for name, value in step_metrics(version).items() if name != "global_seqlen/min"}
    logger = load(version, "tracking.py").FileLogger("project", "experiment")
    logger.log(metrics, 7)
    seen = parse_file_line(path.read_text())  # before finish(): nothing is buffered
    logger.finish()
    printed = parse_line(print_line(version, metrics, 7, capsys))
    assert seen is not None and printed is not None and seen.step == 7
    assert seen.values.keys() == printed.values.keys() | {"actor/none"}
    for name, value in printed.values.items():
        shown = value if math.isfinite(value) else math.nan  # the file has null for every value that is not finite
        assert seen.values[name] == pytest.approx(shown, nan_ok=True, rel=1e-6), name
    assert json.loads(path.read_text())["data"]["perf/mfu"] is None


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "7", '{"step": 1}', '{"step": null, "data": {}}', '{"data": {"a": 1}}']
)
def test_other_lines_of_a_file_are_no_steps(line: str) -> None:
    assert parse_file_line(line) is None


def test_the_names_are_those_of_the_versions_source(version: str) -> None:
    folder = wheel_tree(version) / "verl"
    files = [*folder.glob("trainer/**/*.py"), *folder.glob("workers/**/*.py")]
    text = "\n".join(path.read_text() for path in files)
    names = set(re.findall(r"actor/entropy(?:_loss)?(?=[\"'])", text))
    both = {"actor/entropy", "actor/entropy_loss"}
    if version == "0.3.0.post1":
        assert names == {"actor/entropy_loss"} and "val/test_score/{data_source}" in text and "val-core" not in text
    else:
        assert names == (both if version in FILE_LOGGER else {"actor/entropy"})
        assert 'metric_sec = "val-core"' in text and "{metric_sec}/{data_source}/{var_name}/{metric_name}" in text
    assert re.search(r"[\"']actor/pg_loss[\"']", text) and re.search(r"[\"']actor/grad_norm[\"']|grad_norm", text)
    assert "perf/time_per_step" in text
