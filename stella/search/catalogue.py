"""The catalogue of an index: which vector is which moment of which file. A SQLite database in WAL mode.

What counts is what the catalogue says. A vector exists once the transaction that names it is committed, which happens
after its bytes were forced to the disk; bytes that no row names are ignored and overwritten. A pair (shard, row) keeps
its meaning for ever, so a reader's snapshot stays right while a writer goes on.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stella.errors import StellaError
from stella.files import lock

Modality = Literal["video", "audio"]
MODALITIES: tuple[Modality, ...] = ("video", "audio")
FORMAT = 1
FILES = ("catalogue.sqlite", "catalogue.sqlite-wal", "catalogue.sqlite-shm", "lock")
SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value NUMERIC) WITHOUT ROWID;
INSERT INTO meta VALUES ('version', 0);                  -- counts changes: derived data say which one they belong to
INSERT INTO meta VALUES ('serving', NULL);               -- the model whose vectors answer
INSERT INTO meta VALUES ('target', NULL);                -- the model that a refresh is changing to
INSERT INTO meta VALUES ('overlap', NULL);               -- share of a window that the next one repeats
CREATE TABLE models (id INTEGER PRIMARY KEY, fingerprint TEXT UNIQUE NOT NULL, dim INTEGER NOT NULL, origin BLOB);
CREATE TABLE sources (id INTEGER PRIMARY KEY, root BLOB UNIQUE NOT NULL);
CREATE TABLE files (
    id INTEGER PRIMARY KEY, source INTEGER NOT NULL REFERENCES sources, path BLOB NOT NULL,  -- below the source's root
    size INTEGER NOT NULL, mtime INTEGER NOT NULL, ctime INTEGER NOT NULL, hash BLOB, label BLOB,
    state TEXT NOT NULL CHECK (state IN ('ok', 'bad', 'gone')), reason TEXT, UNIQUE (source, path)
);
CREATE TABLE shards (                                    -- a shard has one model, one modality and one writer
    id INTEGER PRIMARY KEY AUTOINCREMENT, model INTEGER NOT NULL REFERENCES models,
    modality TEXT NOT NULL CHECK (modality IN ('video', 'audio')), rows INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE windows (
    shard INTEGER NOT NULL REFERENCES shards, row INTEGER NOT NULL, file INTEGER NOT NULL REFERENCES files,
    start REAL NOT NULL, end REAL NOT NULL, PRIMARY KEY (shard, row)
) WITHOUT ROWID;
CREATE INDEX windows_of_file ON windows (file);
PRAGMA user_version = {FORMAT};
"""


@dataclass(frozen=True)
class ModelRow:
    id: int
    fingerprint: str
    dim: int
    origin: str  # what `stella.load` takes; empty: unknown


@dataclass(frozen=True)
class ShardRow:
    id: int
    rows: int  # that are committed


