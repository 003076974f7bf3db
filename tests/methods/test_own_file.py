"""A method in a file of one's own, `method=FILE.py:CLASS`, and the hook between backward and step."""

import io
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.small import quick, same, use_tasks
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from stella.cli import app
from stella.config import build
from stella.errors import ConfigError, StellaError
from stella.experiments.recipe import runs
from stella.methods import find
from stella.methods.finetune import Finetune
from stella.runs.build import build_method
from stella.runs.config import settle
from stella.runs.loop import pretrain, resume
from stella.runs.record import read_run

QUIET = Console(file=io.StringIO())
DOCS = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_example_of_the_docs_runs_from_its_own_file_and_resumes_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tasks(monkeypatch)
    example = next(code for code in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if "LateReplay" in code)
    (tmp_path / "mine.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    result = pretrain(quick("mine.py:LateReplay", "args.half_life=3.0"), tmp_path / "run", console=QUIET)
    assert result.finished and read_run(tmp_path / "run").title == "Late replay"
    monkeypatch.chdir("/")
    assert resume(tmp_path / "run", console=QUIET).finished
    assert (tmp_path / "run" / "method.py").read_text() == example
    (tmp_path / "mine.py").write_text(example.replace("0.5", "0.9"))
    with pytest.raises(StellaError, match=r"was started with another version of .*mine\.py, which is .*method\.py"):
        resume(tmp_path / "run", console=QUIET)
    (tmp_path / "mine.py").write_text(example)
    shown = CliRunner().invoke(app, ["methods", f"{tmp_path / 'mine.py'}:LateReplay"])
    assert "half_life" in shown.output and "Late replay" in shown.output


def test_the_recipe_of_the_docs_is_one(tmp_path: Path) -> None:
    text = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.S)[0]
    (tmp_path / "mine.toml").write_text(text)
    configs = runs(str(tmp_path / "mine.toml"))
    assert configs["original/late-dct-50"].args == {"half_life": 50} and len(configs) == 3
    theirs = runs("table1")["original/er-dct"]
    assert replace(theirs, data=replace(theirs.data, tasks=())) == configs["original/er-dct"]
    (tmp_path / "mine.toml").write_text(text.replace("cost = ", "# "))
    with pytest.raises(ConfigError, match=r"mine\.toml: this table is incomplete: add cost"):
        runs(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        (None, "absent.py:A", "absent.py is no file"),
        ("import nothing_like_it", "bad.py:A", r"bad.py cannot be imported \(ModuleNotFoundError"),
        ("class A: pass", "plain.py:A", "has no class A derived from stella.methods.Method"),
        ("A = 1", "value.py:B", "has no class B"),
        (None, "steella", r"unknown method 'steella': did you mean stella\? \(known: initial, .* or FILE.py:CLASS"),
    ],
)
def test_a_file_that_gives_no_method_is_refused(tmp_path: Path, text: str | None, name: str, told: str) -> None:
    if text is not None:
        (tmp_path / name.split(":")[0]).write_text(text)
    with pytest.raises(ConfigError, match=told):
        find(name if ".py" not in name else str(tmp_path / name))


OWN = """from __future__ import annotations
from dataclasses import dataclass
from stella.losses import mean
from stella.methods import Method

Real = {kind}

@dataclass(frozen=True)
class Config:
    x: Real

class Mine(Method):
    Config = Config

class Other(Method): ...
"""


def test_files_of_the_same_name_and_modules_of_python_do_not_collide(tmp_path: Path) -> None:
    for place, kind, value in (("one/mine.py", "float", 2.0), ("two/mine.py", "str", "b"), ("queue.py", "int", 3)):
        file = tmp_path / place
        file.parent.mkdir(exist_ok=True)
        file.write_text(OWN.format(kind=kind))
        mine, other = (find(f"{file}:{title}") for title in ("Mine", "Other"))
        assert vars(build(mine.Config, {"x": value})) == {"x": value}
        assert mine.__module__ == other.__module__ and find(f"{file}:Mine") is mine
        assert pickle.loads(pickle.dumps(mine)) is mine
        assert vars(sys.modules[mine.__module__])["Mine"] is mine  # several processes replace its `mean` there


def test_gradients_can_be_changed_between_backward_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that leaves gradients alone changes nothing; one that zeroes them stops the weights."""
    use_tasks(monkeypatch)

    def weights(name: str, hook: object) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(Finetune, "before_step", hook)
        pretrain(quick("finetune", "train.accumulate=2", "train.weight_decay=0.0"), tmp_path / name, console=QUIET)
        return load_file(tmp_path / name / "model.safetensors")

    calls: list[bool] = []

    def zero(self: Finetune) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        calls.append(any(bool(g.any()) for g in gradients))
        torch._foreach_zero_(gradients)

    plain, still = weights("plain", Finetune.before_step), weights("still", zero)
    start = quick("finetune")
    initial = {
        f"backbone.{k}": v for k, v in build_method(settle(start), torch.device("cpu")).model.state_dict().items()
    }
    assert same(still, initial) and not same(plain, initial)
    assert all(calls) and len(calls) == 6  # once a step, however many batches it has
