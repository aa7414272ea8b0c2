"""Scoring of boxed answers: the reward for training and the judge of submissions are this one file.

It needs only the standard library and math-verify (https://github.com/huggingface/Math-Verify), because the
embedded workspace carries a copy of it as ``task/scripts/reward.py``.

math-verify's own time limits use alarm signals, which fail outside the main thread, where verl computes
rewards. They are off here; instead, answers whose evaluation could take unbounded time are refused before the
parser sees them (see ``_is_bounded``). A refused answer is right only if it equals the reference letter by
letter.
"""

from __future__ import annotations

import logging
import re
import threading
from functools import lru_cache
from math import prod
from typing import Any

MAX_LENGTH = 400  # characters of an answer that is parsed
MAX_NESTING = 10  # open brackets of any kind
MAX_POWER = 10_000  # largest exponent of a number, all powers of powers multiplied
MAX_DEGREE = 100  # largest exponent of a variable
MAX_FACTORS = 6  # bracketed factors of an expression with variables, which are multiplied out
MAX_EXPANSION = 1_000  # powers of brackets, raised to the number of variables and roots

SELF_TEST = (  # answer, reference, whether it is right
    (r"\frac{1}{2}", "0.5", True),
    ("1,000", "1000", True),
    (r"\frac{1}{2}", "1/3", False),
    ("3", "-3", False),
)

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_INTEGER = re.compile(r"[+-]?\d{1,30}")
_PERCENT = re.compile(r"\s*\\?%$")
_UNBOUNDED = re.compile(
    r"\*\*|\\(?:sum|prod|int|lim)(?![a-z])|\\[a-z]*int(?![a-z])"  # powers in code; sums, products, integrals
    r"|\d{5,}\s*!|[)}\]!]\s*!|binom\s*\{\d{4,}"  # factorials and binomials of large numbers or of brackets
    r"|\^[^{}^]*\^(?!\\?circ)|[\d)}\]]\s*\^\s*\{[^{}]*[\d)}\]]\s*\^"  # towers of powers
)
_EXPONENT = re.compile(r"(\S)\s*\^\s*\{?\s*[+-]?\s*(\d+)")
_COMMAND = re.compile(r"\\[A-Za-z]+|\\text\s*\{[^{}]*\}")
_PARSER_LOCK = threading.Lock()  # the parser keeps state between calls


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> float:
    """1.0 if the last complete box of ``solution_str`` holds ``ground_truth``, else 0.0 (verl's signature).

    A list of ground truths holds alternatives, each of which is right.
    """
    answer = extract_boxed(solution_str)
    if answer is None:
        return 0.0
    return float(any(is_equivalent(answer, gold) for gold in _as_strings(ground_truth)))


def extract_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{…}`` or ``\fbox{…}``, or None. Escaped braces are text."""
    starts: list[int | None] = []  # one entry per open brace: where a box's content starts, None otherwise
    found: tuple[int, int] | None = None
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "{":
            starts.append(None)
        elif token == "}" and starts:
            start = starts.pop()
            if start is not None and (found is None or start > found[0]):
                found = (start, match.start())
        elif len(token) > 2:
            starts.append(match.end())
    return None if found is None else text[found[0] : found[1]]


def is_equivalent(answer: str, gold: str) -> bool:
    """Whether ``answer`` says the same as the reference ``gold``; not symmetric; an empty answer is wrong."""
    answer, gold = _clean(answer), _clean(gold)
    if not answer:
        return False
    if answer == gold:
        return True
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
        return int(answer) == int(gold)
    if not (_is_bounded(answer) and _is_bounded(gold)):
        return False
    return _verify(answer, gold) or _verify_without_percent(answer, gold)


def self_test() -> None:
    """Raise RuntimeError if a known pair is scored wrongly in the current process and thread."""
    for answer, gold, right in SELF_TEST:
        _verify.cache_clear()
        score = compute_score("self-test", f"Answer:\\boxed{{{answer}}}", gold)
        if score != float(right):
            raise RuntimeError(
                f"the answer checker scored {answer!r} against {gold!r} as {score}, expected {float(right)}; "
                "check the installed math-verify, latex2sympy2-extended and antlr4 versions"
            )


def _as_strings(ground_truth: Any) -> list[str]:
    values = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    return [str(value) for value in (values if isinstance(values, list | tuple) else [values])]


def _clean(text: str) -> str:
    """Without surrounding space, dollar signs, bold marks and the final full stop."""
    return text.strip().strip("$*").rstrip(".").strip()


def _is_bounded(text: str) -> bool:
    """Whether parsing and comparing ``text`` takes bounded time, judged by its looks alone."""
    if len(text) > MAX_LENGTH or _nesting(text) > MAX_NESTING or text.count("|") > MAX_NESTING:
        return False
    if _UNBOUNDED.search(text):
        return False
    exponents = [(base in ")}]", int(exponent[:9])) for base, exponent in _EXPONENT.findall(text)]
    of_groups = prod(exponent for is_group, exponent in exponents if is_group and exponent)
    largest = max([1, *(exponent for is_group, exponent in exponents if not is_group)])
    symbols = len(set(re.findall("[A-Za-z]", _COMMAND.sub("", text)))) + text.count(r"\sqrt")
    if symbols == 0:
        return of_groups * largest <= MAX_POWER
    is_short = largest <= MAX_DEGREE and text.count("(") <= MAX_FACTORS
    return is_short and of_groups**symbols <= MAX_EXPANSION


def _nesting(text: str) -> int:
    """The largest number of brackets open at once."""
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest


@lru_cache(maxsize=100_000)
def _verify(answer: str, gold: str) -> bool:
    """math-verify's judgement; what it cannot parse is wrong. Milliseconds for a new pair, then free."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    with _PARSER_LOCK:
        try:
            boxes = [f"\\boxed{{{text}}}" for text in (gold, answer)]
            parsed = [math_verify.parse(box, parsing_timeout=None) for box in boxes]
            return bool(math_verify.verify(*parsed, timeout_seconds=None))
        except Exception:  # sympy raises whatever it likes on odd input
            return False


def _verify_without_percent(answer: str, gold: str) -> bool:
    r"""Whether ``28\%`` and ``28`` are meant to be the same number."""
    plain = _PERCENT.sub("", answer), _PERCENT.sub("", gold)
    return plain != (answer, gold) and (plain[0] == plain[1] or _verify(*plain))
