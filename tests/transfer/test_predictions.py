"""The tables with the answer for each test clip: their rows, their names, and that the figures follow from them."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers import downstream
from helpers.downstream import small_weights
from typer.testing import CliRunner

from stella.cli import app
from stella.clip import Clip, Labels, Origin, labels_of, names_of
from stella.data.downstream import Parts
from stella.data.scenes import Scenes, ScenesConfig
from stella.data.scenes.source import SceneSegments
from stella.data.views import join, part
from stella.errors import ClipError
from stella.runs.training import RunResult
from stella.transfer.predictions import ANSWERS, CLASSES, id_of, write_answers

SMALL = ("data.tasks=['task1']", "data.clips=6", "data.eval_clips=5", "stream.batch_size=4", "train.device=cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_weights(tmp_path_factory.mktemp("weights") / "small.safetensors")


def go(task: str, file: Path, run: Path, *more: str) -> RunResult:
    return downstream.go(task, file, run, *SMALL, "stream.epochs=1", "evaluate.batch=3", "warmup_epochs=0", *more)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class Holed:
    """Clips of which number 1 cannot be read, nor one window of number 2."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index, 0.5)

    def clip(self, index: int, window: float) -> Clip:
        if index == 1 or (index, window) == (2, 0.0):
            raise ClipError("file", "damaged video", "fetch it again")
        clip: Clip = self.source[index]
        return clip

    def labels(self, index: int) -> Labels:
        return labels_of(self.source, [index])[0]

    def class_of(self, index: int) -> str | None:
        return names_of(self.source, [index])[0]

    def location(self, index: int) -> str:
        return f"/videos/{index}.mp4"


@pytest.fixture
def holed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ScenesConfig.downstream

    def downstream(self: ScenesConfig, task: str) -> Parts:
        parts = plain(self, task)
        return replace(parts, test=Holed(parts.test))

    monkeypatch.setattr(ScenesConfig, "downstream", downstream)


@pytest.mark.usefixtures("holed")
@pytest.mark.parametrize("frozen", ["true", "false"])
def test_classify_says_what_each_clip_was_taken_for(frozen: str, file: Path, tmp_path: Path) -> None:
    end = go("classify", file, tmp_path, f"head.frozen={frozen}", "stream.most_bad=1").end
    lines = table(tmp_path / ANSWERS)
    scenes = Scenes("task1", "eval", 5)
    assert [line["clip"] for line in lines] == [f"/videos/{i}.mp4" for i in (0, 2, 3, 4)]  # of four or three windows
    assert [line["true"] for line in lines] == names_of(scenes, [0, 2, 3, 4])
    assert all((line["right"] == "yes") == (line["true"] == line["predicted"]) for line in lines)
    assert all(1 / 4 <= float(line["score"]) <= 1 for line in lines)  # a mean over windows, the largest of four classes
    assert 100 * fmean(line["right"] == "yes" for line in lines) == pytest.approx(end["test"]["accuracy"])
    by_class = table(tmp_path / CLASSES)
    assert [line["class"] for line in by_class] == list(ScenesConfig(tasks=("task1",)).downstream("classify").classes)
    for line in by_class:
        own = [each for each in lines if each["true"] == line["class"]]
        right = sum(each["right"] == "yes" for each in own)
        assert (line["clips"], line["right"]) == (str(len(own)), str(right))
        assert line["accuracy"] == (f"{100 * right / len(own):.2f}" if own else "")
        wrong = [each["predicted"] for each in own if each["right"] == "no"]
        most = max(map(wrong.count, wrong), default=0)
        assert wrong.count(line["most_frequent_wrong_answer"]) == most


def test_a_score_is_the_mean_over_windows(tmp_path: Path) -> None:
    parts = Parts(Scenes("task1", "train", 2), Scenes("task1", "train", 2), Scenes("task1", "eval", 2), ("a", "b"))
    found = {
        "clip": torch.tensor([0, 1, 0]),
        "scores": torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]),
        "target": torch.tensor([0, 0, 0]),
    }
    write_answers(tmp_path, "classify", parts, found)
    lines = table(tmp_path / ANSWERS)
    assert [(line["predicted"], line["score"], line["right"]) for line in lines] == [
        ("a", "0.6000", "yes"),
        ("b", "0.8000", "no"),
    ]
    assert (tmp_path / CLASSES).read_text().splitlines()[1:] == ["a,2,1,50.00,b", "b,0,0,,"]


def test_clips_with_several_classes_have_all_of_them(tmp_path: Path) -> None:
    source = Scenes("task1", "eval", 3)
    parts = Parts(source, source, source, ("dog, barking", "b", "c"), several=True)
    found = {
        "clip": torch.tensor([0, 2, 0]),
        "scores": torch.tensor([[0.5, 0.1, 0.8], [0.4, 0.2, 0.3], [0.6, 0.1, 0.9]]),
        "target": torch.tensor([[True, True, False], [False, False, True], [True, True, False]]),
    }
    write_answers(tmp_path, "classify", parts, found)
    assert [list(line.values())[1:] for line in table(tmp_path / ANSWERS)] == [
        ["dog, barking; b", "c; dog, barking", "0.8500; 0.5500"],
        ["c", "", ""],
    ]
    assert [list(line.values()) for line in table(tmp_path / CLASSES)] == [
        ["dog, barking", "1", "1", "100.00", "c"],
        ["b", "1", "0", "0.00", "c"],
        ["c", "1", "0", "0.00", ""],
    ]


