import faulthandler
import json
import os
import random
import shutil
import signal
import struct
import time
import traceback
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.media_files import write_video
from helpers.processes import alive, wait_for
from typer.testing import CliRunner
from upath import UPath

from stella.cli import app
from stella.data import cut, prepare
from stella.data import workers as pool
from stella.data.folder import Folder
from stella.data.shards import Shards, scan
from stella.errors import StellaError
from stella.files import lock
from stella.media.decode import Plan

SMALL: dict[str, Any] = {"seconds": 1.0, "size": 48, "progress": False}


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers forked from this process start at once and see what a test replaces; `test_stream` uses the real ones."""
    monkeypatch.setattr(pool, "START_METHOD", "fork")


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty-four good videos in three classes, and three that cannot be used."""
    root = tmp_path_factory.mktemp("videos")
    for number in range(24):
        write_video(root / "abc"[number % 3] / f"{number:02d}.mp4", seed=number)
    write_video(root / "mute.mp4", sound=False)
    (root / "text.mp4").write_text("hello")
    (root / "empty.mp4").touch()
    return root


def run(src: Path | str, dst: Path, **more: Any) -> prepare.Summary:
    return prepare.prepare(src, dst, **(SMALL | {"workers": 2} | more))


def forked_run(src: Path, dst: Path, **more: Any) -> int:
    """`run` in a process of its own, for killing; ends with status 0 if it ends well."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run(src, dst, **more)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ids(dst: Path) -> list[str]:
    return [clip["id"] for index in sorted(dst.glob("shard-*.json")) for clip in json.loads(index.read_text())["clips"]]


def listed(dst: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (dst / "skipped.jsonl").read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line["reason"] for line in lines}


def slow_read(log: Path, seconds: float) -> Any:
    """The real `read_cut`, slower and noting each call in a file that all processes append to."""
    real = cut.read_cut

    def read(path: Path, *args: Any, **more: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{path}\n")
        time.sleep(seconds)
        return real(path, *args, **more)

    return read


def test_videos_become_clips_like_those_read_directly(videos: Path, tmp_path: Path) -> None:
    summary = run(videos, tmp_path, shard_clips=8)
    assert (summary.clips, summary.added, sum(summary.skipped.values())) == (24, 24, 3)
    assert summary.skipped["no audio track"] == 1
    shards = list(tmp_path.glob("*.tar"))
    assert summary.bytes == sum(p.stat().st_size for p in shards) and len(shards) > 1
    assert set(listed(tmp_path)) == {"mute.mp4", "text.mp4", "empty.mp4"}
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob("*.tmp"))
    shards, folder = Shards(tmp_path, span=None), Folder(videos, Plan(duration=1.0, size=48, span=None))
    direct = {folder.files[i]: i for i in range(len(folder))}
    assert len(shards) == 24
    for i in (0, 11, 23):
        ours, theirs = shards[i], folder[direct[shards[i].id]]
        assert ours.labels == theirs.labels and ours.labels.name in "abc"
        assert ours.video.shape == theirs.video.shape
        assert (ours.video.float() - theirs.video.float()).abs().mean() < 6
        assert torch.allclose(ours.audio, theirs.audio, atol=1e-4)


@pytest.mark.parametrize("split", [False, True])
def test_another_video_of_the_same_name_is_refused_and_a_copy_is_not(tmp_path: Path, split: bool) -> None:
    """Clips are known by their path below the folder, whatever its name; one of the two would be lost."""
    first, second, dst = tmp_path / "a" / "videos", tmp_path / "b" / "videos", tmp_path / "dst"
    for number, file in enumerate((first / "x.mp4", first / "y.mp4", second / "z.mp4", second / "x.mp4")):
        write_video(file, seed=number)
    run(first, dst, split=split)
    clips = ids(dst)
    same_name = rf"{second}/x\.mp4 has the name of {first}/x\.mp4, whose clips {dst} holds.*; rename it, or prepare"
    for refused in (lambda: run(second, dst, split=split), lambda: prepare.rehearse(second, dst)):
        with pytest.raises(StellaError, match=same_name):
            refused()
    assert ids(dst) == clips
    (second / "x.mp4").rename(second / "new.mp4")
    assert {clip.partition("@")[0] for clip in (run(second, dst, split=split), ids(dst))[1]} == {
        *("x.mp4", "y.mp4", "new.mp4", "z.mp4")
    }
    shutil.copytree(first, tmp_path / "copy")
    assert run(tmp_path / "copy", dst, split=split).added == 0
    first.rename(tmp_path / "moved")
    assert run(tmp_path / "moved", dst, split=split).added == 0


def test_a_second_run_does_nothing_and_new_files_are_added(tmp_path: Path, monkeypatch) -> None:
    src, dst, log = tmp_path / "src", tmp_path / "dst", tmp_path / "log"
    for number in range(3):
        write_video(src / f"{number}.mp4", seed=number)
    (src / "bad.mp4").write_text("hello")
    run(src, dst)
    monkeypatch.setattr(cut, "read_cut", slow_read(log, 0))
    again = run(src, dst)
    assert (again.clips, again.added, again.skipped) == (3, 0, {"not a media file": 1}) and not log.exists()
    write_video(src / "3.mp4")
    assert run(src, dst).added == 1
    assert log.read_text().split() == [str(src / "3.mp4")]
    assert sorted(ids(dst)) == [f"{n}.mp4" for n in range(4)]
    write_video(src / "bad.mp4", seed=9)  # changed: tried again
    last = run(src, dst)
    assert (last.clips, last.skipped, listed(dst)) == (5, {}, {})


def test_it_finishes_and_says_so_when_nothing_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for number in range(30):
        (tmp_path / "src" / f"{number}.mp4").write_text("hello")
    summary = run(tmp_path / "src", tmp_path / "dst")
    assert (summary.clips, summary.skipped) == (0, {"not a media file": 30})
    assert str(summary).startswith("no clip could be used; skipped: 30 not a media file")
    with pytest.raises(StellaError, match="no finished shards"):
        Shards(tmp_path / "dst")


def test_long_videos_are_split_into_consecutive_clips(tmp_path: Path) -> None:
    write_video(tmp_path / "src" / "long.mp4", 4.6)  # red rises by 10 a frame, 8 frames a second
    write_video(tmp_path / "src" / "short.mp4", 0.5)
    (tmp_path / "src" / "bad.mp4").write_text("hello")
    summary = run(tmp_path / "src", tmp_path / "dst", split=True)
    shards = Shards(tmp_path / "dst", frames=1, span=None)
    assert [shards[i].id for i in range(len(shards))] == [f"long.mp4@{k}.000" for k in range(4)] + ["short.mp4@0.000"]
    reds = [float(shards[k].video[0, 0].float().mean()) for k in range(3)]
    assert [b - a for a, b in pairwise(reds)] == pytest.approx([80, 80], abs=8)
    assert summary.skipped == {"not a media file": 1}
    assert run(tmp_path / "src", tmp_path / "dst", split=True).added == 0


@pytest.mark.parametrize(("duration", "clips"), [(10.24, 1), (20.48, 2), (21.0, 2), (22.0, 3), (0.3, 1)])
def test_clips_cover_a_video_and_short_tails_are_left_out(duration: float, clips: int) -> None:
    assert cut.starts(duration, 10.24) == [0.0, 10.24, 20.48][:clips]


def test_clips_that_hang_or_kill_their_worker_are_skipped(videos: Path, tmp_path: Path, monkeypatch) -> None:
    real = cut.read_cut

    def read(path: Path, *args: Any, **more: Any) -> Any:
        if path.name == "03.mp4":
            time.sleep(1000)
        if path.name == "05.mp4":
            faulthandler.disable()  # the crash is meant
            os.kill(os.getpid(), signal.SIGSEGV)
        if path.name == "07.mp4" and not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory is short: tried again
        return real(path, *args, **more)

    monkeypatch.setattr(cut, "read_cut", read)
    dst = tmp_path / "dst"
    summary = run(videos, dst, time_limit=0.7)
    reasons = listed(dst)
    assert summary.clips == 22
    assert reasons["a/03.mp4"] == "time limit" and reasons["c/05.mp4"] == "worker died (-11)"
    assert "b/07.mp4" in ids(dst)
    monkeypatch.setattr(cut, "read_cut", slow_read(tmp_path / "log", 0))
    assert run(videos, dst).added == 0  # and not tried for ever


def test_killed_at_any_moment_it_ends_with_the_same_clips(videos: Path, tmp_path: Path, monkeypatch) -> None:
    """Killed with SIGKILL again and again: nothing is lost, doubled, or done again once it was on disk."""
    whole, dst, log = tmp_path / "whole", tmp_path / "dst", tmp_path / "log"
    run(videos, whole, shard_clips=5)
    monkeypatch.setattr(cut, "read_cut", slow_read(log, 0.05))
    chance = random.Random(0)
    kills = 0
    while kills < 12:
        on_disk = stored(dst)
        log.write_text("")
        child = forked_run(videos, dst, shard_clips=5)
        time.sleep(chance.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        redone = {str(Path(line).relative_to(videos)) for line in log.read_text().split()} & on_disk
        assert not redone
        if status == 0:
            break
        assert os.WIFSIGNALED(status)
        kills += 1
    assert kills >= 8
    monkeypatch.undo()
    monkeypatch.setattr(pool, "START_METHOD", "fork")
    run(videos, dst, shard_clips=5)
    assert Counter(ids(dst)) == Counter(ids(whole)) and len(ids(dst)) == 24
    assert listed(dst) == listed(whole)
    ours, theirs = Shards(dst), Shards(whole)
    for i in range(24):
        assert ours[i].id == theirs[i].id and torch.equal(ours[i].video, theirs[i].video)
    others = {path.name for path in dst.iterdir() if not path.name.startswith("shard-")}
    assert others == {"skipped.jsonl", "prepare.json", "plan.jsonl", ".lock"} and not list(dst.glob("*.part"))


def stored(dst: Path) -> set[str]:
    """The clips that are whole on disk, found without an index."""
    return {entry.id for path in dst.glob("shard-*.tar*") for entry in scan(path)[0]}


def test_workers_do_not_outlive_a_killed_parent(videos: Path, tmp_path: Path, monkeypatch) -> None:
    pids = tmp_path / "pids"

    def read(path: Path, *args: Any, **more: Any) -> Any:
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(1000)

    monkeypatch.setattr(cut, "read_cut", read)
    child = forked_run(videos, tmp_path / "dst")
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_for(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()))


def test_wrong_use_is_told(videos: Path, tmp_path: Path, capfd) -> None:
    dst = tmp_path / "dst"
    run(videos / "a", dst)
    for src, seconds, says in (
        (videos / "a", 2.0, r"was filled with other settings: seconds was 1\.0 and is now 2\.0"),
        (videos / "a", 0.0, "above 0"),
        (tmp_path / "none", 1.0, "is not a folder"),
    ):
        with pytest.raises(StellaError, match=says):
            run(src, dst, seconds=seconds)
    with lock(dst / ".lock"):
        _, status = os.waitpid(forked_run(videos / "a", dst), 0)
    assert status != 0 and "is in use by process" in capfd.readouterr().err


def test_labels_come_from_a_csv(videos: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text('00.mp4,"dog, barking",t1\n')
    run(videos / "a", tmp_path / "dst", labels_csv=table)
    labels = [Shards(tmp_path / "dst").labels(i) for i in range(8)]
    assert (labels[0].name, labels[0].task) == ("dog, barking", "t1") and labels[1].name is None


def test_the_length_is_what_can_be_read_not_what_a_header_claims(tmp_path: Path) -> None:
    """Files that claim to be endless, to have no length or a negative one: all are accounted for, at no cost."""
    src = tmp_path / "src"
    write_video(src / "honest.mp4", 3.0)
    data = (src / "honest.mp4").read_bytes()
    at = data.index(b"mvhd") + 4
    scale = int.from_bytes(data[at + 12 : at + 16], "big")
    for name, ticks in (("endless.mp4", 2**32 - 2), ("short.mp4", scale), ("nothing.mp4", 0)):
        (src / name).write_bytes(data[: at + 16] + ticks.to_bytes(4, "big") + data[at + 20 :])
    matroska = write_video(src / "negative.mkv", 3.0)
    content = matroska.read_bytes()
    place = content.index(b"\x44\x89\x88") + 3  # Duration, a float of eight bytes
    for name, claim in (("negative.mkv", -1e12), ("huge.mkv", 1e12)):
        (src / name).write_bytes(content[:place] + struct.pack(">d", claim) + content[place + 8 :])
    began = time.monotonic()
    summary = run(src, tmp_path / "dst", split=True)
    assert time.monotonic() - began < 20
    made = {
        file: sorted(id for id in ids(tmp_path / "dst") if id.startswith(file))
        for file in (path.name for path in src.iterdir())
    }
    skipped = {id.partition("@")[0] for id in listed(tmp_path / "dst")} if summary.skipped else set()
    assert all(made[file] or file in skipped for file in made)
    assert made["honest.mp4"] == [f"honest.mp4@{k}.000" for k in range(3)]
    assert sum(map(len, made.values())) + sum(summary.skipped.values()) <= 4 * len(made)
    assert {file for file in made if len(made[file]) >= 2} >= {"honest.mp4", "short.mp4", "nothing.mp4"}


def test_one_video_gives_at_most_so_many_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "src" / "long.mp4", 4.0)
    monkeypatch.setattr(cut, "MOST_CLIPS", 3)
    assert run(tmp_path / "src", tmp_path / "dst", split=True).skipped == {"too many clips": 1}


def test_files_that_are_gone_are_named(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4"):
        write_video(tmp_path / "src" / name)
    run(tmp_path / "src", tmp_path / "dst")
    (tmp_path / "src" / "b.mp4").unlink()
    summary = run(tmp_path / "src", tmp_path / "dst")
    assert summary.gone == ("b.mp4",) and "gone: 1 file whose clips remain, b.mp4" in str(summary)


def test_of_several_folders_only_files_that_are_in_none_are_gone(tmp_path: Path) -> None:
    for number, name in enumerate(("one/a.mp4", "one/b.mp4", "two/c.mp4")):
        write_video(tmp_path / name, seed=number)
    run(tmp_path / "one", tmp_path / "dst")
    second = run(tmp_path / "two", tmp_path / "dst")
    assert (second.clips, second.added, second.gone) == (3, 1, ()) and "gone" not in str(second)
    (tmp_path / "one" / "b.mp4").unlink()
    assert run(tmp_path / "two", tmp_path / "dst").gone == ("b.mp4",)


def test_files_of_an_address_are_gone_only_when_it_is_prepared_again(tmp_path: Path) -> None:
    for number, name in enumerate(("a.mp4", "b.mp4", "here/c.mp4")):
        write_video(tmp_path / name, seed=number)
    far = UPath(f"memory://{tmp_path}/far")
    for name in ("a.mp4", "b.mp4"):
        (far / name).write_bytes((tmp_path / name).read_bytes())
    run(str(far), tmp_path / "dst")
    (far / "b.mp4").unlink()
    assert run(str(far), tmp_path / "dst").gone == ("b.mp4",)
    assert run(tmp_path / "here", tmp_path / "dst").gone == ()


def test_without_one_usable_clip_the_command_fails(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.mp4").write_text("hello")
    done = CliRunner().invoke(app, ["prepare", str(tmp_path / "src"), str(tmp_path / "dst"), "--workers", "1"])
    assert done.exit_code == 1 and "no clip could be used" in done.output


def test_shards_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    write_video(tmp_path / "src" / "a.mp4")
    theirs = tmp_path / "dst" / "shard-000000.tar.part"
    theirs.parent.mkdir()
    theirs.write_text("precious")
    with pytest.raises(StellaError, match="was not written by stella prepare"):
        run(tmp_path / "src", tmp_path / "dst")
    assert theirs.read_text() == "precious"


def test_videos_that_changed_since_are_told_of(tmp_path: Path) -> None:
    """Their clips stay: what was trained on them can be made again."""
    for seed, name in enumerate(("a", "b", "c")):
        write_video(tmp_path / "in" / f"{name}.mp4", seed=seed)
    said: list[str] = []
    run(tmp_path / "in", tmp_path / "out", tell=said.append)
    run(tmp_path / "in", tmp_path / "out", tell=said.append)
    assert not any("changed after" in line for line in said)
    later = time.time() + 10
    for name in ("b", "c"):
        os.utime(write_video(tmp_path / "in" / f"{name}.mp4", seed=9), (later, later))
    assert run(tmp_path / "in", tmp_path / "out", tell=said.append).added == 0
    assert any(line.startswith("b.mp4 and 1 more changed after clips were made") for line in said)
