"""What a script's words say when bash runs them: variables, defaults, arithmetic, paths from the script's own place. Pure.

A value that cannot be known without running something is refused with the line that makes it so.
"""

import ast
import operator
import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trials.shell import LOOPS, Part, Statement, Word, line_of, read_parts, read_statements

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=")
_PARAMETER = re.compile(r"(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:(?P<rule>:?[-=?+])(?P<word>.*))?", re.DOTALL)
_DEFAULT_ASSIGNED = re.compile(r"\$\{([A-Za-z_]\w*):?=(.*)\}", re.DOTALL)
_OWN_PATH = {"0", "BASH_SOURCE", "BASH_SOURCE[0]", "BASH_SOURCE[0]:-$0", "BASH_SOURCE:-$0"}
_DECLARING = frozenset({"export", "declare", "readonly", "typeset", "local"})
_CONDITIONAL = LOOPS | {"if", "case", "function"}
_LONGEST_VALUE = 2**16
_LARGEST_INTEGER = 2**63 - 1
"""Bash's own."""
_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.Pow: operator.pow,
}


class UnknownValue(Exception):
    """A value cannot be known without running the script; says why."""


@dataclass(frozen=True)
class Assignment:
    """One `NAME=value` of a script."""

    name: str
    word: Word
    parts: tuple[Part, ...]
    """Of the value."""
    appends: bool
    """`NAME+=value`"""
    is_conditional: bool
    """Under `if`, `&&` …, in a loop or a function: whether it is carried out cannot be told."""


Assignments = dict[str, list[Assignment]]


