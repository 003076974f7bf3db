"""What writes packed clips: bad clips, kills, full disks, new clips, the command."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from helpers.disk import small_disk
from helpers.packs import CONFIG, close, contents, levels, packed
from helpers.streams import same
from helpers.videos import Long, Videos

from stella.clip import ArraySource, Clip, Origin
from stella.data.pack import pack
from stella.data.packed import Packed
from stella.data.stream import evaluation_batches
from stella.data.views import join, part
from stella.errors import StellaError
from stella.files import lock


def test_bad_clips_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    two = [Videos(3)[index] for index in range(3)]
    two[1] = replace(two[1], audio=two[1].audio[:100])
    clips = [("one", Videos(9, bad=frozenset({0, 4, 5, 6}))), ("two", two)]
    done = pack(clips, tmp_path / "p", pixels=16, spec_frames=24, size=18, workers=0, progress=False)
    assert (done.clips, done.skipped) == (7, {"no audio track": 3, "not a media file": 1, "too little audio": 1})
    assert "7 clips" in str(done) and "3 no audio track" in str(done)
    source = Packed(tmp_path / "p")
    assert source.header.ids == [f"None/{i}" for i in (1, 2, 3, 7, 8, 0, 2)]
    assert close(source[4], Videos(9)[8]) and source.labels(5).task == "two"
    records = [json.loads(line) for line in (tmp_path / "p" / "skipped.jsonl").read_text().splitlines()]
    assert [record["id"] for record in records] == [0, 4, 5, 6, 10]
    assert records[0]["path"] == "file0.mp4" and records[0]["remedy"] == "leave it out"
    with pytest.raises(StellaError, match="packed with other settings"):
        packed(tmp_path / "p", clips, pixels=8)
    assert (tmp_path / "p" / "skipped.jsonl").exists()  # a refusal changes nothing
    with pytest.raises(StellaError, match=r"no clip could be used .*1 no audio track"):
        packed(tmp_path / "none", Videos(2, bad=frozenset({0, 1})))
    assert not (tmp_path / "none").exists() and not (tmp_path / "none.tmp").exists()


def test_workers_write_the_same_and_survive_a_clip_that_hangs(tmp_path: Path) -> None:
    alone = packed(tmp_path / "a", Videos(20, bad=frozenset({3, 11})))
    pooled = packed(tmp_path / "b", Videos(20, bad=frozenset({3}), hang=frozenset({11})), workers=2, time_limit=0.5)
    for name in ("frames.u8", "waveforms.i16", "lengths.i64", "clips.json"):
        assert (alone.root / name).read_bytes() == (pooled.root / name).read_bytes()
    listed = (pooled.root / "skipped.jsonl").read_text()
    assert "time limit" in listed and "file11.mp4" in listed


def test_wide_pictures_become_squares_or_keep_the_width_named(tmp_path: Path) -> None:
    """A square's centre crop is the whole picture's; what does not fill the box is scaled until it does."""
    wide = Videos(4, width=25)
    assert torch.equal(packed(tmp_path / "s", wide)[1].video, wide[1].video[..., 3:21])
    assert close(packed(tmp_path / "w", wide, width=25)[1], wide[1])
    plain, ours = (next(evaluation_batches(s, CONFIG)) for s in (wide, Packed(tmp_path / "s")))
    assert (plain.video.int() - ours.video.int()).abs().max() <= 1  # coordinates are rounded otherwise
    mixed = packed(tmp_path / "m", [("w", wide), ("s", Videos(1))], width=25)
    assert mixed[4].video.shape == (2, 3, 18, 25)
    grown = Videos(1)[0].video[:, :, 4:14].float().mean()  # 18 × 25 of 25 × 25: the rows in the middle
    assert mixed[4].video.float().mean() == pytest.approx(grown.item(), abs=4)
    with pytest.raises(StellaError, match=r"None/0 has 3 frames and the clips before it 2; give"):
        packed(tmp_path / "f", [("a", Videos(2)), ("b", Videos(2, frames=3))])


class OnDisk(Videos):
    """It knows the ids of its clips without reading them."""

    def origin(self, index: int) -> Origin:
        return Origin(f"{self.task}/{index}", "")

    def stamp(self, index: int) -> str:
        return ""


@dataclass(frozen=True)
class Dying(OnDisk):
    """The process is interrupted at this clip."""

    at: int = 10

    def __getitem__(self, index: int) -> Clip:
        if index == self.at:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_it_goes_on_after_a_kill_with_the_same_bytes(tmp_path: Path) -> None:
    whole = contents(packed(tmp_path / "whole", Videos(20)).root)
    for torn in (None, "frames.u8", "waveforms.i16", "lengths.i64", "packing.jsonl"):
        out = tmp_path / f"torn {torn}"
        with pytest.raises(KeyboardInterrupt):
            packed(out, Dying(20, at=18))
        with pytest.raises(StellaError, match="no packed clips"):
            Packed(out)
        if torn:
            os.truncate(out / torn, (out / torn).stat().st_size - 5)
        read: list[int] = []

        class Noted(OnDisk):
            def __getitem__(self, index: int, read: list[int] = read) -> Clip:
                read.append(index)
                return super().__getitem__(index)

        assert len(packed(out, Noted(20))) == 20 and contents(out) == whole
        assert min(read) == (15 if torn else 16)  # clips are handed over by eights


def test_a_whole_folder_takes_up_new_clips_and_keeps_the_others(tmp_path: Path) -> None:
    grown = contents(packed(tmp_path / "all", [("one", Videos(9)), ("two", Videos(4, "b"))]).root)
    out = packed(tmp_path / "p", [("one", Videos(9))]).root
    before = Packed(out)
    done = pack([("one", Dying(9, at=3)), ("two", Videos(4, "b"))], out, pixels=16, spec_frames=24, size=18,
                workers=0, progress=False)  # fmt: skip
    assert (done.clips, done.added) == (13, 4) and contents(out) == grown
    assert len(before) == 9 and close(before[8], Videos(9)[8])  # whoever had it open reads on
    with pytest.raises(KeyboardInterrupt):  # killed while it grew: the folder is what it was
        packed(out, [("one", Videos(9)), ("two", Videos(4, "b")), ("three", Dying(20, "c", at=12))])
    assert len(Packed(out)) == 13
    assert len(packed(out, [("one", Videos(9)), ("two", Videos(4, "b")), ("three", Videos(20, "c"))])) == 33
    for other in ({"size": 20}, {"pixels": 8}, {"spec_frames": 30}, {"width": 25}):
        with pytest.raises(StellaError, match=r"p was packed with other settings: .* was \d+ and is now \d+"):
            packed(out, [("one", Videos(9))], **other)


def test_what_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "p.tmp").mkdir()
    (tmp_path / "p.tmp" / "thesis.txt").write_text("precious")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "frames.u8").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "file").write_text("precious")
    for out in ("other", "link", "file"):
        with pytest.raises(StellaError, match=r"holds other files|is a file"):
            packed(tmp_path / out, Videos(3))
    packed(tmp_path / "p", Videos(3))
    with pytest.raises(StellaError, match="no clip could be used"):
        packed(tmp_path / "none", Videos(2, bad=frozenset({0, 1})))
    with lock(tmp_path / "p" / ".lock"), pytest.raises(StellaError, match="p is in use by process"):
        packed(tmp_path / "p", Videos(3))
    precious = (tmp_path / "p.tmp" / "thesis.txt", tmp_path / "other" / "frames.u8", tmp_path / "file")
    assert all(path.read_text() == "precious" for path in precious) and not (tmp_path / "none").exists()


def test_windows_are_stored_for_training_to_draw_from(tmp_path: Path) -> None:
    one, five = packed(tmp_path / "1", Long(6)), packed(tmp_path / "5", Long(6), windows=5)
    assert (one.header.windows, five.header.windows) == (1, 5) and len(five) == 6
    assert (tmp_path / "5" / "frames.u8").stat().st_size == 5 * (tmp_path / "1" / "frames.u8").stat().st_size
    asked = (0, 0.19, 0.21, 0.5, 0.79, 0.81, 1)
    assert levels(torch.stack([five.clip(1, window).video for window in asked])) == [100, 100, 120, 140, 160, 180, 180]
    for source in (one, five):  # the middle one unless another is asked for
        assert levels(source[3].video[None]) == [140] and levels(source.tensors([3, 2])[0]) == [140, 40]
    view = join([part(five, [4]), part(five, [3])])
    assert isinstance(view, ArraySource)
    view.expect([1, 0], windows=[0.9, 0.1])
    assert levels(view.tensors([1, 0], windows=[0.9, 0.1])[0]) == [180, 0]
    assert torch.equal(five[2].audio, one[2].audio)
    assert same(evaluation_batches(five, CONFIG), evaluation_batches(one, CONFIG))


@pytest.mark.parametrize("windows", [0, 2, -1])
def test_windows_are_odd(tmp_path: Path, windows: int) -> None:
    with pytest.raises(StellaError, match=rf"windows={windows} must be odd"):
        packed(tmp_path / "p", Long(1), windows=windows)
    with pytest.raises(StellaError, match="one window each; leave it out"):
        packed(tmp_path / "p", Videos(1), windows=3)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_and_the_same_call_goes_on(tmp_path: Path) -> None:
    whole = contents(packed(tmp_path / "whole", Videos(9)).root)
    for most in (0, 50, 5000, 17_000):
        with small_disk(most), pytest.raises(StellaError, match=r"cannot be written .* free some space and run again"):
            packed(tmp_path / str(most), Videos(9))
        assert contents(packed(tmp_path / str(most), Videos(9)).root) == whole
