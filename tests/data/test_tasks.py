from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.small import Noise
from torch import Tensor

from stella.clip import BatchSource, Labels, labels_of
from stella.data import tasks as module
from stella.data.scenes import TASKS, Scenes
from stella.data.stream import Stream, StreamConfig
from stella.data.tasks import DataConfig, eval_tasks, sizes, train_tasks
from stella.data.views import Cached, join
from stella.errors import ConfigError, StellaError


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


def test_what_a_cache_hands_out_can_be_changed_without_harm() -> None:
    cached = Cached(Noise(3, 4))
    cached.tensors([0, 1])[0].zero_()
    assert torch.equal(cached.tensors([0])[0], Noise(3, 4).tensors([0])[0])


def test_scenes_are_the_same_from_a_cache_through_a_stream() -> None:
    config = StreamConfig(batch_size=3, epochs=2, size=96, spec_frames=256)
    streams = [Stream([("t", source)], config) for source in (Scenes("task1", "train", 5), _cached(5))]
    for ours, theirs in zip(*streams, strict=True):
        assert torch.equal(ours.video, theirs.video) and torch.equal(ours.audio, theirs.audio)


def _cached(length: int) -> Cached:
    return Cached(Scenes("task1", "train", length))


@pytest.mark.parametrize("batched", [True, False])
def test_joined_sources_are_one_in_order(batched: bool) -> None:
    parts = [Noise(1, 3), Noise(2, 1), Noise(3, 5)]
    sources = parts if batched else [parts[0], _Slow(parts[1]), parts[2]]
    joined = join(sources)
    every = [clip for part in parts for clip in (part[i] for i in range(len(part)))]
    assert len(joined) == 9 and isinstance(joined, BatchSource) == batched
    assert all(torch.equal(joined[i].video, clip.video) and joined[i].id == clip.id for i, clip in enumerate(every))
    if isinstance(joined, BatchSource):
        order = [8, 0, 3, 4, 2, 3]
        video, audio = joined.tensors(order)
        assert torch.equal(video, torch.stack([every[i].video for i in order]))
        assert torch.equal(audio, torch.stack([every[i].audio for i in order]))
    with pytest.raises(IndexError):
        joined[9]
    with pytest.raises(IndexError):
        joined[-1]


class _Slow:
    def __init__(self, source: Noise) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> object:
        return self.source[index]


def test_scenes_tasks_are_all_of_them_or_those_named_in_that_order() -> None:
    config = DataConfig(clips=30, eval_clips=20)
    assert [name for name, _ in train_tasks(config)] == [name for name, _ in eval_tasks(config)] == list(TASKS)
    assert {len(source) for _, source in train_tasks(config)} == {30}
    assert {len(source) for _, source in eval_tasks(config)} == {20}
    chosen = DataConfig(tasks=("task3", "base"), cache="off")
    [(first, scenes), (second, _)] = train_tasks(chosen)
    assert (first, second) == ("task3", "base") and isinstance(scenes, Scenes)
    assert scenes[0].id != eval_tasks(chosen)[0][1][0].id  # evaluated on other clips
    assert (sizes(chosen).pixels, sizes(chosen).spec_frames, sizes(chosen).frames) == (96, 256, 4)


class _Videos:
    """Stands for a folder or shards: labels are known without decoding."""

    def __init__(self, path: str, task_of: list[str | None]) -> None:
        self.root, self.task_of = Path(path), task_of

    def __len__(self) -> int:
        return len(self.task_of)

    def __getitem__(self, index: int) -> object:
        return (str(self.root), index)

    def labels(self, index: int) -> Labels:
        return Labels(task=self.task_of[index])


def use(monkeypatch: pytest.MonkeyPatch, **folders: list[str | None]) -> None:
    monkeypatch.setattr(module, "Folder", lambda path, plan, labels: _Videos(path, folders[path]))


def clips(source: object) -> list[int]:
    return [source[i][1] for i in range(len(source))]  # type: ignore[index, arg-type]


def test_a_folders_tasks_are_those_of_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, videos=["b", "a"] * 30)
    config = DataConfig(source="folder", path="videos")
    train, evaluate = train_tasks(config), eval_tasks(config)
    assert [name for name, _ in train] == [name for name, _ in evaluate] == ["a", "b"]
    for (name, shown), (_, held_out) in zip(train, evaluate, strict=True):
        assert (len(shown), len(held_out)) == (20, 10)
        assert sorted(clips(shown) + clips(held_out)) == [i for i in range(60) if "ba"[i % 2] == name]
        assert labels_of(shown, [0])[0].task == name
    ordered = DataConfig(source="folder", path="videos", tasks=("b", "a"))
    assert [name for name, _ in train_tasks(ordered)] == ["b", "a"]


def test_a_folder_without_tasks_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, videos=[None] * 20, more=[None] * 7)
    [(name, source)] = train_tasks(DataConfig(source="folder", path="videos"))
    assert (name, len(source)) == ("all", 14)
    config = DataConfig(source="folder", path="videos", eval_path="more", eval_clips=5)
    assert [len(source) for _, source in train_tasks(config)] == [20]
    assert [len(source) for _, source in eval_tasks(config)] == [5]


def test_what_a_folder_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, mixed=["a", None, "b"] * 10, few=["a"] * 9, other=["b"] * 20, videos=["a", "b"] * 10)
    with pytest.raises(StellaError, match=r"10 of 30 clips in mixed have no task .*data\.tasks"):
        train_tasks(DataConfig(source="folder", path="mixed"))
    assert len(train_tasks(DataConfig(source="folder", path="mixed", tasks=("a",)))) == 1
    with pytest.raises(StellaError, match=r"no clips of task c; its tasks are a, b"):
        train_tasks(DataConfig(source="folder", path="mixed", tasks=("c",)))
    with pytest.raises(StellaError, match=r"task a has 9 clips.*data\.eval_path"):
        train_tasks(DataConfig(source="folder", path="few"))
    with pytest.raises(StellaError, match=r"eval_path=other has no clips of task a"):
        eval_tasks(DataConfig(source="folder", path="videos", eval_path="other"))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"source": "folder"}, "data.source=folder needs a folder"),
        ({"path": "x"}, "data.path=x is of no use to data.source=scenes"),
        ({"size": "large"}, r"data\.size='large'; choose one of scenes"),
        ({"clips": 0}, r"data\.clips=0"),
        ({"tasks": ("a", "a")}, "one task twice"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DataConfig(**values)  # type: ignore[arg-type]
