"""How many tokens a text has, asked of the training environment: the agent itself has no tokenizer."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_LIMIT_S = 8.0
_PROGRAM = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.no_truncation()
tokenizer.no_padding()
encoded = tokenizer.encode_batch(json.load(sys.stdin), add_special_tokens=False)
json.dump([len(text.ids) for text in encoded], sys.stdout)
"""


def count_tokens_of(texts: Sequence[str], model: Path, training_env: Path | None) -> list[int] | None:
    """Tokens of each text, chat template and special tokens not included.

    Args:
        texts: few enough to be counted within seconds.
        model: folder with a tokenizer.json.
        training_env: prefix of a Python environment with `tokenizers`; None is the agent's own.

    Returns:
        None when they cannot be counted, for whatever reason.
    """
    python = training_env / "bin" / "python3" if training_env else Path(sys.executable)
    command = [str(python), "-c", _PROGRAM, str(model / "tokenizer.json")]
    try:
        done = subprocess.run(
            command, input=json.dumps(list(texts)), capture_output=True, encoding="utf-8", timeout=_LIMIT_S
        )
        counts = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return counts if isinstance(counts, list) else None
