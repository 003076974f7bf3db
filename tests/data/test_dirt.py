"""Every layout with the dirt that people have in it: each row of a list is used, left out, missing or broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.archives import PREFIX, SPORT, TUNE, pack, reasons
from helpers.media_files import level_frame, tone, write, write_video
from PIL import Image

from stella.data import workers as pool
from stella.data.archives.rows import read_rows
from stella.data.prepare import Summary, prepare
from stella.data.shards import Shards
from stella.errors import StellaError

ROWS = [("a", 5, SPORT, "train"), ("b", 0, TUNE, "test"), ("a", 5, SPORT, "train"), ("z", 1, "zebra braying", "train")]
ROWS += [
    ("broken", 1, TUNE, "train"),
    ("gone", 0, SPORT, "train"),
    ("up", 7, TUNE, "train"),
    ("cut", 3, SPORT, "train"),
]
HAVE = ("a", "b", "z", "broken", "up")  # of these there is a file

Content = dict[str, bytes]


def files(root: Path, content: Content) -> Path:
    """All four names; one file is in no list."""
    names = ["a_5000_15000", "b_000000", "deep/er/z_11.000", "broken_000001", "up../up", "stray_000001"]
    for name, data in zip(names, [*content.values(), content["a"]], strict=True):
        (root / f"{name}.mp4").parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.mp4").write_bytes(data)
    return root


def archives(root: Path, content: Content) -> Path:
    names = [f"{PREFIX}a_000005", "b_000000", "z_000001", f"{PREFIX}broken_000001", "../../up_000007"]
    members = {f"{name}.mp4": data for name, data in zip(names, content.values(), strict=True)}
    pack(root / "vggsound_00.tar.gz", members)
    whole = {"a_000005.mp4": content["a"], "cut_000003.mp4": content["b"]}
    pack(root / "vggsound_01.tar.gz", whole, cut=len(content["b"]) // 2)  # one clip again, one cut off
    return root


def video2dataset(root: Path, content: Content) -> Path:
    def about(video: str) -> bytes:
        return json.dumps({"url": f"https://youtu.be/{video:_<11}", "status": "success"}).encode()

    members: Content = {}
    for n, (video, data) in enumerate(content.items()):
        folder = "../../" if video == "up" else ""
        members |= {f"{folder}00000000{n}.mp4": data, f"{folder}00000000{n}.json": about(video)}
    pack(root / "00000.tar", members)
    again = {"000010000.mp4": content["a"], "000010000.json": about("a"), "000010001.json": about("cut")}
    pack(root / "00001.tar", again | {"000010001.mp4": bytes(300_000)}, cut=200_000)
    return root


def cav_mae(root: Path, content: Content) -> Path:
    items = []
    for video in (*content, "a"):
        for second in range(10):
            (root / f"frames/frame_{second}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(level_frame(20 * second)).save(root / f"frames/frame_{second}/{video}.jpg")
        write(root / f"{video}.wav", None, tone(1.0, 16_000), audio_codec="pcm_s16le")
        items.append(
            {"video_id": video, "wav": f"{root}/x/../{video}.wav", "video_path": f"{root}/frames", "labels": ""}
        )
    (root / "x").mkdir()
    (root / "broken.wav").write_bytes(b"hello")
    (root / "data.json").write_text(json.dumps({"data": items}))
    return root / "data.json"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Content:
    root = tmp_path_factory.mktemp("videos")
    made = {id: write_video(root / f"{id}.mp4", seed=n).read_bytes() for n, id in enumerate(HAVE)}
    return made | {"broken": b"hello"}


def write_list(path: Path, header: bool, long_names: bool) -> Path:
    """Spaces after commas, labels in quotes; video2dataset knows clips by YouTube's ids of 11 characters."""
    lines = ["youtube_id, start_seconds, label, split"] if header else []
    lines += [f'{v:_<11}, {s}, "{c}", {w}' if long_names else f'{v}, {s}, "{c}", {w}' for v, s, c, w in ROWS]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def run(src: Path, dst: Path, lists: Path, only: str | None = "continual-vs") -> Summary:
    sizes = {"seconds": 1.0, "size": 48, "workers": 2, "progress": False}
    summary = prepare(src, dst, csv=[lists], only=only, **sizes)  # type: ignore[arg-type]
    broken = sum(count for reason, count in summary.skipped.items() if reason != "damaged archive")
    assert summary.clips + sum(summary.left_out.values()) + summary.missing + broken == summary.listed == len(ROWS)
    return summary


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("layout", [files, archives, video2dataset, cav_mae])
def test_every_row_is_accounted_for(
    layout: Callable[[Path, Content], Path],
    header: bool,
    content: Content,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "START_METHOD", "fork")
    (tmp_path / "in" / "have").mkdir(parents=True)
    src = layout(tmp_path / "in" / "have", content)
    lists, dst = write_list(tmp_path / "in" / "vggsound.csv", header, layout is video2dataset), tmp_path / "in" / "dst"
    before = set(tmp_path.rglob("*"))
    summary = run(src, dst, lists)
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(dst)} == before  # nothing outside
    shards, found = Shards(dst), reasons(dst)
    made = {shards.entry(i)[1].id.rstrip("_0123456789"): shards.entry(i)[1] for i in range(len(shards))}
    assert set(made) == {"a", "b", "up"} and made["a"].label == SPORT
    assert (made["b"].split, made["b"].task) == ("test", "music")
    kinds = {id.partition("_")[0]: reason for id, reason in found.items() if not id.endswith(".gz")}
    assert kinds["gone"] == kinds["cut"] == "missing file" and kinds["z"] == "class of no task"
    assert kinds["a"] == "listed twice" and "media" in kinds["broken"]
    assert ("damaged archive" in summary.skipped) == (layout in (archives, video2dataset))
    whole = run(src, dst, lists, only=None)  # in the same folder: what was left out is made
    assert whole.added == 1 and whole.left_out == {"listed twice": 1}
    assert run(src, dst, lists).left_out == {"listed twice": 1}  # and stays


