import io
from functools import cache

import pytest
from helpers.small import Whole, quick, use_tasks
from rich.console import Console

from stella.runs.loop import pretrain
from stella.runs.training import RunResult


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An undisturbed run of a method, done once."""

    @cache
    def done(method: str) -> RunResult:
        with pytest.MonkeyPatch.context() as patch:
            use_tasks(patch)
            return pretrain(quick(method), tmp_path_factory.mktemp(method), console=Console(file=io.StringIO()))

    return done
