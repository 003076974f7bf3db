"""A round that harms is kept apart, and says on how much that judgement rests."""

import io
import subprocess
from pathlib import Path

import pytest
from helpers.learning import SHARE, config_for, packed, quiet
from helpers.small import same
from rich.console import Console
from safetensors.torch import load_file

from stella.errors import StellaError, number_of
from stella.learn import page
from stella.learn.home import Home, Settings
from stella.learn.loop import KEPT_APART, accept, drop, learn
from stella.learn.page import render, write_page
from stella.learn.round import told
from stella.learn.status import status_table
from stella.serve.learner import Attached


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learner of three rounds. Tests take a copy."""
    home = tmp_path_factory.mktemp("learner") / "home"
    for number, source in enumerate(packed(tmp_path_factory.mktemp("in"))):
        learn(home, [source], *((config_for(source), SHARE) if number == 0 else (None, None)), console=quiet())
    return home


def copy(home: Path, to: Path) -> Path:
    subprocess.run(["cp", "-a", str(home), str(to)], check=True)
    return to


def test_a_round_that_ended_and_was_not_put_to_use_is_not_told_as_kept_apart(three: Path, tmp_path: Path) -> None:
    """A kill in between, or a state that is still being written."""
    home = copy(three, tmp_path / "home")
    (home / "current").unlink()
    (home / "current").symlink_to("rounds/000002")
    assert Home(home).next.ended and Home(home).next.kept_apart is None
    console = Console(file=io.StringIO(), width=200)
    console.print(status_table(Home(home)))
    said = [console.file.getvalue(), render(Home(home)), Attached(str(home)).tree()["doing"]]  # type: ignore[attr-defined]
    assert not any("kept apart" in each for each in said) and "round 3 is in progress" in said[0]


def test_a_guard_that_is_not_exceeded_tells_of_too_few_clips(three: Path, tmp_path: Path) -> None:
    home, more = copy(three, tmp_path / "home"), packed(tmp_path / "more", (8,), first=3)
    console = Console(file=io.StringIO(), width=300)
    [record] = learn(home, more, None, Settings(share=0.2, guard=99.0), console=console).rounds
    assert not record["kept_apart"] and not record["too_few"]
    assert "judged by" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert "too few for a guard of 0.5" in told(record | {"guard": 0.5})
    assert "judged by" not in told(record | {"guard": None})


@pytest.mark.parametrize("taken", [True, False])
def test_a_round_that_harms_is_kept_apart(three: Path, tmp_path: Path, taken: bool) -> None:
    home, more = copy(three, tmp_path / "home"), packed(tmp_path / "more", (8,), first=3)
    weights = load_file(home / "model.safetensors")
    strict = Settings(share=0.2, guard=-1000)  # every fall is more than that
    console = Console(file=io.StringIO(), width=200)
    assert learn(home, more, None, strict, console=console).exit_code == KEPT_APART
    record = Home(home).next.kept_apart
    assert record and record["too_few"] and record["old"]["clips"] > 0
    few = f"judged by {number_of(record['old']['clips'], 'old clip')}, too few for a guard of -1000"
    console.print(status_table(Home(home)))
    assert console.file.getvalue().count(few) == 2 and few in render(Home(home))  # type: ignore[attr-defined]
    assert few in Attached(str(home)).tree()["doing"]
    assert Home(home).current == 3 and same(weights, load_file(home / "model.safetensors"))
    assert learn(home, more, console=quiet()).exit_code == KEPT_APART  # nothing else is learnt until someone decides
    assert "4 (kept apart)" in render(Home(home))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write_page", write_page)
        (accept if taken else drop)(home, quiet())
    assert "kept apart" not in (home / "page.html").read_text()
    assert Home(home).current == (4 if taken else 3)
    assert learn(home, more, console=quiet()).rounds == []  # its clips are seen
    with pytest.raises(StellaError, match="nothing to"):
        (accept if taken else drop)(home, quiet())
