"""Rounds that are over, as tasks of a learner's stream."""

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from stella.clip import Clip


class Past:
    """The clips of an earlier round: their number, for the ids of later ones. They are never read."""

    def __init__(self, clips: int) -> None:
        self.clips = clips

    def __len__(self) -> int:
        return self.clips

    def __getitem__(self, index: int) -> Clip:
        self._refuse()

    def tensors(self, indices: Sequence[int], device: Any = "cpu", windows: Any = None) -> tuple[Tensor, Tensor]:
        self._refuse()

    def lengths(self, indices: Sequence[int]) -> Tensor:
        self._refuse()

    def expect(self, indices: Sequence[int], device: Any = "cpu", windows: Any = None) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("the clips of an earlier round are not read")
