"""The catalogue: damage, and numbers that keep their meaning."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
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


def test_the_number_of_a_shard_is_never_given_again(index: Index) -> None:
    """A reader may still have the file of the old one mapped, under a snapshot that names it."""
    numbers = []
    for _ in range(2):
        with closing(Catalogue(index.path)) as catalogue, catalogue.change() as db:
            numbers += [db.execute("INSERT INTO shards (model, modality) VALUES (1, 'video')").lastrowid]
            db.execute("DELETE FROM shards WHERE id = ?", (numbers[-1],))
    assert numbers == [3, 4]
