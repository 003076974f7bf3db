"""Clips that are set aside to measure with: chosen by hashes, stored small, never trained on.

Whether a recording is set aside depends on its name alone. Of all clips set aside, those with the smallest hashes are
kept: a uniform sample of everything that ever arrived, which needs no counter. The newest round is measured besides:
of a sample of all time its share becomes smaller and smaller.
"""

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from stella.clip import MIDDLE, Clip, Labels, Source
from stella.data.chunk import Job, make, read_clip
from stella.data.shards import DamagedSampleError, read_head, sample
from stella.data.skipped import Skipped
from stella.data.workers import Tick
from stella.errors import ClipError
from stella.files import write_bytes
from stella.learn.home import Plan
from stella.learn.items import Item
from stella.media.codecs import decode_flac, decode_jpegs
from stella.rng import seed_for

CHUNK = 8  # clips that a worker packs at a time
AHEAD = 2  # chunks of each worker: it packs one while another is written
THIRD = 3  # the share of the newest round among the clips that a round is measured with


def is_held(item: Item, share: float) -> bool:
    return seed_for("held out", item.recording) < share * 2**63


@dataclass(frozen=True)
class HeldClip:
    round: int
    item: Item

    @property
    def key(self) -> str:
        return hashlib.blake2b(self.item.id.encode(errors="surrogateescape"), digest_size=12).hexdigest()


def kept(plans: Sequence[Plan], most: int) -> list[HeldClip]:
    """The clips set aside by these rounds (from the first) that are kept: at most this many, oldest round first.

    A clip that could not be used, and came again, belongs to its last round.
    """
    every = {item.id: HeldClip(number, item) for number, plan in enumerate(plans, 1) for item in plan.held}
    return _some(every.values(), most)


def measured(plans: Sequence[Plan], most: int) -> list[HeldClip]:
    """The clips to measure the last of these rounds with: at most this many, oldest round first.

    Up to a third are its own, and more where earlier rounds have too few; the others are a uniform sample of all
    earlier ones.
    """
    own = {clip.item.id: clip for clip in _newest(plans, most)}
    old = [clip for clip in kept(plans[:-1], most) if clip.item.id not in own]
    places = max(most // THIRD, most - len(old))
    new = _some(own.values(), places)
    return [*_some(old, most - len(new)), *new]


def stored(plans: Sequence[Plan], most: int) -> list[HeldClip]:
    """The clips to be on the disk after these rounds: those that are kept, and those the last one is measured with."""
    every = {clip.item.id: clip for clip in (*kept(plans, most), *_newest(plans, most // THIRD))}
    return list(every.values())


def _newest(plans: Sequence[Plan], most: int) -> list[HeldClip]:
    return _some([HeldClip(len(plans), item) for item in plans[-1].held], most) if plans else []


def _some(clips: Iterable[HeldClip], most: int) -> list[HeldClip]:
    """Those with the smallest hashes."""
    chosen = sorted(clips, key=lambda each: seed_for("kept", each.item.id))[: max(0, most)]
    return sorted(chosen, key=lambda each: (each.round, each.key))


class HeldOut:
    """The stored ones among these clips."""

    def __init__(self, folder: Path, clips: Sequence[HeldClip]) -> None:
        self.folder = folder
        self.clips = [clip for clip in clips if self._path(clip).exists()]
        self.keys = [clip.key for clip in self.clips]
        self.rounds = torch.tensor([clip.round for clip in self.clips], dtype=torch.int64)

    def only(self, keys: Sequence[str]) -> "HeldOut":
        """Those with these keys, in this order."""
        by_key = dict(zip(self.keys, self.clips, strict=True))
        return HeldOut(self.folder, [by_key[key] for key in keys])

    def _path(self, clip: HeldClip) -> Path:
        return self.folder / f"{clip.key}.tar"

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Clip:
        clip = self.clips[index]
        try:
            with self._path(clip).open("rb") as file:
                head = read_head(file, 0)
                *frames, sound = (head.read(file, member) for member in range(len(head.offsets)))
        except (OSError, DamagedSampleError) as error:
            raise ClipError(self._path(clip), "damaged", "delete it: it is measured no more") from error
        return Clip(clip.item.id, decode_jpegs(frames, None), decode_flac(sound))

    def labels(self, index: int) -> Labels:
        return Labels()


@dataclass(frozen=True)
class _Packer:
    """Makes the files of clips, in a worker. The parent writes them: it knows what to do when the disk is full."""

    source: Source
    ids: Sequence[str]
    seconds: float

    def __call__(self, job: Job, tick: Tick) -> dict[int, bytes | ClipError]:
        made: dict[int, bytes | ClipError] = {}
        for position, index in enumerate(job.indices):
            try:
                clip = read_clip(self.source, job, position, MIDDLE, tick)
            except ClipError as error:
                made[index] = error
                continue
            meta = {"id": self.ids[index], "source": self.ids[index], "start": 0.0, "duration": self.seconds}
            made[index] = sample(meta, clip.video, clip.audio, len(clip.video) / self.seconds)
        tick(-1)
        return made


def store(
    source: Source,
    clips: Sequence[HeldClip],
    folder: Path,
    seconds: float,
    skipped: Skipped,
    workers: int = 0,
    time_limit: float = 60.0,
) -> None:
    """Store these clips, read from `source`, unless they are stored already."""
    paths = [folder / f"{clip.key}.tar" for clip in clips]
    left = [i for i, path in enumerate(paths) if not path.exists()]
    jobs = (Job(0, 0, start, left[start : start + CHUNK]) for start in range(0, len(left), CHUNK))
    packer = _Packer(source, [clip.item.id for clip in clips], seconds)
    with closing(make(packer, jobs, workers if left else 0, AHEAD, time_limit)) as done:
        for chunk in done:
            for index, made in chunk.items():
                if isinstance(made, ClipError):
                    skipped.add(clips[index].item.id, made)
                else:
                    write_bytes(paths[index], made)
