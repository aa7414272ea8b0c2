"""Make the base model of the embedded workspace: ``python -m trials.embedded.sft --out DIR``.

A Qwen2 network of about 120,000 parameters is trained from scratch on answers of the imperfect demonstrators
of ``problems.py``: seeded, one thread, about four CPU minutes. It prints accuracy and entropy on the dev
split and writes model and tokenizer in Hugging Face format. The files in ``base/`` were made this way.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING

from trials.embedded.data import build_splits
from trials.embedded.problems import Problem, demonstration, last_digit_problem
from trials.embedded.tokenizer import build_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_VOCABULARY = 384  # rows of the embedding; larger than the tokenizer, as in the released Qwen models
RESPONSE_TOKENS = 24
IGNORED = -100  # label that cross_entropy skips


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--out", type=Path, required=True, help="folder to write model and tokenizer to")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--batch", type=int, default=128, help="demonstrations per step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    splits = build_splits()
    train(model, tokenizer, _pool(splits), args.steps, args.batch, args.lr, args.seed)
    for line in evaluate(model, tokenizer, splits["dev"]):
        print(line)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


def build_model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The embedded workspace's policy, randomly initialised."""
    return build_qwen2(MODEL_VOCABULARY, positions=512, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)


def build_qwen2(vocabulary: int, positions: int, eos: int, pad: int) -> PreTrainedModel:
    """A randomly initialised Qwen2 with two layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return Qwen2ForCausalLM(config)


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    steps: int,
    batch: int,
    lr: float,
    seed: int,
) -> None:
    """Supervised training on fresh demonstrations; the learning rate warms up, then decays on a cosine."""
    import torch

    rng = random.Random(seed)
    prompts = {problem: prompt_ids(tokenizer, problem) for problem in problems}
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, steps))
    model.train()
    for step in range(steps):
        chosen = rng.choices(problems, k=batch)
        responses = tokenizer([demonstration(problem, rng) for problem in chosen])["input_ids"]
        loss = demonstration_loss(model, tokenizer, [prompts[problem] for problem in chosen], responses)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}", flush=True)


def demonstration_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    responses: list[list[int]],
) -> torch.Tensor:
    """Mean cross-entropy, nats, over the response tokens and the final eos; prompts have equal length."""
    import torch

    start = len(prompts[0])
    width = max(map(len, responses)) + 1
    ended = [[*response, tokenizer.eos_token_id] for response in responses]
    padding = [[tokenizer.pad_token_id] * (width - len(response)) for response in ended]
    inputs = torch.tensor([p + r + pad for p, r, pad in zip(prompts, ended, padding, strict=True)])
    labels = torch.tensor([r + [IGNORED] * (width - len(r)) for r in ended])
    hidden = model.model(inputs[:, :-1]).last_hidden_state[:, start - 1 :]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten())


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: list[Problem]) -> list[str]:
    """One line per source: greedy and sampled accuracy, policy entropy at temperature 1 in nats per token."""
    model.eval()
    lines = []
    for source in sorted({problem.source for problem in problems}):
        chosen = [problem for problem in problems if problem.source == source]
        greedy, _ = _generate(model, tokenizer, chosen, sample=False)
        sampled, entropy = _generate(model, tokenizer, chosen * 8, sample=True)
        accuracy = f"greedy {greedy:.3f}  sampled {sampled:.3f}"
        lines.append(f"{source}: {accuracy}  entropy {entropy:.3f} nats/token")
    return lines


def prompt_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """The tokens of a problem's chat prompt, as verl builds them."""
    messages = [{"role": "user", "content": problem.question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text))


def _generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], sample: bool
) -> tuple[float, float]:
    """(accuracy, mean entropy per token) of one response to each problem."""
    import torch

    from trials.grading import compute_score

    inputs = torch.tensor([prompt_ids(tokenizer, problem) for problem in problems])
    result = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=sample,
        **({"top_k": 0} if sample else {}),
        max_new_tokens=RESPONSE_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    responses = result.sequences[:, inputs.shape[1] :]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    scores = [
        compute_score(problem.source, text, str(problem.answer)) for problem, text in zip(problems, texts, strict=True)
    ]
    log_p = torch.stack(result.logits, dim=1).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)[responses != tokenizer.pad_token_id].mean()
    return sum(scores) / len(scores), float(entropy)


def _pool(splits: dict[str, list[Problem]]) -> list[Problem]:
    """Problems to demonstrate: the train split and more of the same kind, nothing from dev or test."""
    rng = random.Random("demonstrations")
    held_out = {*splits["dev"], *splits["test"]}
    more = (last_digit_problem(rng) for _ in range(3000))
    return [problem for problem in dict.fromkeys([*splits["train"], *more]) if problem not in held_out]


def _schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: 100 steps of warm-up, cosine decay to 5 %."""
    return min(1.0, (step + 1) / 100) * (0.525 + 0.475 * math.cos(math.pi * step / steps))


if __name__ == "__main__":
    main()
