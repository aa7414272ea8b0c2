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
from itertools import pairwise
from typing import Any


class OverlayError(Exception):
    """What happened, the value seen, where to look and what to do, in one message."""


@dataclass(frozen=True)
class Knob:
    """One entry of the flat configuration object.

    ``kind`` is ``number``, ``optional number`` (null allowed), ``optional numbers`` (a list), ``flag`` or
    ``choice``. ``low`` and ``high`` are inclusive and only meaningful for numbers, ``choices`` for choices.
    """

    key: str
    kind: str
    off: Any
    low: float
    high: float
    choices: tuple[str, ...]
    source: str
    meaning: str


def _number(key: str, off: float | None, low: float, high: float, source: str, meaning: str) -> Any:
    kind = "optional number" if off is None else "number"
    return field(default=off, metadata={"knob": Knob(key, kind, off, low, high, (), source, meaning)})


def _numbers(key: str, low: float, high: float, source: str, meaning: str) -> Any:
    knob = Knob(key, "optional numbers", None, low, high, (), source, meaning)
    return field(default=None, metadata={"knob": knob})


def _flag(key: str, off: bool, source: str, meaning: str) -> Any:
    return field(default=off, metadata={"knob": Knob(key, "flag", off, 0.0, 1.0, (), source, meaning)})


def _choice(key: str, choices: tuple[str, ...], source: str, meaning: str) -> Any:
    knob = Knob(key, "choice", choices[0], 0.0, 0.0, choices, source, meaning)
    return field(default=choices[0], metadata={"knob": knob})


_OURS = "this project"
_PPO = "arXiv 1707.06347; asymmetric: DAPO, arXiv 2503.14476"
_PAR = "PAR, arXiv 2511.05993"
_COV = "Entropy Mechanism, arXiv 2505.22617"
_STARE = "STARE, arXiv 2606.19236"
_BAND = "Entrocraft, arXiv 2604.26326"
_GDPO = "GDPO, arXiv 2601.05242"
_CE = "CE-GPPO, arXiv 2509.20712"
_PIC = "EntroPIC, arXiv 2511.15248"

CONTROLLED = ("positive_weight", "negative_weight", "clip_high", "shaping.coef", "stare", "kl_cov.coef")


