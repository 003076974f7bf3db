"""Videos in tar archives, read where they lie."""

import io
import tarfile
from pathlib import Path

import pytest
from helpers.archives import pack
from helpers.media_files import write_video

from stella.data.archives import members
from stella.data.archives.members import Listing, is_tar, list_videos, readable
from stella.errors import ClipError
from stella.media.decode import Plan, decode

FILES = {f"in/{name}.mp4": name.encode() * 300 for name in "abc"}


def bytes_of(archive: Path, listing: Listing) -> dict[str, bytes]:
    data = archive.read_bytes()
    return {name: data[place.start : place.start + place.size] for name, place in listing.videos.items()}


def test_only_videos_are_listed_and_no_name_leads_out(tmp_path: Path) -> None:
    names = ("./in/a.mp4", "/abs/b.MKV", "../../c.webm", "notes.txt", "in/.d.mp4")
    archive = pack(tmp_path / "x.tar", {name: name.encode() for name in names})
    with tarfile.open(archive, "a") as tar:
        link = tarfile.TarInfo("link.mp4")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        again = tarfile.TarInfo("in/a.mp4")
        again.size = 5
        tar.addfile(again, io.BytesIO(b"later"))
    listing = list_videos(archive)
    assert listing.whole
    assert bytes_of(archive, listing) == {"in/a.mp4": b"later", "abs/b.MKV": b"/abs/b.MKV", "c.webm": b"../../c.webm"}
    assert is_tar("00000.tar") and not any(map(is_tar, ("shard-000001.tar", "x.tar.gz", "tar", "x.mp4")))


def test_of_an_archive_that_is_being_written_whole_videos_are_listed(tmp_path: Path) -> None:
    data = pack(tmp_path / "whole.tar", FILES).read_bytes()
    counts = []
    for size in range(0, len(data), 100):
        (archive := tmp_path / f"{size}.tar").write_bytes(data[:size])
        listing = list_videos(archive)
        found = bytes_of(archive, listing)
        assert found.items() <= FILES.items() and (
            not listing.whole or set(found) in ({*list(FILES)[:n]} for n in (1, 2, 3))
        )
        counts.append(len(found))
    assert counts == sorted(counts) and {*counts} == {0, 1, 2, 3}


def test_damage_is_told_and_ends_the_list(tmp_path: Path) -> None:
    archive = pack(tmp_path / "x.tar", FILES)
    data = bytearray(archive.read_bytes())
    data[1024:1536] = b"?" * 512  # the second header
    archive.write_bytes(data)
    listing = list_videos(archive)
    assert not listing.whole and bytes_of(archive, listing) == {"in/a.mp4": FILES["in/a.mp4"]}


def test_an_archive_that_grew_is_listed_again(tmp_path: Path) -> None:
    archive = pack(tmp_path / "x.tar", {"a.mp4": b"a"})
    assert set(list_videos(archive).videos) == {"a.mp4"}
    with tarfile.open(archive, "a") as tar:
        tar.addfile(tarfile.TarInfo("b.mp4"))
    assert set(list_videos(archive).videos) == {"a.mp4", "b.mp4"}


def test_a_video_in_an_archive_decodes_as_its_file_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    video, plan = write_video(tmp_path / "film.mp4"), Plan(duration=1.0, frames=4, size=48)
    archive = pack(tmp_path / "x.tar", {"in/film.mp4": video.read_bytes(), "in/bad.mp4": b"nothing"})
    with readable(video) as path:
        assert path == video
    with readable(archive / "in" / "film.mp4") as path:
        clip = decode(path, plan)
    whole = decode(video, plan)
    assert clip.video.equal(whole.video) and clip.audio.equal(whole.audio)
    for name, reason in (("bad", "not a video"), ("none", "missing file")):
        with pytest.raises(ClipError) as error, readable(archive / "in" / f"{name}.mp4") as path:
            decode(path, plan)
        assert str(error.value).startswith(str(archive / "in" / f"{name}.mp4")), reason
    monkeypatch.setattr(members, "MOST_BYTES", 100)
    with pytest.raises(ClipError, match="too large"), readable(archive / "in" / "film.mp4"):
        pass
    with pytest.raises(ClipError, match="missing file"), readable(tmp_path / "gone.tar" / "film.mp4") as path:
        decode(path, plan)
