"""Checks a day (benchmarks/day.py): what was learnt, what it cost, and whether the history says what is true.

    python benchmarks/day_check.py work --out results/learner/day.json

A and F are computed again from the weights of every round and the stored clips, by other code than the learner's:
ranks by sorting float64 scores, levels and F from their definition in docs/learn.md.
"""

import argparse
import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import stella

# isort: split
import numpy as np
import torch

from stella.data.skipped import Skipped
from stella.evaluate.retrieval import Embeddings, embed
from stella.files import Line, read_lines
from stella.learn.held import HeldClip, HeldOut, measured
from stella.learn.home import Home
from stella.learn.items import content
from stella.model import weights

Places = dict[str, np.ndarray[Any, Any]]  # the two ranks of each clip, by its key


def learnt(home: Home) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Contents trained on, contents set aside and stored, and skipped clips by reason."""
    trained: Counter[str] = Counter()
    aside: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    first = 0
    for number, plan in enumerate(home.plans(), 1):
        skipped = Skipped(home.round(number).skipped).records
        trained.update(item.stamp for n, item in enumerate(plan.train, first) if n not in skipped)
        aside.update(item.stamp for item in plan.held if item.id not in skipped)
        reasons.update(line["reason"] for line in skipped.values())
        first += plan.clips
    return trained, aside, reasons


def mended_later(events: Sequence[Line]) -> dict[str, str]:
    """Of files that were mended: the content after it by the content before it.

    No bad file can be decoded. One that a round lists as it was, and has learnt, was mended before it was read.
    """
    bad = {event["path"]: event["stamp"] for event in events if event["what"] == "bad"}
    return {bad[event["path"]]: event["stamp"] for event in events if event.get("kind") == "mended"}


def check_clips(home: Home, work: Path) -> dict[str, Any]:
    events = read_lines(work / "events.jsonl")
    good = {event["stamp"] for event in events if event["what"] == "good"}
    deleted = {event["stamp"] for event in events if event["what"] == "delete"} & good
    here = {content(path) for path in (work / "in").glob("*/*.mp4")} & good
    trained, aside, reasons = learnt(home)
    every = Counter(mended_later(events).get(stamp, stamp) for stamp in (trained + aside).elements())
    state = home.round(home.current).checkpoints.load()
    assert state is not None
    return {
        "files": sum(event["what"] in ("good", "bad") and event["kind"] != "mended" for event in events),
        "usable": len(good),
        "bad": sum(event["what"] == "bad" for event in events),
        "mended": sum(event.get("kind") == "mended" for event in events),
        "written in pieces": sum(event["what"] == "grows" for event in events),
        "renamed": sum(event["what"] == "rename" for event in events),
        "deleted": len(deleted),
        "kills": [event["doing"] for event in events if event["what"] == "kill"],
        "ended otherwise": [event["code"] for event in events if event["what"] == "ended" and event["code"] != -9],
        "trained on": sum(trained.values()),
        "offered to the memory": int(state["trainer"]["memory"]["seen"]),
        "set aside": sum(aside.values()),
        "skipped": dict(reasons),
        "learnt twice": sum(count > 1 for count in every.values()),
        "usable and there in the evening, not learnt": len(here - every.keys()),
        "deleted before they were learnt": len(deleted - every.keys()),
        "bad and learnt": len(every.keys() - good),
        "rounds": home.current,
    }


def check_usage(work: Path) -> dict[str, Any]:
    """Memory and descriptors of each process between its rounds and in them, after its first round."""
    with (work / "samples.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    found = []
    for pid in dict.fromkeys(row["pid"] for row in rows):
        own = [row for row in rows if row["pid"] == pid]
        after = [row for row in own if row["round"] > own[0]["round"]]
        if len({row["round"] for row in after}) < 3:
            continue
        half = len(after) // 2
        parts: dict[str, Any] = {"minutes": round((after[-1]["t"] - after[0]["t"]) / 60, 1)}
        for name in ("mb", "mb_with_workers", "descriptors"):
            for what, of in (("lowest", min), ("highest", max)):
                parts[f"{what} {name}"] = [of(row[name] for row in part) for part in (after[:half], after[half:])]
        rounds = sorted({row["round"] for row in after})
        parts["lowest mb by round"] = [min(row["mb"] for row in after if row["round"] == r) for r in rounds]
        found.append(parts)
    return {"after its first round, first half and second half": found}


def galleries(home: Home) -> list[list[HeldClip]]:
    """The clips that each round is measured with: a sample of those stored by then."""
    stored: dict[str, int] = {}  # by key, in which round: one that could not be used may come again
    for number, plan in enumerate(home.plans(), 1):
        skipped = Skipped(home.round(number).skipped).records
        stored |= {HeldClip(number, item).key: number for item in plan.held if item.id not in skipped}
    found = []
    for number, plan in enumerate(home.plans(), 1):
        sample = measured(home.plans()[:number], home.settings.measured(plan.epochs * plan.clips))
        found.append([clip for clip in sample if stored.get(clip.key, number + 1) <= number])
    return found


def embeddings(home: Home, clips: Sequence[HeldClip]) -> list[tuple[list[str], Embeddings]]:
    """Of these clips by the weights before the first round and after each."""
    config, source = home.config, HeldOut(home.held, clips)
    stream = replace(config.stream, batch_size=32, workers=0, most_bad=1.0)
    found = []
    for number in range(home.current + 1):
        path = home.round(number).weights if number else weights.find(str(config.model.weights))
        made = embed(weights.load(path).model.eval(), source, stream)
        found.append(([source.keys[i] for i in made.ids.tolist()], made))
    return found


def places(made: tuple[list[str], Embeddings], which: set[str]) -> Places:
    """Ranks, by sound and by picture, of these clips among themselves."""
    rows = [i for i, key in enumerate(made[0]) if key in which]
    a, v = (x[rows].double().numpy() for x in (made[1].a, made[1].v))
    scores = a @ v.T
    by_sound = [int((row > row[i]).sum()) + 1 for i, row in enumerate(scores)]
    by_picture = [int((row > row[i]).sum()) + 1 for i, row in enumerate(scores.T)]
    return {made[0][row]: np.array(pair) for row, *pair in zip(rows, by_sound, by_picture, strict=True)}


def accuracy(found: Places, keys: list[str]) -> float:
    both = np.concatenate([found[key] for key in keys])
    return float(100 * np.mean([(both <= k).mean() for k in (1, 5, 10)]))


def check_history(home: Home) -> dict[str, Any]:
    """The largest difference between the history's A and F and those computed here."""
    sampled = galleries(home)
    made = embeddings(home, list({clip.key: clip for clips in sampled for clip in clips}.values()))
    level: dict[int, float] = {}
    best: dict[int, float] = {}
    differences: dict[str, list[float]] = {"A": [], "F": []}
    for number, record in enumerate(home.history(), 1):
        round_of = {clip.key: clip.round for clip in sampled[number - 1]}
        before, after = (places(made[n], set(round_of)) for n in (number - 1, number))
        old = [key for key in after if round_of[key] < number]
        new = [key for key in after if round_of[key] == number]
        for name, keys in (("old", old), ("new", new)):
            if keys and record[name]:
                for when, found in (("before", before), ("after", after)):
                    differences["A"].append(abs(accuracy(found, keys) - record[name][when]))
            elif keys and len(after) > 1:
                differences["A"].append(float("nan"))
        for r in sorted({*level, *(round_of[key] for key in after)}):
            own = [key for key in after if round_of[key] == r] or old  # without a clip today: as all old ones
            if not own:
                continue
            now = accuracy(after, own)
            level[r] = now if r == number or r not in level else level[r] - accuracy(before, own) + now
            best[r] = max(best.get(r, level[r]), level[r])
        lost = [best[r] - level[r] for r in level if r < number]
        if record["F"] is not None:
            differences["F"].append(abs(sum(lost) / len(lost) - record["F"]))
    return {f"largest difference in {name}": max(each, default=None) for name, each in differences.items()} | {
        f"{name} compared": len(each) for name, each in differences.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    home = Home(given.work / "home-after")
    events = read_lines(given.work / "events.jsonl")
    full = [event for event in events if event["what"] in ("disk full", "disk free")]
    found = {
        "minutes": round(events[-1]["t"] / 60, 1),
        "clips": check_clips(home, given.work),
        "disk full": {"seconds": round(full[1]["t"] - full[0]["t"]), "while": [event["doing"] for event in full]},
        "usage": check_usage(given.work),
        "history": check_history(home),
        "last round": {k: home.history()[-1][k] for k in ("old", "new", "F", "gap", "matching", "gallery")},
        "version": stella.__version__,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
