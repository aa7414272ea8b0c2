"""Append the overlay to a workspace's copy of verl's ``core_algos.py``; inspect, check and revert it.

The installed file is ``original bytes + three newlines + block``. The block starts and ends with a marker
line; the first carries the format version, the sha256 of the original bytes and the sha256 of the block's
body, so that an edit by hand of either part is noticed. Such a file is never overwritten.

Standard library only: this runs in environments that have neither torch nor verl.
"""

import ast
import glob
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_overlay.configuration import (
    OverlayConfiguration,
    OverlayError,
    canonical_json,
    check_configuration,
    configuration_id,
    full_configuration,
    impossible_without_aggregation,
    knobs,
    parse_configuration,
    read_configuration_text,
)
from verl_overlay.sidefiles import FOLDER_VARIABLE

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "InstallReport",
    "OverlayError",
    "Shape",
    "acts_on_advantage",
    "check",
    "check_configuration",
    "configuration_identity",
    "install",
    "is_installed",
    "knobs",
    "read_configuration",
    "render_block",
    "require_supported",
    "revert",
]

ENVIRONMENT_VARIABLE = "VERL_OVERLAY"
FORMAT_VERSION = 1
SEPARATOR = b"\n\n\n"
BEGIN = "# >>> verl_overlay"
END = "# <<< verl_overlay"
MODULES = ("configuration", "sidefiles", "control", "advantages", "losses", "entry")
GRPO = "compute_grpo_outcome_advantage"


@dataclass(frozen=True)
class Shape:
    """How a verl version calls its policy loss: the names and arguments that the block builds on."""

    name: str
    versions: str
    loss: str
    """The policy loss that verl's actor calls."""
    arguments: Mapping[str, tuple[str, ...]]
    """Function -> arguments that it must take."""


_TENSORS = ("old_log_prob", "log_prob", "advantages")
_AGGREGATE = {"agg_loss": ("loss_mat", "loss_mask", "loss_agg_mode")}
_ADVANTAGE = ("token_level_rewards", "index", "epsilon")
_CLIP = ("cliprange", "cliprange_low", "cliprange_high", "clip_ratio_c", "loss_agg_mode")
SHAPES = (
    Shape(
        "registry",
        "0.6.1 and later",
        "compute_policy_loss_vanilla",
        {
            "register_policy_loss": ("name",),
            "compute_policy_loss_vanilla": (
                *_TENSORS,
                "response_mask",
                "loss_agg_mode",
                "config",
                "rollout_is_weights",
            ),
            GRPO: (*_ADVANTAGE, "response_mask"),
            **_AGGREGATE,
        },
    ),
    Shape(
        "four",
        "0.4 and 0.5",
        "compute_policy_loss",
        {
            "compute_policy_loss": (*_TENSORS, "response_mask", *_CLIP),
            GRPO: (*_ADVANTAGE, "response_mask"),
            **_AGGREGATE,
        },
    ),
    Shape(
        "three",
        "0.3",
        "compute_policy_loss",
        {"compute_policy_loss": (*_TENSORS, "eos_mask", "cliprange"), GRPO: (*_ADVANTAGE, "eos_mask")},
    ),
)
_BEGIN_LINE = re.compile(
    rb"^# >>> verl_overlay format=(\d+) original_sha256=([0-9a-f]{64}|none) body_sha256=([0-9a-f]{64})$",
    re.MULTILINE,
)
_BAKED = re.compile(r'^_OVERLAY_BAKED = """(.*?)"""$', re.MULTILINE | re.DOTALL)

_HEAD = '''\
# Entropy control for GRPO. Everything above this block is verl's own, unchanged. The block rebinds the policy
# loss that verl's actor calls, the GRPO advantage, and agg_loss (to notice the entropy that the trainer
# computes); with everything off each calls verl's function. The configuration is the JSON object in the
# environment variable {variable}, or, when that is unset or empty, the one below.
_OVERLAY_BAKED = """{baked}"""


def _overlay_namespace():
    """The overlay's definitions, kept out of this module's names; returns what the functions below need."""
'''

