"""The merged model answers a few dev questions before the long inference: is it the model that was trained?

`trials/answering.py` loads it in the training environment and samples as train.sh validates. A model that cannot be loaded,
whose logits are not finite, or whose entropy is far above what the trainer logged is refused. A dev accuracy that differs
from the trainer's is shown, because sampling, reward and the choice of questions differ, too. Where nothing can be said
(no transformers, no tokenizer, out of time), that is recorded and the run goes on.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from agent.errors import PreflightError, StageError
from agent.merging import Runner, merge_environment
from agent.script_checks import read_setting
from agent.tensors import TOKENIZER_FILES
from agent.workspace import Workspace
from trials.script import ScriptError

QUESTIONS = 32
_GENERATION_S = 90.0
_LIMIT_S = 240.0
_RESPONSE_TOKENS = 512
"""verl's own default where train.sh says nothing."""
_ENTROPY_FACTOR, _ENTROPY_MARGIN = 3.0, 2.0
"""The entropy may be so many times the trainer's, and so many nats more. A lost output layer gives about ln(vocabulary)."""
_STANDARD_ERRORS = 3.0
_LEAST_ANSWERS = 8
_VALIDATION = "actor_rollout_ref.rollout.val_kwargs."
_CHAT = "data.apply_chat_template_kwargs."
_PROGRAM = Path(__file__).parents[1] / "trials" / "answering.py"


@dataclass(frozen=True)
class Comparison:
    """What the merged model showed beside what the trainer logged at that step; None is unknown."""

    entropy: float | None
    """Nats per token over the answers' tokens."""
    trainer_entropy: float | None
    entropy_limit: float | None
    """More than this is refused."""
    accuracy: float | None
    trainer_accuracy: float | None
    tolerance: float | None
    """Three binomial standard errors of the accuracy on as many questions."""
    answers: int
    """Finished within the time."""
    tokens: int
    problem: str | None
    """Why the model is refused."""
    note: str
    """What a reader should know about the two accuracies."""


def check_merged_model(
    workspace: Workspace, model: Path, accuracy: float | None, entropy: float | None, run: Runner
) -> dict[str, Any]:
    """Let a merged model answer dev questions; the facts for the stage's receipt.

    Args:
        workspace: says how train.sh validates.
        model: its folder; request, answers and log are written beside it.
        accuracy: the trainer's dev accuracy for this checkpoint, None when unknown.
        entropy: the policy entropy that the trainer logged for it, nats per token.
        run: runs a command.

    Raises:
        StageError: the model cannot be the one that was trained.
    """
    try:
        rows = read_dev_rows(workspace)
        request = build_request(workspace, model, [row["prompt"] for row in rows])
    except (PreflightError, ScriptError, OSError, pa.ArrowException, KeyError, ValueError) as error:
        return {"unchecked": f"how train.sh validates cannot be told: {error}"}
    answer = _ask(workspace, model, request, run)
    if "unchecked" in answer:
        return answer
    log = model.with_name("model_check.log")
    comparison = None
    if "problem" not in answer:
        comparison = compare(answer, grade(rows, answer), accuracy, entropy)
    problem = comparison.problem if comparison else answer["problem"]
    if problem is not None:
        raise StageError(
            f"the merged model at {model} is not the one that was trained: {problem}; see {log} and the merger's log beside "
            "it, mend the merger or the checkpoint, then resume"
        )
    assert comparison is not None
    return {**asdict(comparison), "settings": _settings(workspace, request, answer)}


def _ask(workspace: Workspace, model: Path, request: Mapping[str, Any], run: Runner) -> dict[str, Any]:
    """What `trials/answering.py` says."""
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        return {"unchecked": "the model has no tokenizer files"}
    asked, told = model.with_name("model_check.json"), model.with_name("model_check_answer.json")
    asked.write_text(json.dumps(request), encoding="utf-8")
    told.unlink(missing_ok=True)
    command = ["python3", "-c", _PROGRAM.read_text(encoding="utf-8"), str(asked), str(told)]
    try:
        run(
            command, what="the check of the merged model", log=model.with_name("model_check.log"), cwd=workspace.verl,
            timeout_s=_LIMIT_S, environment=merge_environment(workspace.verl),
        )  # fmt: skip
        return dict(json.loads(told.read_text(encoding="utf-8")))
    except (StageError, OSError, ValueError) as error:
        return {"unchecked": str(error)}


# ---- what is asked ----------------------------------------------------------------------------------------------------


