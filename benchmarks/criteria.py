"""Do weights know what a sounding object is before any task? The three criteria of results/bases on sets of scenes.

    python benchmarks/criteria.py base-tiny base-wide base-small base-wide-small --sets 1 2 3 4 5
    python benchmarks/criteria.py grown.safetensors --sets 1 --size scenes-full --called "base-wide-small, 224 px"

Each reading is that of `stella evaluate WEIGHTS data.seed=SET data.size=SIZE`: 240 clips of each of the six tasks, all
1,440 as gallery. Rows are appended to results/bases/criteria.csv.
"""

import argparse
import csv
from pathlib import Path
from statistics import fmean
from typing import Any

from stella.evaluate.retrieval import DIRECTIONS, KS
from stella.runs.environment import environment, provenance
from stella.runs.evaluate import evaluate_weights
from stella.train.device import runtime

OUT = Path("results/bases/criteria.csv")


def reading(weights: str, number: int, size: str) -> dict[str, Any]:
    found = evaluate_weights(weights, None, [f"data.seed={number}", f"data.size={size}", "seed=100"])
    recall, gallery = found["recall"], sum(found["clips"])
    a = fmean(value for way in DIRECTIONS for k in recall[way] for value in recall[way][k])
    chance = 100 * fmean(int(k) / gallery for k in KS)
    return {
        "size": size,
        "data_seed": number,
        "A": round(a, 3),
        "times_chance": round(a / chance, 2),
        "pairs": round(found["avm_accuracy"], 2),
        "least_pairs_of_a_task": round(min(found["avm_accuracy_by_task"]), 2),
        "least_importance_ratio": round(min(found["importance_ratio"]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", nargs="+")
    parser.add_argument("--sets", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--size", default="scenes")
    parser.add_argument("--called", help="name of the weights in the table")
    given = parser.parse_args()
    about = provenance(environment(runtime()))
    for weights in given.weights:
        for number in given.sets:
            row = {"weights": given.called or weights, **reading(weights, number, given.size), **about}
            print(row, flush=True)
            fresh = not OUT.exists()
            with OUT.open("a", newline="") as file:
                table = csv.DictWriter(file, list(row), lineterminator="\n")
                if fresh:
                    table.writeheader()
                table.writerow(row)


if __name__ == "__main__":
    main()
