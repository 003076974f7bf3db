"""What `encode` writes, `decode` reads back: the same pictures at the same times, the same sound in sync."""

from pathlib import Path

import av
import pytest
import torch
from torch import Tensor

from stella.clip import SAMPLE_RATE
from stella.errors import StellaError
from stella.media import encode as encoder
from stella.media.decode import Plan, decode, read_cut
from stella.media.encode import encode
from stella.rng import generator


def moving_square(count: int, size: int = 96) -> Tensor:
    frames = torch.full((count, 3, size, size), 60, dtype=torch.uint8)
    for i in range(count):
        at = 4 + (3 * i) % (size - 24)
        frames[i, :, 20:40, at : at + 20] = torch.tensor([220, 120, 40], dtype=torch.uint8)[:, None, None]
    return frames


def bursts(seconds: float) -> Tensor:
    gen = generator(0, "bursts")
    waveform = torch.zeros(round(seconds * SAMPLE_RATE))
    for begin in range(0, len(waveform) - 800, 8000):
        waveform[begin : begin + 800] = 0.2 * torch.randn(800, generator=gen)
    return waveform.clamp(-1, 1)


def lag(a: Tensor, b: Tensor, most: int = 400) -> int:
    """By how many samples `b` comes after `a`."""
    n = min(len(a), len(b)) - 2 * most
    scores = [torch.dot(a[most : most + n], b[most + s : most + s + n]).item() for s in range(-most, most + 1)]
    return max(range(len(scores)), key=scores.__getitem__) - most


@pytest.mark.parametrize("fps", [25.0, 12.5, 29.97])
def test_round_trip(tmp_path: Path, fps: float) -> None:
    frames, waveform = moving_square(64), bursts(64 / fps)
    encode(tmp_path / "a.mp4", frames, waveform, fps)
    back, sound = read_cut(tmp_path / "a.mp4", 0, 64 / fps, fps, 96)
    assert back.shape == frames.shape
    error = (back.float() - frames.float()).square().mean((1, 2, 3))
    assert (10 * torch.log10(255**2 / error)).min() > 30  # every frame at its own time
    assert len(sound) == pytest.approx(len(waveform), abs=1024)
    assert lag(waveform, sound) == 0  # to the sample: the priming of AAC is in the edit list
    n = min(len(sound), len(waveform))
    assert torch.corrcoef(torch.stack([sound[:n], waveform[:n]]))[0, 1] > 0.95


def test_a_window_in_the_middle_is_in_sync_too(tmp_path: Path) -> None:
    frames, waveform = moving_square(100), bursts(4)
    encode(tmp_path / "a.mp4", frames, waveform, 25)
    clip = decode(tmp_path / "a.mp4", Plan(1.6, 2.0, 2, 96, None))
    assert abs(lag(waveform[round(1.6 * SAMPLE_RATE) :], clip.audio)) <= 1
    assert (clip.video.float() - frames[[52, 77]].float()).abs().mean() < 3


def test_colours_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "CRF", "10")
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (200, 120, 30)]
    for width in (96, 1280):  # players and scalers guess the colours of untagged video by its size
        frames = torch.tensor(colours, dtype=torch.uint8)[:, :, None, None].expand(-1, -1, 96, width).contiguous()
        encode(tmp_path / "a.mp4", frames, bursts(1), 6)
        back, _ = read_cut(tmp_path / "a.mp4", 0, 1, 6, 96)
        assert (back[:, :, 48, 48].int() - torch.tensor(colours)).abs().max() <= 4


def test_any_player_plays_it(tmp_path: Path) -> None:
    encode(tmp_path / "a.mp4", moving_square(50), bursts(2), 25)
    with av.open(str(tmp_path / "a.mp4")) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert (video.codec_context.name, video.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (audio.codec_context.name, audio.codec_context.sample_rate) == ("aac", SAMPLE_RATE)
        keyframes = [float(p.pts * p.time_base) for p in container.demux(video) if p.size and p.is_keyframe]
    assert keyframes[0] == 0 and len(keyframes) >= 2 and max(torch.tensor(keyframes).diff()) <= 1  # for those who seek


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old")
    plain = encoder._write
    monkeypatch.setattr(encoder, "_write", lambda *args: (plain(*args), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        encode(path, moving_square(10), bursts(0.4), 25)
    monkeypatch.undo()
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(StellaError, match="cannot be written"):
        encode(tmp_path / "no" / "a.mp4", moving_square(2), bursts(0.1), 25)


PICTURES, SILENCE = torch.zeros(2, 3, 96, 96, dtype=torch.uint8), torch.zeros(800)


@pytest.mark.parametrize(
    ("frames", "waveform", "fps", "says"),
    [
        (PICTURES[..., 1:], SILENCE, 25, "even"),
        (PICTURES.float(), SILENCE, 25, "uint8"),
        (PICTURES[:0], SILENCE, 25, "uint8"),
        (PICTURES, SILENCE[None], 25, "waveform"),
        (PICTURES, SILENCE + torch.nan, 25, "finite"),
        (PICTURES, SILENCE, 0, "fps"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, frames: Tensor, waveform: Tensor, fps: float, says: str
) -> None:
    with pytest.raises(StellaError, match=says):
        encode(tmp_path / "a.mp4", frames, waveform, fps)
    assert not list(tmp_path.iterdir())
