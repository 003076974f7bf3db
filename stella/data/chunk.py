"""Chunks: clips of one task made into a batch. A job determines every number of its chunk.

Each clip is decoded by its source, cropped, turned into filterbanks and augmented, in this process or in a worker.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor

from stella.clip import MIDDLE, ArraySource, Batch, BatchSource, Clip, Device, Source, clip_of, location_of, send
from stella.data.workers import WORKER_GB, Done, Pool, Tick
from stella.errors import ClipError, StellaError, skippable
from stella.media.augment import add_noise, center_crop, multi_scale_crop, time_shift
from stella.media.fbank import LENGTH, fbank
from stella.rng import generator

Made = TypeVar("Made")


@dataclass(frozen=True)
class Job:
    """The chunk to make. `bad` are clips that hung or killed their worker: reason and remedy by position."""

    task: int
    epoch: int
    chunk: int
    indices: Sequence[int]
    bad: Mapping[int, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    batch: Batch | None  # None: no clip was usable
    skipped: dict[int, ClipError]  # by id

    def __len__(self) -> int:
        return len(self.batch) if self.batch else 0


def read_clip(source: Source, job: Job, position: int, window: float, tick: Tick) -> Clip:
    """A clip of the job, or `ClipError`."""
    tick(position)
    index = job.indices[position]
    if position in job.bad:
        raise ClipError(location_of(source, index), *job.bad[position])
    with skippable(location_of(source, index)):
        clip = clip_of(source, index, window)
    if len(clip.audio) < LENGTH:
        raise ClipError(clip.id, "too little audio", f"a clip needs at least {LENGTH} samples: leave it out")
    return clip


@dataclass(frozen=True)
class Maker:
    """Makes chunks of these sources. Clips of all sources are numbered through: `ids` of a batch."""

    sources: Sequence[Source]
    size: int
    spec_frames: int
    mels: int
    augment: bool
    seed: int
    device: Device = "cpu"  # where batch sources make their clips

    def __call__(self, job: Job, tick: Tick) -> Chunk:
        source, windows = self.sources[job.task], self._windows(job)
        before = sum(len(source) for source in self.sources[: job.task])
        ids = [before + index for index in job.indices]
        # On the CPU on every machine, so that workers and a GPU in the parent draw the same numbers.
        gen = generator(self.seed, "augment", job.task, job.epoch, job.chunk)
        if isinstance(source, ArraySource):
            video, waveforms = source.tensors(job.indices, self.device, windows)
            return Chunk(self._batch(self._crop(video, gen), waveforms, source.lengths(job.indices), ids, gen), {})
        if isinstance(source, BatchSource):
            video, waveforms = source.tensors(job.indices, self.device)
            return Chunk(self._batch(self._crop(video, gen), waveforms, None, ids, gen), {})
        skipped: dict[int, ClipError] = {}
        videos, sounds = [], []
        for position, window in enumerate(windows):
            try:
                clip = read_clip(source, job, position, window, tick)
            except ClipError as error:
                skipped[ids[position]] = error
            else:
                videos.append(self._crop(clip.video[None], gen))
                sounds.append(clip.audio)
        tick(-1)
        if not videos:
            return Chunk(None, skipped)
        if len({video.shape for video in videos}) > 1:
            counts = sorted({video.shape[1] for video in videos})
            raise StellaError(f"clips of one task have {counts} frames; give its source one number of frames for all")
        lengths = torch.tensor([len(sound) for sound in sounds])  # [B]
        padded = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True)  # [B, S]
        good = [id for id in ids if id not in skipped]
        return Chunk(self._batch(torch.cat(videos), padded, lengths, good, gen), skipped)

    def announced(self, jobs: Iterator[Job]) -> Iterator[Job]:
        """The same jobs. While one is done, array sources begin to read the clips of the next."""
        job = next(jobs, None)
        while job:
            if following := next(jobs, None):
                source = self.sources[following.task]
                if isinstance(source, ArraySource):
                    source.expect(following.indices, self.device, self._windows(following))
            yield job
            job = following

    def _windows(self, job: Job) -> list[float]:
        """Where each clip's frames come from: anywhere in training, the middle in evaluation."""
        if not self.augment:
            return [MIDDLE] * len(job.indices)
        gen = generator(self.seed, "window", job.task, job.epoch, job.chunk)
        windows: list[float] = torch.rand(len(job.indices), generator=gen).tolist()
        return windows

    def _crop(self, video: Tensor, gen: torch.Generator) -> Tensor:
        return multi_scale_crop(video, self.size, gen) if self.augment else center_crop(video, self.size)

    def _batch(
        self, video: Tensor, waveforms: Tensor, lengths: Tensor | None, ids: list[int], gen: torch.Generator
    ) -> Batch:
        audio = fbank(waveforms, lengths, frames=self.spec_frames, mels=self.mels)  # [B, spec_frames, mels]
        if self.augment:
            audio = add_noise(time_shift(audio, gen), gen)
        return Batch(video, audio, send(torch.tensor(ids), video.device))


def make(
    task: Callable[[Job, Tick], Made],
    jobs: Iterator[Job],
    workers: int,
    prefetch: int,
    time_limit: float,
    worker_gb: float = WORKER_GB,
) -> Generator[Made, None, None]:
    """What `task` makes of these jobs, in order, in worker processes that run ahead, or (0) in this process.

    A clip that takes a worker longer than `time_limit` seconds, or kills it twice, is skipped. Closing the generator
    ends the workers.
    """
    if not workers:
        yield from (task(job, lambda item: None) for job in jobs)
        return
    pool = Pool(task, workers, prefetch, time_limit, worker_gb)
    ready: dict[int, Made] = {}
    submitted = 0
    try:
        for wanted in count():
            while pool.running + len(ready) < pool.capacity and (job := next(jobs, None)):
                pool.submit(submitted, job)
                submitted += 1
            if wanted == submitted:
                return
            while wanted not in ready:
                event = pool.wait()
                if isinstance(event, Done):
                    ready[event.key] = event.result
                    continue
                why = ("time limit", "re-encode it, or raise time_limit")
                if not event.hung:
                    why = ("worker died", "re-encode it or leave it out")
                pool.submit(event.key, replace(event.job, bad={**event.job.bad, event.item: why}))
            yield ready.pop(wanted)
    finally:
        pool.close()
