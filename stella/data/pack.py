"""`stella pack`: the clips of any source become the arrays that `Packed` reads, in parallel and in order."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import Clip, Source
from stella.data.chunk import Chunk, Job, Maker
from stella.data.packed import FRAMES, LENGTHS, SCALE, VERSION, WAVEFORMS, Header
from stella.data.prepare import Summary, alone, progress_bar
from stella.data.skipped import Skipped, spell
from stella.data.stream import Stream, StreamConfig
from stella.data.workers import Tick
from stella.errors import ClipError, StellaError
from stella.media.fbank import LENGTH, SHIFT


def pack(
    clips: Source | Sequence[tuple[str, Source]],
    out: Path | str,
    *,
    pixels: int = 224,
    spec_frames: int = 1024,
    size: int | None = None,
    width: int | None = None,
    workers: int | None = None,
    time_limit: float = 60.0,
    progress: bool = True,
) -> Summary:
    """Write all clips of a source, or of named tasks, into the new folder `out`, which `Packed` reads.

    Pictures are stored with a short side of `size` (none: 8/7 of `pixels`, room for crops as 256 gives to 224) and cut
    from the middle to `width` (none: to a square). Clips that cannot be used are skipped and listed in
    `out`/skipped.jsonl; `workers` processes (none: one a core; 0: this one) make the others.
    """
    began, out = time.monotonic(), Path(out)
    tasks = list(clips) if isinstance(clips, Sequence) else [(None, clips)]
    config = StreamConfig(
        batch_size=8,
        workers=(os.cpu_count() or 1) if workers is None else workers,
        size=size or -(-pixels * 8 // 7),
        spec_frames=spec_frames,
        shuffle=False,
        time_limit=time_limit,
    )
    if out.exists():
        raise StellaError(f"{out} exists already; delete it, or pack into another folder")
    fresh = out.with_name(out.name + ".tmp")
    fresh.mkdir(parents=True, exist_ok=True)
    with alone(fresh):
        try:
            for old in fresh.iterdir():  # what a killed process left
                if old.name != ".lock":
                    old.unlink()
            skipped = Skipped(fresh / "skipped.jsonl")
            packing = _Packing(tasks, config, width, skipped)
            header = _write(packing, fresh, Header(VERSION, pixels, spec_frames, [], _samples(spec_frames)), progress)
            if not header.ids:
                raise StellaError(f"not one clip could be used for {out}; skipped: {spell(skipped.counts)}")
            (fresh / "clips.json").write_text(json.dumps(asdict(header), ensure_ascii=False), encoding="utf-8")
            (fresh / ".lock").unlink()
            fresh.rename(out)
        except BaseException:
            shutil.rmtree(fresh)
            raise
    total = sum(path.stat().st_size for path in out.iterdir())
    return Summary(len(header.ids), len(header.ids), skipped.counts, total, time.monotonic() - began)


@dataclass(frozen=True)
class _Row:
    id: str
    labels: tuple[str | None, str | None]  # name and task
    frames: Tensor  # uint8 [T, 3, H, W]
    samples: Tensor  # int16 [at most S]


@dataclass(frozen=True)
class _Rows(Chunk):
    task: int = 0
    rows: Sequence[_Row] = ()


@dataclass(frozen=True)
class _Cutter(Maker):
    """Makes rows, in the parent or in a worker."""

    width: int | None = None

    def __call__(self, job: Job, tick: Tick) -> _Rows:
        skipped: dict[int, ClipError] = {}
        rows = [self._row(clip) for clip in self.good_clips(job, tick, skipped)]
        return _Rows(None, skipped, job.task, rows)

    def _row(self, clip: Clip) -> _Row:
        samples = (clip.audio[: _samples(self.spec_frames)] * SCALE).round().clamp(-SCALE, SCALE - 1).to(torch.int16)
        frames = _cover(clip.video, self.size, self.width or self.size)
        return _Row(clip.id, (clip.labels.name, clip.labels.task), frames, samples)


class _Packing(Stream):
    """A stream of rows: in order, made by workers that may hang or die, as those that make batches."""

    def __init__(
        self, tasks: Sequence[tuple[str | None, Source]], config: StreamConfig, width: int | None, skipped: Skipped
    ) -> None:
        super().__init__([(name or "", source) for name, source in tasks], config, skipped=skipped)
        self.width, self.tasks = width, [name for name, _ in tasks]

    @property
    def pooled(self) -> bool:
        return self.config.workers > 0

    def _maker(self) -> _Cutter:
        c = self.config
        return _Cutter(self.sources, c.size, c.spec_frames, c.mels, c.augment, c.seed, width=self.width)

    def rows(self) -> Iterator[_Rows]:
        for chunk in self._pooled(self._plan()) if self.pooled else self._made(self._plan()):
            assert isinstance(chunk, _Rows)
            before = sum(len(source) for source in self.sources[: chunk.task])
            for index, error in chunk.skipped.items():
                self.skipped.add(before + index, error)
            yield chunk


def _write(packing: _Packing, folder: Path, header: Header, progress: bool) -> Header:
    """The arrays, and what there is to say about them."""
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(progress))
        shown = bar.add_task("packing", total=sum(len(source) for source in packing.sources))
        stack.callback(packing.close)
        files = {name: stack.enter_context((folder / name).open("wb")) for name in header.rows()}
        for chunk in packing.rows():
            for row in chunk.rows:
                shape = list(row.frames.shape)
                header = header if header.frames else replace(header, frames=shape)
                if shape != header.frames:
                    raise StellaError(
                        f"{row.id} has {shape[0]} frames and the clips before it {header.frames[0]}; "
                        "give its source one number of frames for all"
                    )
                padded = F.pad(row.samples, (0, header.samples - len(row.samples)))
                files[FRAMES].write(row.frames.numpy().data)
                files[WAVEFORMS].write(padded.numpy().astype("<i2").data)
                files[LENGTHS].write(np.array(len(row.samples), "<i8").tobytes())
                name, task = row.labels
                header.ids.append(row.id)
                header.names.append(name)
                header.tasks.append(packing.tasks[chunk.task] or task)
            bar.advance(shown, len(chunk.rows) + len(chunk.skipped))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return header


def _samples(spec_frames: int) -> int:
    """All that filterbanks of so many frames look at."""
    return LENGTH + SHIFT * (spec_frames - 1)


def _cover(video: Tensor, height: int, width: int) -> Tensor:
    """The middle of a video, scaled where it does not fit that box exactly in one direction."""
    h, w = video.shape[-2:]
    if (scale := max(height / h, width / w)) != 1:
        h, w = max(height, round(h * scale)), max(width, round(w * scale))
        video = F.interpolate(video, (h, w), mode="bilinear", antialias=True)
    top, left = (h - height) // 2, (w - width) // 2
    return video[..., top : top + height, left : left + width].contiguous()
