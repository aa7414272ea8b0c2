"""Search spaces: the shipped one, typed reading, conditions, presets."""

from pathlib import Path

import optuna
import pytest

from search_spaces.space import SpaceError, read_space, shipped_space
from search_spaces.strict_yaml import YamlError, parse_scalar, read_yaml
from verl_overlay.install import check_configuration


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("-2.5E3", -2500.0), (".5", 0.5), ("3", 3), ("007", "007"), ("no", "no"), ("off", "off"),
        ("true", True), ("48:00:00", "48:00:00"), ("12:00", "12:00"), ("null", None), ("~", None), ("1_000", "1_000"),
        ("0x10", "0x10"), ("2026-11-30", "2026-11-30"), ("none", "none"),
    ],
)  # fmt: skip
def test_scalars_are_read_as_people_mean_them(text: str, value: object) -> None:
    seen = parse_scalar(text)
    assert seen == value and type(seen) is type(value)


def test_a_repeated_key_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(YamlError, match=r"x\.yaml: line 3: the key 'a' appears twice"):
        read_yaml(write(tmp_path / "x.yaml", "a: 1\nb: 2\na: 3\n"))


@pytest.mark.parametrize("content", [b"a: [1\n", b"\xff\xfe", b"- 1\n- 2\n", b"a: b: c\n"])
def test_files_that_are_not_yaml_mappings_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(YamlError, match=r"x\.yaml"):
        read_yaml(tmp_path / "x.yaml")


def test_every_point_of_the_shipped_space_is_a_valid_overlay_configuration() -> None:
    space = read_space(shipped_space("overlay"))
    for preset in space.presets:
        assert check_configuration(space.preset_parameters(preset)) == []
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(200):
        assert check_configuration(space.suggest(study.ask())) == []


def test_conditional_knobs_exist_only_under_their_condition() -> None:
    space = read_space(shipped_space("overlay"))
    assert "stare.fraction" in space.preset_parameters("stare")
    assert "stare.fraction" not in space.preset_parameters("clip_cov")
    assert space.complete({})["token_rule"] == "none"


def test_any_of_several_conditions_activates_a_knob_and_constants_join_every_configuration() -> None:
    space = read_space(shipped_space("overlay"))
    for settings in ({"control.knob": "auto"}, {"token_rule": "stare"}, {"extra_term": "entropic"}):
        assert "target.entropy" in space.complete(settings)
    assert "target.entropy" not in space.complete({"token_rule": "clip_cov"})
    assert space.configuration({"clip_high": 0.3}) == {"target.unit": "h0", "clip_high": 0.3}
    assert check_configuration(space.configuration(space.complete({}))) == []


KNOB = "schema: 1\nknobs:\n  a: {type: float, low: 0.1, high: 1.0, default: 0.5}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 1\nknobs: {a: {type: float, low: 1, high: 0, default: 0}}", "low 1.0 is not below high 0.0"),
        ("schema: 1\nknobs: {a: {type: float, low: 0, high: 1, log: true, default: 1}}", "log range needs low > 0"),
        ("schema: 1\nknobs: {a: {type: float, low: 0, high: 1, default: 2}}", "default 2.0 is outside"),
        ("schema: 1\nknobs: {a: {type: int, low: 0, high: 1.5, default: 1}}", r"knobs\.a\.high.*1\.5"),
        ("schema: 1\nknobs: {a: {type: choice, choices: [x, y], default: z}}", "default 'z' is not one of"),
        (KNOB + "presets: {p: {source: s, set: {b: 1}}}", "preset p: unknown knob b"),
        (KNOB + "presets: {p: {source: s, set: {a: 7}}}", "preset p: a = 7 is outside"),
        (KNOB + "  c: {type: int, low: 1, high: 2, default: 1, when: {z: [1]}}", "names z"),
        (KNOB + "typo: 1", "typo: unknown key"),
        ("knobs: {}", "schema"),
        ("schema: 2\nknobs: {}", "schema"),
        ("schema: 1\nknobs: {a: {type: float, low: .nan, high: 1, default: 1}}", "finite"),
    ],
)
def test_wrong_spaces_are_refused_with_the_knob_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message) as caught:
        read_space(write(tmp_path / "space.yaml", text))
    assert "space.yaml" in str(caught.value) and "\n" not in str(caught.value)