_TAIL = '''
    text = os.environ.get("{variable}", "").strip()
    where = "the environment variable {variable}" if text else "the configuration in " + __file__
    configuration = read_configuration_text(text or _OVERLAY_BAKED, where)
    state = ControlState(configuration, side_files=side_files_of_environment())
    return Overlay(state, {loss}, compute_grpo_outcome_advantage, {aggregate}), locals()


_overlay, _overlay_names = _overlay_namespace()


{decorator}def {loss}(*arguments, **named):  # noqa: F811
    """verl's policy loss with the overlay's parts; same arguments and return values."""
    return _overlay.loss_{shape}(*arguments, **named)


def compute_grpo_outcome_advantage(*arguments, **named):  # noqa: F811
    """verl's GRPO advantage with the overlay's parts; same arguments and return values."""
    return _overlay.grpo_advantage(*arguments, **named)
'''

_TAIL_AGGREGATE = '''

def agg_loss(*arguments, **named):  # noqa: F811
    """verl's agg_loss, unchanged; the overlay notices the trainer's call with the token entropies."""
    return _overlay.aggregate_loss(*arguments, **named)
'''

_PROBE = """\
import json, sys
import torch
import verl.trainer.ppo.core_algos as module

names, live = module._overlay_names, getattr(module, sys.argv[1])
found = []
if sys.argv[2] == "registry" and module.get_policy_loss_fn("vanilla") is not live:
    found.append("the registered vanilla loss is not the overlay's")
if live is module._overlay.vanilla:
    found.append("the live policy loss is verl's own")


class Config(dict):
    clip_ratio, clip_ratio_low, clip_ratio_high = 0.2, None, None
    global_batch_info = {"dp_size": 2, "batch_num_tokens": 71} if "dp_size" in sys.argv[3].split(",") else {}


def losses(values, dtype):
    state = names["ControlState"](names["parse_configuration"](values), lambda: "probe")
    verl = module._overlay
    aggregate = None if sys.argv[2] == "three" else verl.aggregate
    overlay = names["Overlay"](state, verl.vanilla, verl.grpo, aggregate)
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 9, generator=generator) * 3
    new = (old + 0.4 * torch.randn(6, 9, generator=generator)).requires_grad_()
    tensors = (old, new, torch.randn(6, 9, generator=generator))
    mask = (torch.arange(9)[None] < torch.tensor([[1], [9], [4], [7], [2], [5]])).to(dtype)
    more = {"three": (0.2,), "four": (0.2, 0.2, 0.2, 3.0, "token-mean"), "registry": ("token-mean", Config())}[sys.argv[2]]
    pairs = []
    for function in (overlay.vanilla, getattr(overlay, "loss_" + sys.argv[2])):
        new.grad = None
        loss = function(*tensors, mask, *more)[0]
        loss.backward()
        pairs.append((loss.detach(), new.grad.clone()))
    return pairs


for dtype in (torch.bool, torch.int64, torch.float32):
    (loss, gradient), (same, same_gradient) = losses({}, dtype)
    if not (torch.equal(loss, same) and torch.equal(gradient, same_gradient)):
        found.append(f"with everything off the loss is not verl's own (mask {dtype})")
    (loss, gradient), (close, close_gradient) = losses({"clip_high": 0.2}, dtype)
    if not (torch.allclose(loss, close, rtol=1e-5) and torch.allclose(gradient, close_gradient, rtol=1e-5, atol=1e-8)):
        found.append(f"the composed loss is scaled or masked differently from verl's (mask {dtype})")
print("overlay-probe " + json.dumps({"path": module.__file__, "problems": found}))
"""
_ACTORS = ("workers/actor/dp_actor.py", "workers/utils/losses.py", "workers/roles/utils/losses.py")


@dataclass(frozen=True)
class InstallReport:
    """What ``install`` did. ``changed`` is False when the file already held exactly this block."""

    path: Path
    changed: bool
    original_sha256: str
    installed_sha256: str
    configuration: dict[str, Any]
    configuration_id: int
    backup: Path | None


