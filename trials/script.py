"""train.sh → the script of one trial. Pure.

The workspace's script is used as it is: only the named Hydra overrides differ, everything else is copied byte for byte.
Understood is one command that runs verl (`… -m verl.trainer.main_ppo key=value …`), with continuations, quotes and
comments between its lines. What cannot be understood is refused with its line number.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

OverrideValue = str | int | float | bool | None

_COMMAND = re.compile(r"verl\.trainer\.main\w*")
_OVERRIDE = re.compile(r"^(?P<prefix>\+{0,2})(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)$", re.DOTALL)
_ASSIGNMENT = re.compile(
    r"^\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>\"\$\(.*\)\"|\"[^\"\n]*\"|'[^'\n]*'|[^\s;#]*)\s*(?:#.*)?$",
    re.M,
)
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}|(?P<plain>[A-Za-z_]\w*))")
_BARE = re.compile(r"^[A-Za-z0-9_./:@-]+$")


class ScriptError(ValueError):
    """A script cannot be understood; the message names the line."""


@dataclass(frozen=True)
class _Word:
    """One shell word of the command: where it stands and what it says without quotes (variables unexpanded)."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Override:
    """One `key=value` argument of the training command."""

    key: str
    value: str
    """As written, without shell quotes; variables unexpanded."""
    line: int


class TrainScript:
    """A parsed training script."""

    def __init__(self, text: str) -> None:
        """Parse `text`.

        Raises:
            ScriptError: no verl command, several, an open quote, or the same key twice.
        """
        self.text = text
        self._words = _command_words(text)
        self._overrides: dict[str, tuple[Override, _Word]] = {}
        for word in self._words:
            match = _OVERRIDE.match(word.text)
            if not match:
                continue
            line = text.count("\n", 0, word.start) + 1
            if match["key"] in self._overrides:
                first = self._overrides[match["key"]][0].line
                raise ScriptError(f"line {line}: {match['key']} is set again (first in line {first}); keep one of them")
            self._overrides[match["key"]] = (Override(match["key"], match["value"], line), word)

    @property
    def overrides(self) -> dict[str, str]:
        """Key → value of every override, as written."""
        return {key: override.value for key, (override, _) in self._overrides.items()}

    def get(self, key: str, environment: Mapping[str, str] | None = None) -> str | None:
        """The value of a key with `$VAR`, `${VAR}` and `${VAR:-default}` expanded; None when the script does not set it.

        `environment` gives the value of variables that the script computes by a command or takes from its environment.

        Raises:
            ScriptError: the value uses a variable that neither the script nor `environment` sets.
        """
        if key not in self._overrides:
            return None
        override, _ = self._overrides[key]
        return _unquoted(self._expand(override.value, environment or {}, override))

    def get_int(self, key: str, environment: Mapping[str, str] | None = None) -> int | None:
        """The value of a key as an integer, None when the script does not set it or sets null.

        Raises:
            ScriptError: not an integer.
        """
        value = self.get(key, environment)
        if value is None or value == "null":
            return None
        if not re.fullmatch(r"[-+]?\d+", value):
            line = self._overrides[key][0].line
            raise ScriptError(f"line {line}: {key}={value} is not an integer; the agent needs its value to plan")
        return int(value)

    def render(self, overrides: Mapping[str, OverrideValue]) -> str:
        """The script with these overrides changed where they stand, or added behind the last argument."""
        edits: list[tuple[int, int, str]] = []
        added: list[str] = []
        for key, value in overrides.items():
            argument = shlex.quote(f"{key}={quote_value(value)}")
            if key in self._overrides:
                _, word = self._overrides[key]
                prefix = _OVERRIDE.match(word.text)["prefix"]  # type: ignore[index]
                edits.append((word.start, word.end, prefix + argument))
            else:
                added.append(argument)
        if added:
            end = self._insertion_point()
            edits.append((end, end, "".join(f" \\\n  {argument}" for argument in added)))
        text = self.text
        for start, stop, replacement in sorted(edits, reverse=True):
            text = text[:start] + replacement + text[stop:]
        return text

    def _insertion_point(self) -> int:
        arguments = [
            word for word in self._words if not re.fullmatch(r"\"?\$[@*]\"?", self.text[word.start : word.end])
        ]
        return arguments[-1].end

    def _expand(self, value: str, environment: Mapping[str, str], override: Override, depth: int = 0) -> str:
        assigned = {match["name"]: match["value"] for match in _ASSIGNMENT.finditer(self.text)}

        def replace(match: re.Match[str]) -> str:
            name = match["braced"] or match["plain"]
            said = _unquoted(assigned[name]) if name in assigned and depth < 5 else None
            takes_environment = said is None or f"${{{name}" in said or "$(" in said
            if takes_environment and environment.get(name):
                return environment[name]
            if said is not None:
                return self._expand(said, environment, override, depth + 1)
            if match["default"] is not None:
                return match["default"]
            raise ScriptError(f"line {override.line}: {override.key}={override.value} uses ${name}, which is not set")

        if "$(" in value or "`" in value:
            raise ScriptError(
                f"line {override.line}: {override.key}={override.value} runs a command; write the value itself"
            )
        return _VARIABLE.sub(replace, value)


