"""Drawing a page takes longer than a round of these small learners: only tests of the page draw it. Files that were
written just now are whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.learning import SHARE, config_for, packed, quiet

from stella.learn import loop, page
from stella.learn.loop import learn


@pytest.fixture(scope="session", autouse=True)
def _no_page() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write_page", lambda home: None)
        patch.setattr(loop, "SETTLE", 0.0)
        yield


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return packed(tmp_path_factory.mktemp("in"))


@pytest.fixture(scope="session")
def three(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learner of three rounds. Tests that change it take a copy."""
    home = tmp_path_factory.mktemp("learner") / "home"
    for number, source in enumerate(sources):
        new = (config_for(source, method="stella"), SHARE) if number == 0 else (None, None)
        learn(home, [source], *new, console=quiet())
    return home
