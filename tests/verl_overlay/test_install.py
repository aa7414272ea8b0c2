"""The block in ``core_algos.py``: rendering, idempotence, reverting, refusals, and the faults that ``check`` finds."""

import ast
import hashlib
import json
import math
import os
import stat
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import ACTORS, SOURCES, build_verl

from verl_overlay import install as overlay
from verl_overlay.configuration import OverlayConfiguration, knobs, parse_configuration, read_configuration_text

SHAPES = {shape.name: shape for shape in overlay.SHAPES}
STARE: dict[str, object] = {"token_rule": "stare", "stare.fraction": 0.2, "target.entropy": 5.0}


@pytest.fixture(params=list(SOURCES))
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def core_algos(tmp_path: Path) -> Path:
    """A file of verl's newest shape, in a package ``verl`` of its own."""
    return build_verl(tmp_path / "tree", "registry")


# ---- configuration ----


def test_every_knob_accepts_its_off_value_and_limits() -> None:
    off = {knob.key: knob.off for knob in knobs()}
    assert len(off) == len(knobs()) == len(fields(OverlayConfiguration))
    assert overlay.check_configuration(off) == []
    assert parse_configuration(off) == parse_configuration({}) and parse_configuration(off).is_off
    for knob in knobs():
        if "number" in knob.kind:
            for value in (knob.low, knob.high):
                problems = overlay.check_configuration({knob.key: [value] if knob.kind.endswith("s") else value})
                assert not [text for text in problems if " in [" in text]
        for choice in knob.choices:
            assert not [text for text in overlay.check_configuration({knob.key: choice}) if "expected one of" in text]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_hihg", 0.2),
        ("clip_high", -0.1),
        ("clip_high", "0.2"),
        ("clip_high", "1e-6"),
        ("clip_high", "None"),
        ("clip_high", True),
        ("positive_weight", None),
        ("positive_weight", math.nan),
        ("negative_weight", math.inf),
        ("negative_weight", 1e9),
        ("positive_weight", 10**310),
        ("token_rule", "clipcov"),
        ("token_rule", None),
        ("shaping.below_target", 1),
        ("shaping.below_target", "false"),
        ("stare.fraction", 0.0),
        ("stare.amplify", [1.1]),
        ("advantage.components", 1.0),
        ("advantage.components", []),
        ("advantage.components", [1.0] * 9),
    ],
)
def test_bad_values_are_named(key: str, value: object) -> None:
    (problem,) = overlay.check_configuration({key: value})
    assert repr(key) in problem and repr(value) in problem
    with pytest.raises(overlay.OverlayError, match=key):
        overlay.render_block({key: value})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"positive_weight": 0, "negative_weight": 0}, "both 0"),
        ({"positive_schedule": "stage", "schedule.steps": 9, "control.knob": "positive_weight"}, "keep one"),
        ({"token_rule": "clip_cov", "clip_cov.lower": 5.0, "clip_cov.upper": 5.0}, "clip_cov.lower"),
        ({"positive_schedule": "stage"}, "schedule.steps"),
        ({"control.knob": "stare"}, "control.knob"),
        ({"control.knob": "clip_high"}, "control.knob"),
        ({"control.knob": "positive_weight", "control.low": 0.5, "control.high": 0.4}, "control.low"),
        ({"token_entropy": "exact"}, "token_entropy"),
        ({"shaping": "bonus", "shaping.coef": -0.1}, "shaping.coef"),
        ({"advantage.component_weights": [1.0]}, "advantage.component_weights"),
        ({"advantage.components": [1.0], "advantage.baseline": "sign"}, "advantage.baseline"),
        ({"advantage.components": [1.0], "advantage.component_weights": [1.0, 2.0]}, "advantage.component_weights"),
        ({"advantage.components": [1.0, 1.0]}, "same sum"),
    ],
)
def test_contradictions_are_named(values: dict[str, object], named: str) -> None:
    (problem,) = overlay.check_configuration(values)
    assert named in problem


