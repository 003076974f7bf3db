"""Readers of public data sets, each on a miniature in its exact layout, with the dirt that real copies have."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from helpers.archives import pack
from helpers.media_files import level_frame, tone, write, write_video
from PIL import Image
from rich.console import Console

from stella.clip import BACKGROUND, Clip
from stella.data.archives.ave import AVEConfig
from stella.data.archives.avsbench import AVSBenchConfig
from stella.data.archives.base import ArchiveConfig
from stella.data.archives.msrvtt import MSRVTTConfig
from stella.data.archives.sources import FlickrConfig, VGGSSConfig, box_mask, read_boxes
from stella.data.config import data_config
from stella.data.downstream import masked
from stella.data.skipped import Skipped
from stella.data.stream import StreamConfig, evaluation_batches
from stella.errors import ClipError, StellaError
from stella.files import read_lines
from stella.media.fbank import MEAN, STD, fbank
from stella.media.inputs import Inputs
from stella.media.odd import SOUNDS
from stella.model import weights
from stella.model.cav import CAV, preset
from stella.transfer.config import transfer_config
from stella.transfer.run import transfer

SMALL = {"pixels": 32, "duration": 1.0, "span": None}
STREAM = StreamConfig(batch_size=4, size=32, spec_frames=96, most_bad=1.0)
STREAM_OF_SECONDS = StreamConfig(batch_size=4, size=32, spec_frames=200)


def wav(path: Path, seconds: float = 1.0, level: float = 0.5) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, None, tone(seconds, 16_000, level=level), audio_codec="pcm_s16le")


def png(path: Path, pixels: np.ndarray, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    if mode == "P":
        image = Image.fromarray(pixels, "P")
        image.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0] + [0] * 759)
    image.save(path)


def rows(path: Path, *lines: list[str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as text:
        csv.writer(text).writerows(lines)


# ---- AVSBench


def picture(level: int, side: int = 32) -> np.ndarray:
    return np.full((side, side, 3), level, np.uint8)


def square(side: int = 32) -> np.ndarray:
    mask = np.zeros((side, side), np.uint8)
    mask[8:16, 4:12] = 255
    return mask


@pytest.fixture
def s4(tmp_path: Path) -> Path:
    lines = [["name", "start", "category", "split"]]
    for number, split in enumerate(["train", "train", "val", "test"]):
        name, folder = f"vid{number}_1000_6000", f"{split}/dog_barking/vid{number}_1000_6000"
        lines.append([name, "1", "dog_barking", split])
        for i in range(1, 6):
            png(tmp_path / f"visual_frames/{folder}/{name}_{i}.png", picture(10 * number + i))
        for i in range(1, 2 if split == "train" else 6):
            png(tmp_path / f"gt_masks/{folder}/{name}_{i}.png", square() // (1 if i < 5 else 255 // 200 + 1))
        wav(tmp_path / f"audio_wav/{split}/dog_barking/{name}.wav", seconds=5.0)
    rows(tmp_path / "s4_meta_data.csv", *lines)
    return tmp_path


def test_s4_has_one_mask_to_train_on_and_five_to_test(s4: Path) -> None:
    config = AVSBenchConfig(path=str(s4), **SMALL)
    train, test = config.part("train"), config.part("test")
    assert len(train) == 2 and len(test) == 2 and len(config.part("validation")) == 2
    clip = train[1]
    assert clip.video.shape == (4, 3, 32, 32) and clip.video[:, 0, 0, 0].tolist() == [11, 12, 13, 14]
    assert clip.labels.masked is not None and clip.labels.masked.tolist() == [True, False, False, False]
    assert clip.labels.mask is not None and clip.labels.mask[0].sum() == 64 and clip.labels.name == "dog_barking"
    # Four frames and then the fifth, with the three before it as company: every mask counts once.
    first, second = test[0], test[1]
    assert first.labels.masked is not None and second.labels.masked is not None
    assert first.labels.masked.tolist() == [True] * 4 and second.labels.masked.tolist() == [False] * 3 + [True]
    assert first.video[:, 0, 0, 0].tolist() == [31, 32, 33, 34] and second.video[3, 0, 0, 0] == 35
    with pytest.raises(StellaError, match="no ground truth for classify; use it for segment"):
        config.downstream("classify")


def test_bad_masks_are_skipped_counted_and_listed(s4: Path, tmp_path: Path) -> None:
    folder = s4 / "gt_masks/train/dog_barking"
    (folder / "vid0_1000_6000/vid0_1000_6000_1.png").unlink()
    png(folder / "vid1_1000_6000/vid1_1000_6000_1.png", square(48))
    skipped, config = Skipped(tmp_path / "skipped.jsonl"), AVSBenchConfig(path=str(s4), **SMALL)
    with pytest.raises(StellaError, match="too few clips"):
        list(evaluation_batches(masked(config.part("train")), STREAM, "cpu", skipped))
    assert skipped.counts == {"missing mask": 1, "mask of another size": 1}
    (folder / "vid0_1000_6000/vid0_1000_6000_1.png").write_bytes(b"no picture")
    with pytest.raises(ClipError, match="damaged picture"):
        config.part("train")[0]
    for level in (0.0, 0.9 * SOUNDS):
        wav(s4 / "audio_wav/test/dog_barking/vid3_1000_6000.wav", seconds=5.0, level=level)
        with pytest.raises(ClipError, match="silent audio"):
            config.part("test")[0]


def test_masks_are_cropped_with_their_frames(s4: Path) -> None:
    [batch] = evaluation_batches(masked(AVSBenchConfig(path=str(s4), **SMALL).part("train")), STREAM)
    assert batch.video.shape == (2, 4, 5, 32, 32)
    assert (batch.video[0, 0, 3] == torch.from_numpy(square())).all() and batch.video[0, :, 4, 0, 0].tolist() == [
        255,
        0,
        0,
        0,
    ]


def test_ms3_has_masks_in_a_palette(tmp_path: Path) -> None:
    rows(tmp_path / "ms3_meta_data.csv", ["video_id", "split"], ["abc", "train"], ["def", "test"])
    for name, split in (("abc", "train"), ("def", "test")):
        for i in range(1, 6):
            png(tmp_path / f"visual_frames/{name}/{name}.mp4_{i}.png", picture(i))
            png(tmp_path / f"gt_masks/{split}/{name}/{name}_{i}.png", (square() > 0).astype(np.uint8) * 2, "P")
        wav(tmp_path / f"audio_wav/{split}/{name}.wav", seconds=5.0)
    config = AVSBenchConfig(path=str(tmp_path), subset="ms3", **SMALL)
    clip = config.part("train")[0]
    assert clip.labels.mask is not None and clip.labels.mask.sum((1, 2)).tolist() == [64] * 4
    with pytest.raises(StellaError, match="no video of the split val"):
        config.part("validation")


@pytest.mark.slow  # worker processes
def test_a_run_on_s4_trains_and_lists_what_it_could_not_use(s4: Path, tmp_path: Path) -> None:
    (s4 / "gt_masks/train/dog_barking/vid0_1000_6000/vid0_1000_6000_1.png").unlink()
    sizes = preset("tiny", image_size=32, spec_frames=96)
    weights.save(tmp_path / "w.safetensors", CAV(sizes))
    data = {"source": "avsbench", "path": str(s4), "pixels": 32, "duration": 0.96}
    values = [f"weights.source={tmp_path / 'w.safetensors'}", "stream.epochs=2", "warmup_epochs=0", "train.device=cpu"]
    result = transfer(transfer_config("segment", data, values), tmp_path / "run", console=Console(file=io.StringIO()))
    assert result.end["skipped"] == {"missing mask": 1} and result.end["parts"] == [2, 2, 2]
    assert read_lines(tmp_path / "run" / "skipped.jsonl")[0]["id"] == "train/0"


# ---- AVE


@pytest.fixture(scope="module")
def ten_seconds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("ave") / "a.mp4", 10)


@pytest.fixture
def ave(tmp_path: Path, ten_seconds: Path) -> Path:
    (tmp_path / "AVE").mkdir()
    for name in ("vid_a", "vid_b"):
        (tmp_path / f"AVE/{name}.mp4").symlink_to(ten_seconds)
    lines = ["Church bell&vid_a&good&2&4", "Bark, loud&vid_b&good&0&10", "Church bell&vid_a&good&5&5"]
    (tmp_path / "Annotations.txt").write_text("Category&VideoID&Quality&StartTime&EndTime\n" + "\n".join(lines) + "\n")
    (tmp_path / "trainSet.txt").write_text("\n".join(lines[:1]))
    (tmp_path / "valSet.txt").write_text(lines[1])
    (tmp_path / "testSet.txt").write_text(lines[2])
    return tmp_path


@pytest.mark.parametrize("header", [True, False])
def test_ave_names_every_second(ave: Path, header: bool) -> None:
    if not header:
        file = ave / "Annotations.txt"
        file.write_text(file.read_text().partition("\n")[2])
    config = AVEConfig(path=str(ave), pixels=32, duration=2.0)
    parts = config.downstream("events")
    assert parts.classes == ("Church bell", "Bark, loud", BACKGROUND) and parts.segments == 10
    names = [config.part("train").class_of(i) for i in range(10)]
    assert names == [BACKGROUND] * 2 + ["Church bell"] * 2 + [BACKGROUND] * 6
    assert config.remarks() == [
        "more than once: 1 video",
        "also in the training part: 1 test video",
        "with an empty event: 1 row",
    ]
    assert {config.part("test").class_of(i) for i in range(10)} == {BACKGROUND}


def test_a_second_of_ave_has_its_own_frames_and_sound(ave: Path) -> None:
    train = AVEConfig(path=str(ave), pixels=32, duration=2.0).part("train")
    clip = train[2]
    assert clip.video.shape[0] == 4 and len(clip.audio) == 16_000
    [batch, *_] = evaluation_batches(train, STREAM_OF_SECONDS)
    own = fbank(clip.audio[None], frames=98, normalise=False)[0]
    padded = torch.nn.functional.pad(own, (0, 0, 51, 51))  # zeros before normalisation: 200 frames
    assert torch.equal(batch.audio[2], (padded - MEAN) / STD)
    red = clip.video[:, 0].float().mean((1, 2))  # rises by 10 a frame, 8 frames a second
    assert (red.diff() > 10).all()


def test_ave_by_row_numbers(ave: Path) -> None:
    for name in ("trainSet.txt", "valSet.txt", "testSet.txt"):
        (ave / name).unlink()
    for name, order in (("train", [0, 2]), ("val", [1]), ("test", [7])):
        with h5py.File(ave / f"{name}_order.h5", "w") as file:
            file["order"] = np.array(order)
    config = AVEConfig(path=str(ave))
    assert [event.video for event in config.part("train").events] == ["vid_a", "vid_a"]
    with pytest.raises(StellaError, match=r"names row 7 and Annotations\.txt has 3"):
        config.part("test")
    with h5py.File(ave / "val_order.h5", "w") as file:
        file["sequence"] = np.array([1])
    with pytest.raises(StellaError, match="has no key `order` but sequence"):
        config.part("validation")
    (ave / "val_order.h5").write_bytes(b"text")
    with pytest.raises(StellaError, match="is not an HDF5 file"):
        config.part("validation")
    (ave / "Annotations.txt").write_text("Church bell;vid_a\n")
    with pytest.raises(StellaError, match="line 1 is 'Church bell;vid_a'"):
        config.part("train")


# ---- MSR-VTT


def test_msrvtt_by_lists_and_by_annotations(tmp_path: Path) -> None:
    for number in (0, 1, 2, 17):
        write_video(tmp_path / f"videos/all/video{number}.mp4", sound=number != 1, seed=number)
    (tmp_path / "train_list_miech.txt").write_text("\n".join(f"video{n}" for n in (0, 1, *range(10, 18))) + "\n")
    (tmp_path / "test_list_miech.txt").write_text("video2\n")
    config = MSRVTTConfig(path=str(tmp_path), **SMALL)
    parts = config.downstream("retrieval")
    assert [[part[i].id for i in (0,)] for part in (parts.train, parts.validation, parts.test)] == [
        ["video0"],
        ["video17"],  # the tenth of the list, whatever is there
        ["video2"],
    ]
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [2, 1, 1]
    assert config.remarks() == ["left out: 7 of 11 listed videos, which are not here"]
    skipped = Skipped()
    [batch] = evaluation_batches(parts.train, STREAM, "cpu", skipped)
    assert batch.ids.tolist() == [0] and skipped.counts == {"no audio track": 1}
    for which in ("train", "test"):
        (tmp_path / f"{which}_list_miech.txt").unlink()
    about = [{"video_id": f"video{n}", "split": s} for n, s in enumerate(("train", "validate", "test"))]
    (tmp_path / "videodatainfo.json").write_text(json.dumps({"videos": about, "sentences": []}))
    assert len(config.part("train")) + len(config.part("validation")) == 2 and config.part("test")[0].id == "video2"
    (tmp_path / "videodatainfo.json").write_text(json.dumps({"annotations": []}))
    with pytest.raises(StellaError, match="names no splits; copy train_list_miech"):
        config.part("train")


def test_msrvtt_in_one_tar(tmp_path: Path) -> None:
    videos = {f"MSR-VTT/all/video{n}.mp4": write_video(tmp_path / "v.mp4", seed=n).read_bytes() for n in range(2)}
    (tmp_path / "v.mp4").unlink()
    pack(tmp_path / "msrvtt.tar", videos)
    (tmp_path / "test_list_miech.txt").write_text("video0\nvideo1\nvideo2\n")
    test = MSRVTTConfig(path=str(tmp_path), **SMALL).part("test")
    skipped = Skipped()
    [batch] = evaluation_batches(test, STREAM, "cpu", skipped)
    assert batch.ids.tolist() == [0, 1] and len(test) == 2 and not skipped.counts
    assert test.location(0).endswith("msrvtt.tar/MSR-VTT/all/video0.mp4") and test.stamp(0) == test.stamp(1)
    assert test.seconds(1) == pytest.approx(1.0, abs=0.1)


# ---- VGG-SS and Flickr-SoundNet


def test_vggss_boxes_are_clipped_and_empty_ones_dropped(tmp_path: Path) -> None:
    write_video(tmp_path / "aaaaaaaaaaa_000005.mp4")
    boxes = [[-0.5, 0.0, 0.5, 0.5], [0.2, 0.2, 0.2, 0.9], [0.25, 0.25, 7.0, 0.75]]
    items = [{"file": "aaaaaaaaaaa_000005", "class": "a, b", "bbox": boxes}]
    items += [{"file": "bbbbbbbbbbb_000001", "class": "c", "bbox": [[2.0, 2.0, 3.0, 3.0]]}]
    items += [{"file": f"ccccccccccc_00000{n}", "class": "d", "bbox": [[0.0, 0.0, 1.0, 1.0]]} for n in range(3)]
    (tmp_path / "vggss.json").write_text(json.dumps(items))
    config = VGGSSConfig(path=str(tmp_path), **SMALL)
    test = config.part("test")
    assert len(test) == 1 and test.class_of(0) == "a, b"
    parts = config.downstream("localise")
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [0, 0, 1]
    mask = test[0].labels.mask
    assert mask is not None and mask.unique().tolist() == [0, 1]
    height, width = mask.shape[1:]
    assert mask[0, 0, 0] == 1 and mask[0, 0, width - 1] == 0 and mask[0, height // 2, width - 1] == 1
    assert config.remarks() == [
        "dropped: 2 boxes without an area inside the picture",
        "left out: 1 clip without a usable box",
        "left out: 3 of 4 listed videos, which are not here",
    ]
    (tmp_path / "aaaaaaaaaaa_000005.mp4").unlink()
    with pytest.raises(StellaError, match="has none of 4 listed videos"):
        config.part("test")
    (tmp_path / "vggss.json").write_text(json.dumps([{"file": "x"}]))
    with pytest.raises(StellaError, match="without file, class or bbox"):
        config.part("test")


def test_vggss_pictures_are_whole_and_of_the_middle(tmp_path: Path) -> None:
    """A box at the left edge of a wide picture is not cropped away, and the left of the picture lies under it."""
    frames = [level_frame(10 * half, 96, 48) for half in range(20)]
    for frame in frames:
        frame[:, :24] = 250
    write(tmp_path / "aaaaaaaaaaa_000005.mp4", frames, tone(10.0, 16_000), fps=2)
    (tmp_path / "vggss.json").write_text(
        json.dumps([{"file": "aaaaaaaaaaa_000005", "class": "a", "bbox": [[0.0, 0.0, 0.25, 1.0]]}])
    )
    clip = VGGSSConfig(path=str(tmp_path), pixels=32).part("test")[0]
    side = clip.video.shape[-1]
    assert clip.video.shape == (4, 3, side, side) and clip.labels.mask is not None
    under = clip.labels.mask[0].bool()
    assert under.float().mean() == pytest.approx(0.25, abs=0.03)
    for frame in clip.video.float().mean(1):  # 5 s of 10: the frame of 100, or the one before it
        assert frame[under].mean() == pytest.approx(250, abs=15)
        assert frame[:, side // 2 :].mean() == pytest.approx(95, abs=9)


@pytest.mark.parametrize(("width", "height"), [(64, 48), (144, 48), (48, 144)])
def test_boxes_lie_on_their_objects_in_pictures_of_any_shape(width: int, height: int, tmp_path: Path) -> None:
    """Very wide and very tall pictures are decoded without their edges."""
    box = (0.4, 0.3, 0.65, 0.7)
    frame = level_frame(20, width, height)
    frame[int(0.3 * height) : int(0.7 * height), int(0.4 * width) : int(0.65 * width)] = 240
    write(tmp_path / "aaaaaaaaaaa_000005.mp4", [frame] * 20, tone(10.0, 16_000), fps=2)
    items = [{"file": "aaaaaaaaaaa_000005", "class": "a", "bbox": [box]}]
    (tmp_path / "vggss.json").write_text(json.dumps(items))
    clip = VGGSSConfig(path=str(tmp_path), pixels=64).part("test")[0]
    seen, mask = clip.video[0].float().mean(0) > 130, clip.labels.mask[0] > 0  # type: ignore[index]
    assert (seen & mask).sum() > 0.8 * (seen | mask).sum()
    (tmp_path / "vggss.json").write_text(json.dumps([items[0] | {"bbox": [[0.0, 0.0, 0.05, 0.05]]}]))
    if width == 144:
        with pytest.raises(ClipError, match="no box inside the picture"):
            VGGSSConfig(path=str(tmp_path), pixels=64).part("test")[0]


SHORT = Inputs(duration=2.0, pixels=32, size=32, frames=4, span=None, spec_frames=208)


def heard_from(clip: Clip) -> tuple[float, float]:
    """The seconds from which on and up to which there is sound."""
    loud = (clip.audio.abs() > 0.1).nonzero()
    return float(loud[0]) / 16_000, float(loud[-1]) / 16_000


def beep(path: Path, seconds: float, begin: float, end: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    times = np.arange(round(seconds * 16_000)) / 16_000
    return write(path, None, tone(seconds, 16_000) * ((begin <= times) & (times < end)), audio_codec="pcm_s16le")


def test_clips_as_long_as_the_models_lie_around_the_pictures(s4: Path, tmp_path: Path) -> None:
    """The boxes of VGG-SS are of the middle frame; AVSBench's pictures of a clip are at 0.94, 1.94, 2.94 and 3.94 s."""
    frames = [level_frame(10 * half, 96, 48) for half in range(20)]
    sound = tone(10.0, 16_000) * (np.abs(np.arange(160_000) / 16_000 - 5.2) < 0.3)
    (tmp_path / "v").mkdir()
    write(tmp_path / "v/aaaaaaaaaaa_000005.mp4", frames, sound, fps=2)
    boxed = [{"file": "aaaaaaaaaaa_000005", "class": "a", "bbox": [[0.0, 0.0, 0.25, 1.0]]}]
    (tmp_path / "v/vggss.json").write_text(json.dumps(boxed))
    config = VGGSSConfig(path=str(tmp_path / "v")).alike(SHORT)
    assert config.inputs().plan() == replace(SHORT, span=0.001).plan()
    clip = config.part("test")[0]
    assert heard_from(clip) == pytest.approx((0.9, 1.5), abs=0.05) and len(clip.audio) == 32_000
    assert clip.video[:, :, :, 20:].float().mean() == pytest.approx(95, abs=9)
    for file in s4.rglob("*.wav"):
        beep(file, 5.0, 2.0, 2.5)
    whole, short = (AVSBenchConfig(path=str(s4)).alike(inputs).part("test") for inputs in (None, SHORT))
    assert heard_from(whole[0]) == pytest.approx((2.0, 2.5), abs=0.01) and len(whole[0].audio) == 80_000
    assert heard_from(short[0]) == pytest.approx((0.5625, 1.0625), abs=0.01) and len(short[0].audio) == 32_000
    with pytest.raises(ClipError, match="silent"):
        AVSBenchConfig(path=str(s4)).alike(replace(SHORT, duration=0.5)).part("test")[1]  # 1 s later: 3.19 to 3.69 s


