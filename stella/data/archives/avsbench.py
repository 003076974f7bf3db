"""AVSBench: five frames a video, with the mask of the sounding object; S4 has one source, MS3 several."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from stella.clip import Clip, Labels
from stella.data.archives.base import ArchiveConfig, first_existing, heard, read_table, without_header
from stella.errors import StellaError
from stella.media.stills import read_mask, read_picture, read_sound

PICTURES = 5  # of a video, one a second
SHOWN_AT = 15 / 16  # of each second: when its picture was taken
SOUND = 5.12  # seconds of sound, at most
SPLITS = {"train": "train", "validation": "val", "test": "test"}


@dataclass(frozen=True)
class AVSBenchConfig(ArchiveConfig):
    """S4 or MS3 in the layout of their authors: `visual_frames`, `gt_masks` and `audio_wav` below `path`.

    A model takes `frames` pictures at a time: the first ones are a clip, and the last ones another in which only the
    frames count that the first does not have. Each mask is so met once.
    """

    source: Literal["avsbench"] = "avsbench"  # a public data set
    serves: ClassVar[tuple[str, ...]] = ("segment", "localise")

    subset: Literal["s4", "ms3"] = "s4"  # one source, or several

    def part(self, name: str) -> "Frames":
        split, s4 = SPLITS[name], self.subset == "s4"
        rows = read_table(first_existing(self.root, f"{self.subset}_meta_data.csv"))
        rows = without_header(rows, "name", "start") if s4 else without_header(rows, "video_id")
        columns = 4 if s4 else 2
        if wrong := [row for row in rows if len(row) != columns]:
            raise StellaError(
                f"{self.subset}_meta_data.csv has a row of {len(wrong[0])} columns, not {columns}; fetch it again"
            )
        chosen = [(row[0], row[2] if s4 else "") for row in rows if row[-1].strip() == split]
        if not chosen:
            raise StellaError(f"{self.subset}_meta_data.csv in {self.root} has no video of the split {split}; check it")
        masks = 1 if s4 and name == "train" else PICTURES
        inputs = self.inputs()
        return Frames(self.root, chosen, split, inputs.frames, masks, inputs.duration)


class Frames:
    """Clips of `frames` pictures each, that together show every picture with a mask once.

    The sound is all five seconds, or as many as a clip has around its pictures.
    """

    def __init__(
        self, root: Path, videos: list[tuple[str, str]], split: str, frames: int, masks: int, duration: float
    ) -> None:
        self.root, self.videos, self.split = root, videos, split
        self.frames, self.masks, self.duration = min(frames, PICTURES), masks, duration
        if frames > PICTURES:
            raise StellaError(f"data.frames={frames} but a video of AVSBench has {PICTURES}; set it lower")
        starts = range(0, masks, self.frames)
        self.starts = [min(start, PICTURES - self.frames) for start in starts]

    def __len__(self) -> int:
        return len(self.videos) * len(self.starts)

    def __getitem__(self, index: int) -> Clip:
        (name, category), which = self.videos[index // len(self.starts)], index % len(self.starts)
        first = self.starts[which]
        pictures = [read_picture(self._path("visual_frames", name, category, first + i)) for i in range(self.frames)]
        known = [which * self.frames <= first + i < self.masks for i in range(self.frames)]
        masks = [
            read_mask(self._path("gt_masks", name, category, first + i)) if known[i] else None
            for i in range(self.frames)
        ]
        blank = next(torch.zeros_like(mask) for mask in masks if mask is not None)
        mask = torch.stack([blank if each is None else each for each in masks])
        wav = self.root / "audio_wav" / self.split / category / f"{name}.wav"
        middle = first + (self.frames - 1) / 2 + SHOWN_AT
        start = min(max(middle - self.duration / 2, 0.0), max(PICTURES - self.duration, 0.0))
        sound = heard(read_sound(wav, min(self.duration, SOUND), start), wav)
        labels = Labels(category or None, None, mask, masked=torch.tensor(known))
        return Clip(f"{name}/{first + 1}", torch.stack(pictures), sound, labels)

    def _path(self, kind: str, name: str, category: str, number: int) -> Path:
        """S4 has folders of splits and categories; MS3's frames have neither, and `.mp4` in their names."""
        if category:
            return self.root / kind / self.split / category / name / f"{name}_{number + 1}.png"
        if kind == "visual_frames":
            return self.root / kind / name / f"{name}.mp4_{number + 1}.png"
        return self.root / kind / self.split / name / f"{name}_{number + 1}.png"

    def class_of(self, index: int) -> str | None:
        return self.videos[index // len(self.starts)][1] or None

    def location(self, index: int) -> str:
        name, category = self.videos[index // len(self.starts)]
        return str(self._path("visual_frames", name, category, 0).parent)
