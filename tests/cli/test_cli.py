"""The command line as a person meets it: what it writes, and how it refuses."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import stella as package
from stella.cli import app, main
from stella.data.scenes import Scenes
from stella.data.scenes.export import export
from stella.experiments import demo as stella_demo
from stella.files import read_json
from stella.media.decode import read_duration
from stella.model.cav import CAV, preset
from stella.model.weights import save

run = CliRunner()
HERE = str(Path(package.__file__).parents[1])


def test_help_names_every_command() -> None:
    shown = run.invoke(app, ["--help"]).output
    names = "scenes prepare pack look weights pretrain compare evaluate report methods demo"
    assert all(name in shown for name in names.split())
    assert all(name in run.invoke(app, ["scenes", "--help"]).output for name in ("preview", "audit", "render"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["scenes", "preview", "--task", "task9"], "task9"),
        (["scenes", "audit", "--size", "vast"], "choose one of scenes"),
        (["look", "nowhere"], "is not a folder"),
        (["prepare", "nowhere", "out"], "is not a folder"),
        (["pack", "out", "data.source=folder", "data.path=nowhere"], "is not a folder"),
        (["localise", __file__, "--out", "heat.avi"], "must end in .mp4"),
        (["pack", "out"], "say which clips: stella pack out data.source=folder"),
        (["pretrain", "data.source=packed", "data.path=nowhere"], "nowhere holds no packed clips"),
        (["weights", "none.safetensors"], "none.safetensors"),
        (["pretrain", "method=sella"], "did you mean stella?"),
        (["pretrain", "train.lrr=1"], "did you mean train.lr?"),
        (["pretrain", "--compile", "never"], "never"),
        (["bench", "--methods", ","], "nothing to measure"),
        (["bench", "--methods", "lore", "--batches", "2"], "lore"),
        (["bench", "--methods", "er", "--batches", "2", "--packed", "nowhere"], "nowhere holds no packed clips"),
        (["pretrain", "--resume", "nowhere"], "nowhere"),
        (["pretrain", "--resume", "nowhere", "--run", "here"], "--run here and --resume nowhere both name a run"),
        (
            ["compare", "--methods", "er,finetune", "args.beta=1"],
            "args.beta is a key of none of er, finetune; see stella methods NAME",
        ),
        (["compare", "--methods", "er,lore"], "error: unknown method 'lore'"),
        (["report", "."], "holds no run"),
        (["report", ".", "nowhere"], "nowhere is not a folder; give the folder of a run"),
        (["pretrain", "data.source=folder", "data.path=/no/such/folder"], "/no/such/folder is not a folder"),
        (["pretrain", "data.path=/no/such/folder"], "or set data.source to folder"),
        (["pretrain", "data.tasks=2"], "data.tasks must be a list such as a,b, not 2"),
        (["pretrain", "scene"], "no recipe is called 'scene': did you mean scenes?"),
        (["compare", "no.toml"], "no.toml cannot be read"),
        (["evaluate", "base-tiny", "tabel1"], "did you mean table1?"),
        (["reproduce", "table1", "--orders", "suffled", "data.clips=8"], "no order is called 'suffled'"),
        (["reproduce", "table1", "--from", "r.csv", "--only", "er", "--out", "x"], "leave --only, --out out"),
        (["pretrain", "data.source=folder"], "set data.path=FOLDER"),
        (["pretrain", "data.clips=0"], "data.clips=0 must be above 0"),
        (["pretrain", "model.preset=smal"], "did you mean 'small'? Otherwise choose one of tiny, small, base"),
        (["weights", "base-huge"], "weights that ship: base-small, base-tiny, base-wide"),
        (["scenes", "preview", "--clips", "1", "--out", "/proc/none"], "/proc/none"),
        (["scenes", "preview", "--split", "test"], "unknown split 'test' of scenes; choose one of train"),
        (["look", "VIDEOS", "--out", "sheet.xyz"], "--out sheet.xyz must end in .png"),
        (["scenes", "render", "/proc/none", "--clips", "1"], "/proc/none"),
        (["pretrain", "VIDEOS"], "VIDEOS is a folder, not a recipe; take its videos with data.source=folder"),
        (["transfer", "classify", "base-tiny", "./VIDEOS"], "./VIDEOS is a folder, not a recipe"),
        (
            ["transfer", "events", "base-tiny", "data.source=folder", "data.path=VIDEOS"],
            "has no ground truth for events",
        ),
        (["learn", "HOME", "VIDEOS"], "VIDEOS holds no videos"),
        (["learn", "HOME", "VIDEOS", "--every", "5"], "--every 5 must be a number and a unit"),
        (["learn", "HOME", "VIDEOS", "--every", "1.2.3s"], "--every 1.2.3s must be a number and a unit"),
    ],
)
def test_an_error_is_one_sentence_and_status_2(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "VIDEOS").mkdir()  # and empty
    monkeypatch.setattr(sys, "argv", ["stella", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert shown.startswith("error: ") and said in shown and shown.count("\n") == 1
    assert not list(tmp_path.rglob("lock")) and not (tmp_path / "HOME").exists()


def test_help_needs_no_heavy_imports() -> None:
    """A help page appears at once: no command needs torch, numpy or matplotlib to describe itself."""
    script = """
