"""Clips a second and memory of every downstream head at the paper's sizes, on clips of noise.

    python benchmarks/heads.py OUT.csv                              (a GPU; --small: in miniature on a CPU)
    python benchmarks/heads.py OUT.csv segment matching             (these alone)

For a frozen backbone three rates: features alone (feed and backbone, nothing kept), the first epoch (features computed
and kept, then one epoch of the head) and later epochs. `first_share` is the first epoch's rate over that of features.
Batches are the paper's. The feed is noise that is already on the device, made into log-mel filterbanks there.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stella.bench.steps import let_go
from stella.clip import Batch, Device, Labels
from stella.data.downstream import Parts
from stella.data.stream import evaluation_batches
from stella.experiments.results import to_csv
from stella.files import write_text
from stella.model.cav import CAV, CAVConfig, preset
from stella.rng import generator
from stella.runs.environment import environment, provenance
from stella.train.device import Runtime, runtime
from stella.train.trainer import Trainer
from stella.transfer.config import TransferConfig, transfer_config
from stella.transfer.features import Epochs, Rows, tabulate
from stella.transfer.tasks import TASKS

DISTINCT = 64  # clips of noise, over and over
HEADS = {  # name and settings, and clips an epoch
    "classify": 1920,
    "classify head.probe=true": 1920,
    "events": 1920,
    "segment head.mask_frames=1": 960,  # S4
    "segment": 960,  # MS3: all frames
    "matching": 960,
    "retrieval": 480,
}
CLASSES = tuple(f"class {number}" for number in range(160))


class Noise:
    """A batch source: clips of noise on the device, with classes and masks."""

    def __init__(self, clips: int, c: CAVConfig, device: torch.device) -> None:
        draw = generator("heads", device=device)
        shape = (DISTINCT, c.frames, 3, c.image_size, c.image_size)
        self.length, samples = clips, 160 * c.spec_frames + 240
        self.video = torch.randint(256, shape, generator=draw, device=device, dtype=torch.uint8)
        self.audio = 0.1 * torch.randn(DISTINCT, samples, generator=draw, device=device)
        self.mask = torch.zeros(c.frames, c.image_size, c.image_size, dtype=torch.bool)
        self.mask[:, : c.image_size // 3, : c.image_size // 3] = True

    def __len__(self) -> int:
        return self.length

    def tensors(self, indices: Any, device: Device = "cpu") -> tuple[Tensor, Tensor]:
        at = torch.tensor([index % DISTINCT for index in indices], device=self.video.device)
        return self.video[at], self.audio[at]

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("clips are made in batches")

    def labels(self, index: int) -> Labels:
        return Labels(self.class_of(index), "noise", self.mask)

    def class_of(self, index: int) -> str:
        return CLASSES[index % len(CLASSES)]


class Timer:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> "Timer":
        self._wait()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self.began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def head(name: str, size: str, clips: int, epochs: int, place: Runtime) -> dict[str, Any]:
    """The rates of one head; the first batches, which warm up, are not timed."""
    let_go()
    if place.device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(place.device)
    task, _, given = name.partition(" ")
    values = ["stream.augment=false", *given.split()]
    config = transfer_config(task, {"source": "ave", "path": "/"}, values)  # the paper's settings
    c = preset(size)
    stream = replace(config.stream, size=c.image_size, spec_frames=c.spec_frames, mels=c.mel_bins, workers=0)
    config = replace(config, stream=stream)
    source = Noise(clips, c, place.device)
    torch.manual_seed(0)
    method = TASKS[task](CAV(c).to(place.device), Parts(source, source, source, CLASSES), config.head, 0)
    frozen = config.head.frozen and method.cached
    found = kept(method, config, epochs, place) if frozen else trained(method, config, epochs, place)
    about = {"head": name, "backbone": "frozen" if config.head.frozen else "trained", "model": size}
    sizes = {"clips": clips, "batch": stream.batch_size, "features_batch": config.evaluate.batch}
    gib = {"peak_gib": place.peak_bytes() / 2**30}
    return about | sizes | found | gib


def kept(method: Any, config: TransferConfig, epochs: int, place: Runtime) -> dict[str, Any]:
    device, source = place.device, method.source
    stream = replace(config.stream, batch_size=config.evaluate.batch, shuffle=False)

    def columns(batch: Batch) -> Any:
        with place.autocast(), torch.no_grad():
            return method.columns_of(batch, source)

    def features() -> None:
        for batch in evaluation_batches(source, stream, device):
            columns(batch)

    features()
    with Timer(device) as alone:
        features()
    with Timer(device) as filling:
        method.table = tabulate(columns, evaluation_batches(source, stream, device), len(source), device)
        trainer = Trainer(method, Rows(method.table, epochs + 2, config.stream), config.train, place)
        train(trainer, 1)
    train(trainer, 1)
    with Timer(device) as later:
        train(trainer, epochs)
    n = len(source)
    rates = {"features": n / alone.seconds, "first_epoch": n / filling.seconds, "later": epochs * n / later.seconds}
    return {f"{name}_clips_per_second": value for name, value in rates.items()} | {
        "first_share": alone.seconds / filling.seconds,
        "bytes_per_clip": sum(t[0].nbytes for t in method.table.columns.values()),
    }


def trained(method: Any, config: TransferConfig, epochs: int, place: Runtime) -> dict[str, Any]:
    """Every step goes through the backbone."""
    trainer = Trainer(method, Epochs(method.source, epochs + 1, config.stream, place.device), config.train, place)
    train(trainer, 1)
    with Timer(place.device) as timer:
        train(trainer, epochs)
    empty = ("features_clips_per_second", "first_epoch_clips_per_second", "first_share", "bytes_per_clip")
    return dict.fromkeys(empty) | {"later_clips_per_second": epochs * len(method.source) / timer.seconds}


def train(trainer: Trainer, epochs: int) -> None:
    for _ in range(epochs):
        while trainer.advance() and trainer.stream.finished_task is None:
            pass
    trainer.settle()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("heads", nargs="*", default=list(HEADS))
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    place = runtime("cpu" if given.small else "auto")
    rows = []
    for name in given.heads:
        size, count = ("tiny", 16) if given.small else ("base", HEADS[name])
        row = head(name, size, count, 2 if given.small else 3, place)
        figures = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
        facts = environment(place)
        more = {"precision": facts["precision"], "torch": facts["torch"], **provenance(facts)}
        rows.append(figures | more | {"command": f"python benchmarks/heads.py {' '.join(sys.argv[1:])}"})
        print(rows[-1], flush=True)
        order = ["head", "backbone", "model", "clips", "batch", "features_batch", "features_clips_per_second"]
        order += ["first_epoch_clips_per_second", "first_share", "later_clips_per_second", "bytes_per_clip", "peak_gib"]
        write_text(given.out, to_csv([{key: line[key] for key in [*order, *more, "command"]} for line in rows]))
