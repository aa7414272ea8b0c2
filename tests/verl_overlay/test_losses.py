"""The parts of the loss: closed forms by a second route, signs of the entropy effect, equality with verl, invariances."""

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from verl_overlay import losses  # noqa: E402
from verl_overlay.configuration import OverlayConfiguration, parse_configuration  # noqa: E402
from verl_overlay.control import ControlState  # noqa: E402
from verl_overlay.entry import Overlay  # noqa: E402
from verl_overlay.presets import PRESETS  # noqa: E402

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSS_PRESETS = [name for name, preset in PRESETS.items() if not parse_configuration(preset.complete(10.0)).loss_is_off]
CLIP = losses.ClipBounds(0.2, 0.2, 3.0)


@pytest.fixture(scope="module")
def core() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="module")
def actor_config(core: Any) -> Any:
    from verl.workers.config import ActorConfig

    def build(**values: Any) -> Any:
        return ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, **values)

    return build


def state_of(values: dict[str, Any] | None = None, batch_id: str | None = "one") -> ControlState:
    return ControlState(parse_configuration(values or {}), lambda: batch_id)


def preset_values(name: str) -> dict[str, Any]:
    """A preset's settings for small batches: shares and bounds that select something, a target that is not reached."""
    wide = {"clip_cov.ratio": 0.2, "clip_cov.lower": -1.0, "kl_cov.ratio": 0.2, "lp_reg.fraction": 0.3}
    wide |= {"target.entropy": 9.0, "target.unit": "nats", "entropic.probability": 0.3}
    return PRESETS[name].complete(10.0) | wide


def token_sum(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, **_: Any) -> Any:
    return (loss_mat * loss_mask).sum()


def batch(seed: int = 0, rows: int = 6, width: int = 9, drift: float = 0.4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator) * 3
    new = old + drift * torch.randn(rows, width, generator=generator)
    new = new.clamp(max=-1e-3) if drift < 1.0 else new  # larger drifts are hostile on purpose
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous()
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width)[None] < lengths
    return {"old_log_prob": old, "log_prob": new, "advantages": advantages, "response_mask": mask}


def evaluate(function: Any, inputs: dict[str, Any], **more: Any) -> tuple[Any, Any, dict[str, Any]]:
    leaf = inputs["log_prob"].clone().requires_grad_()
    loss, metrics = function(**{**inputs, "log_prob": leaf}, **more)
    loss.backward()
    return loss.detach(), leaf.grad, metrics


def composed(inputs: dict[str, Any], values: dict[str, Any], **more: Any) -> tuple[Any, Any, dict[str, Any]]:
    more = {"loss_agg_mode": "token-mean", "clip": CLIP, "batch_info": {}, "aggregate": token_sum} | more
    more.setdefault("state", state_of(values))
    return evaluate(losses.composed_policy_loss, inputs, **more)


def close(seen: Any, expected: Any) -> None:
    torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)