@dataclass(frozen=True)
class _Parts:
    """An installed file taken apart."""

    original: bytes
    body: str


def configuration_identity(values: Mapping[str, object]) -> int:
    """The number that ``actor/overlay/configuration_id`` shows while this configuration is in force.

    Raises:
        OverlayError: when the configuration is not usable.
    """
    return configuration_id(parse_configuration(values))


def acts_on_advantage(values: Mapping[str, object]) -> bool:
    """True when a configuration changes the GRPO advantage, so that an ``advantage`` record must appear.

    Raises:
        OverlayError: when the configuration is not usable.
    """
    return not parse_configuration(values).advantage_is_off


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise OverlayError(f"{path} is not a file. Point to the workspace's verl/trainer/ppo/core_algos.py.")
        return path.read_bytes()
    except OSError as error:
        raise OverlayError(
            f"cannot read {path}: {error.strerror}. Point to the workspace's verl/trainer/ppo/core_algos.py."
        ) from error


def _split_source(source: str) -> tuple[set[tuple[str, str]], str]:
    """A module's imports outside this package, and its text without imports and docstring.

    Imports are pairs: (module, name) for ``from module import name``, ("", module) for ``import module``.
    """
    tree, lines = ast.parse(source), source.splitlines()
    imports: set[tuple[str, str]] = set()
    dropped: set[int] = set()
    for position, node in enumerate(tree.body):
        is_docstring = position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if not module.startswith("verl_overlay"):
                imports.update((module, item.name) for item in node.names)
        elif not is_docstring:
            continue
        dropped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    kept = [line for number, line in enumerate(lines, 1) if number not in dropped]
    return imports, "\n".join(kept).strip("\n")


def _import_lines(imports: set[tuple[str, str]]) -> list[str]:
    modules = sorted({module for module, _ in imports if module})
    names = {module: sorted(name for owner, name in imports if owner == module) for module in modules}
    plain = [f"import {name}" for module, name in sorted(imports) if not module]
    return plain + [f"from {module} import {', '.join(names[module])}" for module in modules]


def _indented(text: str) -> str:
    return "\n".join("    " + line if line.strip() else "" for line in text.split("\n"))


