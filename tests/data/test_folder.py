import json
import pickle
import re
from pathlib import Path
from typing import Any, Literal
from unicodedata import normalize

import pytest
import torch
from helpers.media_files import level_frame, tone, write, write_video

from stella.clip import Labels, Source, Windowed
from stella.data.folder import MEDIA_SUFFIXES, MUTE_SUFFIXES, Folder, read_labels
from stella.data.skipped import Skipped
from stella.data.stream import Stream, StreamConfig
from stella.embed.vectors import media_files
from stella.errors import StellaError
from stella.media.decode import Plan, decode_track

Form = Literal["NFC", "NFD"]
PLAN = Plan(duration=1.0, frames=2, size=32)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    names = ["b/two.mp4", "b/deep/three.MKV", "a, loud/one.mp4", "zero.mp4", ".hidden.mp4", ".d/x.mp4"]
    for number, name in enumerate(names):
        write_video(root / name, seed=number)
    (root / "b" / "notes.txt").write_text("not a video")
    (root / "folder.mp4").mkdir()
    return root


def test_videos_are_found_sorted_and_labelled_by_their_folder(tree: Path) -> None:
    folder = Folder(tree, PLAN)
    assert folder.files == ["a, loud/one.mp4", "b/deep/three.MKV", "b/two.mp4", "zero.mp4"]
    assert [folder.labels(i).name for i in range(len(folder))] == ["a, loud", "deep", "b", None]
    assert isinstance(folder, Source)
    clip = pickle.loads(pickle.dumps(folder))[2]  # it travels to workers
    assert (clip.id, clip.labels) == ("b/two.mp4", Labels(name="b"))
    assert clip.video.shape == (2, 3, 32, 43)
    assert 15_000 < len(clip.audio) <= 16_000


def test_a_window_moves_the_frames_and_not_the_sound(tmp_path: Path) -> None:
    """Red rises by 10 a frame, 8 frames a second: windows of 1 s out of 3 s begin up to 16 frames later."""
    write_video(tmp_path / "a.mp4", 3.0)
    folder = Folder(tmp_path, Plan(duration=3.0, frames=2, size=32, span=1.0))
    clips = {window: folder.clip(0, window) for window in (0.0, 0.5, 1.0)}
    reds = [float(clip.video[0, 0].float().mean()) for clip in clips.values()]
    assert reds == pytest.approx([20, 100, 180], abs=8)
    assert torch.equal(folder[0].video, clips[0.5].video) and isinstance(folder, Windowed)
    assert all(torch.equal(clip.audio, folder[0].audio) and len(clip.audio) > 45_000 for clip in clips.values())


@pytest.mark.parametrize("header", ["", "file,label,task\n", "\ufefffile,label\n", "Path , label\n"])
def test_csv_labels_hold_commas_and_leave_unlisted_videos_without(tree: Path, tmp_path: Path, header: str) -> None:
    table = tmp_path / "labels.csv"
    table.write_text(f'{header}"a, loud/one.mp4","dog barking, loud",first\n\nb/two.mp4, cat\n', encoding="utf-8")
    folder = Folder(tree, PLAN, table)
    expected = [Labels("dog barking, loud", "first"), Labels(), Labels("cat"), Labels()]
    assert [folder.labels(i) for i in range(4)] == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"zero.mp4,a\nnope.mp4,b\n", "line 2 names 'nope.mp4'"),
        (b"zero.mp4,a,b,c\n", "line 1 has 4 columns"),
        (b"zero.mp4\n", "line 1 has 1 columns"),
        (b"zero.mp4,a\nzero.mp4,b\n", "line 2 names 'zero.mp4' a second time"),
        (b"\xff\xfe\x00a", "not text in UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_csv_is_refused_with_its_line(tree: Path, tmp_path: Path, content: bytes | None, says: str) -> None:
    table = tmp_path / "labels.csv"
    if content is not None:
        table.write_bytes(content)
    with pytest.raises(StellaError, match=says):
        Folder(tree, PLAN, table)


def test_empty_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match="holds no videos"):
        Folder(tmp_path, PLAN)
    with pytest.raises(StellaError, match="is not a folder"):
        Folder(tmp_path / "none", PLAN)


def test_linked_folders_are_part_of_the_tree_and_circles_end(tmp_path: Path) -> None:
    real, root = tmp_path / "elsewhere", tmp_path / "root"
    real.mkdir()
    root.mkdir()
    (real / "a.mp4").touch()
    (root / "linked").symlink_to(real)
    (real / "back").symlink_to(root)
    assert Folder(root).files == ["linked/a.mp4"]


