"""Three-operand arithmetic problems and the imperfect demonstrators that teach the base model.

Two families of problems share one shape, ``a o b o c`` with single digits, solved from left to right:

* ``chain_sum``: o in {+, -}; the questions come from reasoning-gym's ``chain_sum`` generator
  (https://github.com/open-thought/reasoning-gym), kept where no running value is negative;
* ``last_digit``: o in {+, *}; every running value is reduced modulo 10.

A demonstration writes its steps in one of several ways, or none, and ends in ``Answer:\\boxed{x}``. The ways
differ in reliability, so training gains by preferring one, at the cost of much of the policy's entropy.
Within each, demonstrators err *systematically*: a single step such as ``7 + 5`` is easy, medium or hard, and
the errors on it fall mostly on one fixed wrong value. On hard steps that value is the most likely one, so
sharpening the demonstrated policy is not enough: training has to explore to find the rarer right value.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CHAIN_SUM = "reasoning_gym/chain_sum"
LAST_DIGIT = "modular/last_digit"

# Both openings have ten tokens, so all prompts of the workspace have the same length.
LAST_DIGIT_QUESTION = "Find the last digit, working left to right: {expression} ="

TIERS = (0.50, 0.25, 0.25)  # share of easy, medium and hard steps
FIXED_ERROR = (0.50, 0.70, 0.75)  # share of the errors that fall on the step's fixed wrong value
FACTS_SEED = 7


@dataclass(frozen=True)
class Demonstrator:
    """One way to answer: ``share`` of the demonstrations, how steps are written, and how reliable they are.

    ``right`` is the probability of the right value on an easy, medium and hard step.
    """

    share: float
    steps: str  # format of a step, "" for none
    right: tuple[float, float, float]


DEMONSTRATORS = (
    Demonstrator(0.25, "{left}{operator}{right}={result}\n", (0.97, 0.80, 0.20)),
    Demonstrator(0.25, "{operator}{right}={result}\n", (0.85, 0.45, 0.05)),
    Demonstrator(0.25, "{result}={left}{operator}{right}\n", (0.75, 0.35, 0.03)),
    Demonstrator(0.25, "", (0.55, 0.20, 0.03)),
)


@dataclass(frozen=True)
class Problem:
    """One question with its right answer.

    ``values`` are the three operands (0..9), ``operators`` the two signs between them.
    """

    source: str
    question: str
    values: tuple[int, ...]
    operators: tuple[str, ...]

    @property
    def answer(self) -> int:
        value = self.values[0]
        for operator, operand in zip(self.operators, self.values[1:], strict=True):
            value = step_value(self.source, operator, value, operand)
        return value


def step_value(source: str, operator: str, left: int, right: int) -> int:
    """The right result of one step; ``last_digit`` reduces it modulo 10."""
    value = left + right if operator == "+" else left - right if operator == "-" else left * right
    return value % 10 if source == LAST_DIGIT else value


def last_digit_problem(rng: random.Random) -> Problem:
    """One random ``last_digit`` problem."""
    values = tuple(rng.randrange(10) for _ in range(3))
    operators = tuple(rng.choice("+*") for _ in range(2))
    question = LAST_DIGIT_QUESTION.format(expression=_expression(values, operators))
    return Problem(LAST_DIGIT, question, values, operators)


def chain_sum_problem(question: str, expression: str) -> Problem | None:
    """A reasoning-gym ``chain_sum`` item as a problem, or None where a running value is negative."""
    parts = expression.split()
    values, operators = tuple(int(part) for part in parts[::2]), tuple(parts[1::2])
    running = values[0]
    for operator, operand in zip(operators, values[1:], strict=True):
        running = step_value(CHAIN_SUM, operator, running, operand)
        if running < 0:
            return None
    return Problem(CHAIN_SUM, question, values, operators)


def demonstration(problem: Problem, rng: random.Random, demonstrators: Sequence[Demonstrator] = DEMONSTRATORS) -> str:
    """One demonstrator's response: its steps, right or wrong, then the boxed answer."""
    demonstrator = rng.choices(demonstrators, [each.share for each in demonstrators])[0]
    value, text = problem.values[0], ""
    for operator, operand in zip(problem.operators, problem.values[1:], strict=True):
        result = _demonstrated_value(demonstrator, problem.source, operator, value, operand, rng)
        text += demonstrator.steps.format(left=value, operator=operator, right=operand, result=result)
        value = result
    return f"{text}Answer:\\boxed{{{value}}}"


def _demonstrated_value(
    demonstrator: Demonstrator, source: str, operator: str, left: int, right: int, rng: random.Random
) -> int:
    true, wrong, tier = _fact(source, operator, left, right)
    if rng.random() < demonstrator.right[tier]:
        return true
    if rng.random() < FIXED_ERROR[tier]:
        return wrong
    return _near(source, true, rng)


@cache
def _fact(source: str, operator: str, left: int, right: int) -> tuple[int, int, int]:
    """(right value, fixed wrong value, tier) of one step; the same in every process."""
    rng = random.Random(f"{FACTS_SEED} {source} {left} {operator} {right}")
    true = max(0, step_value(source, operator, left, right))
    tier = rng.choices((0, 1, 2), TIERS)[0]
    return true, _near(source, true, rng), tier


def _near(source: str, true: int, rng: random.Random) -> int:
    """A wrong value: any other digit for ``last_digit``, at most 3 off and not negative for ``chain_sum``."""
    if source == LAST_DIGIT:
        return (true + rng.randrange(1, 10)) % 10
    return rng.choice([value for value in range(max(0, true - 3), true + 4) if value != true])


def _expression(values: Sequence[int], operators: Sequence[str]) -> str:
    later = zip(operators, values[1:], strict=True)
    return str(values[0]) + "".join(f" {sign} {value}" for sign, value in later)