def _render_body(configuration: OverlayConfiguration, shape: Shape) -> str:
    imports = {("", "os")}
    sections: list[str] = []
    for name in MODULES:
        found, text = _split_source(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
        imports.update(found)
        sections.append(_indented(f"# ---- {name} ----\n\n{text}\n"))
    baked = canonical_json(configuration)
    assert '"""' not in baked and "\\" not in baked, f"configuration text needs escapes: {baked}"
    has_aggregate = "agg_loss" in shape.arguments
    tail = _TAIL + (_TAIL_AGGREGATE if has_aggregate else "")
    return (
        _HEAD.format(variable=ENVIRONMENT_VARIABLE, baked=baked)
        + "\n".join("    " + line for line in _import_lines(imports))
        + "\n\n"
        + "\n\n".join(sections)
        + tail.format(
            variable=ENVIRONMENT_VARIABLE,
            loss=shape.loss,
            shape=shape.name,
            aggregate="agg_loss" if has_aggregate else None,
            decorator='@register_policy_loss("vanilla")\n' if shape.name == "registry" else "",
        )
    )


def render_block(configuration: Mapping[str, object], original_sha256: str = "none", shape: Shape = SHAPES[0]) -> str:
    """The self-contained block: marker line, body, marker line. Needs torch, NumPy and the standard library only.

    Args:
        configuration: the flat object to bake in.
        original_sha256: of the bytes it will be appended to.
        shape: of the verl it will be appended to.

    Raises:
        OverlayError: when the configuration is not usable.
    """
    body = _render_body(parse_configuration(configuration), shape)
    digest = _sha256(body.encode())
    first = f"{BEGIN} format={FORMAT_VERSION} original_sha256={original_sha256} body_sha256={digest}"
    return f"{first}\n{body}{END}\n"


def _take_apart(path: Path, data: bytes) -> _Parts | None:
    """The parts of an installed file, None for one without a block.

    Raises:
        OverlayError: when markers or hashes do not fit together.
    """
    begin, end = BEGIN.encode(), END.encode()
    if begin not in data and end not in data:
        return None
    advice = "Restore the file from the backup or from verl's release, then install again"
    advice += "; or keep it in DIR and replace its block with `install --force --backup DIR`." if begin in data else "."
    matches = list(_BEGIN_LINE.finditer(data))
    if len(matches) != 1 or data.count(begin) != 1 or data.count(end) != 1 or not data.endswith(end + b"\n"):
        raise OverlayError(
            f"{path} was edited by hand: its overlay markers are damaged, doubled, or followed by other code "
            f"({data.count(begin)} begin, {data.count(end)} end). {advice}"
        )
    match = matches[0]
    if int(match[1]) != FORMAT_VERSION:
        raise OverlayError(f"{path} has overlay format {int(match[1])}, this version knows {FORMAT_VERSION}. {advice}")
    body = data[match.end() + 1 : -len(end) - 1]
    if _sha256(body) != match[3].decode():
        raise OverlayError(
            f"{path} was edited by hand inside the overlay block: sha256 {_sha256(body)[:12]}, "
            f"recorded {match[3].decode()[:12]}. {advice}"
        )
    original = data[: match.start()].removesuffix(SEPARATOR)
    if _sha256(original) != match[2].decode():
        raise OverlayError(
            f"{path} was edited by hand above the overlay block: sha256 {_sha256(original)[:12]}, "
            f"recorded {match[2].decode()[:12]}. {advice}"
        )
    return _Parts(original, body.decode())


def require_supported(path: Path, original: bytes | None = None) -> Shape:
    """The call shape of a file; refuses one that does not have the functions the block builds on.

    Args:
        path: a ``core_algos.py`` without a block.
        original: its bytes, read from the file when None.

    Raises:
        OverlayError: not Python, or of no known call shape.
    """
    original = _read(path) if original is None else original
    try:
        tree = ast.parse(original)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise OverlayError(f"{path} is not valid Python: {error}. Restore it from verl's release.") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    seen = {name: [item.arg for item in node.args.args] for name, node in functions.items()}
    problems: list[str] = []
    for shape in SHAPES:
        missing = [
            f"{name} takes {', '.join(seen[name])}" if name in seen else f"{name} is absent"
            for name, arguments in shape.arguments.items()
            if not set(arguments) <= set(seen.get(name, ()))
        ]
        if not missing:
            return shape
        problems.append(f"not verl {shape.versions}: {', '.join(missing)}")
    raise OverlayError(
        f"{path} has no call shape of a known verl ({'; '.join(problems)}). Look at the workspace's verl version."
    )


def _remove_leftovers(path: Path) -> None:
    """Remove what a killed process left of writing a file: temporary files whose number is that of no process."""
    target = path.resolve()
    for temporary in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        process = temporary.name.split(".")[-2]
        with suppress(OSError):
            if process.isdigit() and not os.path.exists(f"/proc/{process}"):
                temporary.unlink()


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Write durably: temporary file beside it, fsync, mode, rename, fsync of the folder."""
    target = path.resolve()
    name = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with name.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), mode & 0o7777)
            os.fsync(stream.fileno())
        os.replace(name, target)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(path: Path, data: bytes, like: Path) -> None:
    """Write a file with the mode of another."""
    try:
        _replace(path, data, like.stat().st_mode)
    except OSError as error:
        raise OverlayError(
            f"cannot write {path}: {error.strerror}. Check that the workspace is writable and has space."
        ) from error


def _write_backup(core_algos: Path, data: bytes, backup_dir: Path, kind: str) -> Path:
    backup = backup_dir / f"{core_algos.name}.{_sha256(data)[:12]}.{kind}"
    _remove_leftovers(backup)
    if not backup.exists():
        try:
            backup_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OverlayError(f"cannot create {backup_dir}: {error.strerror}. Choose a writable folder.") from error
        _write(backup, data, like=core_algos)
    if _read(backup) != data:
        raise OverlayError(
            f"{backup} holds something else than {core_algos}'s bytes. Move it away, or name another folder."
        )
    return backup


def install(
    core_algos: Path, configuration: Mapping[str, object], backup_dir: Path | None = None, force: bool = False
) -> InstallReport:
    """Append the block to verl's file, or replace the block that is there. Repeating it changes nothing.

    Args:
        core_algos: the workspace's copy of ``verl/trainer/ppo/core_algos.py``.
        configuration: the flat object to bake in.
        backup_dir: where the original bytes are kept, created when needed; None for no backup.
        force: take a file with an edited block apart all the same: what stands above the first marker becomes the
            original. The edited file is kept in ``backup_dir``, which is then required. Without a first marker
            nothing tells the original from the block, and the file is refused.

    Raises:
        OverlayError: configuration not usable, verl unknown, file edited by hand, or not writable.
    """
    typed = parse_configuration(configuration)
    data = _read(core_algos)
    _remove_leftovers(core_algos)
    try:
        parts = _take_apart(core_algos, data)
        original = data if parts is None else parts.original
    except OverlayError:
        if not force or backup_dir is None or BEGIN.encode() not in data:
            raise
        original = data[: data.index(BEGIN.encode())].removesuffix(SEPARATOR)
        require_supported(core_algos, original)
        _write_backup(core_algos, data, backup_dir, "edited")
    shape = require_supported(core_algos, original)
    reasons = [] if "agg_loss" in shape.arguments else impossible_without_aggregation(typed)
    if reasons:
        raise OverlayError(
            f"{core_algos} is verl {shape.versions}: {'; '.join(reasons)}. Choose another configuration."
        )
    backup = None if backup_dir is None else _write_backup(core_algos, original, backup_dir, "original")
    block = render_block(configuration, _sha256(original), shape)
    installed = original + SEPARATOR + block.encode()
    if installed != data:
        _write(core_algos, installed, like=core_algos)
    return InstallReport(
        path=core_algos,
        changed=installed != data,
        original_sha256=_sha256(original),
        installed_sha256=_sha256(installed),
        configuration=full_configuration(typed),
        configuration_id=configuration_id(typed),
        backup=backup,
    )


def revert(core_algos: Path) -> bool:
    """Restore the original bytes. Returns False when there is no block.

    Raises:
        OverlayError: when the file was edited by hand or is not writable.
    """
    data = _read(core_algos)
    _remove_leftovers(core_algos)
    parts = _take_apart(core_algos, data)
    if parts is None:
        return False
    _write(core_algos, parts.original, like=core_algos)
    return True


def is_installed(core_algos: Path) -> bool:
    """True when the file holds an intact block, False when it holds none.

    Raises:
        OverlayError: when the file cannot be read or was edited by hand.
    """
    return _take_apart(core_algos, _read(core_algos)) is not None


def read_configuration(core_algos: Path) -> dict[str, Any]:
    """The baked-in configuration, every knob.

    Raises:
        OverlayError: when there is no intact block.
    """
    parts = _take_apart(core_algos, _read(core_algos))
    match = None if parts is None else _BAKED.search(parts.body)
    if match is None:
        raise OverlayError(f"{core_algos} holds no overlay. Install it first.")
    return full_configuration(read_configuration_text(match[1], f"the configuration baked into {core_algos}"))


def _wrong_definitions(body: str, shape: Shape) -> list[str]:
    """What the block defines at the top level beyond its prefix and the functions that it means to rebind."""
    rebound = [shape.loss, GRPO, *(["agg_loss"] if "agg_loss" in shape.arguments else [])]
    defined: list[str] = []
    for node in ast.parse(body).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.append(node.name)
        elif isinstance(node, ast.Assign):
            names = [item for target in node.targets for item in ast.walk(target)]
            defined.extend(item.id for item in names if isinstance(item, ast.Name))
    foreign = [name for name in defined if not name.startswith(("_overlay", "_OVERLAY")) and name not in rebound]
    found = [f"the block defines {', '.join(foreign)}"] if foreign else []
    missing = [name for name in rebound if defined.count(name) != 1]
    return found + ([f"the block does not rebind {', '.join(missing)}"] if missing else [])


def _actor_problem(core_algos: Path, shape: Shape) -> str | None:
    """Why verl's actor would not reach the loss that the block rebinds, None when it does."""
    wanted = "get_policy_loss_fn" if shape.name == "registry" else shape.loss
    package = core_algos.resolve().parents[2]
    actors = [package / name for name in _ACTORS if (package / name).is_file()]
    for actor in actors:
        try:
            tree = ast.parse(_read(actor))
        except (OverlayError, SyntaxError, ValueError) as error:
            return f"verl's actor {actor} cannot be read as Python: {error}"
        for node in ast.walk(tree):
            if (isinstance(node, ast.Name) and node.id == wanted) or (
                isinstance(node, ast.Attribute) and node.attr == wanted
            ):
                return None
    where = ", ".join(str(actor) for actor in actors) or f"none of {', '.join(_ACTORS)} in {package}"
    return f"verl's actor does not call {wanted} (looked at {where})"


def _probe_live(core_algos: Path, shape: Shape, original: bytes, python: str, timeout_s: float) -> list[str]:
    """Import the file as ``verl.trainer.ppo.core_algos`` and try the live loss on a small batch."""
    target = core_algos.resolve()
    if target.parts[-4:-1] != ("verl", "trainer", "ppo"):
        return [f"{target} does not lie in verl/trainer/ppo; the live loss cannot be checked there"]
    problem = _actor_problem(core_algos, shape)
    dropped = (ENVIRONMENT_VARIABLE, FOLDER_VARIABLE)
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    root = target.parents[3]
    paths = [str(root), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    functions = {node.name: node for node in ast.parse(original).body if isinstance(node, ast.FunctionDef)}
    aggregate = functions.get("agg_loss")
    arguments = ",".join(item.arg for item in aggregate.args.args) if aggregate else ""
    interpreter = os.path.abspath(python) if os.sep in python else python
    command = [interpreter, "-c", _PROBE, shape.loss, shape.name, arguments]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"the live loss could not be checked with {python}: {error}"]
    lines = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("overlay-probe ")]
    if done.returncode != 0 or len(lines) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return [f"{target} does not import with {python}: {reason[0]}"]
    answer = json.loads(lines[0])
    found = [problem] if problem else []
    if Path(answer["path"]).resolve() != target:
        found.append(f"{python} imports verl from {answer['path']}, not from {target}; look at PYTHONPATH")
    return found + [f"{target}: {text}" for text in answer["problems"]]


