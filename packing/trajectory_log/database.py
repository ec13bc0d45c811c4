"""The SQLite file of a log: one row per episode, appended in transactions and never changed."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from trajpack.packing.durable_files import replacing
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.trajectory_log.records import DamagedLogError, Record, decoded, encoded_text

LOG = "log.sqlite"
LOCK = "writer.lock"
_FORMAT = {"format": "trajpack.TrajectoryLog", "version": 2}
_TABLES = """
    PRAGMA page_size = 16384;
    PRAGMA journal_mode = OFF;
    CREATE TABLE log (
        described TEXT NOT NULL, checksum INTEGER NOT NULL, num_episodes INTEGER NOT NULL,
        num_transactions INTEGER NOT NULL);
    CREATE TABLE episodes (
        number INTEGER PRIMARY KEY, name BLOB NOT NULL, failed INTEGER NOT NULL,
        num_trajectories INTEGER NOT NULL, num_turns INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL, checksum INTEGER NOT NULL, content BLOB NOT NULL);
"""
_BUSY_S = 60.0
"""Seconds that a reader waits for a writer."""
_BATCH_BYTES = 4 << 20
"""Bytes of content read in one transaction; a writer waits until it ends."""
_SYSTEM_ERRORS = {
    3: errno.EACCES,  # SQLITE_PERM
    5: errno.EBUSY,  # SQLITE_BUSY
    8: errno.EACCES,  # SQLITE_READONLY
    10: errno.EIO,  # SQLITE_IOERR
    13: errno.ENOSPC,  # SQLITE_FULL
    14: errno.EACCES,  # SQLITE_CANTOPEN
}
"""SQLite's result codes of system failures; all others mean damage."""


class Row(NamedTuple):
    """A row of the table ``episodes`` without checksum and content."""

    number: int
    """Position in the log, from 0."""
    name: bytes
    failed: int
    num_trajectories: int
    num_turns: int
    num_tokens: int

    @classmethod
    def of(cls, number: int, record: Record) -> Row:
        """Return the row of a record."""
        arrays, failed = record.arrays, int(record.error is not None)
        sizes = (arrays.num_trajectories, len(arrays.turns), len(arrays.tokens))
        return cls(number, encoded_text(record.episode), failed, *sizes)

    @property
    def checksum(self) -> int:
        """CRC-32 of all columns but ``number``."""
        return zlib.crc32(repr(tuple(self[1:])).encode())


_COLUMNS = ", ".join(Row._fields)


