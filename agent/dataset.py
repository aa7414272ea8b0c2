"""Data files in verl's schema, read in one streaming pass: rows, sources, kinds of answers and every bad row.

pyarrow alone reads them, so a file that another version of `datasets` cannot open is still understood.
"""

import hashlib
import math
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agent.checks import CheckResult, first_line, warning
from search_spaces.plain_files import require_file

SCHEMA = ("data_source", "prompt", "reward_model")
_ROWS_AT_ONCE = 1024
_ROWS_NAMED = 3


@dataclass
class Dataset:
    """Facts about one or several files that form a split."""

    paths: tuple[Path, ...]
    rows: int = 0
    problem: str | None = None
    """Why a file could not be read at all, or which columns it lacks."""
    bad_rows: list[str] = field(default_factory=list)
    """`<file> row <n>: <complaint>`, all of them."""
    sources: Counter[str] = field(default_factory=Counter)
    """Data source → rows."""
    answers: Counter[str] = field(default_factory=Counter)
    """Kind of ground truth → rows."""
    casts: dict[str, str] = field(default_factory=dict)
    """Ground truths that are not text → the text they are read as; a few examples."""
    questions: Counter[bytes] = field(default_factory=Counter)
    """Digest of the prompt's text → rows."""
    newer_features: list[str] = field(default_factory=list)
    """Names of files whose metadata holds the feature `List`, which `datasets` before version 4 cannot read."""


def read_dataset(paths: Sequence[Path], required: Sequence[str] = SCHEMA) -> Dataset:
    """Read a split. Nothing raises: what cannot be read is said in `problem`."""
    dataset = Dataset(tuple(paths))
    for path in paths:
        problem = _read_file(dataset, path, required)
        dataset.problem = dataset.problem or problem
    return dataset


def _read_file(dataset: Dataset, path: Path, required: Sequence[str]) -> str | None:
    try:
        file = pq.ParquetFile(require_file(path))
        missing = set(required) - set(file.schema_arrow.names)
        if missing:
            return f"{path}: columns {sorted(missing)} are missing; write verl's schema"
        if file.metadata.num_rows == 0:
            return f"{path} has no rows"
        if _has_list_feature(file.schema_arrow.metadata or {}):
            dataset.newer_features.append(path.name)
        row = 0
        for batch in file.iter_batches(_ROWS_AT_ONCE):  # all columns: damage anywhere must show
            for record in batch.to_pylist():
                _read_row(dataset, f"{path.name} row {row}", record)
                row += 1
    except FileNotFoundError:
        return f"{path} does not exist; restore it"
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"{path} is not a readable parquet file ({first_line(error)}); write it again"
    return None


def _has_list_feature(metadata: dict[bytes, bytes]) -> bool:
    text = metadata.get(b"huggingface", b"")
    return any(f'"_type":"{name}"'.encode() in text.replace(b" ", b"") for name in ("List", "LargeList"))


def read_prompts(paths: Sequence[Path]) -> Iterator[str]:
    """The text of every usable prompt; a file that cannot be read has none."""
    for path in paths:
        try:
            for batch in pq.ParquetFile(require_file(path)).iter_batches(_ROWS_AT_ONCE, columns=["prompt"]):
                for prompt in batch.column("prompt").to_pylist():
                    if _find_prompt_problem(prompt) is None:
                        yield _prompt_text(prompt)
        except (pa.ArrowException, OSError, ValueError):
            continue


def _prompt_text(messages: Sequence[dict[str, Any]]) -> str:
    return "\n".join(str(message["content"]) for message in messages)


def _read_row(dataset: Dataset, where: str, record: dict[str, Any]) -> None:
    dataset.rows += 1
    complaint = find_row_problem(record)
    if complaint:
        dataset.bad_rows.append(f"{where}: {complaint}")
        return
    text = _prompt_text(record["prompt"])
    dataset.questions[hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()] += 1
    if "data_source" in record:
        dataset.sources[record["data_source"]] += 1
    if "reward_model" in record:
        answer = record["reward_model"]["ground_truth"]
        dataset.answers[_kind_of_answer(answer)] += 1
        if not isinstance(answer, str) and len(dataset.casts) < _ROWS_NAMED:
            dataset.casts[repr(answer)] = repr(normalise_answer(answer))


def find_row_problem(record: dict[str, Any]) -> str | None:
    """What is wrong with a row, judged by the columns that are there; None when all is well."""
    if "data_source" in record and (not isinstance(record["data_source"], str) or not record["data_source"].strip()):
        return f"data_source is {shown(record['data_source'])}; the reward function is chosen by it, write a name"
    return _find_prompt_problem(record["prompt"]) or (
        _find_reward_problem(record["reward_model"]) if "reward_model" in record else None
    )


def _find_prompt_problem(messages: Any) -> str | None:
    if messages is None:
        return "prompt is null, not a list of messages"
    if not isinstance(messages, list) or not messages:
        return f"prompt is {shown(messages)}, not a list of messages with role and content"
    for message in messages:
        parts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        if not all(isinstance(part, str) and part for part in parts):
            return f"prompt holds {shown(message)}, not a message with role and content as text"
    return None


def _find_reward_problem(reward: Any) -> str | None:
    if reward is None:
        return "reward_model is null"
    answer = reward.get("ground_truth") if isinstance(reward, dict) else None
    if answer is None or normalise_answer(answer) is None:
        return f"reward_model has no ground_truth that can be compared (value: {shown(reward)})"
    return None


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def shown(value: Any) -> str:
    """A value as a message shows it, however long or deep it is."""
    return _REPR.repr(value)[:80]