PLAIN_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON_VALUES = st.recursive(PLAIN_VALUES, lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner))


@settings(max_examples=40, deadline=None)
@given(JSON_VALUES)
def test_checking_never_fails_itself(value: object) -> None:
    overlay.check_configuration(value)
    overlay.check_configuration({knob.key: value for knob in knobs()})


def test_identity_depends_on_values_only() -> None:
    assert overlay.configuration_identity({}) == overlay.configuration_identity({"positive_weight": 1})
    assert overlay.configuration_identity({}) != overlay.configuration_identity({"clip_high": 0.28})


@pytest.mark.parametrize(
    ("values", "acts"),
    [
        ({}, False),
        ({"positive_weight": 0.5}, False),
        ({"token_rule": "high_entropy"}, False),
        ({"token_rule": "high_entropy", "token_entropy": "exact"}, True),
        ({"shaping": "entropy_advantage", "token_entropy": "exact"}, True),
        ({"advantage.std": "off"}, True),
        ({"advantage.baseline": "sign"}, True),
        ({"advantage.components": [1.0, 0.1]}, True),
    ],
)
def test_what_acts_on_the_advantage(values: dict[str, object], acts: bool) -> None:
    assert overlay.acts_on_advantage(values) is acts


# ---- the block ----


def test_block_imports_torch_numpy_and_the_standard_library_only(shape: str) -> None:
    tree = ast.parse(overlay.render_block(STARE, shape=SHAPES[shape]))
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"torch", "numpy"}
    assert "__future__" not in imported


def test_block_rebinds_what_it_means_to_and_nothing_else(shape: str) -> None:
    body = ast.parse(overlay.render_block({}, shape=SHAPES[shape])).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    rebound = {
        "registry": ["compute_policy_loss_vanilla", "compute_grpo_outcome_advantage", "agg_loss"],
        "four": ["compute_policy_loss", "compute_grpo_outcome_advantage", "agg_loss"],
        "three": ["compute_policy_loss", "compute_grpo_outcome_advantage"],
    }
    assert functions == ["_overlay_namespace", *rebound[shape]]
    assigned = [ast.unparse(target) for node in body if isinstance(node, ast.Assign) for target in node.targets]
    assert assigned == ["_OVERLAY_BAKED", "(_overlay, _overlay_names)"]
    assert not [node for node in body if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]


def test_modules_of_the_block_share_no_names() -> None:
    names: list[str] = []
    for module in overlay.MODULES:
        for node in ast.parse(Path(overlay.__file__).with_name(f"{module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append(node.name)
            elif isinstance(node, ast.Assign):
                names.extend(ast.unparse(target) for target in node.targets)
            elif isinstance(node, ast.AnnAssign):
                names.append(ast.unparse(node.target))
    assert len(names) == len(set(names))


def load(core_algos: Path, monkeypatch: pytest.MonkeyPatch, configuration: str = "") -> ModuleType:
    """The file as a training imports it, with this text in the environment variable."""
    monkeypatch.setenv(overlay.ENVIRONMENT_VARIABLE, configuration)
    module = ModuleType("verl.trainer.ppo.core_algos")
    module.__file__ = str(core_algos)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(core_algos.read_text(), str(core_algos), "exec"), module.__dict__)
    return module


class ActorConfiguration(dict[str, Any]):
    """The little of verl's actor configuration that the loss reads."""

    clip_ratio, clip_ratio_low, clip_ratio_high = 0.2, None, None
    global_batch_info: ClassVar[dict[str, int]] = {"dp_size": 2, "batch_num_tokens": 71}


def loss_of(module: ModuleType, shape: str, function: Any = None) -> tuple[Any, Any, dict[str, Any]]:
    """Loss, gradient and metrics of the loss that verl's actor reaches, on a small batch."""
    import torch

    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 9, generator=generator) * 3
    new = (old + 0.4 * torch.randn(6, 9, generator=generator)).requires_grad_()
    advantages = torch.randn(6, 1, generator=generator).expand(6, 9)
    mask = torch.arange(9)[None] < torch.tensor([[1], [9], [4], [7], [2], [5]])
    more = {"three": (0.2,), "four": (0.2, 0.2, 0.2), "registry": ("token-mean", ActorConfiguration())}[shape]
    live = module.get_policy_loss_fn("vanilla") if shape == "registry" else module.compute_policy_loss
    loss, *rest = (live if function is None else function)(old, new, advantages, mask, *more)
    loss.backward()
    return loss.detach(), new.grad, rest[0] if shape == "registry" else {}


