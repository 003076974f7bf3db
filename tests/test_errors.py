"""Words of messages."""

import pytest

from stella.errors import number_of


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [
        (0, "clip", "0 clips"),
        (1, "clip", "1 clip"),
        (2000, "new clip", "2,000 new clips"),
        (1, "class", "1 class"),
        (3, "class", "3 classes"),
        (2, "box", "2 boxes"),
    ],
)
def test_one_thing_is_not_told_as_many(count: int, noun: str, said: str) -> None:
    assert number_of(count, noun) == said
