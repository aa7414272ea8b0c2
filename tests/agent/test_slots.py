"""Slots: what a trial asks, what verl would refuse, how many fit; and the arithmetic of the benchmark."""

import sys
from pathlib import Path

import pytest

from agent.config import load_config
from agent.errors import ConfigError, PreflightError
from agent.ledger import Score, TrialState, fold
from agent.promotion import rank_proxies
from agent.slots import (
    ON_CPU,
    Ask,
    Node,
    SlotsBusy,
    count_slots,
    plan_ask,
    proxy_overrides,
    require_open_devices,
)
from trials.batching import BATCH_SETTINGS

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import slots as bench

ACTOR = "actor_rollout_ref.actor."


def settings(**given: str) -> dict[str, str | None]:
    """A small script: 128 prompts × 8 responses, mini-batches of 64 prompts, one GPU per engine."""
    values: dict[str, str | None] = {
        "trainer.n_gpus_per_node": "8",
        "data.train_batch_size": "128",
        "actor_rollout_ref.rollout.n": "8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
        f"{ACTOR}ppo_mini_batch_size": "64",
        f"{ACTOR}ppo_micro_batch_size_per_gpu": "8",
    }
    short = {key.rsplit(".", 1)[1]: key for key in BATCH_SETTINGS if "megatron" not in key}
    values.update({short[name]: value for name, value in given.items()})
    return values


def test_a_trial_asks_what_train_sh_asks_unless_told_otherwise() -> None:
    asked: dict[str, int | None] = {"trainer.n_gpus_per_node": 4, "trainer.nnodes": None}
    assert plan_ask(asked, None, False) == Ask(4, 4) and not Ask(4, 4).is_proxy
    assert plan_ask({}, 2, False) == Ask(2, 8) and Ask(2, 8).is_proxy
    assert plan_ask({}, None, False) == Ask(8, 8)  # verl's own default
    assert plan_ask({}, None, True) == ON_CPU and not ON_CPU.is_proxy


@pytest.mark.parametrize(
    ("given", "gpus", "on_cpu", "words"),
    [
        ({}, 16, False, "gpus_per_trial=16 is more than train.sh's trainer.n_gpus_per_node=8"),
        ({"trainer.nnodes": 2}, None, False, "trainer.nnodes=2; a trial runs on one node"),
        ({}, 1, True, "trainer.device=cpu: there are no GPUs to share"),
    ],
)
def test_impossible_asks_are_refused(given: dict[str, int | None], gpus: int | None, on_cpu: bool, words: str) -> None:
    with pytest.raises(PreflightError, match=words.replace("(", r"\(")):
        plan_ask(given, gpus, on_cpu)


@pytest.mark.parametrize(
    ("given", "gpus", "words"),
    [
        ({}, 1, None),
        ({}, 3, "cannot be divided among 3 ranks"),
        ({"tensor_model_parallel_size": "2"}, 1, "tensor_model_parallel_size=2 does not divide the 1 GPUs"),
        (
            {"tensor_model_parallel_size": None},
            1,
            "tensor_model_parallel_size=2 does not divide the 1 GPUs",
        ),  # the default
        ({"ulysses_sequence_parallel_size": "4"}, 2, "2 GPUs cannot be divided into groups of 4"),
        ({"ulysses_sequence_parallel_size": "4"}, 4, None),
        ({"ppo_micro_batch_size_per_gpu": "7"}, 2, "= 256 are no multiple of ppo_micro_batch_size_per_gpu 7"),
        ({"ppo_micro_batch_size_per_gpu": "7", "use_dynamic_bsz": "True"}, 2, None),
    ],
)
def test_proxies_that_verl_could_not_train_are_refused(given: dict[str, str], gpus: int, words: str | None) -> None:
    if words is None:
        assert proxy_overrides(settings(**given), Ask(gpus, 8)) == {"trainer.n_gpus_per_node": gpus}
    else:
        with pytest.raises(PreflightError, match=f"gpus_per_trial={gpus} does not fit train.sh: .*{words}"):
            proxy_overrides(settings(**given), Ask(gpus, 8))


def test_a_proxy_keeps_the_work_of_one_gpu() -> None:
    """Totals over the GPUs shrink with them; sizes per GPU stay."""
    assert proxy_overrides(settings(), Ask(2, 8)) == {"trainer.n_gpus_per_node": 2}
    totals = settings(ppo_micro_batch_size="64", log_prob_micro_batch_size="128")
    totals[f"{ACTOR}ppo_micro_batch_size_per_gpu"] = None
    assert proxy_overrides(totals, Ask(2, 8)) == {
        "trainer.n_gpus_per_node": 2,
        f"{ACTOR}ppo_micro_batch_size": 16,
        "actor_rollout_ref.ref.log_prob_micro_batch_size": 32,
    }
    assert proxy_overrides(totals, Ask(8, 8)) == {}


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("export CUDA_VISIBLE_DEVICES=0,1,2,3", True),
        ("CUDA_VISIBLE_DEVICES=0 python3 -m verl.trainer.main_ppo", True),
        ("set -x; export CUDA_VISIBLE_DEVICES=$MY_GPUS", True),
        ("# export CUDA_VISIBLE_DEVICES=0", False),
        ("export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0,1}", False),
        ('export CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"', False),
    ],
)
def test_a_script_that_picks_its_own_gpus_cannot_share(line: str, is_refused: bool) -> None:
    script = f"#!/bin/bash\n{line}\npython3 -m verl.trainer.main_ppo\n"
    if is_refused:
        with pytest.raises(PreflightError, match="line 2 sets CUDA_VISIBLE_DEVICES"):
            require_open_devices(script)
    else:
        require_open_devices(script)


