"""What counts as new."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.archives import pack
from helpers.learning import packed
from helpers.media_files import write_video

from stella.data import workers as pool
from stella.data.archives.members import Place
from stella.data.prepare import prepare
from stella.data.skipped import Skipped
from stella.errors import ClipError
from stella.files import write_json
from stella.learn import items, undo
from stella.learn.disks import GoneError, gone
from stella.learn.held import kept
from stella.learn.home import Home, Plan
from stella.learn.items import NOT_THERE, Item, Scanner, Seen, content, opened
from stella.media.inputs import Inputs

INPUTS = Inputs(0.64, 32, 36, 4, None, 64)


def new(root: Path, seen: Seen, scanner: Scanner | None = None) -> list[Item]:
    return [item for item, _ in (scanner or Scanner(INPUTS)).scan(str(root), seen)]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shards(folder: Path) -> None:
    """Four clips."""
    for number in range(4):
        write_video(folder.parent / "videos" / f"{number}.mp4", 1.0, seed=number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "START_METHOD", "fork")
        prepare(folder.parent / "videos", folder, seconds=0.64, size=36, fps=8, workers=1, progress=False)
    shutil.rmtree(folder.parent / "videos")


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "one.mp4", "one")
    write(tmp_path / "two.MKV", "two")
    write(tmp_path / "notes.txt", "no video")
    write(tmp_path / ".hidden.mp4", "hidden")
    seen = Seen()
    items = new(tmp_path, seen)
    assert [item.path for item in items] == ["a/one.mp4", "two.MKV"]
    seen.add(items)
    assert new(tmp_path, seen) == []
    first.rename(tmp_path / "renamed.mp4")
    write(tmp_path / "copy.mp4", "two")
    assert new(tmp_path, seen) == []
    (tmp_path / "two.MKV").touch()
    assert new(tmp_path, seen) == []
    write(tmp_path / "a" / "other.mp4", "other")
    assert [item.path for item in new(tmp_path, seen)] == ["a/other.mp4"]


@pytest.mark.timeout(30)
def test_a_pipe_is_told_of_and_not_waited_for(tmp_path: Path) -> None:
    whole, scanner = write(tmp_path / "a.mp4", "a"), Scanner(INPUTS)
    names = ["archive.tar", "pipe.mp4"]
    for name in names:
        os.mkfifo(tmp_path / name)
    [item] = new(tmp_path, Seen(), scanner)
    said = [f"{tmp_path / name} cannot be read (not a regular file); move it away" for name in names]
    assert item.path == "a.mp4" and sorted(scanner.problems) == said
    whole.unlink()
    os.mkfifo(whole)  # since it was found
    with pytest.raises(ClipError, match="not a regular file"):
        opened([item], INPUTS)[0]
    os.mkfifo(tmp_path / "shard-000000.tar")
    assert new(tmp_path, Seen(), scanner) == [] and "shard-000000.json is missing" in " ".join(scanner.problems)


def test_another_video_under_a_known_path_is_new_with_an_id_of_its_own(tmp_path: Path) -> None:
    """A camera that reuses names."""
    seen, items = Seen(), list[Item]()
    for day in ("monday", "sunday", "friday"):
        file = write(tmp_path / "today.mp4", day)
        [item] = new(tmp_path, seen)
        assert opened([item], INPUTS).location(0) == str(file)
        seen.add([item])
        items.append(item)
        assert new(tmp_path, seen) == []
    assert len({item.id for item in items}) == len({item.recording for item in items}) == 3
    assert items[0].id == str(tmp_path / "today.mp4")
    write(tmp_path / "today.mp4", "monday")
    assert new(tmp_path, seen) == []


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a later process, and in an archive."""
    read: list[str] = []

    def watched(path: Path, place: Place | None = None) -> str:
        read.append(path.name)
        return content(path, place)

    monkeypatch.setattr(items, "content", watched)
    home, scanner = Home(tmp_path / "home"), Scanner(INPUTS)
    home.root.mkdir()
    file, archive = write(tmp_path / "in" / "a.mp4", "a"), pack(tmp_path / "in" / "day.tar", {"b.mp4": b"b"})
    found = new(tmp_path / "in", Seen(), scanner)
    assert scanner.fresh and read == ["a.mp4", "day.tar"]
    home.write_stamps(scanner.stamps)
    later = Scanner(INPUTS, home.read_stamps())
    assert new(tmp_path / "in", Seen(), later) == found and len(read) == 2 and not later.fresh
    os.utime(file, (1, 1))
    os.utime(archive, (1, 1))
    assert new(tmp_path / "in", Seen(), later) == found and len(read) == 4
    home.stamps.write_text("damaged")
    assert home.read_stamps() == {}


