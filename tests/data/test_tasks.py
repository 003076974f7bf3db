import re
from pathlib import Path

import pytest

import stella
from stella.clip import Clip, Labels, labels_of
from stella.config import resolve
from stella.data.folder import FolderConfig
from stella.data.scenes import TASKS, Scenes, ScenesConfig
from stella.data.shards import ShardsConfig
from stella.data.tasks import Files, Sizes
from stella.errors import ConfigError, StellaError
from stella.runs.config import RunConfig


def test_scenes_tasks_are_all_of_them_or_those_named_in_that_order() -> None:
    config = ScenesConfig(clips=30, eval_clips=20)
    assert [name for name, _ in config.train_tasks()] == [name for name, _ in config.eval_tasks()] == list(TASKS)
    assert {len(source) for _, source in config.train_tasks()} == {30}
    assert {len(source) for _, source in config.eval_tasks()} == {20}
    chosen = ScenesConfig(tasks=("task3", "base"), cache="off")
    [(first, scenes), (second, _)] = chosen.train_tasks()
    assert (first, second) == ("task3", "base") and isinstance(scenes, Scenes)
    assert scenes[0].id != chosen.eval_tasks()[0][1][0].id  # evaluated on other clips
    assert chosen.sizes() == Sizes(96, 256, 4)
    assert config.cached and not chosen.cached
    assert all(isinstance(source, Scenes) for _, source in config.train_tasks(cache=False))  # for workers
    assert config.train_tasks()[0][1] is config.train_tasks()[0][1]


class _Videos:
    """Stands for a folder or shards: labels are known without decoding."""

    def __init__(self, path: str, task_of: list[str | None]) -> None:
        self.root, self.task_of = Path(path), task_of

    def __len__(self) -> int:
        return len(self.task_of)

    def __getitem__(self, index: int) -> Clip:
        return (str(self.root), index)  # type: ignore[return-value]

    def labels(self, index: int) -> Labels:
        return Labels(task=self.task_of[index])


def use(monkeypatch: pytest.MonkeyPatch, **folders: list[str | None]) -> None:
    def open(self: FolderConfig, evaluation: bool = False) -> Files:
        path = (self.eval_path if evaluation else self.path) or ""
        return _Videos(path, folders[path])

    monkeypatch.setattr(FolderConfig, "open", open)


def clips(source: object) -> list[int]:
    return [source[i][1] for i in range(len(source))]  # type: ignore[index, arg-type]


def test_a_folders_tasks_are_those_of_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, videos=["b", "a"] * 30)
    config = FolderConfig(path="videos")
    train, evaluate = config.train_tasks(), config.eval_tasks()
    assert [name for name, _ in train] == [name for name, _ in evaluate] == ["a", "b"]
    for (name, shown), (_, held_out) in zip(train, evaluate, strict=True):
        assert (len(shown), len(held_out)) == (20, 10)
        assert sorted(clips(shown) + clips(held_out)) == [i for i in range(60) if "ba"[i % 2] == name]
        assert labels_of(shown, [0])[0].task == name
    ordered = FolderConfig(path="videos", tasks=("b", "a"))
    assert [name for name, _ in ordered.train_tasks()] == ["b", "a"]


def test_a_folder_without_tasks_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, videos=[None] * 20, more=[None] * 7)
    [(name, source)] = FolderConfig(path="videos").train_tasks()
    assert (name, len(source)) == ("all", 14)


def test_an_evaluation_set_that_is_given_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, videos=["a", "b"] * 20, more=["a"] * 7 + ["b"] * 9)
    given = FolderConfig(path="videos", eval_path="more", eval_clips=5)
    assert [len(source) for _, source in given.train_tasks()] == [20, 20]  # and nothing is held out
    assert [clips(source) for _, source in given.eval_tasks()] == [list(range(7)), list(range(7, 16))]
    held_out = FolderConfig(path="videos", eval_clips=5)
    assert [len(source) for _, source in held_out.train_tasks()] == [15, 15]
    assert [len(source) for _, source in held_out.eval_tasks()] == [5, 5]


def test_what_a_folder_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, mixed=["a", None, "b"] * 10, few=["a"] * 9, other=["b"] * 20, videos=["a", "b"] * 10)
    with pytest.raises(StellaError, match=r"10 of 30 clips in mixed have no task .*data\.tasks"):
        FolderConfig(path="mixed").train_tasks()
    assert len(FolderConfig(path="mixed", tasks=("a",)).train_tasks()) == 1
    with pytest.raises(StellaError, match=r"no clips of task c; its tasks are a, b"):
        FolderConfig(path="mixed", tasks=("c",)).train_tasks()
    with pytest.raises(StellaError, match=r"task a has 9 clips.*data\.eval_path"):
        FolderConfig(path="few").train_tasks()
    with pytest.raises(StellaError, match=r"eval_path=other has no clips of task a"):
        FolderConfig(path="videos", eval_path="other").eval_tasks()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (["data.source=folder"], "data.source=folder needs clips of your own: set data.path=FOLDER"),
        (["data.source=packed"], "data.source=packed needs clips of your own"),
        (["data.source=videos"], "unknown data.source='videos': did you mean"),
        (["data.source=shard"], r"did you mean shards\? \(known: scenes, folder, shards, packed\)"),
        (["data.path=x"], "is not a key of data.source=scenes; .* set data.source to folder or shards or packed"),
        (["data.source=folder", "data.path=x", "data.clips=5"], "data.clips is not a key of data.source=folder"),
        (["data.source=packed", "data.path=x", "data.pixels=96"], "data.pixels is not a key of data.source=packed"),
        (["data.source=folder", "data.path=x", "data.pixel=96"], r"mean data.pixels\? \(known: source"),
        (["data.clip=5"], r"did you mean data.clips\? \(known: source"),
        (["data.size=large"], r"data\.size='large'; choose one of scenes"),
        (["data.clips=0"], r"data\.clips=0 must be above 0"),
        (["data.source=shards", "data.path=x", "data.span=0"], r"data\.span=0\.0 must be above 0"),
        (["data.tasks=['a','a']"], "one task twice"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(values: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(RunConfig, None, values)


def test_each_source_has_a_config_of_its_own() -> None:
    folder = resolve(RunConfig, None, ["data.source=folder", "data.path=x", "data.span=none"]).data
    assert folder == FolderConfig(path="x", span=None) and folder.sizes() == Sizes(224, 1024, 4)
    shards = resolve(RunConfig, None, ["data.source=shards", "data.path=x", "data.duration=2.56"]).data
    assert shards == ShardsConfig(path="x", duration=2.56) and shards.least_workers == 1
    assert RunConfig().data == ScenesConfig() and ScenesConfig().least_workers == 0
    assert (folder.decoded_pixels, ScenesConfig().decoded_pixels) == (256, 96)  # scenes need no margin for crops


def test_only_scenes_know_that_they_are_scenes() -> None:
    """What is special about a source is in its own folder, behind `SourceConfig`."""
    package = Path(stella.__file__).parent
    files = [path for path in package.rglob("*.py") if package / "data" / "scenes" not in path.parents]
    assert len(files) > 50
    name = r"""["']scenes["']"""
    patterns = (rf"[!=]=\s*{name}", rf"{name}\s*[!=]=", rf"\bin\s*[(\[{{]\s*{name}", rf"get\([^)]*{name}")
    compared = re.compile("|".join((*patterns, r"isinstance\(.*Scenes")))
    assert not [path for path in files if compared.search(path.read_text(encoding="utf-8"))]
    assert compared.search('if config.data.source == "scenes":')
