"""What a search finds, checked against a search written out in loops."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from helpers.fake_model import FakeModel
from helpers.media_files import CLIPS

import stella
from stella.errors import ClipError, StellaError
from stella.search.hits import Hit
from stella.search.index import Index
from stella.search.query import embed_query, split_moment
from stella.transfer.config import WeightsConfig
from stella.transfer.weights import open_weights

DIM = 8


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    root = tmp_path_factory.mktemp("search")
    for number in range(60):
        path = (
            root
            / "source"
            / ("cats", "dogs", "deep/cats")[number % 3]
            / f"{number}.{'wav' if number % 7 == 0 else 'mp4'}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mute" * (number % 11 == 0) + "x" * number)
    made = Index(root / "index")
    made.update(root / "source", model=FakeModel(dim=DIM))
    return made


def naive(index: Index, query: torch.Tensor, to: str, merge: bool) -> list[tuple[str, float, float]]:
    """(path, start, score), best first."""
    (root,), model = index.state().sources, FakeModel(dim=DIM)
    scored = []
    for path in root.rglob("*.*"):
        part = model.embed_both(path)[to == "audio"]
        for i in range(len(part.vectors) if part else 0):
            score = float(part.vectors[i].half().double() @ query.double())
            scored.append((str(path.relative_to(root)), float(i), score))
    scored.sort(key=lambda one: -one[2])
    kept: list[tuple[str, float, float]] = []
    for path, start, score in scored:
        if not merge or not any(path == other and abs(start - began) < 2 for other, began, _ in kept):
            kept.append((path, start, score))
    return kept


def brief(hits: list[Hit]) -> list[tuple[str, float, float]]:
    return [(hit.path, hit.start, pytest.approx(hit.score, abs=1e-6)) for hit in hits]


@pytest.mark.parametrize("to", ["video", "audio"])
@pytest.mark.parametrize("merge", [True, False])
def test_what_is_found_is_what_loops_find(index: Index, to: str, merge: bool) -> None:
    for seed in range(4):
        query = torch.nn.functional.normalize(torch.randn(DIM, generator=torch.Generator().manual_seed(seed)), dim=0)
        expected = naive(index, query, to, merge)
        assert brief(index.search(3 * query, 7, to=to, merge=merge).hits) == expected[:7]
        assert brief(index.search(query, 999, to=to, merge=merge).hits) == expected


def test_filters_choose_by_path_and_label(index: Index) -> None:
    query = torch.ones(DIM) / DIM**0.5
    everything = naive(index, query, "video", True)
    for path, label, passes in (
        ("dogs/*", None, lambda p: p.startswith("dogs/")),
        (None, "cats", lambda p: Path(p).parent.name == "cats"),
        ("deep/*", "cats", lambda p: p.startswith("deep/")),
        ("*1.mp4", None, lambda p: p.endswith("1.mp4")),
        ("nothing", None, lambda _: False),
    ):
        found = index.search(query, 999, path=path, label=label)
        assert brief(found.hits) == [one for one in everything if passes(one[0])]
    assert index.search(query, label="cat").hits == []


def test_a_query_is_a_sound_a_video_or_a_moment(index: Index, tmp_path: Path) -> None:
    model = FakeModel(dim=DIM)
    (root,) = index.state().sources
    video, sound, mute = root / "dogs/10.mp4", root / "dogs/49.wav", root / "dogs/22.mp4"
    found = index.search(video, 5, model=model)
    pictures = model.embed_video(video).vectors
    assert (found.query.by, found.to, found.exact) == ("video", "audio", True)
    mean = torch.nn.functional.normalize(pictures.mean(0), dim=0)
    assert torch.allclose(found.query.vector, mean) and (found.query.start, found.query.end) == (0, 4)
    assert brief(found.hits) == naive(index, found.query.vector, "audio", True)[:5]
    moment = index.search(f"{video}@2.1", 1, to="video", model=model)
    assert torch.equal(moment.query.vector, pictures[1] / pictures[1].norm()) and moment.query.start == 1
    assert (moment.hits[0].file, moment.hits[0].start) == (video, 1) and moment.hits[0].score > 0.999
    assert index.search(sound, 1, model=model).to == "video"
    assert index.search(video, 1, by="audio", model=model).to == "video"
    assert index.search(sound.rename(tmp_path / "sound.mp4"), 1, by="video", model=model).query.by == "video"
    (tmp_path / "sound.mp4").rename(sound)
    with pytest.raises(ClipError, match="no audio track"):
        index.search(mute, by="audio", model=model)
    with pytest.raises(ClipError, match="no video track"):
        index.search(sound, by="video", model=model)
    with pytest.raises(StellaError, match=r"10.mp4@40 is beyond the end of the file"):
        index.search(f"{video}@40", model=model)
    with pytest.raises(StellaError, match=r"a moment is a number of seconds from 0, such as .*10.mp4@12.5"):
        index.search(f"{video}@-1", model=model)
    with pytest.raises(StellaError, match=r"10.mp4@abc: a moment is a number of seconds from 0"):
        index.search(f"{video}@abc", model=model)
    with pytest.raises(ClipError, match="missing file"):
        index.search("nowhere.mp4", model=model)


def test_a_video_without_pictures_is_asked_by_its_sound() -> None:
    class Sound(FakeModel):
        def embed_video(self, path: Path | str):
            raise ClipError(path, "no video track", "give a video")

    assert embed_query(Sound(), __file__).by == "audio"


def test_a_name_may_end_like_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "a@2.5"
    assert split_moment(str(path)) == (str(tmp_path / "a"), 2.5)
    path.write_text("x")
    assert split_moment(str(path)) == (str(path), None) and split_moment("me@home.mp4") == ("me@home.mp4", None)
    assert split_moment(f"{path}@3") == (str(path), 3.0)


def test_more_like_a_hit_without_its_file(index: Index) -> None:
    hit = index.search(torch.ones(DIM), 3).hits[2]
    again = index.search(index.vector(hit), 1).hits[0]
    assert (again.place, round(again.score, 3)) == (hit.place, 1.0)


def test_threads_search_one_index_while_another_process_could_write(index: Index) -> None:
    queries = [torch.randn(DIM, generator=torch.Generator().manual_seed(seed)) for seed in range(40)]
    expected = [index.search(query).hits for query in queries]
    results: list[list[Hit]] = [[] for _ in queries]

    def work(first: int) -> None:
        for i in range(first, len(queries), 8):
            results[i] = index.search(queries[i]).hits

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


def test_the_derived_index_is_used_while_it_is_fresh(index: Index, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    query = torch.ones(DIM)
    missing = index.search(query, 5, faiss=True)
    assert missing.exact and "build the derived index with stella index" in missing.note
    index.build_ivf()
    found = index.search(query, 5, faiss=True)
    assert (
        not found.exact and not found.note and brief(found.hits) == brief(missing.hits)
    )  # so small, all lists are read
    assert "knows no filters" in index.search(query, 5, faiss=True, label="cats").note
    (root,) = index.state().sources
    (root / "new.mp4").write_text("new")
    index.update(model=FakeModel(dim=DIM))
    stale = index.search(query, 5, faiss=True)
    assert stale.exact and stale.note
    (root / "new.mp4").unlink()
    index.update(model=FakeModel(dim=DIM))


def test_a_shipped_name_means_the_shipped_weights_where_a_folder_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index remembers what was loaded."""
    monkeypatch.chdir(tmp_path)
    for name in ("base-small", "mine"):
        stella.load("base-tiny", "cpu").save(name)
    shutil.copy(CLIPS / "bbaf2n.mpg", tmp_path / "mine")
    for name, origin in (("base-small", "base-small"), ("mine", str(tmp_path / "mine"))):
        Index(f"of-{name}").update("mine", model=name)
        assert Index(f"of-{name}").serving().origin == origin
        assert Index(f"of-{name}").search("mine/bbaf2n.mpg", 1).hits
    _, digest = open_weights(WeightsConfig("base-tiny"), 0)
    (tmp_path / "base-tiny").mkdir()
    assert open_weights(WeightsConfig("base-tiny"), 0)[1] == digest
