"""The embedded workspace's data sets, generated deterministically in verl's parquet schema.

Each split holds equal parts of reasoning-gym's ``chain_sum`` and of ``last_digit`` problems; no problem is in
two splits. Columns: data_source, prompt (list of {role, content}), ability, reward_model {style,
ground_truth: str}, extra_info {split, index}; the test split also has an integer sample_id.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from trials.embedded.problems import Problem, chain_sum_problem, last_digit_problem

SPLITS = ("train", "dev", "test")
PER_SOURCE = {"train": 1500, "dev": 100, "test": 100}  # rows of each source
SEED = 20250
DRAWS = 12_000  # reasoning-gym items drawn; about 2,500 distinct ones without negative running values remain


def write_splits(folder: Path) -> None:
    """Write train.parquet, dev.parquet and test.parquet into ``folder``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, problems in build_splits().items():
        rows = [_row(split, index, problem) for index, problem in enumerate(problems)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def build_splits() -> dict[str, list[Problem]]:
    """The problems of each split, the two sources mixed."""
    rng = random.Random(SEED)
    pools = (_chain_sum_pool(), _last_digit_pool(rng))
    splits: dict[str, list[Problem]] = {}
    start = 0
    for split in reversed(SPLITS):  # test and dev first: their rows stay when the size of train changes
        stop = start + PER_SOURCE[split]
        splits[split] = [problem for pool in pools for problem in pool[start:stop]]
        rng.shuffle(splits[split])
        start = stop
    return {split: splits[split] for split in SPLITS}


def _chain_sum_pool() -> list[Problem]:
    """Distinct reasoning-gym ``chain_sum`` problems with three single-digit terms."""
    from reasoning_gym import create_dataset

    items = create_dataset("chain_sum", min_terms=3, max_terms=3, min_digits=1, max_digits=1, seed=SEED, size=DRAWS)
    found = (chain_sum_problem(item["question"], item["metadata"]["expression"]) for item in items)
    return list(dict.fromkeys(problem for problem in found if problem is not None))


def _last_digit_pool(rng: random.Random) -> list[Problem]:
    return list(dict.fromkeys(last_digit_problem(rng) for _ in range(2 * sum(PER_SOURCE.values()))))


def _row(split: str, index: int, problem: Problem) -> dict[str, Any]:
    row: dict[str, Any] = {
        "data_source": problem.source,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index},
    }
    if split == "test":
        row["sample_id"] = index
    return row
