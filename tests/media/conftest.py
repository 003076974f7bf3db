from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.media_files import CLIPS, write


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """`file("a.mp4", frames, audio, …)` writes into this test's folder."""

    def make(name: str, *args: object, **kwargs: object) -> Path:
        return write(tmp_path / name, *args, **kwargs)  # type: ignore[arg-type]

    return make


@pytest.fixture(params=sorted(CLIPS.glob("*.mpg")) or [None], ids=lambda p: p.stem if p else "absent")
def speech(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip(f"the real clips are not at {CLIPS}")
    return request.param
