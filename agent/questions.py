"""Other people's data files → rows in verl's schema, or a refusal that names every bad row.

Understood are parquet in verl's schema, and parquet or JSON lines with a question and an answer.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agent.checks import first_line
from agent.dataset import find_row_problem, normalise_answer, shown
from agent.errors import PreflightError
from search_spaces.plain_files import require_file

QUESTION, ANSWER = ("question", "problem"), ("answer", "ground_truth")
INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."
_ROWS_NAMED = 3


@dataclass
class Questions:
    """One file's rows in verl's schema."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    is_converted: bool = False
    """Made from questions and answers: the prompts ask for a boxed answer."""


def read_questions(path: Path, *, split: str) -> Questions:
    """Read a file of one split; a test file may lack answers.

    Raises:
        PreflightError: unreadable, an unknown format, no rows, or bad rows, each with its number.
    """
    questions, problems = Questions(), []
    for where, record in _read_records(path):
        if isinstance(record, str):
            problems.append(f"{where}: {record}")
            continue
        is_verl = "prompt" in record and not any(name in record for name in QUESTION)
        row, problem = _take(record, split) if is_verl else _convert(record, path, split)
        problem = problem or _find_text_problem(row)
        questions.is_converted |= not is_verl
        problems += [f"{where}: {problem}"] if problem else []
        row["extra_info"] = {"split": split, "index": len(questions.rows)}
        if split == "test" and record.get("sample_id") is not None:
            row["sample_id"] = record["sample_id"]
        questions.rows.append(row)
    if problems:
        more = f"; and {len(problems) - _ROWS_NAMED} more" if len(problems) > _ROWS_NAMED else ""
        raise PreflightError(f"{path}: {'; '.join(problems[:_ROWS_NAMED])}{more}; correct the file")
    if not questions.rows:
        raise PreflightError(f"{path} has no rows")
    return questions


def _read_records(path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """(row or line number, record or complaint) of each."""
    try:
        if path.suffix in (".jsonl", ".json"):
            with require_file(path).open(encoding="utf-8-sig") as file:
                yield from ((f"line {number}", _parse(line)) for number, line in enumerate(file, 1) if line.strip())
        elif path.suffix == ".parquet":
            row = 0
            for batch in pq.ParquetFile(require_file(path)).iter_batches():
                for record in batch.to_pylist():
                    yield f"row {row}", record
                    row += 1
        else:
            raise PreflightError(f"{path}: give a .parquet or .jsonl file")
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise PreflightError(f"{path} cannot be read ({first_line(error)})") from None


def _parse(line: str) -> dict[str, Any] | str:
    try:
        record = json.loads(line)
    except ValueError:
        return f"not JSON: {line.strip()[:60]!r}"
    except RecursionError:
        return "nested too deeply"
    return record if isinstance(record, dict) else f"not a JSON object: {line.strip()[:60]!r}"


def _take(record: dict[str, Any], split: str) -> tuple[dict[str, Any], str | None]:
    """A row that is in verl's schema already."""
    needed = ("prompt",) if split == "test" else ("data_source", "prompt", "reward_model")
    problem = find_row_problem({name: record.get(name) for name in needed})
    reward = record.get("reward_model")
    answer = reward.get("ground_truth") if isinstance(reward, dict) else None
    messages = [] if problem else [{key: message[key] for key in ("role", "content")} for message in record["prompt"]]
    return _row(record.get("data_source") or split, messages, normalise_answer(answer)), problem


def _convert(record: dict[str, Any], path: Path, split: str) -> tuple[dict[str, Any], str | None]:
    """A row made from a question and an answer."""
    question = next((record[name] for name in QUESTION if name in record), None)
    answer = next((record[name] for name in ANSWER if name in record), None)
    problem = None
    if not isinstance(question, str) or not question.strip():
        problem = f"{' or '.join(QUESTION)} is {shown(question)}, not text"
    if isinstance(answer, str):
        answer = answer.rpartition("####")[2]  # GSM8K writes its answer behind the reasoning
    text = normalise_answer(answer)
    if text is None and (answer is not None or split != "test"):
        problem = problem or f"{' or '.join(ANSWER)} is {shown(answer)}, not one answer"
    messages = [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}]
    return _row(record.get("data_source") or path.stem, messages, text), problem


def _find_text_problem(row: dict[str, Any]) -> str | None:
    """What no file could hold as text."""
    texts = [
        row["data_source"],
        *(message["content"] for message in row["prompt"]),
        row["reward_model"]["ground_truth"],
    ]
    for text in filter(None, texts):
        if not isinstance(text, str):
            return f"data_source is {shown(text)}, not text"
        if any("\ud800" <= character <= "\udfff" for character in text):
            return f"{shown(text)} holds half of a character (\\ud800 … \\udfff)"
    return None


def _row(source: str, messages: list[dict[str, str]], answer: str | None) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": messages,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
    }