# ---- equality with verl ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("known_batch", [False, True])
def test_off_is_bit_identical_to_vanilla_and_the_composition_equal(
    core: Any, actor_config: Any, mode: str, importance: bool, known_batch: bool
) -> None:
    info = {"dp_size": 2, "batch_num_tokens": 71, "global_batch_size": 12, "loss_scale_factor": None}
    for seed, drift in itertools.product(range(3), (0.0, 0.4, 30.0)):
        inputs = batch(seed, drift=drift)
        config = actor_config(clip_ratio_high=0.28)
        config.global_batch_info.update(info if known_batch else {})
        weights = torch.rand_like(inputs["advantages"]) if importance else None
        more = {"loss_agg_mode": mode, "config": config, "rollout_is_weights": weights}
        vanilla = evaluate(core.compute_policy_loss_vanilla, inputs, **more)

        def overlay(values: dict[str, Any]) -> Any:
            return Overlay(state_of(values), core.compute_policy_loss_vanilla, None, core.agg_loss).loss_registry

        loss, gradient, metrics = evaluate(overlay({}), inputs, **more)
        assert torch.equal(loss, vanilla[0]) and torch.equal(gradient, vanilla[1])
        assert {key: metrics[key] for key in vanilla[2]} == vanilla[2]
        loss, gradient, metrics = evaluate(overlay({"clip_high": 0.28}), inputs, **more)
        torch.testing.assert_close(loss, vanilla[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(gradient, vanilla[1], rtol=1e-6, atol=1e-7)
        assert {key: metrics[key] for key in vanilla[2]} == pytest.approx(vanilla[2], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_clip_cov_equals_verl(core: Any, actor_config: Any, mode: str, seed: int) -> None:
    from verl.workers.config import PolicyLossConfig

    inputs = batch(seed, rows=40, width=30)
    config = actor_config(policy_loss=PolicyLossConfig(clip_cov_ratio=0.01, clip_cov_lb=0.2, clip_cov_ub=4.0))
    torch.manual_seed(seed)
    expected = evaluate(core.compute_policy_loss_clip_cov, inputs, loss_agg_mode=mode, config=config)
    torch.manual_seed(seed)
    values = {"clip_cov.ratio": 0.01, "clip_cov.lower": 0.2, "clip_cov.upper": 4.0}
    values = dict(PRESETS["clip_cov"].settings) | values
    loss, gradient, metrics = composed(inputs, values, aggregate=core.agg_loss, loss_agg_mode=mode)
    close(loss, expected[0])
    close(gradient, expected[1])
    assert metrics["overlay/reweighted_share"] == pytest.approx(expected[2]["actor/pg_clipfrac"], abs=1e-6)
    assert metrics["overlay/reweighted_share"] > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_kl_cov_equals_verl(core: Any, actor_config: Any, mode: str, seed: int) -> None:
    from verl.workers.config import PolicyLossConfig

    inputs = batch(seed, rows=40, width=30)
    config = actor_config(policy_loss=PolicyLossConfig(kl_cov_ratio=0.02, ppo_kl_coef=0.7))
    weights = torch.rand_like(inputs["advantages"])
    more = {"loss_agg_mode": mode, "rollout_is_weights": weights}
    expected = evaluate(core.compute_policy_loss_kl_cov, inputs, config=config, **more)
    values = dict(PRESETS["kl_cov"].settings) | {"kl_cov.ratio": 0.02, "kl_cov.coef": 0.7}
    loss, gradient, metrics = composed(inputs, values, aggregate=core.agg_loss, **more)
    close(loss, expected[0])
    close(gradient, expected[1])
    tokens = int(inputs["response_mask"].sum())
    assert metrics["overlay/reweighted_share"] == pytest.approx(int(tokens * 0.02) / tokens, abs=1e-6)


@pytest.mark.parametrize("name", ["gspo", "cispo"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_gspo_and_cispo_equal_verl(core: Any, actor_config: Any, name: str, mode: str, seed: int) -> None:
    inputs = batch(seed, rows=20, width=15)
    preset = dict(PRESETS[name].settings) | {"aggregation": "verl"}
    config = actor_config(clip_ratio_low=preset["clip_low"], clip_ratio_high=preset["clip_high"])
    weights = torch.rand_like(inputs["advantages"])
    more = {"loss_agg_mode": mode, "rollout_is_weights": weights}
    expected = evaluate(getattr(core, f"compute_policy_loss_{name}"), inputs, config=config, **more)
    loss, gradient, metrics = composed(inputs, preset, aggregate=core.agg_loss, **more)
    close(loss, expected[0])
    close(gradient, expected[1])
    assert {key: metrics[key] for key in expected[2]} == pytest.approx(expected[2], rel=1e-5, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] > 0


def test_dr_grpo_aggregates_as_verl(core: Any, actor_config: Any) -> None:
    inputs, config = batch(3), actor_config()
    expected = evaluate(
        core.compute_policy_loss_vanilla, inputs, config=config, loss_agg_mode="seq-mean-token-sum-norm"
    )
    loss, gradient, _ = composed(inputs, dict(PRESETS["dr_grpo"].settings), aggregate=core.agg_loss)
    close(loss, expected[0])
    close(gradient, expected[1])


def test_metrics_survive_verls_reduction(core: Any) -> None:
    from verl.utils.metric import AggregationType, Metric, reduce_metrics

    for name in LOSS_PRESETS:
        state = state_of(preset_values(name))
        per_call = []
        for _ in range(2):
            _, _, metrics = composed(batch(1), {}, state=state, aggregate=core.agg_loss)
            assert all(type(value) is float and math.isfinite(value) for value in metrics.values()), name
            assert not [key for key in metrics if "max" in key or "min" in key]
            per_call.append(Metric.from_dict(metrics, aggregation=AggregationType.MEAN))
        assert per_call[0].keys() == per_call[1].keys()
        for key, metric in per_call[0].items():
            metric.extend(per_call[1][key])
        reduced = reduce_metrics(dict(per_call[0]))
        assert reduced["overlay/entropy_exact"] == 0.0 and reduced["overlay/entropy_estimate"] > 0


# ---- closed forms, token by token in plain Python ----


def reference(inputs: dict[str, Any], name: str, values: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Token losses and their derivatives by the log-probability, straight from the papers' formulas."""
    c = parse_configuration(values)
    rows, width = inputs["old_log_prob"].shape
    places = [(i, t) for i in range(rows) for t in range(width) if inputs["response_mask"][i, t]]
    o = [float(inputs["old_log_prob"][p]) for p in places]
    ln = [float(inputs["log_prob"][p]) for p in places]
    a = [float(inputs["advantages"][p]) for p in places]
    n = len(places)
    r = [math.exp(x - y) for x, y in zip(ln, o, strict=True)]
    entropy = -sum(o) / n
    mean_a, mean_l = sum(a) / n, sum(ln) / n
    cov = [(x - mean_a) * (y - mean_l) for x, y in zip(a, ln, strict=True)]
    low = 0.2 if c.clip_low is None else c.clip_low
    high = 0.2 if c.clip_high is None else c.clip_high

    def ppo(adv: list[float], dual: bool = True) -> tuple[list[float], list[float]]:
        loss, slope = [], []
        for x, y in zip(adv, r, strict=True):
            free, limited = -x * y, -x * min(max(y, 1 - low), 1 + high)
            value, derivative = (free, free) if free >= limited else (limited, 0.0)
            if dual and x < 0 and value > -3.0 * x:
                value, derivative = -3.0 * x, 0.0
            loss.append(value)
            slope.append(derivative)
        return loss, slope

    def weighted(weights: list[float]) -> tuple[list[float], list[float]]:
        loss, slope = ppo(a)
        return [w * x for w, x in zip(weights, loss, strict=True)], [w * x for w, x in zip(weights, slope, strict=True)]

    def most_surprising(group: list[int], fraction: float) -> set[int]:
        return set(sorted(group, key=lambda i: ln[i])[: max(1, math.ceil(fraction * len(group)))]) if group else set()

    s = [min(-x, 10.0) for x in o]
    positive, negative = [i for i in range(n) if a[i] > 0], [i for i in range(n) if a[i] < 0]
    if name == "bonus":
        return ppo([x + c.shaping_coef * (y - entropy) for x, y in zip(a, s, strict=True)])
    if name == "repo_r":
        shaped = [x + c.shaping_coef * abs(x) * y for x, y in zip(a, s, strict=True)]
        return ppo([max(0.0, y) if x > 0 else min(0.0, y) for x, y in zip(a, shaped, strict=True)])
    if name == "surprisal_advantage":
        return ppo([x + min(c.shaping_coef * y, abs(x) / c.shaping_kappa) for x, y in zip(a, s, strict=True)])
    if name == "progrpo":
        confidence = {}
        for row in {p[0] for p in places}:
            probabilities = sorted(math.exp(o[i]) for i in range(n) if places[i][0] == row)
            k = math.ceil(c.shaping_share * len(probabilities))
            confidence[row] = sum(probabilities[:k]) / k
        centre = sum(confidence.values()) / len(confidence)
        shift = [c.shaping_coef * (confidence[p[0]] - centre) if x > 0 else 0.0 for p, x in zip(places, a, strict=True)]
        return ppo([x - y for x, y in zip(a, shift, strict=True)])
    if name in ("stare", "lp_reg"):
        fraction = c.stare_fraction if name == "stare" else c.lp_reg_fraction
        up, down = (c.stare_amplify, c.stare_damp) if name == "stare" else (1.0, 0.0)
        first, second = most_surprising(positive, fraction), most_surprising(negative, fraction)
        return weighted([up if i in first else down if i in second else 1.0 for i in range(n)])
    if name == "high_surprisal":
        kept = most_surprising(list(range(n)), c.high_entropy_share)
        return weighted([n / len(kept) if i in kept else 0.0 for i in range(n)])
    if name == "cw":
        mean_c = sum(cov) / n
        variance = sum((x - mean_c) ** 2 for x in cov) / n * c.cw_width**2
        kernel = [math.exp(-(x**2) / (2 * variance)) for x in cov]
        return weighted([x / (sum(kernel) / n) for x in kernel])
    if name == "steer":
        omega = [abs(x * y * (1 - math.exp(z)) ** 2 * (z + entropy)) for x, y, z in zip(a, r, ln, strict=True)]
        k = -math.log(c.steer_lowest) / max(max(omega), 0.02)
        return weighted([math.exp(-k * x) for x in omega])
    if name == "opefo":
        delta = [-x * math.exp(y) * (y + entropy) for x, y in zip(a, ln, strict=True)]
        rise, fall = sum(x for x in delta if x > 0), -sum(x for x in delta if x < 0)
        lam = max(-c.opefo_limit, min(c.opefo_limit, (fall - rise) / (fall + rise)))
        return weighted([1 + lam if x > 0 else 1 - lam if x < 0 else 1.0 for x in delta])
    if name == "ce_gppo":
        effective = [
            c.ce_gppo_low * (1 - low) if x < 0 and y < 1 - low else c.ce_gppo_high * (1 + high) if x > 0 and y > 1 + high
            else y for x, y in zip(a, r, strict=True)
        ]  # fmt: skip
        both = [-x * y for x, y in zip(a, effective, strict=True)]
        return both, both
    if name == "gspo":
        ratio = {}
        for row in {p[0] for p in places}:
            mine = [x - y for x, y, p in zip(ln, o, places, strict=True) if p[0] == row]
            ratio[row] = math.exp(sum(mine) / len(mine))
        r[:] = [ratio[p[0]] for p in places]
        return ppo(a, dual=False)
    if name == "cispo":
        slope = [-min(max(y, 1 - low), 1 + high) * x for x, y in zip(a, r, strict=True)]
        return [x * y for x, y in zip(slope, ln, strict=True)], slope
    if name in ("kl_cov", "sent"):
        pool = [i for i in range(n) if name == "kl_cov" or -ln[i] < entropy]
        chosen = set(sorted(pool, key=lambda i: -cov[i])[: max(1, int(c.kl_cov_ratio * n))])
        loss, slope = ppo(a) if name == "sent" else ([-x * y for x, y in zip(a, r, strict=True)],) * 2
        loss = [x + (c.kl_cov_coef * abs(ln[i] - o[i]) if i in chosen else 0.0) for i, x in enumerate(loss)]
        signs = [math.copysign(c.kl_cov_coef, ln[i] - o[i]) if i in chosen else 0.0 for i in range(n)]
        return loss, [x + y for x, y in zip(slope, signs, strict=True)]
    assert name == "entropic"
    coefficient = max(-1.0, min(1.0, c.entropic_kp * (entropy - c.target_entropy)))
    term = [-coefficient * y * abs(x) if z > math.log(c.entropic_probability) else 0.0
            for x, y, z in zip(a, r, ln, strict=True)]  # fmt: skip
    loss, slope = ppo(a)
    return [x + y for x, y in zip(loss, term, strict=True)], [x + y for x, y in zip(slope, term, strict=True)]


REFERENCES: dict[str, dict[str, Any]] = {
    "bonus": {"shaping": "bonus", "shaping.coef": 0.2},
    "repo_r": {"shaping": "repo_r", "shaping.coef": 0.4},
    "surprisal_advantage": {"shaping": "entropy_advantage", "shaping.coef": 0.4},
    "progrpo": {"shaping": "progrpo", "shaping.coef": 0.7},
    "stare": {"token_rule": "stare", "stare.fraction": 0.3, "target.entropy": 9.0},
    "lp_reg": {"token_rule": "lp_reg", "lp_reg.fraction": 0.3, "clip_low": 1.0, "clip_high": 9.0},
    "high_surprisal": {"token_rule": "high_entropy", "clip_high": 0.28},
    "cw": {"token_rule": "cw", "cw.width": 1.3},
    "steer": {"token_rule": "steer"},
    "opefo": {"token_rule": "opefo", "opefo.limit": 0.3},
    "ce_gppo": {"ratio_rule": "ce_gppo", "ce_gppo.low": 0.4, "ce_gppo.high": 1.1},
    "gspo": {"ratio_rule": "gspo", "clip_low": 0.05, "clip_high": 0.08},
    "cispo": {"ratio_rule": "cispo", "clip_low": 1.0, "clip_high": 0.2},
    "kl_cov": {"extra_term": "kl_cov", "ratio_rule": "none", "kl_cov.ratio": 0.2, "kl_cov.coef": 0.5},
    "sent": {"extra_term": "sent", "kl_cov.ratio": 0.2, "kl_cov.coef": 0.5},
    "entropic": {"extra_term": "entropic", "entropic.probability": 0.5, "entropic.kp": 0.3, "target.entropy": 2.0},
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(5))
def test_every_method_equals_its_formula(name: str, seed: int) -> None:
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in batch(seed, 8, 11).items()}
    loss, slope = reference(inputs, name, REFERENCES[name])
    total, gradient, _ = composed(inputs, REFERENCES[name])
    mask = inputs["response_mask"]
    assert float(total) == pytest.approx(sum(loss), rel=1e-9)
    torch.testing.assert_close(gradient[mask], torch.tensor(slope, dtype=torch.float64), rtol=1e-7, atol=1e-9)
    assert (gradient[~mask] == 0).all()
    plain = composed(inputs, {"clip_high": 0.2})[1]
    assert not torch.allclose(gradient, plain)


@pytest.mark.parametrize(
    "values",
    [
        {"clip_high": 0.28},
        {"positive_weight": 0.3, "negative_weight": 1.7},
        {"clip_low": 0.05, "clip_high": 0.6, "ratio_rule": "clip"},
        *[REFERENCES[name] for name in ("bonus", "repo_r", "surprisal_advantage", "progrpo", "stare", "lp_reg")],
        *[REFERENCES[name] for name in ("high_surprisal", "kl_cov", "sent")],
        {"token_rule": "clip_cov", "clip_cov.ratio": 0.3, "clip_cov.lower": -1.0},
    ],
)
def test_gradient_of_the_logits_equals_finite_differences(values: dict[str, Any]) -> None:
    """For the methods without a stop-gradient on something smooth, on a tabular softmax policy."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 3, 4, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 4, (4, 3, 1), generator=generator)
    old = torch.log_softmax(logits, -1).gather(-1, tokens).squeeze(-1)
    old = old + 0.3 * torch.randn(4, 3, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.25], dtype=torch.float64)[:, None].expand(4, 3)
    mask = torch.ones(4, 3, dtype=torch.bool)

    def loss_of(table: Any) -> Any:
        torch.manual_seed(0)
        log_prob = torch.log_softmax(table, -1).gather(-1, tokens).squeeze(-1)
        arguments = (old, log_prob, advantages, mask, "token-mean", CLIP, {})
        return losses.composed_policy_loss(*arguments, state=state_of(values), aggregate=token_sum)[0]

    assert torch.autograd.gradcheck(loss_of, (logits.requires_grad_(),), eps=1e-7, atol=1e-5)


def test_sign_weights_scale_the_signed_parts_of_the_loss() -> None:
    inputs = batch(2)
    positive = composed(inputs, {"negative_weight": 0.0})[1]
    negative = composed(inputs, {"positive_weight": 0.0})[1]
    mixed = composed(inputs, {"positive_weight": 0.25, "negative_weight": 1.5})[1]
    torch.testing.assert_close(mixed, 0.25 * positive + 1.5 * negative)
    assert (positive[inputs["advantages"] < 0] == 0).all() and (negative[inputs["advantages"] > 0] == 0).all()
    weights = losses.sign_weights(torch.tensor([[2.0, 0.0, -3.0]]), 0.25, 1.5)
    assert weights.tolist() == [[0.25, 1.0, 1.5]]


def test_clip_cov_draws_its_share_among_the_candidates_only() -> None:
    inputs = batch(1, 20, 20)
    values = {"token_rule": "clip_cov", "ratio_rule": "clip", "clip_cov.ratio": 0.05, "clip_cov.lower": 0.1}
    plain = composed(inputs, {"ratio_rule": "clip"})[1]
    gradient = composed(inputs, values)[1]
    dropped = (gradient == 0) & (plain != 0)
    assert int(dropped.sum()) == int(0.05 * int(inputs["response_mask"].sum()))
    assert torch.equal(gradient[~dropped], plain[~dropped])
    a, log_prob = inputs["advantages"], inputs["log_prob"]
    mask = inputs["response_mask"]
    covariance = (a - a[mask].mean()) * (log_prob - log_prob[mask].mean())
    assert (covariance[dropped] > 0.1).all() and (covariance[dropped] < 5.0).all()


def test_stare_acts_only_below_its_target() -> None:
    inputs = batch(0)
    surprisal = -inputs["old_log_prob"][inputs["response_mask"]].mean().item()
    for target, acts in ((surprisal + 0.01, True), (surprisal - 0.01, False)):
        _, _, metrics = composed(inputs, {"token_rule": "stare", "target.entropy": target})
        assert (metrics["overlay/reweighted_share"] > 0) is acts
        assert metrics["overlay/entropy_estimate"] == pytest.approx(surprisal, rel=1e-5)


def test_select_top_stays_within_its_group() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0], [3.0, 2.0, 9.0]])
    group = torch.tensor([[True, True, True], [True, True, False]])
    chosen = losses.select_top(values, group, 2)
    assert int(chosen.sum()) == 2 and (values[chosen] == 3.0).all()
    assert losses.select_top(values, group, 99).tolist() == group.tolist()
    assert not losses.select_top(values, group & False, 2).any()


def test_batch_share_adds_up_over_a_mini_batch() -> None:
    assert losses.batch_share(3, {"batch_num_tokens": 12, "dp_size": 2}) == pytest.approx(0.5)
    assert losses.batch_share(3, {}) == 1.0
    assert losses.batch_share(0, {"batch_num_tokens": 0, "dp_size": 2}) == 0.0


# ---- direction of the entropy effect, on the policy-gradient identity ----

SKEWED = [0.6, 0.25, 0.1, 0.05]


def entropy_change(values: dict[str, Any], rewards: list[float], ratios: list[float] | None = None) -> float:
    """First-order entropy change of one exact gradient step: every action once, as an answer of one token.

    ``dH = -eta Cov_{a~pi}(log pi, pi A)`` for a softmax policy; verified by the plain-GRPO case of the tests.

    Args:
        rewards: of each action; the advantage is the reward minus its expectation.
        ratios: pi / old policy of each action; all 1 on-policy.
    """
    logits = torch.log(torch.tensor(SKEWED, dtype=torch.float64)).requires_grad_()
    log_prob = torch.log_softmax(logits, -1)
    pi = log_prob.detach().exp()
    advantages = torch.tensor(rewards, dtype=torch.float64)
    advantages = advantages - (pi * advantages).sum()
    old = log_prob.detach() - torch.tensor(ratios or [1.0] * 4, dtype=torch.float64).log()

    def expectation(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, **_: Any) -> Any:
        return (old.exp() * loss_mat[:, 0]).sum()

    state = state_of(values)
    state.exact_entropy = float(-(pi * log_prob.detach()).sum())
    tensors = (old, log_prob, advantages, torch.ones(4, dtype=torch.bool))
    columns = [tensor[:, None] for tensor in tensors]
    loss, _ = losses.composed_policy_loss(*columns, "token-mean", CLIP, {}, state=state, aggregate=expectation)
    (step,) = torch.autograd.grad(-loss, logits)
    entropy_gradient = -pi * (log_prob.detach() + state.exact_entropy)
    return float((step * entropy_gradient).sum())


def test_plain_step_follows_the_covariance_identity() -> None:
    pi = torch.tensor(SKEWED, dtype=torch.float64)
    advantages = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    advantages = advantages - (pi * advantages).sum()
    log_pi, weighted = pi.log(), pi * advantages
    weighted = weighted - pi * weighted.sum()
    mean = (pi * log_pi).sum()
    expected = -float((pi * (log_pi - mean) * (weighted - (pi * weighted).sum())).sum())
    assert entropy_change({"clip_high": 0.2}, [1.0, 0.0, 1.0, 0.0]) == pytest.approx(expected, rel=1e-9)


LIKELY_RIGHT = [1.0, 0.0, 0.0, 0.0]
RARE_WRONG = [1.0, 1.0, 1.0, 0.0]
RARE_RIGHT = [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("weaker", "stronger", "rewards"),
    [
        ({"positive_weight": 2.0}, {"positive_weight": 1.0}, LIKELY_RIGHT),
        ({"positive_weight": 1.0}, {"positive_weight": 0.5}, LIKELY_RIGHT),
        ({"negative_weight": 1.0}, {"negative_weight": 0.3}, RARE_WRONG),
        ({"negative_weight": 0.3}, {"negative_weight": 1.0}, [0.0, 1.0, 1.0, 1.0]),
        (
            {"token_rule": "stare", "target.entropy": 9.0, "stare.fraction": 0.25},
            {"token_rule": "stare", "target.entropy": 9.0, "stare.fraction": 0.25, "stare.damp": 0.5},
            LIKELY_RIGHT,
        ),
        ({"shaping": "bonus", "shaping.coef": 0.01}, {"shaping": "bonus", "shaping.coef": 0.1}, LIKELY_RIGHT),
        ({"shaping": "repo_r", "shaping.coef": -0.05}, {"shaping": "repo_r", "shaping.coef": 0.05}, LIKELY_RIGHT),
        ({"shaping": "repo_r", "shaping.coef": 0.05}, {"shaping": "repo_r", "shaping.coef": 0.3}, RARE_WRONG),
        (
            {"shaping": "entropy_advantage", "shaping.coef": 0.01},
            {"shaping": "entropy_advantage", "shaping.coef": 0.3},
            LIKELY_RIGHT,
        ),
        ({"clip_high": 0.2}, {"token_rule": "lp_reg", "lp_reg.fraction": 0.3}, RARE_WRONG),
        ({"clip_high": 0.2}, {"token_rule": "opefo"}, LIKELY_RIGHT),
        ({"token_rule": "opefo", "opefo.limit": 0.1}, {"token_rule": "opefo", "opefo.limit": 0.5}, LIKELY_RIGHT),
        ({"clip_high": 0.2}, {"token_rule": "steer", "steer.lowest": 0.5}, LIKELY_RIGHT),
        ({"clip_high": 0.2}, {"token_rule": "cw"}, LIKELY_RIGHT),
        ({"clip_high": 0.2}, {"token_rule": "clip_cov", "clip_cov.ratio": 0.3, "clip_cov.lower": 0.5}, LIKELY_RIGHT),
        (
            {"extra_term": "entropic", "entropic.probability": 0.5, "target.entropy": 0.5},
            {"extra_term": "entropic", "entropic.probability": 0.5, "target.entropy": 2.0},
            LIKELY_RIGHT,
        ),
        ({"shaping": "progrpo", "shaping.coef": 0.1}, {"shaping": "progrpo", "shaping.coef": 0.5}, LIKELY_RIGHT),
        ({"clip_high": 0.2}, {"token_rule": "high_entropy", "high_entropy.share": 0.25}, RARE_RIGHT),
        ({"clip_high": 0.2}, {"sign_gate": "band", "band.low": 5.0}, LIKELY_RIGHT),
        ({"sign_gate": "band", "band.low": 0.0}, {"clip_high": 0.2}, [0.0, 1.0, 1.0, 1.0]),
    ],
)
def test_the_stronger_setting_keeps_more_entropy(
    weaker: dict[str, Any], stronger: dict[str, Any], rewards: list[float]
) -> None:
    assert entropy_change(weaker, rewards) < entropy_change(stronger, rewards)


@pytest.mark.parametrize(
    ("weaker", "stronger", "rewards", "ratios"),
    [
        # a rare correct answer already up by 30 %: clipped at 0.2, trained on at 0.4, by CISPO and by CE-GPPO
        ({"clip_high": 0.2}, {"clip_high": 0.4}, RARE_RIGHT, [1.0, 1.0, 1.0, 1.3]),
        ({"clip_high": 0.2}, {"ratio_rule": "cispo", "clip_low": 1.0}, RARE_RIGHT, [1.0, 1.0, 1.0, 1.3]),
        ({"ratio_rule": "ce_gppo", "ce_gppo.high": 0.2}, {"ratio_rule": "ce_gppo"}, RARE_RIGHT, [1.0, 1.0, 1.0, 1.3]),
        # a rare wrong one already down by 40 %: pushed further unless the lower clip is tight or beta1 small
        ({"clip_low": 0.5}, {"clip_low": 0.12}, RARE_WRONG, [1.0, 1.0, 1.0, 0.6]),
        ({"ratio_rule": "ce_gppo", "ce_gppo.low": 1.0}, {"ratio_rule": "ce_gppo"}, RARE_WRONG, [1.0, 1.0, 1.0, 0.6]),
        # a likely correct one on its way up is held back where covariance is highest
        (
            {"extra_term": "kl_cov", "kl_cov.coef": 0.1, "ratio_rule": "none"},
            {"extra_term": "kl_cov", "kl_cov.coef": 1.0, "ratio_rule": "none"},
            LIKELY_RIGHT,
            [1.1, 0.9, 0.9, 0.9],
        ),
        ({"extra_term": "sent", "kl_cov.coef": 0.1}, {"extra_term": "sent"}, LIKELY_RIGHT, [1.1, 0.9, 0.9, 0.9]),
        (
            {"ratio_rule": "gspo", "clip_high": 0.2},
            {"ratio_rule": "gspo", "clip_high": 0.4},
            RARE_RIGHT,
            [1, 1, 1, 1.3],
        ),
    ],
)
def test_off_policy_the_stronger_setting_keeps_more_entropy(
    weaker: dict[str, Any], stronger: dict[str, Any], rewards: list[float], ratios: list[float]
) -> None:
    assert entropy_change(weaker, rewards, ratios) < entropy_change(stronger, rewards, ratios)


def test_a_baseline_changes_the_variance_and_not_the_expected_entropy_change() -> None:
    """QAE's and Dr.GRPO's baselines in expectation: any constant gives the same exact step as the mean."""
    plain = entropy_change({"ratio_rule": "none"}, LIKELY_RIGHT)
    shifted = [reward + 0.7 for reward in LIKELY_RIGHT]
    assert entropy_change({"ratio_rule": "none"}, shifted) == pytest.approx(plain, rel=1e-9)


def test_the_bonus_is_the_gradient_of_the_entropy() -> None:
    """Without rewards the step is the entropy's own gradient times the coefficient: dH = coef |grad H|^2."""
    pi = torch.tensor(SKEWED, dtype=torch.float64)
    entropy = -(pi * pi.log()).sum()
    gradient = -pi * (pi.log() + entropy)
    change = entropy_change({"shaping": "bonus", "shaping.coef": 0.1}, [0.0] * 4)
    assert change == pytest.approx(0.1 * float((gradient**2).sum()), rel=1e-9)


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
def test_stare_raises_entropy_compared_with_plain(rewards: list[float]) -> None:
    stare = {"token_rule": "stare", "target.entropy": 9.0, "stare.fraction": 0.25}
    stronger = stare | {"stare.amplify": 1.4, "stare.damp": 0.6}
    plain = entropy_change({"clip_high": 0.2}, rewards)
    assert plain < entropy_change(stare, rewards) < entropy_change(stronger, rewards)


def test_confident_correct_answers_are_damped_by_progrpo() -> None:
    inputs = batch(3, 4, 5, drift=0.0)
    inputs["advantages"] = torch.ones(4, 5)
    inputs["response_mask"] = torch.ones(4, 5, dtype=torch.bool)
    inputs["old_log_prob"] = torch.log(torch.tensor([0.9, 0.7, 0.5, 0.3]))[:, None].expand(4, 5).contiguous()
    inputs["log_prob"] = inputs["old_log_prob"]
    gradient = composed(inputs, {"shaping": "progrpo", "shaping.coef": 0.5})[1]
    torch.testing.assert_close(gradient[:, 0], -1 + 0.5 * torch.tensor([0.3, 0.1, -0.1, -0.3]))


@pytest.mark.parametrize("name", LOSS_PRESETS)
def test_presets_are_inert_on_policy_exactly_where_they_say_so(name: str) -> None:
    inputs = batch(11, 12, 12, drift=0.0)
    values = preset_values(name) | {"control.knob": "none"}
    if name in ("skywork", "aer"):
        values["shaping.coef"] = 0.01  # starts from 0
    torch.manual_seed(0)
    gradient = composed(inputs, values)[1]
    plain = composed(inputs, {"clip_high": 0.2})[1]
    if name == "dr_grpo" or parse_configuration(values).uses_exact_token_entropy:
        assert torch.equal(gradient, plain)  # what differs is the aggregation, or the advantage
    else:
        assert torch.allclose(gradient, plain, rtol=1e-6) is PRESETS[name].inert_on_policy


# ---- invariances and hostile inputs ----


@pytest.mark.parametrize("name", LOSS_PRESETS)
def test_padding_never_matters(core: Any, name: str) -> None:
    inputs, values = batch(7), preset_values(name) | {"aggregation": "token-mean"}
    torch.manual_seed(1)
    plain = composed(inputs, values, aggregate=core.agg_loss)
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        padded = {}
        for key, value in inputs.items():
            if key == "response_mask":
                padded[key] = torch.nn.functional.pad(value, (0, 4), value=False)
            else:
                wide = torch.nn.functional.pad(value, (0, 4), value=garbage)
                mask = torch.nn.functional.pad(inputs["response_mask"], (0, 4), value=False)
                padded[key] = torch.where(mask, wide, torch.tensor(garbage))
        torch.manual_seed(1)
        loss, gradient, metrics = composed(padded, values, aggregate=core.agg_loss)
        torch.testing.assert_close(loss, plain[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient[:, :-4], plain[1], rtol=1e-5, atol=1e-6)
        assert (gradient[:, -4:] == 0).all()
        assert metrics == pytest.approx(plain[2], rel=1e-4, abs=1e-5)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(LOSS_PRESETS),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    mask_kind=st.sampled_from([torch.bool, torch.int64, torch.float32]),
    drift=st.sampled_from([0.0, 0.3, 50.0, 500.0, math.inf]),
    empty_rows=st.integers(0, 5),
    equal_rewards=st.booleans(),
    garbage=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 1000),
)
def test_hostile_inputs_stay_finite(
    core: Any,
    name: str,
    shape: tuple[int, int],
    kind: Any,
    mask_kind: Any,
    drift: float,
    empty_rows: int,
    equal_rewards: bool,
    garbage: float,
    mode: str,
    seed: int,
) -> None:
    inputs = batch(seed, *shape, drift=drift if math.isfinite(drift) else 0.3)
    if not math.isfinite(drift):
        inputs["log_prob"][0, 0] = -math.inf
    if equal_rewards:
        inputs["advantages"] = torch.zeros_like(inputs["advantages"])
    mask = inputs["response_mask"].clone()
    mask[:empty_rows] = False
    for key in ("old_log_prob", "log_prob", "advantages"):
        inputs[key] = torch.where(mask, inputs[key], torch.tensor(garbage)).to(kind)
    inputs["response_mask"] = mask.to(mask_kind)
    state = state_of(preset_values(name), batch_id=None)
    info = {"batch_num_tokens": 50, "global_batch_size": 8, "dp_size": 2}
    more = {"loss_agg_mode": mode, "aggregate": core.agg_loss, "batch_info": info, "state": state}
    for _ in range(2):
        state.begin_call()
        loss, gradient, metrics = composed(inputs, {}, **more)
        assert loss.dtype in (torch.float32, torch.float64)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all() or (kind == torch.float16 and drift > 1.0)  # exp(20) > 65504
        assert all(math.isfinite(value) for value in metrics.values())
        moving = (state.entropy_sum, state.positive, state.amplify, state.damp, state.coef, state.integral)
        assert all(math.isfinite(value) for value in moving)
        assert gradient.dtype == kind and (gradient[~mask] == 0).all()


def test_a_diverged_policy_stays_visible() -> None:
    inputs = batch(0)
    inputs["log_prob"][0, 0] = math.nan
    assert not torch.isfinite(composed(inputs, {"clip_high": 0.28})[0])


def test_forward_only_evaluation_leaves_the_state_alone() -> None:
    state = state_of({"token_rule": "stare"}, batch_id=None)
    with torch.no_grad():
        losses.composed_policy_loss(
            **batch(0), loss_agg_mode="x", clip=CLIP, batch_info={}, state=state, aggregate=token_sum
        )
    assert (state.calls, state.entropy, state.steps) == (0, None, 0.0)


def test_parts_compose() -> None:
    inputs = batch(4)
    stare = {"token_rule": "stare", "target.entropy": 9.0, "stare.fraction": 0.3}
    gradient = composed(inputs, stare)[1]
    both = composed(inputs, stare | {"positive_weight": 0.5, "negative_weight": 3.0})[1]
    positive = inputs["advantages"] > 0
    torch.testing.assert_close(both, torch.where(positive, 0.5 * gradient, 3.0 * gradient))
    inert = composed(inputs, stare | {"ratio_rule": "ce_gppo", "extra_term": "kl_cov", "kl_cov.coef": 0.0})[1]
    weights = composed(inputs, {"ratio_rule": "ce_gppo"})[1]
    changed = gradient / composed(inputs, {"clip_high": 0.2})[1]
    known = torch.isfinite(changed)
    torch.testing.assert_close(inert[known], (weights * changed)[known], rtol=1e-5, atol=1e-6)


def test_default_configuration_is_off() -> None:
    assert OverlayConfiguration().is_off
