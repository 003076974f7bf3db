"""Clips for benchmarks/day.py: rendered scenes of six tasks as small mp4 files.

python benchmarks/day_clips.py FOLDER [--clips 2000] [--workers 2]
"""

import argparse
from multiprocessing import Pool
from pathlib import Path

import stella

# isort: split
import torch

from stella.data.scenes import TASKS, Scenes
from stella.media.encode import encode

FPS = 6.25  # the four frames that a model sees fall on whole frames


def render(job: tuple[str, int, Path]) -> None:
    task, index, path = job
    if not path.exists():
        scenes = Scenes(task, "train", index + 1)
        encode(path, scenes.film(index, FPS), scenes[index].audio, FPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clips", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    jobs = []
    for number in range(given.clips):
        task = TASKS[number * len(TASKS) // given.clips]
        path = given.folder / task / f"{number:05d}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        jobs.append((task, number, path))
    with Pool(given.workers) as pool:
        for done, _ in enumerate(pool.imap_unordered(render, jobs, chunksize=4), 1):
            if done % 200 == 0:
                print(f"{done} of {len(jobs)}", flush=True)
    print(f"{len(jobs)} clips in {given.folder}, stella {stella.__version__}")


if __name__ == "__main__":
    main()
