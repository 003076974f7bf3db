"""A chunk: a few clips of a source made into tensors, by a job that determines every number in it."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stella.clip import ArraySource, Batch, BatchSource, Clip, Source, send
from stella.data.workers import Tick
from stella.errors import ClipError, StellaError
from stella.media.augment import add_noise, center_crop, multi_scale_crop, time_shift
from stella.media.fbank import LENGTH, fbank
from stella.rng import generator


@dataclass(frozen=True)
class Job:
    """Which chunk to make. `bad` are clips already known to hang or to crash their worker, by position in `indices`."""

    task: int
    epoch: int
    chunk: int
    indices: Sequence[int]
    bad: Mapping[int, ClipError] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    batch: Batch | None  # None: not one clip was good
    skipped: dict[int, ClipError]  # by index in the source

    def __len__(self) -> int:
        return len(self.batch) if self.batch else 0


def usable(clip: Clip) -> Clip:
    """The clip, unless its sound would be padding from end to end."""
    if len(clip.audio) < LENGTH:
        raise ClipError(clip.id, "too little audio", f"a clip needs at least {LENGTH} samples: leave it out")
    return clip


@dataclass(frozen=True)
class Maker:
    """Makes chunks, in the parent or in a worker: decodes, crops, takes filterbanks, augments."""

    sources: Sequence[Source]
    size: int
    spec_frames: int
    mels: int
    augment: bool
    seed: int
    device: torch.device | str = "cpu"  # for sources that render there

    def __call__(self, job: Job, tick: Tick) -> Chunk:
        source = self.sources[job.task]
        if isinstance(source, BatchSource):
            return self._render(source, job)
        gen = self._generator(job)
        videos: list[Tensor] = []
        waveforms: list[Tensor] = []
        skipped: dict[int, ClipError] = {}
        for clip in self.good_clips(job, tick, skipped):
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
        return Chunk(self._batch(torch.cat(videos), padded, lengths, good, job, gen), skipped)

    def good_clips(self, job: Job, tick: Tick, skipped: dict[int, ClipError]) -> Iterator[Clip]:
        """One by one; those that cannot be used are noted in `skipped`."""
        for position, index in enumerate(job.indices):
            tick(position)
            try:
                if position in job.bad:
                    raise job.bad[position]
                clip = usable(self.sources[job.task][index])
            except ClipError as error:
                skipped[index] = error
                continue
            yield clip

    def _render(self, source: BatchSource, job: Job) -> Chunk:
        gen = self._generator(job)
        video, waveforms = source.tensors(job.indices, self.device)
        lengths = source.lengths(job.indices) if isinstance(source, ArraySource) else None  # [B]
        return Chunk(self._batch(self._crop(video, gen), waveforms, lengths, job.indices, job, gen), {})

    def expect(self, job: Job) -> None:
        """Let a source that reads ahead begin with this chunk."""
        source = self.sources[job.task]
        if isinstance(source, ArraySource):
            source.expect(job.indices, self.device)

    def _generator(self, job: Job) -> torch.Generator:
        """On the CPU whatever the device is, so that workers and a GPU in the parent draw the same numbers."""
        return generator(self.seed, "augment", job.task, job.epoch, job.chunk)

    def _crop(self, video: Tensor, gen: torch.Generator) -> Tensor:
        return multi_scale_crop(video, self.size, gen) if self.augment else center_crop(video, self.size)

    def _batch(
        self,
        video: Tensor,
        waveforms: Tensor,
        lengths: Tensor | None,
        indices: Sequence[int],
        job: Job,
        gen: torch.Generator,
    ) -> Batch:
        audio = fbank(waveforms, lengths, frames=self.spec_frames, mels=self.mels)  # [B, spec_frames, mels]
        if self.augment:
            audio = add_noise(time_shift(audio, gen), gen)
        before = sum(len(source) for source in self.sources[: job.task])
        ids = send(torch.tensor([before + index for index in indices]), video.device)  # [B]
        return Batch(video, audio, ids)


@dataclass
class Position:
    """The next thing to make: clips before it are in batches that were handed out."""

    task: int = 0
    epoch: int = 0
    chunk: int = 0
    used: int = 0  # good clips of the chunk that are in earlier batches
    batches: int = 0  # handed out so far
    tried: int = 0  # clips, in the chunks before
    bad: int = 0


class Held:
    """Chunks of one epoch that are not used up; `here` is moved on as they are."""

    def __init__(self, here: Position) -> None:
        self.here = here
        self.chunks: deque[Chunk] = deque()

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    @property
    def clips(self) -> int:
        return sum(map(len, self.chunks)) - (self.here.used if self.chunks else 0)

    @property
    def tried(self) -> int:
        return self.here.tried + sum(len(chunk) + len(chunk.skipped) for chunk in self.chunks)

    @property
    def bad(self) -> int:
        return self.here.bad + sum(len(chunk.skipped) for chunk in self.chunks)

    def take(self, clips: int) -> Batch:
        """At most so many clips, in order."""
        parts: list[Batch] = []
        while self.chunks and clips:
            batch, used = self.chunks[0].batch, self.here.used
            if batch:
                parts.append(batch[used : used + clips])
                clips -= len(parts[-1])
                self.here.used += len(parts[-1])
            if self.here.used == len(self.chunks[0]):
                self._pop()
        return parts[0] if len(parts) == 1 else Batch.cat(parts)

    def drop(self) -> None:
        """Let go of what is left at the end of an epoch."""
        while self.chunks:
            self._pop()

    def _pop(self) -> None:
        chunk = self.chunks.popleft()
        self.here.tried += len(chunk) + len(chunk.skipped)
        self.here.bad += len(chunk.skipped)
        self.here.chunk += 1
        self.here.used = 0