class Variables:
    """The variables of a script, each at the place where it is used."""

    def __init__(
        self,
        text: str,
        statements: Sequence[Statement],
        assignments: Assignments,
        folder: Path | None,
        environment: Mapping[str, str],
    ) -> None:
        """`assignments` are those of the statements; `folder` is where the script lies; `environment` is inherited."""
        self._text, self._folder, self._environment = text, folder, environment
        self._statements, self._assignments = statements, assignments
        self._values: dict[tuple[str, int], str | None] = {}

    def expand(self, word: Word) -> str:
        """What the program gets for a word.

        Raises:
            UnknownValue: it depends on something that only running the script can tell.
        """
        return "".join(self._expand_part(part, word.start) for part in word.parts)

    def working_folder(self, command: Statement) -> str | None:
        """Where the script has changed to when `command` starts; None when it stays where it was started.

        Raises:
            UnknownValue: it depends on a condition.
        """
        folder: str | None = None
        for statement in self._statements:
            if statement.start >= command.start:
                break
            enclosing = statement.blocks == command.blocks[: len(statement.blocks)]
            if statement.words[0].text not in ("cd", "pushd") or not (enclosing or _is_conditional(statement)):
                continue
            line = line_of(self._text, statement.start)
            if _is_conditional(statement) and not enclosing:
                raise UnknownValue(f"the folder is changed under a condition in line {line}")
            targets = [word for word in statement.words[1:] if word.text not in ("--", "-P", "-L")]
            target = self.expand(targets[0]) if targets else self._environment.get("HOME", "")
            folder = os.path.normpath(os.path.join(folder or "", target))
        return folder

    def value_at(self, name: str, command: Statement) -> str | None:
        """A variable as a command gets it, assignments in front of the command included.

        Raises:
            UnknownValue: it depends on something that only running the script can tell.
        """
        for word in command.words:
            match = _ASSIGNMENT.match(word.text)
            if match is None:
                break
            if match["name"] == name:
                return "".join(self._expand_part(part, word.start) for part in _without(word.parts, match.end()))
        return self._value(name, command.start)

    # ---- names ---------------------------------------------------------------------------------------------------

    def _value(self, name: str, position: int) -> str | None:
        """The value of a variable where it is used; None when it is not set."""
        earlier = [found for found in self._assignments.get(name, ()) if found.word.start < position]
        if not earlier:
            return self._environment.get(name)
        key = (name, earlier[-1].word.start)
        if key not in self._values:  # each is worked out once, however often it is used
            self._values[key] = self._assigned(earlier[-1])
        return self._values[key]

    def _assigned(self, found: Assignment) -> str:
        """The value of a variable behind an assignment."""
        name = found.name
        line = line_of(self._text, found.word.start)
        if found.is_conditional:
            raise UnknownValue(f"${name} is set under a condition in line {line}; set it outside")
        if found.word.elements is not None:
            raise UnknownValue(f"${name} is an array (line {line})")
        said = "".join(self._expand_part(part, found.word.start) for part in self._with_home(found.parts))
        value = (self._value(name, found.word.start) or "") + said if found.appends else said
        if len(value) > _LONGEST_VALUE:
            raise UnknownValue(f"${name} is longer than {_LONGEST_VALUE} characters")
        return value

    def _with_home(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """`~/…` at the beginning of an assigned value."""
        first = parts[0] if parts else None
        if first and not first.quoted and not first.is_expansion and re.match(r"~(/|$)", first.text):
            return (Part(self._environment.get("HOME", "~") + first.text[1:], False, False), *parts[1:])
        return parts

    # ---- expansions ----------------------------------------------------------------------------------------------

    def _expand_part(self, part: Part, position: int) -> str:
        if not part.is_expansion:
            return part.text
        value = self._expansion(part.text, position)
        if not part.quoted and re.search(r"\s", value) and not self._is_assigned_at(position):
            raise UnknownValue(
                f"{part.text} is '{value}' and not quoted, so that bash splits it; write \"{part.text}\""
            )
        return value

    def _is_assigned_at(self, position: int) -> bool:
        """Bash splits nothing in an assignment."""
        return any(found.word.start == position for each in self._assignments.values() for found in each)

    def _expansion(self, said: str, position: int) -> str:
        if said.startswith("$(("):
            return str(self._arithmetic(said[3:-2], position))
        if said.startswith("$(") or said.startswith("`"):
            return self._own_path(said[2:-1] if said.startswith("$(") else said[1:-1], position)
        if said.startswith("$'"):
            raise UnknownValue(f"{said} is not understood; write it in plain quotes")
        inner = said[2:-1] if said.startswith("${") else said[1:]
        if inner in _OWN_PATH:
            return str(self._own_folder() / "train.sh")
        return self._parameter(inner, said, position)

    def _parameter(self, inner: str, said: str, position: int) -> str:
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            raise UnknownValue(f"{said} is not understood; write the value itself")
        name, rule, word = match["name"], match["rule"] or "", match["word"] or ""
        value = self._value(name, position) if name[0].isalpha() or name[0] == "_" else None
        if name in "?$!-":
            raise UnknownValue(f"{said} is known only when the script runs")
        is_set = bool(value) if rule.startswith(":") else value is not None
        if rule.endswith("+"):
            return self._expand_text(word, position) if is_set else ""
        if is_set and value is not None:
            return value
        if rule.endswith(("-", "=")):
            return self._expand_text(word, position)
        raise UnknownValue(f"{said} is not set")

    def _expand_text(self, text: str, position: int) -> str:
        quoted = [Part(part.text, part.is_expansion, True) for part in read_parts(text)]
        return "".join(self._expand_part(part, position) for part in quoted)

    def _arithmetic(self, text: str, position: int) -> int:
        def value_of(match: re.Match[str]) -> str:
            value = self._value(match[1] or match[2] or match[0], position)
            if value is None or not re.fullmatch(r"\s*-?\d+\s*", value):
                raise UnknownValue(f"$(({text})) uses {match[0]}={value}, which is no integer")
            return f"({value})"

        try:
            numbers = re.sub(r"\$\{(\w+)\}|\$?\b([A-Za-z_]\w*)", value_of, text)
            return _integer(ast.parse(numbers.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            raise UnknownValue(f"$(({text[:60]})) is not understood; write the number itself") from None

    # ---- the script's own place ----------------------------------------------------------------------------------

    def _own_folder(self) -> Path:
        if self._folder is None:
            raise UnknownValue("the script's own place is not known")
        return self._folder

    def _own_path(self, command: str, position: int) -> str:
        """`cd … && pwd`, `dirname …`, `realpath …`: how scripts find their folder. Nothing else is evaluated."""
        folder: str | None = None
        for statement in read_statements(command):
            program = statement.words[0].text
            arguments = [word for word in statement.words[1:] if not re.fullmatch(r"--|-[PLfe]", word.text)]
            if program == "cd" and len(arguments) == 1:
                folder = self._path(arguments[0], position)
            elif program == "pwd" and folder is not None:
                return folder
            elif program in ("dirname", "realpath", "readlink") and len(arguments) == 1:
                path = self._path(arguments[0], position)
                return os.path.dirname(path) if program == "dirname" else path
            else:
                break
        raise UnknownValue(f"$({command}) runs a command; write the value itself")

    def _path(self, word: Word, position: int) -> str:
        quoted = [Part(part.text, part.is_expansion, True) for part in word.parts]
        path = os.path.normpath("".join(self._expand_part(part, position) for part in quoted))
        if not os.path.isabs(path):
            raise UnknownValue(f"{path} is relative to where the script is started")
        return path


def find_assignments(statements: Sequence[Statement]) -> Assignments:
    """Name → its assignments in order."""
    assignments: Assignments = {}
    for found in (found for statement in statements for found in _assignments(statement)):
        assignments.setdefault(found.name, []).append(found)
    return assignments


def find_array(name: str, assignments: Assignments, position: int) -> list[Assignment]:
    """What may make up an array where it is used: its last certain `NAME=( … )`, and every assignment after it."""
    found = [assignment for assignment in assignments.get(name, ()) if assignment.word.start < position]
    for index in range(len(found) - 1, -1, -1):
        if not found[index].appends and not found[index].is_conditional:
            return found[index:]
    return found


def _is_conditional(statement: Statement) -> bool:
    return statement.before in ("&&", "||", "|") or any(block.kind in _CONDITIONAL for block in statement.blocks)


def _assignments(statement: Statement) -> list[Assignment]:
    """The assignments of a statement that does nothing else; `: ${X:=default}` counts."""
    conditional = _is_conditional(statement)
    words = statement.words
    if words[0].text == ":":
        defaults = [(word, _DEFAULT_ASSIGNED.fullmatch(word.text)) for word in words[1:]]
        return [Assignment(m[1], w, w.parts, False, conditional) for w, m in defaults if m]
    if words[0].text in _DECLARING:
        words = tuple(word for word in words[1:] if not word.text.startswith("-"))
    found = []
    for word in words:
        match = _ASSIGNMENT.match(word.text)
        if match is None and statement.words[0].text in _DECLARING:
            continue  # export NAME
        if match is None:
            return []  # NAME=value in front of a command
        found.append(
            Assignment(match["name"], word, _without(word.parts, match.end()), bool(match["append"]), conditional)
        )
    return found


def _without(parts: tuple[Part, ...], length: int) -> tuple[Part, ...]:
    """The parts behind the first `length` characters, which are plain text."""
    first = parts[0]
    rest = Part(first.text[length:], False, first.quoted)
    return (rest, *parts[1:]) if rest.text else parts[1:]


def _integer(node: ast.expr) -> int:
    """What bash computes; ValueError for anything that it would compute differently."""
    value: int | None = None
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_integer(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _integer(node.left), _integer(node.right)
        if isinstance(node.op, ast.Pow) and not 0 <= right * max(0, abs(left).bit_length() - 1) <= 64:
            raise ValueError
        value = _OPERATIONS[type(node.op)](left, right)
    if value is None or abs(value) > _LARGEST_INTEGER:
        raise ValueError
    return value