class Catalogue:
    """One connection. A snapshot or a change is a transaction; only the holder of the index's lock makes changes."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "catalogue.sqlite"
        if root.is_file():
            raise StellaError(f"{root} is a file, not an index; name the folder of an index first, then the rest")
        if not self.path.is_file():
            fill = f"{root} INDEX" if root.is_dir() and any(root.iterdir()) else f"SRC {root}"
            raise StellaError(f"{root} holds no index; make one with: stella index {fill}")
        try:
            self.db, found = self._connected()
        except sqlite3.DatabaseError as error:
            raise _unreadable(self.path, error) from error
        if found != FORMAT:
            self.db.close()
            raise StellaError(
                f"{root} is an index of format {found}, and format {FORMAT} is needed; index again into another folder"
            )

    def _connected(self) -> tuple[sqlite3.Connection, int]:
        """A connection, and the format of the index.

        SQLite shares memory by a file, which needs the right to write and room on the disk. Without either, an index
        whose log is empty is read as it is: nobody else writes there.
        """
        if not os.access(self.root, os.W_OK) and not self._log.exists():
            return _connected(self.path, frozen=True)
        try:
            return _connected(self.path, frozen=False)
        except sqlite3.OperationalError as error:
            if _kind(error) == sqlite3.SQLITE_BUSY or (self._log.exists() and self._log.stat().st_size):
                raise
            return _connected(self.path, frozen=True)

    @property
    def _log(self) -> Path:
        return self.path.with_name("catalogue.sqlite-wal")

    @staticmethod
    def create(root: Path) -> None:
        """Make an empty index unless there is one. A file, and a folder that holds anything else, are refused."""
        if root.is_file():
            raise StellaError(f"{root} is a file; name a new folder for the index last: stella index SRC INDEX")
        if root.is_dir() and not (root / "catalogue.sqlite").exists():
            others = [path.name for path in root.iterdir() if path.name not in (*FILES, "vectors")]
            if others:
                raise StellaError(
                    f"{root} is no index and holds {others[0]!r}; name a new folder after it: stella index SRC INDEX"
                )
        (root / "vectors").mkdir(parents=True, exist_ok=True)
        path = root / "catalogue.sqlite"
        with lock(root / "lock"), _explained(path), closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            tables, version = (
                db.execute(q).fetchone()[0] for q in ("SELECT count(*) FROM sqlite_master", "PRAGMA user_version")
            )
            if not tables and not version:
                db.executescript(f"BEGIN; {SCHEMA} COMMIT;")

    @staticmethod
    def remove(root: Path) -> None:
        """Remove an index that holds nothing; for the holder of its lock."""
        shutil.rmtree(root / "vectors")
        for name in FILES:
            (root / name).unlink(missing_ok=True)
        with suppress(OSError):  # somebody has put something there
            root.rmdir()

    def close(self) -> None:
        self.db.close()

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """A transaction for reading: everything in the block is seen as of its first query."""
        self.db.execute("BEGIN")
        try:
            yield self.db
        finally:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction for writing. It is on the disk when the block ends, or it never happened."""
        with _explained(self.path):
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield self.db
                self.db.execute("UPDATE meta SET value = value + 1 WHERE key = 'version'")
                self.db.execute("COMMIT")
            finally:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")

    def meta(self, key: str) -> Any:
        return self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0]

    def set_meta(self, key: str, value: float | None) -> None:
        self.db.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))

    def model(self, key: str) -> ModelRow | None:
        """The model that `meta` names `key`: serving or target."""
        row = self.db.execute(
            "SELECT id, fingerprint, dim, origin FROM models WHERE id = (SELECT value FROM meta WHERE key = ?)", (key,)
        ).fetchone()
        return ModelRow(row[0], row[1], row[2], os.fsdecode(row[3] or b"")) if row else None

    def answering(self) -> list[ModelRow]:
        """The models whose vectors answer: the serving one, then older states of the same learner, the oldest last."""
        serving = self.model("serving")
        rows = self.db.execute(
            "SELECT id, fingerprint, dim, origin FROM models WHERE id NOT IN "
            "(SELECT value FROM meta WHERE key IN ('serving', 'target') AND value) ORDER BY id DESC"
        )
        older = [ModelRow(row[0], row[1], row[2], os.fsdecode(row[3] or b"")) for row in rows]
        return [serving, *older] if serving else []

    def add_model(self, fingerprint: str, dim: int, origin: str) -> int:
        """The id of a model, known or new. What it was loaded from is kept up to date."""
        self.db.execute(
            "INSERT INTO models (fingerprint, dim, origin) VALUES (?1, ?2, ?3) "
            "ON CONFLICT (fingerprint) DO UPDATE SET origin = CASE ?3 WHEN x'' THEN origin ELSE ?3 END",
            (fingerprint, dim, os.fsencode(origin)),
        )
        found: int = self.db.execute("SELECT id FROM models WHERE fingerprint = ?", (fingerprint,)).fetchone()[0]
        return found

    def move_models(self, origin: str) -> None:
        """Remember where the learner is now whose states made all vectors."""
        ids = [(os.fsencode(origin), row.id) for row in self.answering() if row.origin != origin]
        if ids:
            with self.change() as db:
                db.executemany("UPDATE models SET origin = ? WHERE id = ?", ids)

    def shards(self, model: int, modality: Modality) -> list[ShardRow]:
        query = "SELECT id, rows FROM shards WHERE model = ? AND modality = ? ORDER BY id"
        return [ShardRow(*row) for row in self.db.execute(query, (model, modality))]


@contextmanager
def opened(root: Path) -> Iterator[Catalogue]:
    """A catalogue that is closed when the block ends. SQLite's errors in it become a sentence for the user."""
    with closing(Catalogue(root)) as catalogue:
        try:
            yield catalogue
        except sqlite3.DatabaseError as error:
            raise _unreadable(catalogue.path, error) from error


def _connected(path: Path, frozen: bool) -> tuple[sqlite3.Connection, int]:
    """A connection, and the format of the index; `frozen`: without files of its own beside it."""
    place = f"{path.absolute().as_uri()}?immutable=1" if frozen else path
    db = sqlite3.connect(place, timeout=60, isolation_level=None, uri=frozen)
    try:
        (found,) = db.execute("PRAGMA user_version").fetchone()
        db.execute("PRAGMA synchronous = FULL")
    except BaseException:
        db.close()
        raise
    return db, found


def _kind(error: sqlite3.DatabaseError) -> int:
    """SQLite's primary result code."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_IOERR) & 0xFF


def _unreadable(path: Path, error: sqlite3.DatabaseError) -> StellaError:
    # "no such table" is an OperationalError too, of kind SQLITE_ERROR
    if isinstance(error, sqlite3.OperationalError) and _kind(error) != sqlite3.SQLITE_ERROR:
        return StellaError(
            f"{path} cannot be read ({error}); check the free space and the permissions of its disk, then try again"
        )
    return StellaError(f"{path} cannot be read ({error}); restore it, or index again into another folder")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """SQLite's errors while writing as a sentence for the user."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StellaError(
            f"{path} cannot be written ({error}); nothing committed is lost: check the free space and the permissions "
            "of its disk, then run again"
        ) from error
    except sqlite3.DatabaseError as error:
        raise _unreadable(path, error) from error