def normalise_answer(answer: Any) -> str | None:
    """A ground truth as text: 7, "7", 7.0 and ["7"] are all "7"; None when it says nothing or more than one thing."""
    if isinstance(answer, (list, tuple)) and len(answer) == 1:
        answer = answer[0]
    if answer is None or isinstance(answer, (bool, bytes, dict, list, tuple)):
        return None
    if isinstance(answer, float):
        return (str(int(answer)) if answer.is_integer() else repr(answer)) if math.isfinite(answer) else None
    return str(answer).strip() or None


def _kind_of_answer(answer: Any) -> str:
    if isinstance(answer, (int, float)):
        return "numbers"
    return "lists" if isinstance(answer, list) else "text" if isinstance(answer, str) else type(answer).__name__


# ---- checks -----------------------------------------------------------------------------------------------------------


def check_dataset(name: str, dataset: Dataset) -> CheckResult:
    """Readable, with verl's columns, and every row usable."""
    if dataset.problem:
        return CheckResult(name, "cannot be used", dataset.problem)
    if dataset.bad_rows:
        return CheckResult(
            name,
            f"{len(dataset.bad_rows)} bad of {dataset.rows} rows",
            f"in {dataset.paths[0].parent}: {_listed(dataset.bad_rows)}",
        )
    kinds = " and ".join(sorted(dataset.answers))
    if len(dataset.answers) > 1:
        return CheckResult(
            name, "mixed answers", f"{dataset.paths[0]}: ground_truth mixes {kinds}; write every answer as text"
        )
    sources = ", ".join(f"{source} ({rows})" if len(dataset.sources) > 1 else source for source, rows in
                        dataset.sources.items())  # fmt: skip
    return CheckResult(name, f"{dataset.rows} rows" + (f" from {sources}" if sources else ""))


def _listed(complaints: list[str]) -> str:
    more = len(complaints) - _ROWS_NAMED
    return "; ".join(complaints[:_ROWS_NAMED]) + (f"; and {more} more rows" if more > 0 else "")


def check_answers(train: Dataset, dev: Dataset) -> CheckResult:
    """Training and dev answers must be of one kind, or the reward compares text with numbers."""
    name = "answers"
    kinds = [" and ".join(sorted(dataset.answers)) for dataset in (train, dev)]
    if kinds[0] != kinds[1]:
        return CheckResult(
            name,
            f"{kinds[0]} to train, {kinds[1]} to judge",
            f"{dev.paths[0]}: ground_truth holds {kinds[1]}, the training file {kinds[0]}; write both as text",
        )
    if train.casts or dev.casts:
        casts = ", ".join(f"{value} → {text}" for value, text in {**train.casts, **dev.casts}.items())
        return warning(
            name,
            f"{kinds[0]}, read as text: {casts}",
            "verl's own rewards compare text, so such an answer may never count as right; write ground_truth as text",
        )
    return CheckResult(name, kinds[0])


def check_overlap(splits: dict[str, Dataset]) -> list[CheckResult]:
    """Questions that stand in two splits: learnt by heart they count as solved."""
    results = []
    names = list(splits)
    for position, first in enumerate(names):
        for second in names[position + 1 :]:
            shared = splits[first].questions.keys() & splits[second].questions.keys()
            rows = sum(splits[second].questions[question] for question in shared)
            found = f"{rows} of {splits[second].rows} {second} rows"
            if not rows:
                results.append(CheckResult(f"{first} and {second} data", "no question in common"))
            elif first == "training" and second == "dev" and 2 * rows > splits[second].rows:
                problem = (
                    f"most dev questions are trained on, so the search would reward memory; give {second} other rows"
                )
                results.append(CheckResult(f"{first} and {second} data", found + " in both", problem))
            else:
                problem = f"{second} accuracy is flattered by questions that are also in the {first} data; remove them"
                results.append(warning(f"{first} and {second} data", found + " in both", problem))
    return results


def check_features(datasets: Sequence[Dataset], version: str | None) -> CheckResult:
    """Files written by `datasets` 4 cannot be opened by `datasets` before 4, which verl uses to read them.

    Args:
        datasets: all splits.
        version: of the package `datasets` in the training environment; None when unknown.
    """
    name = "parquet metadata"
    newer = [file for dataset in datasets for file in dataset.newer_features]
    if not newer:
        return CheckResult(name, "readable by every version of datasets")
    found = f"feature List (datasets 4) in {', '.join(newer)}"
    fix = "write the files again with pyarrow or pandas, or use datasets 4 in the training environment"
    if version is None:
        return warning(
            name, found, f"the training environment's version of datasets is unknown; if it is below 4, {fix}"
        )
    if int(version.split(".")[0]) < 4:
        return CheckResult(name, found, f"the training environment has datasets {version}, which cannot read it; {fix}")
    return CheckResult(name, f"{found}; the training environment has {version}")


def check_sample_ids(dataset: Dataset) -> CheckResult:
    """Ids of the test rows: unique integers, or none at all (then the row number is the id)."""
    name = "test ids"
    path = dataset.paths[0]
    file = pq.ParquetFile(path)
    if "sample_id" not in file.schema_arrow.names:
        return CheckResult(name, "row numbers (there is no sample_id)")
    ids = file.read(columns=["sample_id"]).column("sample_id").to_pylist()
    wrong = [f"row {row} has {value!r}" for row, value in enumerate(ids) if type(value) is not int]
    if not wrong:
        first: dict[int, int] = {}
        for row, value in enumerate(ids):
            if first.setdefault(value, row) != row:
                wrong.append(f"row {row} repeats {value} of row {first[value]}")
    if wrong:
        return CheckResult(
            name, f"{len(wrong)} bad ids", f"{path}: sample_id must hold unique integers: {_listed(wrong)}"
        )
    return CheckResult(name, f"{len(ids)} unique integers")
