"""Merge → inference → validate → publish. Each step leaves its result whole or not at all."""

import hashlib
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agent.errors import StageError
from agent.tensors import LogitsError, find_model_problem, read_sample_logits
from agent.workspace import Workspace, read_sample_ids
from trials.guard import RUN_TAG, Guarded

RESULTS = "math_results.parquet"
LOGITS = "math_results_logits.pt"


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
    command: list[str], *, log: Path, cwd: Path, timeout_s: float, run_tag: str, training_env: str | None, what: str,
    environment: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """Run a command under guard and wait for it.

    Raises:
        StageError: it failed or took too long; the message quotes the log's last line.
    """
    prefix = Path(training_env) / "bin" if training_env else Path(sys.executable).parent
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME") and not k.startswith("RAY_")}
    env.update({"PATH": f"{prefix}{os.pathsep}{env.get('PATH', os.defpath)}", RUN_TAG: run_tag, **(environment or {})})
    log.parent.mkdir(parents=True, exist_ok=True)
    guarded = Guarded(command, log=log, env=env, cwd=cwd, record=log.with_suffix(".process.json"))
    deadline = time.monotonic() + timeout_s
    try:
        while (exit_code := guarded.poll()) is None:
            if time.monotonic() > deadline:
                raise StageError(f"{what} took longer than {timeout_s:.0f} s and was stopped; see {log}")
            time.sleep(0.1)
    finally:
        guarded.close()
    if exit_code != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip()[:300] if lines else "the log is empty"
        raise StageError(f"{what} failed with exit code {exit_code}: {last} — see {log}")


# ---- merge ------------------------------------------------------------------------------------------------------------


def merge_checkpoint(
    workspace: Workspace, actor: Path, target: Path, *, log: Path, run_tag: str, training_env: str | None
) -> None:
    """Turn a checkpoint's shards into a Hugging Face model at `target`, with the workspace's own merger.

    Raises:
        StageError: the merger failed or its result has no usable weights.
    """
    staging = target.with_name(target.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    command = ["python3", str(workspace.merger), "--local_dir", str(actor)]
    takes_target = "--target_dir" in workspace.merger.read_text(errors="replace")
    if takes_target:
        command += ["--target_dir", str(staging)]
    run_logged(
        command, log=log, cwd=workspace.verl, timeout_s=3600, run_tag=run_tag, training_env=training_env, what="the merge",
        environment={"PYTHONPATH": str(workspace.verl)},
    )  # fmt: skip
    if not takes_target:
        shutil.copytree(actor / "huggingface", staging)
    problem = find_model_problem(staging, workspace.base_model)
    if problem:
        raise StageError(f"the merged model at {staging} cannot be used: {problem}; see {log}")
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)


# ---- inference --------------------------------------------------------------------------------------------------------


def run_inference(
    workspace: Workspace,
    model: Path,
    target: Path,
    *,
    log: Path,
    timeout_s: float,
    run_tag: str,
    training_env: str | None,
) -> None:
    """Run the workspace's inference.sh on a model and collect its two files in `target`.

    The script is told the folder by OUTPUT_DIR. One that ignores it writes to data/outputs/: then fresh files are taken
    from there and what lay there before is put back.

    Raises:
        StageError: the script failed, took too long or left no result.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    outputs = {name: workspace.outputs / name for name in (RESULTS, LOGITS)}
    aside = target.with_name(target.name + ".previous")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    held = {name: path.stat().st_mtime_ns for name, path in outputs.items() if path.exists()}
    for name in held:
        os.link(outputs[name], aside / name) if _same_device(outputs[name], aside) else shutil.copy2(
            outputs[name], aside
        )
    run_logged(
        ["bash", str(workspace.inference_script), str(model)], log=log, cwd=workspace.scripts, timeout_s=timeout_s,
        run_tag=run_tag, training_env=training_env, what="inference.sh", environment={"OUTPUT_DIR": str(target)},
    )  # fmt: skip
    for name, path in outputs.items():
        if not (target / name).exists() and path.exists() and path.stat().st_mtime_ns != held.get(name):
            shutil.move(path, target / name)
            if name in held:
                shutil.copy2(aside / name, path)
    shutil.rmtree(aside)
    missing = [name for name in outputs if not (target / name).exists()]
    if missing:
        raise StageError(f"inference.sh ended well but left no {' and no '.join(missing)} in {target}; see {log}")


def _same_device(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev


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
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


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
    """Share of right answers by math-verify, where the test file has answers and math-verify is installed."""
    table = pq.read_table(test_file)
    if "reward_model" not in table.column_names:
        return None
    try:
        from trials.grading import compute_score

        rewards = table.column("reward_model").to_pylist()
        scores = [compute_score("", text, row["ground_truth"]) for text, row in zip(outputs, rewards, strict=True)]
    except ImportError:
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


def publish(submission: Submission, outputs: Path, keep_previous_in: Path) -> list[str]:
    """Put a validated submission into `outputs` by rename; what it replaces is kept. Returns the published paths.

    Raises:
        StageError: the folder cannot be written; nothing was replaced then.
    """
    source = Path(submission.folder)
    staged: list[tuple[Path, Path]] = []
    try:
        for name in (RESULTS, LOGITS):
            temporary = outputs / f".{name}.publishing"
            temporary.unlink(missing_ok=True)
            _link_or_copy(source / name, temporary)
            staged.append((temporary, outputs / name))
        for _, final in staged:
            if final.exists():
                keep_previous_in.mkdir(parents=True, exist_ok=True)
                _link_or_copy(final, keep_previous_in / final.name)
        for temporary, final in staged:
            temporary.rename(final)
        _sync_folder(outputs)
    except OSError as error:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)
        raise StageError(
            f"cannot publish to {outputs}: {error.strerror}; the validated files are in {source} — copy them or fix the "
            "folder, then `python run_agent.py resume`"
        ) from None
    (source / "submission.json").write_text(json.dumps(asdict(submission), indent=1))
    return [str(final) for _, final in staged]


def _link_or_copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    if _same_device(source, target.parent):
        os.link(source, target)
    else:
        shutil.copy2(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
