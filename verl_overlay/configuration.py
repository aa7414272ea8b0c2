"""The overlay's knobs: names, off values, ranges, sources, and a strict parser for the flat JSON object.

The object maps knob names to plain JSON values, for example
``{"token_rule": "stare", "stare.fraction": 0.05}``. Knobs that are absent take their off value; the empty
object is plain GRPO. Unknown names, wrong types, values out of range and non-finite numbers are refused with
a message that names the knob and the value. Entropies are in nats at the rollout temperature.

Standard library only, and without postponed annotations: the source of this module becomes part of the block
that ``install`` appends to verl's ``core_algos.py``.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


class OverlayError(Exception):
    """What happened, the value seen, where to look and what to do, in one message."""


@dataclass(frozen=True)
class Knob:
    """One entry of the flat configuration object.

    ``kind`` is ``number``, ``optional number`` (null allowed), ``flag`` or ``choice``. ``low`` and ``high``
    are inclusive and only meaningful for numbers, ``choices`` only for choices.
    """

    key: str
    kind: str
    off: float | bool | str | None
    low: float
    high: float
    choices: tuple[str, ...]
    source: str
    meaning: str


def _number(key: str, off: float | None, low: float, high: float, source: str, meaning: str) -> Any:
    kind = "optional number" if off is None else "number"
    return field(default=off, metadata={"knob": Knob(key, kind, off, low, high, (), source, meaning)})


def _flag(key: str, off: bool, source: str, meaning: str) -> Any:
    return field(default=off, metadata={"knob": Knob(key, "flag", off, 0.0, 1.0, (), source, meaning)})


def _choice(key: str, choices: tuple[str, ...], source: str, meaning: str) -> Any:
    knob = Knob(key, "choice", choices[0], 0.0, 0.0, choices, source, meaning)
    return field(default=choices[0], metadata={"knob": knob})


_PPO = "arXiv 1707.06347; asymmetric: DAPO, arXiv 2503.14476"
_PAR = "PAR, arXiv 2511.05993"
_COV = "Entropy Mechanism, arXiv 2505.22617"
_STARE = "STARE, arXiv 2606.19236"


@dataclass(frozen=True)
class OverlayConfiguration:
    """A validated configuration, built by ``parse_configuration``; every default is the off value."""

    clip_low: float | None = _number(
        "clip_low", None, 0.0, 1.0, _PPO, "lower clip distance; null keeps actor.clip_ratio_low"
    )
    clip_high: float | None = _number(
        "clip_high", None, 0.0, 10.0, _PPO, "upper clip distance; null keeps actor.clip_ratio_high"
    )
    positive_weight: float = _number(
        "positive_weight", 1.0, 0.0, 10.0, _PAR, "loss weight of tokens with advantage > 0"
    )
    negative_weight: float = _number(
        "negative_weight", 1.0, 0.0, 10.0, "mirror of " + _PAR, "loss weight of tokens with advantage < 0"
    )
    positive_control: str = _choice(
        "positive_control",
        ("fixed", "entropy_guided"),
        _PAR,
        "entropy_guided moves positive_weight within [0, 1] after each rollout batch",
    )
    positive_target_entropy: float = _number(
        "positive_control.target_entropy", 0.2, 0.0, 20.0, _PAR, "nats; below it positive_weight falls"
    )
    positive_step: float = _number(
        "positive_control.step", 0.05, 0.0, 1.0, _PAR, "change of positive_weight per rollout batch"
    )
    token_rule: str = _choice(
        "token_rule", ("none", "clip_cov", "kl_cov", "stare"), "see the knobs of each rule", "per-token rule"
    )
    clip_cov_ratio: float = _number(
        "clip_cov.ratio", 2e-4, 1e-8, 1.0, _COV, "share of response tokens that get loss 0 (at least one)"
    )
    clip_cov_lower: float = _number(
        "clip_cov.lower", 1.0, -1e3, 1e3, _COV, "only tokens with a larger covariance are candidates"
    )
    clip_cov_upper: float = _number(
        "clip_cov.upper", 5.0, -1e3, 1e3, _COV, "only tokens with a smaller covariance are candidates"
    )
    kl_cov_ratio: float = _number(
        "kl_cov.ratio", 2e-3, 1e-8, 1.0, _COV, "share of response tokens that get the KL term (at least one)"
    )
    kl_cov_coef: float = _number("kl_cov.coef", 1.0, 0.0, 100.0, _COV, "coefficient of |log ratio|")
    stare_fraction: float = _number(
        "stare.fraction", 0.1, 1e-6, 1.0, _STARE, "share of most surprising tokens, per advantage sign"
    )
    stare_amplify: float = _number(
        "stare.amplify", 1.1, 1.0, 10.0, _STARE, "W: weight of the selected tokens with advantage > 0"
    )
    stare_damp: float = _number(
        "stare.damp", 0.9, 0.0, 1.0, _STARE, "M: weight of the selected tokens with advantage < 0"
    )
    stare_target_entropy: float = _number(
        "stare.target_entropy", 0.3, 0.0, 20.0, _STARE, "nats; the rule acts while the entropy is below it"
    )
    stare_adaptive: bool = _flag(
        "stare.adaptive", True, _STARE, "move W and M towards the target after each rollout batch"
    )
    stare_step: float = _number(
        "stare.step", 0.01, 0.0, 1.0, _STARE, "change of W and M per rollout batch when adaptive"
    )
    stare_amplify_max: float = _number(
        "stare.amplify_max", 1.5, 1.0, 10.0, _STARE, "upper limit of the adaptive W (lower limit 1)"
    )
    stare_damp_min: float = _number(
        "stare.damp_min", 0.5, 0.0, 1.0, _STARE, "lower limit of the adaptive M (upper limit 1)"
    )

    @property
    def is_off(self) -> bool:
        """True when nothing differs from verl's own loss."""
        return (
            self.clip_low is None
            and self.clip_high is None
            and self.positive_weight == 1.0
            and self.negative_weight == 1.0
            and self.positive_control == "fixed"
            and self.token_rule == "none"
        )


