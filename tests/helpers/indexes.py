"""What an index holds, for comparison."""

from contextlib import closing
from pathlib import Path

from stella.search.catalogue import Catalogue
from stella.search.vectors import shard_path

Content = list[tuple[bytes, str, str, float, float, bytes]]


def content(root: Path) -> Content:
    """(path, model, modality, start, end, vector's bytes) of every window, sorted, by a reader of its own."""
    found = []
    with closing(Catalogue(root)) as catalogue:
        rows = catalogue.db.execute(
            "SELECT files.path, fingerprint, dim, modality, start, end, shard, row, shards.rows FROM windows "
            "JOIN files ON files.id = file JOIN shards ON shards.id = shard JOIN models ON models.id = model"
        ).fetchall()
    for path, model, dim, modality, start, end, shard, row, count in rows:
        assert row < count
        data = shard_path(root, shard).read_bytes()[2 * dim * row : 2 * dim * (row + 1)]
        assert len(data) == 2 * dim
        found.append((path, model, modality, start, end, data))
    return sorted(found)
