"""Inference → validate → publish, on a merged model. Each step leaves its result whole or not at all."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agent.errors import AgentError, Interrupted, StageError
from agent.merging import Runner
from agent.tensors import LogitsError, read_sample_logits
from agent.workspace import Workspace, find_vocabulary, read_sample_ids
from trials.guard import CANNOT_WRITE, Guarded
from trials.runner import child_environment, is_full

RESULTS = "math_results.parquet"
LOGITS = "math_results_logits.pt"
_HELD = ".held_by_agent"


@dataclass(frozen=True)
class Submission:
    """A validated pair of result files."""

    folder: str
    samples: int
    mean_entropy: float
    """Over all generated tokens, nats."""
    mean_tokens: float
    accuracy: float | None
    """Share of right answers where the test file has them; None where it has none."""
    sha256: dict[str, str]


def run_logged(
    command: list[str],
    *,
    what: str,
    log: Path,
    cwd: Path,
    timeout_s: float,
    environment: dict[str, str],
    run_tag: str,
    training_env: str | None = None,
    must_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run a command under guard and wait for it.

    Raises:
        StageError: it failed or took too long; the message quotes the log's last line.
        Interrupted: `must_stop` became true.
    """
    env = {**child_environment(os.environ, training_env, run_tag), **environment}
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    guarded = Guarded(command, log=log, env=env, cwd=cwd, record=log.with_suffix(".process.json"))
    deadline = time.monotonic() + timeout_s
    try:
        while (exit_code := guarded.poll()) is None:
            if must_stop():
                raise Interrupted(f"{what} was stopped on request")
            if time.monotonic() > deadline:
                raise StageError(f"{what} took longer than {timeout_s:.0f} s and was stopped; see {log}")
            time.sleep(0.1)
    finally:
        guarded.close()
    if exit_code == CANNOT_WRITE:
        raise StageError(
            f"{what} could not start: {log.parent} cannot be written (disk full?); free space, then resume"
        )
    if exit_code != 0:
        lines = [line for line in log.read_text(errors="replace", encoding="utf-8").splitlines() if line.strip()]
        last = lines[-1].strip()[:300] if lines else "the log is empty"
        last += "; no space is left beside the log, free some, then resume" if is_full(log.parent) else ""
        raise StageError(f"{what} failed with exit code {exit_code}: {last} — see {log}")


# ---- inference --------------------------------------------------------------------------------------------------------


