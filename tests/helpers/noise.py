"""Clips of coloured noise, in a small module of its own: worker processes import it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stella.clip import Clip, Labels
from stella.rng import generator

PIXELS, SAMPLES = 36, 10_400


class Noise:
    """Clip i is a function of (seed, i), as of a source of scenes."""

    def __init__(self, seed: int, length: int, task: str | None = None) -> None:
        self.seed, self.length, self.task = seed, length, task

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Clip:
        video, audio = self.tensors([index])
        return Clip(f"{self.seed}/{index}", video[0], audio[0], self.labels(index))

    def labels(self, index: int) -> Labels:
        return Labels(task=self.task)

    def tensors(self, indices: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        made = [self._make(index) for index in indices]
        return torch.stack([v for v, _ in made]).to(device), torch.stack([a for _, a in made]).to(device)

    def _make(self, index: int) -> tuple[Tensor, Tensor]:
        gen = generator("noise", self.seed, index)
        video = torch.randint(0, 256, (4, 3, PIXELS, PIXELS), dtype=torch.uint8, generator=gen)
        return video, torch.rand(SAMPLES, generator=gen) - 0.5
