"""Clips per second of `stella prepare`, from archives and from a folder of the same files; and whether memory is flat.

    python benchmarks/prepare.py --out results/prepare        about fifteen minutes on two free cores, 5 GB of disk
    python benchmarks/prepare.py --memory-clips 0             speed only
    python benchmarks/prepare.py --against 21a45c1 --out …    files alone, beside the code of another commit

It writes 10 s H.264 videos (320×240, 25 fps, AAC) as `ID_START6.mp4`, once as files and once in `vggsound_XX.tar.gz`
with a list, and prepares both in interleaved rounds with two workers. Memory is that of the process that reads and
writes, and of all its workers, sampled twice a second while an archive of many clips is prepared. Two commits are
compared in processes of their own that take turns, by the clock and by the CPU time of each with all its workers, which
other work on the machine disturbs less.
"""

import argparse
import csv
import ctypes
import io
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from loader import write_video

from stella.data.prepare import prepare
from stella.files import write_text
from stella.runs.environment import environment, provenance
from stella.train.device import runtime

WORKERS = 2
DISTINCT = 20  # videos; the others are copies of them
RSS = re.compile(r"^(?:VmRSS|PPid):\s+(\d+)", re.MULTILINE)
VIDEO2DATASET = (230.0, 16)  # videos a second on so many cores, as it states
VGGSOUND, TEN_MILLION = 199_467, 10_000_000


def write_sources(root: Path, clips: int) -> None:
    """The same clips as files in `root/files`, as an archive in `root/archives`, and a list of them."""
    for folder in ("files", "archives", "made"):
        (root / folder).mkdir(parents=True)
    for n in range(min(DISTINCT, clips)):
        write_video(root / "made" / f"{n}.mp4", n)
    names = [f"v{n:010d}_000000.mp4" for n in range(clips)]
    with tarfile.open(root / "archives" / "vggsound_00.tar.gz", "w:gz", compresslevel=1) as tar:
        for n, name in enumerate(names):
            made = root / "made" / f"{n % DISTINCT}.mp4"
            os.link(made, root / "files" / name)
            info = tarfile.TarInfo(f"scratch/video/{name}")
            info.size = made.stat().st_size
            tar.addfile(info, io.BytesIO(made.read_bytes()))
    write_text(root / "vggsound.csv", "".join(f"{name[:11]},0,playing banjo,train\n" for name in names))


def measured(root: Path, kind: str, clips: int, number: int) -> dict[str, Any]:
    """One preparation: clips a second, and CPU seconds a clip of this process and of its workers."""
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    began = time.perf_counter()
    summary = prepare(
        root / kind, root / f"shards-{kind}-{number}", csv=[root / "vggsound.csv"], workers=WORKERS, progress=False
    )
    seconds = time.perf_counter() - began
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = [b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in zip(before, after, strict=True)]
    assert summary.clips == clips, summary
    return {
        "from": kind,
        "round": number,
        "clips": clips,
        "workers": WORKERS,
        "seconds": round(seconds, 2),
        "clips_per_second": round(clips / seconds, 2),
        "parent_cpu_ms": round(1e3 * cpu[0] / clips, 2),  # for each clip
        "mib_per_clip": round(summary.bytes / 2**20 / clips, 3),
    }


ALONE = """
import sys
from stella.data.prepare import prepare

if __name__ == "__main__":
    print(prepare(sys.argv[1], sys.argv[2], workers=int(sys.argv[3]), progress=False))
"""


