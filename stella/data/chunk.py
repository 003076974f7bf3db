"""Chunks: clips of one task made into a batch. A job determines every number of its chunk.

Each clip is decoded by its source, cropped, turned into filterbanks and augmented, in this process or in a worker.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, pairwise

import torch
from torch import Tensor

from stella.clip import MIDDLE, ArraySource, Batch, BatchSource, Clip, Source, clip_of, location_of, send
from stella.data.workers import Done, Lost, Pool, Tick
from stella.errors import ClipError, StellaError
from stella.media.augment import add_noise, center_crop, multi_scale_crop, time_shift
from stella.media.fbank import LENGTH, fbank
from stella.rng import generator


@dataclass(frozen=True)
class Job:
    """The chunk to make. `bad` are clips known to hang or to crash their worker, by position in `indices`."""

    task: int
    epoch: int
    chunk: int
    indices: Sequence[int]
    bad: Mapping[int, ClipError] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    batch: Batch | None  # None: no clip was usable
    skipped: dict[int, ClipError]  # by index in the source

    def __len__(self) -> int:
        return len(self.batch) if self.batch else 0


@dataclass(frozen=True)
class Maker:
    """Makes chunks of these sources. Clips of all sources are numbered through: `ids` of a batch."""

    sources: Sequence[Source]
    size: int
    spec_frames: int
    mels: int
    augment: bool
    seed: int
    device: torch.device | str = "cpu"  # where batch sources make their clips

    def __call__(self, job: Job, tick: Tick) -> Chunk:
        source = self.sources[job.task]
        # On the CPU on every machine, so that workers and a GPU in the parent draw the same numbers.
        gen = generator(self.seed, "augment", job.task, job.epoch, job.chunk)
        if isinstance(source, BatchSource):
            return self._batch_of_tensors(source, job, gen)
        skipped: dict[int, ClipError] = {}
        videos, waveforms = [], []
        for position, window in enumerate(self._windows(job)):
            if clip := self.good_clip(job, position, window, tick, skipped):
                videos.append(self._crop(clip.video[None], gen))
                waveforms.append(clip.audio)
        tick(-1)
        if not videos:
            return Chunk(None, skipped)
        if len({video.shape for video in videos}) > 1:
            counts = sorted({video.shape[1] for video in videos})
            raise StellaError(f"clips of one task have {counts} frames; give its source one number of frames for all")
        lengths = torch.tensor([len(waveform) for waveform in waveforms])  # [B]
        padded = torch.nn.utils.rnn.pad_sequence(waveforms, batch_first=True)  # [B, S]
        good = [index for index in job.indices if index not in skipped]
        return Chunk(self._batch(torch.cat(videos), padded, lengths, self._ids(job, good), gen), skipped)

    def good_clip(
        self, job: Job, position: int, window: float, tick: Tick, skipped: dict[int, ClipError]
    ) -> Clip | None:
        """A clip of the job; None if it cannot be used, and then `skipped` has the reason."""
        tick(position)
        index = job.indices[position]
        try:
            if position in job.bad:
                raise job.bad[position]
            clip = clip_of(self.sources[job.task], index, window)
            if len(clip.audio) < LENGTH:
                raise ClipError(clip.id, "too little audio", f"a clip needs at least {LENGTH} samples: leave it out")
        except ClipError as error:
            skipped[index] = error
            return None
        return clip

    def expect(self, job: Job) -> None:
        """Let an array source begin to read this job's clips."""
        source = self.sources[job.task]
        if isinstance(source, ArraySource):
            source.expect(job.indices, self.device, self._windows(job))

    def _batch_of_tensors(self, source: BatchSource, job: Job, gen: torch.Generator) -> Chunk:
        lengths = None
        if isinstance(source, ArraySource):
            video, waveforms = source.tensors(job.indices, self.device, self._windows(job))
            lengths = source.lengths(job.indices)  # [B]
        else:
            video, waveforms = source.tensors(job.indices, self.device)
        return Chunk(self._batch(self._crop(video, gen), waveforms, lengths, self._ids(job, job.indices), gen), {})

    def _windows(self, job: Job) -> list[float]:
        """Where each clip's frames come from: anywhere in training, the middle in evaluation."""
        if not self.augment:
            return [MIDDLE] * len(job.indices)
        gen = generator(self.seed, "window", job.task, job.epoch, job.chunk)
        windows: list[float] = torch.rand(len(job.indices), generator=gen).tolist()
        return windows

    def _crop(self, video: Tensor, gen: torch.Generator) -> Tensor:
        return multi_scale_crop(video, self.size, gen) if self.augment else center_crop(video, self.size)

    def _ids(self, job: Job, indices: Sequence[int]) -> Tensor:
        before = sum(len(source) for source in self.sources[: job.task])
        return torch.tensor([before + index for index in indices])  # [B]

    def _batch(
        self, video: Tensor, waveforms: Tensor, lengths: Tensor | None, ids: Tensor, gen: torch.Generator
    ) -> Batch:
        audio = fbank(waveforms, lengths, frames=self.spec_frames, mels=self.mels)  # [B, spec_frames, mels]
        if self.augment:
            audio = add_noise(time_shift(audio, gen), gen)
        return Batch(video, audio, send(ids, video.device))