def check(core_algos: Path, python: str, timeout_s: float = 600.0) -> list[str]:
    """Every reason why the installed overlay would not act, empty when it would.

    The file parses; the part before the block has the hash of the original, so every other function is
    unchanged; the block rebinds the policy loss, the GRPO advantage and ``agg_loss`` and nothing else; verl's actor
    calls that policy loss; and, imported by the training interpreter, the block's function is the live one,
    equals verl's own with everything off, and forwards ``global_batch_info`` and masks of any type correctly.

    Args:
        core_algos: the workspace's copy of ``verl/trainer/ppo/core_algos.py``.
        python: the interpreter that runs the training.
        timeout_s: for the import.
    """
    try:
        data = _read(core_algos)
        _remove_leftovers(core_algos)
        parts = _take_apart(core_algos, data)
        if parts is None:
            return [f"{core_algos} holds no overlay"]
        shape = require_supported(core_algos, parts.original)
        before, after = ast.parse(parts.original).body, ast.parse(data).body
    except OverlayError as error:
        return [str(error)]
    except SyntaxError as error:
        return [f"{core_algos} does not parse: {error}"]
    found: list[str] = []
    if [ast.dump(node) for node in before] != [ast.dump(node) for node in after[: len(before)]]:
        found.append(f"{core_algos}: the definitions before the block are not verl's own")
    found.extend(f"{core_algos}: {text}" for text in _wrong_definitions(parts.body, shape))
    return found or _probe_live(core_algos, shape, parts.original, python, timeout_s)