def run_inference(workspace: Workspace, model: Path, target: Path, *, log: Path, timeout_s: float, run: Runner) -> None:
    """Run the workspace's inference.sh on a model and collect its two files in `target`.

    The script is told the folder by OUTPUT_DIR. One that does not know that variable writes to data/outputs/: what lies
    there is moved aside first and moved back afterwards, whatever happens; after a crash the next call moves it back.

    Raises:
        StageError: the script failed, took too long or left no result.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    restore_outputs(workspace)
    command = inference_command(workspace, model)
    if not _knows_output_dir(workspace):
        _move_files(workspace.outputs, workspace.outputs / _HELD)
    try:
        environment = {"OUTPUT_DIR": str(target)}
        run(command, what="inference.sh", log=log, cwd=workspace.scripts, timeout_s=timeout_s, environment=environment)
        if not _knows_output_dir(workspace):
            _move_files(workspace.outputs, target)
    except (AgentError, OSError):  # half a result is of no use, and may be what fills the disk
        for folder in (target, *([] if _knows_output_dir(workspace) else [workspace.outputs])):
            for name in (RESULTS, LOGITS):
                (folder / name).unlink(missing_ok=True)
        raise
    finally:
        restore_outputs(workspace)
    missing = [name for name in (RESULTS, LOGITS) if not (target / name).exists()]
    if missing:
        raise StageError(f"inference.sh ended well but left no {' and no '.join(missing)} in {target}; see {log}")


def inference_command(workspace: Workspace, model: Path) -> list[str]:
    """The command line of one inference."""
    return ["bash", str(workspace.inference_script), str(model)]


def restore_outputs(workspace: Workspace) -> None:
    """Move back what an inference that writes to data/outputs/ had moved aside."""
    held = workspace.outputs / _HELD
    if held.is_dir():
        _move_files(held, workspace.outputs)
        shutil.rmtree(held)


def _knows_output_dir(workspace: Workspace) -> bool:
    scripts = (workspace.inference_script, workspace.scripts / "inference.py")
    return any("OUTPUT_DIR" in script.read_text(errors="replace", encoding="utf-8") for script in scripts)


def _move_files(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for name in (RESULTS, LOGITS):
        if (source / name).exists():
            shutil.move(source / name, target / name)


# ---- validate ---------------------------------------------------------------------------------------------------------


def validate_submission(folder: Path, test_file: Path, model: Path) -> Submission:
    """Check both files against the task's rules.

    `math_results.parquet`: exactly the columns sample_id (integer) and output (string), one row per test row, in test
    order, no nulls. `math_results_logits.pt`: a list of float tensors [generated tokens, model vocabulary], one per
    row, finite, and no tokens only where the output is empty.

    Raises:
        StageError: naming every rule that is broken.
    """
    problems, outputs = _check_results(folder / RESULTS, read_sample_ids(test_file))
    logits_problems, tokens, mean_entropy = _check_logits(folder / LOGITS, outputs, read_vocabulary(model))
    problems += logits_problems
    if problems:
        raise StageError(f"the submission in {folder} is not valid: " + " | ".join(problems))
    return Submission(
        folder=str(folder),
        samples=len(outputs),
        mean_entropy=mean_entropy,
        mean_tokens=sum(tokens) / len(tokens),
        accuracy=score_outputs(test_file, outputs),
        sha256={name: file_sha256(folder / name) for name in (RESULTS, LOGITS)},
    )


def read_vocabulary(model: Path) -> int:
    """The model's vocabulary size (not the tokenizer's length, which is smaller for Qwen2.5)."""
    vocabulary: int | None = find_vocabulary(model)
    if vocabulary is None:
        raise StageError(f"{model}/config.json names no vocab_size")
    return vocabulary


def _check_results(path: Path, expected_ids: list[int]) -> tuple[list[str], list[str]]:
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        return [f"{path.name} is not readable ({str(error).splitlines()[0][:200]})"], []
    if table.column_names != ["sample_id", "output"]:
        return [f"{path.name} has columns {table.column_names}, not ['sample_id', 'output']"], []
    problems = []
    id_type, text_type = table.schema.field("sample_id").type, table.schema.field("output").type
    if not pa.types.is_integer(id_type):
        problems.append(f"{path.name}: sample_id is {id_type}, not an integer")
    if not (pa.types.is_string(text_type) or pa.types.is_large_string(text_type)):
        problems.append(f"{path.name}: output is {text_type}, not a string")
    ids, outputs = table.column("sample_id").to_pylist(), table.column("output").to_pylist()
    if None in outputs:
        problems.append(f"{path.name}: output of row {outputs.index(None)} is null")
    if len(ids) != len(expected_ids):
        problems.append(f"{path.name} has {len(ids)} rows, the test file {len(expected_ids)}")
    elif ids != expected_ids:
        row = next(row for row, pair in enumerate(zip(ids, expected_ids, strict=True)) if pair[0] != pair[1])
        problems.append(f"{path.name} row {row} has sample_id {ids[row]!r}, the test file has {expected_ids[row]!r}")
    return problems, ["" if output is None else str(output) for output in outputs]


def _check_logits(path: Path, outputs: list[str], vocabulary: int) -> tuple[list[str], list[int], float]:
    problems: list[str] = []
    tokens: list[int] = []
    entropy_sum = 0.0
    try:
        for index, sample in enumerate(read_sample_logits(path)):
            tokens.append(sample.tokens)
            if sample.vocabulary != vocabulary:
                problems.append(f"{path.name}: sample {index} has {sample.vocabulary} columns, the model {vocabulary}")
            if sample.non_finite_rows:
                problems.append(f"{path.name}: sample {index} has {sample.non_finite_rows} rows that are not finite")
            if index < len(outputs) and outputs[index] and not sample.tokens:
                problems.append(f"{path.name}: sample {index} has no rows, but its output is not empty")
            entropy_sum += sample.mean_entropy * sample.tokens if sample.tokens else 0.0
            if len(problems) > 5:
                return [*problems, "and so on"], tokens, float("nan")
    except LogitsError as error:
        return [*problems, str(error)], tokens, float("nan")
    if len(tokens) != len(outputs):
        problems.append(f"{path.name} has {len(tokens)} samples, {RESULTS} {len(outputs)}")
    return problems, tokens or [0], entropy_sum / max(1, sum(tokens))


def score_outputs(test_file: Path, outputs: list[str]) -> float | None:
    """Share of right answers by math-verify; None where the test file has no answers or math-verify is not installed."""
    try:
        from trials.grading import compute_score

        rewards = pq.read_table(test_file, columns=["reward_model"]).column("reward_model").to_pylist()
        answers = [reward["ground_truth"] for reward in rewards]
        if None in answers:
            return None
        scores = [compute_score("", text, answer) for text, answer in zip(outputs, answers, strict=True)]
    except (ImportError, pa.ArrowException, KeyError, TypeError):
        return None
    return sum(scores) / len(scores)


def file_sha256(path: Path) -> str:
    """Hex digest, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


