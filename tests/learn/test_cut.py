"""Videos beside and below shards and packed clips are learnt, unless these were made of them."""

import shutil
from pathlib import Path

import pytest
from helpers.archives import pack as tar
from helpers.learning import packed
from helpers.media_files import write_video

from stella.data import workers as pool
from stella.data.prepare import prepare
from stella.learn.cut import cut_up
from stella.learn.items import Item, Scanner, Seen
from stella.media.inputs import Inputs

INPUTS = Inputs(0.64, 32, 36, 4, None, 64)


def new(root: Path, seen: Seen, scanner: Scanner | None = None) -> list[Item]:
    return [item for item, _ in (scanner or Scanner(INPUTS)).scan(str(root), seen)]


def names(items: list[Item]) -> list[str]:
    return [item.path for item in items if not item.clip]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards beside the videos they were made of, one of which is in a sub-folder."""
    folder = tmp_path_factory.mktemp("prepared")
    for seed, name in enumerate(("a.mp4", "sub/b.mp4")):
        write_video(folder / name, 1.5, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "START_METHOD", "fork")
        prepare(folder, folder, seconds=0.64, size=36, fps=8, split=True, workers=1, progress=False)
    return folder


@pytest.fixture
def there(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "in"))


def test_videos_beside_and_below_shards_are_new_unless_these_were_made_of_them(there: Path) -> None:
    scanner = Scanner(INPUTS)
    items = new(there, Seen(), scanner)
    assert [(item.path, item.recording) for item in items] == [("", "a.mp4")] * 2 + [("", "sub/b.mp4")] * 2
    [says] = scanner.problems
    assert f"left out of {there}: 2 videos, such as {there}/a.mp4, of whose names clips in that folder" in says
    for name in ("c.mp4", "sub/d.mp4", "sub/deeper/a.mp4"):
        (there / name).parent.mkdir(exist_ok=True)
        (there / name).write_text(name)
    tar(there / "day.tar", {"e.mp4": b"e"})
    packed(there / "sub", (3,))
    items = new(there, Seen(), scanner)
    assert names(items) == ["c.mp4", "day.tar/e.mp4", "sub/d.mp4", "sub/deeper/a.mp4"]
    assert [item.path for item in items if item.clip] == [""] * 4 + ["sub/0"] * 3
    assert len(scanner.problems) == 2 and scanner.problems[0] == scanner.problems[1] == says


def test_videos_that_were_learnt_before_shards_were_made_of_them_are_not_told_of(there: Path) -> None:
    shards = [path for path in there.iterdir() if path.suffix in (".tar", ".json", ".jsonl")]
    for path in shards:
        path.rename(there.parent / path.name)
    seen, scanner = Seen(), Scanner(INPUTS)
    seen.add(new(there, seen))
    for path in shards:
        (there.parent / path.name).rename(path)
    assert names(new(there, seen, scanner)) == [] and not scanner.problems


def test_another_video_below_is_new_also_if_the_one_that_was_cut_is_known(there: Path) -> None:
    seen, scanner = Seen(), Scanner(INPUTS)
    seen.add([Scanner(INPUTS)._video(str(there), there / "a.mp4")[0][0]])
    (there / "tue").mkdir()
    (there / "tue" / "a.mp4").write_text("another")
    assert names(new(there, seen, scanner)) == ["tue/a.mp4"]


def test_clips_of_which_a_file_is_lost_are_not_listed_again(tmp_path: Path) -> None:
    """They would be tried, and be lost, in round after round."""
    packed(tmp_path, (3,))
    scanner = Scanner(INPUTS)
    assert len(new(tmp_path, Seen(), scanner)) == 3
    next(tmp_path.glob("0/waveforms*")).unlink()
    assert new(tmp_path, Seen(), scanner) == [] and len(scanner.problems) == 1


def test_beside_shards_that_cannot_be_read_nothing_is_taken_yet(there: Path) -> None:
    """It may be what they were made of."""
    (there / "c.mp4").write_text("c")
    [index] = there.glob("shard-*.json")
    text, scanner = index.read_text(), Scanner(INPUTS)
    index.write_text("{")
    assert new(there, Seen(), scanner) == [] and index.name in scanner.problems[0]
    index.write_text(text)
    assert names(new(there, Seen())) == ["c.mp4"]


@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        ("a.mp4", {"/in/s/a.mp4"}),  # prepared from its own folder
        ("x/a.mp4", {"/in/s/x/a.mp4"}),
        ("b.mp4", set()),  # from one below: which one is not known, and the others are to be learnt
        ("c.mp4", {"/in/s/x/c.mp4"}),
        ("s/a.mp4", {"/in/s/a.mp4"}),  # from one above
        ("in/s/x/a.mp4", {"/in/s/x/a.mp4"}),
        ("my a.mp4", set()),
        ("other/a.mp4", set()),
    ],
)
def test_which_video_a_recording_is(recording: str, expected: set[str]) -> None:
    videos = ["/in/s/a.mp4", "/in/s/x/a.mp4", "/in/s/x/b.mp4", "/in/s/y/b.mp4", "/in/s/x/c.mp4", "/in/a.mp4"]
    assert cut_up(videos, {"/in/s": {recording}}).get("/in/s", set()) == expected
