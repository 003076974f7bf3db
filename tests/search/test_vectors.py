"""Shards of vectors, and what readers keep of them."""

from pathlib import Path

import pytest
import torch
from helpers.fake_model import FakeModel

from stella.search.index import Index


def made(root: Path, *names: str) -> Index:
    """An index at `root` of files that hold their names."""
    source = root.with_name(f"{root.name}-source")
    source.mkdir()
    for name in names:
        (source / f"{name}.mp4").write_text(name)
    index = Index(root)
    index.update(source, model=FakeModel())
    return index


@pytest.mark.parametrize("faiss", [False, True])
def test_an_index_that_is_replaced_answers_with_the_new_vectors(tmp_path: Path, faiss: bool) -> None:
    """Its shards are numbered from 1 again, and its version may be the same."""
    if faiss:
        pytest.importorskip("faiss")
    running, other = made(tmp_path / "index", "aa", "bb"), made(tmp_path / "other", "cc", "dd", "eee")
    if faiss:
        running.build_ivf()
        other.build_ivf()
    query = torch.ones(8)
    expected = [(hit.path, hit.score) for hit in other.search(query, faiss=faiss).hits]
    before = running.search(query, faiss=faiss)
    assert before.exact is not faiss and [(hit.path, hit.score) for hit in before.hits] != expected
    (tmp_path / "index").rename(tmp_path / "old")
    (tmp_path / "other").rename(tmp_path / "index")
    found = running.search(query, faiss=faiss)
    assert found.exact is not faiss and [(hit.path, hit.score) for hit in found.hits] == expected