# ---- publish ----------------------------------------------------------------------------------------------------------


def publish(submission: Submission, outputs: Path, keep_previous_in: Path | None) -> list[str]:
    """Put copies of a validated submission into `outputs` by rename; what it replaces is kept. Returns the paths.

    Copies and not links: the published files and those of the run must not change together.

    Args:
        submission: a validated one.
        outputs: where the task wants the files.
        keep_previous_in: a folder that does not exist yet; created if something is replaced. None keeps nothing.

    Raises:
        StageError: the folder cannot be written; nothing was replaced then.
    """
    source = Path(submission.folder)
    staged = [(outputs / f".{name}.publishing", outputs / name) for name in (RESULTS, LOGITS)]
    try:
        try:
            for temporary, final in staged:
                _copy(source / final.name, temporary)
            for _, final in staged:
                if keep_previous_in and final.exists():
                    keep_previous_in.mkdir(parents=True, exist_ok=True)
                    _copy(final, keep_previous_in / final.name)
        except OSError:
            for temporary, _ in staged:
                temporary.unlink(missing_ok=True)
            if keep_previous_in:
                shutil.rmtree(keep_previous_in, ignore_errors=True)
            raise
        for temporary, final in staged:
            temporary.rename(final)
        _sync_folder(outputs)
    except OSError as error:
        raise StageError(
            f"cannot publish to {outputs}: {error.strerror}; the validated files are in {source} — copy them or fix the "
            "folder, then `python run_agent.py resume`"
        ) from None
    (source / "submission.json").write_text(json.dumps(asdict(submission), indent=1), encoding="utf-8")
    return [str(final) for _, final in staged]


def is_published(submission: Submission, outputs: Path) -> bool:
    """Whether `outputs` holds exactly this submission."""
    return all(
        (outputs / name).is_file() and file_sha256(outputs / name) == digest
        for name, digest in submission.sha256.items()
    )


def is_copy(folder: Path, outputs: Path) -> bool:
    """Whether `outputs` holds what `publish` put there from `folder`, told by sizes and times, which copies share."""
    try:
        return all(_size_and_time(folder / name) == _size_and_time(outputs / name) for name in (RESULTS, LOGITS))
    except OSError:
        return False


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _copy(source: Path, target: Path) -> None:
    """A durable copy, with the times of its source."""
    shutil.copy2(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
