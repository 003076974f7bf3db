"""From what people have on their disks to shards: archives, lists and names as they are, with their dirt."""

import json
import os
import random
import signal
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.archives import PREFIX, SPORT, TUNE, pack, reasons, shard_bytes, write_vggsound
from helpers.media_files import level_frame, tone, write
from PIL import Image
from typer.testing import CliRunner

from stella.cli import app
from stella.data import prepare
from stella.data import workers as pool
from stella.data.archives.rows import Row, chosen, class_in, read_rows, tasks_of
from stella.data.material import Wanted, recognise
from stella.data.shards import Shards
from stella.data.tasks import recording_of
from stella.data.writer import ShardWriter
from stella.errors import StellaError

SMALL: dict[str, Any] = {"seconds": 1.0, "size": 48, "progress": False, "workers": 2}


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_METHOD", "fork")


# ---- lists


def test_lists_of_vggsound_with_and_without_a_header(tmp_path: Path) -> None:
    rows = f'aaaaaaaaaaa,5,"{SPORT}",train\n-b_bbbbbbbb, 30, {TUNE}, test\n'
    for name, header in (("plain.csv", ""), ("headed.csv", "youtube_id,start_seconds,label,split\n")):
        (tmp_path / name).write_text(header + rows)
        first, second = read_rows([tmp_path / name])
        assert first == Row(0, "aaaaaaaaaaa", 5.0, (SPORT,), "train")
        assert second == Row(1, "-b_bbbbbbbb", 30.0, (TUNE,), "test", 0)
    (tmp_path / "test.csv").write_text(f"-b_bbbbbbbb_000030.mp4,{TUNE}\n")
    [only] = read_rows([tmp_path / "test.csv"])
    assert only.id == "-b_bbbbbbbb_000030" and only.split == "test" and only.classes == (TUNE,)
    (tmp_path / "bad.csv").write_text(f"aaaaaaaaaaa,5,{SPORT},train\n")
    with pytest.raises(StellaError, match="put labels that hold commas in quotes"):
        read_rows([tmp_path / "bad.csv"])
    with pytest.raises(StellaError, match="cannot be read"):
        read_rows([tmp_path / "none.csv"])


AUDIOSET = "# Segments csv created Sun Mar  5\n# num_ytids=3\n# YTID, start_seconds, end_seconds, positive_labels\n"
CLASSES = 'index,mid,display_name\n0,/m/01,"Chuckle, chortle"\n1,/m/02,Banjo\n2,/t/dd03,Speech\n3,/m/04,Giggle\n'


def test_lists_of_audioset_and_clips_in_several_tasks(tmp_path: Path) -> None:
    (tmp_path / "balanced_train_segments.csv").write_text(
        AUDIOSET
        + '--aaaaaaaaa, 30.000, 40.000, "/t/dd03,/m/01,/m/04"\n'
        + 'bbbbbbbbbbb, 0.000, 10.000, "/m/01,/m/02"\n'
        + 'ccccccccccc, 0.000, 10.000, "/t/dd03"\n'
    )
    (tmp_path / "eval_segments.csv").write_text(AUDIOSET + 'ddddddddddd, 0.000, 10.000, "/m/02"\n')
    files = [tmp_path / "balanced_train_segments.csv", tmp_path / "eval_segments.csv"]
    with pytest.raises(StellaError, match=r"copy class_labels_indices\.csv"):
        read_rows(files)
    (tmp_path / "class_labels_indices.csv").write_text(CLASSES)
    rows = read_rows(files)
    assert [row.split for row in rows] == ["train", "train", "train", "test"]
    assert rows[0].classes == ("Speech", "Chuckle, chortle", "Giggle") and rows[0].id == "--aaaaaaaaa_000030"
    kept, out = chosen(rows, "continual-as")
    assert [row.number for row in kept] == [0, 3] and out == {1: "in several tasks", 2: "class of no task"}
    assert class_in(rows[0], "continual-as") == ("Chuckle, chortle", "human")
    (tmp_path / "class_labels_indices.csv").unlink()
    names = {"/m/01": "Chuckle, chortle", "/m/02": "Banjo", "/t/dd03": "Speech", "/m/04": "Giggle"}
    tree = [{"id": mid, "name": name, "child_ids": []} for mid, name in names.items()]
    (tmp_path / "ontology.json").write_text(json.dumps(tree))
    assert read_rows(files) == rows


