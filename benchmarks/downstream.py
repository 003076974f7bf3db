"""The downstream tasks on scenes with several models and seeds, into one CSV.

    python benchmarks/downstream.py --models base-tiny,base-wide,random:tiny --seeds 3 --out results/downstream

Finished runs are skipped. With the same weights and clips all seeds share the frozen backbone's features; the seeds of
`localise`, which trains nothing, are seeds of its clips.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console

from stella.experiments.results import to_csv
from stella.files import write_text
from stella.transfer.config import transfer_config
from stella.transfer.results import downstream_rows
from stella.transfer.run import transfer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="base-tiny,base-wide,random:tiny")
    parser.add_argument("--tasks", default="localise,classify,events,segment")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/downstream"))
    parser.add_argument("--out", type=Path, default=Path("results/downstream"))
    parser.add_argument("values", nargs="*", help="key=value over the defaults of every task")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for task in given.tasks.split(","):
        for model in given.models.split(","):
            for seed in range(given.seeds):
                own = [f"data.seed={seed}"] if task == "localise" else [f"features={given.runs / 'features'}"]
                values = [*own, f"seed={seed}", f"weights.source={model}", *given.values]
                run = given.runs / task / model.replace(":", "-") / f"seed-{seed}"
                transfer(transfer_config(task, None, values), run, resume=True, console=Console(quiet=True))
                given.out.mkdir(parents=True, exist_ok=True)
                write_text(given.out / "results.csv", to_csv(downstream_rows(given.runs)))


if __name__ == "__main__":
    main()
