"""Print a table: with rich on a terminal, if it is installed, otherwise as plain text in columns."""

import sys
from collections.abc import Sequence

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:
    Table = None  # type: ignore[assignment,misc]


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first column aligned left, the others right."""
    if Table is None or not sys.stdout.isatty():
        print(plain_table(title, headers, rows))
        return
    table = Table(title=title, title_justify="left")
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def plain_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as plain text."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = [title]
    for row in (headers, *rows):
        cells = [
            f"{cell:<{w}}" if not i else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)
