"""The commands, and what a person sees: table, JSON, page."""

import base64
import io
import json
import os
import re
import sys
from pathlib import Path

import av
import pytest
from helpers.fake_model import FakeModel
from helpers.media_files import CLIPS, tone, write, write_video
from typer.testing import CliRunner

from stella.cli import app, main
from stella.data.prepare import prepare
from stella.data.shards import Shards
from stella.report.found import _media, clock
from stella.search import index as index_module

run = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Real files, a fake model: `--model` names its version."""
    monkeypatch.setattr(index_module, "load", lambda what, device=None: FakeModel(str(what), pause=0))
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "src" / "cats" / "<b>[red]&.mp4", 3.0, seed=1)
    write_video(tmp_path / "src" / "dogs" / os.fsdecode(b"\xff\n.mp4"), 3.0, seed=2)
    write(tmp_path / "src" / "bell.wav", None, tone(2.0, 16_000), audio_codec="pcm_s16le")
    return tmp_path


def test_index_and_search_on_the_command_line(folder: Path) -> None:
    (folder / "src" / "broken.mp4").write_text("bad")
    made = run.invoke(app, ["index", "src", "index", "--model", "one"])
    assert made.exit_code == 0, made.output
    assert f"bad {folder}/src/broken.mp4: not a media file; fetch it again" in made.output.replace("\n/", "/")
    assert re.search(
        r"3 added in \d+ s; bad: 1 not a media file; 3 files, windows: \d+ video, \d+ audio\n$", made.output
    )
    again = run.invoke(app, ["index", "index"])
    assert again.exit_code == 0 and "nothing new" in again.output
    shown = run.invoke(app, ["index", "index", "--state"]).output
    assert all(word in shown for word in ("one, version fake-one, D = 8", "3 ok", "1 bad", "broken.mp4"))
    found = run.invoke(app, ["search", "index", "src/bell.wav", "-k", "3"])
    assert found.exit_code == 0, found.output
    assert "<b>[red]&.mp4" in found.output and "\\udcff\\n.mp4" in found.output and "0:00.0 – 0:02.0" in found.output
    assert found.output.startswith("pictures that fit the sound of bell.wav, 0:00.0 – ")
    tree = json.loads(run.invoke(app, ["search", "index", "src/bell.wav", "--json", "--label", "dogs"]).output)
    assert {hit["path"] for hit in tree["hits"]} == {os.fsdecode(b"dogs/\xff\n.mp4")}
    assert (tree["query"]["by"], tree["to"], tree["exact"]) == ("audio", "video", True)
    assert "no file passes the filters" in run.invoke(app, ["search", "index", "src/bell.wav", "--path", "x"]).output
    refreshed = run.invoke(app, ["index", "index", "--refresh", "--model", "two", "--compact"])
    assert refreshed.exit_code == 0 and "3 embedded again" in refreshed.output, refreshed.output
    assert "two, version fake-two" in run.invoke(app, ["index", "index", "--state"]).output
    assert run.invoke(app, ["index", "--forget", "src", "index"]).output == "src is dropped; 0 files left\n"
    assert "the index is empty" in run.invoke(app, ["search", "index", "src/bell.wav"]).output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["search", "nowhere", "src/bell.wav"], "nowhere holds no index; make one with: stella index SRC nowhere"),
        (["search", "index", "none.wav"], "missing file"),
        (["search", "index", "src/bell.wav", "-k", "0"], "k=0 must be at least 1"),
        (["search", "index", "src/bell.wav@99"], "src/bell.wav@99 is beyond the end of the file"),
        (["search", "index", "src/bell.wav", "--by", "video"], "no video track"),
        (["search", "index", "src/mute.mp4", "--by", "audio"], "no audio track"),
        (
            ["search", "index", "src/bell.wav", "--model", "two"],
            "another model than two; leave it out, or embed all files again: stella index index --refresh --model two",
        ),
        (["index", "nowhere", "index"], "nowhere is not a folder"),
        (["index", "src", "index", "--model", "two"], "all its vectors are stale; add --refresh"),
        (["index", "index", "src"], "src is no index and holds"),
        (["index", "src"], "name a new folder after it: stella index SRC INDEX"),
        (["search", "src", "src/bell.wav"], "src holds no index; make one with: stella index src INDEX"),
        (
            ["search", "src/bell.wav", "index"],
            "src/bell.wav is a file, not an index; name the folder of an index first",
        ),
        (["index", "src", "src/bell.wav"], "src/bell.wav is a file; name a new folder for the index last"),
        (["index", "--forget", "index"], "--forget needs the folders to drop"),
        (["index", "--compact", "--forget", "src/cats", "index"], "is no folder of index"),
    ],
)
def test_an_error_is_one_sentence(
    args: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "src" / "mute.mp4").write_text("mute")
    assert run.invoke(app, ["index", "src", "index", "--model", "one"]).exit_code == 0
    monkeypatch.setattr(sys, "argv", ["stella", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.startswith("error: ") and said in shown and shown.count("\n") == 1


def test_the_page_plays_the_files_and_escapes_their_names(folder: Path) -> None:
    run.invoke(app, ["index", "src", "index", "--model", "one"])
    done = run.invoke(app, ["search", "index", "src/bell.wav", "--page", "pages/found.html"])
    assert done.exit_code == 0 and done.output.endswith("pages/found.html\n"), done.output
    page = (folder / "pages" / "found.html").read_text()
    assert re.search(r"<h2>\d+ pictures that fit the sound of bell.wav, 0:00.0 – ", page)
    assert "&lt;b&gt;[red]&amp;.mp4" in page and "<b>" not in page and "\\udcff\\n.mp4" in page
    sources = re.findall(r'<(video|audio) [^>]*src="([^"#]*)#t=([\d.]+),([\d.]+)"', page)
    assert {kind for kind, *_ in sources} == {"video", "audio"} and len(sources) > 2
    assert "./../src/dogs/%FF%0A.mp4" in {source for _, source, *_ in sources}
    assert page.count('poster="data:image/jpeg;base64,/9j/') == sum(kind == "video" for kind, *_ in sources)
    names, below = (re.findall(rf'<p class="{kind}">(.*?)</p>', page.split("<ol")[1]) for kind in ("name", "faint"))
    assert not any("/" in name for name in names) and any(" · " in line for line in below)  # folders stand below
    assert "<script" not in page and not re.search(r' (style|on\w+)="', page) and "https:" not in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page


def test_what_browsers_cannot_play_is_cut_into_the_page(folder: Path) -> None:
    """MPEG, and clips in shards. Of a file that is gone the page says so."""
    (folder / "src" / "face.mpg").write_bytes((CLIPS / "bbaf2n.mpg").read_bytes())
    run.invoke(app, ["index", "src", "index", "--model", "one"])
    (folder / "src" / "dogs" / os.fsdecode(b"\xff\n.mp4")).unlink()
    assert run.invoke(app, ["search", "index", "src/face.mpg", "--to", "video", "--page", "a.html"]).exit_code == 0
    assert (folder / "a.html").read_text().count("the query's own file") == 1
    page = (folder / "a.html").read_text()
    clips = re.findall(r'<video [^>]*src="data:video/mp4;base64,([^"]*)"', page)
    assert len(clips) == 2 and ".mpg#t=" not in page and page.count("cannot be read any more") == 1  # with the query
    assert "media-src 'self' file: data:" in page
    prepare(folder / "src" / "cats", folder / "shards", seconds=2.0, size=110, workers=1, progress=False)
    media = _media(folder / "shards", Shards(folder / "shards").entry(0)[1].id, 0.0, 2.0, folder / "a.html")
    for clip in (*clips, media["src"].removeprefix("data:video/mp4;base64,")):
        with av.open(io.BytesIO(base64.b64decode(clip))) as found:
            assert [stream.type for stream in found.streams] == ["video", "audio"] and found.duration / 1e6 < 3.2


def test_what_shipped_weights_do_not_know_is_said_once_and_of_real_files_alone(folder: Path) -> None:
    says = "base-small knows rendered scenes, not the world, so its answers about these clips mean little"
    (folder / "src" / "bell.wav").rename(folder / "bell.wav")
    for number, video in enumerate(sorted((folder / "src").rglob("*.mp4"))):
        video.rename(folder / "src" / f"scenes-0-task1-eval-{number:06d}.mp4")
    ask = ["search", "index", "src/scenes-0-task1-eval-000000.mp4", "--page", "found.html"]
    scenes = [run.invoke(app, ["index", "src", "index", "--model", "base-small"]), run.invoke(app, ask)]
    assert all(done.exit_code == 0 and "scenes, not the world" not in done.output for done in scenes)
    assert "not the world" not in (folder / "found.html").read_text()
    assert says in run.invoke(app, ["search", "index", "bell.wav"]).output  # a query that is none
    (folder / "bell.wav").rename(folder / "src" / "bell.wav")
    made = run.invoke(app, ["index", "index"]).output
    assert f"{says}; let it learn from your videos: stella learn HOME SRC model.weights=base-small, then" in made
    assert run.invoke(app, ask).output.count(says) == 1 == (folder / "found.html").read_text().count(says)
    run.invoke(app, ["index", "index", "--refresh", "--model", "other"])
    assert "not the world" not in run.invoke(app, ask).output


def test_times_in_words() -> None:
    assert [clock(t) for t in (0, 12.46, 59.99, 3723.04)] == ["0:00.0", "0:12.5", "1:00.0", "1:02:03.0"]
