"""A search space: typed knobs with conditions, and presets that are points in it.

The file format (YAML):

    schema: 1
    knobs:
      clip_high:      {type: float, low: 0.2, high: 0.4, default: 0.2, source: "arXiv:2503.14476"}
      token_rule:     {type: choice, choices: [none, clip_cov], default: none}
      clip_cov.ratio: {type: float, low: 1e-4, high: 0.1, log: true, default: 2e-4, when: {token_rule: [clip_cov]}}
    constants:
      target.unit: h0
    presets:
      clip_higher:    {source: "DAPO, arXiv:2503.14476", set: {clip_high: 0.28}}

A knob's name is a key of the overlay's configuration. A knob with `when` exists only where other knobs, defined
before it, have one of the listed values; a list of such conditions means any of them. Constants are part of every
configuration but not of the search.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictInt, ValidationError, model_validator

from search_spaces.strict_yaml import YamlError, read_yaml

Value = float | int | str | bool
Configuration = dict[str, Value]


class SpaceError(ValueError):
    """A search space file is wrong; the message names file, knob and value."""


class Suggester(Protocol):
    """The part of an Optuna trial that a space needs."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int: ...
    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


class _Knob(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    when: dict[str, list[Value]] | list[dict[str, list[Value]]] = {}
    """Other knob → values under which this knob exists; of several such mappings any one will do."""
    source: str = ""
    """Where range and default come from."""

    @property
    def conditions(self) -> list[dict[str, list[Value]]]:
        """The alternatives of `when`."""
        return [self.when] if isinstance(self.when, dict) else self.when

    def is_active(self, chosen: Configuration) -> bool:
        return any(
            all(chosen.get(other) in values for other, values in condition.items()) for condition in self.conditions
        )


class FloatKnob(_Knob):
    type: Literal["float"]
    low: FiniteFloat
    high: FiniteFloat
    log: bool = False
    default: FiniteFloat

    @model_validator(mode="after")
    def _check(self) -> "FloatKnob":
        _check_range(self.low, self.high, self.log, self.default)
        return self

    def suggest(self, trial: Suggester, name: str) -> Value:
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def accepts(self, value: Value) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self.low <= value <= self.high


class IntKnob(_Knob):
    type: Literal["int"]
    low: StrictInt
    high: StrictInt
    log: bool = False
    default: StrictInt

    @model_validator(mode="after")
    def _check(self) -> "IntKnob":
        _check_range(self.low, self.high, self.log, self.default)
        return self

    def suggest(self, trial: Suggester, name: str) -> Value:
        return trial.suggest_int(name, self.low, self.high, log=self.log)

    def accepts(self, value: Value) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high


class ChoiceKnob(_Knob):
    type: Literal["choice"]
    choices: list[Value] = Field(min_length=2)
    default: Value

    @model_validator(mode="after")
    def _check(self) -> "ChoiceKnob":
        if self.default not in self.choices:
            raise ValueError(f"default {self.default!r} is not one of the choices {self.choices}")
        return self

    def suggest(self, trial: Suggester, name: str) -> Value:
        value: Value = trial.suggest_categorical(name, self.choices)
        return value

    def accepts(self, value: Value) -> bool:
        return value in self.choices


def _check_range(low: float, high: float, log: bool, default: float) -> None:
    if not low < high:
        raise ValueError(f"low {low} is not below high {high}")
    if log and low <= 0:
        raise ValueError(f"a log range needs low > 0, not {low}")
    if not low <= default <= high:
        raise ValueError(f"default {default} is outside {low}..{high}")


class Preset(BaseModel):
    """A published method as a point of the space."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    """Paper and arXiv id, or what the point is for."""
    set: Configuration = {}
    """Knobs that differ from their defaults."""


class SearchSpace(BaseModel):
    """Typed knobs and presets. Build one with `read_space`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    format: Literal[1] = Field(alias="schema")
    knobs: dict[str, Annotated[FloatKnob | IntKnob | ChoiceKnob, Field(discriminator="type")]]
    constants: Configuration = {}
    """Settings of every trial that are not searched."""
    presets: dict[str, Preset] = {}

    @model_validator(mode="after")
    def _check_references(self) -> "SearchSpace":
        seen: set[str] = set()
        for name, knob in self.knobs.items():
            for other, values in ((other, condition[other]) for condition in knob.conditions for other in condition):
                if other not in seen:
                    raise ValueError(f"knob {name}: 'when' names {other}, which is not a knob defined before it")
                wrong = [value for value in values if not self.knobs[other].accepts(value)]
                if wrong:
                    raise ValueError(f"knob {name}: {other} can never be {wrong[0]!r}")
            seen.add(name)
        both = set(self.constants) & seen
        if both:
            raise ValueError(f"{', '.join(sorted(both))} is a constant and a knob; keep one of them")
        for name, preset in self.presets.items():
            for key, value in preset.set.items():
                if key not in self.knobs:
                    raise ValueError(f"preset {name}: unknown knob {key}; known: {', '.join(self.knobs)}")
                if not self.knobs[key].accepts(value):
                    raise ValueError(f"preset {name}: {key} = {value!r} is outside the knob's range or choices")
            inactive = set(preset.set) - set(self.preset_parameters(name))
            if inactive:
                raise ValueError(f"preset {name}: {', '.join(sorted(inactive))} has no effect with its other values")
        return self

    def suggest(self, trial: Suggester) -> Configuration:
        """Ask `trial` for a value of every active knob (define-by-run)."""
        chosen: Configuration = {}
        for name, knob in self.knobs.items():
            if knob.is_active(chosen):
                chosen[name] = knob.suggest(trial, name)
        return chosen

    def preset_parameters(self, preset: str) -> Configuration:
        """Every active knob's value at a preset: what it sets, else the knob's default."""
        return self.complete(self.presets[preset].set)

    def configuration(self, parameters: Configuration) -> Configuration:
        """What a trial runs with: the constants and the values of its knobs."""
        return self.constants | parameters

    def complete(self, settings: Configuration) -> Configuration:
        """`settings` with the defaults of all other active knobs."""
        chosen: Configuration = {}
        for name, knob in self.knobs.items():
            if knob.is_active(chosen):
                chosen[name] = settings.get(name, knob.default)
        return chosen


def read_space(path: Path) -> SearchSpace:
    """Read and check a space file.

    Raises:
        SpaceError: unreadable, unknown key, wrong type, empty range, preset outside the space.
    """
    try:
        return SearchSpace.model_validate(read_yaml(path))
    except YamlError as error:
        raise SpaceError(str(error)) from None
    except ValidationError as error:
        raise SpaceError(f"{path}: {describe_validation(error)}") from None


def describe_validation(error: ValidationError) -> str:
    """All complaints of a pydantic error in one line: key, what is wrong, the value seen."""
    parts = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"] if part not in ("float", "int", "choice"))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "unknown key"
        elif problem["type"] not in ("missing", "value_error"):
            message += f" (value: {problem['input']!r})"
        parts.append(f"{where}: {message}" if where else message)
    return "; ".join(parts)


def shipped_space(name: str) -> Path:
    """The path of a space that comes with the project, e.g. `overlay`."""
    return Path(__file__).parent / f"{name}.yaml"
