"""Clips that are set aside, as they are stored."""

from pathlib import Path

import pytest
from helpers.videos import Videos

from stella.data.skipped import Skipped
from stella.errors import ClipError
from stella.learn.held import HeldClip, HeldOut, store
from stella.learn.items import Item


@pytest.fixture
def clips(tmp_path: Path) -> list[HeldClip]:
    """Six stored clips, of which the third is damaged."""
    source = Videos(6)
    found = [HeldClip(1, Item("videos", f"{i}.mp4", "", f"{i}.mp4", "")) for i in range(len(source))]
    store(source, found, tmp_path, 2.0, Skipped())
    (tmp_path / f"{found[2].key}.tar").write_bytes(b"nothing of a tar")
    return found


def test_a_damaged_clip_is_refused_when_it_is_read(clips: list[HeldClip], tmp_path: Path) -> None:
    held = HeldOut(tmp_path, clips)
    assert len(held) == 6 and held[1].id == clips[1].item.id
    with pytest.raises(ClipError, match="damaged"):
        held[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_disk_refuses_is_the_systems_own_error(workers: int, clips: list[HeldClip], tmp_path: Path) -> None:
    """A full disk is told from a fault of the program by it, whoever reads the clips."""
    with pytest.raises(FileNotFoundError):
        store(Videos(6), clips, tmp_path / "missing", 2.0, Skipped(), workers)


def test_some_of_them_by_key(clips: list[HeldClip], tmp_path: Path) -> None:
    held = HeldOut(tmp_path, clips)
    some = held.only([held.keys[4], held.keys[1]])
    assert some.keys == [held.keys[4], held.keys[1]] and [some[i].id for i in range(2)] == [
        "videos/4.mp4",
        "videos/1.mp4",
    ]
    assert len(held.only([])) == 0
