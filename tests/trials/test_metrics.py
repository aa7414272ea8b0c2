"""Log lines of several verl versions → StepMetrics."""

import json
import math

import pytest

from trials.metrics import LineJoiner, StepMetrics, metrics_from_json, parse_line


def test_numbers_of_every_form_and_a_source_with_a_dash() -> None:
    metrics = parse_line(
        "step:7 - actor/entropy:np.float64(0.61) - actor/grad_norm:nan - actor/lr:1e-06 - x/y:-inf - "
        "val-core/a - b/acc/mean@1:0.5 - num_turns/min:np.int64(2)"
    )
    assert metrics is not None and metrics.step == 7
    assert metrics.entropy == 0.61 and metrics.values["actor/lr"] == 1e-6 and metrics.values["x/y"] == -math.inf
    assert math.isnan(metrics.values["actor/grad_norm"]) and metrics.values["num_turns/min"] == 2
    assert metrics.dev_accuracies() == {"a - b": 0.5}


@pytest.mark.parametrize(
    ("line", "entropy", "accuracy"),
    [
        ("step:5 - actor/entropy_loss:0.412 - val/test_score/openai/gsm8k:0.250", 0.412, 0.25),  # 0.3.0.post1
        ("step:5 - actor/entropy:0.412 - val-core/openai/gsm8k/reward/mean@4:0.250", 0.412, 0.25),  # 0.4.1
        ("step:5 - actor/entropy:0.41234 - val-core/openai/gsm8k/acc/mean@1:0.25", 0.41234, 0.25),  # 0.5 – 0.8
        ("step:5 - val-core/openai/gsm8k/acc/mean@1:np.float64(0.25)", None, 0.25),  # entropy absent is unknown
    ],
)
def test_key_names_by_version(line: str, entropy: float | None, accuracy: float) -> None:
    metrics = parse_line(line)
    assert metrics is not None
    assert metrics.entropy == entropy
    assert metrics.dev_accuracy({"openai/gsm8k": 10}) == accuracy


def test_prefix_colour_and_repetition_suffix_do_not_matter() -> None:
    plain = "step:3 - actor/entropy:0.5 - actor/pg_loss:0.1"
    dressed = f"\x1b[36m(TaskRunner pid=812)\x1b[0m {plain}\x1b[32m [repeated 9x across cluster]\x1b[0m\r"
    assert parse_line(dressed.rstrip("\r")) == parse_line(plain)
    assert parse_line(f"Training:  10%|█   | 3/30\r(TaskRunner pid=812) {plain}") == parse_line(plain)


@pytest.mark.parametrize(
    "line", ["", "step: 3", "global_step:3 - a:1", "step:x - a:1", "footstep:3 - a:1", "step:3 - x"]
)
def test_other_lines_are_not_steps(line: str) -> None:
    assert parse_line(line) is None


def test_several_dev_sources_are_weighted_by_rows_and_must_be_complete() -> None:
    metrics = parse_line(
        "step:1 - val-core/a/acc/mean@1:1.0 - val-core/b/acc/mean@1:0.0 - val-core/a/reward/mean@1:0.3"
    )
    assert metrics is not None
    assert metrics.dev_accuracy({"a": 30, "b": 10}) == 0.75
    assert metrics.dev_accuracy({"a": 30, "b": 10, "c": 5}) is None
    assert metrics.dev_accuracy({}) is None


def test_json_round_trip_keeps_numbers_and_marks_non_finite() -> None:
    metrics = parse_line("step:2 - a/b:0.1 - c/d:nan - e/f:inf")
    assert metrics is not None
    back = metrics_from_json(json.dumps(metrics.to_record(), allow_nan=False))
    assert back.step == 2 and back.values["a/b"] == 0.1
    assert math.isnan(back.values["c/d"]) and math.isnan(back.values["e/f"])


WHOLE = "step:26 - actor/entropy:0.1236 - rollout_corr/training_ppl:1.161311388015747 - val-core/a - b/acc/mean@1:0.5"
SOURCE = "\x1b[36m(TaskRunner pid=812)\x1b[0m "


def join(lines: list[str]) -> list[StepMetrics]:
    joiner = LineJoiner()
    return [metrics for line in lines for metrics in joiner.push(line)] + joiner.flush()


@pytest.mark.parametrize("cut", range(1, len(WHOLE)))
def test_a_step_line_forwarded_in_two_pieces_is_put_together(cut: int) -> None:
    """Ray's log monitor reads while the worker writes; the rest follows as a line of its own."""
    lines = [SOURCE + "before", SOURCE + WHOLE[:cut], "(Other pid=1) noise:1", SOURCE + WHOLE[cut:], SOURCE + "after"]
    assert join(lines) == [parse_line(WHOLE)]


def test_whole_lines_stay_apart() -> None:
    second = WHOLE.replace("step:26", "step:27")
    lines = [SOURCE + WHOLE, SOURCE + second, SOURCE + "Training Progress: 40%", "step:3 - a/b:1", SOURCE + WHOLE]
    assert join(lines) == [parse_line(WHOLE), parse_line(second), parse_line("step:3 - a/b:1"), parse_line(WHOLE)]


@pytest.mark.parametrize("prefix", ["", SOURCE])
@pytest.mark.parametrize(
    "noise",
    [
        "validation generation end",
        "(raylet) file_system_monitor.cc:116: /tmp/ray/session is over 95% full, available space: 41.2 GB; capacity: 4 TB.",
        "step: 97 - actor/entropy:1",
        "- a bullet of an answer",
        "42",
        "epoch:2",
        "a: b - c:1",
        "",
    ],
)
def test_other_lines_are_not_taken_for_the_rest_of_a_step(prefix: str, noise: str) -> None:
    if prefix and noise == "42":
        pytest.skip("digits after a worker's name are the rest of a number")
    lines = [prefix + WHOLE, prefix + noise, prefix + "step:98 - nothing", prefix + noise]
    found = join(lines)
    assert found[0] == parse_line(WHOLE) and [metrics.step for metrics in found] == [26]
