"""The SQLite file of a log: a row for each episode, appended in transactions and never changed."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import uuid
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trajpack.packing.durable_files import finish_durably
from trajpack.packing.log_options import Damaged, DamagedLogError, LogInUseError
from trajpack.packing.log_rows import (
    COLUMNS,
    EpisodeRow,
    decoded,
    decoded_text,
    encoded,
    encoded_text,
)
from trajpack.packing.token_fields import TokenField, check_fields

if TYPE_CHECKING:
    import sqlite3

LOG = "log.sqlite"
FORMAT = "trajpack.TrajectoryLog"
SCHEMA_VERSION = 2
_APPLICATION_ID = 0x74706C67  # "tplg", which tells the file from other SQLite files
PAGE_BYTES = 16384
_BUSY_S = 60.0
"""Seconds that a connection waits for the locks of others."""
_BATCH_BYTES = 4 << 20
"""Bytes of content that are read in one transaction: a writer waits until it ends."""
_BATCH_ENTRIES = 10_000
_PRAGMAS = (
    "synchronous = FULL",
    "cache_size = -65536",  # KiB: a transaction of the usual size is not spilled early
    "cell_size_check = ON",
    "trusted_schema = OFF",
    "mmap_size = 0",
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
"""Result codes of SQLite that are no damage; all others are, where a log is read or written."""
_READONLY_ROLLBACK = 776
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


class Entry(NamedTuple):
    """A row of the table ``episodes``: all of an episode but its content."""

    number: int
    """Position in the log, from 0."""
    name: bytes
    """Name in UTF-8, surrogates passed."""
    failed: int
    """1 where it failed, else 0."""
    num_trajectories: int
    num_turns: int
    num_tokens: int
    session: int
    """Number of the table that holds its content, from 1. Each writer fills a table of its own."""
    num_bytes: int
    """Length of its content."""
    checksum: int
    """CRC-32 of its content, as the content itself says."""

    @property
    def text(self) -> str:
        """Its name."""
        return decoded_text(self.name)

    @classmethod
    def of(cls, row: EpisodeRow, content: bytes) -> Entry:
        """Describe an episode and its record, but not their place in the log."""
        return cls(
            number=0,
            name=encoded_text(row.episode),
            failed=int(row.error is not None),
            num_trajectories=len(row.labels),
            num_turns=len(row.turns),
            num_tokens=len(row.token_ids),
            session=0,
            num_bytes=len(content),
            checksum=int.from_bytes(content[4:8], "little"),
        )


_NUMBERS = struct.Struct("<9q")


class State(NamedTuple):
    """What the table ``log`` says of the table ``episodes``; both change in one transaction."""

    num_episodes: int
    checksum: int
    """CRC-32 of the log's description and of all rows of ``episodes``, in order."""

    def extended(self, entries: Iterable[Entry]) -> State:
        """Return the state after these entries were appended.

        Raises:
            DamagedLogError: If a value is of the wrong type.
        """
        num_episodes, checksum = self
        for number, name, *numbers in entries:
            try:
                row = _NUMBERS.pack(number, len(name), *numbers)
                checksum = zlib.crc32(name, zlib.crc32(row, checksum))
            except (struct.error, TypeError) as error:
                raise DamagedLogError(f"row {num_episodes} is no entry: {error}") from error
            num_episodes += 1
        return State(num_episodes, checksum)


