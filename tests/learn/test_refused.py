"""Commands that contradict themselves are refused before anything is made."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stella.cli import app
from stella.errors import StellaError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["in.tar", "--from", "runs/a", "train.lr=1"], "takes the values of that run; leave train.lr=1 out"),
        (
            ["--rollback", "1", "--drop"],
            "--rollback stands alone: stella learn .*home --rollback 1; leave out the rest",
        ),
        (["--status", "in.tar"], "--status stands alone: stella learn .*home --status;"),
        (["--guard", "3", "--drop"], "--drop stands alone"),
        (["in", "--every", "5"], "--every 5 must be a number and a unit"),
        (["in", "--guard", "inf"], "--guard inf must be a finite number; --guard 100 turns it off"),
        (["in", "--effort", "inf"], "--effort inf must be a finite number"),
        (["in", "--effort", "nan"], "--effort nan must be a finite number"),
        (["in.tar"], "in.tar is not a folder; give one of videos, shards or packed clips, or a tar archive of videos"),
    ],
)
def test_what_would_be_ignored_is_refused(given: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(StellaError, match=message):
        CliRunner().invoke(app, ["learn", str(tmp_path / "home"), *given], catch_exceptions=False)
    assert not (tmp_path / "home").exists()
