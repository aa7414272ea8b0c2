"""The block in ``core_algos.py``: rendering, idempotence, reverting, refusals, and the live loss."""

import ast
import hashlib
import importlib.util
import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_overlay import __main__ as command
from verl_overlay import install as overlay
from verl_overlay.configuration import knobs, parse_configuration, read_configuration_text

ORIGINAL = '''\
"""A stand-in with the functions the block builds on."""

REGISTRY = {}


def register_policy_loss(name):
    def decorator(function):
        REGISTRY[name] = function
        return function
    return decorator


def agg_loss(loss_mat, loss_mask, loss_agg_mode):
    return (loss_mat * loss_mask).sum()


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
    rollout_is_weights=None,
):
    return (-advantages * log_prob * response_mask).sum(), {}
'''
STARE: dict[str, object] = {"token_rule": "stare", "stare.fraction": 0.2, "stare.target_entropy": 5.0}


@pytest.fixture
def core_algos(tmp_path: Path) -> Path:
    path = tmp_path / "core_algos.py"
    path.write_text(ORIGINAL)
    return path


def installed_verl() -> Path:
    """The folder of the installed verl, found without importing it."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("verl is not installed")
    return Path(spec.origin).parent


@pytest.fixture
def verl_copy(tmp_path: Path) -> Path:
    """A verl tree that shares all files with the installed one except ``core_algos.py``; its core_algos."""
    source, target = installed_verl(), tmp_path / "tree" / "verl"
    for folder in (Path(), Path("trainer"), Path("trainer/ppo")):
        (target / folder).mkdir(parents=True)
        for entry in (source / folder).iterdir():
            inside = folder / entry.name
            if str(inside) not in ("trainer", "trainer/ppo", "trainer/ppo/core_algos.py"):
                if entry.name != "__pycache__":
                    (target / inside).symlink_to(entry)
    path = target / "trainer/ppo/core_algos.py"
    path.write_bytes((source / "trainer/ppo/core_algos.py").read_bytes())
    return path


# ---- configuration ----


def test_every_knob_accepts_its_off_value_and_limits() -> None:
    off = {knob.key: knob.off for knob in knobs()}
    assert overlay.check_configuration(off) == []
    assert parse_configuration(off).is_off and parse_configuration({}).is_off
    assert len(off) == 21
    for knob in knobs():
        if "number" in knob.kind:
            for value in (knob.low, knob.high):
                problems = overlay.check_configuration({knob.key: value})
                assert not [text for text in problems if " in [" in text]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_hihg", 0.2),
        ("clip_high", -0.1),
        ("clip_high", "0.2"),
        ("clip_high", True),
        ("positive_weight", None),
        ("positive_weight", math.nan),
        ("negative_weight", math.inf),
        ("negative_weight", 1e9),
        ("positive_weight", 10**310),
        ("token_rule", "clipcov"),
        ("token_rule", None),
        ("stare.adaptive", 1),
        ("stare.fraction", 0.0),
        ("stare.step", [0.1]),
    ],
)
def test_bad_values_are_named(key: str, value: object) -> None:
    (problem,) = overlay.check_configuration({key: value})
    assert repr(key) in problem and repr(value) in problem
    with pytest.raises(overlay.OverlayError, match=key):
        overlay.render_block({key: value})


@pytest.mark.parametrize(
    "values",
    [
        {"positive_control": "entropy_guided", "positive_weight": 1.5},
        {"token_rule": "clip_cov", "clip_cov.lower": 5.0, "clip_cov.upper": 5.0},
        {"token_rule": "stare", "stare.amplify": 1.6},
        {"token_rule": "stare", "stare.damp": 0.4},
        {"positive_weight": 0, "negative_weight": 0},
    ],
)
def test_contradictions_are_named(values: dict[str, object]) -> None:
    assert len(overlay.check_configuration(values)) == 1


PLAIN_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON_VALUES = st.recursive(PLAIN_VALUES, lambda inner: st.dictionaries(st.text(), inner))


@given(JSON_VALUES)
def test_checking_never_fails_itself(value: object) -> None:
    overlay.check_configuration(value)
    overlay.check_configuration({"clip_low": value, "token_rule": value, "stare.adaptive": value})


def test_identity_depends_on_values_only() -> None:
    assert overlay.configuration_identity({}) == overlay.configuration_identity({"positive_weight": 1})
    assert overlay.configuration_identity({}) != overlay.configuration_identity({"clip_high": 0.28})


# ---- install, inspect, revert ----


def test_block_is_self_contained_and_parses() -> None:
    block = overlay.render_block(STARE)
    tree = ast.parse(block)
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    roots = {name.split(".")[0] for name in imported}
    assert roots - set(sys.stdlib_module_names) == {"torch"}
    assert "__future__" not in roots


def test_modules_of_the_block_share_no_names() -> None:
    names: list[str] = []
    for module in overlay.MODULES:
        tree = ast.parse(Path(overlay.__file__).with_name(f"{module}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append(node.name)
            elif isinstance(node, ast.Assign):
                names.extend(ast.unparse(target) for target in node.targets)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("ending", ["", "\n", "\n\n\n\n", "\r\n", "# no newline at the end"])
def test_install_is_idempotent_and_revert_is_exact(core_algos: Path, tmp_path: Path, ending: str) -> None:
    core_algos.write_bytes((ORIGINAL + ending).encode())
    core_algos.chmod(0o640)
    original = core_algos.read_bytes()
    first = overlay.install(core_algos, STARE, tmp_path / "backup")
    once = core_algos.read_bytes()
    assert first.changed and first.original_sha256 == hashlib.sha256(original).hexdigest()
    assert first.installed_sha256 == hashlib.sha256(once).hexdigest()
    assert first.backup is not None and first.backup.read_bytes() == original
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
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".core_algos")] == []


def test_baked_configuration_reads_back(core_algos: Path) -> None:
    overlay.install(core_algos, STARE)
    read = overlay.read_configuration(core_algos)
    assert {key: read[key] for key in STARE} == STARE
    assert set(read) == {knob.key for knob in knobs()}
    assert overlay.install(core_algos, read).changed is False


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LOG_RATIO_LIMIT = 20.0", "LOG_RATIO_LIMIT = 21.0"),
        ("A stand-in", "Another stand-in"),
        ("# <<< verl_overlay\n", "# <<< verl_overlay\nprint('more')\n"),
        ("# <<< verl_overlay\n", ""),
        ("# >>> verl_overlay", "# >> verl_overlay"),
        ("format=1", "format=9"),
        ("\n\n\n# >>> verl_overlay", "\n# >>> verl_overlay"),
    ],
)
def test_hand_edited_files_are_refused_and_left_alone(core_algos: Path, old: str, new: str) -> None:
    overlay.install(core_algos, STARE)
    text = core_algos.read_text()
    assert old in text
    core_algos.write_text(text.replace(old, new))
    edited = core_algos.read_bytes()
    actions: list[Any] = [lambda: overlay.install(core_algos, {}), lambda: overlay.revert(core_algos)]
    for action in actions:
        with pytest.raises(overlay.OverlayError, match=r"core_algos\.py .*(edited by hand|format)"):
            action()
    assert core_algos.read_bytes() == edited
    assert len(overlay.check(core_algos, sys.executable)) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("def compute_policy_loss(old, new, adv, eos_mask, cliprange): ...\n", "0.6.1"),
        (ORIGINAL.replace("rollout_is_weights=None", "cliprange=None"), "compute_policy_loss_vanilla"),
        ("def broken(:\n", "not valid Python"),
    ],
)
def test_unknown_files_are_refused(core_algos: Path, content: str, reason: str) -> None:
    core_algos.write_text(content)
    with pytest.raises(overlay.OverlayError, match=reason):
        overlay.install(core_algos, {})
    assert core_algos.read_text() == content


def test_missing_and_unwritable_files_are_explained(tmp_path: Path, core_algos: Path) -> None:
    with pytest.raises(overlay.OverlayError, match="cannot read"):
        overlay.install(tmp_path / "absent.py", {})
    with pytest.raises(overlay.OverlayError, match="cannot create"):
        overlay.install(core_algos, {}, core_algos / "backup")
    assert core_algos.read_text() == ORIGINAL


def test_symlinked_file_is_replaced_at_its_target(core_algos: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.py"
    link.symlink_to(core_algos)
    overlay.install(link, {})
    assert link.is_symlink() and overlay.is_installed(core_algos)


def test_importing_the_installer_loads_neither_torch_nor_verl() -> None:
    code = (
        "import sys, verl_overlay, verl_overlay.install, verl_overlay.control\n"
        "print([name for name in ('torch', 'verl', 'ray', 'numpy') if name in sys.modules])"
    )
    root = str(Path(overlay.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_command_lists_knobs_and_shows_the_baked_configuration(
    core_algos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(knobs())
    assert command.main(["show", str(core_algos)]) == 1
    overlay.install(core_algos, STARE)
    capsys.readouterr()
    assert command.main(["show", str(core_algos)]) == 0
    assert json.loads(capsys.readouterr().out)["token_rule"] == "stare"
    assert command.main([]) == 2


# ---- the real file ----

PROBE = """
import json, sys, torch
sys.path[:] = [entry for entry in sys.path if "verl_overlay" not in entry]
import verl.trainer.ppo.core_algos as core
from verl.workers.config import ActorConfig
assert "verl_overlay" not in sys.modules
data = torch.load(sys.argv[1])
config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1)
config.global_batch_info.update(dp_size=1, batch_num_tokens=int(data["response_mask"].sum()))
live = core.get_policy_loss_fn("vanilla")
out = []
for _ in range(2):
    leaf = data["log_prob"].clone().requires_grad_()
    loss, metrics = live(**{**data, "log_prob": leaf}, loss_agg_mode="token-mean", config=config,
                         rollout_is_weights=None)
    loss.backward()
    out.append({"loss": loss.item(), "gradient": leaf.grad.tolist(), "metrics": metrics})
