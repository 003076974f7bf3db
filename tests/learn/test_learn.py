"""A learner is a run whose tasks come one after the other; its folder is always whole."""

import os
import shutil
import signal
import time
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from helpers import learn_kill
from helpers.disk import small_disk
from helpers.dying import killed
from helpers.learning import config_for, copy, packed, quiet, state, trained_on
from helpers.small import same, use_tasks
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

import stella
from stella.cli import app
from stella.data.pack import pack
from stella.data.packed import Packed
from stella.data.scenes import TASKS, Scenes
from stella.errors import ConfigError, StellaError
from stella.experiments.recipe import run_config
from stella.files import lock, read_json, write_json
from stella.learn.home import Home, Settings, _left_by_a_kill
from stella.learn.loop import PAUSE, Session, Watch, learn, rollback
from stella.learn.page import by_chance, render, write_page
from stella.learn.round import Learner
from stella.model import weights
from stella.runs.loop import pretrain
from stella.train.checkpoint import Checkpoints


def test_rounds_end_where_one_run_over_the_same_tasks_ends(
    three: Path, sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown beforehand, one call after the other: weights, memory, optimiser, generators, to the last bit."""
    use_tasks(monkeypatch, trained_on(three, sources))
    pretrain(config_for(sources[0], method="stella"), tmp_path / "run", console=quiet())
    run = Checkpoints(tmp_path / "run" / "checkpoints").load()
    assert run is not None and same(run["trainer"], state(three)["trainer"])
    ours = load_file(three / "model.safetensors")
    assert same(ours, load_file(tmp_path / "run" / "model.safetensors"))


def test_six_tasks_of_scenes_in_six_calls_end_where_one_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded benchmark, with nothing set aside: the same batches, and so the same bits."""
    clips, inputs = 4, weights.read_inputs("base-tiny")
    sources = [tmp_path / task for task in TASKS]
    for task, source in zip(TASKS, sources, strict=True):
        sizes = {"pixels": 96, "size": 96, "spec_frames": 256}
        pack(Scenes(task, "train", clips), source, **sizes, workers=0, progress=False, inputs=inputs)
    values = ["method=stella", "model.weights=base-tiny", "memory.clips=6", "stream.batch_size=2", "seed=3"]
    values += ["stream.augment=false", "stream.drop_last=false", "train.decay=0", "train.compile=off"]
    config = run_config(None, [*values, "data.source=packed", f"data.path={sources[0]}"])
    for number, source in enumerate(sources):
        new = (config, Settings(share=0)) if number == 0 else (None, None)
        learn(tmp_path / "home", [str(source)], *new, console=quiet())
    tasks = [(task, Packed(source)) for task, source in zip(TASKS, sources, strict=True)]
    use_tasks(monkeypatch, tasks, tasks)
    pretrain(config, tmp_path / "run", console=quiet())
    run = Checkpoints(tmp_path / "run" / "checkpoints").load()
    assert run is not None and run["trainer"]["counters"]["step"] == 12
    assert same(run["trainer"], state(tmp_path / "home")["trainer"])


def test_every_clip_is_learnt_or_set_aside_once(three: Path, sources: list[str]) -> None:
    home = Home(three)
    rounds = [[item.clip for item in [*plan.train, *plan.held]] for plan in home.plans()]
    assert [len(set(clips)) for clips in rounds] == [20, 21, 22]
    assert all(plan.held and plan.train for plan in home.plans())
    memory = state(three)["trainer"]["memory"]["rows"]["id"]
    assert len(memory) == 7 and sum(home.history()[-1]["memory"]["rounds"]) == 7
    assert home.history()[-1]["memory"]["distinct"] == len(set(memory.tolist()))
    assert int(memory.max()) < sum(plan.clips for plan in home.plans())
    before = (three / "current").readlink()
    assert learn(three, sources, console=quiet()).rounds == []
    assert (three / "current").readlink() == before


def test_the_page_tells_every_round_and_shows_what_is_forgotten(three: Path) -> None:
    page = write_page(Home(three)).read_text()
    history = Home(three).history()
    assert f"{sum(record['clips'] for record in history):,} clips learnt in 3 rounds" in page
    figures = ("accuracy over time", "forgetting over time", "clips in memory by round")
    assert page.count("<svg") == 3 and all(figure in page for figure in figures)
    for record in history[1:]:
        assert f"{record['old']['before']:.1f} → {record['old']['after']:.1f}" in page
    worst = history[-1]["worst"]
    assert page.count("data:image/jpeg;base64,") >= len(worst) > 0
    assert all(f"rank {clip['before']:g} → {clip['after']:g}" in page for clip in worst)


@pytest.mark.parametrize("learners", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_a_learner_killed_at_any_moment_ends_as_if_it_had_not_been(learners: int, tmp_path: Path) -> None:
    results = killed(learn_kill, tmp_path, learners, 5)
    assert len(results) == learners and all(result["same"] for result in results), results
    assert {result["watch"] for result in results} == {False, True}
    assert all(result["killed"][0] for result in results), results


def test_rollback_makes_later_clips_new_again(three: Path, sources: list[str], tmp_path: Path) -> None:
    home = copy(three, tmp_path / "home")
    whole = state(home)
    rollback(home, 2, quiet())
    assert Home(home).current == 2 and len(list((home / "undone").iterdir())) == 1
    learn(home, sources, console=quiet())
    assert same(state(home), whole)
    with pytest.raises(StellaError, match="before the one in use, 3: from 1 to 2"):
        rollback(home, 3, quiet())
    rollback(home, 1, quiet())
    with pytest.raises(StellaError, match="--rollback 1: round 1 is in use and there is none before it"):
        rollback(home, 1, quiet())


def test_what_a_round_was_measured_with_is_there_after_a_rollback(sources: list[str], tmp_path: Path) -> None:
    """Few clips are kept, so that later rounds take the places of earlier ones; then it ends as it did before."""
    home, few = tmp_path / "home", Settings(share=0.4, held=6, keep=2)
    learn(home, sources[:2], config_for(sources[0]), few, console=quiet())
    there = {path.name for path in (home / "held").glob("*.tar")}
    learn(home, sources[2:], console=quiet())
    whole, after = state(home), {path.name for path in (home / "held").glob("*.tar")}
    rollback(home, Home(home).current - 1, quiet())
    assert there <= {path.name for path in (home / "held").glob("*.tar")}
    learn(home, sources, console=quiet())
    assert same(state(home), whole) and {path.name for path in (home / "held").glob("*.tar")} == after


def test_a_rollback_that_was_killed_is_finished(three: Path, tmp_path: Path) -> None:
    home = copy(three, tmp_path / "home")
    write_json(home / "undo", {"round": 1})
    with Home(home).locked():
        assert Home(home).current == 1 and not Home(home).next.plan.exists()
    assert not (home / "undo").exists()


def test_states_beyond_keep_are_removed(three: Path, sources: list[str], tmp_path: Path) -> None:
    home = copy(three, tmp_path / "home")
    more = packed(tmp_path / "more", (8,), first=3)
    learn(home, more, None, Settings(share=0.2, keep=1), console=quiet())
    for kept in (lambda n: Home(home).round(n).checkpoints.folder, lambda n: Home(home).round(n).weights):
        assert [kept(n).exists() for n in range(1, 5)] == [False, False, False, True]
    with pytest.raises(StellaError, match=r"round 3 is not kept \(kept: none\)"):
        rollback(home, 3, quiet())


def test_a_folder_of_something_else_is_refused_and_one_that_was_being_made_is_not(
    sources: list[str], tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    home.held.mkdir()
    (home.root / "lock").touch()
    (home.root / "home.json.0123abcd.tmp").touch()
    with home.locked():  # which removes it
        pass
    (home.root / "model.safetensors").symlink_to("current/model.safetensors")
    assert all(map(_left_by_a_kill, home.root.iterdir()))
    (home.held / "mine.tar").touch()
    with pytest.raises(StellaError, match="something else"):
        learn(home.root, sources, config_for(sources[0]), console=quiet())
    (home.root / "lock").unlink()
    with pytest.raises(StellaError, match="something else"):
        learn(home.root, sources, config_for(sources[0]), console=quiet())
    assert {path.name for path in home.root.iterdir()} == {"held", "model.safetensors"}
    assert not _left_by_a_kill(home.held) and not _left_by_a_kill(home.held / "mine.tar")


def test_a_second_learner_is_refused(three: Path, sources: list[str]) -> None:
    with lock(three / "lock"), pytest.raises(StellaError, match=f"in use by process {os.getpid()}"):
        learn(three, sources, console=quiet())


def test_another_version_is_refused_and_left_alone(three: Path, sources: list[str], tmp_path: Path) -> None:
    home = copy(three, tmp_path / "home")
    write_json(home / "home.json", read_json(home / "home.json") | {"version": 99})
    before = sorted(str(path) for path in home.rglob("*"))
    with pytest.raises(StellaError, match="version 99 and this program reads version 1"):
        learn(home, sources, console=quiet())
    assert sorted(str(path) for path in home.rglob("*")) == before


@pytest.mark.parametrize("given", ["--status", "--accept", "--drop", "--rollback=1"])
def test_what_is_no_learner_of_this_version_is_refused_and_left_alone(given: str, three: Path, tmp_path: Path) -> None:
    videos, other, invoke = tmp_path / "videos", copy(three, tmp_path / "other"), CliRunner().invoke
    videos.mkdir()
    write_json(other / "home.json", read_json(other / "home.json") | {"version": 99})
    write_json(other / "undo", {"round": 1})
    before = sorted(tmp_path.rglob("*"))
    for path, message in ((videos, "is .*videos the folder of a learner"), (other, "has version 99")):
        with pytest.raises(StellaError, match=message):
            invoke(app, ["learn", str(path), given], catch_exceptions=False)
    with pytest.raises(StellaError, match="has version 99"):
        learn(other, [str(videos)], console=quiet())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("method=multitask",), "trains on all tasks at once"),
        (("train.decay=0.5",), r"train.decay=0.5 needs an end, .*; set train.decay=0.0"),
        (("train.schedule=cosine",), "train.schedule='cosine' needs"),
        (("stream.drop_last=true",), "stream.drop_last=true needs"),
    ],
)
def test_what_needs_an_end_is_refused(
    values: tuple[str, ...], message: str, sources: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        learn(tmp_path / "home", sources, config_for(sources[0], *values), console=quiet())
    assert not (tmp_path / "home").exists()


def test_a_learner_that_was_taken_over_with_an_end_has_none(three: Path, tmp_path: Path) -> None:
    """Earlier versions kept the run's schedule, with which the learning rate is 0 for ever."""
    home = copy(three, tmp_path / "home")
    tree = read_json(home / "home.json")
    tree["config"]["train"] |= {"decay": 0.5, "schedule": "cosine"}
    write_json(home / "home.json", tree)
    train = Home(home).config.train
    assert (train.decay, train.schedule) == (0.0, "linear")


def test_only_what_no_state_depends_on_may_change(three: Path, sources: list[str], tmp_path: Path) -> None:
    home = copy(three, tmp_path / "home")
    runner = CliRunner()
    done = runner.invoke(app, ["learn", str(home), sources[0], "train.checkpoint_minutes=3", "--guard", "5"])
    assert done.exit_code == 0 and "nothing new" in done.output, done.output
    assert Home(home).config.train.checkpoint_minutes == 3 and Home(home).settings.guard == 5
    for given in (["train.lr=1"], ["--share", "0.5"]):
        with pytest.raises(StellaError, match="was made"):
            runner.invoke(app, ["learn", str(home), sources[0], *given], catch_exceptions=False)
    shown = runner.invoke(app, ["learn", str(home), "--status"])
    assert shown.exit_code == 0 and "round 3 is in use" in shown.output
    assert "goes back to the state after a round; kept: 1, 2" in shown.output
    assert "→" in shown.output and max(map(len, shown.output.splitlines())) <= 80


def test_a_learner_stopped_in_its_first_round_names_no_model(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: Learner, *given: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Learner, "_prepared", stopped)
    values = ["model.preset=tiny", f"data.path={sources[0]}", "data.source=packed"]
    done = CliRunner().invoke(app, ["learn", str(tmp_path / "home"), sources[0], *values])
    assert done.exit_code == 143 and "no round is in use yet" in done.output and "round 0" not in done.output
    with pytest.raises(StellaError, match=r"home has learnt nothing yet; let it learn first: stella learn .*home SRC…"):
        stella.load(tmp_path / "home")
    dropped = CliRunner().invoke(app, ["learn", str(tmp_path / "home"), "--drop"])
    assert "round 1 is dropped: its clips count as seen; no round is in use yet" in dropped.output


@pytest.mark.parametrize("content", ["{", None])
def test_a_learner_whose_file_is_lost_says_how_to_get_it_back(
    three: Path, sources: list[str], tmp_path: Path, content: str | None
) -> None:
    home = copy(three, tmp_path / "home")
    file, text = home / "home.json", (home / "home.json").read_text()
    file.unlink() if content is None else file.write_text(content)
    remedy = f"home.json .*; restore it as it was after round 3: cp {home}/rounds/000003/learner.json {file}"
    with pytest.raises(StellaError, match=remedy):
        learn(home, sources, config_for(sources[0]), console=quiet())
    with pytest.raises(StellaError, match=remedy):
        CliRunner().invoke(app, ["learn", str(home), "--status"], catch_exceptions=False)
    shutil.copy(home / "rounds" / "000003" / "learner.json", file)
    assert file.read_text() == text and learn(home, sources, console=quiet()).rounds == []
    (home / "rounds" / "000003" / "learner.json").unlink()  # as of earlier versions
    file.unlink()
    with pytest.raises(StellaError, match=r"home.json is missing; restore it from a backup, or start a new learner in"):
        learn(home, sources, config_for(sources[0]), console=quiet())


def test_times_are_local_and_name_their_zone(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XYZ-5")  # five hours before Greenwich
    time.tzset()
    try:
        ended = datetime.fromisoformat(Home(three).history()[-1]["ended"]) + timedelta(hours=5)
        shown = CliRunner().invoke(app, ["learn", str(three), "--status"]).output
        assert "ended, XYZ" in shown and ended.strftime("%d %b %H:%M") in shown
        assert ended.strftime("%Y-%m-%d %H:%M XYZ") in render(Home(three))
    finally:
        monkeypatch.undo()
        time.tzset()


def test_what_chance_would_keep_counts_epochs() -> None:
    history = [{"clips": 10, "learnt": 10, "epochs": 1}, {"clips": 12, "learnt": 5, "epochs": 4}]
    assert by_chance(60, history) == [20, 40] and by_chance(0, [{"clips": 0, "epochs": 1}]) == [0]


def test_a_full_disk_loses_nothing(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says so and ends; --watch says so and waits until there is space."""
    more, home, watching, other = (
        packed(tmp_path / "more", (8,), first=3),
        *(copy(three, tmp_path / name) for name in ("home", "watching", "other")),
    )
    with small_disk(100_000), pytest.raises(StellaError, match="nothing is lost: free space and run the same command"):
        learn(home, more, console=quiet())
    assert Home(home).current == 3 and Home(home).next.plan.exists()
    learn(home, more, console=quiet())
    learn(other, more, console=quiet())
    assert Home(home).current == 4 and same(state(home), state(other))
    with ExitStack() as disk, (tmp_path / "said").open("w") as file:
        disk.enter_context(small_disk(100_000))
        waited: list[float] = []

        def wait(self: Session, seconds: float) -> None:
            waited.append(seconds)
            if len(waited) > 1:
                disk.close()

        monkeypatch.setattr(Session, "_wait", wait)
        when = Watch(clips=1, every=0, settle=0, idle=0)
        learn(watching, more, clips=8, watch=when, console=Console(file=file, width=300))
    assert waited[:2] == [PAUSE] * 2 and (tmp_path / "said").read_text().count("waiting: ") == 1
    assert len({item.id for plan in Home(watching).plans()[3:] for item in plan.train}) == Home(other).plan(4).clips
