"""Brings a ledger to the schema that this version of the program knows.

A migration and its record commit together, so a crash in between leaves the older schema whole. Files in
``harness/schema`` are append-only: to change the schema, add the next number. Standard library only, because readers
need it too.
"""

from __future__ import annotations

import datetime
import sqlite3
from importlib import resources
from typing import NamedTuple

from harness.errors import BadInput, LedgerBroken

APPLICATION_ID = 0x6E696768
"""``PRAGMA application_id`` of every ledger (ASCII "nigh"): tells it from any other SQLite file."""


class Migration(NamedTuple):
    """One step of the schema."""

    number: int
    name: str
    sql: str


def migrations() -> tuple[Migration, ...]:
    """Return every migration that this version knows, in order; numbers run from 1 without a gap."""
    found = []
    for file in resources.files("harness").joinpath("schema").iterdir():
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found.append(Migration(int(number), name, file.read_text(encoding="utf-8")))
    found.sort()
    assert [migration.number for migration in found] == list(range(1, len(found) + 1)), "migrations have a gap"
    return tuple(found)


def version(connection: sqlite3.Connection) -> int:
    """Return the number of the last migration in a database, 0 for an empty one.

    `BadInput`: the file is some other SQLite database, or was written by a newer version of the program.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (objects or application):
        raise BadInput("this is no ledger: it is some other SQLite file")
    known = len(migrations())
    if number > known:
        raise BadInput(
            f"the ledger was written by a newer version of overnight (schema {number}, this one knows {known}):"
            " upgrade overnight to use it"
        )
    return int(number)


def migrate(connection: sqlite3.Connection) -> int:
    """Apply what is missing, each migration with its record in one transaction; return how many were applied."""
    assert not connection.in_transaction, "migrations bring their own transactions"
    (enforced,) = connection.execute("PRAGMA foreign_keys").fetchone()
    connection.execute("PRAGMA foreign_keys = OFF")  # a table that is rebuilt is gone for a moment
    try:
        return _apply_missing(connection)
    finally:
        connection.execute(f"PRAGMA foreign_keys = {enforced}")


def _apply_missing(connection: sqlite3.Connection) -> int:
    before = version(connection)
    for migration in migrations()[before:]:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        script = (
            f"BEGIN IMMEDIATE;\n{migration.sql}\n"
            f"INSERT INTO migrations VALUES ({migration.number}, '{migration.name}', '{now}');\n"
            f"PRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = {migration.number};\nCOMMIT;"
        )
        try:
            connection.executescript(script)
        except sqlite3.IntegrityError as error:
            connection.rollback()
            raise LedgerBroken(f"migration {migration.number} does not fit this ledger: {error}") from error
        except sqlite3.Error:
            connection.rollback()
            raise
    return len(migrations()) - before
