"""`stella pack`: writes the clips of any source as the arrays that `Packed` reads, in parallel and in order."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import MIDDLE, Source, Windowed
from stella.data.chunk import Chunk, Job, Maker, make
from stella.data.packed import FRAMES, LENGTHS, SCALE, VERSION, WAVEFORMS, Header
from stella.data.prepare import Summary, progress_bar
from stella.data.skipped import Skipped, in_words
from stella.data.tasks import with_margin
from stella.data.workers import Tick
from stella.errors import ClipError, StellaError
from stella.files import lock, write_json
from stella.media.fbank import LENGTH, SHIFT

CHUNK = 8  # clips that a worker decodes before it hands them over


def pack(
    clips: Source | Sequence[tuple[str, Source]],
    out: Path | str,
    *,
    pixels: int = 224,
    spec_frames: int = 1024,
    size: int | None = None,
    width: int | None = None,
    windows: int = 1,
    workers: int | None = None,
    time_limit: float = 60.0,
    progress: bool = True,
) -> Summary:
    """Write all clips of a source, or of named tasks, into the new folder `out`, which `Packed` reads.

    Frames are stored with a short side of `size` (none: 8/7 of `pixels`) and cropped at the centre to `width` (none:
    square). `windows` windows of each clip, spread evenly, are stored for training to choose from; an odd number, for
    evaluation takes the middle one. Unusable clips are skipped and listed in `out`/skipped.jsonl. `workers` processes
    decode (none: one per core; 0: this process).
    """
    began, out = time.monotonic(), Path(out)
    tasks = list(clips) if isinstance(clips, Sequence) else [(None, clips)]
    sources = [source for _, source in tasks]
    _check(out, sources, windows)
    workers = (os.cpu_count() or 1) if workers is None else workers
    cutter = _Cutter(
        sources, size or with_margin(pixels), spec_frames, 0, False, 0, width=width, windows=_positions(windows)
    )
    fresh = out.with_name(out.name + ".tmp")
    fresh.mkdir(parents=True, exist_ok=True)
    with lock(fresh / ".lock"):
        try:
            for old in fresh.iterdir():  # left by a killed process
                if old.name != ".lock":
                    old.unlink()
            skipped = Skipped(fresh / "skipped.jsonl")
            header = Header(VERSION, pixels, spec_frames, [], _samples(spec_frames), windows)
            with closing(make(cutter, _jobs(sources), workers, 2, time_limit)) as chunks:
                header = _write(chunks, [name for name, _ in tasks], sources, fresh, header, skipped, progress)
            if not header.ids:
                raise StellaError(f"no clip could be used for {out}; skipped: {in_words(skipped.counts)}")
            write_json(fresh / "clips.json", asdict(header))
            (fresh / ".lock").unlink()
            fresh.rename(out)
        except BaseException:
            shutil.rmtree(fresh)
            raise
    total = sum(path.stat().st_size for path in out.iterdir())
    return Summary(len(header.ids), len(header.ids), skipped.counts, total, time.monotonic() - began)


def _check(out: Path, sources: Sequence[Source], windows: int) -> None:
    if out.exists():
        raise StellaError(f"{out} exists already; delete it, or pack into another folder")
    if windows < 1 or windows % 2 == 0:
        raise StellaError(f"windows={windows} must be odd and positive: evaluation takes the middle one")
    if windows > 1 and not all(isinstance(source, Windowed) for source in sources):
        raise StellaError(f"windows={windows}, but these clips have one window each; leave it out")


def _positions(windows: int) -> tuple[float, ...]:
    """Windows spread evenly from the beginning of a clip (0) to its end (1); the middle one if there is one."""
    return tuple(k / (windows - 1) for k in range(windows)) if windows > 1 else (MIDDLE,)


def _jobs(sources: Sequence[Source]) -> Iterator[Job]:
    for task, source in enumerate(sources):
        for number, start in enumerate(range(0, len(source), CHUNK)):
            yield Job(task, 0, number, range(start, min(start + CHUNK, len(source))))


@dataclass(frozen=True)
class _Row:
    id: str
    name: str | None
    task: str | None
    frames: Tensor  # uint8 [K, T, 3, H, W]
    samples: Tensor  # int16 [at most S]


@dataclass(frozen=True)
class _Rows(Chunk):
    task: int = 0
    rows: Sequence[_Row] = ()


@dataclass(frozen=True)
class _Cutter(Maker):
    """Makes the rows of a chunk's clips."""

    width: int | None = None
    windows: tuple[float, ...] = (MIDDLE,)

    def __call__(self, job: Job, tick: Tick) -> _Rows:
        skipped: dict[int, ClipError] = {}
        rows = [self._row(job, position, tick, skipped) for position in range(len(job.indices))]
        return _Rows(None, skipped, job.task, [row for row in rows if row])

    def expect(self, job: Job) -> None:
        pass  # clips are read one by one

    def _row(self, job: Job, position: int, tick: Tick, skipped: dict[int, ClipError]) -> _Row | None:
        clips = [self.good_clip(job, position, window, tick, skipped) for window in self.windows]
        good = [clip for clip in clips if clip]
        if len(good) < len(clips):
            return None
        audio, labels = good[0].audio[: _samples(self.spec_frames)], good[0].labels
        samples = (audio * SCALE).round().clamp(-SCALE, SCALE - 1).to(torch.int16)
        frames = torch.stack([_cover(clip.video, self.size, self.width or self.size) for clip in good])
        return _Row(good[0].id, labels.name, labels.task, frames, samples)


