"""Bash scripts as statements and words. Pure; nothing is executed or expanded.

Only the structure is read: where each word stands, what its quotes hide, which blocks enclose a statement. That is enough
to find a command in a real script and to change one of its arguments without touching anything else.
"""

import re
from dataclasses import dataclass

LOOPS = frozenset({"for", "while", "until", "select"})
_CLOSING = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
_LEADING = frozenset({"then", "else", "elif", "do", "!", "time"})
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:>>|>\||>&|<&|<<<|<<-?|<>|>|<)")
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|[;|&()]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ANSI_QUOTED = re.compile(r"\$'(?:\\.|[^'\\])*'", re.DOTALL)
_CONTINUATION = re.compile(r"\\\r?\n")


class ScriptError(ValueError):
    """A script cannot be understood; the message names the line."""


@dataclass(frozen=True)
class Part:
    """A piece of a word: text as the program will see it, or an expansion (`$X`, `${…}`, `$(…)`) as written."""

    text: str
    is_expansion: bool
    quoted: bool


@dataclass(frozen=True)
class Word:
    """One shell word and where it stands."""

    start: int
    end: int
    parts: tuple[Part, ...]
    elements: tuple["Word", ...] | None = None
    """The words between the parentheses of `NAME=( … )`; None for every other word."""

    @property
    def text(self) -> str:
        """Without quotes, expansions as written."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Block:
    """What encloses a statement: `if`, `for`, `case`, `function`, `{`, `(` …"""

    kind: str
    start: int


@dataclass(frozen=True)
class Statement:
    """A simple command: its words without redirections and without leading `then`, `do` …"""

    words: tuple[Word, ...]
    blocks: tuple[Block, ...]
    before: str
    """The operator in front: `&&`, `|`, `;` …, or a newline."""
    after: str
    """The operator behind."""

    @property
    def start(self) -> int:
        return self.words[0].start


def line_of(text: str, position: int) -> int:
    """The line number of a position, counted from 1."""
    return text.count("\n", 0, position) + 1


def read_statements(text: str) -> list[Statement]:
    """The statements of a script in order.

    Raises:
        ScriptError: an open quote, parenthesis or block.
    """
    return _Reader(text).read()


def read_parts(text: str) -> tuple[Part, ...]:
    """The parts of a text that is one word, blanks included, as behind the `:-` of `${X:-…}`."""
    return _Reader(text)._word(0, stops="").parts


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self._words: list[Word] = []
        self._statements: list[Statement] = []
        self._blocks: list[Block] = []
        self._before = "\n"
        self._heredocs: list[str] = []
        self._defines_function = False

    def read(self) -> list[Statement]:
        position = 0
        while position < len(self.text):
            position = self._step(position)
        self._end_statement("\n")
        if self._blocks:
            block = self._blocks[-1]
            raise ScriptError(f"line {line_of(self.text, block.start)}: `{block.kind}` is opened and never closed")
        return self._statements

    def _step(self, position: int) -> int:
        """Read one token; returns the position behind it."""
        text = self.text
        if match := _CONTINUATION.match(text, position):
            return match.end()
        if text[position] in " \t\r":
            return position + 1
        if text[position] == "#":
            return _line_end(text, position)
        if text[position] == "\n":
            self._end_statement("\n")
            return self._skip_heredocs(position + 1)
        if text.startswith("((", position) and not self._words:
            return self._closing(position, "((", "))")
        if match := _REDIRECTION.match(text, position):
            return self._skip_target(match)
        if match := _OPERATOR.match(text, position):
            return self._operator(match)
        word = self._word(position)
        if not _is_inline_comment(text[word.start : word.end]):
            self._words.append(word)
        self._open_or_close(word)
        return word.end

    def _skip_target(self, match: re.Match[str]) -> int:
        """A redirection with its target; a here-document's body follows at the next line."""
        position = match.end()
        while position < len(self.text) and self.text[position] in " \t":
            position += 1
        if self.text.startswith(("<(", ">("), position):
            return self._closing(position + 1, "(", ")")
        target = self._word(position)
        if match[0].lstrip("0123456789&") in ("<<", "<<-"):
            self._heredocs.append(target.text)
        return target.end

    def _skip_heredocs(self, position: int) -> int:
        for delimiter in self._heredocs:
            end = re.compile(rf"^\t*{re.escape(delimiter)}\r?$", re.M).search(self.text, position)
            position = min(end.end() + 1, len(self.text)) if end else len(self.text)
        self._heredocs = []
        return position

    def _operator(self, match: re.Match[str]) -> int:
        operator, position = match[0], match.end()
        if operator == "(":
            empty = re.match(r"\s*\)", self.text[position:])
            if empty and self._words:  # name() { … }
                self._words, self._defines_function = [], True
                return position + empty.end()
            self._end_statement("(")
            self._blocks.append(Block("(", match.start()))
        elif operator == ")" and self._innermost() == "case":
            self._words = []  # a pattern
        elif operator == ")":
            self._end_statement(")")
            self._close("(", match.start())
        else:
            self._end_statement(operator)
        return position

    def _end_statement(self, operator: str) -> None:
        words = self._words
        while words and words[0].text in _LEADING:
            words = words[1:]
        if words:
            self._statements.append(Statement(tuple(words), tuple(self._blocks), self._before, operator))
            self._before = operator
        elif operator != "\n":
            self._before = operator
        self._words = []

    # ---- blocks --------------------------------------------------------------------------------------------------

    def _innermost(self) -> str:
        return self._blocks[-1].kind if self._blocks else ""

    def _open_or_close(self, word: Word) -> None:
        """Keywords count where a command's name stands; what follows `if` or `while` is a statement of its own."""
        said = self.text[word.start : word.end]
        first = next((other for other in self._words if other.text not in _LEADING), None)
        if first is not word:
            if first and first.text == "function" and said == "{":
                self._open("function", word)
            return
        if said in _CLOSING:
            kind = "function" if said == "{" and self._defines_function else said
            self._open(kind, word, keep=said in {"for", "case", "select"})
        elif said in _CLOSING.values():
            openers = {kind for kind, closing in _CLOSING.items() if closing == said}
            self._close("|".join(sorted(openers | ({"function"} if said == "}" else set()))), word.start)
            self._words = []

    def _open(self, kind: str, word: Word, keep: bool = False) -> None:
        self._blocks.append(Block(kind, word.start))
        self._defines_function = False
        if not keep:
            self._words, self._before = [], "\n"

    def _close(self, kinds: str, position: int) -> None:
        if self._innermost() not in kinds.split("|"):
            raise ScriptError(f"line {line_of(self.text, position)}: a block is closed that is not open")
        self._blocks.pop()

    # ---- words ---------------------------------------------------------------------------------------------------

    def _word(self, start: int, stops: str = " \t\r\n;|&<>()") -> Word:
        """The word at `start`; without `stops` everything to the end of the text."""
        text, position = self.text, start
        parts: list[Part] = []
        if stops and (match := _ARRAY.match(text, start)):
            return self._array(start, match)
        while position < len(text) and text[position] not in stops:
            character = text[position]
            if _CONTINUATION.match(text, position) and stops:
                break
            if character == "'":
                end = self._find(position + 1, "'", position)
                parts.append(Part(text[position + 1 : end], False, True))
                position = end + 1
            elif character == '"':
                position = self._double_quoted(position, parts)
            elif character in "$`":
                end = self._expansion_end(position)
                parts.append(Part(text[position:end], end > position + 1, False))
                position = end
            elif character == "\\":
                parts.append(Part(text[position + 1 : position + 2], False, True))
                position += 2
            else:
                parts.append(Part(character, False, False))
                position += 1
        return Word(start, min(position, len(text)), _joined(parts))

    def _array(self, start: int, match: re.Match[str]) -> Word:
        position, elements = match.end(), []
        while position < len(self.text) and self.text[position] != ")":
            if self.text[position] in " \t\r\n":
                position += 1
            elif continuation := _CONTINUATION.match(self.text, position):
                position = continuation.end()
            elif self.text[position] == "#":
                position = _line_end(self.text, position)
            else:
                element = self._word(position)
                if element.end == position:
                    raise ScriptError(
                        f"line {line_of(self.text, position)}: `{self.text[position]}` inside an array; quote it"
                    )
                elements.append(element)
                position = element.end
        if position >= len(self.text):
            raise ScriptError(f"line {line_of(self.text, start)}: an array is opened and never closed")
        return Word(start, position + 1, (Part(match[0][:-1], False, False),), tuple(elements))

    def _double_quoted(self, start: int, parts: list[Part]) -> int:
        text, position = self.text, start + 1
        parts.append(Part("", False, True))
        while position < len(text) and text[position] != '"':
            if continuation := _CONTINUATION.match(text, position):
                position = continuation.end()
            elif text[position] == "\\" and text[position + 1 : position + 2] in ("$", "`", '"', "\\"):
                parts.append(Part(text[position + 1], False, True))
                position += 2
            elif text[position] in "$`":
                end = self._expansion_end(position)
                parts.append(Part(text[position:end], end > position + 1, True))
                position = end
            else:
                parts.append(Part(text[position], False, True))
                position += 1
        self._require(position < len(text), "a quote", start)
        return position + 1

    def _expansion_end(self, position: int) -> int:
        text = self.text
        if text[position] == "`":
            return self._find(position + 1, "`", position) + 1
        if text.startswith("$((", position):
            return self._closing(position + 1, "((", "))")
        if text.startswith("$(", position):
            return self._closing(position + 1, "(", ")")
        if text.startswith("${", position):
            return self._closing(position + 1, "{", "}")
        if match := _ANSI_QUOTED.match(text, position):
            return match.end()
        match = _NAME.match(text, position + 1)
        return match.end() if match else position + 1

    def _closing(self, start: int, opening: str, closing: str) -> int:
        """Behind the bracket that closes the one at `start`; quotes and nested brackets are skipped."""
        text, position, depth = self.text, start + len(opening), 1
        while position < len(text):
            if text.startswith(closing, position) and depth == 1:
                return position + len(closing)
            if text[position] == "\\":
                position += 2
            elif text[position] == "'" and opening != "{":
                position = self._find(position + 1, "'", position) + 1
            elif text[position] == '"':
                position = self._double_quoted(position, [])
            elif text.startswith(("$(", "${"), position):
                position = self._expansion_end(position)
            else:
                depth += (text[position] == opening[0]) - (text[position] == closing[0])
                position += 1
        self._require(False, f"`{opening}`", start)
        return position

    def _find(self, position: int, wanted: str, opened: int) -> int:
        end = self.text.find(wanted, position)
        self._require(end >= 0, "a quote", opened)
        return end

    def _require(self, closed: bool, what: str, opened: int) -> None:
        if not closed:
            raise ScriptError(f"line {line_of(self.text, opened)}: {what} is opened and never closed")


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _is_inline_comment(said: str) -> bool:
    """People write `# why` in backquotes between continued lines: it expands to nothing."""
    return said.startswith("`") and said[1:].lstrip().startswith("#")


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Neighbouring texts of the same kind as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and not part.is_expansion and not last.is_expansion and part.quoted == last.quoted:
            joined[-1] = Part(last.text + part.text, False, part.quoted)
        else:
            joined.append(part)
    return tuple(joined)
