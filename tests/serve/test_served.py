"""What the routes share: the watch over the index, and what was made before."""

import asyncio
from typing import Any

import pytest

from stella.serve import served as module
from stella.serve.served import Served


def test_the_watch_goes_on_after_any_error_and_says_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    looks: list[Exception | None] = [None, *[FileNotFoundError(2, "No such file", "embeddings.pt")] * 2, None]

    class Versions:
        def look(self) -> None:
            problem = looks.pop(0) if looks else None
            if problem:
                raise problem

    served: Any = Served.__new__(Served)
    served.versions, served.log = Versions(), said.append
    monkeypatch.setattr(module, "WATCH", 0.01)

    async def watched() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(served.watch(), 0.3)

    asyncio.run(watched())
    assert not looks and len(said) == 2
    assert said[0].startswith("FileNotFoundError: ") and said[1] == "the index can be read again"
