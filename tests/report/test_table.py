"""Tables as text and in a terminal."""

import io

from rich.console import Console

from qtk.report.table import Column, Table

COLUMNS = (Column("site"), Column("bytes", number=True))


def test_numbers_stand_to_the_right_and_sections_are_ruled():
    text = Table("t", COLUMNS, (("a", "1"), ("bb", "1,000")), sections=(1,)).text()
    line = "──────┼───────"
    assert text.splitlines() == ["t", " site │ bytes", line, " a    │     1", line, " bb   │ 1,000"]


def test_text_is_never_folded_or_cut():
    name = "blocks.0." * 60
    assert f" {name} │" in Table("t", COLUMNS, ((name, "1"),)).text()


def test_brackets_are_text_not_markup():
    table = Table("[bold]t", COLUMNS, (("split:out[1] [red]", "1"),))
    file = io.StringIO()
    Console(file=file, width=80).print(table.rich())
    for shown in (table.text(), file.getvalue()):
        assert "split:out[1] [red]" in shown
        assert "[bold]t" in shown


def test_a_table_without_rows_is_its_heading():
    assert "bytes" in Table("t", COLUMNS, ()).text()


def test_printing_a_table_prints_its_text():
    table = Table("t", COLUMNS, (("a", "1"),))
    assert str(table) == f"{table}" == table.text()
