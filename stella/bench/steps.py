"""The trainer of a run on synthetic clips that stay on the device, or on packed clips from a disk."""

import gc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch

from stella.clip import Batch
from stella.data.packed import Packed
from stella.data.stream import Stream, StreamConfig
from stella.errors import ConfigError, StellaError, number_of
from stella.fast.graphs import SHARED_WARM_UPS, WARM_UPS
from stella.model.cav import CAVConfig
from stella.peers import ALONE, Peers, cut
from stella.rng import generator
from stella.runs.build import build_method
from stella.runs.config import RunConfig, machine, model_config
from stella.train.device import Clock
from stella.train.trainer import Trainer

GIVEN_UP = 6  # steps in a row without a finite loss


class Synthetic:
    """A stream for the trainer: batches of noise on the device, a few in rotation, without end.

    Processes that share a batch have their rows of it, each its own noise.
    """

    finished_task: int | None = None

    def __init__(
        self, model: CAVConfig, batch: int, device: torch.device, peers: Peers = ALONE, distinct: int = 4
    ) -> None:
        self.config, self.sources, self.total = StreamConfig(batch_size=batch), [range(10**9)], batch
        noise, rows = generator("bench", peers.rank, device=device), cut(batch, peers.count)[peers.rank]
        shape = (rows, model.frames, 3, model.image_size, model.image_size)
        self._batches = [
            Batch(
                torch.randint(256, shape, generator=noise, device=device, dtype=torch.uint8),
                torch.randn(rows, model.spec_frames, model.mel_bins, generator=noise, device=device),
                torch.arange(i * batch, (i + 1) * batch, device=device)[peers.rows(batch)],
            )
            for i in range(distinct)
        ]
        self._given = 0

    def __next__(self) -> Batch:
        self._given += 1
        return self._batches[self._given % len(self._batches)]


def make_trainer(config: RunConfig, packed: Path | None = None, peers: Peers = ALONE) -> Trainer:
    """The trainer of a run, on synthetic batches or on a folder of packed clips; of several processes, one's part."""
    place, c, size = machine(config.train), model_config(config), config.stream.batch_size
    if packed is None:
        stream = cast(Stream, Synthetic(c, size, place.device, peers))
    else:
        shape = replace(config.stream, epochs=10**6, drop_last=True, seed=config.seed)
        shape = replace(shape, size=c.image_size, spec_frames=c.spec_frames, mels=c.mel_bins)
        clips = Packed(packed)
        sizes = {"model.image_size": clips.header.pixels, "model.spec_frames": clips.header.spec_frames}
        if (c.image_size, c.spec_frames) != tuple(sizes.values()):
            fitting = " ".join(f"{name}={size}" for name, size in sizes.items())
            raise ConfigError(f"{packed} was packed for other sizes than the model's; set {fitting}")
        if len(clips) < size:
            held = number_of(len(clips), "clip")
            raise ConfigError(f"{packed} has {held}, fewer than a batch of {size}; choose smaller batches")
        stream = Stream([("packed", clips)], shape, place.device, None, peers)
    return Trainer(build_method(config, place.device), stream, config.train, place, peers)


def let_go() -> None:
    """Free the memory of a deleted trainer, for the next one and for other processes."""
    gc.collect()
    torch.cuda.empty_cache()


def step_times(trainer: Trainer, steps: int) -> list[float]:
    """Milliseconds of each of the next steps; the host does not wait between them."""
    clock = Clock(trainer.runtime.device)
    marks = [clock.mark()]
    for _ in range(steps):
        trainer.advance()
        marks.append(clock.mark())
    return [clock.ms(*step) for step in pairwise(marks)]


def advance(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.advance()
    trainer.settle()


def warm_up(trainer: Trainer) -> None:
    """Advance until shapes are constant, and all is compiled and recorded."""
    settle_draws(trainer)
    advance(trainer, 3 + (SHARED_WARM_UPS if trainer.world else WARM_UPS))


def settle_draws(trainer: Trainer) -> None:
    """Advance until the memory holds as many clips as the method draws: from then on shapes are constant."""
    memory = trainer.method.memory
    while memory is not None and memory.short:
        advance(trainer, 1)
        if trainer.counters.skipped_in_a_row >= GIVEN_UP:
            raise StellaError("no step has a finite loss, so nothing can be measured; set other values")
