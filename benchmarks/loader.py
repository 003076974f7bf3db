"""Clips per second from files: a bare PyAV loop, our decode, the stream; and whether memory stays constant.

    python benchmarks/loader.py                  everything, about four minutes on two free cores
    python benchmarks/loader.py --clips 0        speed only
    python benchmarks/loader.py --rounds 0       memory only

It writes 10 s H.264 videos (320×240, 25 fps, one keyframe in 250 frames, AAC) into a temporary folder and reads them in
interleaved rounds, of which the best counts. The bare loop decodes everything: every frame as RGB, all audio. All
processes use one thread. On a busy machine compare CPU time per clip (parent and workers), not clips/s.
"""

import argparse
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import mean

import av
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from stella.clip import Source
from stella.data.folder import Folder
from stella.data.prepare import prepare
from stella.data.shards import Shards
from stella.data.stream import Stream, StreamConfig
from stella.media.decode import Plan, decode

FPS, SECONDS, WIDTH, HEIGHT = 25, 10, 320, 240
LINE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)  # of /proc/PID/status
console = Console()


def write_video(path: Path, seed: int) -> None:
    """A moving texture with some noise, so that the file is neither trivial nor incompressible."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (2 * HEIGHT // 8, 2 * WIDTH // 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    texture = (coarse * 0.8 + rng.integers(0, 16, coarse.shape)).astype(np.uint8)
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=FPS, options={"preset": "veryfast", "crf": "23", "g": "250"})
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        audio = container.add_stream("aac", rate=44_100, layout="stereo")
        for number in range(FPS * SECONDS):
            x, y = int(WIDTH / 2 * (1 + np.sin(number / 40))), int(HEIGHT / 2 * (1 + np.cos(number / 25)))
            picture = np.ascontiguousarray(texture[y : y + HEIGHT, x : x + WIDTH])
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode(None))
        sound = rng.normal(0, 0.1, (2, 44_100 * SECONDS)).astype(np.float32)
        for begin in range(0, sound.shape[1], 1024):
            piece = np.ascontiguousarray(sound[:, begin : begin + 1024])
            frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = 44_100, begin, Fraction(1, 44_100)
            container.mux(audio.encode(frame))
        container.mux(audio.encode(None))


def read_everything(path: Path) -> None:
    with av.open(str(path)) as container:
        container.streams.video[0].thread_count = 1
        for frame in container.decode(video=0, audio=0):
            frame.to_ndarray(format="rgb24") if isinstance(frame, av.VideoFrame) else frame.to_ndarray()


@dataclass(frozen=True)
class Speed:
    rate: float  # clips a second
    cpu: float  # milliseconds per clip, all processes


def loop(read: Callable[[Path], object], files: list[Path]) -> Speed:
    wall, cpu = time.perf_counter(), time.process_time()
    for path in files:
        read(path)
    return Speed(len(files) / (time.perf_counter() - wall), 1000 * (time.process_time() - cpu) / len(files))


def flow(source: Source, workers: int, clips: int) -> Speed:
    """The stream's speed without the start of its workers."""
    stream = Stream({"files": source}, StreamConfig(batch_size=8, epochs=-(-clips // len(source)), workers=workers))
    for _ in range(workers):
        next(stream)
    wall, before, counted, spent = time.perf_counter(), cpu(), 0, 0.0
    for batch in stream:
        counted += len(batch)
        if stream.finished_task is None:  # at the end the workers are gone
            spent = (cpu() - before) / counted
    return Speed(counted / (time.perf_counter() - wall), 1000 * spent)


def processes() -> list[Path]:
    pids = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
    return [Path(f"/proc/{pid}") for pid in pids]


def cpu() -> float:
    """CPU seconds of this process and its workers so far."""
    fields = [(process / "stat").read_text().rpartition(")")[2].split() for process in processes()]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def memory() -> float:
    """MiB of this process and its workers; batches in shared memory count once."""
    parent, *workers = [dict(LINE.findall((process / "status").read_text())) for process in processes()]
    return (sum(int(p["RssAnon"]) for p in (parent, *workers)) + int(parent["RssShmem"])) / 1024


def memory_over(source: Source, clips: int) -> list[tuple[int, float]]:
    stream = Stream({"files": source}, StreamConfig(batch_size=8, epochs=-(-clips // len(source)), workers=2))
    points: list[tuple[int, float]] = []
    seen = 0
    for batch in track(stream, "memory", total=len(stream), console=console, transient=True):
        before, seen = seen, seen + len(batch)
        if seen // 100 > before // 100 and stream.finished_task is None:  # at the end the workers are gone
            points.append((seen, memory()))
    return points


def measure(files: list[Path], rounds: int) -> dict[str, Speed]:
    folder, plan, shards = Folder(files[0].parent), Plan(), files[0].parent.parent / "shards"
    console.print(f"prepare: {prepare(files[0].parent, shards)}")
    stored, clips = Shards(shards), 5 * len(files)
    rows: dict[str, Callable[[], Speed]] = {
        "bare PyAV, reads everything": lambda: loop(read_everything, files),
        "decode": lambda: loop(lambda path: decode(path, plan), files),
        "stream, 1 worker": lambda: flow(folder, 1, clips),
        "stream, 2 workers": lambda: flow(folder, 2, clips),
        "stream from shards, 1 worker": lambda: flow(stored, 1, clips),
    }
    speeds: dict[str, list[Speed]] = {name: [] for name in rows}
    for _ in track(range(rounds), "rounds", console=console, transient=True):
        for name, row in rows.items():
            speeds[name].append(row())
    return {name: Speed(max(s.rate for s in some), min(s.cpu for s in some)) for name, some in speeds.items()}


def show(speeds: dict[str, Speed]) -> None:
    bare, ours = speeds["bare PyAV, reads everything"], speeds["decode"]
    goals = {"decode": f"{ours.rate / bare.rate:.2f}× bare; by CPU {bare.cpu / ours.cpu:.2f} (goal 1.5)"}
    for workers, name in ((1, "stream, 1 worker"), (2, "stream, 2 workers")):
        share, cpu = speeds[name].rate / ours.rate / workers, ours.cpu / speeds[name].cpu
        goals[name] = f"{share:.2f}× decode a worker; by CPU {cpu:.2f} (goal 0.85)"
    table = Table("row", "clips/s", "CPU ms/clip", "", title=f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, speed in speeds.items():
        table.add_row(name, f"{speed.rate:.1f}", f"{speed.cpu:.1f}", goals.get(name, ""))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clips", type=int, default=2000, help="clips for the memory curve: at least 800, or 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        files = [Path(root) / "videos" / f"{number:03d}.mp4" for number in range(arguments.files)]
        files[0].parent.mkdir()
        for number, path in enumerate(track(files, "writing videos", console=console, transient=True)):
            write_video(path, number)
        if arguments.rounds:
            show(measure(files, arguments.rounds))
        points = memory_over(Folder(files[0].parent), arguments.clips) if arguments.clips else []
    if points:
        sizes = [size for _, size in points]
        quarter = len(sizes) // 4
        growth = mean(sizes[-quarter:]) / mean(sizes[quarter : 2 * quarter]) - 1
        curve = ", ".join(f"{clips}: {size:.0f}" for clips, size in points[:: max(1, len(points) // 10)])
        console.print(f"memory with 2 workers, MiB by clips: {curve}")
        console.print(f"from the second to the last quarter {growth:+.1%} (goal: constant)")


if __name__ == "__main__":
    main()
