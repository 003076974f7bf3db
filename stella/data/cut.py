"""The worker's side of `stella prepare`: a clip of a video as the bytes of a sample."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stella.clip import SAMPLE_RATE
from stella.data.lengths import ENOUGH, SHORT
from stella.data.material import Job, start_in
from stella.data.plan import SHARD_CLIPS
from stella.data.shards import sample
from stella.data.workers import Tick
from stella.errors import ClipError, skippable
from stella.files import is_remote
from stella.media.decode import read_cut, read_duration
from stella.media.files import Limits, in_memory
from stella.media.odd import SILENT, STILL, oddities
from stella.media.stills import read_picture, read_sound, scaled

SHORTEST_TAIL = 1.0  # seconds: a shorter rest of a split video is dropped
MOST_CLIPS = 10_000  # of one video: 28 hours of clips of 10 seconds
ODD = (STILL, SILENT, SHORT)


@dataclass(frozen=True)
class Settings:
    """What all clips of a folder have in common."""

    seconds: float
    split: bool
    fps: float
    size: int
    strict: bool = True  # skip clips that FFmpeg finds damaged
    leave: str = ""  # of ODD, joined by commas: clips that are left out
    csv: bool = False  # clips are those of a list, under its names
    shard_clips: int = SHARD_CLIPS  # that are tried for one shard


@dataclass(frozen=True)
class Cutter:
    """The worker's side: the length of a video, or a clip of it as the bytes of a sample."""

    src: Path
    settings: Settings
    time_limit: float  # seconds, checked by the decoder; the pool kills a worker that exceeds it by half

    def __call__(self, job: Job, tick: Tick) -> bytes | float | ClipError:
        tick(0)
        path = self.src / job.file
        try:
            with skippable(path):
                data = path.read_bytes() if job.data is None and is_remote(path) else job.data
                if data is None:
                    return self._cut(job, path)
                with in_memory(data) as content:
                    return self._cut(job, content)
        except ClipError as error:
            return ClipError(path, error.reason, error.remedy)

    def _cut(self, job: Job, path: Path) -> bytes | float | ClipError:
        s = self.settings
        if job.start is None:
            duration = read_duration(path, time_limit=self.time_limit)
            if duration is None or duration <= 0:
                return ClipError(path, "unknown length", "it holds no packets with times: remux it or leave it out")
            if duration / s.seconds > MOST_CLIPS:
                remedy = f"it lasts {duration:,.0f} s, more than {MOST_CLIPS:,} clips: cut it or give longer clips"
                return ClipError(path, "too many clips", remedy)
            return duration
        start, fps = job.start, s.fps
        if job.row is not None:
            start = start_in(path, job.row, job.of_video, self.time_limit)
        if job.pictures:
            waveform = read_sound(path, s.seconds)
            frames = torch.stack([scaled(read_picture(self.src / name), s.size) for name in job.pictures])
            fps = len(frames) / (len(waveform) / SAMPLE_RATE)
        else:
            limits = Limits(s.strict)
            frames, waveform = read_cut(
                path, start, s.seconds, s.fps, s.size, time_limit=self.time_limit, limits=limits
            )
        return self._sample(job, start, frames, waveform, fps)

    def _sample(self, job: Job, start: float, frames: Tensor, waveform: Tensor, fps: float) -> bytes | ClipError:
        duration = max(len(frames) / fps, len(waveform) / SAMPLE_RATE)
        found = oddities(frames, waveform) + [SHORT] * (duration < ENOUGH * self.settings.seconds)
        for what in self.settings.leave.split(","):
            if what in found:
                return ClipError(job.file, what, "it is left out as you asked")
        meta = {"id": job.id, "source": job.file, "start": start, "duration": duration}
        meta |= {"label": job.labels.name, "task": job.labels.task}
        if found:
            meta["odd"] = found
        if job.row is not None:
            meta |= {
                "row": job.row.number,
                "split": job.row.split,
                "classes": list(job.row.classes),
                "nth": job.row.nth,
            }
        return sample(meta, frames, waveform, fps)


def starts(duration: float, seconds: float) -> list[float]:
    """Start times of the consecutive clips of a video."""
    whole = int(duration / seconds + 1e-6)
    tail = duration - whole * seconds
    return [round(k * seconds, 3) for k in range(whole + (tail >= SHORTEST_TAIL or not whole))]
