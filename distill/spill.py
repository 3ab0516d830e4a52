"""Rows that need not fit in memory: a private SQLite file among the temporary ones (TMPDIR moves it).

It has no name, so that nothing is left behind, whatever ends the process.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

CACHE_KIB = 49_152  # of pages in memory, for each file; what is more lies on disk


class Spill:
    """Tables of one file, written and read by one process alone.

    Args:
        tables: statements that make them.

    Raises:
        OSError: here and in every call: there is no room for the file.
    """

    def __init__(self, *tables: str) -> None:
        # An empty name is a temporary file, which SQLite makes when its pages outgrow the cache, and unlinks at once.
        self._db = sqlite3.connect("", isolation_level=None)
        # Nothing here outlives a crash, so nothing is written to survive one.
        settings = ("temp_store = FILE", f"cache_size = -{CACHE_KIB}", "journal_mode = OFF", "synchronous = OFF")
        for statement in (*(f"PRAGMA {setting}" for setting in settings), *tables, "BEGIN"):
            self.run(statement)

    def run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Runs one statement."""
        try:
            return self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise _no_room(error) from error

    def rows(self, statement: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, one at a time."""
        cursor = self.run(statement, *values)
        while True:
            try:
                row = next(cursor, None)
            except sqlite3.OperationalError as error:
                raise _no_room(error) from error
            if row is None:
                return
            yield row


def key(text: str) -> bytes:
    """A text as SQLite stores and orders it here: by code points, half characters included."""
    return text.encode("utf-8", "surrogatepass")


def _no_room(error: sqlite3.OperationalError) -> Exception:
    """What a failed statement means: no room is the machine's trouble, anything else is a fault of ours."""
    if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return error
    return OSError(
        f"temporary files can not be written ({error}); make room there, or set the environment variable TMPDIR to a "
        "folder on a larger disk, and go on with --resume"
    )