def test_the_benchmarks_have_the_papers_tasks() -> None:
    vs, audioset = tasks_of("continual-vs"), tasks_of("continual-as")
    assert [len(names) for names in vs.values()] == [20] * 8 and len({n for names in vs.values() for n in names}) == 160
    assert list(audioset) == ["human", "vehicle", "nature", "animal", "others", "home", "music"]
    rows = [Row(n, f"v{n}", 1.0, (SPORT,), "train", n) for n in range(405)] + [Row(405, "t", 1.0, (SPORT,), "test")]
    kept, out = chosen([*rows, Row(406, "v0", 1.0, (SPORT,), "train")], "continual-vs")
    assert [row.number for row in kept] == [*range(400), 405]
    assert Counter(out.values()) == {"beyond the first 400 of its class": 5, "listed twice": 1}
    unused = [
        Row(0, "a", 0, (SPORT,), "train"),
        Row(1, "b", 0, ("zebra braying",), "train"),
        Row(2, "c", 0, ("Banjo",), "train"),
    ]
    assert [row.number for row in chosen(unused, "initial-vs")[0]] == [1]
    with pytest.raises(StellaError, match="is no benchmark"):
        chosen(rows, "continual-xy")


@pytest.mark.parametrize("name", ["-b_bbbbbbbb_000030", "-b_bbbbbbbb_30000_40000", "-b_bbbbbbbb_40.000", "-b_bbbbbbbb"])
def test_a_clip_is_found_under_all_four_names(name: str) -> None:
    row = Row(0, "-b_bbbbbbbb", 30.0, (TUNE,), "train")
    assert Wanted([row]).find(name) == [(row, int(name == "-b_bbbbbbbb"))]
    assert not Wanted([row]).find(f"{name}1")


def test_a_clip_of_audioset_may_be_shorter_than_ten_seconds(tmp_path: Path) -> None:
    (tmp_path / "class_labels_indices.csv").write_text(CLASSES)
    (tmp_path / "eval_segments.csv").write_text(AUDIOSET + 'abcdefghijk, 0.000, 8.000, "/m/02"\n')
    [row] = read_rows([tmp_path / "eval_segments.csv"])
    for name in ("abcdefghijk_000000", "abcdefghijk_0_8000", "abcdefghijk_8.000"):
        assert Wanted([row]).find(name) == [(row, 0)]


def test_a_clip_that_is_listed_twice_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("".join(f"{video},5,{TUNE},train\n" for video in ("v", "v", "w")))
    assert [row.nth for row in read_rows([tmp_path / "a.csv"])] == [0, 1, 1]  # the second is left out later


# ---- archives


@pytest.fixture
def vggsound(tmp_path: Path, videos: list[bytes]) -> Path:
    return write_vggsound(tmp_path, videos)


def run(src: Path | str, dst: Path | str, **more: Any) -> prepare.Summary:
    return prepare.prepare(src, dst, **(SMALL | more))


def test_archives_of_vggsound_with_their_dirt(vggsound: Path, tmp_path: Path) -> None:
    said: list[str] = []
    lists = [tmp_path / "vggsound.csv"]
    dst = tmp_path / "in" / "dst"
    summary = run(vggsound, dst, csv=lists, only="continual-vs", tell=said.append)
    assert "2 archives of videos" in said[0] and "11 clips listed, 9 of continual-vs wanted" in said[1]
    shards = Shards(dst, span=None)
    entries = {entry.id: entry for entry in (shards.entry(i)[1] for i in range(len(shards)))}
    assert set(entries) == {"a_000005", "b_000000", "c_000010", "outside_000007", "d_000002", "e_000003"}
    assert (entries["b_000000"].split, entries["b_000000"].label, entries["b_000000"].task) == ("test", TUNE, "music")
    assert (
        entries["a_000005"].classes == [SPORT] and entries["a_000005"].task == "sports" and entries["d_000002"].row == 7
    )
    assert reasons(dst) == {
        "a_000005 (row 5)": "listed twice",
        "z_000001": "class of no task",
        "broken_000001": "not a media file",
        "f_000004": "missing file",
        "gone_000000": "missing file",
        "vggsound_01.tar.gz": "damaged archive",
    }
    broken = summary.skipped["not a media file"]
    assert summary.clips + sum(summary.left_out.values()) + summary.missing + broken == summary.listed == 11
    assert not list(tmp_path.rglob("*outside*")) and {path.name for path in tmp_path.iterdir()} == {
        "have",
        "in",
        "vggsound.csv",
    }
    task = json.loads((dst / "listed.json").read_text())["tasks"]["continual-vs"]["sports"]
    assert task == {"train": 4, "test": 1}


