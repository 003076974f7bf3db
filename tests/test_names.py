"""Names are bytes of somebody else: in any encoding, with markup, escapes and newlines. All commands take them."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
from helpers.media_files import CLIPS
from helpers.noise import Noise
from helpers.small import quick, use_tasks
from rich.console import Console

from stella.cli import main
from stella.cli.data import look
from stella.data import workers
from stella.data.folder import Folder, FolderConfig
from stella.data.pack import pack
from stella.data.packed import Packed
from stella.data.prepare import prepare
from stella.data.shards import Shards
from stella.data.skipped import Skipped
from stella.errors import ClipError, plain
from stella.files import read_json, write_json
from stella.media.decode import Plan
from stella.report.page import write_page
from stella.report.tables import accuracy_table, recall_table, results_table
from stella.runs.loop import pretrain
from stella.runs.record import group, read_run

ODD = [b"caf\xe9.mpg", b"\x1b[31mred\x1b[0m.mpg", b"two\nlines.mpg", b"[bold] [red].mpg", "日本 🎥.mpg".encode()]
ODD += [rb"$\frac.mpg", b"cr\rlf.mpg", b"rtl\xe2\x80\xaegpm.mpg"]
NAMES = [os.fsdecode(name) for name in ODD]
FEW = [NAMES[0], NAMES[2], NAMES[5]]


@pytest.fixture
def videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real clip under odd names, in a folder with an odd name, and one that cannot be used."""
    monkeypatch.setattr(workers, "START_METHOD", "fork")
    root = tmp_path / os.fsdecode(b"src[bold]\xff")
    root.mkdir()
    for name in FEW:
        (root / name).symlink_to(CLIPS / "bbaf2n.mpg")
    (root / os.fsdecode(b"bad\xe9\n\x1b[2J.mpg")).write_text("hello")
    return root


def safe(text: str) -> bool:
    """Whether a terminal or a log takes it as lines of text."""
    return all(c.isprintable() or c in "\n" for c in text)


def test_plain_keeps_scripts_and_spells_out_the_rest() -> None:
    assert plain("日本 🎥 é [/day] می\u200cخواهم") == "日本 🎥 é [/day] می\u200cخواهم"
    assert plain("a\x1b[2Jb\nc\rd\udce9\u202e\x9b") == r"a\x1b[2Jb\nc\rd\udce9\u202e\x9b"
    assert safe(str(ClipError("a\n\x1b", "reason", "remedy")))


def test_names_survive_files(tmp_path: Path) -> None:
    tree = {"names": NAMES}
    write_json(tmp_path / "a.json", tree)
    assert read_json(tmp_path / "a.json") == tree
    skipped = Skipped(tmp_path / "skipped.jsonl")
    for name in NAMES:
        skipped.add(name, ClipError(name, "reason", "remedy"))
    lines = (tmp_path / "skipped.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in lines] == NAMES == list(Skipped(tmp_path / "skipped.jsonl").records)
    assert json.loads(lines[0])["path"] == NAMES[0]


def test_every_command_takes_them(videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    look(videos, tmp_path / "look.png", clips=20)
    assert "look.png" in (said := capsys.readouterr().out) and "not a media file" in said and safe(said)
    dst = tmp_path / os.fsdecode(b"dst\xfe[bold]")
    summary = prepare(videos, dst, seconds=1.0, size=32, workers=1, progress=False)
    assert (summary.clips, summary.skipped) == (len(FEW), {"not a media file": 1})
    shards = Shards(dst, frames=2)
    assert sorted(shards[i].id for i in range(len(shards))) == sorted(FEW)
    assert prepare(videos, dst, seconds=1.0, size=32, workers=1, progress=False).added == 0
    out = tmp_path / os.fsdecode(b"packed\xfd")
    folder = Folder(videos, Plan(0, 1.0, 2, 36))
    assert pack(folder, out, pixels=32, spec_frames=64, workers=0, progress=False).clips == len(FEW)
    assert sorted(Packed(out).header.ids) == sorted(FEW)
    assert len(FolderConfig(path=str(videos)).open()) == len(FEW) + 1


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_with_odd_names_finishes_and_is_reported(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [os.fsdecode(b"[/day]"), os.fsdecode(b"\x1b[2Jnight\xe9\n$x$")]
    use_tasks(monkeypatch, [(name, Noise(number, 10)) for number, name in enumerate(tasks)])
    run = tmp_path / os.fsdecode(b"exp[/2]\xe9\n")
    said = io.TextIOWrapper(io.BytesIO(), "utf-8")
    console = Console(file=said, force_terminal=terminal, width=150, color_system=None)
    assert pretrain(quick("finetune"), run, console=console).finished
    record = read_run(run)
    assert record.tasks == [plain(name) for name in tasks]
    table = {"tasks": tasks, "recall": record.evaluations[-1]["recall"], "clips": [10, 10], "skipped": {"[/x]": 1}}
    for each in (results_table(group([record])), accuracy_table(record), recall_table(table)):
        console.print(each)
    said.flush()
    text = said.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "[/day]" in text and r"\x1b[2Jnight\udce9\n$x$" in text and "[2Jnight" not in text.replace(r"\x1b[2J", "")
    if not terminal:
        page = write_page([run], tmp_path / "page.html")
        assert "[/day]" in page.read_text(encoding="utf-8")


def test_errors_about_odd_names_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["stella", "look", str(tmp_path / os.fsdecode(b"no\xe9\n\x1b[31mne[bold]"))])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and r"no\udce9\n\x1b[31mne[bold] is not a folder" in said
