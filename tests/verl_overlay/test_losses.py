"""The parts of the loss: closed forms, signs of the entropy effect, equality with verl, invariances."""

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from verl_overlay import losses  # noqa: E402
from verl_overlay.configuration import OverlayConfiguration, configuration_id, parse_configuration  # noqa: E402
from verl_overlay.control import ControlState  # noqa: E402

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
RULES = ["none", "clip_cov", "kl_cov", "stare"]


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


class Config(dict[str, Any]):
    """The little of an actor configuration that the composed loss reads."""

    clip_ratio, clip_ratio_low, clip_ratio_high = 0.2, None, None

    def __init__(self, **batch_info: Any) -> None:
        super().__init__()
        self.global_batch_info = batch_info


def token_sum(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, **_: Any) -> Any:
    return (loss_mat * loss_mask).sum()


def batch(seed: int = 0, rows: int = 6, width: int = 9, drift: float = 0.4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator) * 3
    new = old + drift * torch.randn(rows, width, generator=generator)
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
    more = {"loss_agg_mode": "token-mean", "config": Config(), "rollout_is_weights": None} | more
    more.setdefault("aggregate", token_sum)
    more.setdefault("state", state_of(values))
    return evaluate(losses.composed_policy_loss, inputs, **more)


# ---- equality with verl ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("known_batch", [False, True])
def test_off_is_bit_identical_to_vanilla(
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
        neutral = composed(inputs, {}, aggregate=core.agg_loss, **more)
        entry = evaluate(
            losses.overlay_policy_loss,
            inputs,
            state=state_of(),
            aggregate=core.agg_loss,
            vanilla=core.compute_policy_loss_vanilla,
            **more,
        )
        for loss, gradient, metrics in (neutral, entry):
            assert torch.equal(loss, vanilla[0])
            assert torch.equal(gradient, vanilla[1])
            assert {key: metrics[key] for key in vanilla[2]} == vanilla[2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_clip_cov_equals_verl(core: Any, actor_config: Any, mode: str, seed: int) -> None:
    from verl.workers.config import PolicyLossConfig

    inputs = batch(seed, rows=40, width=30)
    policy_loss = PolicyLossConfig(clip_cov_ratio=0.01, clip_cov_lb=0.2, clip_cov_ub=4.0)
    config = actor_config(policy_loss=policy_loss)
    more = {"loss_agg_mode": mode, "config": config, "rollout_is_weights": None}
    torch.manual_seed(seed)
    expected = evaluate(core.compute_policy_loss_clip_cov, inputs, **more)
    torch.manual_seed(seed)
    values = {
        "token_rule": "clip_cov",
        "clip_cov.ratio": 0.01,
        "clip_cov.lower": 0.2,
        "clip_cov.upper": 4.0,
    }
    loss, gradient, metrics = composed(inputs, values, aggregate=core.agg_loss, **more)
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-6, atol=1e-6)
    assert metrics["overlay/reweighted_share"] == pytest.approx(expected[2]["actor/pg_clipfrac"], abs=1e-6)
    assert metrics["overlay/reweighted_share"] > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_kl_cov_equals_verl(core: Any, actor_config: Any, mode: str, seed: int) -> None:
    from verl.workers.config import PolicyLossConfig

    inputs = batch(seed, rows=40, width=30)
    policy_loss = PolicyLossConfig(kl_cov_ratio=0.02, ppo_kl_coef=0.7)
    config = actor_config(policy_loss=policy_loss)
    weights = torch.rand_like(inputs["advantages"])
    more = {"loss_agg_mode": mode, "config": config, "rollout_is_weights": weights}
    expected = evaluate(core.compute_policy_loss_kl_cov, inputs, **more)
    values = {"token_rule": "kl_cov", "kl_cov.ratio": 0.02, "kl_cov.coef": 0.7}
    loss, gradient, metrics = composed(inputs, values, aggregate=core.agg_loss, **more)
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-6, atol=1e-6)
    tokens = int(inputs["response_mask"].sum())
    assert metrics["overlay/reweighted_share"] == pytest.approx(int(tokens * 0.02) / tokens, abs=1e-6)


