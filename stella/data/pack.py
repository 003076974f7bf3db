"""`stella pack`: writes the clips of any source as the arrays that `Packed` reads, in parallel and in order."""

import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import MIDDLE, Source, Windowed
from stella.config import differences
from stella.data.accounts import Summary
from stella.data.chunk import Job, make, read_clip
from stella.data.mirror import Disk
from stella.data.packed import ARRAYS, HEADER, SCALE, VERSION, Header, read_header
from stella.data.prepare import progress_bar
from stella.data.skipped import Skipped, in_words
from stella.data.views import stored_at
from stella.data.workers import WORKER_GB, Tick
from stella.errors import ClipError, StellaError
from stella.files import Appended, Line, Lines, explain_full_disk, is_address, lock, read_lines, write_bytes, write_json
from stella.media.fbank import LENGTH, SHIFT
from stella.media.inputs import Inputs, with_margin

JOURNAL, SKIPPED = "packing.jsonl", "skipped.jsonl"
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
    worker_gb: float = WORKER_GB,
    progress: bool = True,
    inputs: Inputs | None = None,
) -> Summary:
    """Write all clips of a source, or of named tasks, into the folder `out`, which `Packed` reads.

    Frames are stored with a short side of `size` (none: 8/7 of `pixels`) and cropped at the centre to `width` (none:
    square). `windows` windows of each clip, spread evenly, are stored for training to choose from; an odd number, for
    evaluation takes the middle one. Unusable clips are skipped and listed in `out`/skipped.jsonl. `workers` processes
    decode (none: one per core; 0: this process). `inputs` says how the clips are made; it is stored with them.

    After a kill the same call goes on where it was; a folder that is whole takes up the clips that are new. Skipped
    clips are tried again.
    """
    if is_address(out):
        raise StellaError(f"{out} is an address, and arrays are written to a disk; copy them there when they are whole")
    began, out = time.monotonic(), Path(out)
    tasks = list(clips) if isinstance(clips, Sequence) else [(None, clips)]
    _check([source for _, source in tasks], windows)
    size = size or with_margin(pixels)
    samples = LENGTH + SHIFT * (spec_frames - 1)  # what filterbanks of this many frames need
    settings = {"pixels": pixels, "spec_frames": spec_frames, "windows": windows, "size": size, "width": width or size}
    empty = Header(VERSION, pixels, spec_frames, [], samples, windows, inputs=asdict(inputs) if inputs else None)
    with explain_full_disk(out), _folder(out), lock(out / ".lock"), closing(_Writer(out, settings, empty)) as writer:
        before, skipped = len(writer.header.ids), Skipped(out / SKIPPED)
        done = frozenset((task if tasks[0][0] else None, id) for task, id in writer.packed())
        cutter = _Cutter(tasks, size, width or size, samples, windows, done)
        workers = (os.cpu_count() or 1) if workers is None else workers
        with closing(make(cutter, cutter.jobs(), workers, 2, time_limit, worker_gb)) as chunks:
            _write(chunks, writer, skipped, cutter.total, progress)
        if not writer.header.ids:
            writer.discard()
            raise StellaError(f"no clip could be used for {out}; skipped: {in_words(skipped.counts)}")
        writer.publish()
        (out / ".lock").unlink()
    count, total = len(writer.header.ids), sum(path.stat().st_size for path in out.iterdir())
    return Summary(count, count - before, skipped.counts, total, time.monotonic() - began)


def _write(chunks: "Iterator[Made]", writer: "_Writer", skipped: Skipped, total: int, progress: bool) -> None:
    with progress_bar(progress) as bar:
        made = (clip for chunk in chunks for clip in chunk.items())
        for number, row in bar.track(made, total, description="packing"):
            if isinstance(row, ClipError):
                skipped.add(number, row)
            else:
                writer.append(row)