def test_a_bad_file_is_new_when_it_has_changed(tmp_path: Path) -> None:
    bad, seen = write(tmp_path / "bad.mp4", "half a fi"), Seen()
    [item] = new(tmp_path, seen)
    seen.add([item], bad=[item])
    assert new(tmp_path, seen) == []
    bad.touch()
    assert new(tmp_path, seen) == []
    bad.write_text("half a film, and the rest")
    [again] = new(tmp_path, seen)
    assert again.id == item.id and again.stamp != item.stamp


def test_a_bad_packed_clip_is_new_when_its_checksum_has_changed_and_was_known(tmp_path: Path) -> None:
    packed(tmp_path, (3,))
    items = new(tmp_path, Seen())
    for text, known in (("", True), (", checksum 00000000", False)):
        bad = [replace(item, stamp=item.stamp.split(",")[0] + text) for item in items]
        seen = Seen()
        seen.add(bad, bad)
        assert new(tmp_path, seen) == ([] if known else items)


def test_long_files_differ_in_their_ends(tmp_path: Path) -> None:
    for name, last in (("a.mp4", "1"), ("b.mp4", "2"), ("c.mp4", "1")):
        write(tmp_path / name, "x" * 200_000 + last)
    stamps = [item.stamp for item in new(tmp_path, Seen())]
    assert stamps[0] == stamps[2] != stamps[1]


def test_videos_in_archives_are_videos(tmp_path: Path) -> None:
    """The same one is known in a folder and in an archive, and an archive by itself and in its folder."""
    long = b"x" * 200_000
    (tmp_path / "loose.mp4").write_bytes(long)
    archive = pack(tmp_path / "in" / "day.tar", {"a.mp4": b"a", "b/c.mp4": long, "notes.txt": b""})
    seen = Seen()
    [loose] = [item for item in new(tmp_path, seen) if item.path == "loose.mp4"]
    seen.add([loose])
    [item] = new(tmp_path / "in", seen)
    assert (item.path, item.recording, item.clip) == ("day.tar/a.mp4", "day.tar/a.mp4", "")
    [alone] = new(archive, seen)
    assert (alone.root, alone.path, alone.id, alone.stamp) == (str(archive), "a.mp4", item.id, item.stamp)
    scanner = Scanner(INPUTS)
    assert new(archive, seen, scanner) == [alone] and not scanner.problems
    seen.add([alone])
    assert new(tmp_path, seen) == new(archive, seen, scanner) == []
    pack(archive, {"a.mp4": b"changed", "d.mp4": b"d"})
    changed, later = new(archive, seen, scanner)
    assert (changed.path, later.path) == ("a.mp4", "d.mp4") and changed.id != alone.id and not scanner.problems
    pack(archive, {"d.mp4": b"d", "e.mp4": long}, cut=10_500)
    assert new(archive, seen, scanner) == [later]
    assert "damaged or not whole yet; videos found in it: 1" in scanner.problems[0]


def test_compressed_archives_are_told_of(tmp_path: Path) -> None:
    pack(tmp_path / "day.tar.gz", {"a.mp4": b"a"})
    scanner = Scanner(INPUTS)
    assert new(tmp_path, Seen(), scanner) == []
    assert f"stella prepare {tmp_path}/day.tar.gz SHARDS" in scanner.problems[0]