import sys
from typer.testing import CliRunner
import stella as package
from stella.cli import app, main
for args in (["-h"], ["--help"], ["compare", "-h"], ["scenes", "audit", "-h"]):
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0 and "Usage" in done.output, done.output
print([name for name in ("torch", "numpy", "matplotlib", "av") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_every_command_and_option_has_a_sentence_of_help() -> None:
    for name, command in commands(get_command(app)):
        assert command.help and command.help.split("\n")[0].endswith("."), name
        for parameter in command.params:
            assert parameter.help and len(parameter.help.split()) > 2, (name, parameter.name)


def test_the_default_that_help_shows_is_the_one_that_counts() -> None:
    """Words stand for a default only where there is no value to show."""
    for name, command in commands(get_command(app)):
        for parameter in command.params:
            worded = isinstance(getattr(parameter, "show_default", None), str)
            assert not worded or parameter.default in (None, ""), (name, parameter.name, parameter.default)


def test_a_wheel_has_every_file_of_the_package() -> None:
    """Recipes, weights and whatever else is no Python file."""
    root = Path(HERE)
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["stella"]
    packaged = {path for pattern in patterns for path in (root / "stella").glob(pattern)}
    files = {path for path in (root / "stella").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert len(files) > 15 and files <= packaged, files - packaged


def test_recipes_are_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ("data.tasks=['task1']", "data.clips=8", "data.eval_clips=4", "stream.batch_size=8", "stream.epochs=1")
    for folder in ("pretrain", "pretrain-2"):  # a run without --run takes a new one
        done = run.invoke(app, ["pretrain", "scenes", "method=finetune", "train.device=cpu", *tiny])
        assert done.exit_code == 0 and done.output.startswith(f"new run in runs/{folder}\n"), done.output
        assert (tmp_path / "runs" / folder / "model.safetensors").exists()
        assert read_json(tmp_path / "runs" / folder / "config.json")["train"]["lr"] == 5e-4
    again = run.invoke(app, ["pretrain", "scenes", "--run", "runs/pretrain"])
    assert "runs/pretrain holds a finished run; give this one another folder" in str(again.exception)
    shown = run.invoke(app, ["evaluate", "base-tiny", "scenes", "data.eval_clips=4", "train.device=cpu"])
    assert shown.exit_code == 0 and "in a gallery of 24 clips" in shown.output, shown.output


def test_config_shows_what_a_recipe_sets_and_inherits(tmp_path: Path) -> None:
    shown = run.invoke(app, ["config", "scenes"]).output.splitlines()
    assert shown[0].endswith("scenes.toml") and shown[1].startswith("Continual pre-training on scenes")
    assert {"  model.weights=base-tiny", "  memory.bytes=71939200", "  stream.augment=false"} <= set(shown)
    (tmp_path / "own.toml").write_text('# Mine.\nlike = "scenes"\n[memory]\nclips = 9\n[data]\ntasks = ["a", "b"]\n')
    own = run.invoke(app, ["config", str(tmp_path / "own.toml")]).output.splitlines()
    assert own[1] == "Mine." and {"  memory.clips=9", "  memory.bytes=none", "  data.tasks=a,b"} < set(own)
    table = run.invoke(app, ["config", "table1"]).output.splitlines()
    assert "variant gmed: method=gmed memory.clips=204 memory.bytes=none" in table


def test_the_version_is_told() -> None:
    assert re.fullmatch(r"stella \d+\.\d+\.\d+(, commit \w+)?, torch [\w.+]+\n", run.invoke(app, ["--version"]).output)


def test_brackets_in_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """They are no markup, in an error and in what a command prints."""
    command = [sys.executable, "-m", "stella", "look", "[red]lost[/]"]
    failed = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": HERE}
    )
    assert failed.returncode == 2 and "[red]lost[/]" in failed.stderr and "Traceback" not in failed.stderr
    out = tmp_path / "[red]found"
    assert run.invoke(app, ["scenes", "render", str(out), "--clips", "1"]).output.endswith(f"1 clip in {out}\n")
    done = run.invoke(app, ["look", str(out), "--out", str(tmp_path / "[bold]a.png")])
    assert f"{tmp_path / '[bold]a.png'}  1 of 1 clip shown" in done.output


def test_preview_writes_a_sheet_and_a_film(tmp_path: Path) -> None:
    result = run.invoke(app, ["scenes", "preview", "--out", str(tmp_path), "--clips", "2"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "scenes-task1.png").read_bytes().startswith(b"\x89PNG")
    assert read_duration(tmp_path / "scenes-task1.mp4") == pytest.approx(2 * 2.56, abs=0.1)


def test_audit_prints_every_gallery() -> None:
    shown = run.invoke(app, ["scenes", "audit", "--clips", "10"]).output
    assert all(word in shown for word in ("task1", "task6", "mixed", "base", "wide-36000", "timing", "class"))


def test_own_videos_end_to_end(tmp_path: Path) -> None:
    """Render files, look at them, prepare them, look at the shards: a broken file is named, not fatal."""
    videos, shards = tmp_path / "videos", tmp_path / "shards"
    assert run.invoke(app, ["scenes", "render", str(videos), "--clips", "3"]).exit_code == 0
    (videos / "broken.mp4").write_text("not a video")
    looked = run.invoke(app, ["look", str(videos), "--out", str(tmp_path / "a.png")])
    assert looked.exit_code == 0 and "broken.mp4" in looked.output and (tmp_path / "a.png").exists()
    done = run.invoke(app, ["prepare", str(videos), str(shards), "--seconds", "2.56", "--workers", "1"])
    assert done.exit_code == 0 and "3 clips" in done.output and "1 not a media file" in done.output
    looked = run.invoke(app, ["look", str(shards), "--out", str(tmp_path / "b.png")])
    assert looked.exit_code == 0 and "3 of 3" in looked.output


def test_rendering_again_adds_nothing(tmp_path: Path) -> None:
    scenes = Scenes("task1", "train", 1)
    first = [path.stat().st_mtime_ns for path in export(scenes, tmp_path)]
    assert [path.stat().st_mtime_ns for path in export(scenes, tmp_path)] == first


def test_weights_tells_what_a_file_is(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", CAV(preset("tiny")), extra={"recipe": "none", "scores": {"A": 1.5}})
    shown = run.invoke(app, ["weights", str(tmp_path / "m.safetensors")]).output
    rows = {line.split("  ")[0].strip(): line for line in shown.splitlines()}
    assert rows["format"].split()[-1] == "stella" and "no" in rows["matching module"]
    assert "image_size=96" in rows["sizes"] and "none" in rows["recipe"] and rows["scores"].split()[-1] == "A=1.5"


def test_weights_tells_of_a_configuration_what_is_not_usual() -> None:
    shown = run.invoke(app, ["weights", "base-tiny"]).output
    assert "train.lr=0.001" in shown and "beta2" not in shown and "{" not in shown


SHORT = (
    *("data.clips=8", "data.eval_clips=6", "data.tasks=['task1','task2']", "stream.batch_size=8"),
    *("stream.augment=false", "memory.clips=8", "model.weights=base-tiny", "evaluate.batch=12"),
)


def test_pretrain_resume_evaluate_report(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    done = run.invoke(app, ["pretrain", "method=stella", *SHORT, "--run", one])
    assert done.exit_code == 0 and "after task2 (2 of 2)" in done.output, done.output
    last = done.output.splitlines()[-1]
    assert last.startswith("A ") and "class alone" in last and last.endswith(f"weights and metrics in {one}")
    again = run.invoke(app, ["pretrain", "--resume", one])
    assert again.exit_code == 0 and last == again.output.splitlines()[-1]
    (tmp_path / "other.toml").write_text("[train]\nlr = 0.5\n")
    other = run.invoke(app, ["pretrain", str(tmp_path / "other.toml"), "--resume", one])
    assert other.exit_code and "train.lr was 0.0001 and is now 0.5" in str(other.exception)
    other = run.invoke(app, ["pretrain", "method=finetune", *SHORT, "--run", two])
    no_memory = "without effect: memory.clips=8, since finetune has no rehearsal memory"
    assert other.exit_code == 0 and no_memory in other.output and "without effect" not in done.output
    measured = run.invoke(app, ["evaluate", one])
    assert measured.exit_code == 0 and "in a gallery of 12 clips" in measured.output and "class" in measured.output
    mean = next(line for line in measured.output.splitlines() if line.split()[:1] == ["all"]).split()[-1]
    assert last.startswith(f"A {mean}, F ")
    with (tmp_path / "one" / "metrics.jsonl").open("r+") as metrics:
        text = metrics.read()
        metrics.truncate(text[:-1].rindex("\n") + 1)  # without its end
    unfinished = run.invoke(app, ["evaluate", one])
    assert f"continue it with stella pretrain --resume {one}" in str(unfinished.exception)
    (tmp_path / "one" / "metrics.jsonl").write_text(text)
    page = tmp_path / "page.html"
    shown = run.invoke(app, ["report", str(tmp_path), "--out", str(page)])
    assert shown.exit_code == 0 and "STELLA" in shown.output and "Finetune" in shown.output
    assert "<html" in page.read_text() and "http://" not in page.read_text().replace("http://www.w3.org", "")
    beside = run.invoke(app, ["report", two, one])
    assert beside.exit_code == 0 and beside.output.endswith(f"{two}/report.html\n"), beside.output
    assert "<html" in (tmp_path / "two" / "report.html").read_text()


def test_evaluate_says_what_it_skips(tmp_path: Path) -> None:
    first, *_ = export(Scenes("task1", "eval", 6), tmp_path)
    first.with_name("broken.mp4").write_text("not a video")
    data = ("data.source=folder", f"data.path={tmp_path}", f"data.eval_path={tmp_path}")
    sizes = ("data.pixels=96", "data.duration=2.56", "data.span=none", "stream.most_bad=0.5")
    shown = run.invoke(app, ["evaluate", "base-tiny", *data, *sizes])
    text = " ".join(shown.output.split())
    assert "in a gallery of 6 clips" in text and "skipped: 1 not a media file" in text, shown.output


def test_shipped_weights_know_something_already() -> None:
    """Above chance on the tasks, and far above it on the base classes they were trained on."""
    shown = run.invoke(app, ["evaluate", "base-tiny", "data.tasks=['base']", "data.eval_clips=48", "evaluate.batch=48"])
    assert shown.exit_code == 0, shown.output
    mean = float(next(line for line in shown.output.splitlines() if line.split()[:1] == ["base"]).split()[-1])
    assert mean > 80, shown.output  # of 48 clips, where chance is 11


def test_the_demo_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        'like = "demo"\n[data]\ntasks = ["task1", "task2"]\nclips = 12\neval_clips = 6\n[stream]\nepochs = 1\n'
    )
    monkeypatch.setattr(stella_demo, "RECIPE", str(recipe))
    monkeypatch.setattr(stella_demo, "FILMS", 1)
    monkeypatch.setattr(stella_demo, "SHOWN", 1)
    done = run.invoke(app, ["demo", "--out", str(tmp_path / "demo")])
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in ("Finetune", "DER++", "STELLA+", "class alone", "report.html"))
    assert "A of each task: DER++, seed 0" in " ".join(done.output.split())
    text = " ".join(done.output.split())
    assert "Below the line: what guessing, perfect knowledge of one cue alone," in text
    assert "DER++ before the first task: step 0, A " in text and "DER++ after task1 (1 of 2): step 1, A " in text
    assert text.count("(A: mean of R@1/5/10 over all tasks in %)") == 3 and "mean recall" not in text
    assert "These runs stay below what knowing the class" in text
    assert "derpp" not in text.replace("demo/derpp", "")
    assert text.count("the sound of ") == 3 and text.count(" of 6 (") == 3
    for command in ("stella index VIDEOS INDEX --model", "stella search INDEX", "stella localise VIDEO.mp4 --model"):
        assert command in text
    folder = tmp_path / "demo"
    assert (folder / "report.html").read_text().count("What its sounds find") == 3
    assert all("<video" in (folder / f"found-{number}.html").read_text() for number in (1, 2, 3))
    for number, rank in enumerate(re.findall(r"its own film (?:comes first|is number (\d))", text), 1):
        cards = (folder / f"found-{number}.html").read_text().split("<li")[1:]
        assert len(cards) == int(rank or 1) and ["own file" in card for card in cards].index(True) == len(cards) - 1
    page = (folder / "report.html").read_text()
    assert all(f'<a href="{name}">' in page for name in ("found-1.html", "found-2.html", "found-3.html", "heat.mp4"))
    assert (folder / "heat.mp4").stat().st_size > 10_000
