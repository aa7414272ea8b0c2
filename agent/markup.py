"""Values as text and text as HTML. Pure.

Whatever is put into an element is plain text and gets escaped, unless it is `Markup`.
"""

import html
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

UNKNOWN = "–"


# ---- values → text -----------------------------------------------------------------------------------------


def format_number(value: Any, digits: int = 3) -> str:
    """A number with fixed digits; unknown and non-finite values as a dash."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return UNKNOWN
    return f"{value:.{digits}f}"


def format_seconds(seconds: Any) -> str:
    """A duration in seconds as a person says it."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_bytes(size: Any) -> str:
    """A size in bytes, kB, MB or GB (powers of 1000)."""
    if not isinstance(size, int):
        return UNKNOWN
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def format_configuration(configuration: Mapping[str, Any]) -> str:
    """`name=value …`; the empty configuration is plain GRPO."""
    return " ".join(f"{name}={_short(value)}" for name, value in configuration.items()) or "plain GRPO"


def format_value(value: Any) -> str:
    """A ledger value of any shape as one line of text."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_value(inner)}" for key, inner in value.items()) or UNKNOWN
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, value)) or UNKNOWN
    return _short(value)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- text → HTML -------------------------------------------------------------------------------------------


class Markup(str):
    """Text that is HTML already."""


def escape(value: Any) -> str:
    """Any value as HTML text: control characters become spaces, None a dash."""
    if isinstance(value, Markup):
        return value
    text = UNKNOWN if value is None else str(value)
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else " " for c in text))


def element(tag: str, content: Any = "", **attributes: Any) -> Markup:
    """One element. `class_` gives class, `data_x` data-x; floats get one decimal (a tenth of a pixel)."""
    given = ""
    for name, value in attributes.items():
        text = f"{value:.1f}" if isinstance(value, float) else escape(value)
        given += f' {name.rstrip("_").replace("_", "-")}="{text}"'
    return Markup(f"<{tag}{given}>{escape(content)}</{tag}>")


def join(parts: Iterable[Any], separator: str = "") -> Markup:
    """Several pieces as one, each escaped unless it is Markup."""
    return Markup(separator.join(map(escape, parts)))


def table(name: str, headers: str, rows: Iterable[Sequence[Any]], numeric: Collection[int] = ()) -> Markup:
    """A table in a container of its own that scrolls.

    Args:
        name: its id.
        headers: separated by ` | `.
        rows: cells.
        numeric: columns that are set flush right.
    """
    rows = list(rows)
    if not rows:
        return element("p", "Nothing yet.", class_="quiet")
    head = element("thead", _row("th", headers.split(" | "), numeric))
    body = element("tbody", join(_row("td", row, numeric) for row in rows))
    return element("div", element("table", join([head, body]), id=name), class_="scroll", tabindex="0")


def _row(tag: str, cells: Sequence[Any], numeric: Collection[int]) -> Markup:
    classes = ("n" if column in numeric else "t" for column in range(len(cells)))
    return element("tr", join(element(tag, cell, class_=kind) for cell, kind in zip(cells, classes, strict=True)))