@dataclass(frozen=True)
class OverlayConfiguration:
    """A validated configuration, built by ``parse_configuration``; every default is the off value.

    The parts act in the order of the fields: advantage (on the driver), then in the policy loss sign weights,
    shaping of the token's advantage, token weights, ratio and clip rule, extra term, aggregation. The
    controller moves one of their numbers towards the entropy target.
    """

    advantage_baseline: str = _choice(
        "advantage.baseline",
        ("mean", "quantile", "sign"),
        "QAE, arXiv 2509.22611; W-REINFORCE, arXiv 2506.01347",
        "of a group's rewards; sign: A = +1 for correct answers, -1 for others, no group",
    )
    advantage_quantile: float = _number(
        "advantage.quantile", 0.4, 1e-3, 1.0, "QAE, arXiv 2509.22611", "K of the quantile baseline inf{x: F(x) >= K}"
    )
    advantage_correct_above: float = _number(
        "advantage.correct_above", 0.5, -1e6, 1e6, _OURS, "baseline sign: an answer with a larger reward is correct"
    )
    advantage_std: str = _choice(
        "advantage.std",
        ("verl", "on", "off"),
        "Dr.GRPO, arXiv 2503.20783",
        "divide by the group's standard deviation; verl keeps algorithm.norm_adv_by_std_in_grpo",
    )
    advantage_components: tuple[float, ...] | None = _numbers(
        "advantage.components",
        -1e6,
        1e6,
        _GDPO,
        "values that a reward is the sum of (each present or absent), decoded and normalised one by one",
    )
    advantage_component_weights: tuple[float, ...] | None = _numbers(
        "advantage.component_weights", 0.0, 1e6, _GDPO, "weight of each component's advantage; null: all 1"
    )
    positive_weight: float = _number(
        "positive_weight", 1.0, 0.0, 10.0, _PAR, "weight of tokens with advantage > 0; the start when it is controlled"
    )
    negative_weight: float = _number(
        "negative_weight", 1.0, 0.0, 10.0, "mirror of " + _PAR, "weight of tokens with advantage < 0"
    )
    positive_schedule: str = _choice(
        "positive_schedule",
        ("constant", "stage", "epoch"),
        _PAR,
        "stage: 0 in the first half, then linear to positive_weight; epoch: (e - 1) / (E - 1) of it in epoch e",
    )
    positive_epochs: float = _number("positive_schedule.epochs", 2.0, 2.0, 1e4, _PAR, "E of the epoch schedule")
    sign_gate: str = _choice(
        "sign_gate",
        ("none", "band"),
        _BAND,
        "band: below it only negative advantages train, above it only positive ones",
    )
    band_low: float = _number("band.low", 0.4, 0.0, 20.0, _BAND, "lower edge at the start, in target.unit")
    band_low_end: float | None = _number(
        "band.low_end", None, 0.0, 20.0, _BAND, "lower edge at the end, reached linearly; null: as at the start"
    )
    band_width: float = _number("band.width", 0.1, 0.0, 20.0, _BAND, "upper edge minus lower edge")
    shaping: str = _choice(
        "shaping",
        ("none", "bonus", "repo_r", "entropy_advantage", "progrpo"),
        "see the presets",
        "term added to each token's advantage",
    )
    shaping_coef: float = _number("shaping.coef", 1e-3, -10.0, 10.0, "see the presets", "strength of the shaping")
    shaping_kappa: float = _number(
        "shaping.kappa", 2.0, 1.0, 1e3, "arXiv 2506.14758", "entropy_advantage: the term is at most |A| / kappa"
    )
    shaping_share: float = _number(
        "shaping.share", 0.2, 1e-3, 1.0, "ProGRPO, arXiv 2602.05281", "progrpo: share of least probable tokens"
    )
    shaping_below_target: bool = _flag(
        "shaping.below_target", False, "Skywork-OR1, arXiv 2505.22312", "shape only while the entropy is below target"
    )
    token_entropy: str = _choice(
        "token_entropy",
        ("surprisal", "exact"),
        _OURS,
        "what high_entropy and entropy_advantage see: -log pi of the sampled token in the loss, or the entropy "
        "that verl's older trainers compute, in the advantage",
    )
    token_rule: str = _choice(
        "token_rule",
        ("none", "clip_cov", "stare", "cw", "steer", "opefo", "high_entropy", "lp_reg"),
        "see the presets",
        "weights of single tokens",
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
    stare_fraction: float = _number(
        "stare.fraction", 0.1, 1e-6, 1.0, _STARE, "share of most surprising tokens, per advantage sign"
    )
    stare_amplify: float = _number(
        "stare.amplify", 1.1, 1.0, 10.0, _STARE, "W: weight of the selected tokens with advantage > 0"
    )
    stare_damp: float = _number(
        "stare.damp", 0.9, 0.0, 1.0, _STARE, "M: weight of the selected tokens with advantage < 0; 1: variant O1"
    )
    cw_width: float = _number(
        "cw.width", 1.0, 0.01, 100.0, "CW-GRPO, arXiv 2605.11538; factor: " + _OURS, "kernel width / spread of cov"
    )
    steer_lowest: float = _number("steer.lowest", 0.8, 0.01, 1.0, "STEER, arXiv 2510.10150", "smallest weight")
    opefo_limit: float = _number("opefo.limit", 0.1, 0.0, 0.99, "limit: " + _OURS, "largest |lambda|")
    high_entropy_share: float = _number(
        "high_entropy.share", 0.2, 1e-3, 1.0, "80/20, arXiv 2506.01939", "share of tokens that train"
    )
    lp_reg_fraction: float = _number(
        "lp_reg.fraction", 0.01, 1e-6, 1.0, "Lp-Reg, arXiv 2510.03222", "share of least probable A < 0 tokens dropped"
    )
    ratio_rule: str = _choice(
        "ratio_rule",
        ("dual_clip", "clip", "none", "ce_gppo", "gspo", "cispo"),
        "dual clip: arXiv 1912.09729; see the presets",
        "how the importance ratio enters; dual_clip is verl's",
    )
    clip_low: float | None = _number(
        "clip_low", None, 0.0, 1.0, _PPO, "lower clip distance; null keeps actor.clip_ratio_low"
    )
    clip_high: float | None = _number(
        "clip_high", None, 0.0, 10.0, _PPO, "upper clip distance; null keeps actor.clip_ratio_high"
    )
    ce_gppo_low: float = _number("ce_gppo.low", 0.5, 0.0, 10.0, _CE, "beta1: gradient kept below the clip range")
    ce_gppo_high: float = _number("ce_gppo.high", 1.0, 0.0, 10.0, _CE, "beta2: gradient kept above the clip range")
    extra_term: str = _choice(
        "extra_term", ("none", "kl_cov", "sent", "entropic"), "see the presets", "term added to the token loss"
    )
    kl_cov_ratio: float = _number(
        "kl_cov.ratio", 2e-3, 1e-8, 1.0, _COV, "share of response tokens that get the KL term (at least one)"
    )
    kl_cov_coef: float = _number("kl_cov.coef", 1.0, 0.0, 100.0, _COV, "coefficient of |log ratio|")
    entropic_kp: float = _number("entropic.kp", 3.0, 0.0, 1e3, _PIC + "; value: third party", "proportional gain")
    entropic_ki: float = _number("entropic.ki", 2e-3, 0.0, 1e2, _PIC + "; value: third party", "integral gain")
    entropic_probability: float = _number(
        "entropic.probability", 0.95, 0.0, 1.0, _PIC, "acts on tokens that are more probable than this"
    )
    aggregation: str = _choice(
        "aggregation",
        ("verl", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
        "verl; Dr.GRPO, arXiv 2503.20783",
        "token losses to one number; verl keeps actor.loss_agg_mode",
    )
    control_knob: str = _choice(
        "control.knob",
        ("none", "auto", *CONTROLLED),
        "see the presets",
        "number that is moved after each rollout batch; auto: the strength of the shaping, else of stare, else of "
        "kl_cov and sent, else positive_weight",
    )
    control_rule: str = _choice(
        "control.rule",
        ("natural", "additive", "multiplicative", "proportional"),
        "see the presets",
        "+- step; times or divided by a factor; step in proportion to the distance; natural: as published",
    )
    control_speed: float = _number(
        "control.speed", 1.0, 1e-3, 1e3, _OURS, "multiple of the published step; short runs need larger ones"
    )
    control_low: float | None = _number(
        "control.low", None, 0.0, 10.0, "see the presets", "smallest value; null: as published"
    )
    control_high: float | None = _number(
        "control.high", None, 0.0, 100.0, "see the presets", "largest value; null: as published, or 3 times the start"
    )
    target_entropy: float = _number("target.entropy", 0.3, 0.0, 20.0, _STARE, "of the controller and of stare's gate")
    target_end: float | None = _number(
        "target.end", None, 0.0, 20.0, _BAND, "target at the end, reached linearly; null: constant"
    )
    target_unit: str = _choice(
        "target.unit", ("nats", "h0"), _OURS, "unit of target and band; h0: multiples of the initial entropy"
    )
    target_h0: float | None = _number(
        "target.h0", None, 1e-6, 20.0, _OURS, "initial entropy in nats; null: that of the first rollout batch"
    )
    schedule_steps: float = _number(
        "schedule.steps", 0.0, 0.0, 1e7, _OURS, "rollout batches of the whole run; needed by what changes over it"
    )

    @property
    def advantage_is_off(self) -> bool:
        """True when the advantage is verl's own."""
        return (
            self.advantage_baseline == "mean"
            and self.advantage_std == "verl"
            and self.advantage_components is None
            and not self.uses_exact_token_entropy
        )

    @property
    def loss_is_off(self) -> bool:
        """True when the policy loss is verl's own."""
        return (
            self.clip_low is None
            and self.clip_high is None
            and self.positive_weight == 1.0
            and self.negative_weight == 1.0
            and self.positive_schedule == "constant"
            and self.sign_gate == "none"
            and self.shaping == "none"
            and self.token_rule == "none"
            and self.ratio_rule == "dual_clip"
            and self.extra_term == "none"
            and self.aggregation == "verl"
            and self.control_knob == "none"
        )

    @property
    def is_off(self) -> bool:
        """True when nothing differs from verl's own GRPO."""
        return self.advantage_is_off and self.loss_is_off

    @property
    def uses_exact_token_entropy(self) -> bool:
        """True when a part acts in the advantage because it needs the entropy of every token."""
        wanted = self.token_rule == "high_entropy" or self.shaping == "entropy_advantage"
        return wanted and self.token_entropy == "exact"

    @property
    def shapes_the_loss(self) -> bool:
        """True when a shaping acts in the loss, not in the advantage."""
        return self.shaping != "none" and not (self.shaping == "entropy_advantage" and self.token_entropy == "exact")

    @property
    def controlled(self) -> str:
        """The knob that the controller moves, with ``auto`` resolved; ``none`` without a controller."""
        if self.control_knob != "auto":
            return self.control_knob
        if self.shaping != "none":
            return "shaping.coef"
        if self.token_rule == "stare":
            return "stare"
        return "kl_cov.coef" if self.extra_term in ("kl_cov", "sent") else "positive_weight"

    @property
    def needs_schedule(self) -> bool:
        """True when something changes over the run, so that its length must be known."""
        return (
            self.positive_schedule != "constant"
            or (self.sign_gate == "band" and self.band_low_end not in (None, self.band_low))
            or (self.uses_target and self.target_end not in (None, self.target_entropy))
        )

    @property
    def uses_target(self) -> bool:
        """True when the target entropy has an effect."""
        return (
            self.controlled != "none"
            or self.token_rule == "stare"
            or self.extra_term == "entropic"
            or (self.shaping != "none" and self.shaping_below_target)
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
    if value is None and knob.kind.startswith("optional"):
        return None
    if knob.kind == "optional numbers":
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= 8:
            return f"{seen}; expected a list of 1 to 8 numbers or null"
        inner = Knob(knob.key, "number", None, knob.low, knob.high, (), knob.source, knob.meaning)
        return next((problem for item in value if (problem := _value_problem(inner, item))), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{seen}; expected {'a number or null' if knob.kind == 'optional number' else 'a number'}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{seen}; expected a finite number"
    if not knob.low <= value <= knob.high:
        return f"{seen}; expected a number in [{knob.low:g}, {knob.high:g}]"
    return None


def component_sums(components: tuple[float, ...]) -> list[float]:
    """The reward of every subset of components; subset i holds component k iff bit k of i is set."""
    return [
        sum(value for bit, value in enumerate(components) if subset >> bit & 1)
        for subset in range(2 ** len(components))
    ]


def _conflicts(configuration: OverlayConfiguration) -> list[str]:
    """Combinations of valid values that contradict each other."""
    c = configuration
    found: list[str] = []
    if c.controlled != "positive_weight" and c.positive_weight == 0.0 and c.negative_weight == 0.0:
        found.append("overlay knobs 'positive_weight' and 'negative_weight' are both 0; nothing is learnt")
    if c.positive_schedule != "constant" and c.controlled == "positive_weight":
        found.append("overlay knob 'positive_schedule' moves positive_weight, and so does 'control.knob'; keep one")
    if c.token_rule == "clip_cov" and c.clip_cov_lower >= c.clip_cov_upper:
        found.append(
            f"overlay knob 'clip_cov.lower' is {c.clip_cov_lower!r}; "
            f"expected less than 'clip_cov.upper' {c.clip_cov_upper!r}"
        )
    if c.needs_schedule and c.schedule_steps < 1:
        found.append("overlay knob 'schedule.steps' is 0; what changes over the run needs its number of steps")
    active = {
        "shaping.coef": c.shapes_the_loss,
        "stare": c.token_rule == "stare",
        "kl_cov.coef": c.extra_term in ("kl_cov", "sent"),
        "clip_high": c.clip_high is not None and c.ratio_rule != "none",
    }
    if not active.get(c.controlled, True):
        found.append(f"overlay knob 'control.knob' is {c.control_knob!r}; {c.controlled} has no effect or start value")
    if c.control_low is not None and c.control_high is not None and c.control_low > c.control_high:
        found.append(f"overlay knob 'control.low' is {c.control_low!r}; expected at most 'control.high'")
    if c.token_entropy == "exact" and not c.uses_exact_token_entropy:
        found.append("overlay knob 'token_entropy' is 'exact'; only high_entropy and entropy_advantage use it")
    if c.shaping_coef < 0.0 and c.shaping != "repo_r":
        found.append(f"overlay knob 'shaping.coef' is {c.shaping_coef!r}; only repo_r may be negative")
    return found + _component_conflicts(c)


def _component_conflicts(c: OverlayConfiguration) -> list[str]:
    if c.advantage_components is None:
        wrong = c.advantage_component_weights is not None
        return ["overlay knob 'advantage.component_weights' needs 'advantage.components'"] if wrong else []
    found: list[str] = []
    if c.advantage_baseline != "mean":
        found.append("overlay knob 'advantage.components' normalises each component; 'advantage.baseline' must be mean")
    weights = c.advantage_component_weights
    if weights is not None and len(weights) != len(c.advantage_components):
        found.append(
            f"overlay knob 'advantage.component_weights' has {len(weights)} numbers for "
            f"{len(c.advantage_components)} components"
        )
    sums = sorted(component_sums(c.advantage_components))
    if any(right - left < 1e-3 for left, right in pairwise(sums)):
        found.append(
            f"overlay knob 'advantage.components' is {list(c.advantage_components)!r}; two sets of components have "
            "the same sum, so that a reward does not tell them apart"
        )
    return found


def impossible_without_aggregation(configuration: OverlayConfiguration) -> list[str]:
    """Why a configuration cannot act in verl 0.3, which has no ``agg_loss``; empty when it can."""
    c = configuration
    found: list[str] = []
    if c.aggregation not in ("verl", "token-mean"):
        found.append(f"overlay knob 'aggregation' is {c.aggregation!r}; verl 0.3 always takes the token mean")
    if c.uses_exact_token_entropy:
        found.append("overlay knob 'token_entropy' is 'exact'; verl 0.3 computes no token entropies before the update")
    return found


def _build_configuration(values: Mapping[str, Any]) -> OverlayConfiguration:
    """The configuration of already checked values; integers become floats."""
    chosen: dict[str, Any] = {}
    for item in fields(OverlayConfiguration):
        knob: Knob = item.metadata["knob"]
        if knob.key in values:
            value = values[knob.key]
            if knob.kind == "optional numbers" and value is not None:
                value = tuple(float(number) for number in value)
            elif "number" in knob.kind and value is not None:
                value = float(value)
            chosen[item.name] = value
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
    except (ValueError, RecursionError) as error:
        raise OverlayError(
            f"{where} is not JSON: {text[:200]!r} ({error}). Set it to a JSON object such as {{}}."
        ) from error
    return parse_configuration(values, where)


def full_configuration(configuration: OverlayConfiguration) -> dict[str, Any]:
    """Every knob with its value, as the flat object that ``parse_configuration`` reads."""
    values = {item.metadata["knob"].key: getattr(configuration, item.name) for item in fields(OverlayConfiguration)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def canonical_json(configuration: OverlayConfiguration) -> str:
    """One text per configuration: every knob on its own line, sorted."""
    return json.dumps(full_configuration(configuration), sort_keys=True, indent=4, allow_nan=False)


def configuration_id(configuration: OverlayConfiguration) -> int:
    """A 24-bit fingerprint of the configuration; exact as a float32, so that a metric can carry it."""
    return int.from_bytes(hashlib.sha256(canonical_json(configuration).encode()).digest()[:3], "big")
