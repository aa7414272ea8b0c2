"""State between calls: once per rollout batch, towards the target, within limits, taken up after a kill."""

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_overlay.configuration import configuration_id, parse_configuration
from verl_overlay.control import ControlState, Drive, annealed, drive_of, moved, ray_task_id, scheduled_share
from verl_overlay.presets import PRESETS
from verl_overlay.sidefiles import SideFiles, read_records

PAR = {"control.knob": "positive_weight", "positive_weight": 0.5, "target.entropy": 0.2}
STARE = {"token_rule": "stare", "control.knob": "stare", "target.entropy": 0.3}


def state_of(values: dict[str, Any], ids: Iterator[str] | None = None, **more: Any) -> ControlState:
    return ControlState(parse_configuration(values), lambda: next(ids) if ids else None, **more)


def run(state: ControlState, entropy: float, share: float = 0.25) -> None:
    """One training call on tokens of this mean surprisal."""
    state.begin_call()
    state.entropy_sum, state.entropy_weight = entropy, 1.0
    state.end_call(share)


# ---- the rules ----


def test_par_as_published() -> None:
    drive = drive_of(parse_configuration(PAR))
    assert drive == Drive(-1, "additive", 0.05, 0.0, 1.0)
    assert moved(0.5, +1.0, drive) == pytest.approx(0.45)  # entropy below target: less weight on A > 0
    assert moved(0.5, -1.0, drive) == pytest.approx(0.55)
    assert moved(0.02, +1.0, drive) == 0.0 and moved(0.98, -1.0, drive) == 1.0
    assert moved(0.5, 0.0, drive) == 0.5


def test_stare_as_published() -> None:
    state = state_of(STARE, iter("ab"))
    run(state, 0.1)
    run(state, 0.1)
    assert (state.amplify, state.damp) == pytest.approx((1.11, 0.89))
    for _ in range(200):
        state._move(1.0)
    assert (state.amplify, state.damp) == (1.5, 0.5)
    state.entropy_sum = 0.9
    for _ in range(200):
        state._move(1.0)
    assert (state.amplify, state.damp) == (1.0, 1.0)


def test_repo_r_doubles_halves_and_flips_its_sign() -> None:
    drive = drive_of(parse_configuration(dict(PRESETS["repo_r"].settings)))
    assert drive == Drive(+1, "multiplicative", 2.0, 1e-4, 0.05)
    assert moved(1e-3, +1.0, drive, may_flip=True) == pytest.approx(2e-3)
    assert moved(1e-3, -1.0, drive, may_flip=True) == pytest.approx(5e-4)
    assert moved(0.04, +1.0, drive, may_flip=True) == 0.05
    assert moved(1.5e-4, -1.0, drive, may_flip=True) == -1e-4
    assert moved(-1e-3, -1.0, drive, may_flip=True) == pytest.approx(-2e-3)
    assert moved(-1.5e-4, +1.0, drive, may_flip=True) == 1e-4
    assert moved(1.5e-4, -1.0, drive) == 1e-4


def test_skywork_and_aer_move_their_coefficient() -> None:
    skywork = drive_of(parse_configuration(dict(PRESETS["skywork"].settings)))
    assert skywork == Drive(+1, "additive", 1e-4, 0.0, 5e-3)
    aer = drive_of(parse_configuration(dict(PRESETS["aer"].settings)))
    assert aer == Drive(+1, "proportional", 1e-4, 0.0, 5e-3)
    assert moved(1e-3, 0.25, aer) == pytest.approx(1e-3 + 0.25e-4)
    assert moved(1e-3, -30.0, aer) == pytest.approx(1e-3 - 1e-4)


def test_speed_and_limits_can_be_set() -> None:
    values = PAR | {"control.speed": 4.0, "control.low": 0.1, "control.high": 0.9}
    assert drive_of(parse_configuration(values)) == Drive(-1, "additive", 0.2, 0.1, 0.9)
    repo = dict(PRESETS["repo_r"].settings) | {"control.speed": 3.0, "shaping.coef": 0.1}
    assert drive_of(parse_configuration(repo)) == Drive(+1, "multiplicative", 8.0, 1e-4, pytest.approx(0.3))


@pytest.mark.parametrize(
    ("values", "knob"),
    [
        ({"shaping": "bonus", "token_rule": "stare"}, "shaping.coef"),
        ({"token_rule": "stare", "extra_term": "kl_cov"}, "stare"),
        ({"extra_term": "sent"}, "kl_cov.coef"),
        ({}, "positive_weight"),
    ],
)
def test_auto_drives_the_strength_of_the_part_that_is_on(values: dict[str, Any], knob: str) -> None:
    assert parse_configuration(values | {"control.knob": "auto"}).controlled == knob


