from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from harness.migrations import Migration, migrate, migrations

Night = Any  # the driver of the fixture ``night``; conftest.py is not importable under importlib mode


def test_an_older_ledger_is_read_in_memory(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger of an older schema can be read, and its file stays as it was."""
    night.run(2.0)
    night.ledger.close()
    newer = (*migrations(), Migration(len(migrations()) + 1, "more", "CREATE TABLE more (x TEXT) STRICT;"))
    before = night.path.read_bytes()
    monkeypatch.setattr("harness.migrations.migrations", lambda: newer)
    monkeypatch.setattr("harness.queries.migrations", lambda: newer)
    with night.reader() as reader:
        assert len(reader.trials()) == 1
        assert reader._rows("SELECT * FROM more") == []
    assert night.path.read_bytes() == before


def test_a_broken_migration_leaves_the_older_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that fails half-way is undone whole, its record included."""
    before = migrations()
    connection = sqlite3.connect(":memory:")
    migrate(connection)
    broken = type(migrations()[0])(
        len(before) + 1, "broken", "CREATE TABLE half (x TEXT) STRICT;\nCREATE TABLE study (y TEXT) STRICT;"
    )
    monkeypatch.setattr("harness.migrations.migrations", lambda: (*before, broken))
    with pytest.raises(sqlite3.OperationalError, match="study already exists"):
        migrate(connection)
    assert connection.execute("SELECT count(*) FROM migrations").fetchone() == (len(before),)
    assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'half'").fetchone() == (0,)
    connection.close()
