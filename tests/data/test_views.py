from collections.abc import Sequence

import pytest
import torch
from helpers.small import Noise
from helpers.streams import same
from torch import Tensor

from stella.clip import BatchSource, Clip, Labels, Windowed, labels_of, location_of
from stella.data.scenes import Scenes
from stella.data.stream import Stream, StreamConfig
from stella.data.views import Cached, join, part


class Counting(Noise):
    """Counts what is made."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__(seed, length, "t")
        self.made: list[int] = []
        self.labelled: list[int] = []

    def tensors(self, indices: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        self.made += indices
        return super().tensors(indices, device)

    def labels(self, index: int) -> Labels:
        self.labelled.append(index)
        return super().labels(index)


def test_a_cache_makes_each_clip_once_and_changes_nothing() -> None:
    source = Counting(3, 9)
    cached, plain = Cached(source), Noise(3, 9)
    for indices in ([4, 1], [1, 4, 4, 0], [8, 0], list(range(9)), [5]):
        for ours, theirs in zip(cached.tensors(indices), plain.tensors(indices), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert sorted(source.made) == list(range(9))
    assert len(cached) == 9 and isinstance(cached, BatchSource)
    assert torch.equal(cached[5].video, plain[5].video)
    assert [label.task for label in labels_of(cached, [2, 2, 3])] == ["t", "t", "t"]
    assert source.labelled[-2:] == [2, 3]
    cached.tensors([0, 1])[0].zero_()  # what it returned can be changed
    assert torch.equal(cached.tensors([0])[0], plain.tensors([0])[0])


def test_scenes_are_the_same_from_a_cache_through_a_stream() -> None:
    config = StreamConfig(batch_size=3, epochs=2, size=96, spec_frames=256)
    scenes = Scenes("task1", "train", 5)
    assert same(Stream([("t", scenes)], config), Stream([("t", Cached(scenes))], config))


@pytest.mark.parametrize("batched", [True, False])
def test_joined_sources_are_one_in_order(batched: bool) -> None:
    parts = [Noise(1, 3), Noise(2, 1), Noise(3, 5)]
    sources = parts if batched else [parts[0], [parts[1][0]], parts[2]]  # a list is a plain source
    joined = join(sources)
    every = [clip for part in parts for clip in (part[i] for i in range(len(part)))]
    assert len(joined) == 9 and isinstance(joined, BatchSource) == batched
    assert all(torch.equal(joined[i].video, clip.video) and joined[i].id == clip.id for i, clip in enumerate(every))
    if isinstance(joined, BatchSource):
        order = [8, 0, 3, 4, 2, 3]
        video, audio = joined.tensors(order)
        assert torch.equal(video, torch.stack([every[i].video for i in order]))
        assert torch.equal(audio, torch.stack([every[i].audio for i in order]))
    for outside in (9, -1):
        with pytest.raises(IndexError):
            joined[outside]


class _Named:
    """Clips that tell which window was asked for, and where they are."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index, 0.5)

    def clip(self, index: int, window: float) -> Clip:
        return Clip(f"{self.name}{index}@{window}", torch.zeros(0), torch.zeros(0))

    def location(self, index: int) -> str:
        return f"{self.name}/{index}"


def test_views_of_views_are_flat_and_pass_windows_on() -> None:
    a, b = _Named("a", 5), _Named("b", 3)
    both = join([part(a, [3, 1]), b, part(a, [0])])
    assert [both[i].id for i in range(6)] == ["a3@0.5", "a1@0.5", "b0@0.5", "b1@0.5", "b2@0.5", "a0@0.5"]
    assert both.sources == [a, b] and isinstance(both, Windowed)
    some = part(both, [5, 2, 0])
    assert [some.clip(i, 0.25).id for i in range(3)] == ["a0@0.25", "b0@0.25", "a3@0.25"] and some.sources == [a, b]
    assert location_of(some, 1) == "b/0"
    assert join([Noise(1, 2)]).clip(1, 0.25).id == "1/1"  # of a source without windows