class LogFile:
    """The SQLite file of a log.

    Every method opens a connection of its own and closes it: between two calls nothing is
    locked, no descriptor is open, and a forked process inherits nothing. A connection sees the
    file that lies at the path then, and checks that it is still this log.

    Args:
        path: Of the file.
        to_append: Check all that a transaction will change, so that a damaged file is not
            made worse.

    Raises:
        DamagedLogError: If the file is not as it was written, or is no log.
        ValueError: If a later release wrote it.
        OSError: If it cannot be read, or stays locked.
    """

    def __init__(self, path: Path, *, to_append: bool = False) -> None:
        self.path = path
        self._described: bytes | None = None
        with self._connection() as db:
            db.execute("BEGIN")
            described, self.state, num_sessions = self._read_header(db)
            self._identity = os.stat(path)
            if to_append:
                self._check_structure(db)
        self._described = described
        self._session = num_sessions + 1
        self.fields = declared_fields(path, described)
        """Extra per-token fields of every turn."""
        self.start = State(0, zlib.crc32(described))
        """State of the log before its first episode."""

    @classmethod
    def create(
        cls, path: Path, fields: Sequence[TokenField], rows: Iterable[EpisodeRow] = ()
    ) -> None:
        """Write a new log, which is on the disk, whole and under its name, when this returns.

        Raises:
            OSError: If it cannot be written; then nothing is there.
        """
        import sqlite3

        described = _described(fields)
        unfinished = path.with_name(f"{path.name}.tmp")
        unfinished.unlink(missing_ok=True)
        try:
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
                for number, row in enumerate(rows):
                    if number == 0:
                        db.execute(_CONTENTS.format(1))
                    content = encoded(row)
                    entry = Entry.of(row, content)._replace(number=number, session=1)
                    state = state.extended([entry])
                    _insert(db, [(entry, content)])
                db.execute("INSERT INTO log VALUES (?, ?, ?)", (*state, described))
                db.execute("COMMIT")
            cls(unfinished, to_append=True).check_all()
            finish_durably(unfinished, path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def entries(self, begin: int, end: int) -> Iterator[list[Entry]]:
        """Yield the entries of episodes ``[begin, end)``, some thousand at a time.

        Raises:
            DamagedLogError: If one is missing or no entry.
        """
        columns = ", ".join(Entry._fields)
        query = f"SELECT {columns} FROM episodes WHERE number >= ? AND number < ? ORDER BY number"
        for first in range(begin, end, _BATCH_ENTRIES):
            numbers = range(first, min(first + _BATCH_ENTRIES, end))
            with self._connection() as db:
                found = db.execute(query, (numbers.start, numbers.stop)).fetchall()
            if [row[0] for row in found] != list(numbers) or not all(map(_is_entry, found)):
                raise DamagedLogError(
                    f"{self.path} is damaged: of its rows {first} to {numbers[-1]} one is missing "
                    "or has a value of a wrong type"
                )
            yield [Entry(*row) for row in found]

    def rows(
        self, entries: Iterable[Entry]
    ) -> Iterator[tuple[Entry, EpisodeRow | DamagedLogError]]:
        """Yield entries with their episodes, or with the reason why one cannot be read.

        A transaction reads some megabytes and ends before they are decoded, so that a writer
        waits for milliseconds only.
        """
        for batch in _batches(entries):
            with self._connection() as db:
                db.execute("BEGIN")
                contents = [self._content(db, entry) for entry in batch]
            for entry, content in zip(batch, contents, strict=True):
                yield entry, self._row(entry, content)

    def check_all(self) -> None:
        """Read every episode.

        Raises:
            DamagedLogError: If one is not as it was written.
        """
        EpisodeIndex.read(self, "raise")
        for entries in self.entries(0, self.state.num_episodes):
            for _, row in self.rows(entries):
                if isinstance(row, DamagedLogError):
                    raise row

    def append(
        self, before: State, episodes: Sequence[tuple[Entry, bytes]]
    ) -> tuple[State, list[Entry]]:
        """Append episodes in one transaction; they are on the disk when this returns.

        An attempt that failed may be repeated with the same arguments: nothing is appended
        twice, even if all of it had been done and only the last step failed.

        Returns:
            The state after it, and the entries with their numbers.

        Raises:
            LogInUseError: If another writer has appended to the log, or another file lies at
                its path; then nothing is changed.
            DamagedLogError: If the file is not as it was written; then nothing is changed.
            OSError: If it cannot be written; then a later attempt may do it.
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
            _, state, num_sessions = self._read_header(db)
            if state not in (before, after):
                raise LogInUseError(
                    f"another writer has appended to log {self.path}: it has "
                    f"{state.num_episodes} rows, expected {before.num_episodes}"
                )
            if state != after:
                if num_sessions < self._session:
                    db.execute(_CONTENTS.format(self._session))
                contents = [content for _, content in episodes]
                _insert(db, list(zip(entries, contents, strict=True)))
            # also where all is there: its synchronisation may be the step that failed
            db.execute("UPDATE log SET num_episodes = ?, checksum = ?", after)
            db.execute("COMMIT")
        return after, entries

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        import sqlite3

        if not stat.S_ISREG(os.stat(self.path).st_mode):
            raise DamagedLogError(f"{self.path} is no regular file")
        _check_journal(Path(f"{self.path}-journal"))
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
            if self._described is not None:
                (described,) = db.execute("SELECT described FROM log").fetchone()
                if described != self._described:
                    raise OSError(errno.ESTALE, "another log lies at its path", str(self.path))
            yield db

    def _read_header(self, db: sqlite3.Connection) -> tuple[bytes, State, int]:
        """Check what SQLite trusts blindly; return description, state and number of sessions."""

        def pragma(name: str) -> Any:
            return db.execute(f"PRAGMA {name}").fetchone()[0]

        version, name = pragma("user_version"), f"{self.path} is damaged or no log"
        if pragma("application_id") != _APPLICATION_ID:
            raise DamagedLogError(f"{name}: its application_id is {pragma('application_id'):#x}")
        rows = db.execute("SELECT num_episodes, checksum, described FROM log").fetchall()
        if len(rows) != 1:
            raise DamagedLogError(f"{name}: its table log has {len(rows)} rows")
        *numbers, described = rows[0]
        _check_version(self.path, version, described)
        found = db.execute("SELECT name, tbl_name, sql FROM sqlite_master").fetchall()
        num_sessions = len(found) - len(_TABLES)
        tables = _TABLES | {
            f"contents_{n}": _CONTENTS.format(n) for n in range(1, num_sessions + 1)
        }
        if set(found) != {(t.encode(), t.encode(), sql.encode()) for t, sql in tables.items()}:
            raise DamagedLogError(f"{name}: its tables are not those of a log")
        # a page that SQLite takes for free, or for its own, is written over
        size, used = os.stat(self.path).st_size, pragma("page_count") * pragma("page_size")
        if size != used:
            raise DamagedLogError(f"{self.path} is damaged: {size} bytes instead of {used}")
        if pragma("freelist_count") or pragma("auto_vacuum"):
            raise DamagedLogError(f"{name}: its header names free pages")
        if any(type(number) is not int for number in numbers):
            raise DamagedLogError(f"{name}: its table log holds {numbers}")
        state = State(*numbers)
        ends = tuple(  # one by one: so each is looked up in the index, and not all rows are read
            db.execute(f"SELECT {end}(number) FROM episodes").fetchone()[0]
            for end in ("min", "max")
        )
        if ends != ((0, state.num_episodes - 1) if state.num_episodes else (None, None)):
            raise DamagedLogError(f"{name}: it has rows {ends} of {state.num_episodes} episodes")
        return described, state, num_sessions

    def _check_structure(self, db: sqlite3.Connection) -> None:
        """Check every page that an append may change: those of all tables but old contents."""
        for table in ("sqlite_master", *_TABLES):
            found = db.execute(f"PRAGMA quick_check({table})").fetchall()
            if found != [(b"ok",)]:
                said = b" ".join(found[0][0].split()).decode() if found else "no answer"
                raise DamagedLogError(f"{self.path} is damaged: {said}")

    def _content(self, db: sqlite3.Connection, entry: Entry) -> Any:
        """Return the content of an episode, ``None`` if there is none, or a `DamagedLogError`."""
        query = f"SELECT content FROM contents_{int(entry.session)} WHERE number = ?"
        try:
            with _translated(self.path):
                row = db.execute(query, (entry.number,)).fetchone()
        except DamagedLogError as error:
            return error
        return None if row is None else row[0]

    def _row(self, entry: Entry, content: Any) -> EpisodeRow | DamagedLogError:
        if isinstance(content, DamagedLogError):
            return content
        try:
            if not isinstance(content, bytes):
                raise DamagedLogError("it has no content")
            row = decoded(content, self.fields)
            if Entry.of(row, content) != (0, *entry[1:6], 0, *entry[7:]):
                raise DamagedLogError("it has the content of another one")
        except DamagedLogError as error:
            return DamagedLogError(f"{self.path} is damaged: episode {entry.text!r}: {error}")
        return row


class EpisodeIndex:
    """Names and counts of the episodes in a log, and which of its rows count.

    Of several rows with one name the last one counts, but a failure never replaces a success.
    """

    def __init__(self) -> None:
        self.finished: dict[str, int] = {}
        """Row of each episode that succeeded, by name."""
        self.failed: dict[str, int] = {}
        """Row of each episode that failed, by name."""
        self.num_rows = 0
        """Rows of the log, also of those that do not count."""
        self.num_trajectories = 0
        self.num_turns = 0
        self.num_tokens = 0
        self._superseded: dict[int, int] = {}
        """Row that took the place of a row."""
        self._lost: set[int] = set()
        """Rows that are skipped since their content is damaged."""

    @classmethod
    def read(cls, file: LogFile, damaged: Damaged) -> EpisodeIndex:
        """Return what is in a log.

        Args:
            file: Its file.
            damaged: ``"skip"`` reads all contents, warns of each that is damaged, and leaves its
                row out; ``"raise"`` reads none.

        Raises:
            DamagedLogError: If the table ``episodes`` is not as it was written.
        """
        index, state, replaced = cls(), file.start, list[int]()
        faults = list[DamagedLogError]()
        for entries in file.entries(0, file.state.num_episodes):
            state = state.extended(entries)
            for entry, row in file.rows(entries if damaged == "skip" else ()):
                if isinstance(row, DamagedLogError):
                    index._lost.add(entry.number)
                    faults.append(row)
            good = [entry for entry in entries if entry.number not in index._lost]
            replaced += [old for entry in good if (old := index.add(entry)) is not None]
            index.num_rows = state.num_episodes
        if state != file.state:
            raise DamagedLogError(f"{file.path} is damaged: its rows have another checksum")
        for fault in faults:
            warnings.warn(f"1 episode skipped: {fault}", stacklevel=4)
        for number in replaced:
            for (entry,) in file.entries(number, number + 1):
                index._count(entry, -1)
        return index

    def add(self, entry: Entry) -> int | None:
        """Add a row behind the others; return the row of a success that it takes the place of."""
        name, number = entry.text, entry.number
        old = self.finished.get(name)
        if old is not None and entry.failed:
            self._superseded[number] = number
        elif old is not None:
            self._superseded[old] = number
            self.finished[name] = number
        else:
            if name in self.failed:
                self._superseded[self.failed[name]] = number
            if entry.failed:
                self.failed[name] = number
            else:
                self.finished[name] = number  # before it leaves the others: it is always in one
                self.failed.pop(name, None)
        self._count(entry, 1)
        self.num_rows = number + 1
        return None if entry.failed else old

    def lose(self, entry: Entry) -> None:
        """Forget a row whose content is damaged."""
        for names in (self.finished, self.failed):
            if names.get(entry.text) == entry.number:
                del names[entry.text]
        self._lost.add(entry.number)
        self._count(entry, -1)

    def counts(self, number: int, num_rows: int) -> bool:
        """Tell whether a row counts among the first ``num_rows`` of the log."""
        return number not in self._lost and self._superseded.get(number, num_rows) >= num_rows

    def _count(self, entry: Entry, sign: int) -> None:
        self.num_trajectories += sign * entry.num_trajectories
        self.num_turns += sign * entry.num_turns
        self.num_tokens += sign * entry.num_tokens


def _is_entry(row: Sequence[Any]) -> bool:
    _, name, *numbers = row
    try:
        decoded_text(name)
    except (AttributeError, UnicodeDecodeError):
        return False
    return all(type(number) is int for number in numbers)


def _insert(db: sqlite3.Connection, episodes: Sequence[tuple[Entry, bytes]]) -> None:
    """Add rows of one session."""
    session = episodes[0][0].session
    contents = [(entry.number, content) for entry, content in episodes]
    db.executemany(f"INSERT INTO contents_{session} VALUES (?, ?)", contents)
    places = ", ".join("?" * len(Entry._fields))
    db.executemany(f"INSERT INTO episodes VALUES ({places})", [entry for entry, _ in episodes])


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


def _described(fields: Sequence[TokenField]) -> bytes:
    """Return what a new log says of itself."""
    described = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "log": uuid.uuid4().hex,
        "fields": [field.as_json() for field in fields],
        "columns": {name: dtype.str for name, dtype in COLUMNS.items()},
    }
    return json.dumps(described).encode()


def _check_version(path: Path, version: Any, described: Any) -> None:
    """Raise unless this release wrote the log, or an earlier one in the same form."""
    try:
        told = json.loads(described)["schema_version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedLogError(f"{path} does not say what it holds: {error!r}") from error
    if version != told:
        raise DamagedLogError(f"{path} is damaged: its versions are {version} and {told!r}")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version}, this release reads version {SCHEMA_VERSION}"
        )


def declared_fields(path: Path, described: bytes) -> tuple[TokenField, ...]:
    """Return the extra fields of a log, from what it says of itself."""
    try:
        told = json.loads(described)
        if told["format"] != FORMAT:
            raise ValueError(f"its format is {told['format']!r}")
        return check_fields(TokenField.from_json(field) for field in told["fields"])
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise DamagedLogError(f"{path} does not say what it holds: {error}") from error


def _check_journal(path: Path) -> None:
    """Raise for a journal that names a second one: SQLite would delete the file of that name.

    No log has such a journal, but a hostile one might.
    """
    with suppress(OSError), path.open("rb") as file:
        file.seek(-len(_JOURNAL_MAGIC), os.SEEK_END)
        if file.read() == _JOURNAL_MAGIC:
            raise DamagedLogError(f"{path} is no journal of a log: it names a super-journal")


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as `OSError`, where the system failed, or as `DamagedLogError`."""
    import sqlite3

    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter of a message's own bytes
        code = getattr(error, "sqlite_errorcode", 0)
        if code == _READONLY_ROLLBACK:
            said = "its writer died in a transaction: open it once as a user who may write it"
            raise OSError(errno.EACCES, said, str(path)) from error
        if (number := _SYSTEM_ERRORS.get(code & 0xFF)) is not None:
            raise OSError(number, f"{os.strerror(number)} ({error})", str(path)) from error
        raise DamagedLogError(f"{path} is damaged: {str(error)!a}") from error
