"""State between calls: once per rollout batch, limits, and visibility."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_overlay.configuration import parse_configuration
from verl_overlay.control import ControlState, adapted_stare_weights, guided_positive_weight, ray_task_id

PAR = {"positive_control": "entropy_guided", "positive_weight": 0.5}
STARE = {"token_rule": "stare"}


def run(state: ControlState, entropy: float, share: float = 0.25) -> None:
    """One call whose estimate is ``entropy``."""
    state.begin_call()
    state.end_call(entropy, 1.0, share)


def test_par_moves_towards_the_target() -> None:
    assert guided_positive_weight(0.5, 0.1, 0.2, 0.05) == pytest.approx(0.45)
    assert guided_positive_weight(0.5, 0.2, 0.2, 0.05) == pytest.approx(0.55)
    assert guided_positive_weight(0.02, 0.1, 0.2, 0.05) == 0.0
    assert guided_positive_weight(0.98, 0.3, 0.2, 0.05) == 1.0


def test_stare_weights_move_towards_the_target() -> None:
    c = parse_configuration(STARE)
    assert adapted_stare_weights(1.1, 0.9, 0.1, c) == pytest.approx((1.11, 0.89))
    assert adapted_stare_weights(1.1, 0.9, 0.5, c) == pytest.approx((1.09, 0.91))
    assert adapted_stare_weights(1.1, 0.9, 0.3, c) == (1.1, 0.9)


@given(st.lists(st.floats(0, 5), max_size=200), st.floats(0, 1))
def test_weights_stay_within_their_limits(entropies: list[float], share: float) -> None:
    state = ControlState(parse_configuration(PAR | STARE), lambda: None)
    for entropy in entropies:
        run(state, entropy, share)
        assert 0.0 <= state.positive_weight <= 1.0
        assert 1.0 <= state.amplify <= 1.5 and 0.5 <= state.damp <= 1.0


def test_one_step_per_rollout_batch_however_many_calls() -> None:
    batch = ["a"]
    state = ControlState(parse_configuration(PAR | STARE), lambda: batch[0])
    for name, calls in (("a", 7), ("b", 1), ("c", 16)):
        batch[0] = name
        for _ in range(calls):
            run(state, 0.1)
    assert state.steps == 2.0
    assert state.positive_weight == pytest.approx(0.4)
    assert (state.amplify, state.damp) == pytest.approx((1.12, 0.88))
    assert state.calls == 24


def test_weights_do_not_change_within_a_rollout_batch() -> None:
    state = ControlState(parse_configuration(STARE), lambda: "a")
    for _ in range(9):
        run(state, 0.01)
    assert (state.amplify, state.damp, state.steps) == (1.1, 0.9, 0.0)


def test_without_batch_ids_the_shares_of_a_mini_batch_add_up_to_one_step() -> None:
    state = ControlState(parse_configuration(PAR | STARE), lambda: None)
    for _ in range(4):
        run(state, 0.1, share=0.25)
    assert state.steps == pytest.approx(1.0)
    assert state.positive_weight == pytest.approx(0.45)
    assert (state.amplify, state.damp) == pytest.approx((1.11, 0.89))


def test_fixed_weights_never_move_and_ask_for_no_batch_id() -> None:
    def unexpected() -> str | None:
        raise AssertionError("asked for a rollout batch id")

    fixed = {"positive_weight": 0.5, "token_rule": "stare", "stare.adaptive": False}
    state = ControlState(parse_configuration(fixed), unexpected)
    for _ in range(5):
        run(state, 0.01, share=1.0)
    assert (state.positive_weight, state.amplify, state.damp) == (0.5, 1.1, 0.9)


@pytest.mark.parametrize("started", [False, True])
def test_task_id_is_read_from_a_loaded_ray_only(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    context: Any = SimpleNamespace(get_task_id=lambda: "77")
    fake = SimpleNamespace(is_initialized=lambda: started, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", fake)
    assert ray_task_id() == ("77" if started else None)
    monkeypatch.delitem(sys.modules, "ray")
    assert ray_task_id() is None
