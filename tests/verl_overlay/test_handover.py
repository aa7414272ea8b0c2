"""From the trainer's process to the workers': mean entropy, token entropies, and the state that a resumed run takes up.

One real Ray actor per role calls verl 0.9.1's functions in verl's order (``handover_roles.py``).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from handover_roles import BONUS, ENTROPY, EXACT_TOKENS, MASK
from wheels import wheel_tree

from verl_overlay import install as overlay

SCRIPT = Path(__file__).with_name("handover_roles.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the two processes saw."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("handover")
    shutil.copytree(wheel_tree("0.9.1") / "verl", folder / "tree" / "verl")
    core_algos = folder / "tree/verl/trainer/ppo/core_algos.py"
    overlay.install(core_algos, {})
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "VERL_"))}
    environment |= {"PYTHONPATH": str(folder / "tree"), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="ho", dir="/tmp") as scratch:  # Ray's sockets need a short path
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(core_algos), str(folder), scratch],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def test_the_exact_mean_entropy_reaches_the_worker(seen: dict[str, Any]) -> None:
    batches, aggregated = seen["hand over"]["batches"], seen["hand over"]["aggregated"]
    exact = [[call["overlay/entropy_exact"] for call in calls] for calls in batches]
    assert exact == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    entropies = [[call["overlay/entropy_estimate"] for call in calls] for calls in batches]
    assert entropies == [pytest.approx([value] * 2) for value in (1.0, 0.5, 1.0, 0.125)]
    assert aggregated["metric"] == pytest.approx(0.5), "verl's own metric is not changed"


def test_neither_an_earlier_process_nor_the_workers_themselves_are_taken_for_the_trainer(seen: dict[str, Any]) -> None:
    aggregated = seen["hand over"]["aggregated"]
    assert aggregated["stale"] == pytest.approx(0.9) and aggregated["own"] == pytest.approx(7.0)
    assert aggregated["published"] == pytest.approx(0.5)


def test_the_controller_moves_once_per_rollout_batch_and_the_records_tell_the_source(seen: dict[str, Any]) -> None:
    weights = [[call["overlay/positive_weight"] for call in calls] for calls in seen["hand over"]["batches"]]
    expected = [0.0, 0.05, 0.1, 0.05]  # above, above, below 0.2 nats
    assert weights == [pytest.approx([value] * 2) for value in expected]
    records = seen["hand over"]["records"]
    assert [record["kind"] for record in records] == ["control"] * 4
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert [record["source"] for record in records] == ["surprisal", "exact", "surprisal", "exact"]
    assert [record["positive"] for record in records] == pytest.approx(expected)
    assert [record["entropy"] for record in records[1:]] == pytest.approx([0.5, 1.0, 0.125])


def test_a_resumed_run_takes_up_the_state_of_its_checkpoint(seen: dict[str, Any]) -> None:
    assert seen["resume"]["starts"] == pytest.approx({"0": 0.0, "2": 0.1, "3": 0.05, "other": 0.0})
    batches, records = seen["resume"]["batches"], seen["resume"]["records"]
    assert [call["overlay/rollout_batches"] for call in batches] == [2.0, 3.0]
    assert [call["overlay/positive_weight"] for call in batches] == pytest.approx([0.1, 0.15])
    assert [record["step"] for record in records] == [2, 3]


def test_exact_token_entropies_select_the_tokens_that_train(seen: dict[str, Any]) -> None:
    plain, selected = seen["token entropy"]["plain"], seen["token entropy"]["high_entropy"]
    assert plain == [
        pytest.approx([0.70710578] * 3 + [0.0], abs=1e-5),
        pytest.approx([-0.70710578] * 4, abs=1e-5),
        pytest.approx([0.5, 0.0, 0.0, 0.0], abs=1e-5),
    ]
    factor = 8 / 2  # the 2 tokens of highest entropy of 8
    kept = {(0, 1), (1, 1)}
    for row, values in enumerate(selected):
        for column, value in enumerate(values):
            expected = plain[row][column] * factor if (row, column) in kept else 0.0
            assert value == pytest.approx(expected, abs=1e-5)


def test_exact_token_entropies_raise_the_advantages(seen: dict[str, Any]) -> None:
    plain, raised = seen["token entropy"]["plain"], seen["token entropy"]["entropy_advantage"]
    for row, values in enumerate(raised):
        for column, value in enumerate(values):
            bonus = min(0.5 * ENTROPY[row][column], abs(plain[row][column]) / 2) if MASK[row][column] else 0.0
            assert value == pytest.approx(plain[row][column] + bonus, abs=1e-5)


@pytest.mark.parametrize("name", ["high_entropy", "entropy_advantage"])
@pytest.mark.parametrize("when", ["again", "in the other trainer"])
def test_missing_token_entropies_are_refused_with_the_reason(seen: dict[str, Any], name: str, when: str) -> None:
    """Entropies are used once, and the trainers with one advantage per response hand none over."""
    message = seen["token entropy"][f"{name} {when}"]
    assert isinstance(message, str) and message.startswith("OverlayError: token_entropy is 'exact'")
    assert "0.9's default" in message and "Set token_entropy to 'surprisal'" in message and "\n" not in message
    plain = seen["token entropy"]
    assert plain["plain"] == plain["plain again"] == plain["plain in the other trainer"]


def test_the_advantages_are_recorded_where_the_overlay_makes_them(seen: dict[str, Any]) -> None:
    records = [record for record in seen["token entropy"]["records"] if record["kind"] == "advantage"]
    identities = [overlay.configuration_identity(values) for values in (EXACT_TOKENS, BONUS)]
    assert [record["configuration_id"] for record in records] == identities
    assert [record["nonzero_share"] for record in records] == pytest.approx([2 / 8, 1.0])
    assert [record["call"] for record in records] == [1, 1]