def test_clip_overrides_equal_verl_with_those_settings(core: Any, actor_config: Any) -> None:
    inputs, more = batch(3), {"loss_agg_mode": "token-mean", "rollout_is_weights": None}
    wanted = actor_config(clip_ratio_low=0.1, clip_ratio_high=0.3)
    expected = evaluate(core.compute_policy_loss_vanilla, inputs, config=wanted, **more)
    values = {"clip_low": 0.1, "clip_high": 0.3}
    got = composed(inputs, values, aggregate=core.agg_loss, config=actor_config(), **more)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_metrics_survive_verls_reduction(core: Any) -> None:
    from verl.utils.metric import AggregationType, Metric, reduce_metrics

    inputs = batch(1)
    values = {"token_rule": "stare", "positive_control": "entropy_guided", "negative_weight": 0.5}
    state = state_of(values)
    per_call = []
    for _ in range(2):
        _, _, metrics = evaluate(
            losses.overlay_policy_loss,
            inputs,
            config=Config(batch_num_tokens=60, dp_size=1),
            state=state,
            aggregate=core.agg_loss,
            vanilla=core.compute_policy_loss_vanilla,
        )
        assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
        assert not [key for key in metrics if "max" in key or "min" in key]
        per_call.append(Metric.from_dict(metrics, aggregation=AggregationType.MEAN))
    assert per_call[0].keys() == per_call[1].keys()
    for key, metric in per_call[0].items():
        metric.extend(per_call[1][key])
    reduced = reduce_metrics(dict(per_call[0]))
    assert reduced["overlay/calls"] == 1.5
    assert reduced["overlay/configuration_id"] == configuration_id(parse_configuration(values))
    expected = {"positive_weight", "negative_weight", "stare_amplify", "stare_damp", "controller_steps"}
    assert {f"overlay/{name}" for name in expected} <= reduced.keys()


# ---- closed forms and finite differences on a tabular softmax policy ----


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"positive_weight": 0.3, "negative_weight": 1.7},
        {"clip_low": 0.05, "clip_high": 0.6},
        {"token_rule": "stare", "stare.fraction": 0.3, "stare.target_entropy": 9.0},
        {"token_rule": "kl_cov", "kl_cov.ratio": 0.2, "kl_cov.coef": 0.5},
        {"token_rule": "clip_cov", "clip_cov.ratio": 0.3, "clip_cov.lower": -1.0},
    ],
)
def test_gradient_of_the_logits_equals_finite_differences(values: dict[str, Any]) -> None:
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
        arguments = (old, log_prob, advantages, mask, "token-mean", Config(), None)
        return losses.composed_policy_loss(*arguments, state=state_of(values), aggregate=token_sum)[0]

    assert torch.autograd.gradcheck(loss_of, (logits.requires_grad_(),), eps=1e-7, atol=1e-5)


def test_sign_weights_scale_the_signed_parts_of_the_loss() -> None:
    inputs = batch(2)
    keep_positive, keep_negative = {"negative_weight": 0.0}, {"positive_weight": 0.0}
    positive = composed(inputs, keep_positive)[1]
    negative = composed(inputs, keep_negative)[1]
    mixed = composed(inputs, {"positive_weight": 0.25, "negative_weight": 1.5})[1]
    torch.testing.assert_close(mixed, 0.25 * positive + 1.5 * negative)
    weights = losses.sign_weights(torch.tensor([[2.0, 0.0, -3.0]]), 0.25, 1.5)
    assert weights.tolist() == [[0.25, 1.0, 1.5]]


def test_surrogate_and_dual_clip_closed_forms() -> None:
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0]])
    ratio = torch.tensor([[1.5, 0.5, 1.5, 0.5, 9.0]])
    token_losses, clipped = losses.clipped_surrogate(advantages, ratio, 0.2, 0.3)
    torch.testing.assert_close(token_losses, torch.tensor([[-1.3, -0.5, 1.5, 0.8, 9.0]]))
    assert clipped.tolist() == [[True, False, False, True, False]]
    bounded, acts = losses.dual_clip(advantages, token_losses, 3.0)
    torch.testing.assert_close(bounded, torch.tensor([[-1.3, -0.5, 1.5, 0.8, 3.0]]))
    assert acts.tolist() == [[False, False, False, False, True]]


def test_stare_selects_the_most_surprising_tokens_of_each_sign() -> None:
    log_prob = torch.log(torch.tensor([[0.9, 0.1, 0.5, 0.4], [0.2, 0.8, 0.05, 0.6]]))
    advantages = torch.tensor([[1.0] * 4, [-1.0] * 4])
    mask = torch.tensor([[True] * 4, [True, True, False, True]])
    on, off = torch.tensor(True), torch.tensor(False)
    weights = losses.stare_weights(advantages, log_prob, mask, on, 1.5, 0.5, 0.5)
    assert weights.tolist() == [[1.0, 1.5, 1.0, 1.5], [0.5, 1.0, 1.0, 0.5]]
    one_each = losses.stare_weights(advantages, log_prob, mask, on, 1.5, 0.5, 0.01)
    assert one_each.tolist() == [[1.0, 1.5, 1.0, 1.0], [0.5, 1.0, 1.0, 1.0]]
    assert (losses.stare_weights(advantages, log_prob, mask, off, 1.5, 0.5, 0.5) == 1).all()