def make(
    maker: Maker, jobs: Iterator[Job], workers: int, prefetch: int, time_limit: float
) -> Generator[Chunk, None, None]:
    """The chunks of these jobs in order, made by worker processes that run ahead, or (0) in this process.

    A clip that takes a worker longer than `time_limit` seconds, or kills it twice, is skipped. Closing the generator
    ends the workers.
    """
    return _make_in_workers(maker, jobs, workers, prefetch, time_limit) if workers else _make_here(maker, jobs)


def _make_here(maker: Maker, jobs: Iterable[Job]) -> Generator[Chunk, None, None]:
    for job, following in pairwise(chain(jobs, [None])):
        assert job is not None  # only the last `following` is
        if following is not None:
            maker.expect(following)
        yield maker(job, lambda item: None)


def _make_in_workers(
    maker: Maker, jobs: Iterator[Job], workers: int, prefetch: int, time_limit: float
) -> Generator[Chunk, None, None]:
    pool = Pool(maker, workers, prefetch, time_limit)
    flying: dict[int, Job] = {}
    ready: dict[int, Chunk] = {}
    deaths: dict[int, int] = {}  # by job: the item at which its worker died
    submitted = 0
    try:
        for wanted in count():
            while len(flying) + len(ready) < workers * prefetch and (job := next(jobs, None)):
                flying[submitted] = job
                pool.submit(submitted, job)
                submitted += 1
            if wanted == submitted:
                return
            while wanted not in ready:
                event = pool.wait()
                if isinstance(event, Done):
                    del flying[event.key]
                    ready[event.key] = event.result
                else:
                    flying[event.key] = _retry(maker, flying[event.key], event, deaths)
                    pool.submit(event.key, flying[event.key])
            yield ready.pop(wanted)
    finally:
        pool.close()


def _retry(maker: Maker, job: Job, lost: Lost, deaths: dict[int, int]) -> Job:
    """The job to submit after its worker hung or died: without the clip if that is the cause, else once more."""
    if lost.hung:
        reason, remedy = "time limit", "re-encode it, or raise time_limit"
    elif lost.key not in deaths:
        deaths[lost.key] = lost.item
        return job
    elif deaths.pop(lost.key) == lost.item >= 0:
        reason, remedy = "worker died", "re-encode it or leave it out"
    else:
        raise StellaError(
            f"loader workers keep dying (exit status {lost.exitcode}), most likely for lack of memory or of shared "
            "memory (/dev/shm); use fewer workers, a smaller batch_size or a smaller prefetch"
        )
    location = location_of(maker.sources[job.task], job.indices[lost.item])
    return replace(job, bad={**job.bad, lost.item: ClipError(location, reason, remedy)})
