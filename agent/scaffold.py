"""A workspace for people's own model and data on GPUs: verl to train, vLLM to answer.

The folder appears whole or not at all, and an existing file is never overwritten.
"""

import filecmp
import math
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agent.dataset import shown
from agent.errors import PreflightError, describe_os_error
from agent.model_files import read_context
from agent.questions import Questions, read_questions
from agent.script_checks import is_known_source, read_reward_sources
from trials import grading, scaffold
from trials.batching import propose_batches
from trials.embedded.build import build_folder, copy_verl
from trials.environment import EnvironmentUnusable, TrainingRequest, read_training_environment
from trials.runner import child_environment

TEMPLATES = Path(scaffold.__file__).parent
SPLITS = ("train", "dev", "test")
_TEMPLATE_TOKENS = 64
"""Room for what a chat template adds to a prompt."""
_PROMPT_LIMIT = 4096
_RESPONSE_TOKENS = 2048


@dataclass(frozen=True)
class Request:
    """What a person asks `init` for; None lets the data decide."""

    target: Path
    model: Path
    train: tuple[Path, ...]
    dev: tuple[Path, ...]
    test: tuple[Path, ...]
    gpus: int
    steps: int | None = None
    responses: int = 8
    response_tokens: int | None = None
    verl: Path | None = None
    training_env: Path | None = None
    copy_model: bool = False


def build_scaffold(request: Request) -> list[str]:
    """Create the workspace; returns what was decided, one line each.

    Raises:
        PreflightError: model, data or verl cannot be used, or the folder is not empty; nothing is left behind.
    """
    model = request.model.expanduser().resolve()
    if not (model / "config.json").is_file():
        raise PreflightError(f"--model {request.model}: no config.json there; give the folder of a downloaded model")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", model.name)
    package = find_verl(request)
    splits = {split: _read_split(getattr(request, split), split) for split in SPLITS}
    _require_different_files(request)
    settings, notes = plan_settings(request, name, package, splits)

    def fill(root: Path) -> None:
        _fill_verl(package, root / "task" / "repositories" / "verl")
        _fill_scripts(root / "task" / "scripts", settings)
        _fill_data(root / "data" / "datasets" / "main", splits)
        (root / "data" / "outputs").mkdir()
        (root / "data" / "checkpoints").mkdir()
        base = root / "data" / "checkpoints" / name
        if request.copy_model:
            shutil.copytree(model, base)
        else:
            base.symlink_to(model)

    try:
        return [f"workspace {build_folder(request.target, fill)}", *notes]
    except OSError as error:
        said = str(error) if error.errno is None and isinstance(error, FileExistsError) else ""
        raise PreflightError(said or f"{describe_os_error(error, request.target)}; no workspace was created") from None


def _require_different_files(request: Request) -> None:
    files = [(split, path) for split in SPLITS for path in getattr(request, split)]
    for (split, path), (other_split, other) in combinations(files, 2):
        if filecmp.cmp(path, other, shallow=False):
            raise PreflightError(
                f"--{split} {path} and --{other_split} {other} are the same; give every split questions of its own"
            )


def _read_split(paths: tuple[Path, ...], split: str) -> Questions:
    """All files of a split together."""
    parts = [read_questions(path, split=split) for path in paths]
    rows = [row for part in parts for row in part.rows]
    for index, row in enumerate(rows):
        row["extra_info"]["index"] = index
    if split == "test":
        _number_tests(rows, paths)
    return Questions(rows, any(part.is_converted for part in parts))


def _number_tests(rows: list[dict[str, Any]], paths: tuple[Path, ...]) -> None:
    """Ids of test rows are kept; without any, the row's number is its id.

    Raises:
        PreflightError: only some rows have an id, or the ids are not unique integers.
    """
    ids = [row.get("sample_id") for row in rows]
    if all(value is None for value in ids):
        ids = list(range(len(rows)))
    seen: set[int] = set()
    for number, (row, value) in enumerate(zip(rows, ids, strict=True)):
        if type(value) is not int or abs(value) >= 2**63 or value in seen:
            names = ", ".join(map(str, paths))
            raise PreflightError(
                f"{names}: sample_id of test row {number} is {shown(value)}; write unique integers or none at all"
            )
        seen.add(value)
        row["sample_id"] = value


# ---- verl -------------------------------------------------------------------------------------------------------------


def find_verl(request: Request) -> Path:
    """The verl package to copy: of --verl (a checkout or the package itself), else of the training environment.

    Raises:
        PreflightError: there is none, or it has no merger.
    """
    package = _given_package(request.verl) if request.verl else _installed_package(request.training_env)
    has_module = (package / "model_merger" / "__main__.py").is_file() or (package / "model_merger.py").is_file()
    if not has_module and not _repository_merger(package).is_file():
        raise PreflightError(
            f"{package} has neither the module verl.model_merger nor ../scripts/model_merger.py, so its checkpoints cannot "
            "be merged; give --verl a checkout that has one"
        )
    return package


def _repository_merger(package: Path) -> Path:
    return package.parent / "scripts" / "model_merger.py"


def _given_package(verl: Path) -> Path:
    for package in (verl / "verl", verl):
        if (package / "trainer" / "ppo" / "core_algos.py").is_file():
            return package.resolve()
    raise PreflightError(f"--verl {verl}: no verl/trainer/ppo/core_algos.py there; give a checkout of verl")


