"""The scoring of boxed answers, in the main thread and in a worker thread."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from trials import grading
from trials.grading import compute_score, extract_boxed, is_equivalent, self_test

ANSWERS = Path(__file__).parents[1] / "data" / "answers.tsv"


def read_answers() -> list[dict[str, str]]:
    with ANSWERS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def in_thread(function: Callable[..., object], *arguments: object) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


@pytest.mark.parametrize("where", ["main thread", "worker thread"])
@pytest.mark.parametrize("row", read_answers(), ids=lambda row: f"{row['kind']}: {row['output'][:40]}")
def test_table_of_answers(row: dict[str, str], where: str) -> None:
    grading._verify.cache_clear()
    arguments = ("math", row["output"], row["gold"])
    score = compute_score(*arguments) if where == "main thread" else in_thread(compute_score, *arguments)
    assert score == float(row["correct"])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{3}, then \boxed{4}", "4"),
        (r"\boxed{3}, then \boxed{4", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\fbox{5}}", "5"),
        (r"f{ \boxed{5}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed 5", None),
        (r"\boxedx{5}", None),
        ("", None),
    ],
)
def test_extract_boxed(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


def test_a_long_answer_is_extracted_whole() -> None:
    polynomial = "+".join(f"{n}x^{{{n}}}" for n in range(40))
    assert extract_boxed(rf"so \boxed{{{polynomial}}}") == polynomial
    assert compute_score("math", rf"\boxed{{{polynomial}}}", polynomial) == 1.0


@pytest.mark.parametrize("ground_truth", [7, 7.0, "7", ["7"], ["8", 7], np.array(["7"]), np.int64(7)])
def test_types_of_ground_truth(ground_truth: object) -> None:
    assert compute_score("math", r"\boxed{7}", ground_truth) == 1.0
    assert compute_score("math", r"\boxed{9}", ground_truth) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        r"9^{9^{9^{9}}}",
        "9^9^9",
        "9^{9^9}",
        "9**9**9",
        r"((9^{99})^{99})^{99}",
        r"9^{99999999}",
        r"10^{1000000}",
        "99999999!",
        "9!!!",
        r"\binom{99999999}{50000000}",
        r"\sum_{i=1}^{1000000000} i",
        "(x+y+z+u+v+w)^{30}",
        "(x^{999}-1)/(x-1)",
        "".join(f"(1+{letter})" for letter in "abcdfghjklmn"),
        "{" * 50_000 + "}" * 50_000,
        "(" * 300,
        "|" * 300,
        "9" * 100_000,
        r"\frac12" * 50,
        "x" * 390,
    ],
    ids=lambda answer: answer[:24],
)
def test_pathological_answers_take_bounded_time(answer: str) -> None:
    start = time.process_time()
    assert compute_score("math", rf"\boxed{{{answer}}}", "1") == 0.0
    assert compute_score("math", rf"\boxed{{{answer}}}", "x+1") == 0.0
    assert time.process_time() - start < 10.0
    assert is_equivalent(answer, answer)


def test_unclosed_boxes_take_linear_time() -> None:
    start = time.process_time()
    assert extract_boxed(r"\boxed{" * 50_000) is None
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("2^{10}", "1024"), (r"\left(\frac{1}{2}\right)^{3}", "0.125"), ("(x-1)(x+1)", "x^2-1"), ("5!", "120")],
)
def test_ordinary_powers_are_still_evaluated(answer: str, gold: str) -> None:
    assert is_equivalent(answer, gold)


def test_percent_signs_do_not_swallow_other_differences() -> None:
    assert is_equivalent(r"28\%", "28") and is_equivalent("28", r"28\%")
    assert not is_equivalent(r"29\%", "28")


def test_a_batch_is_scored_quickly() -> None:
    outputs = [rf"3+4=7;Answer:\boxed{{{number % 30}+1}}" for number in range(128)]
    for output in outputs:
        compute_score("math", output, "7")
    start = time.process_time()
    for output in outputs:
        compute_score("math", output, "7")
    assert time.process_time() - start < 0.1


def test_self_test_passes_in_both_kinds_of_thread() -> None:
    self_test()
    in_thread(self_test)


def test_self_test_notices_a_checker_that_says_no_to_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    monkeypatch.setattr(math_verify, "verify", lambda *_, **__: False)
    with pytest.raises(RuntimeError, match=r"expected 1\.0"):
        self_test()
    grading._verify.cache_clear()


def test_file_works_alone(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_bytes(Path(grading.__file__).read_bytes())
    command = "import reward; print(reward.compute_score('math', r'\\boxed{0.5}', '1/2'))"
    result = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1.0"