def test_schedules_as_published() -> None:
    stage = parse_configuration({"positive_schedule": "stage", "schedule.steps": 100})
    assert [scheduled_share(stage, x) for x in (0.0, 0.5, 0.75, 1.0)] == [0.0, 0.0, 0.5, 1.0]
    epoch = parse_configuration({"positive_schedule": "epoch", "positive_schedule.epochs": 5, "schedule.steps": 100})
    assert [scheduled_share(epoch, x) for x in (0.0, 0.19, 0.2, 0.5, 0.99)] == [0.0, 0.0, 0.25, 0.5, 1.0]
    assert annealed(0.6, 0.2, 0.25) == pytest.approx(0.5) and annealed(0.6, None, 0.9) == 0.6


def test_the_band_gates_signs_and_falls_over_the_run() -> None:
    values = {"sign_gate": "band", "band.low": 0.6, "band.low_end": 0.2, "band.width": 0.1, "schedule.steps": 100}
    state = state_of(values)
    state.entropy_weight = 1.0
    for steps, entropy, expected in (
        (0, 0.59, (0.0, 1.0)), (0, 0.65, (1.0, 1.0)), (0, 0.71, (1.0, 0.0)), (50, 0.45, (1.0, 1.0)), (100, 0.19, (0.0, 1.0)),
    ):  # fmt: skip
        state.steps, state.entropy_sum = steps, entropy
        assert state.weights() == expected


def test_targets_relative_to_the_initial_entropy() -> None:
    ids = iter("aabbcc")
    state = state_of(STARE | {"target.entropy": 0.5, "target.unit": "h0"}, ids)
    run(state, 0.8)
    assert state.target == pytest.approx(0.4) and not state.is_below_target
    run(state, 0.8)
    run(state, 0.3)
    assert state.initial_entropy == pytest.approx(0.8)
    assert state.target == pytest.approx(0.4) and state.is_below_target
    assert state_of({"target.unit": "h0", "target.h0": 0.2} | STARE).target == pytest.approx(0.06)


def test_entropic_is_proportional_plus_integral_within_one() -> None:
    settings = {"target.entropy": 0.25, "entropic.kp": 2.0, "entropic.ki": 0.1}
    state = state_of(dict(PRESETS["entropic"].settings) | settings)
    state.entropy_sum, state.entropy_weight = 0.15, 1.0
    assert state.entropic_coefficient() == pytest.approx(-0.2)
    state._move(1.0)
    state._move(1.0)
    assert state.entropic_coefficient() == pytest.approx(-0.2 - 0.1 * 0.2)
    state.entropy_sum = 9.0
    assert state.entropic_coefficient() == 1.0


@given(st.lists(st.floats(0, 5), max_size=200), st.floats(0, 1), st.sampled_from(sorted(PRESETS)))
def test_everything_stays_within_its_limits(entropies: list[float], share: float, name: str) -> None:
    state = state_of(PRESETS[name].complete(50.0))
    for entropy in entropies:
        run(state, entropy, share)
        positive, negative = state.weights()
        assert 0.0 <= positive <= 1.0 and 0.0 <= negative <= 1.0
        assert 1.0 <= state.amplify <= 1.5 and 0.5 <= state.damp <= 1.0
        assert abs(state.coef) <= 0.4 and abs(state.entropic_coefficient()) <= 1.0
        assert state.clip_high is None or 0.0 < state.clip_high <= 9.0


# ---- when they move ----


def test_one_step_per_rollout_batch_however_many_calls() -> None:
    batch = ["a"]
    state = ControlState(parse_configuration(PAR), lambda: batch[0])
    for name, calls in (("a", 7), ("b", 1), ("c", 16)):
        batch[0] = name
        seen = set()
        for _ in range(calls):
            run(state, 0.1)
            seen.add(state.positive)
        assert len(seen) == 1  # constant within a rollout batch
    assert state.steps == 2.0 and state.calls == 24
    assert state.positive == pytest.approx(0.4)


def test_without_ids_the_shares_of_a_mini_batch_add_up_to_a_step() -> None:
    state = state_of(PAR)
    for _ in range(8):
        run(state, 0.1, share=0.25)
    assert state.steps == pytest.approx(2.0)
    assert state.positive == pytest.approx(0.4)


