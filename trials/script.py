"""train.sh → the script of one trial. Pure.

The workspace's script is used as it is: only the named Hydra overrides differ, everything else is copied byte for byte.
Understood is one command that runs verl (`… -m verl.trainer.main_ppo key=value …`) whatever stands in front of it, with
its overrides written there or in arrays. What cannot be understood is refused with its line number.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trials.shell import LOOPS, ScriptError, Statement, Word, line_of, read_statements
from trials.variables import UnknownValue, Variables, find_array, find_assignments

__all__ = [
    "Override",
    "OverrideValue",
    "ScriptError",
    "TrainScript",
    "differing_overrides",
    "parse_value",
    "quote_value",
]

OverrideValue = str | int | float | bool | None

_MODULE = re.compile(r"verl\.trainer\.main\w*|(?:.*/)?verl/trainer/main_\w+\.py")
_MENTION = re.compile(r"verl[./]trainer[./]main")
_OVERRIDE = re.compile(r"(?P<prefix>\+{0,2})(?P<key>[A-Za-z_][\w./@-]*)=(?P<value>.*)", re.DOTALL)
_REMOVAL = re.compile(r"(?P<prefix>~)(?P<key>[A-Za-z_][\w./@-]*)(?:=(?P<value>.*))?", re.DOTALL)
_ARRAY_USE = re.compile(r"\$\{(\w+)\[@\]\}")
_HYDRA_FLAG = re.compile(r"(--config-(?:name|path|dir)|-cn|-cp|-cd)(?:=(.*))?")
_PASSED_ON = re.compile(r"\$[@*]|\$\{[@*]\}|\$\{@:\d+\}")
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")
_BARE = re.compile(r"[A-Za-z0-9_./:@-]+")
_ELSEWHERE = frozenset({"ssh", "srun", "sbatch", "docker", "kubectl"})
_MENTIONS_ONLY = frozenset({"echo", "printf", ":", "pkill", "pgrep", "grep"})
_PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?|torchrun|exec|env|nohup|time|-\S*|\w+=.*", re.DOTALL)
_CHOOSES_PYTHON = frozenset({"source", ".", "conda", "mamba", "micromamba", "pyenv", "module"})
_LONGEST_SCRIPT = 2**16
_PATH_KEYS = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")


@dataclass(frozen=True)
class Override:
    """One `key=value` argument of the training command."""

    key: str
    value: str | None
    """As written, without shell quotes; variables unexpanded. None for `~key`."""
    line: int
    prefix: str
    """`+` adds a key, `++` adds or changes one, `~` removes one."""
    word: Word
    is_conditional: bool
    """In an array that is set under a condition: whether it holds cannot be told."""


class TrainScript:
    """A parsed training script."""

    def __init__(self, text: str, folder: Path | None = None) -> None:
        """Parse `text`; `folder` is where the script lies, which many scripts build their paths on.

        Raises:
            ScriptError: no verl command or several, an argument that is no override, or the same key twice.
        """
        self.text = text
        self.folder = folder
        if len(text) > _LONGEST_SCRIPT:
            raise ScriptError(
                f"{len(text)} characters are more than a training script's {_LONGEST_SCRIPT}; move its data into files"
            )
        self._statements = read_statements(text)
        self._assignments = find_assignments(self._statements)
        self.command = _find_command(text, self._statements)
        self._arguments = _arguments_of(self.command)
        self._flags: dict[str, tuple[Word, ...]] = {}
        self._overrides: dict[str, Override] = {}
        for override in self._read_overrides(list(self._arguments)):
            first = self._overrides.get(override.key)
            if first is not None and not (first.is_conditional or override.is_conditional):
                raise ScriptError(
                    f"line {override.line}: {override.key} is set again (first in line {first.line}); keep one of them"
                )
            self._overrides[override.key] = replace(override, is_conditional=True) if first else override
        self._refuse_strays()

    @property
    def overrides(self) -> dict[str, str]:
        """Key → value of every override that certainly sets one, as written."""
        certain = [found for found in self._overrides.values() if not found.is_conditional]
        return {found.key: found.value for found in certain if found.value is not None}

    @property
    def command_line(self) -> int:
        """The line in which the training command begins."""
        return self._line(self.command.start)

    def line(self, key: str) -> int | None:
        """The line in which a key is set; None when the script does not set it."""
        return self._overrides[key].line if key in self._overrides else None

    # ---- values --------------------------------------------------------------------------------------------------

    def get(self, key: str, environment: Mapping[str, str] | None = None) -> str | None:
        """The value of a key as Hydra reads it, variables expanded; None when the script does not set it.

        `environment` is what the script inherits.

        Raises:
            ScriptError: the value depends on something that only running the script can tell.
        """
        override = self._overrides.get(key)
        if override is None or override.value is None:
            return None
        _, _, value = self._expand(override, environment).partition("=")
        return parse_value(value)

    def get_int(self, key: str, environment: Mapping[str, str] | None = None) -> int | None:
        """The value of a key as an integer, None when the script does not set it or sets null.

        Raises:
            ScriptError: not an integer.
        """
        value = self.get(key, environment)
        if value is None or value == "null":
            return None
        if not re.fullmatch(r"[-+]?\d{1,18}", value):
            line = self._overrides[key].line
            raise ScriptError(f"line {line}: {key}={value} is not an integer; the agent needs its value to plan")
        return int(value)

    def get_list(self, key: str, environment: Mapping[str, str] | None = None) -> list[str] | None:
        """The value of a key as a list: `['a', 'b']`, or a single value; None when the script does not set it."""
        value = self.get(key, environment)
        if value is None or not value.startswith("["):
            return None if value is None else [value]
        items = re.findall(r"\s*('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|[^,\[\]'\"]+)\s*(?:,|$)", value[1:-1])
        return [parse_value(item.strip()) for item in items]

    def arguments(self, environment: Mapping[str, str] | None = None) -> tuple[list[str], list[str]]:
        """The overrides as the training program gets them, and why each of the others cannot be told."""
        known, reasons = [], []
        for override in self._overrides.values():
            try:
                known.append(self._expand(override, environment))
            except ScriptError as error:
                reasons.append(str(error))
        return known, reasons

    def flags(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """Hydra's own options, `--config-name` and the like; those whose value cannot be told are left out."""
        found = {}
        for name, words in self._flags.items():
            with suppress(UnknownValue, RecursionError):
                value = self._variables(environment).expand(words[-1])
                found[name] = value.partition("=")[2] if len(words) == 1 else value
        return found

    @property
    def added_keys(self) -> list[str]:
        """Keys that the script adds to verl's configuration with `+`."""
        return [override.key for override in self._overrides.values() if override.prefix == "+"]

    def variable(self, name: str, environment: Mapping[str, str] | None = None) -> str | None:
        """An environment variable as the training command gets it; None when it is not set.

        Raises:
            ScriptError: it depends on something that only running the script can tell.
        """
        try:
            return self._variables(environment).value_at(name, self.command)
        except (UnknownValue, RecursionError) as error:
            raise ScriptError(f"line {self._line(self.command.start)}: {name}: {error}") from None

    def other_python(self) -> str | None:
        """What may let the command run another Python than the first on the inherited PATH; None when nothing does."""
        for statement in self._statements:
            if statement is self.command:
                break
            first = statement.words[0].text
            sets_path = any(word.text.startswith("PATH=") for word in statement.words[:2])
            if first in _CHOOSES_PYTHON or sets_path:
                return f"line {self._line(statement.start)}: `{' '.join(word.text for word in statement.words)}`"
        front = self.command.words[: len(self.command.words) - len(self._arguments) - 1]
        other = next(
            (word for word in front if not _PYTHON.fullmatch(word.text) or word.text.startswith("PATH=")), None
        )
        return f"line {self._line(other.start)}: `{other.text}`" if other else None

    def working_folder(self, environment: Mapping[str, str] | None = None) -> str | None:
        """Where the script changes to before it trains; None when it stays where it was started.

        Raises:
            ScriptError: it depends on a condition.
        """
        try:
            return self._variables(environment).working_folder(self.command)
        except (UnknownValue, RecursionError) as error:
            raise ScriptError(f"line {self._line(self.command.start)}: {error}") from None

    def problems(self, environment: Mapping[str, str] | None = None) -> list[str]:
        """What is understood, but cannot work: with its line, and what to do."""
        found = []
        if "\r\n" in self.text:
            line = self._line(self.text.index("\r\n"))
            found.append(f"line {line}: lines end in CR LF, which bash takes for a part of the arguments; run dos2unix")
        if end := next(filter(self._ends_script, self._statements), None):
            said = " ".join(word.text for word in end.words)
            found.append(
                f"line {self._line(end.start)}: `{said}` ends the script before the training command in line "
                f"{self.command_line}; remove it"
            )
        try:
            if self.working_folder(environment) is not None:
                return found
        except ScriptError as error:
            return [*found, str(error)]
        for key in _PATH_KEYS:
            found += self._relative_path_problems(key, environment)
        return found

    def _ends_script(self, statement: Statement) -> bool:
        """Whether bash certainly ends, or becomes another program, before it comes to the training command."""
        name, *rest = (word.text for word in statement.words)
        alone = statement.before not in ("&&", "||", "|") and statement.after not in ("|", "&")
        certain = alone and all(block.kind == "{" for block in statement.blocks)
        return statement.start < self.command.start and certain and (name == "exit" or (name == "exec" and bool(rest)))

    def _relative_path_problems(self, key: str, environment: Mapping[str, str] | None) -> Iterator[str]:
        try:
            values = self.get_list(key, environment) or []
        except ScriptError as error:
            yield str(error)
            return
        for value in values:
            is_hub_name = key.endswith("model.path") and value.count("/") == 1 and not value.startswith(".")
            if value and value != "null" and "://" not in value and not value.startswith("/") and not is_hub_name:
                yield (
                    f"line {self._overrides[key].line}: {key}={value} is relative to wherever the script is started; "
                    "write it absolute, or let the script change to its own folder first"
                )

    def _expand(self, override: Override, environment: Mapping[str, str] | None) -> str:
        if override.is_conditional:
            raise ScriptError(f"line {override.line}: {override.key} is set under a condition; set it outside")
        try:
            return self._variables(environment).expand(override.word)
        except (UnknownValue, RecursionError) as error:
            raise ScriptError(f"line {override.line}: {override.key}={override.value}: {error}") from None

    def _variables(self, environment: Mapping[str, str] | None) -> Variables:
        return Variables(self.text, self._statements, self._assignments, self.folder, environment or {})

    # ---- the trial script ----------------------------------------------------------------------------------------

    def render(self, overrides: Mapping[str, OverrideValue]) -> str:
        """The script with these overrides changed where they stand, or added behind the last argument.

        Raises:
            ScriptError: a key that the script removes with `~` or sets under a condition.
        """
        edits: list[tuple[int, int, str]] = []
        added: list[str] = []
        for key, value in overrides.items():
            argument = shlex.quote(f"{key}={quote_value(value)}")
            found = self._overrides.get(key)
            if found is None:
                added.append(argument)
            elif found.value is None or found.prefix == "~":
                raise ScriptError(f"line {found.line}: {key} is removed with ~; the agent has to set it")
            elif found.is_conditional:
                raise ScriptError(
                    f"line {found.line}: {key} is set under a condition; the agent has to set it, set it outside"
                )
            else:
                edits.append((found.word.start, found.word.end, found.prefix + argument))
        if added:
            end = self._insertion_point()
            new_line = "\r\n" if "\r\n" in self.text else "\n"
            edits.append((end, end, "".join(f" \\{new_line}  {argument}" for argument in added)))
        text = self.text
        for start, stop, replacement in sorted(edits, reverse=True):
            text = text[:start] + replacement + text[stop:]
        return text

    def _insertion_point(self) -> int:
        """Behind the last argument that is not passed on from the script's own."""
        own = [word for word in self.command.words if not _PASSED_ON.fullmatch(word.text)]
        return own[-1].end

    # ---- reading -------------------------------------------------------------------------------------------------

    def _line(self, position: int) -> int:
        return line_of(self.text, position)

    def _read_overrides(self, words: list[Word], is_conditional: bool = False) -> Iterator[Override]:
        while words:
            word = words.pop(0)
            line = self._line(word.start)
            if flag := _HYDRA_FLAG.fullmatch(word.text):
                self._flags[flag[1]] = (word,) if flag[2] is not None or not words else (word, words.pop(0))
            elif array := _ARRAY_USE.fullmatch(word.text):
                for elements, may_be in self._elements(array[1], word):
                    yield from self._read_overrides(elements, is_conditional or may_be)
            elif match := _OVERRIDE.fullmatch(word.text) or _REMOVAL.fullmatch(word.text):
                self._refuse_braces(word)
                yield Override(match["key"], match["value"], line, match["prefix"], word, is_conditional)
            elif not (_PASSED_ON.fullmatch(word.text) or self._is_empty_variable(word)):
                raise ScriptError(
                    f"line {line}: `{self.text[word.start : word.end]}` is not an override (key=value), an array of "
                    'overrides ("${NAME[@]}") or "$@"; write it as one of them'
                )

    def _elements(self, name: str, use: Word) -> Iterator[tuple[list[Word], bool]]:
        """The words of an array of overrides where it is used, and whether they depend on a condition."""
        line = self._line(use.start)
        found = find_array(name, self._assignments, use.start)
        if not found:
            raise ScriptError(f"line {line}: the array {name} is not set in the script; write {name}=( … ) before")
        is_replaced = any(assignment.is_conditional and not assignment.appends for assignment in found)
        for assignment in found:
            if assignment.word.elements is None:
                where = self._line(assignment.word.start)
                raise ScriptError(
                    f"line {where}: {name}, used as an array in line {line}, is set as plain text; write {name}=( … )"
                )
            yield list(assignment.word.elements), is_replaced or assignment.is_conditional

    def _is_empty_variable(self, word: Word) -> bool:
        """`${EXTRA:-}` and the like, which the script itself never sets: nothing, or what a person passes on."""
        match = re.fullmatch(r"\$\{(\w+):?-\}|\$(\w+)|\$\{(\w+)\}", word.text)
        name = next((group for group in match.groups() if group), None) if match else None
        return name is not None and not find_array(name, self._assignments, word.start)

    def _refuse_braces(self, word: Word) -> None:
        for part in word.parts:
            if not part.quoted and not part.is_expansion and _BRACES.search(part.text):
                line = self._line(word.start)
                raise ScriptError(f"line {line}: bash expands the braces in `{word.text}`; put the argument in quotes")

    def _refuse_strays(self) -> None:
        """An override outside of the command: its continuation was broken by a comment or an empty line."""
        for statement in self._statements:
            word = statement.words[0]
            match = _OVERRIDE.fullmatch(word.text)
            if statement is not self.command and match and "." in match["key"]:
                line, end = self._line(word.start), self._line(self.command.words[-1].end)
                raise ScriptError(
                    f"line {line}: `{word.text}` is not a part of the training command, which ends in line {end}: bash ends "
                    "it at a comment, an empty line or a missing backslash; move the comment or put the arguments in an "
                    "array NAME=( … )"
                )