def read_dev_rows(workspace: Workspace) -> list[dict[str, Any]]:
    """At most QUESTIONS rows of the dev files, evenly spread."""
    columns = ["prompt", "reward_model"]
    rows = pa.concat_tables([pq.read_table(file, columns=columns) for file in workspace.dev_files]).to_pylist()
    count = min(QUESTIONS, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def build_request(workspace: Workspace, model: Path, prompts: Sequence[Any]) -> dict[str, Any]:
    """How train.sh validates, as `trials/answering.py` takes it; verl's defaults where train.sh says nothing.

    Raises:
        PreflightError: a value cannot be known.
    """

    def number(key: str, default: float) -> float:
        value = workspace.setting(key)
        return default if value is None else float(value)

    samples = workspace.setting(f"{_VALIDATION}do_sample") in ("True", "true")
    options = {key: workspace.setting(key) for key in workspace.script.overrides if key.startswith(_CHAT)}
    return {
        "model": str(model),
        "base": str(workspace.base_model),
        "trust_remote_code": workspace.setting("actor_rollout_ref.model.trust_remote_code") in ("True", "true"),
        "prompts": list(prompts),
        "chat_template_options": {
            key.removeprefix(_CHAT): yaml.safe_load(value) for key, value in options.items() if value
        },
        "response_tokens": workspace.setting_int("data.max_response_length") or _RESPONSE_TOKENS,
        "seconds": _GENERATION_S,
        "temperature": number(f"{_VALIDATION}temperature", 0.0) if samples else 0.0,
        "top_p": number(f"{_VALIDATION}top_p", 1.0),
        "top_k": int(number(f"{_VALIDATION}top_k", -1)),
        "entropy_temperature": number("actor_rollout_ref.rollout.temperature", 1.0),
    }


# ---- what follows -----------------------------------------------------------------------------------------------------


def grade(rows: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> list[float] | None:
    """The score of each answer that was finished in time; None where math-verify is not installed beside the agent."""
    try:
        from trials.grading import compute_score

        finished = zip(rows, answer["texts"], answer["finished"], strict=True)
        return [compute_score("", text, row["reward_model"]["ground_truth"]) for row, text, ended in finished if ended]
    except ImportError:
        return None


def compare(
    answer: Mapping[str, Any], scores: Sequence[float] | None, accuracy: float | None, entropy: float | None
) -> Comparison:
    """Judge what the model answered.

    Args:
        answer: of `trials/answering.py`, with tokens, mean_entropy and non_finite_tokens.
        scores: 0 or 1 for each finished answer; None when they could not be graded.
        accuracy: the trainer's dev accuracy.
        entropy: the trainer's, nats per token.
    """
    limit = None if entropy is None else _ENTROPY_FACTOR * max(entropy, 0.0) + _ENTROPY_MARGIN
    measured, tokens = answer["mean_entropy"], int(answer["tokens"])
    problem = None
    if tokens and answer["non_finite_tokens"] == tokens:
        problem = f"the logits of all {tokens} tokens that it generated are not finite"
    elif measured is not None and limit is not None and measured > limit:
        problem = (
            f"its entropy is {measured:.2f} nats per token over {tokens} tokens, the trainer logged {entropy:.2f} (more "
            f"than {limit:.2f} is refused): it writes gibberish"
        )
    count = sum(answer["finished"])
    own = sum(scores) / len(scores) if scores else None
    tolerance = _tolerance(accuracy, count) if own is not None and accuracy is not None else None
    return Comparison(
        measured, entropy, limit, own, accuracy, tolerance, count, tokens, problem,
        _describe(scores, own, accuracy, tolerance, count),
    )  # fmt: skip


def _tolerance(accuracy: float, count: int) -> float | None:
    """None where too few answers are finished to say anything."""
    if count < _LEAST_ANSWERS:
        return None
    share = min(max(accuracy, 0.5 / count), 1.0 - 0.5 / count)
    return _STANDARD_ERRORS * math.sqrt(share * (1.0 - share) / count)


def _describe(
    scores: Sequence[float] | None, own: float | None, accuracy: float | None, tolerance: float | None, count: int
) -> str:
    if scores is None:
        return "accuracy not compared: math-verify is not installed beside the agent"
    if own is None or accuracy is None or tolerance is None:
        return f"accuracy not compared: {count} answers finished, the trainer's is {accuracy}"
    if abs(own - accuracy) > tolerance:
        return (
            f"the dev accuracies differ by {abs(own - accuracy):.3f}, more than the {tolerance:.3f} that chance explains on "
            f"{count} questions: compare the settings below before trusting either"
        )
    return f"the dev accuracies agree within {tolerance:.3f}, three standard errors on {count} questions"


def _settings(workspace: Workspace, request: Mapping[str, Any], answer: Mapping[str, Any]) -> list[list[str]]:
    """(what, in the training, in the check) of all that may make the two differ."""

    overrides = workspace.script.overrides

    def told(key: str) -> str:
        return read_setting(workspace, key) or str(overrides.get(key, "verl's default"))

    def validation(*names: str) -> str:
        return ", ".join(f"{name} {told(_VALIDATION + name)}" for name in names)

    sampling = "greedy"
    if request["temperature"] > 0:
        sampling = f"temperature {request['temperature']}, top_p {request['top_p']}, top_k {request['top_k']}"
    rewards = [told(key) for key in overrides if key.endswith("reward_function.path")]
    everything = sum(workspace.dev_rows().values())
    return [
        ["questions", f"all {everything}", f"{len(request['prompts'])} of them, evenly spread"],
        ["sampling", validation("do_sample", "temperature", "top_p", "top_k", "n"), sampling],
        ["longest answer", told("data.max_response_length"), f"{request['response_tokens']} tokens"],
        [
            "generator",
            told("actor_rollout_ref.rollout.name"),
            f"transformers {answer['transformers']}, {answer['dtype']} on {answer['device']}",
        ],
        ["reward", rewards[0] if rewards else "verl's own, by data source", "math-verify (trials/grading.py)"],
        [
            "entropy",
            "over answers to training questions, before the update",
            f"over these answers, temperature {request['entropy_temperature']:g}",
        ],
    ]
