"""YAML as people mean it: `1e-6` is a number, `no` and `48:00:00` are text, a repeated key is an error.

PyYAML follows YAML 1.1, where `1e-6` is a string, `no` is False, `007` is 7 and `48:00:00` is 172800. This loader
resolves scalars as YAML 1.2's core schema does (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

import re
from pathlib import Path
from typing import Any

import yaml

from search_spaces.plain_files import require_file

_LARGEST_FILE = 2**20


class YamlError(ValueError):
    """The file cannot be read as YAML; the message names file and line."""


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 core scalars and without repeated keys."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        for position, key in enumerate(keys):
            if key in keys[:position]:
                mark = node.value[position][0].start_mark
                raise YamlError(f"line {mark.line + 1}: the key '{key}' appears twice; remove one of them")
        return super().construct_mapping(node, deep)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, 10)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(node.value.replace(".inf", "inf").replace(".nan", "nan"))


_NUMBER_START = list("-+.0123456789")
_RULES: list[tuple[str, str, list[str]]] = [
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", _NUMBER_START),
    ("float", r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", _NUMBER_START),
]
for _tag, _pattern, _first in _RULES:
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_CoreLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping. An empty file is an empty mapping.

    Raises:
        YamlError: not readable, not YAML, a repeated key, or not a mapping; the message names the file.
    """
    try:
        size = require_file(path).stat().st_size
        if size > _LARGEST_FILE:
            raise YamlError(f"holds {size} bytes, more than a configuration's {_LARGEST_FILE}; name another file")
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_CoreLoader)
    except RecursionError:
        raise YamlError(f"{path}: is nested too deeply; write it flatter") from None
    except OSError as error:
        raise YamlError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    except UnicodeDecodeError:
        raise YamlError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise YamlError(f"{path}:{where} is not valid YAML: {problem}") from None
    except YamlError as error:
        raise YamlError(f"{path}: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise YamlError(f"{path}: holds a {type(loaded).__name__}, not a mapping of keys to values")
    return loaded


def parse_scalar(text: str) -> Any:
    """The value of one YAML scalar or flow collection, e.g. from the command line; text that is not YAML stays text."""
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except yaml.YAMLError:
        return text
