"""Steps are read while the files grow: whole lines only, each step once."""

import math
from pathlib import Path

import pytest

from trials.log_reader import LogReader
from trials.metrics import StepMetrics

STEP = "step:{0} - actor/entropy:0.{0} - val-core/d/acc/mean@1:0.5\n"
FILE_STEP = '{{"step":{0},"data":{{"actor/entropy":0.{0},"actor/grad_norm":null}}}}\n'


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "log", tmp_path / "verl.jsonl"


def append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def steps(found: list[StepMetrics]) -> list[int]:
    return [metrics.step for metrics in found]


def test_a_line_is_read_when_it_is_whole(files: tuple[Path, Path]) -> None:
    log, other = files
    reader = LogReader(log, other)
    assert list(reader.read(False)) == []  # no file yet
    line = STEP.format(7)
    for character in line[:-1]:
        append(log, character)
        assert list(reader.read(False)) == []
    append(log, "\n" + STEP.format(8))
    found = list(reader.read(False)) + list(reader.read(True))
    assert steps(found) == [7, 8] and found[0].entropy == 0.7


def test_an_unfinished_last_line_is_never_read(files: tuple[Path, Path]) -> None:
    log, other = files
    append(log, STEP.format(7) + "step:8 - actor/entropy:0.1")  # killed while it wrote 0.15
    append(other, '{"step":9,"data":{"actor/entropy":0.1}}')
    assert steps(list(LogReader(log, other).read(True))) == [7]


def test_each_step_is_told_once_by_whoever_is_first(files: tuple[Path, Path]) -> None:
    log, other = files
    reader = LogReader(log, other)
    append(log, STEP.format(1) + STEP.format(2))
    append(other, FILE_STEP.format(1) + FILE_STEP.format(2) + FILE_STEP.format(3))
    found = list(reader.read(False))
    append(log, "other\n" + STEP.format(3) + STEP.format(4) + "other\n")
    append(other, FILE_STEP.format(4))
    found += list(reader.read(True))
    assert steps(found) == [1, 2, 3, 4]
    by_file = next(metrics for metrics in found if metrics.step == 3)
    assert math.isnan(by_file.values["actor/grad_norm"]) and by_file.entropy == 0.3


def test_a_workspace_that_logs_to_the_file_alone(files: tuple[Path, Path]) -> None:
    log, other = files
    append(log, "Creating file logger\n")
    reader = LogReader(log, other)
    append(other, FILE_STEP.format(1) + FILE_STEP.format(2)[:10])
    assert steps(list(reader.read(False))) == [1]
    append(other, FILE_STEP.format(2)[10:] + "not JSON\n")
    assert steps(list(reader.read(False))) == [2]


def test_a_file_that_its_writer_opens_anew_is_read_from_the_start(files: tuple[Path, Path]) -> None:
    log, other = files
    reader = LogReader(log, other)
    append(other, FILE_STEP.format(1) + FILE_STEP.format(2))
    assert steps(list(reader.read(False))) == [1, 2]
    other.write_text(FILE_STEP.format(3))
    assert steps(list(reader.read(False))) == [3]


def test_garbage_and_endless_lines_cost_nothing(files: tuple[Path, Path]) -> None:
    log, other = files
    reader = LogReader(log, other)
    append(log, b"\xff\xfe\x00 step:1 - \x80\n")
    for _ in range(3):
        append(log, b"\rTraining Progress: 10%" * 50_000)
        assert list(reader.read(False)) == []
    append(log, "\r" + STEP.format(5) + "next\n")
    assert steps(list(reader.read(True))) == [5]
    assert len(reader.tail) == 3
