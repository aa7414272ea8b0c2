"""Append the overlay to a workspace's copy of verl's ``core_algos.py``; inspect, check and revert it.

The installed file is ``original bytes + three newlines + block``. The block starts and ends with a marker
line; the first carries the format version, the sha256 of the original bytes and the sha256 of the block's
body, so that an edit by hand of either part is noticed. Such a file is never overwritten.

Standard library only: this runs in environments that have neither torch nor verl.
"""

import ast
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_overlay.configuration import (
    OverlayConfiguration,
    OverlayError,
    canonical_json,
    check_configuration,
    configuration_id,
    full_configuration,
    knobs,
    parse_configuration,
    read_configuration_text,
)

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "InstallReport",
    "OverlayError",
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
MODULES = ("configuration", "control", "losses")
REQUIRED = {
    "register_policy_loss": ("name",),
    "agg_loss": ("loss_mat", "loss_mask", "loss_agg_mode"),
    "compute_policy_loss_vanilla": (
        "old_log_prob",
        "log_prob",
        "advantages",
        "response_mask",
        "loss_agg_mode",
        "config",
        "rollout_is_weights",
    ),
}
_BEGIN_LINE = re.compile(
    rb"^# >>> verl_overlay format=(\d+) original_sha256=([0-9a-f]{64}|none) body_sha256=([0-9a-f]{64})$",
    re.MULTILINE,
)
_BAKED = re.compile(r'^_OVERLAY_BAKED = """(.*?)"""$', re.MULTILINE | re.DOTALL)

_HEAD = '''\
# Entropy control for the policy loss. Everything above this block is verl's own, unchanged. The block
# rebinds the "vanilla" policy loss; with everything off it calls verl's function. The configuration is the
# JSON object in the environment variable {variable}, or, when that is unset or empty, the one below.
_OVERLAY_BAKED = """{baked}"""


def _overlay_namespace():
    """The overlay's definitions, kept out of this module's names; returns the loss and its state."""
'''

_TAIL = '''
    text = os.environ.get("{variable}", "").strip()
    where = "the environment variable {variable}" if text else "the configuration in " + __file__
    return overlay_policy_loss, ControlState(read_configuration_text(text or _OVERLAY_BAKED, where))


_overlay_policy_loss, _overlay_state = _overlay_namespace()
_overlay_vanilla = compute_policy_loss_vanilla


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(  # noqa: F811
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """verl's vanilla policy loss with the overlay's parts; same arguments and return values."""
    return _overlay_policy_loss(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        state=_overlay_state,
        aggregate=agg_loss,
        vanilla=_overlay_vanilla,
    )
'''

_PROBE = """\
import sys
import verl.trainer.ppo.core_algos as module
live = module.get_policy_loss_fn("vanilla")
same = live is module.compute_policy_loss_vanilla and live is not module._overlay_vanilla
print("overlay-probe", same, module.__file__)
"""


@dataclass(frozen=True)
class InstallReport:
    """What ``install`` did. ``changed`` is False when the file already held exactly this block."""

    path: Path
    changed: bool
    original_sha256: str
    installed_sha256: str
    configuration: dict[str, float | bool | str | None]
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


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: Path) -> bytes:
    try:
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


