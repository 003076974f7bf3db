"""What is done in worker processes: decoding and embedding of uploads, pictures, heat maps and clips of moments."""

import json
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stella import embed
from stella.clip import SAMPLE_RATE
from stella.data.workers import Tick, not_counted
from stella.embed import Maps, Model
from stella.errors import BeyondEndError, ClipError, StellaError, skippable
from stella.files import full_disk
from stella.media.arrays import frame_windows, sound_windows
from stella.media.codecs import encode_jpegs
from stella.media.fbank import fbank
from stella.search import play
from stella.search.catalogue import Modality
from stella.search.query import Query, embed_query
from stella.serve.answers import said
from stella.serve.versions import Weights

GRID = 28  # rows and columns of a heat map as it is sent
STRIP = (64, 16 / 9)  # mels of a sound's picture, and its width over its height


@dataclass(frozen=True)
class Refusal:
    """What is wrong with a file, for the one who asked; `log` is for the one who runs the server."""

    sentence: str
    log: str = ""
    status: int = 422  # of HTTP
    retry: int | None = None  # seconds after which to ask again


class Job(Protocol):
    weights: Weights | None  # of the model that it needs

    def do(self, model: Model | None) -> Any: ...


def work(job: Job, tick: Tick) -> Any:
    """The job's result or a `Refusal`. The time limit begins when the model is there."""
    try:
        with not_counted():
            model = _model(job.weights) if job.weights else None
        tick(0)
        with skippable("the file"):
            return job.do(model)
    except ClipError as error:
        return _no_room(error) or Refusal(said(error), str(error) if error.reason.startswith("unforeseen") else "")
    except StellaError as error:
        return _no_room(error) or Refusal("the server cannot do this; its log says why", str(error), 500)


def _no_room(error: StellaError) -> Refusal | None:
    """What to say if a full disk is the cause."""
    full = "the server has no room to do this; try again later"
    return Refusal(full, str(error), 507, retry=30) if full_disk(error) else None


@lru_cache(maxsize=1)
def _model(weights: Weights) -> Model:
    model = embed.load(weights.file, "cpu")
    if model.fingerprint != weights.fingerprint:
        raise ClipError(weights.file, "the weights that made this index are gone", "it must be brought up to date")
    return model


@dataclass(frozen=True)
class Warm:
    """Loads the model, so that the first query need not wait for it."""

    weights: Weights

    def do(self, model: Model | None) -> None:
        time.sleep(0.2)  # so that each worker gets one of these jobs


@dataclass(frozen=True)
class Embed:
    """The vector of an upload, or of the window around second `at`."""

    weights: Weights
    file: str
    by: Modality | None
    at: float | None = None

    def do(self, model: Model | None) -> Query:
        assert model is not None
        try:
            query = embed_query(model, self.file if self.at is None else f"{self.file}@{self.at}", self.by)
        except BeyondEndError as error:
            raise ClipError(self.file, f"there is no second {self.at:g} in it", "name an earlier one") from error
        return Query(query.vector, query.by, "", query.start, query.end, query.fingerprint)


@dataclass(frozen=True)
class Part:
    """A moment of a file of the index."""

    weights: Weights | None
    root: Path
    path: str
    start: float
    end: float
    stamp: tuple[int, int]  # size and time of its file, or of its shard, when it was indexed

    def track(self, kind: Modality, frames: int, size: int) -> Tensor | None:
        """Frames uint8 [frames, 3, H, W] or the waveform [S]; None if the file has no such track, or none here."""
        return play.track(self.root, self.path, self.start, self.end, kind, frames, size, stamp=self.stamp)


@dataclass(frozen=True)
class Picture(Part):
    """A JPEG: the middle frame, or the spectrogram where there is no picture."""

    size: int = 270

    def do(self, model: Model | None) -> bytes:
        frames = self.track("video", 1, self.size)
        if frames is None:
            waveform = self.track("audio", 1, self.size)
            assert waveform is not None  # a moment has a track
            frames = spectrogram(waveform, self.size)
        return encode_jpegs(frames)[0]


@dataclass(frozen=True)
class Clip(Part):
    """The moment alone as a file that browsers play."""

    def do(self, model: Model | None) -> bytes:
        return play.cut(self.root, self.path, self.start, self.end, self.stamp)[0]


@dataclass(frozen=True)
class Heat(Part):
    """Where its sound comes from, as JSON: maps of the centre square, 0…255 row by row, and seconds that matter."""

    def do(self, model: Model | None) -> bytes:
        assert model is not None
        if model.avm is None:
            raise ClipError(self.path, "no heat map", "the model has no matching module to read it from")
        maps = self._maps(model)
        small = F.interpolate(maps.heat[:1], (GRID, GRID), mode="area")[0]
        tree = {
            "grid": GRID,
            "times": [round(time, 3) for time in maps.times[0].tolist()],
            "heat": (small * 255).round().int().flatten(1).tolist(),
            "seconds": [round(second, 3) for second in maps.seconds[0].tolist()],
            "sound": [round(value, 3) for value in maps.sound[0].tolist()],
        }
        return json.dumps(tree, separators=(",", ":")).encode()

    def _maps(self, model: Model) -> Maps:
        clip = play.whole(self.root, self.path, self.stamp)
        if clip is None:
            return model.localise_moment(self.root / self.path, self.start)
        begin, frames, waveform, fps = clip
        first, last = (self.start - begin, self.end - begin)
        pictures = frames[int(first * fps) : max(int(first * fps) + 1, round(last * fps))]
        sound = waveform[round(first * SAMPLE_RATE) : round(last * SAMPLE_RATE)]
        both = [*frame_windows(pictures, fps, model.inputs), *sound_windows(sound, SAMPLE_RATE, model.inputs)]
        maps = model.localise_windows(self.path, both)
        return Maps(maps.heat, maps.times + self.start, maps.sound, maps.seconds + self.start, maps.start, maps.end)


def spectrogram(waveform: Tensor, height: int) -> Tensor:
    """uint8 [1, 3, H, W]: a sound to look at, low tones below."""
    mels, aspect = STRIP
    loud = fbank(waveform[None], frames=max(1, len(waveform) * 100 // SAMPLE_RATE - 2), mels=mels, normalise=False)
    low, high = loud.quantile(0.1), loud.max()
    level = ((loud - low) / (high - low).clamp_min(1e-6)).clamp(0, 1).mT.flip(1)[:, None]  # [1, 1, mels, time]
    width = round(height * aspect) // 2 * 2
    level = F.interpolate(level, (height // 2 * 2, width), mode="bilinear", align_corners=False)
    dark, light = (torch.tensor(colour).view(1, 3, 1, 1) for colour in ((24.0, 22.0, 26.0), (244.0, 214.0, 190.0)))
    return torch.lerp(dark, light, level**1.5).round().to(torch.uint8)
