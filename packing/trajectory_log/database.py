"""The SQLite file of a log: one row per episode, appended in transactions and never changed."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trajpack.packing.durable_files import replacing
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.trajectory_log.options import DamagedLogError, LogInUseError
from trajpack.packing.trajectory_log.records import (
    COLUMNS,
    Record,
    decoded,
    decoded_text,
    encoded,
    encoded_text,
)

if TYPE_CHECKING:
    import sqlite3

LOG = "log.sqlite"
FORMAT = "trajpack.TrajectoryLog"
SCHEMA_VERSION = 2
_APPLICATION_ID = 0x74706C67  # "tplg"
PAGE_BYTES = 16384
_BUSY_S = 60.0
"""Seconds that a connection waits for the locks of others."""
_BATCH_BYTES = 4 << 20
"""Bytes of content read in one transaction; a writer waits until it ends."""
_BATCH_ENTRIES = 10_000
_PRAGMAS = (
    "synchronous = FULL",
    "cache_size = -65536",  # KiB: a transaction of the usual size is not spilled early
    "cell_size_check = ON",
    "trusted_schema = OFF",
    "mmap_size = 0",
    "fullfsync = ON",  # on macOS fsync alone does not reach the disk
)
_TABLES = {
    "log": "CREATE TABLE log (num_episodes INTEGER NOT NULL, checksum INTEGER NOT NULL, "
    "described BLOB NOT NULL)",
    "episodes": "CREATE TABLE episodes (number INTEGER PRIMARY KEY, name BLOB NOT NULL, "
    "failed INTEGER NOT NULL, num_trajectories INTEGER NOT NULL, num_turns INTEGER NOT NULL, "
    "num_tokens INTEGER NOT NULL, session INTEGER NOT NULL, num_bytes INTEGER NOT NULL, "
    "checksum INTEGER NOT NULL)",
}
_CONTENTS = "CREATE TABLE contents_{} (number INTEGER PRIMARY KEY, content BLOB NOT NULL)"
_SYSTEM_ERRORS = {
    3: errno.EACCES,  # SQLITE_PERM
    5: errno.EBUSY,  # SQLITE_BUSY
    6: errno.EBUSY,  # SQLITE_LOCKED
    8: errno.EACCES,  # SQLITE_READONLY
    10: errno.EIO,  # SQLITE_IOERR
    13: errno.ENOSPC,  # SQLITE_FULL
    14: errno.EACCES,  # SQLITE_CANTOPEN
    15: errno.EBUSY,  # SQLITE_PROTOCOL
    22: errno.EFBIG,  # SQLITE_NOLFS
}
"""SQLite's result codes of system failures; all others mean damage."""
_READONLY_ROLLBACK = 776
_SUPER_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_NUMBERS = struct.Struct("<9q")


class Entry(NamedTuple):
    """A row of the table ``episodes``: an episode without its content."""

    number: int
    """Position in the log, from 0."""
    name: bytes
    failed: int
    num_trajectories: int
    num_turns: int
    num_tokens: int
    session: int
    """Number of the table with its content, from 1; each writer fills its own table."""
    num_bytes: int
    checksum: int
    """CRC-32 in the header of its content."""

    @property
    def text(self) -> str:
        """Name of the episode."""
        return decoded_text(self.name)

    @classmethod
    def of(cls, record: Record, content: bytes) -> Entry:
        """Return the entry of a record and its bytes, with number and session 0."""
        return cls(
            number=0,
            name=encoded_text(record.episode),
            failed=int(record.error is not None),
            num_trajectories=len(record.arrays.labels),
            num_turns=len(record.arrays.turns),
            num_tokens=len(record.arrays.tokens),
            session=0,
            num_bytes=len(content),
            checksum=int.from_bytes(content[4:8], "little"),
        )


class State(NamedTuple):
    """Summary of the table ``episodes`` in the table ``log``; both change in one transaction."""

    num_episodes: int
    checksum: int
    """CRC-32 of the log's description and of all rows of ``episodes``, in order."""

    def extended(self, entries: Sequence[Entry]) -> State:
        """Return the state after these entries were appended."""
        checksum, pack, crc32 = self.checksum, _NUMBERS.pack, zlib.crc32
        for number, name, *numbers in entries:
            checksum = crc32(name, crc32(pack(number, len(name), *numbers), checksum))
        return State(self.num_episodes + len(entries), checksum)