def test_a_second_run_opens_no_archive(vggsound: Path, tmp_path: Path, videos: list[bytes], monkeypatch) -> None:
    dst, lists = tmp_path / "dst", [tmp_path / "vggsound.csv"]
    run(vggsound, dst, csv=lists)
    before, listed = shard_bytes(dst), reasons(dst)
    with monkeypatch.context() as patch:
        patch.setattr("stella.data.archives.tar.gzip.GzipFile", None)
        assert run(vggsound, dst, csv=lists).added == 0
    assert (shard_bytes(dst), reasons(dst)) == (before, listed)
    pack(vggsound / "vggsound_01.tar.gz", {f"{PREFIX}f_000004.mp4": videos[0]})
    again = run(vggsound, dst, csv=lists)
    assert again.added == 1 and again.missing == 1 and "vggsound_01.tar.gz" not in reasons(dst)
    with pytest.raises(StellaError, match="csv was true and is now false"):
        run(vggsound, dst)


def test_killed_at_any_moment_the_bytes_are_those_of_an_undisturbed_run(vggsound: Path, tmp_path: Path) -> None:
    whole, dst, more = tmp_path / "whole", tmp_path / "dst", {"csv": [tmp_path / "vggsound.csv"], "shard_clips": 2}
    began = time.monotonic()
    run(vggsound, whole, **more)
    seconds, seed = time.monotonic() - began, random.randrange(1 << 30)
    draw = random.Random(seed)
    for _ in range(4):
        child = os.fork()
        if not child:
            try:
                run(vggsound, dst, **more)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        time.sleep(draw.uniform(0, 0.8 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    run(vggsound, dst, **more)
    assert shard_bytes(dst) == shard_bytes(whole) and len(shard_bytes(dst)) > 4, f"seed {seed}"
    assert reasons(dst) == reasons(whole), f"seed {seed}"


def test_a_rehearsal_tells_and_writes_nothing(vggsound: Path, tmp_path: Path) -> None:
    lists = ["--csv", str(tmp_path / "vggsound.csv"), "--only", "continual-vs"]
    done = CliRunner().invoke(app, ["prepare", str(vggsound), str(tmp_path / "dst"), *lists, "--dry-run"])
    assert done.exit_code == 0 and not (tmp_path / "dst").exists()
    text = " ".join(done.output.split())
    # the broken one is there, the one that is cut off is not
    assert "found: 7 clips" in text and "missing: 2 of 9 wanted clips" in text
    assert "1 class of no task" in text and "damaged archive" in text


def test_a_run_and_its_rehearsal_count_missing_clips_alike(vggsound: Path, tmp_path: Path) -> None:
    (vggsound / "vggsound_01.tar.gz").unlink()
    given: dict[str, Any] = {"csv": [tmp_path / "vggsound.csv"], "only": "continual-vs"}
    told = [line for line in prepare.rehearse(vggsound, tmp_path / "dst", **given) if line.startswith("missing: ")]
    assert told and told == [
        part for part in str(run(vggsound, tmp_path / "dst", **given)).split("; ") if "missing: " in part
    ]


@pytest.mark.timeout(60)
def test_a_pipe_is_no_archive_and_not_waited_for(tmp_path: Path, videos: list[bytes]) -> None:
    pack(tmp_path / "src" / "all.tar", {"0.mp4": videos[0]})
    os.mkfifo(tmp_path / "src" / "pipe.tar")
    summary = run(tmp_path / "src", tmp_path / "dst")
    assert summary.clips == 1 and reasons(tmp_path / "dst") == {"pipe.tar": "not a regular file"}


def test_a_corrupt_middle_loses_the_rest_and_says_so(tmp_path: Path, videos: list[bytes]) -> None:
    path = pack(tmp_path / "src" / "all.tar", {f"{n}.mp4": videos[n] for n in range(3)})
    data = bytearray(path.read_bytes())
    at = data.index(b"1.mp4")
    data[at : at + 512] = b"\xff" * 512
    path.write_bytes(bytes(data))
    summary = run(tmp_path / "src", tmp_path / "dst")
    assert summary.clips == 1 and reasons(tmp_path / "dst") == {"all.tar": "damaged archive"}


@pytest.mark.parametrize("split", [False, True])
def test_videos_of_one_name_in_archives_are_not_lost_in_silence(
    tmp_path: Path, videos: list[bytes], split: bool
) -> None:
    """Without a list a clip is known by the name of its file, without folders."""
    src, dst = tmp_path / "src", tmp_path / "dst"
    pack(src / "mon.tar", {"dog/1.mp4": videos[0], "cat/1.mp4": videos[1], "cat/2.mp4": videos[2]})
    pack(src / "tue.tar", {"2.mp4": videos[3], "3.mp4": videos[0]})
    expected = {"mon.tar/1.mp4": "name of another", "tue.tar/2.mp4": "name of another"}
    for _ in range(2):
        summary = run(src, dst, split=split)
        assert {recording_of(id) for id in ShardWriter.ids_in(dst)} == {"1.mp4", "2.mp4", "3.mp4"}
        assert reasons(dst) == expected and summary.skipped == {"name of another": 2}
    pack(src / "wed.tar", {"3.mp4": videos[1], "4.mp4": videos[2]})  # it comes later
    assert run(src, dst, split=split).skipped == {"name of another": 3}
    remedy = json.loads((dst / "skipped.jsonl").read_text().splitlines()[-1])["remedy"]
    assert remedy == "tue.tar/3.mp4 has it too: rename this one if it is another video"


def test_video2dataset_shards(tmp_path: Path, videos: list[bytes]) -> None:
    def about(id: str, **more: Any) -> bytes:
        tree = {"url": f"https://www.youtube.com/watch?v={id}", "key": "0", "status": "success"}
        return json.dumps(tree | more).encode()

    members = {"000000000.mp4": videos[0], "000000000.json": about("aaaaaaaaaaa"), "000000000.txt": b"a caption"}
    members |= {"000000001_000.json": about("bbbbbbbbbbb", clips=[["00:00:30.000", "00:00:40.000"]])}
    members |= {"000000001_000.mp4": videos[1]}
    members |= {"000000002.json": about("ccccccccccc", status="failed_to_download", error_message="gone")}
    members |= {"000000003.mp4": videos[2], "000000003.json": b"not json"}
    src = pack(tmp_path / "src" / "00000.tar", members)
    (tmp_path / "src" / "00000_stats.json").write_text("{}")
    assert "1 shard of video2dataset" in recognise(src.parent).told()[0]
    plain = run(src.parent, tmp_path / "plain")
    assert plain.clips == 3 and reasons(tmp_path / "plain") == {"000000002.json": "not fetched"}
    listed = [("aaaaaaaaaaa", 12), ("bbbbbbbbbbb", 30), ("ccccccccccc", 0), ("ddddddddddd", 0)]
    (tmp_path / "vggsound.csv").write_text("".join(f"{video},{start},{TUNE},train\n" for video, start in listed))
    summary = run(src.parent, tmp_path / "dst", csv=[tmp_path / "vggsound.csv"])
    assert summary.clips == 2 and summary.missing == 1 and summary.skipped == {"not fetched": 1}


def test_cav_mae_frames_and_sounds(tmp_path: Path) -> None:
    for second in range(10):
        (tmp_path / f"frames/frame_{second}").mkdir(parents=True)
        Image.fromarray(level_frame(20 * second)).save(tmp_path / f"frames/frame_{second}/abc.jpg")
    write(tmp_path / "abc.wav", None, tone(2.0, 16_000), audio_codec="pcm_s16le")
    both = {"video_path": str(tmp_path / "frames"), "labels": "/m/02"}
    items = [both | {"video_id": id, "wav": str(tmp_path / f"{id}.wav")} for id in ("abc", "gone")]
    (tmp_path / "train.json").write_text(json.dumps({"data": items}))
    (tmp_path / "class_labels_indices.csv").write_text(CLASSES)
    summary = run(tmp_path / "train.json", tmp_path / "dst", seconds=2.0)
    assert summary.clips == 1 and summary.skipped == {"missing file": 1}
    shards = Shards(tmp_path / "dst", span=None, frames=10)
    levels = [float(frame.float().mean()) for frame in shards[0].video]
    assert levels == pytest.approx([20 * n for n in range(10)], abs=3) and shards.labels(0).name == "Banjo"
    (tmp_path / "train.json").write_text('{"data": [{"wav": 1}]}')
    with pytest.raises(StellaError, match="video_id"):
        recognise(tmp_path / "train.json")


def test_a_whole_video_is_cut_where_the_list_says(tmp_path: Path, videos: list[bytes]) -> None:
    frames = [level_frame(min(255, 10 * second)) for second in range(20)]
    (tmp_path / "src").mkdir()
    write(tmp_path / "src" / "aaaaaaaaaaa.mp4", frames, tone(20.0, 16_000), fps=1)
    (tmp_path / "src" / "bbbbbbbbbbb.mp4").write_bytes(videos[0])
    listed = [("aaaaaaaaaaa", 12), ("bbbbbbbbbbb", 7), ("bbbbbbbbbbb", 9)]
    (tmp_path / "vggsound.csv").write_text("".join(f"{video},{start},{TUNE},train\n" for video, start in listed))
    summary = run(tmp_path / "src", tmp_path / "dst", csv=[tmp_path / "vggsound.csv"])
    assert summary.clips == 1 and summary.skipped == {"ambiguous name": 2}
    clip = Shards(tmp_path / "dst", span=None)[0]
    assert clip.id == "aaaaaaaaaaa_000012" and float(clip.video.float().mean()) == pytest.approx(120, abs=4)


def test_odd_clips_are_counted_and_left_out_if_asked(tmp_path: Path) -> None:
    src, moving = tmp_path / "src", [level_frame(10 * n) for n in range(8)]
    src.mkdir()
    write(src / "still.mp4", [level_frame(90)] * 8, tone(1.0, 16_000), fps=8)
    write(src / "muted.mp4", moving, np.zeros((1, 16_000), np.float32), fps=8)
    write(src / "short.mp4", moving[:4], tone(0.5, 16_000), fps=8)
    write(src / "fine.mp4", moving, tone(1.0, 16_000), fps=8)
    kept = run(src, tmp_path / "all")
    assert kept.clips == 4 and kept.odd == {"still picture": 1, "silent": 1, "short": 1}
    assert "kept: " in str(kept) and "1 short (less than 0.9 s, 90% of a clip)" in str(kept)
    fewer = run(src, tmp_path / "some", leave=["still picture", "silent", "short"])
    assert fewer.clips == 1 and fewer.left_out == {"still picture": 1, "silent": 1, "short": 1} and not fewer.skipped
    with pytest.raises(StellaError, match="leave was"):
        run(src, tmp_path / "some")


def test_how_long_it_takes_is_said_once(vggsound: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prepare, "SAID_AFTER", 0.0)
    said: list[str] = []
    run(vggsound, tmp_path / "dst", csv=[tmp_path / "vggsound.csv"], tell=said.append)
    assert sum("to go" in line for line in said) == 1
    assert [prepare.in_hours(seconds) for seconds in (20, 600, 7200)] == ["1 min", "10 min", "2.0 h"]


def test_wrong_use_is_told(tmp_path: Path, videos: list[bytes]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.mp4").write_bytes(videos[0])
    (tmp_path / "l.csv").write_text(f"aaaaaaaaaaa,12,{TUNE},train\n")
    for src, more, says in (
        (tmp_path / "none", {}, "is not a folder"),
        (tmp_path / "empty", {}, "holds no videos"),
        (tmp_path / "a.mp4", {}, "is no folder, no archive"),
        (tmp_path, {"only": "continual-vs"}, "needs the list"),
        (tmp_path, {"csv": [tmp_path / "l.csv"], "labels_csv": tmp_path / "l.csv"}, "both name classes"),
        (tmp_path, {"csv": [tmp_path / "l.csv"], "split": True}, "give one of them"),
    ):
        with pytest.raises(StellaError, match=says):
            run(src, tmp_path / "dst", **more)
