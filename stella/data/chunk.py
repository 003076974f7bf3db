"""Chunks: clips of one task made into a batch. A job determines every number of its chunk.

Each clip is decoded by its source, cropped, turned into filterbanks and augmented, in this process or in a worker.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import TypeVar

import torch
from torch import Tensor

from stella.clip import MIDDLE, ArraySource, Batch, BatchSource, Clip, Device, Source, clip_of, location_of, send
from stella.data.workers import WORKER_GB, Done, Pool, Tick
from stella.errors import ClipError, StellaError, number_of, skippable
from stella.media.augment import Generators, add_noise, center_crop, multi_scale_crop, rolled, time_shift
from stella.media.fbank import LENGTH, fbank, held
from stella.peers import cut
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
    counts: tuple[int, ...] = ()  # clips of each process that shares the chunk; empty: one has all of them

    def __len__(self) -> int:
        """Usable clips, in all processes."""
        return sum(self.counts) if self.counts else len(self.batch) if self.batch else 0

    def some(self, start: int, stop: int, rank: int) -> "Chunk":
        """The clips from `start` to `stop` of all; `rank` is this process."""
        if self.batch is None or not self.counts:
            return Chunk(self.batch and self.batch[start:stop], {})
        ends = list(accumulate(self.counts))
        inside = [(max(start, end - n), min(stop, end)) for end, n in zip(ends, self.counts, strict=True)]
        counts = tuple(max(0, last - first) for first, last in inside)
        first = max(0, start - (ends[rank] - self.counts[rank]))
        return Chunk(self.batch[first : first + counts[rank]], {}, counts)


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
    augment: bool | str  # crop: pictures alone
    seed: int
    device: Device = "cpu"  # where clips are made, after they are decoded
    rank: int = 0  # of `count` processes, each of which makes its rows of every chunk
    count: int = 1

    def __call__(self, job: Job, tick: Tick) -> Chunk:
        chunk = self._make(job, tick)
        return replace(chunk, counts=tuple(cut(len(job.indices), self.count))) if self.count > 1 else chunk

    def own(self, job: Job) -> slice:
        """The rows of a job that this process makes."""
        ends = list(accumulate(cut(len(job.indices), self.count)))
        return slice(ends[self.rank - 1] if self.rank else 0, ends[self.rank])

    def _make(self, job: Job, tick: Tick) -> Chunk:
        source, rows = self.sources[job.task], self.own(job)
        indices, windows = job.indices[rows], self._windows(job)[rows]
        if not indices:
            return Chunk(None, {})
        before = sum(len(source) for source in self.sources[: job.task])
        ids = [before + index for index in indices]
        gens = [generator(self.seed, "augment", job.task, job.epoch, index) for index in indices]
        if not isinstance(source, BatchSource):
            return self._decoded(job, rows, ids, windows, gens, tick)
        if job.bad:
            reason = next(iter(job.bad.values()))[0]
            raise StellaError(
                f"a worker could not make {number_of(len(indices), 'clip')} at once ({reason}); use a smaller "
                "batch_size, fewer workers or a higher time_limit"
            )
        tick(0)
        lengths = None
        if isinstance(source, ArraySource):
            video, waveforms = source.tensors(indices, self.device, windows)
            lengths = source.lengths(indices)
        else:
            video, waveforms = source.tensors(indices, self.device)
        tick(-1)
        return Chunk(self._batch(self._crop(video, gens), waveforms, lengths, ids, gens), {})

    def _decoded(
        self, job: Job, rows: slice, ids: list[int], windows: list[float], gens: Generators, tick: Tick
    ) -> Chunk:
        """Clip by clip."""
        skipped: dict[int, ClipError] = {}
        videos, sounds, good, centred = [], [], [], []
        for row, position in enumerate(range(rows.start, rows.stop)):
            try:
                clip = read_clip(self.sources[job.task], job, position, windows[row], tick)
            except ClipError as error:
                skipped[ids[row]] = error
            else:
                videos.append(self._crop(send(clip.video[None], self.device), [gens[row]]))
                sounds.append(send(clip.audio, self.device))
                good.append(row)
                centred.append(clip.centred)
        tick(-1)
        if not videos:
            return Chunk(None, skipped)
        if len({video.shape for video in videos}) > 1:
            counts = sorted({video.shape[1] for video in videos})
            raise StellaError(f"clips of one task have {counts} frames; give its source one number of frames for all")
        lengths = torch.tensor([len(sound) for sound in sounds])  # [B]
        padded = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True)  # [B, S]
        usable, used = [ids[row] for row in good], [gens[row] for row in good]
        batch = self._batch(torch.cat(videos), padded, lengths, usable, used)
        shift = torch.where(torch.tensor(centred), (self.spec_frames - held(lengths)).clamp_min(0) // 2, 0)  # [B]
        return Chunk(replace(batch, audio=rolled(batch.audio, shift)) if any(centred) else batch, skipped)

    def announced(self, jobs: Iterator[Job]) -> Iterator[Job]:
        """The same jobs. While one is done, array sources begin to read the clips of the next."""
        job = next(jobs, None)
        while job:
            if following := next(jobs, None):
                source = self.sources[following.task]
                if isinstance(source, ArraySource):
                    own = self.own(following)
                    source.expect(following.indices[own], self.device, self._windows(following)[own])
            yield job
            job = following

    def _windows(self, job: Job) -> list[float]:
        """Where each clip's frames come from: anywhere in training, the middle in evaluation."""
        if not self.augment:
            return [MIDDLE] * len(job.indices)
        gen = generator(self.seed, "window", job.task, job.epoch, job.chunk)
        windows: list[float] = torch.rand(len(job.indices), generator=gen).tolist()
        return windows

    def _crop(self, video: Tensor, gens: Generators) -> Tensor:
        return multi_scale_crop(video, self.size, gens) if self.augment else center_crop(video, self.size)

    def _batch(
        self, video: Tensor, waveforms: Tensor, lengths: Tensor | None, ids: list[int], gens: Generators
    ) -> Batch:
        audio = fbank(waveforms, lengths, frames=self.spec_frames, mels=self.mels)  # [B, spec_frames, mels]
        if self.augment is True:
            audio = add_noise(time_shift(audio, gens), gens)
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

    A clip that takes a worker longer than `time_limit` seconds, or kills it twice, is skipped; in a batch that its
    source makes at once it is an error. Closing the generator ends the workers.
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
