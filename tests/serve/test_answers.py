"""What is said to the outside."""

from pathlib import Path

import pytest

from stella.errors import ClipError
from stella.media.files import check_file
from stella.serve.answers import said


def test_no_sentence_about_a_file_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").symlink_to(tmp_path / "secret" / "b.mp4")
    with pytest.raises(ClipError, match="secret") as link:
        check_file(tmp_path / "a.mp4")
    assert said(link.value) == "broken link; the server cannot use this file"
    for reason in ("unforeseen OSError", "damaged shard"):
        assert "secret" not in said(ClipError("a.mp4", reason, "/secret/b.mp4 is gone"))
    assert said(ClipError("a.mp4", "no audio track", "give another")) == "no audio track; give another"
