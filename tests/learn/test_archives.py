"""Learning from tar archives of videos."""

from pathlib import Path

import pytest
from helpers.archives import pack
from helpers.learning import quiet, state
from helpers.media_files import write_video
from helpers.small import SIZES, quick, same
from typer.testing import CliRunner

from stella.cli import app
from stella.errors import StellaError
from stella.learn.home import Home, Settings
from stella.learn.loop import learn

INPUTS = ("data.duration=0.64", "data.pixels=32")


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for seed in range(6):
        write_video(folder / f"{seed}.mp4", seed=seed)
    (folder / "bad.mp4").write_bytes(b"no video at all")
    return folder


def test_an_archive_teaches_what_its_videos_teach(videos: Path, tmp_path: Path) -> None:
    """With a clip set aside and a bad one: equal to the last bit."""
    files = {path.name: path.read_bytes() for path in sorted(videos.iterdir())}
    archive = pack(tmp_path / "day.tar", files)
    states = []
    for number, source in enumerate((videos, archive)):
        home = tmp_path / str(number)
        config = quick("er", "data.source=folder", f"data.path={videos}", *INPUTS)
        done = learn(home, [str(source)], config, Settings(share=0.4), console=quiet())
        assert sum(done.rounds[0]["skipped"].values()) == 1
        assert learn(home, [str(videos), str(archive)], console=quiet()).rounds == []  # known in the other too
        assert {Path(name).name for name in Home(home).seen().bad} == {"bad.mp4"}
        found = state(home)
        plans = [[[item.path for item in part] for part in plan] for plan in found["plans"]]
        states.append([found["trainer"], plans, [{**each, "memory": None} for each in found["figures"]]])
    assert same(*states) and any(plan[1] for plan in states[0][1])


def test_from_the_command_line(videos: Path, tmp_path: Path) -> None:
    """In a folder that holds archives alone, and by its own name; a compressed one is refused or told of."""
    files = {path.name: path.read_bytes() for path in sorted(videos.glob("?.mp4"))}
    small = [*SIZES, *INPUTS, "stream.batch_size=2", "memory.clips=4", "method=er", "train.device=cpu", "--share", "0"]
    pack(tmp_path / "in" / "one.tar", dict(list(files.items())[:3]))
    packed = pack(tmp_path / "in" / "two.tar.gz", files)
    home = tmp_path / "home"
    with pytest.raises(StellaError, match=r"two\.tar\.gz is compressed, .*\(stella prepare .*two\.tar\.gz SHARDS"):
        CliRunner().invoke(app, ["learn", str(home), str(packed), *small], catch_exceptions=False)
    assert not home.exists()
    first = CliRunner().invoke(app, ["learn", str(home), str(tmp_path / "in"), *small])
    assert first.exit_code == 0 and "two.tar.gz is compressed" in first.output, first.output
    second = CliRunner().invoke(app, ["learn", str(home), str(pack(tmp_path / "two.tar", files))])
    assert second.exit_code == 0, second.output
    assert [plan.clips for plan in Home(home).plans()] == [3, 3]
