"""The routes, with a real model, real files and real workers."""

import os
import re
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from helpers.hostile import HOSTILE, watched
from helpers.media_files import CLIPS, level_frame, write
from helpers.served import make_index
from typer.testing import CliRunner

import stella
from stella.cli import app as cli
from stella.data.prepare import prepare
from stella.errors import StellaError
from stella.files import write_json
from stella.model import weights
from stella.search.index import OtherVersionError
from stella.serve.app import create
from stella.serve.guard import Access
from stella.serve.run import serve
from stella.serve.served import Served
from stella.serve.uploads import Limits
from stella.serve.versions import Versions

LIMITS = Limits(bytes=1_000_000, seconds=10, workers=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def index(root: Path) -> "stella.Index":
    return make_index(root)


@pytest.fixture(scope="module")
def log() -> list[str]:
    return []


@pytest.fixture(scope="module")
def client(index: "stella.Index", log: list[str]) -> Iterator[TestClient]:
    served = Served(index.path, None, LIMITS, log.append)
    with TestClient(create(served, Access()), base_url="http://localhost", raise_server_exceptions=False) as made:
        yield made
    assert not served.uploads.folder.exists()


@pytest.fixture(scope="module")
def scene(root: Path) -> Path:
    return sorted((root / "videos").glob("*/*.mp4"))[0]


def first(client: TestClient, file: Path, **params: Any) -> dict[str, Any]:
    answer = client.post("/api/search", params=params, content=file.read_bytes())
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_an_upload_is_answered_as_the_index_answers(client: TestClient, index: "stella.Index", scene: Path) -> None:
    model = stella.load("base-tiny", "cpu")
    for params in ({"by": "audio"}, {"by": "video", "to": "video"}, {"by": "audio", "at": 1.0}, {"label": "more"}, {}):
        asked: Any = {name: value for name, value in params.items() if name != "at"}
        query = f"{scene}@{params['at']}" if "at" in params else scene
        expected = index.search(query, 3, model=model, **asked)
        found = first(client, scene, k=3, **params)
        assert (found["to"], found["query"]["by"]) == (expected.to, expected.query.by) and found["stale"] == ""
        brief = [(hit["name"], hit["start"], hit["score"]) for hit in found["hits"]]
        assert brief == [(hit.path, round(hit.start, 3), pytest.approx(hit.score, abs=2e-4)) for hit in expected.hits]
    assert first(client, scene, by="video", to="video", k=1)["hits"][0]["score"] > 0.999


def test_more_like_a_moment_is_without_it(client: TestClient, index: "stella.Index", scene: Path) -> None:
    hit = first(client, scene, to="video", k=1)["hits"][0]
    for to in ("video", "audio"):
        found = client.get(f"/api/moments/{hit['id']}/like", params={"k": 3, "to": to}).json()
        shard, row = map(int, hit["id"].split("-"))
        expected = index.search(index.moment((shard, row)).query, 4, to=to).hits  # type: ignore[arg-type]
        assert [one["id"] for one in found["hits"]] == [
            f"{h.place[0]}-{h.place[1]}" for h in expected if h.place != (shard, row)
        ][:3]
    assert client.get(f"/api/moments/{hit['id']}/like").json()["to"] == "video"


def test_a_moment_has_a_file_a_picture_a_clip_and_a_heat_map(client: TestClient, scene: Path, tmp_path: Path) -> None:
    hit = first(client, scene, by="video", to="video", k=1)["hits"][0]
    base = f"/api/moments/{hit['id']}"
    whole = client.get(f"{base}/media")
    assert whole.content == scene.read_bytes() and whole.headers["content-type"] == "video/mp4"
    part = client.get(f"{base}/media", headers={"range": "bytes=100-299"})
    assert part.status_code == 206 and part.content == scene.read_bytes()[100:300]
    assert client.get(f"{base}/media", headers={"range": "bytes=99999999-"}).status_code == 416
    head = client.head(f"{base}/media")
    assert head.content == b"" and int(head.headers["content-length"]) == scene.stat().st_size
    assert client.get(f"{base}/picture").content.startswith(b"\xff\xd8\xff")
    heat = client.get(f"{base}/heat").json()
    maps = stella.load("base-tiny", "cpu").localise(scene)
    assert heat["times"] == pytest.approx(maps.times[0].tolist(), abs=2e-3) and len(heat["heat"]) == len(heat["times"])
    small = torch.nn.functional.interpolate(maps.heat[:1], (heat["grid"],) * 2, mode="area")[0].flatten(1)
    assert torch.allclose(torch.tensor(heat["heat"]) / 255, small, atol=0.01) and small.max() > 0.5
    assert heat["sound"] == pytest.approx(maps.sound[0].tolist(), abs=2e-3)
    clip = client.get(f"{base}/clip")
    (tmp_path / "clip.mp4").write_bytes(clip.content)
    assert clip.headers["content-type"] == "video/mp4"
    assert stella.load("base-tiny", "cpu").embed_video(tmp_path / "clip.mp4").end[-1] == pytest.approx(
        hit["end"], abs=0.15
    )
    assert client.get(f"{base}/clip", headers={"range": "bytes=0-9"}).content == clip.content[:10]


def test_a_clip_in_shards_is_cut_for_the_browser(index: "stella.Index", scene: Path, tmp_path: Path) -> None:
    """It has no file to send, but a picture, a heat map and a film, which the same model finds again."""
    prepare(scene.parent, tmp_path / "shards", seconds=2.56, size=110, workers=1, progress=False)
    in_shards = stella.Index(tmp_path / "index")
    in_shards.update(tmp_path / "shards", model="base-tiny")
    served = Served(in_shards.path, None, LIMITS, lambda line: None)
    with TestClient(create(served, Access()), base_url="http://localhost", raise_server_exceptions=False) as client:
        hit = first(client, scene, by="video", to="video", k=1)["hits"][0]
        base = f"/api/moments/{hit['id']}"
        assert not hit["whole"] and client.get(f"{base}/media").status_code == 404
        assert client.get(f"{base}/picture").content.startswith(b"\xff\xd8\xff")
        assert len(client.get(f"{base}/heat").json()["heat"]) == 4
        (tmp_path / "clip.mp4").write_bytes(client.get(f"{base}/clip").content)
        again = first(client, tmp_path / "clip.mp4", by="video", to="video", k=1)["hits"][0]
        assert again["id"] == hit["id"] and again["score"] > 0.95


def test_a_sound_has_a_spectrogram_and_no_heat_map(client: TestClient, root: Path) -> None:
    hit = first(client, root / "videos/more/tone.wav", to="audio", k=1)["hits"][0]
    base = f"/api/moments/{hit['id']}"
    assert hit["sound"] and hit["name"] == "more/tone.wav"
    assert client.get(f"{base}/picture").content.startswith(b"\xff\xd8\xff")
    assert client.get(f"{base}/clip").content.startswith(b"fLaC")
    heat = client.get(f"{base}/heat")
    assert heat.status_code == 422 and "no video track" in heat.json()["error"]


def test_bad_uploads_get_one_sentence(client: TestClient, root: Path, tmp_path: Path) -> None:
    mute = write(tmp_path / "mute.mp4", [level_frame(9)] * 20, None)
    for content, params, status, words in (
        (b"no video", {}, 422, "not a media file"),
        (b"", {}, 422, "the upload is empty"),
        (b"#EXTM3U\nfile:///etc/passwd\n", {}, 422, "not a media file"),
        (b"x" * 1_000_001, {}, 413, "more than 1 MB"),
        (mute.read_bytes(), {"by": "audio"}, 422, "no audio track"),
        (mute.read_bytes()[:-300], {}, 422, ""),
        ((root / "videos/more/tone.wav").read_bytes(), {"by": "video"}, 422, "no video track"),
        ((root / "videos/more/tone.wav").read_bytes(), {"at": 99}, 422, "there is no second 99 in it"),
        (b"x", {"to": "smell"}, 422, "to: "),
        (b"x", {"k": 101}, 422, "k: "),
    ):
        answer = client.post("/api/search", params=params, content=content)
        sentence = answer.json()["error"]
        assert (answer.status_code, words in sentence) == (status, True), answer.text
        assert str(root) not in sentence and "stella-serve" not in sentence and "\n" not in sentence


def test_hostile_uploads_are_refused_and_touch_nothing(client: TestClient, tmp_path: Path) -> None:
    """Lists of other files, ports to listen at, and a picture that would take gigabytes."""
    other, fifo = tmp_path / "other.mpg", tmp_path / "fifo.mp4"
    shutil.copyfile(CLIPS / "bbaf2n.mpg", other)
    os.mkfifo(fifo)
    large = write(tmp_path / "a.mov", [np.zeros((6000, 8000, 3), np.uint8)], None, codec="png", pix_fmt="gray")
    bodies = [text.format(other=other, self="a.mp4", fifo=fifo).encode() for text in HOSTILE.values()]
    for body in (*bodies, large.read_bytes()):
        with watched(tmp_path) as opened:
            answer = client.post("/api/search", content=body)
        sentence = answer.json()["error"]
        assert answer.status_code == 422 and not opened, (body[:40], sentence)
        assert ("not a media file" if body in bodies else "picture too large") in sentence, sentence
        assert str(tmp_path) not in sentence


def test_nothing_but_files_of_the_index_is_served(client: TestClient, root: Path, scene: Path) -> None:
    for path in (
        "/api/moments/..%2f..%2fetc%2fpasswd/media",
        "/api/moments/999-0/media",
        "/api/moments/1-999/picture",
        "/api/moments/1/media",
        "/static/..%2fapp.py",
        "/static/../app.py",
        "/static/app.py",
        "//etc/passwd",
        "/nowhere",
    ):
        answer = client.get(path)
        assert answer.status_code == 404 and set(answer.json()) == {"error"}, path
    assert client.post("/").status_code == 405
    hit = first(client, root / "videos/more/face.mpg", by="video", to="video", k=1)["hits"][0]
    file, kept = root / "videos/more/face.mpg", (root / "videos/more/face.mpg").read_bytes()
    stamp, base = file.stat(), f"/api/moments/{hit['id']}"
    assert client.get(f"{base}/picture").status_code == 200  # and is kept
    shutil.copyfile(CLIPS / "lbax4n.mpg", file)
    assert [client.get(f"{base}/{what}").status_code for what in ("media", "picture", "clip", "heat")] == [409] * 4
    file.unlink()
    assert client.get(f"{base}/media").status_code == 404
    assert [client.get(f"{base}/{what}").status_code for what in ("picture", "clip", "heat")] == [422] * 3
    file.write_bytes(kept)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert client.get(f"/api/moments/{hit['id']}/media").content == kept


def test_no_answer_holds_a_path_of_the_machine(client: TestClient, root: Path, scene: Path, log: list[str]) -> None:
    hit = first(client, scene, k=1)["hits"][0]
    base = f"/api/moments/{hit['id']}"
    answers = [client.get(path) for path in ("/", "/docs", "/openapi.json", "/api/state", "/healthz", f"{base}/like")]
    answers += [client.get(f"{base}/{what}") for what in ("heat", "picture", "nothing")]
    answers += [client.post("/api/search", content=content) for content in (scene.read_bytes(), b"nothing", b"")]
    catalogue_file = root / "index/catalogue.sqlite"
    catalogue_file.rename(root / "away")  # the index vanishes
    try:
        answers += [client.get("/healthz"), client.get(f"{base}/like")]
        assert [answer.status_code for answer in answers[-2:]] == [500, 500]
    finally:
        (root / "away").rename(catalogue_file)
    for answer in answers:
        shown = answer.text + str(answer.headers)
        assert str(root) not in shown and str(Path(stella.__file__).parent) not in shown and "/tmp" not in shown
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert any(str(root) in line for line in log)  # the one who runs the server is told


def test_an_unforeseen_error_is_answered_like_any_other(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def serving(_: object) -> None:
        raise RuntimeError("of /some/folder")

    monkeypatch.setattr(stella.Index, "serving", serving)
    answer = client.get("/healthz")
    assert answer.status_code == 500 and "its log says why" in answer.json()["error"]
    assert answer.headers["x-content-type-options"] == "nosniff" and "content-security-policy" in answer.headers


def test_whether_it_serves_may_be_asked_without_a_body(client: TestClient) -> None:
    for ask in (client.get, client.head):
        assert ask("/healthz").status_code == 200
    assert client.head("/healthz").content == b"" and client.get("/healthz").json() == {"ok": True}


def test_the_page_loads_nothing_from_elsewhere(client: TestClient, root: Path) -> None:
    page = client.get("/").text
    names = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert "/static/app.js" in names and all(name.startswith("/") for name in names)
    for name in {*names, "/static/player.js"}:
        text = client.get(name)
        assert text.status_code == 200 and not re.search(r"(https?:)?//(?!www\.w3\.org/2000/svg)\w+\.\w", text.text), (
            name
        )
    assert "style=" not in page and "<script>" not in page and "onclick" not in page  # the policy forbids them
    routes = client.get("/openapi.json").json()["paths"]
    assert set(routes) >= {"/api/search", "/api/state", "/healthz", "/api/moments/{id}/media"}
    moments = [about["get"]["parameters"] for path, about in routes.items() if path.startswith("/api/moments/")]
    assert len(moments) == 5 and all(
        one[0]["name"] == "id" and "such as 3-17" in one[0]["description"] for one in moments
    )
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    hit = first(client, root / "videos/more/tone.wav", k=1)["hits"][0]
    assert hit.keys() == schemas["HitSchema"]["properties"].keys()
    docs = client.get("/docs").text
    assert all(each["description"] in unescape(docs) for each in schemas["HitSchema"]["properties"].values())
    assert all(path in docs for path in routes)


def test_the_state_says_what_there_is(client: TestClient, index: "stella.Index") -> None:
    state, found = client.get("/api/state").json(), index.state()
    assert client.app.app.state.served.index.shown == "index"  # type: ignore[attr-defined]
    assert (state["files"], state["bad"], state["windows"]) == (found.files["ok"], 1, found.windows)
    assert state["bad_files"] == [{"name": "more/text.mp4", "reason": "not a media file"}]
    assert state["folders"] == ["videos"] and state["model"]["name"] == "base-tiny" and state["stale"] == ""
    assert state["caveat"].startswith("base-tiny knows rendered scenes, not the world")
    assert state["learner"] is False and client.get("/api/learner").status_code == 404


def changed(to: Path, seed: int) -> None:
    """The weights of base-tiny, a little moved."""
    loaded = weights.load("base-tiny")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.001 * torch.randn_like(parameter))
    to.parent.mkdir(parents=True, exist_ok=True)
    weights.save(to, loaded.model, loaded.avm, inputs=loaded.inputs)


def test_a_model_that_goes_on_learning_is_noticed(tmp_path: Path, root: Path, index: "stella.Index") -> None:
    """Queries are embedded by the round that made the index; after a refresh by the new one, without a restart."""
    home = tmp_path / "home"
    for number in (1, 2):
        changed(home / f"rounds/00000{number}/model.safetensors", number)
    write_json(home / "home.json", {})
    (home / "current").symlink_to("rounds/000001")
    (home / "model.safetensors").symlink_to("current/model.safetensors")
    videos = tmp_path / "videos"
    videos.mkdir()
    shutil.copy(root / "videos/more/tone.wav", videos)
    made = stella.Index(tmp_path / "index")
    made.update(videos, model=home)
    versions = Versions(made)
    old = versions.now
    assert old.weights and old.weights.file.endswith("000001/model.safetensors") and old.stale == ""
    (home / "next").symlink_to("rounds/000002")
    (home / "next").replace(home / "current")
    assert versions.look().weights == old.weights and "gone on learning (round 2)" in versions.now.stale
    assert Versions(made).now == versions.now  # also after a restart
    with pytest.raises(StellaError, match="were made by another model"):
        made.model(home)
    moment = made.moment(made.search(torch.ones(stella.load(home).dim), 1, to="audio").hits[0].place)
    made.update(refresh=True, model=home)
    with pytest.raises(StellaError, match="embed the query again"):  # a query of the old round is never compared
        made.search(moment.query)
    new = versions.look()
    assert new.weights and new.weights.file.endswith("000002/model.safetensors") and new.stale == ""
    shutil.rmtree(home)
    assert versions.look().weights is None
    with pytest.raises(StellaError, match="are not to be found; name them with --model"):
        Versions(made)


def test_a_refresh_during_a_search_is_answered_by_the_new_model(
    client: TestClient, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, looked = client.app.app.state.served, []  # type: ignore[attr-defined]
    plain = served.index.search

    def late(*args: Any, **more: Any) -> Any:
        if not looked:
            raise OtherVersionError("changed")
        return plain(*args, **more)

    monkeypatch.setattr(served.index, "search", late)
    monkeypatch.setattr(served.versions, "look", lambda: looked.append(1))
    assert len(first(client, scene, k=2)["hits"]) == 2 and looked  # the watch may look too


def test_what_serve_refuses(tmp_path: Path, index: "stella.Index") -> None:
    for given, words in (
        ({"token": "short"}, "at least 16 letters and digits"),
        ({"token": "a b" * 9}, "at least 16 letters and digits"),
        ({"host": "256.0.0.1"}, "cannot be served"),
        ({"names": ("box", "a b")}, "--name a b is no host name"),
        ({"model": "base-small", "port": 0}, "the weights that made .* are not to be found"),
    ):
        with pytest.raises(StellaError, match=words):
            serve(index.path, **given)  # type: ignore[arg-type]
    with pytest.raises(StellaError, match="holds no index"):
        serve(tmp_path / "nothing", port=0)
    shown = CliRunner().invoke(cli, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert "--token" in shown
