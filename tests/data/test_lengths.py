"""Clips shorter than a run takes them for: shards and arrays say what they hold; of files it is told how many."""

from pathlib import Path
from typing import Any

import pytest
from helpers.media_files import write_video
from helpers.videos import Videos

from stella.config import resolve
from stella.data import workers as pool
from stella.data.folder import Folder
from stella.data.lengths import too_short
from stella.data.pack import pack
from stella.data.packed import Packed, PackedConfig
from stella.data.prepare import prepare
from stella.data.shards import Shards, ShardsConfig, stated_seconds
from stella.data.views import join
from stella.errors import ConfigError, StellaError
from stella.learn.items import Scanner, Seen
from stella.media.decode import Plan
from stella.media.inputs import Inputs
from stella.runs.config import RunConfig, settle


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    for number in range(5):
        write_video(root / f"{number}.mp4", 0.5 if number == 3 else 2.0, seed=number)
    (root / "broken.mp4").write_text("not a video")
    return root


@pytest.fixture(scope="module")
def shards(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "START_METHOD", "fork")
        prepare(videos, root, seconds=2.0, size=48, fps=8, workers=1, progress=False)
    return root


def test_a_run_takes_the_seconds_that_its_shards_hold(shards: Path) -> None:
    config = settle(resolve(RunConfig, None, ["data.source=shards", f"data.path={shards}"]))
    assert (config.data.inputs().duration, config.model.spec_frames) == (2.0, 208)
    assert config.data.remarks() == [] and settle(config) == config


def test_shards_that_hold_less_than_is_wanted_are_refused(shards: Path) -> None:
    says = rf"the clips of {shards} hold 2 s and 10.24 s are wanted.*data.duration=2, or prepare.*--seconds 10.24"
    for config in (ShardsConfig(path=str(shards), duration=10.24), ShardsConfig(path=str(shards)).following(Inputs())):
        with pytest.raises(StellaError, match=says):
            config.train_tasks()
    elsewhere = Scanner(Inputs())
    assert elsewhere.scan(str(shards), Seen()) == [] and "10.24 s are wanted" in elsewhere.problems[0]


def test_of_shards_that_hold_more_the_beginning_is_taken_and_this_is_told(shards: Path, videos: Path) -> None:
    whole, cut = Shards(shards, span=None), Shards(shards, span=None, duration=1.0)
    folder = Folder(videos, Plan(duration=1.0, size=48, span=None))
    [index] = [i for i, file in enumerate(folder.files) if file == "2.mp4"]
    assert len(whole[2].audio) == 32_000 and len(cut[2].audio) == 16_000
    near = (cut[2].video.float() - folder[index].video.float()).abs().mean()
    assert near < 4 < (whole[2].video.float() - folder[index].video.float()).abs().mean()
    [remark] = ShardsConfig(path=str(shards), duration=1.0).remarks()
    assert remark == f"the clips of {shards} hold 2 s, of which the first 1 are taken"


def test_an_index_of_an_earlier_version_has_lengths_in_its_samples(shards: Path) -> None:
    source = Shards(shards)
    known = [source.seconds(i) for i in range(len(source))]
    source._clips = [(shard, type(entry)(**vars(entry) | {"duration": None})) for shard, entry in source._clips]
    assert [source.seconds(i) for i in range(len(source))] == known == pytest.approx([2, 2, 2, 0.5, 2], abs=0.02)


@pytest.mark.parametrize("content", ['{"seconds": -1}', '{"seconds": "x"}', "[]"])
def test_a_folder_that_says_nonsense_of_itself_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "prepare.json").write_text(content)
    with pytest.raises(StellaError, match=r"prepare\.json"):
        stated_seconds(tmp_path)


def test_arrays_for_training_and_evaluation_have_the_same_sizes(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"pixels": 16, "size": 18, "workers": 0, "progress": False}
    for name, frames in (("a", 24), ("b", 24), ("c", 48)):
        pack(Videos(4), tmp_path / name, spec_frames=frames, **sizes)
    path = str(tmp_path / "a")
    assert PackedConfig(path=path, eval_path=str(tmp_path / "b")).eval_tasks()
    with pytest.raises(StellaError, match=r"packed with different spec_frames 24 and 48"):
        PackedConfig(path=path, eval_path=str(tmp_path / "c")).eval_tasks()


def test_short_clips_are_counted_before_a_run_begins(videos: Path, shards: Path, tmp_path: Path) -> None:
    says = "of 6 clips end before the 10.24 s that a clip takes (median 2 s), and the rest of their"
    assert (told := too_short(join([Folder(videos)]), 10.24)) and told.startswith(f"5 {says}") and "duration=2," in told
    assert (told := too_short(join([Folder(videos)]), 2.0)) and told.startswith("1 of 6 clips")
    assert (told := too_short(join([Shards(shards)]), 2.0)) and told.startswith("1 of 5 clips")
    pack(Folder(videos, Plan(duration=2.0, size=18)), tmp_path / "p", pixels=16, spec_frames=200, workers=0)
    assert (told := too_short(join([Packed(tmp_path / "p")]), 2.0)) and told.startswith("1 of 5 clips")
    assert "pack them again with data.duration=" in told
    assert too_short(join([Folder(videos)]), 0.5) is None and too_short(Videos(3), 9.0) is None


def test_of_many_clips_some_are_looked_at(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stella.data.lengths.LOOKED_AT", 2)
    assert (told := too_short(Shards(shards), 4.0)) and told.startswith("2 of 2 clips looked at (of 5)")


def test_a_model_that_hears_longer_than_the_clips_last_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"show 10.24 s and the clips have 2.56 s.*leave out model.spec_frames"):
        settle(resolve(RunConfig, None, ["model.spec_frames=1024"]))


def test_a_clip_is_no_longer_than_it_is_stored(shards: Path) -> None:
    clips = Shards(shards, duration=2.0)
    assert [len(clips[i].audio) // 1000 for i in range(5)] == [32, 32, 32, 8, 32]