def test_nothing_moves_that_is_not_driven(tmp_path: Path) -> None:
    state = state_of({"token_rule": "steer"}, iter("abc"), side_files=SideFiles(tmp_path))
    before = (state.positive, state.negative, state.coef, state.amplify, state.damp, state.kl_coef)
    for _ in range(3):
        SideFiles(tmp_path).publish_entropy(0.2)
        run(state, 0.1)
    assert not state.moves and (state.steps, state.calls) == (2.0, 3) and read_records(tmp_path) == []
    assert (state.positive, state.negative, state.coef, state.amplify, state.damp, state.kl_coef) == before
    assert state.entropy == 0.2  # which steer and others look at


def test_the_surprisal_average_has_a_half_life_of_one_mini_batch() -> None:
    state = state_of(PAR)
    state.observe(0.7, 0.25)
    assert state.entropy == pytest.approx(0.7)
    for _ in range(4):
        state.observe(0.0, 0.25)
    first = 1 - 2**-0.25
    assert state.entropy_sum == pytest.approx(0.7 * first / 2)
    assert state.entropy_weight == pytest.approx(1 - 2**-1.25)


def test_ray_task_id_never_loads_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert ray_task_id() is None and "ray" not in sys.modules
    context = SimpleNamespace(get_task_id=lambda: "abc")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert ray_task_id() == "abc"
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    assert ray_task_id() is None


# ---- exact entropy and side files ----


def test_a_published_entropy_replaces_the_estimate_for_its_batch_only(tmp_path: Path) -> None:
    trainer, ids = SideFiles(tmp_path), iter("abc")
    state = state_of(PAR, ids, side_files=SideFiles(tmp_path))
    trainer.publish_entropy(0.123)
    run(state, 0.9)
    assert state.entropy == 0.123 and state.initial_entropy == 0.123
    run(state, 0.9)
    assert state.exact_entropy is None and state.entropy == 0.9
    trainer.publish_entropy(0.11)
    run(state, 0.9)
    assert state.entropy == 0.11
    sources = [record["source"] for record in read_records(tmp_path) if record["kind"] == "control"]
    assert sources == ["exact", "surprisal", "exact"]


def test_entropies_of_an_earlier_process_are_stale(tmp_path: Path) -> None:
    SideFiles(tmp_path).publish_entropy(0.5)
    later = SideFiles(tmp_path, started=time.time() + 1)
    assert later.new_entropy() is None
    for text in ("", "{", '{"entropy": "x"}', "[1]"):
        (tmp_path / "entropy.json").write_text(text)
        assert SideFiles(tmp_path).new_entropy() is None


def test_a_resumed_training_takes_up_the_state_of_its_checkpoint(tmp_path: Path) -> None:
    batches = iter(range(1, 100))
    state = ControlState(parse_configuration(PAR), lambda: str(next(batches)), SideFiles(tmp_path))
    path = []
    for _ in range(8):
        run(state, 0.1)
        path.append(state.positive)
    with (tmp_path / "overlay.jsonl").open("a") as stream:
        stream.write('{"kind": "control", "st')  # torn by the kill
    resumed = ControlState(parse_configuration(PAR), lambda: "x", SideFiles(tmp_path, resumed_step=5))
    assert resumed.positive == path[5] and resumed.steps == 5.0
    assert resumed.initial_entropy == pytest.approx(0.1)
    fresh = ControlState(parse_configuration(PAR), lambda: "x", SideFiles(tmp_path))
    assert fresh.positive == 0.5 and fresh.steps == 0.0
    other = ControlState(parse_configuration(PAR | {"target.entropy": 0.4}), lambda: "x", SideFiles(tmp_path, 5))
    assert other.positive == 0.5


def test_records_name_their_configuration_and_only_rank_0_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    run(state_of(PAR, iter("a"), side_files=SideFiles(tmp_path)), 0.1)
    assert read_records(tmp_path) == []
    monkeypatch.setenv("RANK", "0")
    run(state_of(PAR, iter("a"), side_files=SideFiles(tmp_path)), 0.1)
    (record,) = read_records(tmp_path)
    assert record["configuration_id"] == configuration_id(parse_configuration(PAR))
    assert record["positive"] == 0.5 and math.isclose(record["target"], 0.2)


def test_side_files_never_stop_a_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = SideFiles(tmp_path / "file" / "folder")
    blocked.publish_entropy(0.1)
    blocked.append("loss", value=1.0)
    assert blocked.new_entropy() is None and blocked.last_control(1) is None
    silent = SideFiles()
    silent.publish_entropy(0.1)
    assert silent.new_entropy() is None
    (tmp_path / "overlay.jsonl").write_text('[1]\n{"kind": "control"}\nnoise\n' + json.dumps({"kind": "x"}) + "\n")
    assert [record["kind"] for record in read_records(tmp_path)] == ["control", "x"]