def test_folders_of_packed_clips_are_found_below(tmp_path: Path) -> None:
    packed(tmp_path / "in", (3, 4))
    packed(tmp_path / "in" / "half.tmp", (5,))
    write(tmp_path / "in" / "broken" / "clips.json", "{}")
    scanner = Scanner(INPUTS)
    items = new(tmp_path, Seen(), scanner)
    assert [item.path for item in items] == ["in/0"] * 3 + ["in/1"] * 4
    assert len(scanner.problems) == 1 and "broken" in scanner.problems[0]
    some = [items[5], items[0]]
    assert [clip.id for clip in opened(some, INPUTS)] == ["1/2", "0/0"]  # type: ignore[attr-defined]
    wrong = Scanner(replace(INPUTS, pixels=64))
    assert new(tmp_path / "in" / "0", Seen(), wrong) == []
    assert "was packed for 32 pixels" in wrong.problems[0] and "takes 64 pixels" in wrong.problems[0]


@pytest.mark.parametrize("kind", ["shards", "packed"])
def test_clips_are_known_under_every_spelling_of_their_folder_and_in_copies(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in" / "clips"
    if kind == "packed":
        packed(tmp_path / "in", (3,))
        (tmp_path / "in" / "0").rename(folder)
    else:
        shards(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "in" / "inner").symlink_to(folder)
    spellings = ["in/clips", "in", str(folder), "in/../in/clips", "link", str(tmp_path / "link")]
    for first in spellings:
        known = new(Path(first), Seen())
        assert len(known) >= 3 and {item.root for item in known} == {str(Path(first).resolve())}
        seen, old = Seen(), Seen()
        seen.add(known)
        root = str(Path(first).absolute())  # as earlier versions had it
        old.add(replace(item, root=root, stamp="") for item in known)
        for other in spellings:
            assert new(Path(other), seen) == new(Path(other), old) == []
    folder.rename(tmp_path / "moved")
    assert new(tmp_path / "moved", seen) == [] and new(tmp_path / "moved", old) != []


def test_a_damaged_shard_that_is_restored_is_new(tmp_path: Path) -> None:
    shards(tmp_path)
    whole, seen = new(tmp_path, Seen()), Seen()
    [shard] = tmp_path.glob("*.tar")
    data = shard.read_bytes()
    shard.write_bytes(bytes(len(data)))
    damaged = new(tmp_path, seen)
    seen.add(damaged, damaged)
    assert len(damaged) == len(whole) and new(tmp_path, seen) == []
    shard.write_bytes(data)
    assert new(tmp_path, seen) == whole


def test_clips_that_were_deleted_are_bad_and_those_of_a_disk_that_is_gone_are_not(tmp_path: Path) -> None:
    [source] = packed(tmp_path / "in", (3,))
    items = new(tmp_path / "in", Seen())
    Path(source, "clips.json").unlink()
    write(tmp_path / "in" / "something.txt", "else")
    with pytest.raises(ClipError, match="not there any more"):
        opened(items, INPUTS)[0]
    root = tmp_path / "mount"
    write(root / "film.mp4", "film")
    [film] = new(root, Seen())
    on_another_disk = [replace(film, device=film.device + 1)]
    there, mounted = opened([film], INPUTS), opened(on_another_disk, INPUTS)
    (root / "film.mp4").unlink()
    assert gone(str(root)) and gone(str(tmp_path / "never.tar")) and not gone(str(tmp_path / "in" / "something.txt"))
    with pytest.raises(ClipError, match="missing file"):
        there[0]
    with pytest.raises(GoneError, match="mount is gone"):
        mounted[0]
    with pytest.raises(GoneError, match="mount is gone"):
        opened(on_another_disk, INPUTS)
    assert len(opened([film], INPUTS)) == 1
    root.rmdir()
    with pytest.raises(GoneError, match="mount is gone"):
        there[0]


def test_what_could_not_be_used_in_a_dropped_round_is_tried_again(tmp_path: Path) -> None:
    """A bad clip when it has changed, one that moved at once; whatever rounds came before it. The others are seen."""
    items = [Item("/in", "", f"{name}.mp4", name, f"{name} 1") for name in ("old", "learnt", "moved", "bad", "lost")]
    home = Home(tmp_path)
    home.round(1).write_plan(Plan(1, "", 1, items[:1], []))
    home.link(1)
    home.next.write_plan(Plan(1, "", 3, items[1:4], items[4:]))
    write_json(home.next.record, {"kept_apart": True})
    skipped = Skipped(home.next.skipped)
    for name, reason in ((2, "missing file"), (3, "damaged file"), (items[4].id, NOT_THERE)):
        skipped.add(name, ClipError("film", reason, "look"))
    undo.drop(home)
    home.round(1).write_plan(Plan(1, "", 2, [items[0], replace(items[0], clip="more.mp4")], []))  # as after a rollback
    seen = Home(tmp_path).seen()
    assert [item.recording for item in items if item in seen] == ["old", "learnt", "bad"]
    assert replace(items[3], stamp="mended") not in seen and replace(items[1], stamp="changed") in seen


def test_a_clip_that_moved_before_it_was_read_is_new(tmp_path: Path) -> None:
    """A bad one is not, until its content changes; also if it was to be set aside."""
    items = [Item("/in", f"{name}.mp4", "", name, name) for name in ("learnt", "moved", "bad", "aside", "lost")]
    home = Home(tmp_path)
    home.round(1).write_plan(Plan(1, "", 3, items[:3], items[3:]))
    home.link(1)
    skipped = Skipped(home.round(1).skipped)
    for name, reason in ((1, "missing file"), (2, "damaged file"), (items[4].id, NOT_THERE)):
        skipped.add(name, ClipError("film", reason, "look"))
    assert [item.recording for item in items if item in home.seen()] == ["learnt", "bad", "aside"]
    [again] = kept([home.plan(1), Plan(1, "", 0, [], [items[4]])], 9)[1:]
    assert again.round == 2 and again.item == items[4]  # it is in one round only


@pytest.mark.parametrize("side", ["train", "held"])
@pytest.mark.parametrize("reason", ["time limit", "unreadable file"])
def test_a_clip_that_may_have_failed_for_its_disk_is_tried_in_three_rounds(
    reason: str, side: str, tmp_path: Path
) -> None:
    """Also a copy of it, and if one of the rounds was dropped; then it is bad until its content changes."""
    item = Item("/in", "slow.mp4", "", "slow.mp4", "slow")
    copy, home = replace(item, root="/elsewhere"), Home(tmp_path)
    plan = Plan(1, "", 1, [item], []) if side == "train" else Plan(1, "", 0, [], [item])
    for number in (1, 2, 3):
        assert item not in home.seen() and copy not in home.seen()
        home.next.write_plan(plan)
        assert item in home.seen()
        Skipped(home.next.skipped).add(home.current if side == "train" else item.id, ClipError("film", reason, "look"))
        write_json(home.next.record, {"kept_apart": False})
        undo.drop(home) if number == 2 else home.link(home.current + 1)
    assert item in home.seen() and copy in home.seen()
    assert replace(item, stamp="changed") not in home.seen()


@pytest.mark.parametrize("reason", ["no permission", "broken link"])
def test_a_clip_that_was_out_of_reach_is_new(reason: str, tmp_path: Path) -> None:
    item, home = Item("/in", "film.mp4", "", "film.mp4", "film"), Home(tmp_path)
    for _ in range(4):
        home.next.write_plan(Plan(1, "", 1, [item], []))
        Skipped(home.next.skipped).add(home.current, ClipError("film", reason, "look"))
        home.link(home.current + 1)
        assert item not in home.seen()


def test_a_file_that_may_not_be_read_is_told_of_and_no_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was read before: it would be tried in every round."""
    write(tmp_path / "a.mp4", "a")
    scanner = Scanner(INPUTS)
    assert len(new(tmp_path, Seen(), scanner)) == 1
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert new(tmp_path, Seen(), scanner) == []
    assert scanner.problems == [f"{tmp_path}/a.mp4 cannot be read (Permission denied); correct its permissions"]


def test_only_permissions_are_to_be_corrected(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").symlink_to(tmp_path / "gone.mp4")
    scanner = Scanner(INPUTS)
    assert new(tmp_path, Seen(), scanner) == []
    says = f"{tmp_path}/a.mp4 cannot be read (No such file or directory); check the disk or mount"
    assert scanner.problems == [says]
