"""VGG-SS and Flickr-SoundNet: one picture a clip, with boxes around the sounding object, to test localisation on.

Models are compared on whole pictures, squeezed to squares: a centre crop would cut boxes off.
"""

import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stella.clip import Clip, Labels
from stella.data.archives.base import (
    ArchiveConfig,
    Item,
    Videos,
    find_some,
    first_existing,
    heard,
    read_table,
    read_tree,
    told_missing,
    without_header,
)
from stella.data.archives.members import readable
from stella.errors import ClipError, StellaError, number_of
from stella.media.convert import ASPECT_MOST
from stella.media.decode import read_duration
from stella.media.files import open_media
from stella.media.stills import read_picture, read_sound, squeezed

TIME_LIMIT = 30.0  # seconds to open a file
Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in shares of the picture


def middle_start(whole: float | None, seconds: float) -> float:
    """Where the middle `seconds` of a file begin that lasts `whole`; 0 if that is not known."""
    return max(0.0, ((whole or 0.0) - seconds) / 2)


def box_mask(boxes: Sequence[Box], height: int, width: int, annotators: int = 1) -> Tensor:
    """float [H, W]: the share of annotators that must agree, and do, at most 1.

    Boxes are clipped to the picture. With one annotator it is the union of the boxes, with two their consensus.
    """
    total = torch.zeros(height, width)
    for x0, y0, x1, y1 in boxes:
        left, right = (int(min(max(x, 0.0), 1.0) * width) for x in (x0, x1))
        top, bottom = (int(min(max(y, 0.0), 1.0) * height) for y in (y0, y1))
        if right > left and bottom > top:
            total[top:bottom, left:right] += 1
    return (total / annotators).clamp_max(1)


def _box(values: Sequence[float]) -> Box:
    x0, y0, x1, y1 = map(float, values)
    return x0, y0, x1, y1


def usable(box: Sequence[float]) -> bool:
    """Whether anything is left of a box inside the picture."""
    x0, y0, x1, y1 = (min(max(float(value), 0.0), 1.0) for value in box)
    return x1 > x0 and y1 > y0


@dataclass(frozen=True)
class VGGSSConfig(ArchiveConfig):
    """`vggss.json` and the videos of VGGSound below `path`, named as there. Boxes are shares of the picture.

    All clips are to test on: other parts have none. All frames are the clip's middle one, which was annotated. Boxes
    without area are dropped, clips without a box or a file are left out; `remarks` counts them.
    """

    source: Literal["vggss"] = "vggss"  # a public data set
    serves: ClassVar[tuple[str, ...]] = ("localise",)

    span: float | Literal["auto"] | None = 0.001  # seconds of the frames' window; none: the whole clip

    def part(self, name: str) -> "Boxed":
        boxes = self._boxed() if name == "test" else {}
        items = [Item(file, path, boxes[file][0]) for file, path in find_some(self.root, list(boxes)).items()]
        return Boxed(Centred(items, self.plan), [boxes[item.id][1] for item in items])

    def _boxed(self) -> dict[str, tuple[str, list[Box]]]:
        return {file: kept for file, kept in self._boxes().items() if kept[1]}

    def _boxes(self) -> dict[str, tuple[str, list[Box]]]:
        tree = read_tree(first_existing(self.root, "vggss.json"))
        try:
            return {
                str(each["file"]): (str(each["class"]), [_box(box) for box in each["bbox"] if usable(box)])
                for each in tree
            }
        except (KeyError, TypeError, ValueError) as error:
            raise StellaError(
                f"vggss.json in {self.root} has an item without file, class or bbox ({error}); fetch it again"
            ) from error

    def remarks(self) -> list[str]:
        tree = read_tree(first_existing(self.root, "vggss.json"))
        bad = sum(not usable(box) for each in tree for box in each["bbox"])
        empty = sum(not kept for _, kept in self._boxes().values())
        found = {f"dropped: {number_of(bad, 'box')} without an area inside the picture": bad}
        found |= {f"left out: {number_of(empty, 'clip')} without a usable box": empty}
        missing = told_missing(self.root, list(self._boxed()))
        return [*(sentence for sentence, count in found.items() if count), *missing]


class Centred(Videos):
    """Clips from the middle of their files."""

    def start(self, index: int) -> float:
        with readable(self.items[index].path) as path:
            return middle_start(read_duration(path), self.plan.duration)