def test_slots_are_counted_by_what_is_free() -> None:
    whole, half = Node("a", 8, 8, 64, 64), Node("b", 8, 4, 64, 40)
    assert (count_slots([whole], Ask(8, 8), None).count, count_slots([whole], Ask(8, 8), None).cpus) == (1, 64)
    slots = count_slots([whole, half], Ask(2, 8), None)
    assert (slots.count, slots.cpus) == (6, 16)  # 4 + 2; 64 CPUs / 4 and 40 / 2
    assert "a has 8 GPUs (8 free) and 64 CPUs (64 free), b has 8 GPUs (4 free)" in slots.found
    assert count_slots([whole, half], Ask(2, 8), 3).count == 3
    assert count_slots([Node("c", 8, 8, 2, 2)], Ask(1, 8), None).count == 2  # too few CPUs for more
    assert count_slots([Node("d", 8, 8, 64, 63)], Ask(8, 8), None).count == 1  # a CPU in use elsewhere does not matter


def test_what_does_not_fit_is_named_with_its_numbers() -> None:
    with pytest.raises(
        PreflightError, match=r"asks 8 GPUs on one node, but none is that large: a has 4 GPUs \(4 free\)"
    ):
        count_slots([Node("a", 4, 4, 8, 8), Node("b", 4, 4, 8, 8)], Ask(8, 8), None)
    with pytest.raises(
        SlotsBusy, match=r"asks 8 GPUs on one node and 1 CPUs, but others hold them: a has 8 GPUs \(7 free"
    ):
        count_slots([Node("a", 8, 7, 8, 8)], Ask(8, 8), None)


def test_the_keys_of_the_configuration() -> None:
    config = load_config(None, ["search.gpus_per_trial=2", "ray_address=10.0.0.1:6379"])
    assert config.fingerprint()["search.gpus_per_trial"] == 2 and "ray_address" not in config.fingerprint()
    for wrong in ("ray_address=ray://10.0.0.1:10001", "search.gpus_per_trial=0", "search.gpus_per_trial=0.5"):
        with pytest.raises(ConfigError, match=wrong.split("=")[0]):
            load_config(None, [wrong])


def test_proxies_are_ranked_and_labelled() -> None:
    def trial(name: str, step: int, objective: float, **facts: bool) -> TrialState:
        found = TrialState(name, "search", {}, origin="optuna", gpus=2, is_proxy=facts.get("is_proxy", True))
        found.scores, found.outcome = [Score(step, objective)], "failed" if facts.get("failed") else "completed"
        return found

    trials = [
        trial("a", 8, 0.3), trial("b", 16, 0.2), trial("c", 16, 0.4), trial("d", 16, 0.9, failed=True),
        trial("e", 16, 0.9, is_proxy=False), trial("f", 16, 0.0),
    ]  # fmt: skip
    assert [found.trial for found in rank_proxies(trials)] == ["c", "b", "a"]
    assert trials[0].label == "optuna (proxy on 2 GPUs)" and trials[4].label == "optuna"


def test_the_ledger_remembers_the_scale() -> None:
    started = {
        "event": "trial_started", "time": 1.0, "trial": "t001", "attempt": 1, "kind": "search", "origin": "optuna",
        "configuration": {},
    }  # fmt: skip
    state = fold([started, {**started, "trial": "t002", "gpus": 2, "is_proxy": True}])
    assert (state.trials["t001"].gpus, state.trials["t001"].is_proxy) == (None, False)
    assert (state.trials["t002"].gpus, state.trials["t002"].is_proxy) == (2, True)


def test_the_benchmarks_arithmetic() -> None:
    """Two slots in a window of 20 s: a 0–8 and 10–18, b 4–18 and 20–30."""
    busy = [
        bench.Busy("a", 0, 8, 8),
        bench.Busy("b", 4, 18, 18),
        bench.Busy("a", 10, 18, 18),
        bench.Busy("b", 20, 30, 30),
    ]
    seen = bench.measure(busy, slots=2)
    assert seen.window_s == 20 and seen.share == pytest.approx(30 / 40)
    assert (seen.ramp_s, seen.between_s, seen.tail_s, seen.gaps_s) == (4, 4, 2, (2, 2))
    assert seen.share * 40 + seen.ramp_s + seen.between_s + seen.tail_s == 40
    unused = bench.measure(busy, slots=3)
    assert unused.ramp_s == 24 and unused.share == pytest.approx(30 / 60)
    assert "busy: 75.0 % of 40 slot-seconds" in bench.describe(busy, 2)
