import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import stella
from stella.clip import Labels, Origin, labels_of, names_of
from stella.config import resolve
from stella.data.folder import FolderConfig
from stella.data.scenes import TASKS, Scenes, ScenesConfig
from stella.data.shards import ShardsConfig
from stella.data.tasks import natural, of_every_class, place, recording_of
from stella.errors import ConfigError, StellaError
from stella.media.inputs import Inputs
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
    assert chosen.inputs() == Inputs(2.56, 96, 96, 4, None, 256)  # rendered without a margin for crops
    assert config.cached and not chosen.cached
    assert all(isinstance(source, Scenes) for _, source in config.train_tasks(cache=False))  # for workers
    assert config.train_tasks()[0][1] is config.train_tasks()[0][1]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., FolderConfig]:
    """A config of folders whose files, which are never read, have these tasks."""

    def make(name: str, tasks: list[str]) -> dict[str, str]:
        root, table = tmp_path / name, tmp_path / f"{name}.csv"
        root.mkdir(exist_ok=True)
        files = [f"{number:02d}.mp4" for number in range(len(tasks))]
        for file in files:
            (root / file).touch()
        table.write_text("".join(f"{file},,{task}\n" for file, task in zip(files, tasks, strict=True)))
        return {"path": str(root), "labels": str(table)}

    def config(of_videos: list[str], evaluation: list[str] | None = None, **more: Any) -> FolderConfig:
        if evaluation:
            more |= {f"eval_{key}": value for key, value in make("evaluation", evaluation).items()}
        return FolderConfig(**make("videos", of_videos), **more)

    return config


def clips(source: Any) -> list[int]:
    return [inside for _, inside in source.clips]


def test_a_folders_tasks_are_those_of_its_labels(folder: Callable[..., FolderConfig]) -> None:
    config = folder(["b", "a"] * 30, eval_share=0.3)
    train, evaluate = config.train_tasks(), config.eval_tasks()
    assert [name for name, _ in train] == [name for name, _ in evaluate] == ["a", "b"]
    for (name, shown), (_, held_out) in zip(train, evaluate, strict=True):
        assert len(held_out) >= 2
        assert sorted(clips(shown) + clips(held_out)) == [i for i in range(60) if "ba"[i % 2] == name]
        assert labels_of(shown, [0])[0].task == name
    assert [name for name, _ in replace(config, tasks=("b", "a")).train_tasks()] == ["b", "a"]
    unlabelled = folder([""] * 60, eval_share=0.3)  # without tasks it is one
    [(name, source)] = unlabelled.train_tasks()
    assert name == "all" and len(source) + len(unlabelled.eval_tasks()[0][1]) == 60


