"""What `stella bench` measures: rows that hold together, and a CSV one can get them again from."""

import csv
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small
from rich.console import Console
from typer.testing import CliRunner

from stella.bench import measure as measure_module
from stella.bench import profile as profile_module
from stella.bench import turns as turns_module
from stella.bench.measure import bench_configs, measure
from stella.bench.profile import Operator, profile_all
from stella.bench.rows import COLUMNS, Row, rows_table, write_rows
from stella.bench.steps import make_trainer, settle_draws
from stella.bench.turns import one_after_the_other
from stella.cli import app
from stella.config import resolve
from stella.data.pack import pack
from stella.data.scenes import Scenes
from stella.errors import ConfigError, StellaError
from stella.runs.config import RunConfig, model_config
from stella.runs.environment import environment
from stella.train.device import runtime

ROOT = str(Path(__file__).parents[2])
SIZES = (*small.SIZES, "memory.clips=30", "train.device=cpu")


def row(method: str) -> Row:
    return measure(resolve(RunConfig, None, [*SIZES, f"method={method}", "stream.batch_size=4"]), steps=3)


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {name: row(name) for name in ("finetune", "derpp", "stella")}


def test_figures_of_a_row_belong_together(rows: dict[str, Row]) -> None:
    for name, each in rows.items():
        assert (each.method, each.batch, each.host_syncs) == (name, 4, 0)
        assert each.clips_per_second == pytest.approx(4e3 / each.ms)
        assert each.tflops == pytest.approx(4 * each.gflop_per_clip / each.ms)
        assert 0 < each.ms <= each.ms_p90 and each.peak_gib > 0 < each.share


def test_work_is_counted_as_it_is_done(rows: dict[str, Row]) -> None:
    """DER++ has twice the clips; STELLA trains on half their patches but scores the current ones first."""
    assert rows["derpp"].gflop_per_clip == pytest.approx(2 * rows["finetune"].gflop_per_clip, rel=0.05)
    assert rows["stella"].gflop_per_clip > rows["finetune"].gflop_per_clip