def _installed_package(training_env: Path | None) -> Path:
    if training_env is None:
        spec = find_spec("verl")  # finds it without importing it
        found = [Path(spec.origin).parent] if spec and spec.origin else []
        where = "this Python environment"
    else:
        found = sorted(training_env.expanduser().glob("lib/python3*/site-packages/verl"))
        where = str(training_env)
    if not found:
        raise PreflightError(f"verl is not installed in {where}; name a checkout with --verl or an environment with "
                             "--training-env")  # fmt: skip
    return found[0].resolve()


def _fill_verl(package: Path, repository: Path) -> None:
    copy_verl(package, repository)
    if _repository_merger(package).is_file():
        shutil.copy(_repository_merger(package), repository / "scripts" / "model_merger.py")


# ---- scripts ----------------------------------------------------------------------------------------------------------


def plan_settings(
    request: Request, model: str, package: Path, splits: dict[str, Questions]
) -> tuple[dict[str, Any], list[str]]:
    """(value of each placeholder of the templates, what to tell the person)."""
    rows = len(splits["train"].rows)
    try:
        train_batch, mini_batch = propose_batches(rows, request.gpus)
    except ValueError as error:
        raise PreflightError(f"{error}; give more rows or fewer --gpus") from None
    per_epoch = rows // train_batch
    steps = request.steps or min(400, max(40, 2 * per_epoch))
    prompt_tokens = plan_prompt_tokens(request, splits)
    response_tokens = plan_response_tokens(request, prompt_tokens)
    own_reward = needs_reward(package, splits)
    settings = {
        "MODEL": model,
        "GPUS": request.gpus,
        "TRAIN_BATCH": train_batch,
        "MINI_BATCH": mini_batch,
        "RESPONSES": request.responses,
        "PROMPT_TOKENS": prompt_tokens,
        "RESPONSE_TOKENS": response_tokens,
        "TOKENS_PER_GPU": max(16384, prompt_tokens + response_tokens),
        "STEPS": steps,
        "EPOCHS": math.ceil(steps / per_epoch),
        "SAVE_FREQ": max(1, steps // 8),
        "REWARD": _REWARD if own_reward else "",
    }
    reward = "task/scripts/reward.py (boxed answers)" if own_reward else "verl's own, by data source"
    notes = [
        f"rows: {', '.join(f'{split} {len(part.rows)}' for split, part in splits.items())}",
        f"verl copied from {package}",
        f"{train_batch} prompts × {request.responses} responses a step on {request.gpus} GPUs, mini batches of {mini_batch}",
        f"{steps} steps, a checkpoint every {settings['SAVE_FREQ']}",
        f"at most {prompt_tokens} tokens of prompt and {response_tokens} of response",
        f"reward: {reward}",
    ]
    return settings, notes


_REWARD = """\
  custom_reward_function.path="'$ROOT/task/scripts/reward.py'" \\
  custom_reward_function.name=compute_score \\
"""


def plan_prompt_tokens(request: Request, splits: dict[str, Questions]) -> int:
    """Room for the longest prompt of all splits and its chat template, in steps of 128 tokens."""
    texts = [
        "\n".join(message["content"] for message in row["prompt"]) for part in splits.values() for row in part.rows
    ]
    tokenizer = request.model.expanduser().resolve() / "tokenizer.json"
    counts: Sequence[int] | None = None
    if tokenizer.is_file():
        prefix = str(request.training_env.expanduser().absolute()) if request.training_env else None
        asked = TrainingRequest(tokenizer=str(tokenizer), texts=texts)
        with suppress(EnvironmentUnusable):
            inherited = child_environment(os.environ, prefix, run_tag="")
            counts = read_training_environment(inherited, Path("/"), asked).tokens
    if counts is None:  # a byte-level tokenizer makes at most one token of a byte
        counts = [len(text.encode()) for text in texts]
    return min(_PROMPT_LIMIT, math.ceil((max(counts) + _TEMPLATE_TOKENS) / 128) * 128)


def plan_response_tokens(request: Request, prompt_tokens: int) -> int:
    """As asked, by default 2048 or what the model's positions leave.

    Raises:
        PreflightError: the model cannot hold prompt and response.
    """
    context = read_context(request.model)
    asked = request.response_tokens or _RESPONSE_TOKENS
    if context is None or prompt_tokens + asked <= context:
        return asked
    room = context - prompt_tokens
    if request.response_tokens is not None or room < 1:
        raise PreflightError(
            f"{request.model} holds {context} tokens, too few for {prompt_tokens} of prompt and {asked} of response; give "
            "fewer --response-tokens, shorter questions or another model"
        )
    return room


def needs_reward(package: Path, splits: dict[str, Questions]) -> bool:
    """Whether verl's own rewards do not fit: a file was converted, or verl does not know a data source."""
    known = read_reward_sources(package)
    rows = [row for split in ("train", "dev") for row in splits[split].rows]
    return any(part.is_converted for part in splits.values()) or not all(
        is_known_source(source, known) for source in {row["data_source"] for row in rows}
    )


def _fill_scripts(scripts: Path, settings: dict[str, Any]) -> None:
    scripts.mkdir(parents=True)
    for name in ("train.sh", "inference.sh", "inference.py"):
        text = (TEMPLATES / name).read_text(encoding="utf-8")
        for placeholder, value in settings.items():
            text = text.replace(f"@{placeholder}@", str(value))
        (scripts / name).write_text(text, encoding="utf-8")
    for script in scripts.glob("*.sh"):
        script.chmod(0o755)
    if settings["REWARD"]:
        shutil.copy(grading.__file__, scripts / "reward.py")


def _fill_data(folder: Path, splits: dict[str, Questions]) -> None:
    folder.mkdir(parents=True)
    for split, questions in splits.items():
        pq.write_table(pa.Table.from_pylist(questions.rows), folder / f"{split}.parquet")