def _write(
    chunks: Iterator[Chunk],
    names: Sequence[str | None],
    sources: Sequence[Source],
    folder: Path,
    header: Header,
    skipped: Skipped,
    progress: bool,
) -> Header:
    """Write the arrays; returns their header."""
    before = [sum(len(source) for source in sources[:task]) for task in range(len(sources) + 1)]
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(progress))
        shown = bar.add_task("packing", total=before[-1])
        files = {name: stack.enter_context((folder / name).open("wb")) for name in (FRAMES, WAVEFORMS, LENGTHS)}
        for chunk in chunks:
            assert isinstance(chunk, _Rows)
            for index, error in chunk.skipped.items():
                skipped.add(before[chunk.task] + index, error)
            for row in chunk.rows:
                header = _with_row(header, row, names[chunk.task])
                padded = F.pad(row.samples, (0, header.samples - len(row.samples)))
                files[FRAMES].write(row.frames.numpy().data)
                files[WAVEFORMS].write(padded.numpy().astype("<i2").data)
                files[LENGTHS].write(np.array(len(row.samples), "<i8").tobytes())
            bar.advance(shown, len(chunk.rows) + len(chunk.skipped))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return header


def _with_row(header: Header, row: _Row, task: str | None) -> Header:
    """The header with one more clip; the first clip sets the shape of frames."""
    shape = list(row.frames.shape[1:])
    header = header if header.frames else replace(header, frames=shape)
    if shape != header.frames:
        raise StellaError(
            f"{row.id} has {shape[0]} frames and the clips before it {header.frames[0]}; "
            "give its source one number of frames for all"
        )
    header.ids.append(row.id)
    header.names.append(row.name)
    header.tasks.append(task or row.task)
    return header


def _samples(spec_frames: int) -> int:
    """The samples that filterbanks of this many frames need."""
    return LENGTH + SHIFT * (spec_frames - 1)


def _cover(video: Tensor, height: int, width: int) -> Tensor:
    """The centre of a video, scaled if needed so that it just fills height × width."""
    h, w = video.shape[-2:]
    if (scale := max(height / h, width / w)) != 1:
        h, w = max(height, round(h * scale)), max(width, round(w * scale))
        video = F.interpolate(video, (h, w), mode="bilinear", antialias=True)
    top, left = (h - height) // 2, (w - width) // 2
    return video[..., top : top + height, left : left + width].contiguous()