def _check(sources: Sequence[Source], windows: int) -> None:
    if windows < 1 or windows % 2 == 0:
        raise StellaError(f"windows={windows} must be odd and positive: evaluation takes the middle one")
    if windows > 1 and not all(isinstance(source, Windowed) for source in sources):
        raise StellaError(f"windows={windows}, but these clips have one window each; leave it out")


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """The folder `out`, new or our own; a new one is removed again if nothing was written into it."""
    if out.is_symlink() and not out.is_dir():
        raise StellaError(f"{out} is a link to nothing; choose another folder")
    if out.exists() and not out.is_dir():
        raise StellaError(f"{out} is a file; choose another folder")
    ours = [out / HEADER, out / JOURNAL, out / ".lock"]
    if out.exists() and any(out.iterdir()) and not any(path.is_file() for path in ours):
        raise StellaError(f"{out} holds other files; choose another folder, or an empty one")
    fresh = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if fresh and {path.name for path in out.iterdir()} <= {".lock"}:
            (out / ".lock").unlink(missing_ok=True)
            out.rmdir()


@dataclass(frozen=True)
class _Row:
    id: str
    name: str | None
    task: str | None
    frames: Tensor  # uint8 [K, T, 3, H, W]
    samples: Tensor  # int16 [at most S]


Made = dict[int, _Row | ClipError]  # by the clips' numbers among those of all tasks


@dataclass(frozen=True)
class _Cutter:
    """Makes the rows of clips, by their number among the clips of all tasks."""

    tasks: Sequence[tuple[str | None, Source]]
    height: int
    width: int
    samples: int
    windows: int
    done: frozenset[tuple[str | None, str]]  # tasks and ids of clips that are packed

    @property
    def total(self) -> int:
        """The number of clips to pack."""
        return sum(len(source) for _, source in self.tasks) - len(self.done)

    def jobs(self) -> Iterator[Job]:
        for task, (name, source) in enumerate(self.tasks):
            left = [i for i in range(len(source)) if not self.done or (name, _id(source, i)) not in self.done]
            for chunk, start in enumerate(range(0, len(left), CHUNK)):
                yield Job(task, 0, chunk, left[start : start + CHUNK])

    def __call__(self, job: Job, tick: Tick) -> Made:
        before = sum(len(source) for _, source in self.tasks[: job.task])
        made: Made = {}
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


def _id(source: Source, index: int) -> str | None:
    """The id of a clip. One that is not on a disk is made to learn it; None if it cannot be made."""
    found = stored_at(source, index)
    try:
        return found[0].origin(found[1]).id if found else source[index].id
    except ClipError:
        return None


