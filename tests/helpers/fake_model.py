"""A model that embeds any file's bytes: the same ones always give the same windows."""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stella.errors import ClipError, StellaError


@dataclass(frozen=True)
class Windows:
    vectors: Tensor
    start: Tensor
    end: Tensor


class FakeModel:
    """Windows of 2 s every second, up to four a file. `bad…` is refused; `mute…` has no sound, a .wav no pictures."""

    def __init__(self, version: str = "one", dim: int = 8, pause: float = 0.0) -> None:
        self.fingerprint, self.version, self.dim, self.pause = f"fake-{version}", version, dim, pause
        self.asked: list[str] = []  # names of the files embedded

    def embed_moment(self, path: Path | str, moment: float, kind: str) -> Windows:
        found = self.embed_video(path) if kind == "video" else self.embed_audio(path)
        if moment > float(found.end.max()):
            raise StellaError(f"{path}@{moment:g} is beyond the end of the file")
        nearest = int(((found.start + found.end) / 2 - moment).abs().argmin())
        return Windows(*(part[nearest, None] for part in (found.vectors, found.start, found.end)))

    def embed_both(self, path: Path, overlap: float = 0.5) -> tuple[Windows | None, Windows | None]:
        self.asked.append(Path(path).name)
        time.sleep(self.pause)
        video = None if Path(path).suffix == ".wav" else self.embed_video(path)
        audio = None if read(path).startswith(b"mute") else self.embed_audio(path)
        return video, audio

    def embed_video(self, path: Path | str) -> Windows:
        if Path(path).suffix == ".wav":
            raise ClipError(path, "no video track", "give a video")
        return self._windows(read(path), "video")

    def embed_audio(self, path: Path | str) -> Windows:
        if read(path).startswith(b"mute"):
            raise ClipError(path, "no audio track", "give a file with sound")
        return self._windows(read(path), "audio")

    def _windows(self, data: bytes, modality: str) -> Windows:
        seed = int.from_bytes(hashlib.blake2b(data + f"{self.version}{modality}".encode(), digest_size=7).digest())
        vectors = torch.randn(1 + len(data) % 4, self.dim, generator=torch.Generator().manual_seed(seed))
        start = torch.arange(len(vectors), dtype=torch.float64)
        return Windows(vectors / vectors.norm(dim=1, keepdim=True), start, start + 2)


def read(path: Path | str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ClipError(path, "missing file", "check the path") from error
    if data.startswith(b"bad"):
        raise ClipError(path, "not a media file", "fetch it again")
    return data