@pytest.mark.usefixtures("holed")
def test_events_say_which_segment_was_taken_for_what(file: Path, tmp_path: Path) -> None:
    end = go("events", file, tmp_path, "stream.most_bad=1").end
    lines = table(tmp_path / ANSWERS)
    rows = [i for i in range(50) if i != 1]
    assert [line["clip"] for line in lines] == [f"/videos/{i}.mp4" for i in rows]
    assert [line["segment"] for line in lines] == [str(i % 10) for i in rows]
    assert [line["true"] for line in lines] == names_of(SceneSegments(Scenes("task1", "eval", 5)), rows)
    assert 100 * fmean(line["true"] == line["predicted"] for line in lines) == pytest.approx(end["test"]["accuracy"])
    assert not (tmp_path / CLASSES).exists()


@pytest.mark.usefixtures("holed")
@pytest.mark.parametrize(
    ("task", "more", "figures"),
    [
        ("segment", ["head.frozen=true"], {"iou": "miou"}),
        ("segment", ["head.frozen=false"], {"iou": "miou"}),
        ("localise", [], {"ciou": "mean_ciou", "adaptive_ciou": "adaptive_ciou"}),
    ],
)
def test_pictures_have_their_own_figures(
    task: str, more: list[str], figures: dict[str, str], file: Path, tmp_path: Path
) -> None:
    end = go(task, file, tmp_path, "stream.most_bad=1", *more).end
    lines = table(tmp_path / ANSWERS)
    scenes = Scenes("task1", "eval", 5)
    if task == "segment":  # every frame whose mask is known
        known = [(i, t) for i in (0, 2, 3, 4) for t in range(4)]
    else:  # those in which the object sounds and is seen
        known = [(i, t) for i in (0, 2, 3, 4) for t in range(4) if _sounds(scenes.labels(i), t)]
        assert 0 < len(known) < 16
    assert [(line["clip"], line["frame"]) for line in lines] == [(f"/videos/{i}.mp4", str(t)) for i, t in known]
    for column, figure in figures.items():
        assert fmean(float(line[column]) for line in lines) == pytest.approx(end["test"][figure], abs=1e-3)


def _sounds(labels: Labels, frame: int) -> bool:
    assert labels.events is not None and labels.mask is not None
    return bool(labels.events[int((frame + 0.5) / 4 * 10)]) and bool(labels.mask[frame].any())


@pytest.mark.usefixtures("holed")
def test_retrieval_has_the_rank_of_each_partner(file: Path, tmp_path: Path) -> None:
    end = go("retrieval", file, tmp_path, "stream.most_bad=1").end
    lines = table(tmp_path / ANSWERS)
    assert [line["clip"] for line in lines] == [f"/videos/{i}.mp4" for i in (0, 2, 3, 4)]
    for way in ("a2v", "v2a"):
        ranks = [int(line[f"{way}_rank"]) for line in lines]
        assert all(1 <= rank <= 4 for rank in ranks)
        assert 100 * fmean(rank <= 1 for rank in ranks) == pytest.approx(end["test"][f"{way}_1"])


def test_matching_has_no_table(file: Path, tmp_path: Path) -> None:
    go("matching", file, tmp_path)
    assert not (tmp_path / ANSWERS).exists()


def test_shared_features_give_every_run_its_table(file: Path, tmp_path: Path) -> None:
    for run in ("first", "second"):
        go("segment", file, tmp_path / run, f"features={tmp_path / 'features'}")
    first, second = (table(tmp_path / run / ANSWERS) for run in ("first", "second"))
    assert first == second and len(first) == 20


class Stored(Scenes):
    def origin(self, index: int) -> Origin:
        return Origin(f"own/{index}", "own")

    def stamp(self, index: int) -> str:
        return ""


def test_a_clip_is_named_as_far_as_its_source_knows() -> None:
    scenes, segments = Scenes("task1", "eval", 5), SceneSegments(Scenes("task1", "eval", 5))
    joined = join([part(scenes, [3, 4]), part(Holed(scenes), [2]), Stored("task1", "eval", 5), segments])
    assert [id_of(joined, i) for i in (1, 2, 3, 9)] == [scenes.id(4), "/videos/2.mp4", "own/0", "9"]
    assert id_of(joined, 9, 0) == "0"
    cached = ScenesConfig(tasks=("task1",), eval_clips=5).downstream("retrieval").test
    assert id_of(cached, 2) == scenes.id(2)  # without rendering it
    assert id_of([], 7) == "7"


def test_names_that_are_no_utf8_do_not_stop_a_run(tmp_path: Path) -> None:
    source = Scenes("task1", "eval", 1)
    parts = Parts(source, source, source, ("a\udcff", 'b"\n'))
    one = {"clip": torch.tensor([0]), "scores": torch.tensor([[0.0, 1.0]]), "target": torch.tensor([0])}
    write_answers(tmp_path, "classify", parts, one)
    [line] = table(tmp_path / ANSWERS)
    assert line["true"] == "a\\udcff" and line["predicted"] == 'b"\n'


def test_the_command_names_the_tables(file: Path, tmp_path: Path) -> None:
    given = [str(file), *SMALL, "stream.epochs=1", "--run", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["transfer", "classify", *given])
    said = done.output.replace("\n", "")
    assert done.exit_code == 0, done.output
    assert f"{ANSWERS}  what it says of each test clip" in said and f"{CLASSES}  what it says of each class" in said
