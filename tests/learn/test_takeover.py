"""A learner that goes on from a finished run."""

import io
import math
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.learning import SHARE, config_for, copy, quiet, state, trained_on
from helpers.media_files import write_video
from helpers.small import quick, same, use_tasks
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from stella.cli import app
from stella.data import workers as pool
from stella.errors import StellaError
from stella.files import write_json
from stella.learn.home import Home
from stella.learn.loop import learn
from stella.learn.round import Learner
from stella.runs.loop import pretrain, resume
from stella.train.checkpoint import Checkpoints
from stella.train.trainer import Trainer


@pytest.fixture(scope="module")
def run(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    pretrain(config_for(sources[0], "data.eval_share=0.3"), folder, console=quiet())
    return folder


def test_a_finished_run_goes_on_as_a_learner(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run over one folder, then a round over another: as if the run had had both."""
    config = config_for(sources[0], "data.eval_share=0.3")
    pretrain(config, tmp_path / "run", console=quiet())
    with (tmp_path / "said").open("w") as file:
        resume(tmp_path / "run", console=Console(file=file, width=200))
    advice = f"is finished: nothing is left to do; to go on with new clips: stella learn HOME SRC… --from {tmp_path}"
    assert advice in (tmp_path / "said").read_text()
    home = tmp_path / "home"
    done = learn(home, [*sources[:2]], settings=SHARE, run=tmp_path / "run", console=quiet())
    plans = Home(home).plans()
    assert [record["clips"] for record in done.rounds] == [plans[1].clips]
    assert {item.clip.split("/")[0] for item in plans[1].train} == {"1"}  # the run's clips are not learnt again
    assert len(plans[0].held) and done.rounds[0]["old"]["clips"] == len(plans[0].held)
    use_tasks(monkeypatch, trained_on(home, sources[:2]))
    pretrain(config, tmp_path / "both", console=quiet())
    both = Checkpoints(tmp_path / "both" / "checkpoints").load()
    assert both is not None and same(both["trainer"], state(home)["trainer"])


def test_a_finished_run_with_another_configuration_is_refused_and_no_more_is_said(run: Path) -> None:
    said = io.StringIO()
    with pytest.raises(StellaError, match=r"started otherwise: stream\.epochs was"):
        resume(run, ["stream.epochs=9"], Console(file=said))
    assert not said.getvalue()


def test_a_run_is_taken_over_without_new_clips(run: Path, sources: list[str], tmp_path: Path) -> None:
    home, invoke = tmp_path / "home", CliRunner().invoke
    for _ in range(2):
        done = invoke(app, ["learn", str(home), "--from", str(run)])
        assert done.exit_code == 0, done.output
        assert f"{home} goes on from {run}: its model, optimiser and memory, " in done.output
        assert f"go on with: stella learn {home} SRC…" in done.output and "round 1 is in use" in done.output
    assert same(load_file(home / "model.safetensors"), load_file(run / "model.safetensors"))
    with pytest.raises(StellaError, match="give at least one folder"):
        invoke(app, ["learn", str(home), "--from", str(run), "--watch"], catch_exceptions=False)
    assert invoke(app, ["learn", str(home), sources[1]]).exit_code == 0 and Home(home).current == 2


def test_a_take_over_that_was_stopped_goes_on_with_the_same_command(
    run: Path, sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the learner is made, stopped in its first round, and complete."""
    home, given = tmp_path / "home", ["--from", str(run), "--share", "0.2"]
    command = ["learn", str(home), sources[1], *given]

    def killed(self: Home, number: int) -> None:
        raise KeyboardInterrupt

    def stopped(self: Learner, *given: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Home, "link", killed)
        with pytest.raises(KeyboardInterrupt):
            learn(home, sources[1:2], settings=SHARE, run=run, console=quiet())
    with pytest.raises(StellaError, match=f"is being made from {run}; go on with --from {run}"):
        learn(home, sources[1:2], config_for(sources[1]), console=quiet())
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "_prepared", stopped)
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 143 and "the same command goes on from here" in done.output
    for rounds in (2, 2):
        assert CliRunner().invoke(app, command).exit_code == 0 and Home(home).current == rounds
    learn(tmp_path / "plain", sources[1:2], settings=SHARE, run=run, console=quiet())
    assert same(state(home), state(tmp_path / "plain"))
    copy(run, tmp_path / "another")
    with pytest.raises(StellaError, match="is a learner already; leave --from"):
        learn(home, sources[1:2], run=tmp_path / "another", console=quiet())
    (home / "home.json").unlink()  # later rounds are not overwritten
    with pytest.raises(StellaError, match=r"home.json is missing; restore it as it was after round 2"):
        learn(home, sources[1:2], run=run, console=quiet())


def test_a_run_is_not_taken_over_among_files_of_someone_else(run: Path, sources: list[str], tmp_path: Path) -> None:
    (tmp_path / "rounds").mkdir()
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "current").symlink_to("thesis.txt")
    with pytest.raises(StellaError, match="holds something else"):
        learn(tmp_path, sources[1:2], run=run, console=quiet())
    assert {path.name for path in tmp_path.rglob("*")} == {"rounds", "thesis.txt", "current"}