def test_flickr_takes_the_consensus_of_annotators(tmp_path: Path) -> None:
    rows(tmp_path / "flickr_test.csv", ["123", "4"], ["456", "4"], ["789", "4"])
    for id in ("123", "456"):
        (tmp_path / "frames").mkdir(exist_ok=True)
        Image.fromarray(picture(50, 64)).save(tmp_path / f"frames/{id}.jpg")
        wav(tmp_path / f"audio/{id}.wav")
    (tmp_path / "Annotations").mkdir()
    box = "<bbox><name>x</name><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bbox>"
    two = box.format(0, 0, 128, 128) + box.format(64, 0, 192, 128)
    (tmp_path / "Annotations/123.xml").write_text(f"<annotation><object>{two}</object></annotation>")
    outside = box.format(300, 300, 400, 400)
    (tmp_path / "Annotations/456.xml").write_text(f"<annotation><object>{outside}</object></annotation>")
    test = FlickrConfig(path=str(tmp_path), **SMALL).part("test")
    assert not len(FlickrConfig(path=str(tmp_path), **SMALL).part("train"))
    clip = test[0]
    assert clip.video.shape == (4, 3, 64, 64) and clip.labels.mask is not None
    assert clip.labels.mask[0, 0, ::16].tolist() == [0.5, 1.0, 0.5, 0.0]
    beep(tmp_path / "audio/123.wav", 6.0, 3.0, 3.5)
    assert heard_from(FlickrConfig(path=str(tmp_path)).alike(SHORT).part("test")[0]) == pytest.approx(
        (1, 1.5), abs=0.01
    )
    for index, reason in ((1, "no box inside the picture"), (2, "missing file in audio")):
        with pytest.raises(ClipError, match=reason):
            test[index]
    (tmp_path / "Annotations/123.xml").write_text("<annotation>")
    with pytest.raises(ClipError, match="damaged annotation"):
        read_boxes(tmp_path / "Annotations/123.xml")


