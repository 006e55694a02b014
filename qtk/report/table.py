"""A table of text, for a terminal or a file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable  # loaded where a table is made: `import qtk` stays light

FILE_WIDTH = 240


@dataclass(frozen=True, slots=True)
class Column:
    """A column heading; columns of numbers are right-aligned."""

    heading: str
    number: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under headings.

    Args:
        title: the title.
        columns: the columns from left to right.
        rows: one text per column.
        sections: indices of rows with a line above them.

    >>> print(Table("sizes", (Column("name"), Column("bytes", number=True)), (("a", "1,000"), ("b", "20"))))
    sizes
     name │ bytes
    ──────┼───────
     a    │ 1,000
     b    │    20
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    sections: tuple[int, ...] = ()

    def rich(self) -> RichTable:
        """The table for a ``rich`` console."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for column in self.columns:
            table.add_column(Text(column.heading), justify="right" if column.number else "left", overflow="fold")
        self._fill(table)
        return table

    def text(self) -> str:
        """The table as plain text, as wide as its rows, without trailing blanks."""
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SQUARE, show_edge=False)
        for column in self.columns:
            table.add_column(Text(column.heading), justify="right" if column.number else "left", no_wrap=True)
        self._fill(table)
        file = io.StringIO()
        Console(file=file, width=max(FILE_WIDTH, self._width()), color_system=None, legacy_windows=False).print(table)
        return "\n".join([self.title, *(line.rstrip() for line in file.getvalue().splitlines())])

    def __str__(self) -> str:
        return self.text()

    def _fill(self, table: RichTable) -> None:
        from rich.text import Text

        for index, row in enumerate(self.rows):
            if index in self.sections:
                table.add_section()
            table.add_row(*map(Text, row))

    def _width(self) -> int:
        return sum(max(map(len, (column.heading, *cells))) + 3 for column, cells in
                   zip(self.columns, _columns(self.rows, len(self.columns)), strict=True))


def _columns(rows: Sequence[tuple[str, ...]], count: int) -> list[tuple[str, ...]]:
    return [tuple(row[index] for row in rows) for index in range(count)]