class LogFile:
    """The SQLite file of a log.

    Every method opens and closes a connection, which checks that the file at the path is still
    this log. Between two calls nothing is locked or open, and a forked process inherits nothing.

    Args:
        path: Path of the file.
        to_append: Check every page that a transaction may change, so that a damaged file is not
            made worse.

    Raises:
        DamagedLogError: If the file is damaged, or is no log.
        ValueError: If a later release wrote it.
        OSError: If it cannot be read, or stays locked.
    """

    def __init__(self, path: Path, *, to_append: bool = False) -> None:
        self.path = path
        self._described: bytes | None = None
        with self._connection() as db:
            db.execute("BEGIN")
            described, self.state = self._read_header(db)
            self._session = self._num_tables(db) + 1
            self._identity = os.stat(path)
            for table in ("sqlite_master", *_TABLES) if to_append else ():
                found = db.execute(f"PRAGMA quick_check({table})").fetchall()
                if found != [(b"ok",)]:
                    reason = b" ".join(found[0][0].split()).decode() if found else "no answer"
                    raise self._damage(reason)
        self._described = described
        self.fields = declared_fields(path, described)
        """Extra per-token fields of every turn."""
        self.start = State(0, zlib.crc32(described))
        """State of the log before its first episode."""

    @classmethod
    def create(
        cls, path: Path, fields: Sequence[TokenField], records: Iterable[Record] = ()
    ) -> None:
        """Write a new log durably, and check it; after an error no file is left."""
        import sqlite3

        described = json.dumps(
            {
                "format": FORMAT,
                "schema_version": SCHEMA_VERSION,
                "log": uuid.uuid4().hex,
                "fields": [field.as_json() for field in fields],
                "columns": {name: dtype.str for name, dtype in COLUMNS.items()},
            }
        ).encode()
        with replacing(path) as unfinished:
            unfinished.unlink(missing_ok=True)
            with (
                _translated(unfinished),
                closing(sqlite3.connect(unfinished, isolation_level=None)) as db,
            ):
                for pragma in (
                    f"page_size = {PAGE_BYTES}",
                    "journal_mode = OFF",
                    "synchronous = OFF",
                    f"application_id = {_APPLICATION_ID}",
                    f"user_version = {SCHEMA_VERSION}",
                ):
                    db.execute(f"PRAGMA {pragma}")
                db.execute("BEGIN")
                for table in _TABLES.values():
                    db.execute(table)
                state = State(0, zlib.crc32(described))
                for number, record in enumerate(records):
                    if number == 0:
                        db.execute(_CONTENTS.format(1))
                    content = encoded(record)
                    entry = Entry.of(record, content)._replace(number=number, session=1)
                    state = state.extended([entry])
                    _insert(db, [entry], [content])
                db.execute("INSERT INTO log VALUES (?, ?, ?)", (*state, described))
                db.execute("COMMIT")
            written = cls(unfinished, to_append=True)
            end = written.state.num_episodes
            for entries, state in written.entries(written.start, end):  # noqa: B007
                for _, found in written.records(entries):
                    if isinstance(found, DamagedLogError):
                        raise found
            written.check_end(state)

    def entries(self, state: State, end: int) -> Iterator[tuple[list[Entry], State]]:
        """Yield the entries of episodes from ``state`` to ``end``, and the states after them."""
        query = "SELECT * FROM episodes WHERE number >= ? ORDER BY number LIMIT ?"
        while state.num_episodes < end:
            numbers = range(state.num_episodes, min(state.num_episodes + _BATCH_ENTRIES, end))
            with self._connection() as db:
                found = db.execute(query, (numbers.start, len(numbers))).fetchall()
            entries = [Entry(*row) for row in found]
            try:
                state = state.extended(entries)
                for entry in entries:
                    decoded_text(entry.name)
            except (struct.error, TypeError, UnicodeDecodeError) as error:
                raise self._damage(f"{error} among its rows") from error
            if [entry.number for entry in entries] != list(numbers):
                raise self._damage(f"a row behind {numbers[0]} is missing")
            yield entries, state

    def check_end(self, state: State) -> None:
        """Raise a `DamagedLogError` unless the state after all entries is that of the log."""
        if state != self.state:
            raise self._damage("its rows have another checksum")

    def records(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, Record | DamagedLogError]]:
        """Yield entries with their episodes, or with the error of a damaged one.

        A transaction reads some megabytes and ends before they are decoded, so that a writer
        waits for milliseconds only.
        """
        for batch in _batches(entries):
            with self._connection() as db:
                db.execute("BEGIN")
                contents = [self._content(db, entry) for entry in batch]
            for entry, content in zip(batch, contents, strict=True):
                yield entry, self._record(entry, content)

    def append(
        self, before: State, episodes: Sequence[tuple[Entry, bytes]]
    ) -> tuple[State, list[Entry]]:
        """Append episodes in one durable transaction; return the new state, and their entries.

        A failed attempt may be repeated with the same arguments: nothing is appended twice, even
        if only its last step failed.

        Raises:
            LogInUseError: If another writer has appended to the log, or another file is at its
                path; then nothing is changed.
            DamagedLogError: If the file is damaged; then nothing is changed.
            OSError: If it cannot be written; a later attempt may succeed.
        """
        entries = [
            entry._replace(number=number, session=self._session)
            for number, (entry, _) in enumerate(episodes, before.num_episodes)
        ]
        after = before.extended(entries)
        with self._connection() as db:
            if not os.path.samestat(os.stat(self.path), self._identity):
                raise LogInUseError(f"log {self.path} was replaced by another file")
            db.execute("BEGIN IMMEDIATE")
            _, state = self._read_header(db)
            if state not in (before, after):
                raise LogInUseError(
                    f"another writer has appended to log {self.path}: it has "
                    f"{state.num_episodes} rows, expected {before.num_episodes}"
                )
            if state != after:
                if self._num_tables(db) < self._session:
                    db.execute(_CONTENTS.format(self._session))
                _insert(db, entries, [content for _, content in episodes])
            # also where all rows are there: the failed step may have been the synchronisation
            db.execute("UPDATE log SET num_episodes = ?, checksum = ?", after)
            db.execute("COMMIT")
        return after, entries

    def _damage(self, reason: str) -> DamagedLogError:
        return DamagedLogError(f"{self.path} is damaged: {reason}")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        import sqlite3

        check_regular(self.path)
        _check_journal(Path(f"{os.path.realpath(self.path)}-journal"))
        url = f"{self.path.as_uri()}?mode=rw"  # also to read: a dead writer's journal is undone
        with (
            _translated(self.path),
            closing(sqlite3.connect(url, uri=True, timeout=_BUSY_S, isolation_level=None)) as db,
        ):
            db.text_factory = bytes
            for pragma in _PRAGMAS:
                db.execute(f"PRAGMA {pragma}")
            (mode,) = db.execute("PRAGMA journal_mode = TRUNCATE").fetchone()
            if mode != b"truncate":
                raise OSError(errno.EBUSY, f"its journal mode is {mode!r}", str(self.path))
            self._num_tables(db)
            described = db.execute("SELECT described FROM log").fetchone()
            if self._described is not None and described != (self._described,):
                raise OSError(errno.ESTALE, "another log lies at its path", str(self.path))
            yield db

    def _num_tables(self, db: sqlite3.Connection) -> int:
        """Check that the file is a log of this form; return the number of tables of contents.

        Must come before any other query: a hostile file's table might be a view that never ends.
        """
        application, version = _pragma(db, "application_id"), _pragma(db, "user_version")
        if application != _APPLICATION_ID:
            raise DamagedLogError(
                f"{self.path} is damaged or no log: its application_id is {application:#x}"
            )
        found = db.execute("SELECT name, tbl_name, sql FROM sqlite_master").fetchall()
        if version != SCHEMA_VERSION:
            # a later release says so in two places; otherwise a bit changed
            told = None
            if any(sql.startswith(b"CREATE TABLE log (") for *_, sql in found if sql is not None):
                with suppress(KeyError, TypeError, ValueError, RecursionError):
                    told = json.loads(*db.execute("SELECT described FROM log").fetchone())
                    told = told["schema_version"]
            if told != version:
                raise self._damage(f"its version is {version}, not {told!r}")
            raise ValueError(
                f"{self.path} has schema version {version}, "
                f"this release reads version {SCHEMA_VERSION}"
            )
        num_tables = len(found) - len(_TABLES)
        tables = _TABLES | {f"contents_{n}": _CONTENTS.format(n) for n in range(1, num_tables + 1)}
        if set(found) != {(t.encode(), t.encode(), sql.encode()) for t, sql in tables.items()}:
            raise DamagedLogError(
                f"{self.path} is damaged or no log: its tables are not those of a log"
            )
        return num_tables

    def _read_header(self, db: sqlite3.Connection) -> tuple[bytes, State]:
        """Check the numbers that SQLite trusts; return description and state of the log."""
        rows = db.execute("SELECT described, num_episodes, checksum FROM log LIMIT 2").fetchall()
        if len(rows) != 1 or [type(value) for value in rows[0]] != [bytes, int, int]:
            raise self._damage("its table log makes no sense")
        described, state = rows[0][0], State(*rows[0][1:])
        # SQLite overwrites a page that its header calls free
        size = os.stat(self.path).st_size
        used = _pragma(db, "page_count") * _pragma(db, "page_size")
        if size != used:
            raise self._damage(f"{size} bytes instead of {used}")
        if _pragma(db, "freelist_count") or _pragma(db, "auto_vacuum"):
            raise self._damage("its header names free pages")
        ends = tuple(  # two queries: each is a lookup in the index, one of both reads all rows
            db.execute(f"SELECT {end}(number) FROM episodes").fetchone()[0]
            for end in ("min", "max")
        )
        if ends != ((0, state.num_episodes - 1) if state.num_episodes else (None, None)):
            raise self._damage(f"rows {ends} of {state.num_episodes} are there")
        return described, state

    def _content(self, db: sqlite3.Connection, entry: Entry) -> Any:
        """Return the content of an episode, ``None`` if there is none, or a `DamagedLogError`."""
        # content of another length is not read: it might be as long as the file
        query = (
            "SELECT CASE length(content) WHEN ? THEN content END "
            f"FROM contents_{entry.session} WHERE number = ?"
        )
        try:
            with _translated(self.path):
                row = db.execute(query, (entry.num_bytes, entry.number)).fetchone()
        except DamagedLogError as error:
            return error
        return None if row is None else row[0]

    def _record(self, entry: Entry, content: Any) -> Record | DamagedLogError:
        if isinstance(content, DamagedLogError):
            return content
        try:
            if not isinstance(content, bytes):
                raise DamagedLogError("it has no content")
            record = decoded(content, self.fields)
            if Entry.of(record, content) != entry._replace(number=0, session=0):
                raise DamagedLogError("it has the content of another one")
        except DamagedLogError as error:
            return self._damage(f"episode {entry.text!r}: {error}")
        return record