# ---- values in Hydra's grammar ----------------------------------------------------------------------------------------


def quote_value(value: OverrideValue) -> str:
    """A value in Hydra's override grammar: numbers, true/false, null and plain words bare, other text single-quoted.

    `${` is escaped, so that nothing is interpolated.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    is_plain = _BARE.fullmatch(value) and not re.fullmatch(
        r"(?i)null|true|false|[-+]?(nan|inf|[\d._]+(e[-+]?\d+)?)", value
    )
    if is_plain:
        return value
    quoted = re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", value))
    return "'" + re.sub(r"(\\*)\$\{", r"\1\1\\${", quoted) + "'"


def parse_value(value: str) -> str:
    """The text that Hydra takes from a value: without its quotes and their escapes; anything else as it is."""
    if len(value) < 2 or value[0] not in "\"'" or value[-1] != value[0]:
        return value
    quote = value[0]
    body = re.sub(rf"(\\*)\1\\{quote}", rf"\1{quote}", value[1:-1])
    return re.sub(r"(\\*)\1\\\$\{", r"\1${", re.sub(r"(\\+)\1$", r"\1", body))


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


# ---- the command ------------------------------------------------------------------------------------------------------


def _find_command(text: str, statements: list[Statement]) -> Statement:
    """The one statement that runs verl."""
    statements = [statement for statement in statements if statement.words[0].text not in _MENTIONS_ONLY]
    found = [statement for statement in statements if any(_MODULE.fullmatch(word.text) for word in statement.words)]
    for statement in statements:
        if statement not in found:
            _refuse_hidden(text, statement)
    if not found:
        raise ScriptError("no command runs `-m verl.trainer.main_ppo`; the agent can only tune a script that does")
    if len(found) > 1:
        lines = ", ".join(str(line_of(text, _module_of(statement).start)) for statement in found)
        raise ScriptError(f"several verl commands, in lines {lines}; the agent needs exactly one")
    _refuse_unfit(text, found[0])
    return found[0]


def _refuse_hidden(text: str, statement: Statement) -> None:
    """The command inside a string, a function's argument or `bash -c`: its arguments cannot be told apart."""
    for word in (*statement.words, *(e for w in statement.words for e in w.elements or ())):
        if _MENTION.search(word.text) and not any(part.text.startswith(("$(", "`")) for part in word.parts):
            raise ScriptError(
                f"line {line_of(text, word.start)}: the training command is kept in a string or an array; write it as a "
                "command of its own"
            )


def _refuse_unfit(text: str, statement: Statement) -> None:
    module = _module_of(statement)
    line = line_of(text, module.start)
    loop = next((block for block in statement.blocks if block.kind in LOOPS), None)
    if loop:
        opened = line_of(text, loop.start)
        raise ScriptError(f"line {line}: the training command runs in a loop (line {opened}); the agent needs one run")
    if statement.after == "&":
        raise ScriptError(f"line {line}: the training command runs in the background; remove the `&` behind it")
    front = [word.text for word in statement.words[: statement.words.index(module)]]
    programs = {word.rsplit("/", 1)[-1] for word in front}
    submits = {"ray", "submit"} <= programs
    elsewhere = "ray job submit" if submits else next(iter(sorted(programs & _ELSEWHERE)), None)
    if elsewhere:
        raise ScriptError(
            f"line {line}: {elsewhere} runs the training where the agent can neither follow nor stop it; call "
            "`python3 -m verl.trainer.main_ppo` itself"
        )


def _module_of(statement: Statement) -> Word:
    return next(word for word in statement.words if _MODULE.fullmatch(word.text))


def _arguments_of(statement: Statement) -> tuple[Word, ...]:
    return statement.words[statement.words.index(_module_of(statement)) + 1 :]
