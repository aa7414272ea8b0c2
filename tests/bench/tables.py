"""Means with standard errors, and tables in Markdown."""

import math
import statistics
from collections.abc import Sequence


def mean_and_error(values: Sequence[float], digits: int = 3) -> str:
    """`mean ± standard error of the mean`; of a single value the value alone."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, columns aligned."""
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    for row in (titles, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
