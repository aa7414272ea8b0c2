"""The overlay in every covered verl, compared with that verl's own functions.

Each version is examined once, in processes of its own (``version_checks.py``): the block is installed in a copy of the
wheel's tree, checked, imported, compared, installed again and reverted.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from wheels import VERSIONS, wheel_tree

from verl_overlay import install as overlay
from verl_overlay.presets import PRESETS

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(overlay.__file__).parents[1]
SCRIPT = Path(__file__).with_name("version_checks.py")
CORE_ALGOS = Path("verl/trainer/ppo/core_algos.py")
SCHEDULE_STEPS = 100.0


@dataclass(frozen=True)
class Version:
    """What is known of a verl version, read in its source."""

    shape: str
    modes: frozenset[str] = frozenset({"token-mean"})
    informed: bool = False
    """Whether ``agg_loss`` takes the sizes of the global batch."""
    own: frozenset[str] = frozenset()
    """Presets that verl itself has, as a loss or an advantage."""
    trainers: frozenset[str] = frozenset({"verl.trainer.ppo.ray_trainer"})
    """Modules on the trainer's process that aggregate token entropies."""


FOUR_MODES = frozenset({"token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"})
COV = frozenset({"clip_cov", "kl_cov"})
OWN = COV | {"gspo", "cispo", "gdpo"}
SEPARATE = frozenset({"verl.trainer.ppo.ray_trainer", "verl.experimental.separation.ray_trainer"})
KNOWN = {
    "0.3.0.post1": Version("three", trainers=frozenset()),
    "0.4.1": Version("four", FOUR_MODES, own=COV),
    "0.5.0": Version("four", FOUR_MODES, own=COV),
    "0.6.1": Version("registry", FOUR_MODES, own=COV | {"gspo"}),
    "0.7.1": Version("registry", FOUR_MODES, True, OWN, SEPARATE),
    "0.8.0": Version("registry", FOUR_MODES, True, OWN, SEPARATE | {"verl.trainer.main_ppo_sync"}),
    "0.9.1": Version(
        "registry", FOUR_MODES | {"token-sum"}, True, OWN, SEPARATE | {"verl.trainer.ppo.v1.trainer_base"}
    ),
}
STUBS = {
    "0.4.1": (
        "pkg_resources.py",
        "class DistributionNotFound(Exception): ...\ndef get_distribution(name): raise DistributionNotFound(name)\n",
    ),
    "0.6.1": (
        "sitecustomize.py",
        "import transformers\ntransformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText\n",
    ),
}
"""What two versions import that newer libraries no longer have; nothing of it is used here."""


@dataclass(frozen=True)
class Report:
    """What was found in one version."""

    check: str
    check_status: int
    results: dict[str, Any]
    repeated: bool
    """Installing again wrote nothing."""
    reverted: bool
    """Reverting restored the bytes."""

    def differences(self, name: str) -> list[str]:
        return list(self.results[name][1])

    def count(self, name: str) -> int:
        return int(self.results[name][0]) if name in self.results else 0