def _unquoted(value: str) -> str:
    """Without one pair of surrounding quotes, the shell's or Hydra's."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def quote_value(value: OverrideValue) -> str:
    """A value in Hydra's override grammar: numbers, true/false, null and plain words bare, other text single-quoted."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    is_plain = _BARE.match(value) and not re.fullmatch(r"(?i)null|true|false|nan|inf|[-+]?[\d._]+(e[-+]?\d+)?", value)
    if is_plain:
        return value
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", value)) + "'"


def differing_overrides(before: str, after: str) -> dict[str, tuple[str | None, str | None]]:
    """Key → (value before, value after) of all overrides in which two scripts differ.

    Raises:
        ScriptError: the scripts also differ in something that is not an override.
    """
    old, new = TrainScript(before), TrainScript(after)
    keys = [*old.overrides, *(key for key in new.overrides if key not in old.overrides)]
    changed = {key: (old.overrides.get(key), new.overrides.get(key)) for key in keys}
    changed = {key: pair for key, pair in changed.items() if pair[0] != pair[1]}
    if old.render(dict.fromkeys(changed, "X")) != new.render(dict.fromkeys(changed, "X")):
        raise ScriptError("the scripts differ in more than their overrides; compare them with diff")
    return changed


def _command_words(text: str) -> list[_Word]:
    """The shell words of the one command that runs verl, from the module name on."""
    starts = []
    for match in _COMMAND.finditer(text):
        line_start = text.rfind("\n", 0, match.start()) + 1
        if not text[line_start : match.start()].lstrip().startswith("#"):
            starts.append(match.start())
    if not starts:
        raise ScriptError("no command runs `-m verl.trainer.main_ppo`; the agent can only tune a script that does")
    if len(starts) > 1:
        lines = ", ".join(str(text.count("\n", 0, start) + 1) for start in starts)
        raise ScriptError(f"several verl commands, in lines {lines}; the agent needs exactly one")
    return _split_words(text, starts[0])


def _split_words(text: str, position: int) -> list[_Word]:
    words: list[_Word] = []
    while position < len(text):
        character = text[position]
        if text.startswith(("\\\n", "\\\r\n"), position):
            position = text.index("\n", position) + 1
        elif character in " \t\r":
            position += 1
        elif character == "#":
            position = _skip_comment(text, position)
        elif character in "\n;|&<>" or re.match(r"\d+>", text[position:]):
            break
        else:
            word = _read_word(text, position)
            words.append(word)
            position = word.end
    return words


def _skip_comment(text: str, position: int) -> int:
    """A comment on a line of its own between continued lines is part of the command for the people who write it."""
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _read_word(text: str, start: int) -> _Word:
    position, said = start, []
    while position < len(text) and text[position] not in " \t\r\n;|&<>":
        character = text[position]
        if character == "'":
            end = text.find("'", position + 1)
            _require_closed(end, text, position)
            said.append(text[position + 1 : end])
            position = end + 1
        elif character == '"':
            end = position + 1
            while end < len(text) and text[end] != '"':
                end += 2 if text[end] == "\\" else 1
            _require_closed(end if end < len(text) else -1, text, position)
            said.append(re.sub(r'\\(["\\$`])', r"\1", text[position + 1 : end]))
            position = end + 1
        elif text.startswith(("\\\n", "\\\r\n"), position):
            break
        elif character == "\\":
            said.append(text[position + 1 : position + 2])
            position += 2
        else:
            said.append(character)
            position += 1
    return _Word(start, position, "".join(said))


def _require_closed(end: int, text: str, position: int) -> None:
    if end < 0:
        raise ScriptError(f"line {text.count(chr(10), 0, position) + 1}: a quote is opened and never closed")
