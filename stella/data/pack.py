"""`stella pack`: writes the clips of any source as the arrays that `Packed` reads, in parallel and in order."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import MIDDLE, Source, Windowed
from stella.data.chunk import Job, make, read_clip
from stella.data.packed import FRAMES, LENGTHS, SCALE, VERSION, WAVEFORMS, Header
from stella.data.prepare import Summary, progress_bar
from stella.data.skipped import Skipped, in_words
from stella.data.workers import Tick
from stella.errors import ClipError, StellaError
from stella.files import lock, write_json
from stella.media.fbank import LENGTH, SHIFT
from stella.media.inputs import Inputs, with_margin

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
    inputs: Inputs | None = None,
) -> Summary:
    """Write all clips of a source, or of named tasks, into the new folder `out`, which `Packed` reads.

    Frames are stored with a short side of `size` (none: 8/7 of `pixels`) and cropped at the centre to `width` (none:
    square). `windows` windows of each clip, spread evenly, are stored for training to choose from; an odd number, for
    evaluation takes the middle one. Unusable clips are skipped and listed in `out`/skipped.jsonl. `workers` processes
    decode (none: one per core; 0: this process). `inputs` says how the clips are made; it is stored with them.
    """
    began, out = time.monotonic(), Path(out)
    tasks = list(clips) if isinstance(clips, Sequence) else [(None, clips)]
    _check(out, [source for _, source in tasks], windows)
    size = size or with_margin(pixels)
    samples = LENGTH + SHIFT * (spec_frames - 1)  # what filterbanks of this many frames need
    cutter = _Cutter(tasks, size, width or size, samples, windows)
    workers = (os.cpu_count() or 1) if workers is None else workers
    header = Header(VERSION, pixels, spec_frames, [], samples, windows, inputs=asdict(inputs) if inputs else None)
    fresh = out.with_name(out.name + ".tmp")
    fresh.mkdir(parents=True, exist_ok=True)
    with lock(fresh / ".lock"):
        try:
            for old in fresh.iterdir():  # left by a killed process
                if old.name != ".lock":
                    old.unlink()
            skipped = Skipped(fresh / "skipped.jsonl")
            with closing(make(cutter, cutter.jobs(), workers, 2, time_limit)) as chunks, progress_bar(progress) as bar:
                made = (clip for chunk in chunks for clip in chunk.items())
                total = sum(len(source) for _, source in tasks)
                _write(bar.track(made, total, description="packing"), fresh, header, skipped)
            if not header.ids:
                raise StellaError(f"no clip could be used for {out}; skipped: {in_words(skipped.counts)}")
            write_json(fresh / "clips.json", asdict(header))
            (fresh / ".lock").unlink()
            fresh.rename(out)
        except BaseException:
            shutil.rmtree(fresh)
            raise
    size = sum(path.stat().st_size for path in out.iterdir())
    return Summary(len(header.ids), len(header.ids), skipped.counts, size, time.monotonic() - began)


def _check(out: Path, sources: Sequence[Source], windows: int) -> None:
    if out.exists():
        raise StellaError(f"{out} exists already; delete it, or pack into another folder")
    if windows < 1 or windows % 2 == 0:
        raise StellaError(f"windows={windows} must be odd and positive: evaluation takes the middle one")
    if windows > 1 and not all(isinstance(source, Windowed) for source in sources):
        raise StellaError(f"windows={windows}, but these clips have one window each; leave it out")


@dataclass(frozen=True)
class _Row:
    id: str
    name: str | None
    task: str | None
    frames: Tensor  # uint8 [K, T, 3, H, W]
    samples: Tensor  # int16 [at most S]


@dataclass(frozen=True)
class _Cutter:
    """Makes the rows of clips, by their number among the clips of all tasks."""

    tasks: Sequence[tuple[str | None, Source]]
    height: int
    width: int
    samples: int
    windows: int

    def jobs(self) -> Iterator[Job]:
        for task, (_, source) in enumerate(self.tasks):
            for chunk, start in enumerate(range(0, len(source), CHUNK)):
                yield Job(task, 0, chunk, range(start, min(start + CHUNK, len(source))))

    def __call__(self, job: Job, tick: Tick) -> dict[int, _Row | ClipError]:
        before = sum(len(source) for _, source in self.tasks[: job.task])
        made: dict[int, _Row | ClipError] = {}
        for position, index in enumerate(job.indices):
            try:
                made[before + index] = self._row(job, position, tick)
            except ClipError as error:
                made[before + index] = error
        return made

    def _row(self, job: Job, position: int, tick: Tick) -> _Row:
        task, source = self.tasks[job.task]
        # Windows are spread evenly from the beginning of the clip to its end.
        places = [k / (self.windows - 1) for k in range(self.windows)] if self.windows > 1 else [MIDDLE]
        clips = [read_clip(source, job, position, place, tick) for place in places]
        clip = clips[0]
        samples = (clip.audio[: self.samples] * SCALE).round().clamp(-SCALE, SCALE - 1).to(torch.int16)
        frames = torch.stack([_cover(clip.video, self.height, self.width) for clip in clips])
        return _Row(clip.id, clip.labels.name, task or clip.labels.task, frames, samples)


def _write(clips: Iterable[tuple[int, _Row | ClipError]], folder: Path, header: Header, skipped: Skipped) -> None:
    """Write the arrays, list skipped clips, and add the others to the header. The first sets the shape of frames."""
    with ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in (FRAMES, WAVEFORMS, LENGTHS)]
        for number, row in clips:
            if isinstance(row, ClipError):
                skipped.add(number, row)
                continue
            shape = list(row.frames.shape[1:])
            if not header.frames:
                header.frames.extend(shape)
            if shape != header.frames:
                raise StellaError(
                    f"{row.id} has {shape[0]} frames and the clips before it {header.frames[0]}; "
                    "give its source one number of frames for all"
                )
            header.ids.append(row.id)
            header.names.append(row.name)
            header.tasks.append(row.task)
            padded = F.pad(row.samples, (0, header.samples - len(row.samples)))
            arrays = (row.frames.numpy(), padded.numpy().astype("<i2"), np.array(len(row.samples), "<i8"))
            for file, array in zip(files, arrays, strict=True):
                file.write(array.data)
        for file in files:
            file.flush()
            os.fsync(file.fileno())


def _cover(video: Tensor, height: int, width: int) -> Tensor:
    """The centre of a video, scaled if needed so that it just fills height × width."""
    h, w = video.shape[-2:]
    if (scale := max(height / h, width / w)) != 1:
        h, w = max(height, round(h * scale)), max(width, round(w * scale))
        video = F.interpolate(video, (h, w), mode="bilinear", antialias=True)
    top, left = (h - height) // 2, (w - width) // 2
    return video[..., top : top + height, left : left + width].contiguous()
