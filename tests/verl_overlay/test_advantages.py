"""The advantage: equality with verl's own, closed forms, GDPO's decoding, groups of every kind."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from verl_overlay.advantages import decoded_components, group_advantages, whitened, with_token_entropy  # noqa: E402
from verl_overlay.configuration import OverlayError, check_configuration, parse_configuration  # noqa: E402


@pytest.fixture(scope="module")
def core() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos")


def batch(seed: int, groups: int = 5, size: int = 8, width: int = 6, values: Any = None) -> dict[str, Any]:
    """Responses of mixed length whose reward stands on the last token, groups interleaved."""
    generator = torch.Generator().manual_seed(seed)
    rows = groups * size
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width)[None] < lengths[:, None]).long()
    choices = torch.tensor(values or [0.0, 1.0])
    scores = choices[torch.randint(0, len(choices), (rows,), generator=generator)]
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), lengths - 1] = scores
    index = np.array([f"prompt-{i % groups}" for i in range(rows)], dtype=object)
    return {"token_level_rewards": rewards, "response_mask": mask, "index": index}


def advantages(inputs: dict[str, Any], values: dict[str, Any], **more: Any) -> Any:
    return group_advantages(**inputs, **more, configuration=parse_configuration(values))


def close(seen: Any, expected: Any) -> None:
    torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_and_dr_grpo_equal_verl(core: Any, seed: int, by_std: bool) -> None:
    for size in (1, 2, 8):
        inputs = batch(seed, size=size, values=[0.0, 0.1, 1.0, 1.1])
        expected, _ = core.compute_grpo_outcome_advantage(**inputs, norm_adv_by_std_in_grpo=by_std)
        close(advantages(inputs, {}, normalise_std=by_std), expected)
        close(advantages(inputs, {"advantage.std": "on" if by_std else "off"}, normalise_std=not by_std), expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 2.0]])
def test_gdpo_equals_verl_fed_with_the_components(core: Any, seed: int, weights: list[float] | None) -> None:
    components = [1.0, 0.25, 0.1]
    generator = torch.Generator().manual_seed(seed)
    present = torch.randint(0, 2, (40, 3), generator=generator).float()
    parts = present * torch.tensor(components)
    inputs = batch(seed)
    last = inputs["response_mask"].sum(-1) - 1
    inputs["token_level_rewards"] = torch.zeros(40, 6)
    inputs["token_level_rewards"][torch.arange(40), last] = parts.sum(-1)
    names = ["a", "b", "c"]
    config = {"gdpo_reward_keys": names, "gdpo_reward_weights": weights}
    tensors = {
        "prompts": torch.zeros(40, 2),
        "attention_mask": torch.cat([torch.ones(40, 2).long(), inputs["response_mask"]], 1),
    }
    expected, _ = core.compute_gdpo_outcome_advantage(
        **inputs, config=config, non_tensor_batch=dict(zip(names, parts.T.numpy(), strict=True)), batch=tensors
    )
    values: dict[str, Any] = {"advantage.components": components, "advantage.component_weights": weights}
    close(advantages(inputs, values), expected)


def test_quantile_baseline_is_a_reward_that_somebody_got() -> None:
    """Eight answers, K = 0.4: the 4th smallest reward; an interpolated quantile would give .8 at 5 of 8 right."""
    for right, baseline in ((4, 0.0), (5, 1.0), (3, 0.0), (8, 1.0), (0, 0.0)):
        scores = torch.tensor([1.0] * right + [0.0] * (8 - right))
        inputs = {"token_level_rewards": scores[:, None], "response_mask": torch.ones(8, 1), "index": np.zeros(8)}
        got = advantages(inputs, {"advantage.baseline": "quantile"})[:, 0]
        std = scores.std() + 1e-6
        close(got, (scores - baseline) / std)
    rare_success = advantages(
        {"token_level_rewards": torch.eye(8)[:, :1], "response_mask": torch.ones(8, 1), "index": np.zeros(8)},
        {"advantage.baseline": "quantile"},
    )
    assert (rare_success[1:] == 0).all() and rare_success[0] > 0  # p <= 1 - K: only successes train


def test_quantile_follows_the_definition_in_every_group() -> None:
    inputs = batch(3, groups=7, size=5, values=[0.0, 0.3, 0.7, 1.0])
    got = advantages(inputs, {"advantage.baseline": "quantile", "advantage.quantile": 0.55, "advantage.std": "off"})
    scores = inputs["token_level_rewards"].sum(-1)
    for row, name in enumerate(inputs["index"]):
        group = sorted(float(scores[i]) for i, other in enumerate(inputs["index"]) if other == name)
        baseline = min(x for x in group if sum(y <= x for y in group) / len(group) >= 0.55)
        assert float(got[row, 0]) == pytest.approx(float(scores[row]) - baseline, abs=1e-6)


def test_signs_need_no_group() -> None:
    inputs = batch(1, values=[0.0, 0.1, 1.0, 1.1])
    got = advantages(inputs, {"advantage.baseline": "sign"})
    correct = inputs["token_level_rewards"].sum(-1) > 0.5
    expected = torch.where(correct, 1.0, -1.0)[:, None] * inputs["response_mask"]
    assert torch.equal(got, expected)


def test_rewards_that_do_not_identify_components_are_refused() -> None:
    scores = torch.tensor([1.1, 0.0, 1.0, 0.1])
    parts = decoded_components(scores, (1.0, 0.1))
    close(parts, torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.1, 0.0, 0.0, 0.1]]))
    with pytest.raises(
        OverlayError, match=r"a reward is 0\.7, which is no sum of advantage\.components \[1\.0, 0\.1\]"
    ):
        decoded_components(torch.tensor([1.0, 0.7]), (1.0, 0.1))
    for values in ([1.0, 1.0], [0.3, 0.1, 0.2], [0.0, 1.0]):
        (problem,) = check_configuration({"advantage.components": values})
        assert "same sum" in problem
    (problem,) = check_configuration({"advantage.components": [1.0, 0.1], "advantage.baseline": "sign"})
    assert "advantage.baseline" in problem
    assert len(check_configuration({"advantage.components": [1.0], "advantage.component_weights": [1.0, 2.0]})) == 1


def test_exact_token_entropy_keeps_the_most_uncertain_tokens() -> None:
    adv = torch.tensor([[1.0, 1.0, 1.0, 0.0], [-2.0, -2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    entropy = torch.tensor([[0.1, 0.9, 0.2, 9.0], [0.8, 0.0, 9.0, 9.0]])
    c = parse_configuration({"token_rule": "high_entropy", "token_entropy": "exact", "high_entropy.share": 0.4})
    got = with_token_entropy(adv, entropy, mask, configuration=c)
    close(got, torch.tensor([[0.0, 2.5, 0.0, 0.0], [-5.0, 0.0, 0.0, 0.0]]))
    values = {"shaping": "entropy_advantage", "token_entropy": "exact", "shaping.coef": 0.4, "shaping.kappa": 2.0}
    got = with_token_entropy(adv, entropy, mask, configuration=parse_configuration(values))
    close(got, torch.tensor([[1.04, 1.36, 1.08, 0.0], [-1.68, -2.0, 0.0, 0.0]]))
    high = with_token_entropy(adv, entropy + 9, mask, configuration=parse_configuration(values))
    close(high, torch.tensor([[1.5, 1.5, 1.5, 0.0], [-1.0, -1.0, 0.0, 0.0]]))  # never across 0


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    values=st.sampled_from(
        [
            {}, {"advantage.baseline": "quantile"}, {"advantage.baseline": "sign"}, {"advantage.std": "off"},
            {"advantage.components": [1.0, 0.1]}, {"advantage.baseline": "quantile", "advantage.quantile": 1.0},
        ]
    ),
    equal=st.booleans(),
    mask_kind=st.sampled_from([torch.bool, torch.int64, torch.float32]),
    kind=st.sampled_from([torch.float32, torch.bfloat16]),
    width=st.integers(1, 4),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_groups_of_every_kind_stay_finite(
    sizes: list[int], values: dict[str, Any], equal: bool, mask_kind: Any, kind: Any, width: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    index = np.array([number for number, size in enumerate(sizes) for _ in range(size)])
    rows = len(index)
    scores = (
        torch.tensor([0.0, 1.0])[torch.randint(0, 2, (rows,), generator=generator)] if not equal else torch.ones(rows)
    )
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width)[None] < lengths[:, None]).to(mask_kind)
    rewards = torch.zeros(rows, width)
    rewards[:, 0] = scores
    got = advantages({"token_level_rewards": rewards.to(kind), "response_mask": mask, "index": index}, values)
    assert got.shape == (rows, width) and torch.isfinite(got).all()
    assert (got[mask == 0] == 0).all()
    if equal and not values:
        alone = torch.tensor([list(index).count(name) == 1 for name in index])
        assert (got[~alone].abs() < 1e-3).all()


def test_whitening_has_mean_0_and_variance_1() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    values = torch.tensor([[1.0, 2.0, 77.0], [3.0, 5.0, 9.0]])
    kept = whitened(values, mask)[mask > 0]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-6) and float(kept.var()) == pytest.approx(1.0, rel=1e-5)
    assert math.isclose(float(whitened(values, torch.tensor([[1, 0, 0], [0, 0, 0]]))[0, 0]), 1.0)
