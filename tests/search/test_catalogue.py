"""The catalogue: damage, and numbers that keep their meaning."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from helpers.disk import fill, own_disk
from helpers.fake_model import FakeModel

from stella.errors import StellaError
from stella.search.catalogue import Catalogue
from stella.search.index import Index


@pytest.fixture
def index(tmp_path: Path) -> Index:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(200):
        (source / f"{number}.mp4").write_text(f"{number}")
    made = Index(tmp_path / "index")
    made.update(source, model=FakeModel())
    return made


def test_a_damaged_catalogue_is_an_error_of_one_sentence(index: Index) -> None:
    file = index.path / "catalogue.sqlite"
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(file.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)  # all but the first page
    file.write_bytes(data)
    for ask in (index.state, index.bad, index.serving, index.compact, lambda: index.search(torch.ones(8))):
        with pytest.raises(
            StellaError, match=r"catalogue.sqlite cannot be read \(.*malformed.*\); restore it, or index"
        ):
            ask()
    for part in (slice(4096, None), slice(0, 100)):  # the header too
        data[part] = b"\xff" * len(data[part])
        file.write_bytes(data)
        with pytest.raises(StellaError, match="cannot be read"):
            index.update(model=FakeModel())


def test_an_index_on_a_full_disk_is_read_and_told_from_a_broken_one(tmp_path: Path) -> None:
    """Nobody has it open, so SQLite must make the file by which readers share memory."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.mp4").write_text("a")
    with own_disk(tmp_path / "disk") as disk:
        index = Index(disk / "index")
        index.update(source, model=FakeModel())
        expected, state = index.search(torch.ones(8)).hits, index.state()
        full = fill(disk)
        for _ in range(2):
            assert index.search(torch.ones(8)).hits == expected and index.state() == state
        (source / "b.mp4").write_text("b")
        with pytest.raises(StellaError, match="cannot be written"):
            index.update(model=FakeModel())
        full.unlink()
        assert index.update(model=FakeModel()).counts.added == 1
        with closing(Catalogue(index.path)) as catalogue:
            with catalogue.change() as db:
                db.execute("UPDATE meta SET value = 0.1 WHERE key = 'overlap'")
            log = {path: path.read_bytes() for path in index.path.glob("catalogue.sqlite*")}
        for path, data in log.items():  # as a kill leaves them
            path.write_bytes(data)
        (index.path / "catalogue.sqlite-shm").unlink()
        fill(disk)
        assert (index.path / "catalogue.sqlite-wal").stat().st_size
        with pytest.raises(
            StellaError, match=r"cannot be read \(.*\); check the free space and the permissions of its disk, then try"
        ):
            index.state()


def test_the_number_of_a_shard_is_never_given_again(index: Index) -> None:
    """A reader may still have the file of the old one mapped, under a snapshot that names it."""
    numbers = []
    for _ in range(2):
        with closing(Catalogue(index.path)) as catalogue, catalogue.change() as db:
            numbers += [db.execute("INSERT INTO shards (model, modality) VALUES (1, 'video')").lastrowid]
            db.execute("DELETE FROM shards WHERE id = ?", (numbers[-1],))
    assert numbers == [3, 4]