def compared(root: Path, commit: str, clips: int, rounds: int) -> list[dict[str, Any]]:
    """Preparations of the files by another commit and by this tree, in turns."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what a fork server leaves behind is waited for
    here = Path(__file__).parents[1]
    (root / "before").mkdir()
    tree = subprocess.run(["git", "archive", commit, "stella"], cwd=here, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x"], cwd=root / "before", input=tree, check=True)
    sides = [("before", root / "before"), ("now", here)]
    rows = []
    for number in range(rounds):
        for name, code in sides[:: 1 if number % 2 else -1]:
            seconds, cpu = timed(code, root / "files", root / f"{name}-{number}", clips)
            about = {"code": name, "round": number, "clips": clips, "workers": WORKERS, "seconds": round(seconds, 2)}
            speed = {"clips_per_second": round(clips / seconds, 2), "cpu_ms": round(1e3 * cpu / clips, 1)}
            rows.append(about | speed)
    return rows


def timed(code: Path, src: Path, dst: Path, clips: int) -> tuple[float, float]:
    """Seconds of a preparation by this code, by the clock and of CPU, with its start."""
    used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", ALONE, str(src), str(dst), str(WORKERS)]
    environment = os.environ | {"PYTHONPATH": str(code)}
    done = subprocess.run(command, env=environment, cwd=src, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(f"{clips} clips"), done.stdout
    seconds = time.perf_counter() - began
    with suppress(ChildProcessError):
        while True:
            os.wait()
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(dst)
    return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def report_compared(rows: list[dict[str, Any]], commit: str) -> None:
    for of, unit in (("clips_per_second", "clips/s"), ("cpu_ms", "ms of CPU a clip")):
        before, now = ([row[of] for row in rows if row["code"] == name] for name in ("before", "now"))
        changes = [100 * (b / a - 1) for a, b in zip(before, now, strict=True)]
        error = stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else float("nan")
        change = f"{mean(changes):+.1f} ± {error:.1f}%"
        print(f"files, {commit}: {mean(before):.2f} {unit}; now {mean(now):.2f}: {change} a round")


def resident(parent: int) -> float:
    """MiB of a process and all below it."""
    found: dict[int, tuple[int, int]] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            values = RSS.findall(status.read_text())
        except OSError:
            continue
        if len(values) == 2:
            found[int(status.parent.name)] = int(values[0]), int(values[1])
    total, line = 0, [parent]
    while line:
        here = line.pop()
        total += found.get(here, (0, 0))[1]
        line += [pid for pid, (above, _) in found.items() if above == here]
    return total / 1024


def memory(root: Path, clips: int) -> list[dict[str, Any]]:
    """Samples of memory while an archive is prepared."""
    rows: list[dict[str, Any]] = []
    stop, began = threading.Event(), time.perf_counter()

    def sample() -> None:
        while not stop.wait(0.5):
            rows.append({"seconds": round(time.perf_counter() - began, 1), "mib": round(resident(os.getpid()))})

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        measured(root, "archives", clips, 0)
    finally:
        stop.set()
        thread.join()
    return rows


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    facts = provenance(environment(runtime("cpu")))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*rows[0], *facts], lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | facts for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def report(rows: list[dict[str, Any]]) -> None:
    rate = {kind: median(r["clips_per_second"] for r in rows if r["from"] == kind) for kind in ("files", "archives")}
    core = rate["archives"] / WORKERS
    theirs, cores = VIDEO2DATASET
    read = 1e3 / mean(r["parent_cpu_ms"] for r in rows if r["from"] == "archives")
    print(f"files {rate['files']:.1f} clips/s, archives {rate['archives']:.1f} clips/s with {WORKERS} workers")
    print(f"video2dataset states {theirs:.0f} videos/s on {cores} cores: {theirs / cores:.1f} a core; ours {core:.1f}")
    print(f"one process that reads an archive and writes can serve {read:.0f} clips/s: {read / core:.0f} workers")
    node = min(16 * core, read)
    bound = "decoding" if node < read else "the process that reads and writes"
    print(f"VGGSound on 16 cores: {VGGSOUND / node / 3600:.1f} h, bound by {bound}")
    print(f"10 million clips on 100 nodes of 16 cores: {TEN_MILLION / (1600 * core) / 3600:.1f} h, bound by decoding")
    gigabytes = TEN_MILLION * mean(r["mib_per_clip"] for r in rows) * 2**20 / 1e9
    print(f"if the store takes the {gigabytes:,.0f} GB of shards at {1600 * core * gigabytes / TEN_MILLION:.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=200, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-clips", type=int, default=2000, help="0: do not measure memory")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit, and measure nothing else")
    parser.add_argument("--out", type=Path, help="folder for speed.csv and memory.csv, or before.csv")
    given = parser.parse_args()
    if given.against:
        with tempfile.TemporaryDirectory() as scratch:
            write_sources(Path(scratch) / "speed", given.clips)
            rows = compared(Path(scratch) / "speed", given.against, given.clips, given.rounds)
        report_compared(rows, given.against)
        if given.out:
            save(given.out / "before.csv", [row | {"before": given.against} for row in rows])
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_sources(root / "speed", given.clips)
        rounds = [
            measured(root / "speed", kind, given.clips, n)
            for n in range(given.rounds)
            for kind in ("files", "archives")
        ]
        report(rounds)
        if given.out:
            save(given.out / "speed.csv", rounds)
    if given.memory_clips:
        with tempfile.TemporaryDirectory() as scratch:
            write_sources(Path(scratch) / "memory", given.memory_clips)
            samples = memory(Path(scratch) / "memory", given.memory_clips)
        tenth = len(samples) // 10
        early, late = (median(s["mib"] for s in some) for some in (samples[tenth : 3 * tenth], samples[-2 * tenth :]))
        print(f"memory over {given.memory_clips} clips: {early:.0f} MiB early, {late:.0f} MiB late")
        if given.out:
            save(given.out / "memory.csv", samples)


if __name__ == "__main__":
    main()