@pytest.mark.parametrize("values", [("train.decay=0.5",), ("train.schedule=cosine", "stream.drop_last=true")])
def test_what_needs_an_end_is_not_taken_over(
    values: tuple[str, ...], sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate of a run that decayed to 0 would go on below 0; short batches would be lost."""
    rates: list[float] = []

    class Watched(Trainer):
        def _rate_now(self) -> float:
            rates.append(super()._rate_now())
            return rates[-1]

    config = config_for(sources[0], "data.eval_share=0.3", *values)
    pretrain(config, tmp_path / "run", console=quiet())
    monkeypatch.setattr("stella.learn.round.Trainer", Watched)
    done = learn(tmp_path / "home", sources[1:2], settings=SHARE, run=tmp_path / "run", console=quiet())
    assert set(rates) == {config.train.lr}
    assert len(rates) == math.ceil(done.rounds[0]["clips"] / config.stream.batch_size)


def test_an_unfinished_run_is_not_taken_over(sources: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "config.json", {})
    with pytest.raises(StellaError, match="is not finished"):
        learn(tmp_path / "home", sources, run=tmp_path / "run", console=quiet())
    assert not (tmp_path / "home").exists()


@pytest.fixture(scope="module")
def of_videos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a finished run over videos, of which one is a broken link."""
    folder = tmp_path_factory.mktemp("of videos")
    for number in range(6):
        write_video(folder / "videos" / f"{number}.mp4", 0.75, seed=number)
    (folder / "videos" / "6.mp4").symlink_to("nowhere.mp4")
    values = ["data.source=folder", f"data.path={folder}/videos", "data.duration=0.64", "data.pixels=32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "START_METHOD", "fork")
        pretrain(quick("er", *values, "data.eval_share=0.67", "stream.most_bad=0.9"), folder / "run", console=quiet())
        yield folder


def test_a_run_with_a_file_that_cannot_be_read_is_taken_over(of_videos: Path, tmp_path: Path) -> None:
    """Of the others all are known. That one is learnt when it can be read."""
    folder = copy(of_videos, tmp_path / "work")
    copy(of_videos / "videos", tmp_path / "copies")
    home = tmp_path / "home"
    done = CliRunner().invoke(app, ["learn", str(home), str(tmp_path / "copies"), "--from", str(folder / "run")])
    assert done.exit_code == 0 and "nothing new" in done.output, done.output
    assert "1 clip of it cannot be read, and will count as new" in done.output.replace("\n", " ")
    write_video(tmp_path / "copies" / "nowhere.mp4", 0.75, seed=9)
    learn(home, [str(tmp_path / "copies")], console=quiet())
    [item] = [*Home(home).plan(2).train, *Home(home).plan(2).held]
    assert item.path in ("6.mp4", "nowhere.mp4")
    plan = Home(home).plan(1)
    assert len([*plan.train, *plan.held]) == 7 and plan.clips == len(plan.train)


def test_a_run_whose_videos_moved_is_taken_over_without_them(of_videos: Path, tmp_path: Path) -> None:
    (of_videos / "videos").rename(of_videos / "moved")
    try:
        done = CliRunner().invoke(app, ["learn", str(tmp_path / "home"), "--from", str(of_videos / "run")])
    finally:
        (of_videos / "moved").rename(of_videos / "videos")
    plan = Home(tmp_path / "home").plan(1)
    assert done.exit_code == 0 and plan.train == plan.held == [] and plan.clips > 0, done.output
    says = f"{plan.clips} clips of it cannot be read, and will count as new; to have them known, bring them back"
    assert says in done.output.replace("\n", " ")
    learn(tmp_path / "home", [str(of_videos / "videos")], console=quiet())
    assert Home(tmp_path / "home").current == 2
