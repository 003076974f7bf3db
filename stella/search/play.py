"""A moment of a file or of a clip in shards, to look at and to play: its frames, its sound, a file for browsers."""

import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from stella.clip import SAMPLE_RATE
from stella.errors import ClipError
from stella.media.codecs import encode_flac
from stella.media.decode import Plan, decode_track
from stella.media.encode import encode
from stella.search.catalogue import Modality
from stella.search.sources import ShardClips, Source, open_source

SIZE, FPS = 360, 15  # short side in pixels, and frames a second, of a clip that is made to be played
PLAYED = (".mp4", ".m4v", ".mov", ".webm", ".ogv", ".mp3", ".m4a", ".aac", ".ogg", ".oga", ".opus", ".wav", ".flac")


Stamp = tuple[int, int]  # size and time of a file, or of a clip's shard, when it was indexed


def track(
    root: Path,
    path: str,
    start: float,
    end: float,
    kind: Modality,
    frames: int,
    size: int,
    *,
    fps: float | None = None,
    stamp: Stamp | None = None,
) -> Tensor | None:
    """Frames uint8 [frames, 3, H, W] or the waveform [S] of these seconds; None without such a track here.

    With `fps` there are fewer frames where the video ends inside the moment.
    """
    if clip := whole(root, path, stamp):
        begin, pictures, waveform, rate = clip
        if kind == "audio":
            first, last = (round((moment - begin) * SAMPLE_RATE) for moment in (start, end))
            return waveform[first:last] if first < len(waveform) else None
        times = Plan(frames=frames, span=None).times(start - begin, end - begin)
        return pictures[[min(int(time * rate), len(pictures) - 1) for time in times]]
    try:
        return decode_track(root / path, Plan(start, end - start, frames, size, span=None), kind, fps=fps)
    except ClipError as error:
        if error.reason in (f"no {kind} track", f"no {kind} in the clip"):
            return None
        raise


def cut(root: Path, path: str, start: float, end: float, stamp: Stamp | None = None) -> tuple[bytes, str]:
    """These seconds alone as a file that browsers play, and its type: an mp4, or FLAC where there is no picture."""
    seconds = end - start
    count = max(1, round(FPS * seconds))
    frames = track(root, path, start, end, "video", count, SIZE, fps=count / seconds, stamp=stamp)
    waveform = track(root, path, start, end, "audio", 1, SIZE, stamp=stamp)
    if frames is None:
        assert waveform is not None
        return encode_flac(waveform), "audio/flac"
    if waveform is None:
        waveform = torch.zeros(round(SAMPLE_RATE * seconds))
    even = frames[..., : frames.shape[-2] // 2 * 2, : frames.shape[-1] // 2 * 2]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clip.mp4"
        encode(file, even, waveform.clamp(-1, 1), count / seconds)
        return file.read_bytes(), "video/mp4"


Whole = tuple[float, Tensor, Tensor, float]


def whole(root: Path, path: str, stamp: Stamp | None = None) -> Whole | None:
    """A clip in shards: when it begins, its frames, waveform and frames a second; None for a file.

    With `stamp`, a clip whose shard has changed since is refused.
    """
    try:
        return _whole(root, path, stamp)
    except (ClipError, OSError):  # shards may have come or changed since they were opened
        _source.cache_clear()
        return _whole(root, path, stamp)


def _whole(root: Path, path: str, stamp: Stamp | None) -> Whole | None:
    source = None if (root / path).is_file() else _source(root)
    if not isinstance(source, ShardClips):
        return None
    if stamp is not None and source.stamp(path) != stamp:
        raise ClipError(path, "changed since it was indexed", "bring the index up to date")
    return source.whole(path)


@lru_cache(maxsize=8)
def _source(root: Path) -> Source:
    return open_source(root)
