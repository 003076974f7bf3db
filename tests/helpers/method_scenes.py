"""Short training on scenes, through stream and trainer, for what all methods promise."""

import dataclasses
from functools import cache
from typing import Any

import torch

from helpers.method_toys import TOY, method
from stella.clip import Clip, Labels
from stella.data.scenes import Scenes
from stella.data.stream import Stream, StreamConfig
from stella.methods import Method
from stella.model.cav import Split, split_by_noise
from stella.train.config import TrainConfig
from stella.train.device import runtime
from stella.train.trainer import Trainer


class Told:
    """Clips, which may claim to be of a task and class that are not theirs."""

    def __init__(self, clips: list[Clip], claim: str | None = None) -> None:
        self.clips, self.claim = clips, claim

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Clip:
        clip = self.clips[index]
        return dataclasses.replace(clip, labels=Labels(self.claim, self.claim)) if self.claim else clip


@cache
def scenes(task: str, clips: int, split: str = "train") -> list[Clip]:
    source = Scenes(task, split, clips)
    return [source[index] for index in range(clips)]


SHAPES: dict[str, Any] = {"size": TOY.image_size, "spec_frames": TOY.spec_frames, "mels": TOY.mel_bins}


def scenes_trainer(name: str, tasks: list[tuple[str, Told]] | None = None, seed: int = 0) -> Trainer:
    """Two tasks of two epochs, each of three batches and a short one: 16 steps."""
    tasks = tasks or [("task1", Told(scenes("task1", 22))), ("task2", Told(scenes("task2", 23)))]
    stream = Stream(tasks, StreamConfig(batch_size=6, epochs=2, **SHAPES))
    return Trainer(method(name, clips=10, seed=seed), stream, TrainConfig(lr=3e-3), runtime("cpu"))


def advance(trainer: Trainer, steps: int = 100) -> list[dict[str, float]]:
    """The parts of the loss of so many steps, or of those that are left."""
    parts = []
    while len(parts) < steps and trainer.advance():
        parts.append(trainer.meter.read())
    return parts


@torch.no_grad()
def held_out(method: Method) -> float:
    """How well the model to be evaluated reconstructs clips that it never saw, always with the same masks."""
    clips = Told(scenes("task1", 8, "eval"))
    [seen] = Stream([("", clips)], StreamConfig(batch_size=8, augment=False, shuffle=False, **SHAPES))
    model, g = method.eval_model, torch.Generator().manual_seed(0)

    def split(length: int) -> Split:
        return split_by_noise(torch.rand(8, length, generator=g), length // 5)

    splits = split(TOY.patches_a), split(TOY.patches_v)
    parts = method.parts(model.pretrain(model.patches_a(seen.audio), model.patches_v(seen.video), *splits))
    return float(parts["recon_a"] + parts["recon_v"])
