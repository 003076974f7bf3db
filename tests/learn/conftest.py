"""Drawing a page takes longer than a round of these small learners: only tests of the page draw it. Files that were
written just now are whole."""

from collections.abc import Iterator

import pytest

from stella.learn import loop


@pytest.fixture(scope="session", autouse=True)
def _no_page() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_page", lambda home: None)
        patch.setattr(loop, "SETTLE", 0.0)
        yield
