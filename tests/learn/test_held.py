"""Clips that are set aside: read side by side, they are those that are read one by one."""

from pathlib import Path

import pytest
import torch
from helpers.videos import Videos

from stella.data.skipped import Skipped
from stella.data.stream import StreamConfig, evaluation_batches
from stella.errors import ClipError
from stella.learn import held
from stella.learn.held import HeldClip, HeldOut, store
from stella.learn.items import Item


@pytest.fixture
def clips(tmp_path: Path) -> list[HeldClip]:
    """Six stored clips, of which the third is damaged."""
    source = Videos(6)
    found = [HeldClip(1, Item("videos", f"{i}.mp4", "", f"{i}.mp4", "")) for i in range(len(source))]
    store(source, found, tmp_path, 2.0, Skipped())
    (tmp_path / f"{found[2].key}.tar").write_bytes(b"nothing of a tar")
    return found


def test_decoded_side_by_side_they_are_the_same(clips: list[HeldClip], tmp_path: Path) -> None:
    together, alone = HeldOut(tmp_path, clips), HeldOut(tmp_path, clips)
    together.decode()
    assert together.decoded.keys() == {clip.key for i, clip in enumerate(clips) if i != 2}
    for i in (0, 1, 3, 4, 5):
        assert torch.equal(together.decoded[clips[i].key].video, alone[i].video)
        assert torch.equal(together.decoded[clips[i].key].audio, alone[i].audio)
    with pytest.raises(ClipError, match="damaged"):
        together[2]


def test_only_some_stay_in_memory(clips: list[HeldClip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "DECODED", 2)
    few = HeldOut(tmp_path, clips)
    few.decode()
    few.decode()
    assert few.decoded.keys() == {clip.key for clip in clips[:2]}
    assert len(few[5].audio) and len(few.decoded) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kept_on_a_gpu_they_are_measured_as_those_in_main_memory(clips: list[HeldClip], tmp_path: Path) -> None:
    here, there = HeldOut(tmp_path, clips), HeldOut(tmp_path, clips, device="cuda")
    there.decode()
    assert all(clip.video.is_cuda and clip.audio.is_cuda for clip in there.decoded.values())
    config = StreamConfig(batch_size=4, size=16, spec_frames=32, mels=16, most_bad=1.0)
    ours, theirs = ([*evaluation_batches(each, config, "cuda")] for each in (there, here))
    assert [batch.ids.tolist() for batch in ours] == [[0, 1, 3, 4], [5]]
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.video, other.video) and torch.equal(one.audio, other.audio)