def test_stare_gate_follows_the_surprisal_estimate() -> None:
    inputs = batch(0)
    surprisal = -inputs["old_log_prob"][inputs["response_mask"]].mean().item()
    for target, acts in ((surprisal + 0.01, True), (surprisal - 0.01, False)):
        _, _, metrics = composed(inputs, {"token_rule": "stare", "stare.target_entropy": target})
        assert (metrics["overlay/reweighted_share"] > 0) is acts
        assert metrics["overlay/entropy_estimate"] == pytest.approx(surprisal, rel=1e-5)


def test_select_top_takes_the_earlier_of_equal_values() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0], [3.0, 2.0, 9.0]])
    group = torch.tensor([[True, True, True], [True, True, False]])
    chosen = losses.select_top(values, group, torch.tensor(2.0))
    assert chosen.tolist() == [[False, True, True], [False, False, False]]
    assert losses.select_top(values, group, torch.tensor(99.0)).tolist() == group.tolist()


def test_blended_entropy_is_a_bias_corrected_average_with_half_life_one_mini_batch() -> None:
    value, weight = losses.blended_entropy(0.0, 0.0, torch.tensor(0.7), torch.tensor(0.25))
    assert float(value / weight) == pytest.approx(0.7)
    for _ in range(4):
        value, weight = losses.blended_entropy(float(value), float(weight), torch.tensor(0.0), torch.tensor(0.25))
    first = 1 - 2**-0.25
    assert float(value) == pytest.approx(0.7 * first / 2)
    assert float(weight) == pytest.approx(1 - 2**-1.25)


def test_batch_share_adds_up_over_a_mini_batch() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert float(losses.batch_share(mask, {"batch_num_tokens": 12, "dp_size": 2})) == pytest.approx(0.5)
    assert float(losses.batch_share(mask, {})) == 1.0
    assert float(losses.batch_share(mask & False, {"batch_num_tokens": 0, "dp_size": 2})) == 0.0


# ---- direction of the entropy effect, on the policy-gradient identity ----


def entropy_change(values: dict[str, Any], probabilities: list[float], rewards: list[float]) -> float:
    """First-order entropy change of one exact gradient step: every action once, advantage times probability.

    ``dH = -eta Cov_{a~pi}(log pi, pi A)`` for a softmax policy; verified by the plain-GRPO case of the tests.
    """
    logits = torch.log(torch.tensor([probabilities], dtype=torch.float64)).requires_grad_()
    log_prob = torch.log_softmax(logits, -1)
    pi = log_prob.detach().exp()
    advantages = torch.tensor([rewards], dtype=torch.float64)
    advantages = advantages - (pi * advantages).sum()
    mask = torch.ones_like(pi, dtype=torch.bool)

    def expectation(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, **_: Any) -> Any:
        return (pi * loss_mat).sum()

    arguments = (log_prob.detach(), log_prob, advantages, mask, "token-mean", Config(), None)
    loss, _ = losses.composed_policy_loss(*arguments, state=state_of(values), aggregate=expectation)
    (step,) = torch.autograd.grad(-loss, logits)
    entropy_gradient = -pi * (log_prob.detach() + (-pi * log_prob.detach()).sum())
    return float((step * entropy_gradient).sum())


def test_plain_step_follows_the_covariance_identity() -> None:
    pi = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    advantages = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    advantages = advantages - (pi * advantages).sum()
    log_pi, weighted = pi.log(), pi * advantages
    weighted = weighted - pi * weighted.sum()
    mean = (pi * log_pi).sum()
    expected = -float((pi * (log_pi - mean) * (weighted - (pi * weighted).sum())).sum())
    got = entropy_change({}, pi.tolist(), [1.0, 0.0, 1.0, 0.0])
    assert got == pytest.approx(expected, rel=1e-9)


def test_likely_correct_actions_lower_entropy_and_sign_weights_counter_it() -> None:
    pi, rewards = [0.6, 0.25, 0.1, 0.05], [1.0, 0.0, 0.0, 0.0]
    plain = entropy_change({}, pi, rewards)
    assert plain < 0
    assert plain < entropy_change({"positive_weight": 0.5}, pi, rewards)
    assert plain > entropy_change({"positive_weight": 2.0}, pi, rewards)