def test_batches_that_are_accumulated_count_and_a_slow_step_does_not(
    rows: dict[str, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median: 8 clips in the usual 2 ms."""
    monkeypatch.setattr(measure_module, "step_times", lambda *_: [2.0, 2.0, 99.0])
    values = [*SIZES, "method=finetune", "stream.batch_size=4", "train.accumulate=2"]
    twice = measure(resolve(RunConfig, None, values), steps=3)
    assert (twice.clips_per_second, twice.ms, twice.ms_p90) == (4000, 2, 99)
    assert twice.gflop_per_clip == pytest.approx(rows["finetune"].gflop_per_clip)


def test_a_profile_lists_operators_and_writes_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Operator] = []

    def here(function: Callable[..., list[Operator]], jobs: Mapping[str, Any], processes: int) -> Iterator[Any]:
        for name, job in jobs.items():
            found.extend(function(*job))
            yield name, found

    monkeypatch.setattr(profile_module, "one_after_the_other", here)
    config = resolve(RunConfig, None, [*SIZES, "method=er", "stream.batch_size=4"])
    console = Console(width=100, record=True, file=io.StringIO())
    profile_all({"er, [red]batch 4[/]": config}, tmp_path / "traces", None, console)
    assert [each.ms for each in found] == sorted((each.ms for each in found), reverse=True)
    assert sum(each.share for each in found) == pytest.approx(1) and found[0].calls > 0
    assert any("mm" in each.name for each in found[:10])
    [trace] = (tmp_path / "traces").iterdir()
    assert trace.name == "er-red-batch-4-.json.gz"
    with gzip.open(trace) as file:
        assert any("mm" in event.get("name", "") for event in json.load(file)["traceEvents"])
    shown = " ".join(console.export_text().split())
    assert found[0].name in shown and "Where the time of a step goes: er, [red]batch 4[/]" in shown


def test_rows_are_appended_with_what_made_them(rows: dict[str, Row], tmp_path: Path) -> None:
    path, facts = tmp_path / "speed" / "rows.csv", environment(runtime("cpu"))
    write_rows(path, [rows["derpp"], rows["finetune"]], "first", facts)
    write_rows(path, [rows["stella"], replace(rows["stella"], feed="packed")], "second", facts)
    with path.open() as file:
        found = list(csv.DictReader(file))
    assert [(each["method"], each["feed"], each["command"]) for each in found] == [
        ("derpp", "synthetic", "first"),
        ("finetune", "synthetic", "first"),
        ("stella", "synthetic", "second"),
        ("stella", "packed", "second"),
    ]
    assert found[0]["torch"] == torch.__version__


def test_rows_are_not_put_below_other_columns(rows: dict[str, Row], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(StellaError, match="no column name; choose another file"):
        write_rows(path, [rows["finetune"]], "first", environment(runtime("cpu")))
    assert path.read_text() == "a,b\n1,2\n"
    path.write_text("")  # as mktemp leaves it
    write_rows(path, [rows["finetune"]], "first", environment(runtime("cpu")))
    assert path.read_text().startswith("name,")


def test_rows_are_appended_to_a_file_that_has_more_columns(rows: dict[str, Row], tmp_path: Path) -> None:
    """Files of earlier versions have a column `stages`."""
    path, header = tmp_path / "rows.csv", [*COLUMNS[:5], "stages", *COLUMNS[5:]]
    path.write_text(",".join(header) + "\n")
    write_rows(path, [rows["finetune"]], "first", environment(runtime("cpu")))
    [line] = csv.DictReader(path.open())
    assert list(line) == header and (line["stages"], line["command"], line["batch"]) == ("", "first", "4")


@pytest.mark.parametrize("candidates", [1, 9])
def test_what_is_measured_draws_all_it_asks_for(candidates: int) -> None:
    values = [*SIZES, "method=mir", "stream.batch_size=3", "memory.clips=60", f"args.candidates={candidates}"]
    trainer = make_trainer(resolve(RunConfig, None, values))
    settle_draws(trainer)
    assert trainer.method.memory.drawable == 3 * candidates == trainer.counters.clips
    settle_draws(trainer)
    assert trainer.counters.clips == 3 * candidates


def test_nothing_is_measured_where_no_step_is_taken() -> None:
    trainer = make_trainer(resolve(RunConfig, None, [*SIZES, "method=er", "stream.batch_size=3", "memory.clips=60"]))
    for p in trainer.method.model.parameters():
        p.data.fill_(torch.nan)
    with pytest.raises(StellaError, match="no step has a finite loss"):
        settle_draws(trainer)


def test_ratios_are_to_the_first_row_of_the_same_batch(rows: dict[str, Row]) -> None:
    half = replace(rows["derpp"], clips_per_second=rows["finetune"].clips_per_second / 2)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(rows_table([rows["finetune"], half, replace(half, batch=9)], "model tiny"))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert [line[3] for line in lines if len(line) == 10 and line[3][0].isdigit()] == ["1.00", "0.50", "1.00"]


def test_the_table_of_a_benchmark_fits_80_columns(rows: dict[str, Row]) -> None:
    """With figures as large as those of the paper's sizes."""
    row = replace(rows["stella"], name="stella_plus", batch=48, share=1.0, host_syncs=12)
    row = replace(row, clips_per_second=512.34, ms=1234.56, peak_gib=49.45, gflop_per_clip=408.123, tflops=512.3)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rows_table([row], "model tiny, float32, CPU with 2 cores"))
    text = console.export_text()
    assert "synthetic clips: model tiny, float32, CPU with 2 cores" in " ".join(text.split())
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert {"stella_plus", "48", "512.3", "1234.6", "49.45", "408", "512", "100%", "12"} <= {*text.split()}


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row in a process of its own, from packed clips; one that fails is told."""
    out, clips, profiled = tmp_path / "rows.csv", tmp_path / "clips", list[str]()
    monkeypatch.setattr(profile_module, "profile_all", lambda configs, *_: profiled.extend(configs))
    pack(Scenes("task1", "train", 12), clips, pixels=32, spec_frames=64, size=32, workers=1, progress=False)
    feed = ["--packed", str(clips), "--out", str(out), "--profile"]
    values = ["bench", *SIZES, "model.preset=tiny", "--methods", "er", "--batches", "5,48,5", "--steps", "2", *feed]
    done = CliRunner().invoke(app, values, catch_exceptions=False)
    assert done.exit_code == 1 and "er, batch 5:" in done.output
    assert "packed clips: model tiny, float32, CPU with" in " ".join(done.output.split())
    assert "er, batch 48 failed:" in done.output and "has 12 clips, fewer than a batch of 48" in done.output
    assert [(line["batch"], line["feed"]) for line in csv.DictReader(out.open())] == [("5", "packed")]
    assert profiled == ["er, batch 5", "er, batch 48"]
    with pytest.raises(ConfigError, match=r"other sizes than the model's; set model.image_size=32 model.spec"):
        make_trainer(resolve(RunConfig, None, [*SIZES, "model.image_size=48"]), clips)


def _alone_for_a_while(name: str, alone: AbstractContextManager[None]) -> tuple[float, float]:
    if name == "fails":
        raise ValueError(name)
    with alone:
        began = time.monotonic()
        time.sleep(0.3)
        return began, time.monotonic()


def test_processes_that_start_together_measure_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of them fails before its turn: the others do not wait for it."""
    monkeypatch.setattr(turns_module, "get_context", lambda _: get_context("fork"))  # quicker to start
    jobs = {name: (name,) for name in ("one", "fails", "two")}
    found = dict(one_after_the_other(_alone_for_a_while, jobs, processes=3))
    assert list(found) == list(jobs) and isinstance(found.pop("fails"), ValueError)
    spans = sorted(span for span in found.values() if isinstance(span, tuple))
    assert len(spans) == 2 and all(end <= begin for (_, end), (begin, _) in pairwise(spans))


MEASURING = """
import time
from stella.bench.turns import one_after_the_other

def wait(alone):
    print("measuring", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    list(one_after_the_other(wait, {"one": ()}, 1))
"""


def test_a_stop_while_steps_are_measured_is_quiet(tmp_path: Path) -> None:
    (file := tmp_path / "measuring.py").write_text(MEASURING)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(file)], env=os.environ | {"PYTHONPATH": ROOT}, **pipes) as run:
        assert run.stdout is not None and run.stdout.readline() == "measuring\n"
        run.terminate()
        assert run.communicate(timeout=30) == ("", "")  # no semaphores have leaked
    assert run.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("preset", "value", "pixels", "frames"),
    [
        ("small", "data.clips=400", 96, 256),
        ("small", "data.size=scenes-full", 224, 1024),
        ("base", "data.clips=400", 224, 1024),
    ],
)
def test_inputs_have_the_sizes_of_the_preset_or_of_the_data(preset: str, value: str, pixels: int, frames: int) -> None:
    config = bench_configs(["er"], [4], [f"model.preset={preset}", "memory.clips=8", value])["er, batch 4"]
    sizes = model_config(config)
    assert (sizes.image_size, sizes.spec_frames, config.stream.batch_size) == (pixels, frames, 4)