def test_folders_are_tasks_in_natural_order(tmp_path: Path) -> None:
    for name in ("task10", "task2", "task2/part b", "Task1"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(12):
            (tmp_path / name / f"{number}.mp4").touch()
    config = FolderConfig(path=str(tmp_path), tasks_from="folders", eval_share=0.4)
    assert [name for name, _ in config.train_tasks()] == ["Task1", "task2", "task2/part b", "task10"]
    assert {labels_of(source, [0])[0].task for _, source in config.eval_tasks()} == set(dict(config.train_tasks()))
    assert labels_of(dict(config.train_tasks())["task2/part b"], [0])[0].name == "part b"
    (tmp_path / "loose.mp4").touch()
    with pytest.raises(StellaError, match=r"loose.mp4 is in no sub-folder, so it has no task; move it into one"):
        config.train_tasks()


@given(st.lists(st.text(max_size=6)))
def test_natural_order_is_an_order_of_any_names(names: list[str]) -> None:
    assert sorted(sorted(names, key=natural, reverse=True), key=natural) == sorted(names, key=natural)


def test_an_evaluation_set_that_is_given_is_never_cut(folder: Callable[..., FolderConfig]) -> None:
    given = folder(["a", "b"] * 20, ["a"] * 7 + ["b"] * 9, eval_clips=5)
    assert [len(source) for _, source in given.train_tasks()] == [20, 20]  # and nothing is held out
    assert [clips(source) for _, source in given.eval_tasks()] == [list(range(7)), list(range(7, 16))]
    held_out = replace(given, eval_path=None, eval_share=0.5)
    assert [len(source) for _, source in held_out.eval_tasks()] == [5, 5]
    assert sum(len(source) for _, source in held_out.train_tasks()) < 30  # what is not evaluated is not trained on


@given(st.lists(st.text("abc/", min_size=1), min_size=40, max_size=60, unique=True), st.data())
def test_a_clip_stays_on_its_side_whatever_else_arrives(files: list[str], data: st.DataObject) -> None:
    ids = [f"{file}.mp4@{second}.000" for file in files for second in (0, 10)]  # two clips of each recording
    some = data.draw(st.lists(st.sampled_from(ids), min_size=30, unique=True))
    try:
        before, after = sides(some), sides(ids)
    except StellaError:  # too few on one side
        return
    assert {id: before[id] for id in some} == {id: after[id] for id in some}
    assert all(after[f"{file}.mp4@0.000"] == after[f"{file}.mp4@10.000"] for file in files)


def sides(ids: list[str]) -> dict[str, str]:
    """Whether each clip is trained on or evaluated."""

    class Listed:
        root = Path()

        def __len__(self) -> int:
            return len(ids)

        def labels(self, index: int) -> Labels:
            return Labels()

        def origin(self, index: int) -> Origin:
            return Origin(ids[index], recording_of(ids[index]))

    class Config(FolderConfig):
        def open(self, evaluation: bool = False) -> Any:
            return Listed()

    config = Config(path="x", eval_share=0.3, eval_clips=1000)
    made = {"train": config.train_tasks()[0][1], "evaluate": config.eval_tasks()[0][1]}
    return {ids[index]: side for side, view in made.items() for index in clips(view)}


@pytest.mark.parametrize(
    ("videos", "more", "says"),
    [
        (["a", "", "b"] * 10, {}, r"10 of 30 clips in .*videos have no task .*data\.tasks"),
        (["a", "", "b"] * 10, {"tasks": ("c",)}, "no clips of task c; its tasks are a, b"),
        (["a"] * 9, {"eval_share": 0.999999}, "holds out 9 of 9 clips of task a, and leaves none to train on; set"),
        (
            ["a"] * 2,
            {},
            "has 2 clips of task a from 2 videos, too few to train on .*stella look .* or give others",
        ),
        (["a", "b"] * 10, {"evaluation": ["b"] * 20}, "eval_path=.*evaluation has no clips of task a"),
    ],
)
def test_what_a_folder_lacks_is_told(folder: Any, videos: list[str], more: dict[str, Any], says: str) -> None:
    with pytest.raises(StellaError, match=says):
        folder(videos, **more).eval_tasks()
    if "" in videos:
        assert len(folder(videos, tasks=("a",), eval_share=0.3).train_tasks()) == 1


def test_a_share_that_holds_out_too_few_is_refused_with_one_that_does_not(folder: Any) -> None:
    config = folder(["a"] * 20, eval_share=0.001)
    with pytest.raises(StellaError, match=r"0 of 20 clips of task a, too few to retrieve among; set ") as refused:
        config.train_tasks()
    better = float(str(refused.value).split("set data.eval_share=")[1].split(",")[0])
    assert 5 <= len(replace(config, eval_share=better).eval_tasks()[0][1]) <= 10


def test_clips_of_one_recording_cannot_be_divided() -> None:
    with pytest.raises(StellaError, match="x has 9 clips from 1 video, too few to train on some"):
        sides([f"a.mp4@{second}.000" for second in range(9)])


def of_classes(root: Path, files: Iterable[str], **more: Any) -> FolderConfig:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return FolderConfig(path=str(root), **more)


def test_classification_learns_every_class_and_tests_those_of_several_videos(tmp_path: Path) -> None:
    """Twenty small classes, two of a single video: whatever the seed, none is unknown and no other is left out."""
    files = {f"c{n:02}/{i}.mp4" for n in range(18) for i in range(2 + n % 4)} | {"c18/0.mp4", "c19/0.mp4"}
    config = of_classes(tmp_path / "small", files)
    for seed in range(20):
        parts = replace(config, seed=seed).downstream("classify")
        sides: list[Any] = [parts.train, parts.validation, parts.test]
        named = [[str(name) for name in names_of(side, range(len(side)))] for side in sides]
        assert set(named[0]) == set(parts.classes) == {f"c{n:02}" for n in range(20)}
        assert set(named[2]) == {f"c{n:02}" for n in range(18)}
        found = [side.stored(i)[0].origin(side.stored(i)[1]).id for side in sides for i in range(len(side))]
        assert sorted(found) == sorted(files)


def test_classification_tests_at_most_so_many_clips(tmp_path: Path) -> None:
    files = [f"{name}/{i}.mp4" for name in "ab" for i in range(60)]
    parts = of_classes(tmp_path / "large", files, eval_share=0.3, eval_clips=4).downstream("classify")
    held_out = sum(place(0, file) < 0.3 for file in files)
    assert len(parts.test) == 4 and len(parts.train) + len(parts.validation) == 120 - held_out  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), min_size=1), st.integers(0, 10))
def test_classes_of_one_label_a_recording_are_on_both_sides(clips: list[tuple[int, str]], share: int) -> None:
    """A recording has one class here; where it has several, its clips stay together and this cannot always hold."""
    pairs = [(f"{name}{number}", name) for number, name in clips]
    ranked = sorted({recording for recording, _ in pairs}, key=lambda name: (name[1:], name))
    held = of_every_class(set(ranked[:share]), ranked, pairs)
    for name in {name for _, name in pairs}:
        own = {recording for recording, each in pairs if each == name}
        assert not own <= held and (len(own) == 1 or own & held)


def test_classes_are_missed_before_clips_are_divided(folder: Any) -> None:
    with pytest.raises(StellaError, match="without a class: 5 of 5 clips; put the videos of each class into a folder"):
        folder(["a"] * 5).downstream("classify")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (["data.source=folder"], "data.source=folder needs clips of your own: set data.path=FOLDER"),
        (["data.source=packed"], "data.source=packed needs clips of your own"),
        (["data.source=videos"], r"unknown data.source='videos' \(known: scenes, folder"),
        (["data.source=shard"], r"did you mean shards\? \(known: scenes, folder, shards, packed, ave"),
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
    assert folder == FolderConfig(path="x", span=None) and folder.inputs() == Inputs(span=None)
    shards = resolve(RunConfig, None, ["data.source=shards", "data.path=x", "data.duration=2.56"]).data
    assert shards == ShardsConfig(path="x", duration=2.56) and shards.least_workers == 1
    assert RunConfig().data == ScenesConfig() and ScenesConfig().least_workers == 0


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