@pytest.mark.parametrize("first_line", ["", "from __future__ import annotations\n"])
def test_block_computes_what_the_modules_compute(
    tmp_path: Path, shape: str, first_line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from verl_overlay.control import ControlState
    from verl_overlay.entry import Overlay

    core_algos = build_verl(tmp_path, shape)
    core_algos.write_text(SOURCES[shape].replace("import torch\n", f"{first_line}import torch\n"))
    overlay.install(core_algos, {"clip_high": 0.28})
    module = load(core_algos, monkeypatch, json.dumps(STARE))
    inner = module._overlay
    aggregate = None if shape == "three" else inner.aggregate
    own = Overlay(ControlState(parse_configuration(STARE), lambda: None), inner.vanilla, inner.grpo, aggregate)
    for _ in range(2):
        loss, gradient, metrics = loss_of(module, shape)
        same, same_gradient, same_metrics = loss_of(module, shape, getattr(own, f"loss_{shape}"))
        plain, _, _ = loss_of(module, shape, inner.vanilla)
        assert torch.equal(loss, same) and torch.equal(gradient, same_gradient) and metrics == same_metrics
        assert not torch.equal(loss, plain)
    assert own.state.calls == inner.state.calls == 2
    if shape == "registry":
        assert metrics["overlay/calls"] == 2 and metrics["overlay/reweighted_share"] > 0


def test_the_environment_wins_over_the_baked_configuration_and_the_identity_tells(
    core_algos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    baked = overlay.install(core_algos, {"clip_high": 0.28}).configuration_id
    for text, identity in (("", baked), ("  ", baked), (json.dumps(STARE), overlay.configuration_identity(STARE))):
        metrics = loss_of(load(core_algos, monkeypatch, text), "registry")[2]
        assert metrics["overlay/configuration_id"] == identity
    assert overlay.configuration_identity(STARE) != baked


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "VERL_OVERLAY is not JSON"),
        ("[]", "expected a JSON object"),
        ('{"clip_high": -1}', "'clip_high' is -1"),
        ('{"clip_high": "1e-6"}', "'clip_high' is '1e-6'"),
        ('{"actor.optim.lr": 1e-6}', "'actor.optim.lr'"),
        ('{"clip_high": NaN}', "'clip_high' is nan"),
    ],
)
def test_unusable_environment_stops_the_import(
    core_algos: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    pytest.importorskip("torch")
    overlay.install(core_algos, {})
    with pytest.raises(Exception, match="VERL_OVERLAY") as caught:
        load(core_algos, monkeypatch, text)
    assert type(caught.value).__name__ == "OverlayError"  # the block's own class of that name
    message = str(caught.value)
    assert reason in message and "VERL_OVERLAY" in message and "\n" not in message


# ---- install, inspect, revert ----


@pytest.mark.parametrize("ending", ["", "\n", "\n\n\n\n", "\r\n", "# no newline at the end", "\n\n\n# three before"])
def test_install_is_idempotent_and_revert_is_exact(tmp_path: Path, shape: str, ending: str) -> None:
    core_algos = build_verl(tmp_path / "tree", shape)
    core_algos.write_bytes((SOURCES[shape] + ending).encode())
    core_algos.chmod(0o640)
    original = core_algos.read_bytes()
    first = overlay.install(core_algos, STARE, tmp_path / "backup")
    once = core_algos.read_bytes()
    assert first.changed and first.original_sha256 == hashlib.sha256(original).hexdigest()
    assert once.startswith(original) and first.installed_sha256 == hashlib.sha256(once).hexdigest()
    assert first.backup is not None and first.backup.read_bytes() == original
    assert stat.S_IMODE(first.backup.stat().st_mode) == 0o640
    again = overlay.install(core_algos, STARE, tmp_path / "backup")
    assert not again.changed and core_algos.read_bytes() == once
    other = overlay.install(core_algos, {"clip_high": 0.28})
    assert other.changed and other.original_sha256 == first.original_sha256
    assert overlay.read_configuration(core_algos)["clip_high"] == 0.28
    overlay.install(core_algos, STARE)
    assert core_algos.read_bytes() == once
    assert stat.S_IMODE(core_algos.stat().st_mode) == 0o640
    assert overlay.is_installed(core_algos)
    assert overlay.revert(core_algos) and core_algos.read_bytes() == original
    assert stat.S_IMODE(core_algos.stat().st_mode) == 0o640
    assert not overlay.is_installed(core_algos) and not overlay.revert(core_algos)
    assert [entry.name for entry in core_algos.parent.iterdir() if entry.name.startswith(".core_algos")] == []
    assert len(list((tmp_path / "backup").iterdir())) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from verl_overlay import install
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
install.install(Path(sys.argv[1]), {}, BACKUP and Path(BACKUP))
"""


@pytest.mark.parametrize("action", ["install", "check", "revert"])
def test_what_a_killed_install_left_is_removed(core_algos: Path, tmp_path: Path, action: str) -> None:
    folder, backup = core_algos.parent, tmp_path / "backup"
    for place in (repr(str(backup)), "None"):  # killed while it writes the backup, and while it writes the file itself
        program = [sys.executable, "-c", KILLED.replace("BACKUP", place), str(core_algos)]
        assert subprocess.run(program, cwd=Path(__file__).parents[2]).returncode == -9
    mine = folder / f".core_algos.py.{os.getppid()}.part"
    mine.touch()  # of a process that is alive
    assert len(list(folder.glob(".core*"))) == 2 and len(list(backup.glob(".core*"))) == 1
    if action == "install":
        overlay.install(core_algos, {}, backup)
        assert len(list(backup.iterdir())) == 1
    elif action == "check":
        overlay.check(core_algos, sys.executable)
    else:
        overlay.revert(core_algos)
    assert list(folder.glob(".core*")) == [mine]


def test_windows_line_endings_survive(core_algos: Path) -> None:
    original = SOURCES["registry"].replace("\n", "\r\n").encode()
    core_algos.write_bytes(original)
    overlay.install(core_algos, {})
    ast.parse(core_algos.read_bytes())
    assert overlay.revert(core_algos) and core_algos.read_bytes() == original


def test_another_name_of_the_same_file_keeps_its_bytes(core_algos: Path, tmp_path: Path) -> None:
    """Package managers link files of several environments to one copy."""
    (tmp_path / "cache.py").hardlink_to(core_algos)
    overlay.install(core_algos, {})
    assert (tmp_path / "cache.py").read_text() == SOURCES["registry"]
    assert overlay.is_installed(core_algos)


def test_baked_configuration_reads_back(core_algos: Path) -> None:
    overlay.install(core_algos, STARE)
    read = overlay.read_configuration(core_algos)
    assert {key: read[key] for key in STARE} == STARE
    assert set(read) == {knob.key for knob in knobs()}
    assert overlay.install(core_algos, read).changed is False


EDITS = [
    ("LOG_RATIO_LIMIT = 20.0", "LOG_RATIO_LIMIT = 21.0", "inside the overlay block"),
    ("A stand-in", "Another stand-in", "above the overlay block"),
    ("\n\n\n# >>> verl_overlay", "\n# >>> verl_overlay", "above the overlay block"),
    ("# <<< verl_overlay\n", "# <<< verl_overlay\nprint('more')\n", "followed by other code"),
    ("# <<< verl_overlay\n", "", "1 begin, 0 end"),
    ("# <<< verl_overlay\n", "# <<< verl_overlay\n# <<< verl_overlay\n", "1 begin, 2 end"),
    ("# >>> verl_overlay", "# >>> verl_overlay twice\n# >>> verl_overlay", "2 begin, 1 end"),
    ("body_sha256=", "body_sha=", "markers are damaged"),
    ("# >>> verl_overlay", "# >> verl_overlay", "0 begin, 1 end"),
    ("format=1", "format=9", "overlay format 9, this version knows 1"),
]


@pytest.mark.parametrize(("old", "new", "reason"), EDITS)
def test_edited_files_are_refused_and_left_alone(core_algos: Path, old: str, new: str, reason: str) -> None:
    overlay.install(core_algos, STARE)
    text = core_algos.read_text()
    assert old in text
    core_algos.write_text(text.replace(old, new))
    edited = core_algos.read_bytes()
    actions: list[Any] = [
        lambda: overlay.install(core_algos, {}),
        lambda: overlay.install(core_algos, {}, force=True),
        lambda: overlay.revert(core_algos),
        lambda: overlay.is_installed(core_algos),
        lambda: overlay.read_configuration(core_algos),
    ]
    for action in actions:
        with pytest.raises(overlay.OverlayError, match=reason) as caught:
            action()
        assert str(core_algos) in str(caught.value) and "Restore the file" in str(caught.value)
    assert core_algos.read_bytes() == edited
    (problem,) = overlay.check(core_algos, sys.executable)
    assert reason in problem


@pytest.mark.parametrize(("old", "new", "reason"), [edit for edit in EDITS if edit[2] != "0 begin, 1 end"])
def test_force_keeps_the_edited_file_and_installs(
    core_algos: Path, tmp_path: Path, old: str, new: str, reason: str
) -> None:
    overlay.install(core_algos, STARE)
    core_algos.write_text(core_algos.read_text().replace(old, new))
    edited = core_algos.read_bytes()
    report = overlay.install(core_algos, {"clip_high": 0.28}, tmp_path / "backup", force=True)
    kept = {path.suffix: path.read_bytes() for path in (tmp_path / "backup").iterdir()}
    assert report.changed and overlay.read_configuration(core_algos)["clip_high"] == 0.28
    assert kept[".edited"] == edited
    overlay.revert(core_algos)
    assert core_algos.read_bytes() == kept[".original"]
    above = edited[: edited.index(b"# >>> verl_overlay")]
    assert core_algos.read_bytes() == above.removesuffix(overlay.SEPARATOR)


def test_force_refuses_a_file_that_does_not_tell_the_original_from_the_block(core_algos: Path, tmp_path: Path) -> None:
    overlay.install(core_algos, STARE)
    core_algos.write_text(core_algos.read_text().replace("# >>> verl_overlay", "# >> verl_overlay"))
    edited = core_algos.read_bytes()
    with pytest.raises(overlay.OverlayError, match="0 begin, 1 end"):
        overlay.install(core_algos, {}, tmp_path / "backup", force=True)
    assert core_algos.read_bytes() == edited


def test_force_does_not_change_what_an_untouched_file_becomes(core_algos: Path, tmp_path: Path) -> None:
    overlay.install(core_algos, STARE)
    installed = core_algos.read_bytes()
    assert not overlay.install(core_algos, STARE, tmp_path / "backup", force=True).changed
    assert core_algos.read_bytes() == installed
    assert [path.suffix for path in (tmp_path / "backup").iterdir()] == [".original"]


@pytest.mark.parametrize(
    ("content", "reasons"),
    [
        ("", ["register_policy_loss is absent", "compute_policy_loss is absent", "0.6.1", "0.4 and 0.5", "0.3"]),
        (
            "def compute_policy_loss(old, new, adv, eos_mask, cliprange): ...\n",
            ["compute_policy_loss takes old, new, adv, eos_mask, cliprange"],
        ),
        (
            SOURCES["registry"].replace("rollout_is_weights=None", "cliprange=None"),
            ["compute_policy_loss_vanilla takes old_log_prob, log_prob, advantages"],
        ),
        (SOURCES["four"].replace("def agg_loss", "def aggregate"), ["agg_loss is absent"]),
        (SOURCES["three"].replace("eos_mask", "mask"), ["compute_grpo_outcome_advantage takes", "mask, index"]),
        ("def broken(:\n", ["not valid Python"]),
        ("x = 1\0\n", ["not valid Python"]),
    ],
)
def test_unknown_files_are_refused_with_what_was_looked_for(core_algos: Path, content: str, reasons: list[str]) -> None:
    core_algos.write_text(content)
    with pytest.raises(overlay.OverlayError) as caught:
        overlay.install(core_algos, {})
    assert all(reason in str(caught.value) for reason in reasons), str(caught.value)
    assert str(core_algos) in str(caught.value) and "\n" not in str(caught.value)
    assert core_algos.read_text() == content


def test_missing_and_unwritable_files_are_explained(tmp_path: Path, core_algos: Path) -> None:
    with pytest.raises(overlay.OverlayError, match="cannot read"):
        overlay.install(tmp_path / "absent.py", {})
    with pytest.raises(overlay.OverlayError, match="cannot create"):
        overlay.install(core_algos, {}, core_algos / "backup")
    assert core_algos.read_text() == SOURCES["registry"]


def test_symlinked_file_is_replaced_at_its_target(core_algos: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.py"
    link.symlink_to(core_algos)
    overlay.install(link, {})
    assert link.is_symlink() and overlay.is_installed(core_algos)


def test_importing_the_installer_loads_neither_torch_nor_verl() -> None:
    modules = "verl_overlay, verl_overlay.install, verl_overlay.control, verl_overlay.presets, verl_overlay.__main__"
    code = f"import sys, {modules}\nprint([name for name in ('torch', 'verl', 'ray', 'numpy') if name in sys.modules])"
    root = str(Path(overlay.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


# ---- check ----


def test_check_finds_nothing_to_say_about_a_good_file(tmp_path: Path, shape: str) -> None:
    pytest.importorskip("torch")
    core_algos = build_verl(tmp_path, shape)
    overlay.install(core_algos, STARE)
    assert overlay.check(core_algos, sys.executable) == []


def test_check_imports_the_file_that_it_was_given(
    core_algos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another verl in the working folder or on PYTHONPATH does not answer in its place."""
    pytest.importorskip("torch")
    build_verl(tmp_path / "other", "registry")
    overlay.install(core_algos, {})
    monkeypatch.chdir(tmp_path / "other")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    assert overlay.check(core_algos, sys.executable) == []
    (tmp_path / "other" / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path / 'other')!r})\nimport verl.trainer.ppo.core_algos\n"
    )
    overlay.install(tmp_path / "other/verl/trainer/ppo/core_algos.py", {})
    (problem,) = overlay.check(core_algos, sys.executable)
    assert f"imports verl from {tmp_path}/other/" in problem and "look at PYTHONPATH" in problem


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def registered_later(core_algos: Path) -> None:
    (core_algos.parents[2] / "__init__.py").write_text(
        "import verl.trainer.ppo.core_algos as core\n"
        "core.register_policy_loss('vanilla')(lambda *arguments, **named: None)\n"
    )