def test_negative_weight_acts_on_the_negative_part() -> None:
    likely_wrong = ([0.6, 0.25, 0.1, 0.05], [0.0, 1.0, 1.0, 1.0])
    rare_wrong = ([0.6, 0.25, 0.1, 0.05], [1.0, 1.0, 1.0, 0.0])
    more, plain = {"negative_weight": 2.0}, dict[str, Any]()
    assert entropy_change(more, *likely_wrong) > entropy_change(plain, *likely_wrong)
    assert entropy_change(more, *rare_wrong) < entropy_change(plain, *rare_wrong)


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
def test_stare_raises_entropy_compared_with_plain(rewards: list[float]) -> None:
    pi = [0.6, 0.25, 0.1, 0.05]
    stare = {"token_rule": "stare", "stare.target_entropy": 9.0, "stare.fraction": 0.25}
    stronger = stare | {"stare.amplify": 1.4, "stare.damp": 0.6}
    plain = entropy_change({}, pi, rewards)
    assert plain < entropy_change(stare, pi, rewards) < entropy_change(stronger, pi, rewards)


# ---- invariances and hostile inputs ----


@pytest.mark.parametrize("rule", RULES)
def test_padding_never_matters(core: Any, rule: str) -> None:
    inputs = batch(7)
    values = {"token_rule": rule, "positive_weight": 0.5, "stare.target_entropy": 9.0, "clip_cov.lower": -1.0}
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
        torch.testing.assert_close(loss, plain[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(gradient[:, :-4], plain[1], rtol=1e-6, atol=1e-7)
        assert (gradient[:, -4:] == 0).all()
        assert metrics == pytest.approx(plain[2], rel=1e-5, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    mask_kind=st.sampled_from([torch.bool, torch.int64, torch.float32]),
    drift=st.sampled_from([0.0, 0.3, 50.0, 500.0]),
    empty_rows=st.integers(0, 5),
    garbage=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 1000),
)
def test_hostile_inputs_stay_finite(
    core: Any,
    rule: str,
    shape: tuple[int, int],
    kind: Any,
    mask_kind: Any,
    drift: float,
    empty_rows: int,
    garbage: float,
    mode: str,
    seed: int,
) -> None:
    inputs = batch(seed, *shape, drift=drift)
    mask = inputs["response_mask"].clone()
    mask[:empty_rows] = False
    for key in ("old_log_prob", "log_prob", "advantages"):
        inputs[key] = torch.where(mask, inputs[key], torch.tensor(garbage)).to(kind)
    inputs["response_mask"] = mask.to(mask_kind)
    values = {
        "token_rule": rule,
        "positive_control": "entropy_guided",
        "clip_cov.lower": -5.0,
        "stare.target_entropy": 9.0,
    }
    state = state_of(values, batch_id=None)
    info = {"batch_num_tokens": 50, "global_batch_size": 8, "dp_size": 2}
    more = {"loss_agg_mode": mode, "aggregate": core.agg_loss, "config": Config(**info), "state": state}
    loss, gradient, metrics = composed(inputs, values, **more)
    assert loss.dtype in (torch.float32, torch.float64)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all() or (kind == torch.float16 and drift > 1.0)  # exp(20) > 65504
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(math.isfinite(value) for value in (state.entropy_sum, state.positive_weight, state.amplify))
    assert gradient.dtype == kind and (gradient[~mask] == 0).all()


def test_forward_only_evaluation_leaves_the_state_alone() -> None:
    inputs = batch(0)
    state = state_of({"token_rule": "stare"}, batch_id=None)
    with torch.no_grad():
        losses.overlay_policy_loss(
            **inputs, config=Config(), state=state, aggregate=token_sum, vanilla=losses.composed_policy_loss
        )
    assert (state.calls, state.entropy, state.steps) == (0, None, 0.0)


def test_parts_compose() -> None:
    inputs = batch(4)
    stare = {"token_rule": "stare", "stare.target_entropy": 9.0, "stare.fraction": 0.3}
    gradient = composed(inputs, stare)[1]
    both = composed(inputs, stare | {"positive_weight": 0.5, "negative_weight": 3.0})[1]
    positive = inputs["advantages"] > 0
    torch.testing.assert_close(both, torch.where(positive, 0.5 * gradient, 3.0 * gradient))


def test_default_configuration_is_off() -> None:
    assert OverlayConfiguration().is_off
