"""A byte-level BPE tokenizer in Qwen2's format, with one token for each word the workspace uses.

Every byte has its own token, so any text survives a round trip. The pre-tokenizer is Qwen2's: digits are
single tokens and a word carries its leading space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Words with a leading space (written "Ġ" in byte-level BPE) come first: their merges then take precedence
# over the pairs that the words without one share with them.
INNER = "the final answer to following arithmetic problem last digit working left right"
WORDS = (
    *("Ġ" + word for word in INNER.split()),
    *"State Find Answer boxed user assistant :\\".split(),
)
OPERATORS = ("Ġ+", "Ġ-", "Ġ*", "Ġ=")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer, as the class that ``AutoTokenizer`` picks for a Qwen2 model."""
    from tokenizers import pre_tokenizers  # type: ignore[import-untyped]
    from transformers import Qwen2Tokenizer

    merges = _merges()
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*bytes_, *("".join(merge) for merge in merges), PAD, START, END]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        additional_special_tokens=[START],
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _merges() -> list[tuple[str, str]]:
    """Merges that grow each word from its first character, each listed once."""
    grown = [(word[:end], word[end]) for word in (*OPERATORS, *WORDS) for end in range(1, len(word))]
    return list(dict.fromkeys(grown))
