"""A fault campaign: `make faults`, or python -m benchmarks.faults [--quick] [--parts …] [--out FOLDER].

Intact files of many codecs and containers, thousands of mutated ones, kills, full disks, damaged checkpoints, weights
and stored clips, hostile archives. Prints the counts by outcome, writes them to FOLDER/PART.csv, and ends with
status 1 if anything was lost, hung, crashed, or silently replaced in strict mode beyond the stated share.
"""

import argparse
import csv
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.faults import kills, media, ranks, records
from stella.runs.environment import environment, provenance
from stella.train.device import runtime

Row = tuple[str, str, str, str]  # part, kind, disturbance, outcome
MOST_WRONG = 0.01  # share of mutated files whose pictures are wrong in strict mode; of sounds twice as many
UNCHECKED = ("hevc", "vp8", "vp9", "wmv2")  # decoders that take almost any bits for pictures: counted, not judged


def measured(root: Path, count: int, processes: int) -> Iterable[Row]:
    intact = root / "intact"
    intact.mkdir()
    jobs = media.jobs_intact(media.write_intact(intact))
    for job, outcome in media.outcomes(jobs, processes):
        yield "intact, strict" if job.strict else "intact, lenient", job.kind, "", outcome
    for job, outcome in media.outcomes(media.jobs_mutated(intact, count), processes):
        yield "mutated, strict" if job.strict else "mutated, lenient", job.kind, job.change, outcome


def killed(root: Path, few: int) -> Iterable[Row]:
    counts = {"run": 45, "folder run with workers": 15, "prepare": 25, "pack": 25}
    for row in kills.kills(root, {name: -(-n // few) for name, n in counts.items()}, 0):
        yield "kills", *row


def torchrun(root: Path, few: int) -> Iterable[Row]:
    for row in ranks.ranks_killed(root, 20 // few, 0):
        yield "ranks", *row


def full(root: Path, few: int) -> Iterable[Row]:
    for row in kills.full_disks(root, 12 // min(few, 4), 0):
        yield "full disk", *row


def damaged(root: Path, few: int) -> Iterable[Row]:
    victim = kills.victims(root)["run"]
    for row in records.checkpoints(_stopped(victim, root), victim, root, 24 // min(few, 4)):
        yield "checkpoints", *row
    (root / "records").mkdir()
    for row in records.weight_files(root / "records", 400 // few):
        yield "weights", *row
    for row in records.stored_clips(root / "records", 140 // few):
        yield "stored clips", *row
    for row in records.hostile(root / "hostile"):
        yield "hostile", *row


def _stopped(victim: kills.Victim, root: Path) -> Path:
    """A run that was stopped when it had two checkpoints and steps to go."""
    for attempt in range(20):
        out = root / f"stopped-{attempt}"
        pid = kills.forked(victim, out)
        while len(list((out / "checkpoints").glob("*.pt"))) < 2:
            time.sleep(0.005)
        os.kill(pid, signal.SIGTERM)
        status, _ = kills.ended(pid)
        if status == 128 + signal.SIGTERM and len(list((out / "checkpoints").glob("*.pt"))) == 2:
            return out
    raise SystemExit("the run cannot be stopped between two checkpoints")


def bad(counts: Counter[Row]) -> list[str]:
    """What must not happen."""
    by_part: Counter[tuple[str, str]] = Counter()
    files: Counter[tuple[bool, str]] = Counter()  # mutated, in strict mode: whether pictures are judged, outcome
    for (part, kind, _, outcome), count in counts.items():
        by_part[part, outcome.partition(" (")[0]] += count
        if part == "mutated, strict":
            files[not kind.startswith(UNCHECKED), outcome] += count
    never = ("different", "hung", "failed", "another", "opened", "died", "error", "crashed", "ended", "answered")
    found = [f"{part}: {outcome} × {count}" for (part, outcome), count in by_part.items() if outcome.startswith(never)]
    judged = sum(count for (checked, _), count in files.items() if checked)
    wrong = sum(files[True, outcome] for outcome in ("grey", "gross", "other size"))
    if wrong > MOST_WRONG * judged:
        found.append(f"{wrong} of {judged} mutated files are shown wrongly in strict mode")
    if (wrong := files[True, "gross sound"] + files[False, "gross sound"]) > 2 * MOST_WRONG * files.total():
        found.append(f"{wrong} of {files.total()} mutated files are heard wrongly in strict mode")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--parts", default="kills,ranks,disks,records,media", help="separated by commas")
    parser.add_argument("--out", type=Path, default=Path("results/faults"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    few = 10 if given.quick else 1
    parts = {"kills": lambda root: killed(root, few), "disks": lambda root: full(root, few)}
    parts |= {"records": lambda root: damaged(root, few)}
    parts |= {"ranks": lambda root: torchrun(root, few)}
    parts |= {"media": lambda root: measured(root, 5000 // few, given.processes)}
    problems: list[str] = []
    for name in given.parts.split(","):
        problems += run(name, parts[name], given.out)
    print(*problems or ["nothing lost, nothing hung, nothing silently replaced beyond the stated share"], sep="\n")
    sys.exit(bool(problems))


def run(name: str, part: Callable[[Path], Iterable[Row]], out: Path) -> list[str]:
    """Do a part, write OUT/NAME.csv, print its counts; returns what must not happen and did."""
    began, counts = time.monotonic(), Counter[Row]()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for row in part(Path(folder)):
                counts[row] += 1
                if (done := sum(counts.values())) % 100 == 0:
                    print(f"{time.monotonic() - began:6.0f} s  {name}: {done} cases", flush=True)
    finally:
        facts = provenance(environment(runtime("cpu")))
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["part", "kind", "disturbance", "outcome", "count", *facts])
            for row, count in sorted(counts.items()):
                table.writerow([*row, count, *facts.values()])
        for (each, outcome), count in sorted(_brief(counts).items()):
            print(f"{each:20} {outcome:45} {count}")
        print(f"{name}: {sum(counts.values())} cases, {time.monotonic() - began:.0f} s", flush=True)
    return bad(counts)


def _brief(counts: Counter[Row]) -> Counter[tuple[str, str]]:
    brief: Counter[tuple[str, str]] = Counter()
    for (part, _, _, outcome), count in counts.items():
        brief[part, outcome] += count
    return brief


if __name__ == "__main__":
    main()