def knobs() -> list[Knob]:
    """Every knob, in the order of the configuration's fields."""
    return [item.metadata["knob"] for item in fields(OverlayConfiguration)]


def _value_problem(knob: Knob, value: object) -> str | None:
    """Why ``value`` cannot be used for ``knob``, or None."""
    seen = f"overlay knob {knob.key!r} is {value!r}"
    if knob.kind == "flag":
        return None if isinstance(value, bool) else f"{seen}; expected true or false"
    if knob.kind == "choice":
        good = isinstance(value, str) and value in knob.choices
        return None if good else f"{seen}; expected one of {', '.join(knob.choices)}"
    if value is None and knob.kind == "optional number":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{seen}; expected {'a number or null' if knob.kind == 'optional number' else 'a number'}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{seen}; expected a finite number"
    if not knob.low <= value <= knob.high:
        return f"{seen}; expected a number in [{knob.low:g}, {knob.high:g}]"
    return None


def _conflicts(configuration: OverlayConfiguration) -> list[str]:
    """Combinations of valid values that contradict each other."""
    c = configuration
    found: list[str] = []
    if c.positive_control == "entropy_guided" and c.positive_weight > 1.0:
        found.append(
            f"overlay knob 'positive_weight' is {c.positive_weight!r}; "
            "'positive_control' entropy_guided starts from a value in [0, 1]"
        )
    if c.positive_control == "fixed" and c.positive_weight == 0.0 and c.negative_weight == 0.0:
        found.append("overlay knobs 'positive_weight' and 'negative_weight' are both 0; nothing is learnt")
    if c.token_rule == "clip_cov" and c.clip_cov_lower >= c.clip_cov_upper:
        found.append(
            f"overlay knob 'clip_cov.lower' is {c.clip_cov_lower!r}; "
            f"expected less than 'clip_cov.upper' {c.clip_cov_upper!r}"
        )
    if c.token_rule == "stare" and c.stare_adaptive and c.stare_amplify > c.stare_amplify_max:
        found.append(
            f"overlay knob 'stare.amplify' is {c.stare_amplify!r}; "
            f"expected at most 'stare.amplify_max' {c.stare_amplify_max!r}"
        )
    if c.token_rule == "stare" and c.stare_adaptive and c.stare_damp < c.stare_damp_min:
        found.append(
            f"overlay knob 'stare.damp' is {c.stare_damp!r}; expected at least 'stare.damp_min' {c.stare_damp_min!r}"
        )
    return found


def _build_configuration(values: Mapping[str, Any]) -> OverlayConfiguration:
    """The configuration of already checked values; integers become floats."""
    chosen: dict[str, Any] = {}
    for item in fields(OverlayConfiguration):
        knob: Knob = item.metadata["knob"]
        if knob.key in values:
            value = values[knob.key]
            chosen[item.name] = float(value) if "number" in knob.kind and value is not None else value
    return OverlayConfiguration(**chosen)


def check_configuration(values: object) -> list[str]:
    """Every reason why ``values`` is not a usable configuration object; empty when it is.

    Args:
        values: a mapping of knob names to JSON values.
    """
    if not isinstance(values, Mapping):
        return [f"overlay configuration is {values!r}; expected a JSON object of knobs, such as {{}}"]
    known = {knob.key: knob for knob in knobs()}
    found: list[str] = []
    for key, value in values.items():
        if key not in known:
            found.append(f"overlay knob {key!r} (value {value!r}) is unknown; known are {', '.join(known)}")
            continue
        problem = _value_problem(known[key], value)
        if problem is not None:
            found.append(problem)
    return found or _conflicts(_build_configuration(values))


def parse_configuration(values: object, where: str = "the overlay configuration") -> OverlayConfiguration:
    """The typed configuration of a flat mapping.

    Args:
        values: a mapping of knob names to JSON values.
        where: where the mapping came from, for the error message.

    Raises:
        OverlayError: with every problem found.
    """
    found = check_configuration(values)
    if found:
        raise OverlayError(f"{where} is not usable: {'; '.join(found)}. Correct it and start again.")
    assert isinstance(values, Mapping)
    return _build_configuration(values)


def read_configuration_text(text: str, where: str) -> OverlayConfiguration:
    """The typed configuration of a JSON text.

    Raises:
        OverlayError: when the text is no JSON or no usable configuration.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise OverlayError(
            f"{where} is not JSON: {text[:200]!r} ({error}). Set it to a JSON object such as {{}}."
        ) from error
    return parse_configuration(values, where)


def full_configuration(configuration: OverlayConfiguration) -> dict[str, float | bool | str | None]:
    """Every knob with its value, as the flat object that ``parse_configuration`` reads."""
    named = fields(OverlayConfiguration)
    return {item.metadata["knob"].key: getattr(configuration, item.name) for item in named}


def canonical_json(configuration: OverlayConfiguration) -> str:
    """One text per configuration: every knob on its own line, sorted."""
    return json.dumps(full_configuration(configuration), sort_keys=True, indent=4, allow_nan=False)


def configuration_id(configuration: OverlayConfiguration) -> int:
    """A 24-bit fingerprint of the configuration; exact as a float32, so that a metric can carry it."""
    return int.from_bytes(hashlib.sha256(canonical_json(configuration).encode()).digest()[:3], "big")