def test_box_masks_by_hand() -> None:
    assert box_mask([(0.0, 0.0, 0.5, 0.5)], 4, 4).sum() == 4
    assert box_mask([(0.0, 0.0, 0.5, 0.5), (0.0, 0.0, 1.0, 0.5)], 4, 4).max() == 1
    assert box_mask([(0.9, 0.9, 0.1, 0.1)], 4, 4).sum() == 0  # corners exchanged


def test_an_archive_means_the_same_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, there in (("mine", str(tmp_path / "mine")), ("s3://bucket/ave", "s3://bucket/ave")):
        assert data_config({"source": "ave", "path": path}).absolute().path == there  # type: ignore[union-attr]


def test_archives_are_sources_of_the_configuration() -> None:
    assert isinstance(data_config({"source": "ave", "path": "x"}), AVEConfig)
    with pytest.raises(StellaError, match="needs your copy of it"):
        data_config({"source": "vggss"})


@pytest.mark.parametrize(
    ("config", "task", "file"),
    [
        (AVSBenchConfig, "segment", "s4_meta_data.csv"),
        (AVEConfig, "events", "trainSet.txt, train_order.h5"),
        (MSRVTTConfig, "retrieval", "train_list_miech.txt"),
        (VGGSSConfig, "localise", "vggss.json"),
        (FlickrConfig, "localise", "flickr_test.csv"),
    ],
)
def test_a_missing_folder_is_told_apart_from_missing_files(
    config: type[ArchiveConfig], task: str, file: str, tmp_path: Path
) -> None:
    with pytest.raises(StellaError, match=r"nope is not a folder; check data\.path"):
        config(path=str(tmp_path / "nope")).downstream(task)
    none, copy = ("no", "it") if "," not in file and config is not MSRVTTConfig else ("none of", "one of them")
    with pytest.raises(StellaError, match=rf"has {none} {file}.*; check data\.path, or copy {copy} there"):
        config(path=str(tmp_path)).downstream(task)