print("RESULT" + json.dumps([core.__file__, live is core.compute_policy_loss_vanilla, out]))
"""


def test_installed_copy_of_verl_uses_the_overlay(verl_copy: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from verl_overlay.control import ControlState
    from verl_overlay.losses import overlay_policy_loss

    report = overlay.install(verl_copy, {})
    torch.manual_seed(0)
    shape = (4, 6)
    data = {
        "old_log_prob": -torch.rand(shape) * 2,
        "log_prob": -torch.rand(shape) * 2,
        "advantages": torch.randn(4, 1).expand(shape).contiguous(),
        "response_mask": torch.rand(shape) < 0.8,
    }
    torch.save(data, tmp_path / "data.pt")
    environment = {**os.environ, "PYTHONPATH": str(verl_copy.parents[3]), "VERL_OVERLAY": json.dumps(STARE)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path / "data.pt")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr
    imported, live, calls = json.loads(lines[0].removeprefix("RESULT"))
    assert Path(imported) == verl_copy and live

    tokens = int(data["response_mask"].sum())

    class Config(dict[str, Any]):
        clip_ratio = clip_ratio_low = clip_ratio_high = 0.2
        global_batch_info: ClassVar[dict[str, int]] = {"dp_size": 1, "batch_num_tokens": tokens}

    def token_mean(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, **info: Any) -> Any:
        return torch.where(loss_mask, loss_mat, 0.0).sum() / info["batch_num_tokens"]

    def unexpected(*_: Any) -> Any:
        raise AssertionError("verl's own loss was called")

    state = ControlState(parse_configuration(STARE), lambda: None)
    for number, call in enumerate(calls, 1):
        leaf = data["log_prob"].clone().requires_grad_()
        loss, metrics = overlay_policy_loss(
            **{**data, "log_prob": leaf},
            config=Config(),
            state=state,
            aggregate=token_mean,
            vanilla=unexpected,
        )
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert call["loss"] == pytest.approx(loss.item(), abs=1e-7)
        assert call["gradient"] == [pytest.approx(row, abs=1e-7) for row in gradient.tolist()]
        assert call["metrics"] == pytest.approx(metrics, abs=1e-6)
        assert call["metrics"]["overlay/calls"] == number
        assert call["metrics"]["overlay/reweighted_share"] > 0
        assert call["metrics"]["overlay/configuration_id"] == overlay.configuration_identity(STARE)
        assert report.configuration_id != call["metrics"]["overlay/configuration_id"]

    assert overlay.check(verl_copy, sys.executable) == []


def test_unusable_environment_stops_the_import(core_algos: Path) -> None:
    pytest.importorskip("torch")
    overlay.install(core_algos, {})
    with pytest.raises(overlay.OverlayError, match="VERL_OVERLAY is not JSON"):
        read_configuration_text("{", "VERL_OVERLAY")
    for text, reason in (('{"clip_high": -1}', "clip_high"), ("", None)):
        done = subprocess.run(
            [sys.executable, core_algos.name],
            cwd=core_algos.parent,
            env={**os.environ, "VERL_OVERLAY": text},
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) is (reason is None), done.stderr
        assert reason is None or (reason in done.stderr and "VERL_OVERLAY" in done.stderr)


def test_check_reports_what_is_missing(core_algos: Path) -> None:
    assert "holds no overlay" in overlay.check(core_algos, sys.executable)[0]
    overlay.install(core_algos, {})
    assert "verl/trainer/ppo" in overlay.check(core_algos, sys.executable)[0]