class _Writer:
    """Appends rows. Each is noted in a journal, so that the rows before a kill are kept; `publish` makes them count."""

    def __init__(self, out: Path, settings: dict[str, int], empty: Header) -> None:
        self.out, self.settings = out, settings
        self.header = read_header(Disk(out)) if (out / HEADER).exists() else empty
        self._published = len(self.header.ids)
        started, noted = self._noted()
        self._refuse_others(started)
        (out / SKIPPED).unlink(missing_ok=True)  # written anew
        self._arrays: list[Appended] = []
        for line in noted:
            self._note(line)
        self._cut_to(min(len(self.header.ids), *self._whole_rows()))
        sizes = self._sizes()
        self._arrays = [Appended(out / name, len(self.header.ids) * sizes[name]) for name in ARRAYS]
        self._journal = Lines(out / JOURNAL)

    def packed(self) -> Iterator[tuple[str | None, str]]:
        """Task and id of each clip."""
        return zip(self.header.tasks, self.header.ids, strict=True)

    def append(self, row: _Row) -> None:
        """Write a row. The first one sets the shape of frames."""
        shape, known = list(row.frames.shape[1:]), self.header.frames
        if known and shape != known:
            raise StellaError(
                f"{row.id} has {shape[0]} frames and the clips before it {known[0]}; "
                "give its source one number of frames for all"
            )
        sound = F.pad(row.samples, (0, self.header.samples - len(row.samples))).numpy().astype("<i2").tobytes()
        length = np.array(len(row.samples), "<i8").tobytes()
        windows = [window.numpy().tobytes() for window in row.frames]
        line: Line = {"id": row.id, "name": row.name, "task": row.task, "frames": shape}
        line |= {"frames_crc32": [zlib.crc32(window) for window in windows], "sound_crc32": zlib.crc32(sound + length)}
        for array, data in zip(self._arrays, (b"".join(windows), sound, length), strict=True):
            array.append(data)
        if not self._journal.end:
            self._journal.write({"settings": self.settings, "clips": len(self.header.ids)})
        self._journal.write(line)
        self._note(line)

    def publish(self) -> None:
        for array in self._arrays:
            array.sync()
        write_json(self.out / HEADER, asdict(self.header))
        (self.out / JOURNAL).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what was written for no clip."""
        for name in (*ARRAYS, JOURNAL, SKIPPED):
            (self.out / name).unlink(missing_ok=True)

    def close(self) -> None:
        for file in (*self._arrays, self._journal):
            file.close()
        with suppress(OSError):
            if not (self.out / JOURNAL).stat().st_size:
                (self.out / JOURNAL).unlink()

    def _noted(self) -> tuple[dict[str, int] | None, list[Line]]:
        """The settings and rows of a journal that was left; none if it was begun for rows that now count."""
        lines = read_lines(self.out / JOURNAL)
        if not lines or lines[0]["clips"] != len(self.header.ids):  # killed between publishing and removing it
            (self.out / JOURNAL).unlink(missing_ok=True)
            return None, []
        return lines[0]["settings"], lines[1:]

    def _refuse_others(self, started: dict[str, int] | None) -> None:
        h = self.header
        whole = {"pixels": h.pixels, "spec_frames": h.spec_frames, "windows": h.windows}
        whole |= {"size": h.frames[2], "width": h.frames[3]} if h.frames else {}
        for old in (started or {}, whole if h.ids else {}):
            if changed := differences(old, self.settings) if old else []:
                raise StellaError(
                    f"{self.out} was packed with other settings: {'; '.join(changed)}; use the same, or another folder"
                )

    def _note(self, line: Line) -> None:
        h = self.header
        h.frames[:] = line["frames"]
        h.ids.append(line["id"])
        h.names.append(line["name"])
        h.tasks.append(line["task"])
        h.frames_crc32.extend(line["frames_crc32"])
        h.sound_crc32.append(line["sound_crc32"])

    def _sizes(self) -> dict[str, int]:
        """Bytes of a row of each array."""
        frames = int(np.prod(self.header.frames)) * self.header.windows if self.header.frames else 0
        return dict(zip(ARRAYS, (frames, 2 * self.header.samples, 8), strict=True))

    def _whole_rows(self) -> list[int]:
        """The number of whole rows of each array."""
        sizes = {name: (self.out / name).stat().st_size for name in ARRAYS if (self.out / name).exists()}
        return [sizes.get(name, 0) // max(1, row) for name, row in self._sizes().items()]

    def _cut_to(self, rows: int) -> None:
        """Forget rows that a power failure took out of the arrays, if they were noted in a journal only."""
        h = self.header
        if rows < len(h.ids):
            if rows < self._published:
                raise StellaError(f"{self.out} is damaged: its arrays hold {rows} clips; delete it and pack again")
            kept = (self.out / JOURNAL).read_bytes().splitlines(keepends=True)[: 1 + rows - self._published]
            write_bytes(self.out / JOURNAL, b"".join(kept))
            del h.ids[rows:], h.names[rows:], h.tasks[rows:], h.sound_crc32[rows:]
            del h.frames_crc32[rows * h.windows :]


def _cover(video: Tensor, height: int, width: int) -> Tensor:
    """The centre of a video, scaled if needed so that it just fills height × width."""
    h, w = video.shape[-2:]
    if (scale := max(height / h, width / w)) != 1:
        h, w = max(height, round(h * scale)), max(width, round(w * scale))
        video = F.interpolate(video, (h, w), mode="bilinear", antialias=True)
    top, left = (h - height) // 2, (w - width) // 2
    return video[..., top : top + height, left : left + width].contiguous()