def _render_body(configuration: OverlayConfiguration) -> str:
    imports = {("", "os")}
    sections: list[str] = []
    for name in MODULES:
        found, text = _split_source(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
        imports.update(found)
        sections.append(_indented(f"# ---- {name} ----\n\n{text}\n"))
    baked = canonical_json(configuration)
    assert '"""' not in baked and "\\" not in baked, f"configuration text needs escapes: {baked}"
    return (
        _HEAD.format(variable=ENVIRONMENT_VARIABLE, baked=baked)
        + "\n".join("    " + line for line in _import_lines(imports))
        + "\n\n"
        + "\n\n".join(sections)
        + _TAIL.replace("{variable}", ENVIRONMENT_VARIABLE)
    )


def render_block(configuration: Mapping[str, object], original_sha256: str = "none") -> str:
    """The self-contained block: marker line, body, marker line. Needs torch and the standard library only.

    Args:
        configuration: the flat object to bake in.
        original_sha256: of the bytes it will be appended to.

    Raises:
        OverlayError: when the configuration is not usable.
    """
    body = _render_body(parse_configuration(configuration))
    digest = _sha256(body.encode())
    first = f"{BEGIN} format={FORMAT_VERSION} original_sha256={original_sha256} body_sha256={digest}"
    return f"{first}\n{body}{END}\n"


def _take_apart(path: Path, data: bytes) -> _Parts | None:
    """The parts of an installed file, None for one without a block.

    Raises:
        OverlayError: when markers or hashes do not fit together.
    """
    advice = "Restore the file from the backup or from verl's release, then install again."
    begin, end = BEGIN.encode(), END.encode()
    if begin not in data and end not in data:
        return None
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


def require_supported(path: Path, original: bytes | None = None) -> None:
    """Refuse a file that does not have the functions the block builds on.

    Args:
        path: a ``core_algos.py`` without a block.
        original: its bytes, read from the file when None.

    Raises:
        OverlayError: not Python, or verl older than 0.6.1.
    """
    original = _read(path) if original is None else original
    try:
        tree = ast.parse(original)
    except (SyntaxError, ValueError) as error:
        raise OverlayError(f"{path} is not valid Python: {error}. Restore it from verl's release.") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, arguments in REQUIRED.items():
        node = functions.get(name)
        seen = [item.arg for item in node.args.args] if node else []
        if node is None or any(argument not in seen for argument in arguments):
            raise OverlayError(
                f"{path} is not the core_algos.py of verl 0.6.1 or later: {name} takes {seen or 'nothing'}, "
                f"expected {list(arguments)}. Look at the workspace's verl version."
            )


def _replace(path: Path, data: bytes) -> None:
    """Write durably: temporary file beside it, fsync, same mode, rename, fsync of the folder."""
    target = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            if target.exists():
                os.fchmod(stream.fileno(), target.stat().st_mode & 0o7777)
            os.fsync(stream.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(path: Path, data: bytes) -> None:
    try:
        _replace(path, data)
    except OSError as error:
        raise OverlayError(
            f"cannot write {path}: {error.strerror}. Check that the workspace is writable and has space."
        ) from error


def _write_backup(core_algos: Path, original: bytes, backup_dir: Path) -> Path:
    backup = backup_dir / f"{core_algos.name}.{_sha256(original)[:12]}.original"
    if not backup.exists():
        try:
            backup_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OverlayError(f"cannot create {backup_dir}: {error.strerror}. Choose a writable folder.") from error
        _write(backup, original)
    return backup


def install(core_algos: Path, configuration: Mapping[str, object], backup_dir: Path | None = None) -> InstallReport:
    """Append the block to verl's file, or replace the block that is there. Repeating it changes nothing.

    Args:
        core_algos: the workspace's copy of ``verl/trainer/ppo/core_algos.py``.
        configuration: the flat object to bake in.
        backup_dir: where the original bytes are kept, created when needed; None for no backup.

    Raises:
        OverlayError: configuration not usable, verl too old, file edited by hand, or not writable.
    """
    typed = parse_configuration(configuration)
    data = _read(core_algos)
    parts = _take_apart(core_algos, data)
    original = data if parts is None else parts.original
    require_supported(core_algos, original)
    backup = None if backup_dir is None else _write_backup(core_algos, original, backup_dir)
    block = render_block(configuration, _sha256(original))
    installed = original + SEPARATOR + block.encode()
    if installed != data:
        _write(core_algos, installed)
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
    parts = _take_apart(core_algos, _read(core_algos))
    if parts is None:
        return False
    _write(core_algos, parts.original)
    return True


def is_installed(core_algos: Path) -> bool:
    """True when the file holds an intact block, False when it holds none.

    Raises:
        OverlayError: when the file cannot be read or was edited by hand.
    """
    return _take_apart(core_algos, _read(core_algos)) is not None


def read_configuration(core_algos: Path) -> dict[str, float | bool | str | None]:
    """The baked-in configuration, every knob.

    Raises:
        OverlayError: when there is no intact block.
    """
    parts = _take_apart(core_algos, _read(core_algos))
    match = None if parts is None else _BAKED.search(parts.body)
    if match is None:
        raise OverlayError(f"{core_algos} holds no overlay. Install it first.")
    return full_configuration(read_configuration_text(match[1], f"the configuration baked into {core_algos}"))


def _rebinds_vanilla(body: str) -> bool:
    """True when the block's last definition is the registered vanilla loss, under verl's name."""
    last = ast.parse(body).body[-1]
    return (
        isinstance(last, ast.FunctionDef)
        and last.name == "compute_policy_loss_vanilla"
        and [ast.unparse(item) for item in last.decorator_list] == ["register_policy_loss('vanilla')"]
    )


def _foreign_definitions(body: str) -> list[str]:
    """Top-level names of the block without its prefix, which could replace one of verl's."""
    found: list[str] = []
    for node in ast.parse(body).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            names = [item for target in node.targets for item in ast.walk(target)]
            found.extend(item.id for item in names if isinstance(item, ast.Name))
    allowed = ("_overlay", "_OVERLAY")
    return [name for name in found if not name.startswith(allowed) and name != "compute_policy_loss_vanilla"]


def _probe_live(core_algos: Path, python: str, timeout: float) -> list[str]:
    """Import the file as ``verl.trainer.ppo.core_algos`` and look at the live vanilla loss."""
    target = core_algos.resolve()
    if target.parts[-4:-1] != ("verl", "trainer", "ppo"):
        return [f"{target} does not lie in verl/trainer/ppo; the live loss cannot be checked there"]
    environment = {key: value for key, value in os.environ.items() if key != ENVIRONMENT_VARIABLE}
    paths = [str(target.parents[3]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        done = subprocess.run([python, "-c", _PROBE], env=environment, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"the live loss could not be checked with {python}: {error}"]
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("overlay-probe ")]
    if done.returncode != 0 or len(lines) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return [f"{target} does not import with {python}: {reason[0]}"]
    _, live, imported = lines[0]
    found: list[str] = []
    if Path(imported).resolve() != target:
        found.append(f"{python} imports verl from {imported}, not from {target}; look at PYTHONPATH")
    if live != "True":
        found.append(f"the registered vanilla loss of {target} is not the overlay's")
    return found


def check(core_algos: Path, python: str, timeout: float = 600.0) -> list[str]:
    """Every reason why the installed overlay would not act, empty when it would.

    The file parses; the part before the block has the hash of the original, so every other function is
    unchanged; the block defines no name that verl uses other than the vanilla loss; and, imported by the
    training interpreter, the block's function is the live vanilla loss.

    Args:
        core_algos: the workspace's copy of ``verl/trainer/ppo/core_algos.py``.
        python: the interpreter that runs the training.
        timeout: seconds for the import.
    """
    try:
        data = _read(core_algos)
        parts = _take_apart(core_algos, data)
    except OverlayError as error:
        return [str(error)]
    if parts is None:
        return [f"{core_algos} holds no overlay"]
    try:
        before, after = ast.parse(parts.original).body, ast.parse(data).body
    except SyntaxError as error:
        return [f"{core_algos} does not parse: {error}"]
    found: list[str] = []
    if [ast.dump(node) for node in before] != [ast.dump(node) for node in after[: len(before)]]:
        found.append(f"{core_algos}: the definitions before the block are not verl's own")
    if foreign := _foreign_definitions(parts.body):
        found.append(f"{core_algos}: the block defines {', '.join(foreign)}")
    if not _rebinds_vanilla(parts.body):
        found.append(f"{core_algos}: the block does not register the vanilla loss")
    return found or _probe_live(core_algos, python, timeout)