def first_registration_wins(core_algos: Path) -> None:
    edit(core_algos, "LOSSES[name] = function", "LOSSES.setdefault(name, function)")


def verls_own_is_put_back(core_algos: Path) -> None:
    (core_algos.parents[2] / "__init__.py").write_text(
        "import verl.trainer.ppo.core_algos as core\ncore.compute_policy_loss_vanilla = core._overlay.vanilla\n"
    )


def actor_has_a_loss_of_its_own(core_algos: Path) -> None:
    (core_algos.parents[2] / "workers/actor/dp_actor.py").write_text(ACTORS["four"])


def actor_is_absent(core_algos: Path) -> None:
    (core_algos.parents[2] / "workers/actor/dp_actor.py").unlink()


def actor_is_broken(core_algos: Path) -> None:
    (core_algos.parents[2] / "workers/actor/dp_actor.py").write_text("def broken(:\n")


def scaled_outside_the_aggregation(core_algos: Path) -> None:
    edit(core_algos, "**config.global_batch_info), {}", "**config.global_batch_info) * 0.5, {}")


def import_fails(core_algos: Path) -> None:
    edit(core_algos, "import torch", "import torch, no_such_library")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (registered_later, "the registered vanilla loss is not the overlay's"),
        (first_registration_wins, "the registered vanilla loss is not the overlay's"),
        (verls_own_is_put_back, "the live policy loss is verl's own"),
        (actor_has_a_loss_of_its_own, "verl's actor does not call get_policy_loss_fn"),
        (actor_is_absent, "none of workers/actor/dp_actor.py"),
        (actor_is_broken, "dp_actor.py cannot be read as Python"),
        (scaled_outside_the_aggregation, "the composed loss is scaled or masked differently from verl's"),
        (import_fails, "No module named 'no_such_library'"),
    ],
)
def test_check_finds_faults_of_the_verl_around_the_block(core_algos: Path, fault: Any, reason: str) -> None:
    pytest.importorskip("torch")
    fault(core_algos)
    overlay.install(core_algos, {})
    problems = overlay.check(core_algos, sys.executable)
    assert any(reason in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("        **batch_info,\n", "", "the composed loss is scaled or masked differently from verl's"),
        ("else response_mask > 0", "else response_mask > 1", "masked differently from verl's (mask torch.int64)"),
        ("if self.state.configuration.loss_is_off:", "if False:", "with everything off the loss is not verl's own"),
        ("def agg_loss(*arguments, **named):", "def aggregate(*arguments, **named):", "the block defines aggregate"),
        ('@register_policy_loss("vanilla")\n', "", "the registered vanilla loss is not the overlay's"),
    ],
)
def test_check_finds_faults_of_the_block(
    core_algos: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, reason: str
) -> None:
    """The block's own mistakes show in its self-test, as if this project had made them."""
    pytest.importorskip("torch")
    render = overlay._render_body

    def faulty(*arguments: Any) -> str:
        body = render(*arguments)
        assert old in body
        return body.replace(old, new)

    monkeypatch.setattr(overlay, "_render_body", faulty)
    overlay.install(core_algos, {})
    problems = overlay.check(core_algos, sys.executable)
    assert any(reason in problem for problem in problems), problems


