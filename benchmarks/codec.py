"""What `memory.codec=dct` costs: quality of decoded clips, bytes, and the time of a step with and without it.

    python benchmarks/codec.py                              scenes: quality of each clip, time to encode and decode
    python benchmarks/codec.py --clips tests/data/clips     also of video files (needs PyAV)
    python benchmarks/codec.py --rates                      also quality at other numbers of coefficients
    python benchmarks/codec.py --steps base --batch 48      also steps of noise (base: the paper's sizes)

PSNR is over all frames of a clip. The error of a spectrogram is its root mean square over the spectrogram's own
deviation; clips of 2.56 s have no padding, which would be easy to code. `--csv FILE` writes a row for each clip,
`--picture FILE` shows clips before and after. Steps of both sides take turns in one process.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stella import codec
from stella.bench.steps import make_trainer, step_times, warm_up
from stella.clip import SAMPLE_RATE, Batch, Source
from stella.columns import Column, coded
from stella.config import resolve
from stella.data.folder import FolderConfig
from stella.data.scenes import SIZES, Scenes
from stella.data.stream import Stream, StreamConfig
from stella.media.fbank import LENGTH, SHIFT
from stella.methods.base import clip_columns
from stella.model.cav import preset
from stella.runs.config import RunConfig
from stella.train.device import runtime

RATES = {
    "frames": [(48, 12, 12), (60, 16, 16), (64, 20, 20), (72, 16, 16), (80, 20, 20), (96, 24, 24), (120, 30, 30)],
    "spectrograms": [(72,), (88,), (104,), (120,), (136,), (152,)],
}
WHOLE = (round(2.56 * SAMPLE_RATE) - LENGTH) // SHIFT + 1  # steps of a spectrogram of 2.56 s before its padding
Row = tuple[str, str, float, float]  # set, clip, PSNR, error of the spectrogram
console = Console(width=120)


def batch_of(source: Source, pixels: int, duration: float, augment: bool = False) -> Batch:
    """All clips of a source, as a training step sees them."""
    shape = {"size": pixels, "spec_frames": round(100 * duration)}
    return next(Stream([("", source)], StreamConfig(len(source), augment=augment, shuffle=False, **shape)))


def clip_sets(folder: str | None, count: int) -> dict[str, tuple[list[str], Batch]]:
    sets = {}
    for name in ("scenes", "scenes-hard", "scenes-full"):
        size = SIZES[name]
        source = Scenes("task1", "train", count, size=name)
        names = [source[index].id for index in range(count)]
        sets[name] = names, batch_of(source, size.pixels, size.duration)
        sets[f"{name}, augmented"] = names, batch_of(source, size.pixels, size.duration, augment=True)
    for duration in (10.24, 2.56) if folder else ():
        files = FolderConfig(path=folder or "", pixels=224, duration=duration).open()
        sets[f"real clips, {duration} s"] = files.files, batch_of(files, 224, duration)
        sets[f"real clips, {duration} s, augmented"] = files.files, batch_of(files, 224, duration, augment=True)
    return sets


def columns(seen: Batch) -> dict[str, Column]:
    sizes = {"image_size": seen.video.shape[-1], "spec_frames": seen.audio.shape[1], "frames": seen.video.shape[1]}
    return coded(clip_columns(preset("base", **sizes)))


def psnr(now: Tensor, was: Tensor) -> Tensor:
    return 10 * torch.log10(255**2 / (now.float() - was.float()).square().flatten(1).mean(1))


def error(now: Tensor, was: Tensor) -> Tensor:
    return (now.float() - was).square().flatten(1).mean(1).sqrt() / was.flatten(1).std(1)


def decoded(seen: Batch) -> tuple[Tensor, Tensor]:
    c = columns(seen)
    return c["video"].decode(c["video"].encode(seen.video)), c["audio"].decode(c["audio"].encode(seen.audio))


def quality(sets: dict[str, tuple[list[str], Batch]]) -> list[Row]:
    table = Table("clips", "", "PSNR, mean", "least", "spectrogram error", "largest", "bytes a clip", "of plain")
    rows = []
    for name, (clips, seen) in sets.items():
        video, audio = decoded(seen)
        each = list(zip(clips, psnr(video, seen.video).tolist(), error(audio, seen.audio).tolist(), strict=True))
        rows += [(name, *one) for one in each]
        _, p, e = zip(*each, strict=True)
        size = sum(column.bytes for column in columns(seen).values())
        ratio = (seen.video[0].nbytes + 2 * seen.audio[0].numel()) / size
        numbers = f"{statistics.mean(p):.1f} dB", f"{min(p):.1f}", f"{statistics.mean(e):.3f}", f"{max(e):.3f}"
        table.add_row(name, str(len(clips)), *numbers, f"{size:,}", f"1/{ratio:.2f}")
    console.print(table)
    return rows


def rates(sets: dict[str, tuple[list[str], Batch]]) -> None:
    """Quality at other numbers of AC coefficients: PSNR of frames, error of spectrograms; means over clips."""
    names = [name for name in ("real clips, 2.56 s", "scenes") if name in sets]
    table = Table("", "coefficients", "bytes a patch", *names)
    for kind, counts in RATES.items():
        for kept in counts:
            found = []
            for name in names:
                seen = sets[name][1]
                column = columns(seen)["video" if kind == "frames" else "audio"]
                values = seen.video if kind == "frames" else seen.audio
                now = requantised(column, values, kept)
                found.append(f"{(psnr if kind == 'frames' else error)(now, values).mean():.4g}")
            table.add_row(kind, str(kept), str(4 * len(kept) + sum(kept) // 2), *found)
    console.print(table)


def requantised(column: Column, values: Tensor, kept: tuple[int, ...]) -> Tensor:
    usual = codec.KEPT[len(kept)]
    codec.KEPT[len(kept)] = kept
    try:
        return column.decode(column.encode(values))
    finally:
        codec.KEPT[len(kept)] = usual


def times(seen: Batch, device: torch.device, rounds: int = 7) -> None:
    """Milliseconds a clip to encode and to decode, the least of several rounds."""
    here = seen.to(device)
    found = {}
    for name, column in columns(seen).items():
        values = getattr(here, name)
        code = column.encode(values)
        found[f"encode {name}"] = min(_ms(lambda c=column, x=values: c.encode(x), device) for _ in range(rounds))
        found[f"decode {name}"] = min(_ms(lambda c=column, x=code: c.decode(x), device) for _ in range(rounds))
    told = ", ".join(f"{name} {1e3 * took / len(seen):.0f} µs" for name, took in found.items())
    console.print(f"a clip of the paper's size on {device} ({torch.get_num_threads()} threads): {told}")


def _ms(function, device: torch.device) -> float:  # type: ignore[no-untyped-def]
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def steps(size: str, batch: int, methods: list[str], turns: int) -> None:
    table = Table("method", "plain, ms a step", "codec, ms a step", "cost", title=f"{size}, batches of {batch}")
    for method in methods:
        shared = [f"method={method}", f"model.preset={size}", f"stream.batch_size={batch}", f"memory.clips={4 * batch}"]
        sides = {
            name: make_trainer(resolve(RunConfig, None, [*shared, f"memory.codec={name}"])) for name in ("none", "dct")
        }
        for trainer in sides.values():
            warm_up(trainer)
        found: dict[str, list[float]] = {"none": [], "dct": []}
        for _ in range(turns):
            for name, trainer in sides.items():
                found[name] += step_times(trainer, 4)
        plain, with_codec = (statistics.median(found[name]) for name in ("none", "dct"))
        table.add_row(method, f"{plain:.2f}", f"{with_codec:.2f}", f"{100 * (with_codec / plain - 1):+.1f}%")
        del sides, trainer
    console.print(table)


def picture(sets: dict[str, tuple[list[str], Batch]], file: Path) -> None:
    """A frame and a spectrogram of some clips: before, after, and eight times the difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in ("real clips, 2.56 s", "scenes", "scenes-full") if name in sets]
    figure, axes = pyplot.subplots(len(names), 6, figsize=(19, 3.4 * len(names)), squeeze=False)
    for row, name in zip(axes, names, strict=True):
        seen = sets[name][1][:1]
        video, audio = decoded(seen)
        frames = [x[0, 1].permute(1, 2, 0) for x in (seen.video, video)]
        frames.append((8 * (frames[1].int() - frames[0].int()) + 128).clamp(0, 255))
        sounds = [x[0, :WHOLE].T.float() for x in (seen.audio, audio)]
        sounds.append(8 * (sounds[1] - sounds[0]))
        low, high = float(sounds[0].min()), float(sounds[0].max())
        limits = {"vmin": low, "vmax": high, "aspect": "auto", "origin": "lower", "cmap": "magma"}
        p, e = float(psnr(video, seen.video)), float(error(audio, seen.audio))
        titles = name, f"decoded, {p:.1f} dB", "8 × difference", "spectrogram", f"decoded, error {e:.3f}"
        for axis, title, frame in zip(row[:3], titles, frames, strict=False):
            axis.imshow(frame.to(torch.uint8).numpy())
            axis.set_title(title)
        for axis, title, sound in zip(row[3:], [*titles[3:], "8 × difference"], sounds, strict=True):
            axis.imshow(sound.numpy(), **limits)
            axis.set_title(title)
        for axis in row:
            axis.axis("off")
    figure.tight_layout()
    figure.savefig(file, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", help="folder of video files")
    parser.add_argument("--count", type=int, default=16, help="scenes of each kind")
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--steps", metavar="PRESET", help="tiny, small or base")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--methods", nargs="+", default=["er", "derpp", "stella", "stella_plus"])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    sets = clip_sets(given.clips, given.count)
    rows = quality(sets)
    if given.rates:
        rates(sets)
    times(sets["scenes-full"][1], runtime("auto", "auto").device)
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["clips", "clip", "psnr_db", "spectrogram_error"])
            writer.writerows([name, clip, f"{p:.2f}", f"{e:.4f}"] for name, clip, p, e in rows)
    if given.picture:
        picture(sets, given.picture)
    if given.steps:
        steps(given.steps, given.batch, given.methods, given.turns)


if __name__ == "__main__":
    main()
