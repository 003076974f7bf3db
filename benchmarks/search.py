"""Milliseconds a search takes, and how much of the exact answer it finds: exact search, faiss Flat and faiss IVF.

    python benchmarks/search.py --build            # makes 1,000,000 windows of 768 numbers: 3 GB, ten minutes
    python benchmarks/search.py --out results/search/search.csv

All sides search the same vectors in one run: clusters of unit vectors, the centres drawn at random; a query is a vector
near a centre. "search" is the whole call `Index.search`, with the catalogue; "product" is its matrix product alone, and
"float32" that product by way of a conversion. faiss Flat holds float32 in memory. IVF is the derived index.
"""

import argparse
import csv
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import stella  # noqa: F401  (sets how OpenMP threads wait, before torch is imported)

# isort: split
import torch
from torch import Tensor

from stella.search import ivf
from stella.search.catalogue import Catalogue
from stella.search.index import Found, Index
from stella.search.vectors import ROWS, Writer

QUERIES = 30
K = 10
PER_FILE = 10  # windows of a file, which do not overlap


def drawn(centres: Tensor, n: int, generator: torch.Generator, noise: float = 1.0) -> Tensor:
    rows = centres[torch.randint(len(centres), (n,), generator=generator)]
    return torch.nn.functional.normalize(
        rows + noise * torch.randn(n, rows.shape[1], generator=generator) / rows.shape[1] ** 0.5, dim=1
    )


def fill(root: Path, windows: int, centres: Tensor, generator: torch.Generator, fingerprint: str = "benchmark") -> None:
    """An index of that many windows, written as `stella index` writes them."""
    Catalogue.create(root)
    with closing(Catalogue(root)) as catalogue:
        with catalogue.change() as db:
            model = catalogue.add_model(fingerprint, centres.shape[1], "")
            catalogue.set_meta("serving", model)
            db.execute("INSERT INTO sources (root) VALUES (?)", (os.fsencode(root),))
        writer = Writer(catalogue, model, centres.shape[1])
        for first in range(0, windows, ROWS):
            rows = drawn(centres, min(ROWS, windows - first), generator)
            places = writer.append("video", rows)
            grown = writer.sync()
            with catalogue.change() as db:
                files = [
                    (1 + number, f"file{number}.mp4".encode())
                    for number in range(first // PER_FILE, (first + len(rows) - 1) // PER_FILE + 1)
                ]
                db.executemany("INSERT OR IGNORE INTO files VALUES (?, 1, ?, 0, 0, 0, NULL, NULL, 'ok', NULL)", files)
                db.executemany(
                    "INSERT INTO windows VALUES (?, ?, ?, ?, ?)",
                    [
                        (*place, 1 + (first + i) // PER_FILE, 2.0 * (i % PER_FILE), 2.0 * (i % PER_FILE) + 2)
                        for i, place in enumerate(places)
                    ],
                )
                db.executemany("UPDATE shards SET rows = ? WHERE id = ?", grown)
        writer.close()


def timed(work: Callable[[Tensor], object], queries: Tensor) -> tuple[list[Any], float, float]:
    """The results, and median and 95th percentile in milliseconds."""
    work(queries[0])
    results, times = [], []
    for query in queries:
        began = time.perf_counter()
        results.append(work(query))
        times.append(1000 * (time.perf_counter() - began))
    times.sort()
    return results, times[len(times) // 2], times[int(0.95 * len(times))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("search.csv"))
    parser.add_argument("--folder", type=Path, default=Path("search-benchmark"), help="for the index; kept")
    parser.add_argument("--build", action="store_true", help="only make the index and the derived one")
    args = parser.parse_args()
    import faiss

    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(args.windows // 100, args.dim, generator=generator), dim=1)
    queries = drawn(centres, QUERIES, generator, noise=1.5)
    index = Index(args.folder)
    if not args.folder.exists():
        fill(index.path, args.windows, centres, generator)
        index.build_ivf()
    if args.build:
        return
    rows = measure(index, queries)
    facts = {
        "windows": args.windows,
        "dim": args.dim,
        "k": K,
        "queries": QUERIES,
        "threads": args.threads,
        "processor": _processor(),
        "torch": torch.__version__,
        "faiss": faiss.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | facts for row in rows)


def measure(index: Index, queries: Tensor) -> list[dict[str, object]]:
    import faiss

    with closing(Catalogue(index.path)) as catalogue:
        model = catalogue.model("serving")
        assert model
        shards = index._mapped.open(catalogue, model, "video")
    named = [(shard, row) for shard, part in shards.items() for row in range(len(part))]
    buffer = torch.empty(2048, model.dim)
    rows: list[dict[str, object]] = []
    truth: list[set[object]] = []

    def add(what: str, work: Callable[[Tensor], Any], found: Callable[[Any], set[object]] | None = None) -> None:
        results, median, late = timed(work, queries)
        answers = [found(result) for result in results] if found else []
        truth[:] = truth or answers
        recall = sum(len(a & b) for a, b in zip(answers, truth, strict=True)) / (K * QUERIES) if found else ""
        busy = round(os.getloadavg()[0], 1)
        rows.append({"what": what, "median_ms": round(median, 1), "p95_ms": round(late, 1), "recall_at_10": recall})
        rows[-1]["load"] = busy
        print(rows[-1], flush=True)

    def by_float32(query: Tensor) -> None:
        for part in shards.values():
            for first in range(0, len(part), len(buffer)):
                chunk = part[first : first + len(buffer)]
                torch.mv(buffer[: len(chunk)].copy_(chunk), query)

    def places(found: Found) -> set[object]:
        return {hit.place for hit in found.hits}

    def faiss_places(result: Any) -> set[object]:
        return {named[i] for i in result[1][0] if i >= 0}

    add("search, exact", lambda q: index.search(q, K, merge=False), places)
    add("its product alone, float16", lambda q: [torch.mv(part, q.half()) for part in shards.values()])
    add("product by conversion to float32", by_float32)
    flat = faiss.IndexFlatIP(model.dim)
    for part in shards.values():
        flat.add(part.float().numpy())
    add("faiss Flat, float32 in memory", lambda q: flat.search(q[None].numpy(), K), faiss_places)
    for probes in (8, 32, 128):
        ivf.load(index.path, "video", index.state().version).nprobe = probes
        add(f"search, faiss IVF, {probes} lists", lambda q: index.search(q, K, merge=False, faiss=True), places)
    return rows


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
