"""The benchmarks' own parts: the testbed repeats itself, its task is graded rightly, tables and arms say what is meant."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner import Learner, read_arms
from tables import mean_and_error
from testbed import Settings, roll_out, run
from trials.embedded.problems import LAST_DIGIT, Problem
from warm_start import (
    DEV_PROBLEMS,
    EOS,
    WORDS,
    WarmStart,
    base_policy,
    encode,
    is_right,
    new_policy,
    problems,
    prompt_of,
)  # fmt: skip

QUICK = Settings(
    steps=2, prompts=4, answers=4, minibatch=8, eval_every=1, dev_problems=8, warm_start=WarmStart(steps=3, batch=8)
)
CONFIGURATION = {"shaping": "bonus", "shaping.coef": 0.03, "token_rule": "clip_cov", "clip_cov.ratio": 0.2}
PROBLEM = Problem(LAST_DIGIT, "", (7, 5, 3), ("+", "*"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_policy(tmp_path_factory.mktemp("base"), QUICK.warm_start)


def test_the_same_seed_gives_the_same_numbers(base: Path) -> None:
    first = run("bonus", CONFIGURATION, QUICK, base)
    assert run("bonus", CONFIGURATION, QUICK, base) == first
    other = run("bonus", CONFIGURATION, replace(QUICK, seed=1), base)
    assert [seen["entropy"] for seen in other["steps"]] != [seen["entropy"] for seen in first["steps"]]
    assert [seen["overlay/calls"] for seen in first["steps"]] == [1.5, 3.5]  # means over two mini-batches


@pytest.mark.parametrize("control", ["none", "positive_weight"])
def test_the_overlay_sees_the_exact_entropy(base: Path, control: str) -> None:
    configuration = {"control.knob": control, "positive_weight": 0.5, "target.entropy": 0.5, "target.unit": "h0"}
    for seen in run("guided", configuration, QUICK, base)["steps"]:
        assert seen["overlay/entropy_exact"] == 1.0
        assert seen["overlay/entropy_estimate"] == pytest.approx(seen["entropy"], rel=1e-5)


def test_the_base_policy_is_made_once(base: Path) -> None:
    written = base.stat().st_mtime_ns
    assert base_policy(base.parent, QUICK.warm_start) == base and base.stat().st_mtime_ns == written
    assert [path.name for path in base.parent.iterdir()] == [base.name]


def test_rollouts_carry_exact_entropies(base: Path) -> None:
    policy = new_policy()
    policy.load_state_dict(torch.load(base, weights_only=True))
    seen = roll_out(policy, problems()[1][:4], 2)
    with torch.no_grad():
        probabilities = policy(input_ids=seen.sequences[:, :6]).logits[:, -1].double().softmax(-1)
    expected = -(probabilities * probabilities.log()).sum(-1)
    assert torch.allclose(seen.entropy[:, 0].double(), expected, atol=1e-5)
    taken = probabilities[torch.arange(8), seen.sequences[:, 6]]
    assert torch.allclose(seen.log_prob[:, 0].double(), taken.log(), atol=1e-5)


def test_answers_are_graded_by_their_last_box() -> None:
    right = [*encode("7+5=2\n2*3=6\nAnswer:\\boxed{6}"), EOS]
    assert len(right) == 16 and prompt_of(PROBLEM) == encode("7+5*3=") and len(WORDS) == 18
    assert is_right(PROBLEM, right)
    assert is_right(PROBLEM, [*encode("Answer:\\boxed{6}"), EOS])
    assert not is_right(PROBLEM, [*encode("Answer:\\boxed{5}"), EOS])
    assert not is_right(PROBLEM, right[:-1])
    assert not is_right(PROBLEM, [*encode("Answer:\\boxed{6}"), *right])


def test_train_and_dev_problems_are_disjoint() -> None:
    train, dev = problems()
    assert len(dev) == DEV_PROBLEMS and len(train) > 3000
    assert not set(train) & set(dev)


def test_arms_are_presets_space_presets_or_configurations() -> None:
    arms = read_arms(["par_stage", "space:clip_higher", 'mine={"clip_high": 0.3}'], 40)
    assert arms["par_stage"] == {"positive_schedule": "stage", "schedule.steps": 40}
    assert arms["space:clip_higher"]["clip_high"] == 0.28 and arms["space:clip_higher"]["target.unit"] == "h0"
    assert arms["mine"] == {"clip_high": 0.3}
    with pytest.raises(SystemExit, match="arm 'nonsense' is unknown"):
        read_arms(["nonsense"], 40)
    with pytest.raises(SystemExit, match="clip_high"):
        read_arms(['mine={"clip_high": -3}'], 40)


def test_every_preset_can_be_run() -> None:
    for configuration in read_arms([], 40).values():
        Learner(configuration)


def test_means_come_with_their_standard_error() -> None:
    assert mean_and_error([1.0, 2.0, 3.0]) == "2.000 ± 0.577"
    assert mean_and_error([0.25], digits=2) == "0.25"
