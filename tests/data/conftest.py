import pytest
from helpers.media_files import write_video


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Four short videos."""
    root = tmp_path_factory.mktemp("videos")
    return [write_video(root / f"{n}.mp4", seed=n).read_bytes() for n in range(4)]
