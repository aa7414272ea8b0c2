"""The batched sampler against plain one-row computations."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")
transformers = pytest.importorskip("transformers")

from verl_overlay.cpu.generator import Generation, SamplingParams, _Rows, generate, left_pad  # noqa: E402

EOS, PAD = 2, 0
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [6, 6]]


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.Qwen2Config(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config).eval()


def _reference_log_probs(model: Any, prompt: list[int], answer: list[int], temperature: float) -> Any:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def test_left_pad() -> None:
    ids, mask = left_pad([[1, 2], [3]], 0)
    assert ids.tolist() == [[1, 2], [0, 3]] and mask.tolist() == [[1, 1], [0, 1]]


def test_greedy_follows_the_argmax_of_a_full_forward(model: Any) -> None:
    for prompt, out in zip(PROMPTS, generate(model, PROMPTS, [SamplingParams(12, 0.0)] * 4, {EOS}, PAD), strict=True):
        expected = _reference_log_probs(model, prompt, out.token_ids, 1.0)
        assert out.token_ids == expected.argmax(-1).tolist()
        assert out.finished == (out.token_ids[-1] == EOS)
        assert EOS not in out.token_ids[:-1] and (out.finished or len(out.token_ids) == 12)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probs_are_those_of_the_sampled_distribution(model: Any, temperature: float) -> None:
    torch.manual_seed(3)
    prompts = PROMPTS * 8
    outs = generate(model, prompts, [SamplingParams(10, temperature)] * len(prompts), {EOS, 3, 4}, PAD)
    for prompt, out in zip(prompts, outs, strict=True):
        expected = _reference_log_probs(model, prompt, out.token_ids, temperature)
        picked = expected.gather(-1, torch.tensor(out.token_ids)[:, None])[:, 0]
        assert torch.allclose(picked, torch.tensor(out.log_probs), atol=1e-4)


def test_rows_end_apart_and_are_dropped_from_the_batch(model: Any) -> None:
    params = [SamplingParams(limit, 0.0) for limit in (1, 2, 9, 3)]
    together = generate(model, PROMPTS, params, {99}, PAD)
    assert [len(out.token_ids) for out in together] == [1, 2, 9, 3] and not any(o.finished for o in together)
    for prompt, param, out in zip(PROMPTS, params, together, strict=True):
        alone: Generation = generate(model, [prompt], [param], {99}, PAD)[0]
        assert alone.token_ids == out.token_ids


def test_top_k_and_top_p_cut_the_distribution_per_row() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 4))
    rows = _Rows(
        [
            SamplingParams(1),
            SamplingParams(1, top_k=2),
            SamplingParams(1, top_p=0.6),
            SamplingParams(1, top_p=0.0),
        ]
    )
    probs = rows.filtered_log_probs(logits).exp().tolist()
    assert probs[0] == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=1e-6)
    assert probs[1] == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)
    assert probs[2] == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)
    assert probs[3] == pytest.approx([1, 0, 0, 0], abs=1e-6)


def test_sampling_frequencies_match_the_distribution() -> None:
    torch.manual_seed(0)
    rows = _Rows([SamplingParams(1)] * 20000)
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = rows.draw(probs.log().expand(20000, 4)).bincount(minlength=4) / 20000
    assert all(math.isclose(a, b, abs_tol=0.015) for a, b in zip(counts.tolist(), probs.tolist(), strict=True))