def test_check_reports_what_is_missing(core_algos: Path, tmp_path: Path) -> None:
    assert "holds no overlay" in overlay.check(core_algos, sys.executable)[0]
    overlay.install(core_algos, {})
    assert "could not be checked with /no/python" in overlay.check(core_algos, "/no/python")[0]
    alone = tmp_path / "core_algos.py"
    alone.write_bytes(core_algos.read_bytes())
    assert "does not lie in verl/trainer/ppo" in overlay.check(alone, sys.executable)[0]
    assert "cannot read" in overlay.check(tmp_path / "absent.py", sys.executable)[0]


# ---- faults that users made ----


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for target in (Path("/dev/null"), tmp_path):
        with pytest.raises(overlay.OverlayError, match="is not a file"):
            overlay.install(target, {})


def test_a_backup_that_is_not_the_original_is_refused(core_algos: Path, tmp_path: Path) -> None:
    original = core_algos.read_bytes()
    backup = tmp_path / "backup" / f"core_algos.py.{hashlib.sha256(original).hexdigest()[:12]}.original"
    backup.parent.mkdir()
    backup.write_text("junk")
    with pytest.raises(overlay.OverlayError, match="holds something else"):
        overlay.install(core_algos, {}, backup.parent)
    assert core_algos.read_bytes() == original and backup.read_text() == "junk"


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(overlay.OverlayError, match="is not JSON"):
        read_configuration_text("[" * 100_000, "the text")
