"""Commands under torchrun: all processes work and one speaks."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CPU = ("train.device=cpu", "stream.batch_size=4")
TINY = ("data.tasks=['task1']", "data.clips=8", "data.eval_clips=6", "stream.epochs=1", *CPU)


def stella(*words: str, processes: int = 2) -> tuple[int, str]:
    """Status and output; with one process, without torchrun."""
    how = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "--"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", *(how if processes > 1 else []), "stella", *words]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_run_and_its_evaluation(tmp_path: Path) -> None:
    """Evaluated by two processes as by one; the method has a matching module."""
    run = str(tmp_path / "run")
    status, said = stella("pretrain", "scenes", "method=stella", *TINY, "--run", run)
    assert status == 0 and said.count("after task1 (1 of 1)") == said.count(f"weights and metrics in {run}") == 1, said
    status, said = stella("pretrain", "--resume", run)
    assert status == 0 and said.count("is finished") == said.count(f"weights and metrics in {run}") == 1, said
    tables = []
    for count in (1, 2):
        status, said = stella("evaluate", run, "train.device=cpu", processes=count)
        assert status == 0 and said.count("evaluating") == 1, said
        tables.append([line.split() for line in said.split("evaluating")[1].splitlines() if re.search(r"\d", line)])
    assert tables[0] == tables[1] and len(tables[0]) > 3


@pytest.mark.slow
def test_bench(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    sizes = ("--batches", "4", "--methods", "finetune,er", "--steps", "2", *CPU[:1], "memory.clips=20")
    status, said = stella("bench", *sizes, "--out", str(out))
    assert status == 0 and said.count("clips/s, ") == 2 and said.count("One training step") == 1, said
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["batch"]) for row in rows] == [
        ("finetune in 2 processes", "4"),
        ("er in 2 processes", "4"),
    ]
    for row in rows:
        assert float(row["clips_per_second"]) == pytest.approx(4e3 / float(row["ms"]), rel=1e-2)
    status, said = stella("bench", *sizes, "--profile")
    assert status and said.count("--profile looks at one process") == 1, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("pretrain", "scenes", "methd=er"), "unknown key methd"),  # before the processes know of one another
        (("pretrain", "scenes", *TINY, "method=sella"), "sella"),  # when they do
        (("evaluate", "nowhere"), "nowhere"),
        (("methods",), "torchrun has started stella methods 2 times"),
    ],
)
def test_an_error_is_said_once(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    status, said = stella(*words, *(["--run", str(tmp_path / "run")] if words[0] == "pretrain" else []))
    assert status and said.count("error: ") == 1, said
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert sentence in line