def _insert(db: sqlite3.Connection, entries: Sequence[Entry], contents: Sequence[bytes]) -> None:
    """Insert rows of one session."""
    numbered = [(entry.number, content) for entry, content in zip(entries, contents, strict=True)]
    db.executemany(f"INSERT INTO contents_{entries[0].session} VALUES (?, ?)", numbered)
    places = ", ".join("?" * len(Entry._fields))
    db.executemany(f"INSERT INTO episodes VALUES ({places})", entries)


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield entries in groups of some megabytes of content."""
    batch, size = list[Entry](), 0
    for entry in entries:
        if batch and size + entry.num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += entry.num_bytes
    if batch:
        yield batch


def declared_fields(path: Path, described: bytes) -> tuple[TokenField, ...]:
    """Return the extra fields of a log from its description."""
    try:
        told = json.loads(described)
        if told["format"] != FORMAT:
            raise ValueError(f"its format is {told['format']!r}")
        return check_fields(TokenField.from_json(field) for field in told["fields"])
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise DamagedLogError(f"{path} does not say what it holds: {error}") from error


def _pragma(db: sqlite3.Connection, name: str) -> Any:
    return db.execute(f"PRAGMA {name}").fetchone()[0]


def check_regular(path: Path) -> None:
    """Raise a `DamagedLogError` for a pipe, a device or a folder in place of a file."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise DamagedLogError(f"{path} is no regular file")


def _check_journal(path: Path) -> None:
    """Raise for a journal that names a super-journal: SQLite would delete the file of that name."""
    if not path.exists():
        return
    check_regular(path)
    with suppress(OSError), path.open("rb") as file:
        file.seek(-len(_SUPER_JOURNAL_MAGIC), os.SEEK_END)
        if file.read() == _SUPER_JOURNAL_MAGIC:
            raise DamagedLogError(f"{path} is no journal of a log: it names a super-journal")


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as `OSError` for system failures, else as `DamagedLogError`."""
    import sqlite3

    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter of a message's bytes
        code = getattr(error, "sqlite_errorcode", 0)
        if code == _READONLY_ROLLBACK:
            reason = "its writer died in a transaction: open it once as a user who may write it"
            raise OSError(errno.EACCES, reason, str(path)) from error
        if (number := _SYSTEM_ERRORS.get(code & 0xFF)) is not None:
            raise OSError(number, f"{os.strerror(number)} ({error})", str(path)) from error
        raise DamagedLogError(f"{path} is damaged: {str(error)!a}") from error