def examine(version: str, folder: Path) -> Report:
    shutil.copytree(wheel_tree(version) / "verl", folder / "tree" / "verl")
    (folder / "work").mkdir()
    (folder / "stubs").mkdir()
    if version in STUBS:
        name, text = STUBS[version]
        (folder / "stubs" / name).write_text(text)
    core_algos = folder / "tree" / CORE_ALGOS
    original = core_algos.read_bytes()
    overlay.install(core_algos, {})
    checked = run(folder, ROOT, "-m", "verl_overlay", "check", str(core_algos))
    presets = json.dumps({name: preset.complete(SCHEDULE_STEPS) for name, preset in PRESETS.items()})
    compared = run(folder, folder / "work", str(SCRIPT), str(core_algos), str(folder / "side files"), presets)
    lines = [line for line in compared.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, compared.stderr[-3000:]
    repeated = not overlay.install(core_algos, {}).changed
    overlay.install(core_algos, {"clip_high": 0.3})
    overlay.revert(core_algos)
    return Report(
        check=checked.stdout.strip() + checked.stderr.strip(),
        check_status=checked.returncode,
        results=json.loads(lines[-1].removeprefix("RESULT ")),
        repeated=repeated,
        reverted=core_algos.read_bytes() == original,
    )


def run(folder: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with this version of verl and its stubs first on the path."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    paths = [folder / "tree", folder / "stubs", environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def examinations(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Report]]]:
    """The examinations of the versions that this session asks for, two at a time."""
    asked = {item.callspec.params.get("version") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(2) as pool:
        chosen = [version for version in VERSIONS if version in asked]
        yield {v: pool.submit(examine, v, tmp_path_factory.mktemp("verl") / v) for v in chosen}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def known(version: str) -> Version:
    return KNOWN[version]


@pytest.fixture
def report(version: str, examinations: dict[str, Future[Report]]) -> Report:
    return examinations[version].result()


def test_check_finds_the_overlay_in_force(report: Report) -> None:
    assert report.check_status == 0 and report.check.endswith("the overlay is in force"), report.check


def test_installing_again_changes_nothing_and_reverting_restores_every_byte(report: Report) -> None:
    assert report.repeated and report.reverted


def test_everything_off_is_verls_own_loss_bit_for_bit(known: Version, report: Report) -> None:
    assert report.results["shape"] == [known.shape] and set(report.results["modes"]) == known.modes
    seeds, drifts, masks = 3, 3, 3
    cases = len(known.modes) * seeds * drifts * masks
    cases *= 2 if known.shape == "registry" else 1  # with and without rollout_is_weights
    cases *= 2 if known.informed else 1  # with and without the sizes of the global batch
    for name in ("all-off loss", "all-off gradient", "all-off metrics"):
        assert report.count(name) == cases and report.differences(name) == [], name
    assert report.count("all-off with an empty response") == len(known.modes) * seeds
    assert report.differences("all-off with an empty response") == []


def test_the_composed_path_with_verls_own_values_is_verls_own_loss(known: Version, report: Report) -> None:
    compared = report.count("all-off loss") * 2 // 3 if known.shape == "three" else report.count("all-off loss")
    for name in ("neutral loss", "neutral gradient"):
        assert report.count(name) == compared and report.differences(name) == [], name
    if known.shape == "registry":
        assert report.count("OmegaConf configuration") == 2 and report.differences("OmegaConf configuration") == []


def test_presets_equal_verls_own_implementations(known: Version, report: Report) -> None:
    everywhere = 4 * len(known.modes)
    expected = {"clip_cov": everywhere, "kl_cov": everywhere, "cispo": everywhere, "gspo": 4, "gdpo": 4}
    for name, compared in expected.items():
        assert report.count(name) == (compared if name in known.own else 0), name
        if name in known.own:
            assert report.differences(name) == []
            assert name == "gdpo" or report.differences(f"{name} acts") == []


def test_every_preset_trains_or_is_refused_with_the_reason(version: str, report: Report) -> None:
    refused = dict(text.split(": ", 1) for text in report.results.get("refused presets", [0, []])[2:])
    impossible = {name for name, preset in PRESETS.items() if "0.3" in preset.missing_in}
    assert set(refused) == (impossible if version.startswith("0.3") else set())
    assert all(text.startswith("OverlayError: overlay knob '") and "verl 0.3" in text for text in refused.values())
    assert report.count("presets train") == 2 * (len(PRESETS) - len(refused))
    assert report.differences("presets train") == report.differences("padding has no gradient") == []


def test_advantages_are_verls_own(known: Version, report: Report) -> None:
    assert report.count("all-off advantage") == report.count("composed advantage") == 24
    assert report.differences("all-off advantage") == report.differences("composed advantage") == []
    assert report.count("Dr.GRPO advantage") == (0 if known.shape == "three" else 12)
    assert known.shape == "three" or report.differences("Dr.GRPO advantage") == []


def test_calls_are_recorded_where_the_loss_returns_no_metrics(known: Version, report: Report) -> None:
    names = ["no loss records" if known.shape == "registry" else "recorded losses", "calls", "identity"]
    for name in (*names, "reweighted share"):
        assert report.count(name) == 2 and report.differences(name) == [], name
    assert report.differences("no records without a folder, none of other ranks") == []


def test_the_trainers_that_aggregate_entropies_are_the_known_ones(version: str, known: Version) -> None:
    tree = wheel_tree(version)
    callers = {
        ".".join(path.relative_to(tree).with_suffix("").parts)
        for path in sorted((tree / "verl").rglob("*.py"))
        if b"agg_loss(" in path.read_bytes() and calls(path, "agg_loss")
    }
    workers = {name for name in callers if name.startswith(("verl.workers", "verl.trainer.distillation"))}
    assert callers - workers - {"verl.trainer.ppo.core_algos"} == known.trainers


def calls(path: Path, name: str) -> bool:
    nodes = [node.func for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Call)]
    return any(isinstance(node, ast.Name) and node.id == name for node in nodes)
