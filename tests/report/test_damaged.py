"""`stella report` on damaged run folders: each is told and left out, and the others are shown."""

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from helpers.run_files import write_run
from typer.testing import CliRunner

from stella.cli import app
from stella.report import plots


def change(name: str, edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Edit a JSON file, or all evaluations of the metrics."""

    def apply(run: Path) -> None:
        path = run / name
        if name == "config.json":
            path.write_text(json.dumps(edit(json.loads(path.read_text()))))
            return
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(edit(x) if x["kind"] == "evaluation" else x) + "\n" for x in lines))

    return apply


def put(name: str, text: str | bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(text if isinstance(text, bytes) else text.encode()) and None


def folder(name: str) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return apply


DAMAGED: dict[str, Callable[[Path], None]] = {
    "empty config": put("config.json", ""),
    "half a config": put("config.json", '{"seed": '),
    "a list as config": put("config.json", "[]"),
    "a number as config": put("config.json", "5"),
    "null as config": put("config.json", "null"),
    "deep config": put("config.json", '{"a":' * 5000),
    "bytes as config": put("config.json", b"\xff\xfe\x00"),
    "a folder as config": folder("config.json"),
    "a word as seed": change("config.json", lambda c: c | {"seed": "x"}),
    "a list as seed": change("config.json", lambda c: c | {"seed": []}),
    "a list as environment": put("environment.json", "[]"),
    "half an environment": put("environment.json", "{"),
    "a word as threads": put("environment.json", '{"threads": "x"}'),
    "bytes as metrics": put("metrics.jsonl", b"\xff\xfe\n"),
    "a number as a line": put("metrics.jsonl", "5\n"),
    "a folder as metrics": folder("metrics.jsonl"),
    "no task": change("metrics.jsonl", lambda x: {k: v for k, v in x.items() if k != "task"}),
    "a word as task": change("metrics.jsonl", lambda x: x | {"task": "x"}),
    "no recall": change("metrics.jsonl", lambda x: {k: v for k, v in x.items() if k != "recall"}),
    "words as recall": change("metrics.jsonl", lambda x: x | {"recall": {"a2v": {"1": ["x"]}, "v2a": {"1": ["x"]}}}),
    "a number as tasks": change("metrics.jsonl", lambda x: x | {"tasks": 4}),
    "too few recalls": change(
        "metrics.jsonl", lambda x: x | {"recall": {"a2v": {"1": [1.0]}, "v2a": {"1": [1.0, 2.0]}}}
    ),
    "a word as speed": put("speed.jsonl", '{"kind": "step", "clips_per_second": "x"}\n'),
    "a list as skipped": put("skipped.jsonl", "[]\n"),
    "skipped without an id": put("skipped.jsonl", '{"reason": "x"}\n'),
    "a folder as skipped": folder("skipped.jsonl"),
}


def test_each_damaged_folder_is_told_and_the_others_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [wraps(draw)(lambda _: None) for draw in plots.PANELS]  # plots take a second a page
    monkeypatch.setattr(plots, "PANELS", quick)
    for seed in range(2):
        write_run(tmp_path / "runs" / f"good{seed}", "er", seed)
    for name, spoil in DAMAGED.items():
        run = write_run(tmp_path / "runs" / name, "stella")
        spoil(run)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    shown = (tmp_path / "page.html").read_text()
    for name in DAMAGED:
        assert (f"{name} is damaged" in said or f"{name}/" in said) != (f">{name}<" in shown), name
    assert ">good0<" in shown and ">good1<" in shown and said.count("left out:") >= 20


def test_nothing_but_damaged_folders_is_an_error(tmp_path: Path) -> None:
    put("metrics.jsonl", "5\n")(write_run(tmp_path / "run"))
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert "none of these runs can be shown" in str(done.exception) and not (tmp_path / "page.html").exists()
