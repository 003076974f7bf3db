from pathlib import Path

import pytest
from helpers.media_files import CLIPS


@pytest.fixture(params=sorted(CLIPS.glob("*.mpg"))[::4] or [None], ids=lambda p: p.stem if p else "absent")
def speech(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip(f"the real clips are not at {CLIPS}")
    return request.param
