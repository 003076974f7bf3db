"""Ranges, and which files may be opened."""

import os
import random
from pathlib import Path

import pytest
import torch

from stella.search.hits import Hit
from stella.search.index import Moment
from stella.search.query import Query
from stella.serve.answers import HttpError, place_of
from stella.serve.media import body, open_media, pieces

DATA = bytes(random.Random(1).randbytes(1000))


def naive(wanted: str | None) -> tuple[int, bytes]:
    """RFC 9110, 14.1.2, for one range."""
    if wanted is None or not wanted.startswith("bytes=") or "," in wanted:
        return 200, DATA
    first, dash, last = wanted.removeprefix("bytes=").partition("-")
    if not dash or not (first + last).isdigit() or (first and last and int(last) < int(first)):
        return 200, DATA
    chosen = DATA[int(first) : int(last) + 1 if last else None] if first else DATA[-int(last) :] if int(last) else b""
    return (206, chosen) if chosen else (416, b"")


@pytest.mark.parametrize(
    "wanted",
    [
        *(None, "bytes=0-", "bytes=0-0", "bytes=0-999", "bytes=5-2000", "bytes=999-", "bytes=-1", "bytes=-5000"),
        *(
            "bytes=1000-",
            "bytes=5000-6000",
            "bytes=-0",
            "bytes=7-3",
            "bytes=-",
            "bytes=a-b",
            "items=0-1",
            "bytes=0-1,4-5",
        ),
        *("bytes=--1", "bytes=0-1-2", "bytes=99999999999999999999999-", "bytes=٣-", ""),
    ],
)
def test_ranges_are_as_the_standard_says(wanted: str | None, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    answer = body(len(DATA), "video/mp4", '"tag"', wanted)
    found = b"".join(pieces((tmp_path / "file").open("rb"), answer.first, answer.count))
    if wanted in ("bytes=99999999999999999999999-", "bytes=٣-"):  # no number of ours: the whole file
        assert (answer.status, found) == (200, DATA)
        return
    assert (answer.status, found) == naive(wanted)
    assert answer.headers["content-length"] == str(len(found))
    if answer.status == 206:
        first, last = answer.first, answer.first + len(found) - 1
        assert answer.headers["content-range"] == f"bytes {first}-{last}/1000"
    if answer.status == 416:
        assert answer.headers["content-range"] == "bytes */1000"


def test_a_range_of_an_older_file_is_the_whole_file() -> None:
    assert body(1000, "video/mp4", '"new"', "bytes=5-9", '"old"').status == 200
    assert body(1000, "video/mp4", '"new"', "bytes=5-9", '"new"').status == 206


def moment(file: Path) -> Moment:
    status = file.stat()
    hit = Hit(file.name, file.parent, None, "video", 0.0, 1.0, 1.0, (1, 0))
    return Moment(hit, Query(torch.ones(2)), status.st_size, status.st_mtime_ns)


def test_only_a_file_as_it_was_indexed_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "a.mp4"
    file.write_bytes(DATA)
    known = moment(file)
    opened, kind = open_media(known)
    assert (b"".join(pieces(opened, 0, 1000)), kind, opened.closed) == (DATA, "video/mp4", True)
    secret = tmp_path / "secret"
    secret.write_bytes(DATA[::-1])
    file.unlink()
    with pytest.raises(HttpError, match="cannot be opened any more"):
        open_media(known)
    file.symlink_to(secret)  # somebody else's file in its place
    with pytest.raises(HttpError, match="has changed since it was indexed"):
        open_media(known)
    file.unlink()
    os.mkfifo(file)  # opening it would wait for a writer
    with pytest.raises(HttpError, match="has changed since it was indexed"):
        open_media(known)


@pytest.mark.parametrize(
    "name", ["", "1", "1-", "-1-2", "a-b", "1-2-3", "1-2\n", "../1-2", "1e3-2", "9" * 30 + "-1", "٣-٤"]
)
def test_what_names_no_moment_is_refused(name: str) -> None:
    with pytest.raises(HttpError, match="no such moment"):
        place_of(name)
