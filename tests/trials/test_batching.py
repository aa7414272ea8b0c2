"""verl's batch rules, refused before a trial is spent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.batching import batch_problems

ACTOR = "actor_rollout_ref.actor"
SOUND = {
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "data.train_batch_size": 128,
    "actor_rollout_ref.rollout.n": 8,
    f"{ACTOR}.ppo_mini_batch_size": 64,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 16,
}


def test_a_sound_point_has_no_problem() -> None:
    assert batch_problems(SOUND) == []
    assert batch_problems({key: str(value) for key, value in SOUND.items()}) == []
    assert batch_problems({}) == [] and batch_problems({"trainer.n_gpus_per_node": "auto"}) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        # mini 16, n 5, 8 GPUs, micro 16: ten responses on each GPU, less than a micro-batch
        ({f"{ACTOR}.ppo_mini_batch_size": 16, "actor_rollout_ref.rollout.n": 5},
         "ppo_mini_batch_size 16 × n 5 = 80 responses ÷ 8 ranks = 10 are fewer than ppo_micro_batch_size_per_gpu 16: no "
         "gradient step would be taken"),
        # 8 workers, micro 3, global 8
        ({"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 8, "actor_rollout_ref.rollout.n": 1,
          f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3}, "÷ 8 ranks = 1 are fewer than ppo_micro_batch_size_per_gpu 3"),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 12}, "÷ 8 ranks = 64 are no multiple of ppo_micro_batch_size_per_gpu 12"),
        ({"trainer.n_gpus_per_node": 7}, "128 × n 8 = 1024 responses cannot be divided among 7 ranks"),
        ({f"{ACTOR}.ppo_mini_batch_size": 256}, "ppo_mini_batch_size 256 is larger than train_batch_size 128"),
        ({f"{ACTOR}.ppo_mini_batch_size": 48}, "train_batch_size 128 is no multiple of ppo_mini_batch_size 48"),
        ({f"{ACTOR}.ppo_mini_batch_size": 1, "actor_rollout_ref.rollout.n": 2}, "leave nothing for some of 8 ranks"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 3}, "8 GPUs cannot be divided into groups of 3"),
        ({"actor_rollout_ref.rollout.tensor_model_parallel_size": 3}, "tensor_model_parallel_size=3 does not divide the 8"),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": None, f"{ACTOR}.ppo_micro_batch_size": 4},
         "ppo_micro_batch_size 4 leaves nothing for some of 8 ranks"),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": None, f"{ACTOR}.ppo_micro_batch_size": 24},
         "ppo_mini_batch_size 64 is no multiple of ppo_micro_batch_size 24"),
        ({f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
          f"{ACTOR}.megatron.pipeline_model_parallel_size": 3}, "8 GPUs cannot be divided into groups of 6"),
    ],
)  # fmt: skip
def test_an_impossible_point_is_named_with_its_numbers(changes: dict[str, object], problem: str) -> None:
    found = batch_problems({**SOUND, **changes})
    assert any(problem in text for text in found), found


def test_one_gpu_works_where_four_do_not() -> None:
    point = {**SOUND, "actor_rollout_ref.rollout.n": 1, f"{ACTOR}.ppo_mini_batch_size": 16}
    assert batch_problems({**point, "trainer.n_gpus_per_node": 1}) == []
    assert batch_problems({**point, "trainer.n_gpus_per_node": 4}) != []


def test_dynamic_batches_need_no_micro_batch() -> None:
    point = {**SOUND, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 12}
    assert batch_problems({**point, f"{ACTOR}.use_dynamic_bsz": True}) == []
    assert batch_problems({**point, f"{ACTOR}.use_dynamic_bsz": "True"}) == []


def test_log_probabilities_need_whole_micro_batches_from_0_8_on() -> None:
    point = {**SOUND, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 48}
    expected = ["128 responses per rank are no multiple of rollout.log_prob_micro_batch_size_per_gpu 48"]
    assert batch_problems(point, "0.9.1") == batch_problems(point, "0.8.0") == expected
    assert batch_problems(point, "0.7.1") == batch_problems(point) == []
    reference = {**SOUND, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 48}
    assert batch_problems(reference, "0.9.1") == []
    assert len(batch_problems({**reference, f"{ACTOR}.use_kl_loss": True}, "0.9.1")) == 1


SIZES = st.integers(1, 16)


@given(gpus=st.sampled_from([1, 2, 4, 8]), prompts=SIZES, updates=st.integers(1, 4), n=SIZES, micro=SIZES)
def test_a_point_without_problems_divides_without_rest(
    gpus: int, prompts: int, updates: int, n: int, micro: int
) -> None:
    point = {
        "trainer.n_gpus_per_node": gpus, "data.train_batch_size": prompts * updates, "actor_rollout_ref.rollout.n": n,
        f"{ACTOR}.ppo_mini_batch_size": prompts, f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro,
    }  # fmt: skip
    exact = prompts * n % gpus == 0 and (prompts * n // gpus) % micro == 0
    assert (batch_problems(point) == []) == exact
