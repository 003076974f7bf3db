"""Files of a learner that are damaged, missing or left by a kill: it goes on, or says how to go on."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.learning import copy, damage, packed, quiet, state
from helpers.small import same
from rich.console import Console

from stella.embed.translate import state_in_use
from stella.errors import StellaError
from stella.learn.home import Home
from stella.learn.loop import learn, rollback
from stella.learn.round import Learner
from stella.runs.stop import Stopped


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the fourth round learns."""
    return packed(tmp_path_factory.mktemp("more"), (8,), first=3)


@pytest.fixture(scope="module")
def four(three: Path, more: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The state of a learner that nothing happened to."""
    home = copy(three, tmp_path_factory.mktemp("four") / "home")
    learn(home, more, console=quiet())
    return state(home)


def said(home: Path, sources: list[str]) -> str:
    """What a call says."""
    console = Console(file=io.StringIO(), width=400)
    learn(home, sources, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_what_killed_writers_left_is_removed(three: Path, tmp_path: Path) -> None:
    home = copy(three, tmp_path / "home")
    left = [
        home / place / "model.safetensors.0123abcd.tmp" for place in ("rounds/000001", "rounds/000003", "held", ".")
    ]
    for path in left:
        path.write_bytes(b"half")
    (home / "current.0123abcd.tmp").symlink_to("rounds/000009")
    with Home(home).locked():
        assert not list(home.rglob("*.tmp"))


@pytest.mark.parametrize("how", [damage, shutil.rmtree])
def test_a_state_in_use_that_is_damaged_or_missing_names_the_way_back(
    how: Callable[[Path], None], three: Path, sources: list[str], more: list[str], tmp_path: Path
) -> None:
    home = copy(three, tmp_path / "home")
    how(Home(home).round(3).checkpoints.folder)
    for _ in range(2):
        with pytest.raises(StellaError) as error:
            learn(home, more, console=quiet())
        assert str(error.value) == (
            f"{home}/rounds/000003/checkpoints is missing or damaged; restore it from a backup, or go back with stella "
            f"learn {home} --rollback 2"
        )
    rollback(home, 2, quiet())
    learn(home, sources, console=quiet())
    assert same(state(home), state(three))


@pytest.fixture
def begun(three: Path, more: list[str], tmp_path: Path) -> Callable[[str], Path]:
    """A learner that was killed before this part of its fourth round."""

    def until(part: str) -> Path:
        home = copy(three, tmp_path / "home")

        def killed(self: Learner, *given: Any) -> Any:
            raise Stopped

        with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):  # no signal came
            patch.setattr(Learner, part, killed)
            learn(home, more, console=quiet())
        return home

    return until


def test_a_round_whose_own_checkpoint_is_damaged_is_trained_from_its_beginning(
    begun: Callable[[str], Path], more: list[str], four: dict[str, Any]
) -> None:
    home = begun("_measured")
    damage(Home(home).round(4).checkpoints.folder)
    line = "what round 4 had saved is damaged: it is trained from its beginning"
    assert said(home, more).count(line) == 1 and same(state(home), four)


@pytest.mark.parametrize("content", [b"", b"nothing of a tensor", b"PK\x03\x04 half"])
def test_damaged_embeddings_are_computed_again(
    content: bytes, begun: Callable[[str], Path], more: list[str], four: dict[str, Any]
) -> None:
    """Those of the state in use, and those that a round began with."""
    home = begun("_train")
    for path in (Home(home).round(3).embeddings, Home(home).round(4).before):
        assert path.exists()
        path.write_bytes(content)
    assert state_in_use(home) == ""
    learn(home, more, console=quiet())
    assert same(state(home), four)


def test_clips_set_aside_that_are_damaged_are_told_once(three: Path, more: list[str], tmp_path: Path) -> None:
    home = copy(three, tmp_path / "home")
    damaged = sorted(home.glob("held/*.tar"))[:5]
    for path in damaged:
        path.write_bytes(b"nothing of a tar")
    console = Console(file=io.StringIO(), width=400)
    learn(home, more, clips=4, console=console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert Home(home).current == 5 and told.count("damaged") == 1
    assert f"5 clips set aside are damaged and not measured; delete from {home / 'held'}: " in told
    assert sum(path.name in told for path in damaged) == 3 and "tar, …\n" in told