class LogFile:
    """The SQLite file of a log.

    Every method opens and closes a connection: between two calls nothing is locked or open.

    With ``to_append`` all pages are checked, so that no append makes damage worse. A
    `DamagedLogError` says that the file is damaged or no log, an `OSError` that it cannot be read.
    """

    def __init__(self, path: Path, *, to_append: bool = False) -> None:
        self.path = path
        query = f"SELECT {_COLUMNS}, checksum FROM episodes WHERE number = ?"
        with self._connection() as db:
            db.execute("BEGIN")
            if to_append:
                (checked,) = db.execute("PRAGMA quick_check(1)").fetchone()
                if checked != b"ok":
                    raise self._damage(b" ".join(checked.split()).decode())
            header = db.execute("SELECT described, checksum, num_episodes FROM log").fetchone()
            described, checksum, count = header or (b"", 0, 0)
            self.fields = self._fields_of(described, checksum)
            """Extra per-token fields of every turn."""
            last = self._ask(db, "SELECT ifnull(max(number), -1) FROM episodes")
            # the count serves where the last page is damaged
            end = last[0] + 1 if isinstance(last, tuple) else count
            most = path.stat().st_size // 64  # more rows are not there, whatever a changed bit says
            numbers = range(min(end, most) if isinstance(end, int) else 0)
            answers = [self._ask(db, query, number) for number in numbers]
        self.next_number: int = end
        """Number of the next row."""
        rows = [(Row(*row[:-1]), row[-1]) for row in answers if isinstance(row, tuple)]
        self.rows = [row for row, checksum in rows if row.checksum == checksum]
        """Rows that are there and undamaged, by number."""
        self.fault: DamagedLogError | None = None
        """What is wrong with the other rows."""
        if not len(self.rows) == count == end:
            self.fault = self._damage(f"{len(self.rows)} of {count!r} episodes are there and whole")

    @staticmethod
    def create(path: Path, fields: Sequence[TokenField]) -> None:
        """Write a new log durably; after an error no file is left."""
        described = json.dumps(_FORMAT | {"fields": [field.as_json() for field in fields]})
        values = (described, zlib.crc32(described.encode()))
        with replacing(path) as unfinished, _translated(unfinished):
            unfinished.unlink(missing_ok=True)
            with closing(sqlite3.connect(unfinished)) as db:
                db.executescript(_TABLES)
                db.execute("INSERT INTO log VALUES (?, ?, 0, 0)", values)
                db.commit()

    def records(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Record | DamagedLogError]]:
        """Yield rows with their episodes, or with the error of a damaged one.

        A transaction reads some megabytes and ends before they are decoded, so that a writer
        waits for milliseconds only.
        """
        left, query = iter(rows), "SELECT content FROM episodes WHERE number = ?"
        batch: list[tuple[Row, Any]] | None = None
        while batch != []:
            batch, size = [], 0
            with self._connection() as db:
                db.execute("BEGIN")
                while size < _BATCH_BYTES and (row := next(left, None)) is not None:
                    answer = self._ask(db, query, row.number)
                    content = answer[0] if isinstance(answer, tuple) else answer
                    size += len(content) if isinstance(content, bytes) else 0
                    batch.append((row, content))
            for row, content in batch:
                yield row, self._record(row, content)

    def append(self, episodes: Sequence[tuple[Row, bytes]], wait_s: float) -> None:
        """Append rows with consecutive numbers, and their contents, in one durable transaction.

        It waits ``wait_s`` seconds for readers. A failed call may be repeated with the same rows,
        and more: rows that are there already are not written again.

        Raises:
            DamagedLogError: If the file is damaged; then nothing is changed.
            OSError: If it cannot be written; a later attempt may succeed.
        """
        rows = [row for row, _ in episodes]
        query = f"SELECT {_COLUMNS} FROM episodes WHERE number >= ?"
        with self._connection(wait_s) as db:
            db.execute("PRAGMA journal_mode = TRUNCATE")
            db.execute("PRAGMA cache_size = -65536")  # KiB: no transaction is spilled early
            db.execute("BEGIN IMMEDIATE")
            (num_rows,) = db.execute("SELECT ifnull(max(number) + 1, 0) FROM episodes").fetchone()
            stored = db.execute(query, (rows[0].number,)).fetchall()
            if num_rows < rows[0].number or stored != rows[: len(stored)]:
                reason = f"another program has changed it: it has {num_rows} rows"
                raise OSError(errno.ESTALE, reason, str(self.path))
            db.executemany(
                f"INSERT INTO episodes ({_COLUMNS}, checksum, content) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(*row, row.checksum, content) for row, content in episodes[len(stored) :]],
            )
            # also where all rows are there: the failed step may have been the synchronisation
            change = "UPDATE log SET num_episodes = ?, num_transactions = num_transactions + 1"
            db.execute(change, (rows[-1].number + 1,))
            db.execute("COMMIT")

    def _damage(self, reason: str) -> DamagedLogError:
        return DamagedLogError(f"{self.path} is damaged: {reason}")

    @contextmanager
    def _connection(self, wait_s: float = _BUSY_S) -> Iterator[sqlite3.Connection]:
        os.stat(self.path)  # says what is wrong with a path, where SQLite does not
        url = f"{self.path.as_uri()}?mode=rw"  # also to read: a dead writer's journal is undone
        with (
            _translated(self.path),
            closing(sqlite3.connect(url, uri=True, timeout=wait_s, isolation_level=None)) as db,
        ):
            db.text_factory = bytes
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA fullfsync = ON")  # on macOS fsync alone does not reach the disk
            db.execute("PRAGMA cell_size_check = ON")
            yield db

    def _ask(self, db: sqlite3.Connection, query: str, *values: int) -> Any:
        """Return a row, ``None`` if there is none, or the error of a damaged page."""
        try:
            with _translated(self.path):
                return db.execute(query, values).fetchone()
        except DamagedLogError as error:
            return error

    def _fields_of(self, described: Any, checksum: Any) -> tuple[TokenField, ...]:
        """Return the extra fields of the log from its description."""
        try:
            if zlib.crc32(described) != checksum:
                raise ValueError("its description has a wrong checksum")
            meaning = json.loads(described)
            if not meaning.items() >= _FORMAT.items():
                raise ValueError(f"it is not a log of version {_FORMAT['version']}")
            return check_fields(TokenField.from_json(field) for field in meaning["fields"])
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise self._damage(str(error)) from error

    def _record(self, row: Row, content: Any) -> Record | DamagedLogError:
        try:
            if not isinstance(content, bytes):
                is_known = isinstance(content, DamagedLogError)
                raise content if is_known else DamagedLogError("it has no content")
            record = decoded(content, self.fields)
            if Row.of(row.number, record) != row:
                raise DamagedLogError("it has the content of another one")
        except DamagedLogError as error:
            return self._damage(f"episode {row.name.decode(errors='replace')!r}: {error}")
        return record


def locked(folder: Path) -> sqlite3.Connection:
    """Return a connection that keeps other writers away from a folder until it is closed.

    SQLite's lock on an empty database ends with its process, and a forked child does not inherit
    it. An `OSError` (``EBUSY``) says that another writer has the folder, a `ValueError` that it
    holds other files and no log.
    """
    names = set(os.listdir(folder))
    if LOG not in names and (foreign := sorted(names - {LOCK, f"{LOG}.tmp"})):
        raise ValueError(
            f"{folder} is neither empty nor a trajectory log: it has no {LOG}, "
            f"but holds {foreign[0]!r}"
        )
    with _translated(folder / LOCK):
        lock = sqlite3.connect(folder / LOCK, 0, isolation_level=None, check_same_thread=False)
        try:
            lock.execute("PRAGMA journal_mode = MEMORY")  # no journal lies in the folder
            lock.execute("BEGIN IMMEDIATE")
            lock.execute("PRAGMA user_version = 1")  # an error where it may not be written
        except sqlite3.Error as error:
            lock.close()
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            raise OSError(errno.EBUSY, "another writer has the log open", str(folder)) from None
    return lock


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as `OSError` for system failures, else as `DamagedLogError`."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter of a message's bytes
        code = getattr(error, "sqlite_errorcode", 0)
        if (number := _SYSTEM_ERRORS.get(code & 0xFF)) is not None:
            reason = "a reader holds it" if number == errno.EBUSY else os.strerror(number)
            raise OSError(number, f"{reason} ({error})", str(path)) from error
        raise DamagedLogError(f"{path} is damaged: {str(error)!a}") from error
