"""Tables in a log are not cut to a narrow terminal's width."""

import os

from moray.console import open_console


def test_a_log_gets_wide_tables_unless_columns_says_otherwise(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    assert open_console().width == 160
    open_console().print("x" * 150)
    assert capsys.readouterr().out == "x" * 150 + "\n"
    monkeypatch.setenv("COLUMNS", "70")
    assert open_console().width == 70
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 2)
    monkeypatch.delenv("COLUMNS")
    assert open_console().width < 160
