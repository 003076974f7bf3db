"""Archives, lists and shards behind addresses of any kind; `test_mirror` has a real S3 server."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.archives import reasons, shard_bytes, write_vggsound
from upath import UPath

from stella.data import prepare
from stella.data import workers as pool
from stella.data.plan import Plan
from stella.errors import StellaError

SMALL: dict[str, Any] = {"seconds": 1.0, "size": 48, "progress": False, "workers": 2}


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_METHOD", "fork")


@pytest.fixture
def vggsound(tmp_path: Path, videos: list[bytes]) -> Path:
    return write_vggsound(tmp_path, videos)


def run(src: Path | str, dst: Path | str, **more: Any) -> prepare.Summary:
    return prepare.prepare(src, dst, **(SMALL | more))


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_archives_and_files_behind_an_address(
    protocol: str, vggsound: Path, tmp_path: Path, videos: list[bytes]
) -> None:
    (vggsound / "sub").mkdir()
    (vggsound / "sub" / "gone_000000.mp4").write_bytes(videos[2])
    there = UPath(f"{protocol}://{tmp_path}/there")
    for file in (*vggsound.rglob("*.*"), tmp_path / "vggsound.csv"):
        copy = there / file.relative_to(tmp_path).as_posix()
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    here = run(vggsound, tmp_path / "here", csv=[tmp_path / "vggsound.csv"])
    far = run(f"{there}/have", tmp_path / "far", csv=[f"{there}/vggsound.csv"])
    assert shard_bytes(tmp_path / "here") == shard_bytes(tmp_path / "far") and here.clips == far.clips == 8
    assert reasons(tmp_path / "here") == reasons(tmp_path / "far")
    assert run(f"{there}/have", tmp_path / "far", csv=[f"{there}/vggsound.csv"]).added == 0
    with pytest.raises(StellaError, match="cannot be opened"):
        run("nothing://x", tmp_path / "new")


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_shards_behind_an_address(
    protocol: str, vggsound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: dict[str, Any] = {"csv": [tmp_path / "vggsound.csv"], "shard_clips": 2}
    here, there = run(vggsound, tmp_path / "here", **more), UPath(f"{protocol}://{tmp_path}/there")
    finish = Plan.finish

    def die(self: Plan, group: Any) -> None:
        if group.number == 0:
            raise KeyboardInterrupt
        finish(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(Plan, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            run(vggsound, str(there), **more)
    begun = {path.name for path in there.iterdir()}
    assert "shard-000000-0000.tar" in begun and ".lock" not in begun
    far = run(vggsound, str(there), **more)
    with pytest.raises(StellaError, match=f"{there} was filled with other settings: seconds was 1.0"):
        run(vggsound, str(there), **(more | {"seconds": 2.0}))
    assert 0 < far.added < far.clips == here.clips and far.bytes == here.bytes and far.skipped == here.skipped
    stored = {path.name: path.read_bytes() for path in there.iterdir()}
    assert {name: data for name, data in stored.items() if name.startswith("shard-")} == shard_bytes(tmp_path / "here")
    assert stored.keys() - shard_bytes(tmp_path / "here").keys() == {
        *("prepare.json", "plan.jsonl", "skipped.jsonl", "listed.json")
    }
    (there / ".lock").write_text(json.dumps({"who": "elsewhere:1:1", "at": time.time()}))
    with pytest.raises(StellaError, match="is in use by elsewhere:1:1; wait for it"):
        run(vggsound, str(there), **more)
    (there / ".lock").write_text(json.dumps({"who": f"{socket.gethostname()}:999999999:1", "at": time.time()}))
    assert run(vggsound, str(there), **more).added == 0