def test_another_list_does_not_mix_with_the_first(
    content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored clip is known by its row, so further lists may only come behind."""
    monkeypatch.setattr(pool, "START_METHOD", "fork")
    src, first, second = files(tmp_path / "have", content), tmp_path / "first.csv", tmp_path / "second.csv"
    first.write_text(f"b,0,{TUNE},test\n")
    second.write_text(f"up,7,{TUNE},train\n")
    sizes: dict[str, Any] = {"seconds": 1.0, "size": 48, "workers": 1, "progress": False}
    prepare(src, tmp_path / "dst", csv=[first], **sizes)
    for lists in ([second], [second, first]):
        with pytest.raises(StellaError, match=r"holds clips of first\.csv; give these lists first"):
            prepare(src, tmp_path / "dst", csv=lists, **sizes)
    assert prepare(src, tmp_path / "dst", csv=[first, second], **sizes).clips == 2
    shards = Shards(tmp_path / "dst")
    assert [shards.entry(i)[1].row for i in range(2)] == [0, 1]


def test_rows_that_are_no_clips_are_told(tmp_path: Path) -> None:
    good = f'a,5,"{SPORT}",train\n'
    for bad in (f"b,6,{SPORT},train", f"b,soon,{TUNE},train", f"b,6,{TUNE},validation", "b"):
        (tmp_path / "vggsound.csv").write_text(good + bad + "\n")
        with pytest.raises(StellaError, match=r"has the row 'b.*unlike those before it"):
            read_rows([tmp_path / "vggsound.csv"])
    (tmp_path / "vggsound.csv").write_text("youtube_id,start,label,split\n")
    with pytest.raises(StellaError, match="begins with 'youtube_id"):
        read_rows([tmp_path / "vggsound.csv"])