def test_bad_files_are_skipped_counted_and_listed_in_a_stream(tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    for number in range(9):
        write_video(videos / f"good{number}.mp4", seed=number)
    write_video(videos / "mute.mp4", sound=False)
    write(videos / "blind.mp4", None, tone(1.0, 16_000))
    (videos / "empty.mp4").touch()
    (videos / "text.mp4").write_text("this is no video")
    (videos / "lost.mp4").symlink_to(tmp_path / "nowhere.mp4")
    whole = (videos / "good0.mp4").read_bytes()
    (videos / "cut.mp4").write_bytes(whole[: len(whole) // 3])
    folder, skipped = Folder(videos, PLAN), Skipped(tmp_path / "skipped.jsonl")
    config = StreamConfig(batch_size=4, size=28, spec_frames=64, most_bad=0.5)
    batches = list(Stream([("all", folder)], config, skipped=skipped))
    assert sorted(folder.files[i] for b in batches for i in b.ids) == [f"good{i}.mp4" for i in range(9)]
    assert [len(batch) for batch in batches] == [4, 4, 1]  # a skipped clip shortens no batch but the last
    for batch in batches:  # nothing became a constant in silence
        assert (batch.video.float().flatten(1).std(1) > 1).all() and (batch.audio.flatten(1).std(1) > 0.1).all()
    records = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    reasons = {Path(record["path"]).name: record["reason"] for record in records}
    assert reasons.pop("cut.mp4") in ("not a media file", "truncated file")
    assert reasons == {
        "mute.mp4": "no audio track",
        "blind.mp4": "no video track",
        "empty.mp4": "empty file",
        "text.mp4": "not a media file",
        "lost.mp4": "broken link",
    }


@pytest.mark.parametrize(("listed", "stored"), [("NFD", "NFC"), ("NFC", "NFD"), ("NFD", "NFD")])
def test_accents_of_a_list_may_be_decomposed_or_composed(tmp_path: Path, listed: Form, stored: Form) -> None:
    """macOS decomposes the names that it writes: the same name in other bytes."""
    folder, table = tmp_path / "videos", tmp_path / "labels.csv"
    names = [normalize(stored, name) for name in ("Hörnle/Größe.mp4", "zero.mp4")]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    line = normalize(listed, "Hörnle/Größe.mp4") + ",köln\n"
    table.write_text(line, encoding="utf-8")
    found = Folder(folder, PLAN, table)
    assert found.files == names and [found.labels(i).name for i in (0, 1)] == ["köln", None]
    table.write_text(line + normalize(stored, line), encoding="utf-8")
    with pytest.raises(StellaError, match=r"line 2 names .* a second time"):
        Folder(folder, PLAN, table)
    (folder / "Hörnle").mkdir(exist_ok=True)
    other = normalize("NFC" if stored == "NFD" else "NFD", names[0])
    (folder / other).parent.mkdir(exist_ok=True)
    (folder / other).touch()  # on Linux both may be there: then each row means its own
    table.write_text(f"{names[0]},one\n{other},two\n", encoding="utf-8")
    labels = read_labels(table, folder, [names[0], other])
    assert (labels[names[0]].name, labels[other].name) == ("one", "two")


VIDEOS: dict[str, dict[str, Any]] = {
    ".3g2": {"size": (176, 144), "codec": "mpeg4"},
    ".asf": {"codec": "mpeg4", "audio_codec": "mp3"},
    ".avi .divx": {"codec": "mpeg4", "audio_codec": "mp3"},
    ".dv": {"size": (720, 576), "codec": "dvvideo", "audio_codec": "pcm_s16le"},
    ".f4v": {},
    ".m2t": {"codec": "mpeg2video", "audio_codec": "mp2"},
    ".mov .qt": {},
    ".mpg .mpe": {"codec": "mpeg1video", "audio_codec": "mp2"},
    ".mxf": {"codec": "mpeg2video", "audio_codec": "pcm_s16le"},
    ".nut": {"codec": "mpeg4", "audio_codec": "mp3"},
    ".rm .rmvb": {"size": (176, 144), "codec": "rv10", "audio_codec": "ac3"},
    ".gif": {"codec": "gif", "pix_fmt": "rgb8"},
    ".m1v": {"codec": "mpeg1video"},
    ".m2v": {"codec": "mpeg2video"},
}
SOUNDS = {".aifc": "pcm_s16be", ".m4b": "aac", ".ra": "ac3", ".w64": "pcm_s16le"}


@pytest.mark.parametrize("suffixes", VIDEOS)
def test_videos_of_rarer_formats_are_found_in_folders_and_decoded(tmp_path: Path, suffixes: str) -> None:
    how, (made, *same) = dict(VIDEOS[suffixes]), suffixes.split()
    width, height = how.pop("size", (64, 48))
    pictures, mute = [level_frame(10 * n, width, height) for n in range(25)], made in MUTE_SUFFIXES
    write(tmp_path / f"a{made}", pictures, None if mute else tone(1, 48_000, 2), rate=48_000, layout="stereo", **how)
    for suffix in same:
        (tmp_path / f"a{suffix}").write_bytes((tmp_path / f"a{made}").read_bytes())
    files = media_files([tmp_path])
    assert sorted(file.suffix for file in files) == sorted(suffixes.split())
    if mute:  # nothing to train on
        with pytest.raises(StellaError, match="holds no videos"):
            Folder(tmp_path, PLAN)
        (clip,) = (decode_track(file, PLAN, "video") for file in files)
        assert clip.shape[0] == 2
    else:
        clips = [Folder(tmp_path, PLAN)[n] for n in range(len(files))]
        assert all(len(clip.video) == 2 and len(clip.audio) > 15_000 for clip in clips)


@pytest.mark.parametrize("suffix", SOUNDS)
def test_sounds_of_rarer_formats_are_found_in_folders_and_decoded(tmp_path: Path, suffix: str) -> None:
    codec, path = SOUNDS[suffix], tmp_path / f"a{suffix}"
    write(path, None, tone(1, 48_000, 2), rate=48_000, layout="stereo", audio_codec=codec)
    assert media_files([tmp_path]) == [path] and len(decode_track(path, PLAN, "audio")) > 15_000


def test_the_documentation_lists_the_suffixes_that_folders_are_searched_for() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "use.md").read_text(encoding="utf-8")
    [part] = [part for part in text.split("\n\n") if part.startswith("**Folders.**")]
    assert sorted(re.findall(r"\.[a-z0-9]+(?=[ `])", part)) == sorted(MEDIA_SUFFIXES)
