"""How long searches wait when many come at once: 200 concurrent requests to a `stella serve` of its own.

    python benchmarks/serve.py --out results/search/serve.csv

Two kinds: sounds that are uploaded, decoded and embedded by worker processes (base-small, an index of rendered scenes),
and "more like this", which only searches (an index of 100,000 windows of 768 numbers). An answer other than 200 counts
as lost. All requests begin at the same moment, each on a connection of its own.
"""

import argparse
import asyncio
import csv
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stella

# isort: split
import torch
from search import fill

from stella.data.scenes import Scenes
from stella.data.scenes.export import export
from stella.media.codecs import encode_flac
from stella.search.index import Index

WINDOWS, DIM, CENTRES = 100_000, 768, 1000


def start(index: Path, *options: str) -> tuple[subprocess.Popen[str], int]:
    """A server, and its port."""
    command = [sys.executable, "-m", "stella", "serve", str(index), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "500"})
    assert process.stdout
    found = re.search(r"http://127.0.0.1:(\d+)", process.stdout.readline())
    assert found
    return process, int(found[1])


async def ask(port: int, target: str, body: bytes) -> tuple[int, float]:
    """The status of an answer (0: none) and the seconds until it was whole."""
    began = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        method = "POST" if body else "GET"
        head = (
            f"{method} {target} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        return int(answer.split(b" ", 2)[1]), time.perf_counter() - began
    except (OSError, IndexError, ValueError):
        return 0, time.perf_counter() - began


async def at_once(port: int, requests: list[tuple[str, bytes]]) -> list[tuple[int, float]]:
    return list(await asyncio.gather(*(ask(port, *one) for one in requests)))


def measure(what: str, port: int, requests: list[tuple[str, bytes]]) -> dict[str, object]:
    warm = asyncio.run(at_once(port, requests[:4]))
    assert all(status == 200 for status, _ in warm), warm
    began = time.perf_counter()
    found = asyncio.run(at_once(port, requests))
    seconds = time.perf_counter() - began
    times = sorted(1000 * late for _, late in found)
    row = {
        "what": what,
        "requests": len(found),
        "lost": sum(status != 200 for status, _ in found),
        "median_ms": round(times[len(times) // 2]),
        "p95_ms": round(times[int(0.95 * len(times))]),
        "last_ms": round(times[-1]),
        "a_second": round(len(found) / seconds, 1),
        "load": round(os.getloadavg()[0], 1),
    }
    print(row, flush=True)
    return row


def uploads(root: Path, count: int, workers: int) -> dict[str, object]:
    """Each request uploads another sound."""
    scenes = Scenes("base", "eval", 40)
    list(export(scenes, root / "videos"))
    Index(root / "index").update(root / "videos", model="base-small")
    process, port = start(root / "index", "--workers", str(workers))
    try:
        requests = [("/api/search", encode_flac(scenes[i % len(scenes)].audio)) for i in range(count)]
        return measure(f"upload of a sound of {scenes.size.duration:g} s, {workers} workers", port, requests)
    finally:
        process.terminate()
        process.wait()


def likes(root: Path, count: int) -> dict[str, object]:
    """Each request names another moment."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(CENTRES, DIM, generator=generator), dim=1)
    fill(root, WINDOWS, centres, generator, stella.load("base-small", "cpu").fingerprint)  # a name that serve knows
    process, port = start(root, "--model", "base-small")
    try:
        found = Index(root).search(centres[0], count, merge=False).hits
        requests = [(f"/api/moments/{hit.place[0]}-{hit.place[1]}/like", b"") for hit in found]
        return measure(f"more like this, {WINDOWS:,} windows", port, requests)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = [uploads(root, given.requests, given.workers), likes(root / "large", given.requests)]
    if given.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        facts = {"cores": os.cpu_count(), "torch": torch.__version__, "commit": commit}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *facts], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | facts for row in rows)


if __name__ == "__main__":
    main()