class Boxed:
    """Clips of videos with one mask for all frames, made of boxes. Pictures are squeezed to squares."""

    def __init__(self, videos: Videos, boxes: Sequence[list[Box]]) -> None:
        self.videos, self.boxes = videos, boxes

    def __len__(self) -> int:
        return len(self.videos)

    def __getitem__(self, index: int) -> Clip:
        clip = self.videos[index]
        video, shares = squeezed(clip.video), shown_shares(self.videos.items[index].path, clip.video)
        mask = box_mask([_zoomed(box, *shares) for box in self.boxes[index]], *video.shape[2:])
        if not mask.any():
            raise ClipError(self.location(index), "no box inside the picture", "leave this clip out")
        return Clip(clip.id, video, clip.audio, Labels(self.class_of(index), None, mask.expand(len(video), -1, -1)))

    def class_of(self, index: int) -> str | None:
        return self.videos.class_of(index)

    def location(self, index: int) -> str:
        return self.videos.location(index)


def shown_shares(path: Path, video: Tensor) -> tuple[float, float]:
    """The shares of a file's width and height that its frames show: very wide and very tall ones are cropped."""
    height, width = video.shape[-2:]
    if max(width, height) < (ASPECT_MOST - 0.1) * min(width, height):
        return 1.0, 1.0
    with readable(path) as file, open_media(file, time.monotonic() + TIME_LIMIT) as container:
        stream = container.streams.video[0]
        wide = stream.width * float(stream.sample_aspect_ratio or 1) / stream.height
    share = min(1.0, ASPECT_MOST / max(wide, 1 / wide))
    return (share, 1.0) if width > height else (1.0, share)


def _zoomed(box: Box, x: float, y: float) -> Box:
    """A box of a picture in its middle share of the width and height."""
    left, top = (1 - x) / 2, (1 - y) / 2
    return (box[0] - left) / x, (box[1] - top) / y, (box[2] - left) / x, (box[3] - top) / y


@dataclass(frozen=True)
class FlickrConfig(ArchiveConfig):
    """Flickr-SoundNet: `flickr_test.csv` (`id,frame`), `Annotations/ID.xml`, `frames/ID.jpg` and `audio/ID.wav`.

    All clips are to test on: other parts have none. Boxes are in pixels of a 256² picture; where two annotators agree
    the mask is 1, where one is alone a half. A model sees the one picture as all its frames.
    """

    source: Literal["flickr"] = "flickr"  # a public data set
    serves: ClassVar[tuple[str, ...]] = ("localise",)

    def part(self, name: str) -> "Stills":
        rows = without_header(read_table(first_existing(self.root, "flickr_test.csv")), "id")
        ids = [row[0].strip() for row in rows] if name == "test" else []
        inputs = self.inputs()
        return Stills(self.root, ids, inputs.frames, inputs.duration)


class Stills:
    """One picture, squeezed to a square, and the middle of one sound a clip."""

    def __init__(self, root: Path, ids: list[str], frames: int, duration: float) -> None:
        self.root, self.ids, self.frames, self.duration = root, ids, frames, duration

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Clip:
        id = self.ids[index]
        wav = self._one("audio", id, (".wav", ".mp3", ".flac"))
        picture = squeezed(read_picture(self._one("frames", id, (".jpg", ".png", ".jpeg")))[None])[0]
        boxes = [box for box in read_boxes(self._one("Annotations", id, (".xml",))) if usable(box)]
        if not boxes:
            raise ClipError(self.location(index), "no box inside the picture", "leave this clip out")
        mask = box_mask(boxes, picture.shape[1], picture.shape[2], annotators=2).expand(self.frames, -1, -1)
        start = middle_start(read_duration(wav), self.duration)
        sound = heard(read_sound(wav, self.duration, start), wav)
        return Clip(id, picture.expand(self.frames, -1, -1, -1).contiguous(), sound, Labels(None, None, mask))

    def _one(self, folder: str, id: str, suffixes: tuple[str, ...]) -> Path:
        places = [self.root / folder / f"{id}{suffix}" for suffix in suffixes]
        found = next((path for path in places if path.exists()), None)
        if found is None:
            raise ClipError(places[0], f"missing file in {folder}", "leave this clip out, or add the file")
        return found

    def location(self, index: int) -> str:
        return str(self.root / "Annotations" / f"{self.ids[index]}.xml")


def read_boxes(path: Path, side: int = 256) -> list[Box]:
    """The boxes of an XML file as shares of a picture of side²: each `bbox` has a name, xmin, ymin, xmax, ymax."""
    try:
        found = ElementTree.parse(path).getroot().iter("bbox")
        boxes = [[float(child.text or "nan") / side for child in list(box)[-4:]] for box in found]
    except (ElementTree.ParseError, ValueError) as error:
        raise ClipError(path, "damaged annotation", "fetch it again or leave the clip out") from error
    return [_box(box) for box in boxes if len(box) == 4]
