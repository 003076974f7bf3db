"""A film with heat maps over it: where its sound comes from. Below it, the spectrogram and which seconds matter."""

import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stella.embed.localise import Maps
from stella.embed.model import Model
from stella.errors import ClipError, StellaError, require
from stella.media.codecs import make_scaler
from stella.media.convert import picture
from stella.media.decode import tracks
from stella.media.encode import BT601, CRF, new_mp4
from stella.media.fbank import LENGTH, SHIFT, fbank
from stella.media.files import open_media
from stella.media.inputs import PER_SECOND
from stella.media.windows import windows

FPS = (10.0, 25.0)  # of the film, between these that of the video
AAC_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
SHORT_SIDE = 432  # pixels of the film's picture
LEGEND, BELOW, EDGE = 112, 186, 16  # pixels to its right, below and around it
MELS = 64
PAGE = 12.0  # seconds of spectrogram shown at a time
HIDDEN = 0.45  # brightness of what the model does not see
HEAT, PAPER, INK, FAINT = "inferno", "#14141a", "#e8e6e3", "#8f8d94"
Pixels = Any  # uint8 array [H, W, 3]


def write_film(model: Model, maps: Maps, path: Path, out: Path) -> int:
    """Write the film as an mp4 with its sound; returns its number of frames. It appears when it is whole."""
    if out.suffix.lower() != ".mp4":
        raise StellaError(f"{out} must end in .mp4: the film is one")
    loud = _loudness(model, path)
    with open_media(path, math.inf) as source:
        found = tracks(path, source)
        fps = min(max(float(found["video"].average_rate or 25), FPS[0]), FPS[1])
        rate = found["audio"].codec_context.sample_rate
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_mp4(out) as film:
        count, video = 0, None
        for count, frame in enumerate(_frames(path, fps, float(maps.end.max())), 1):
            if video is None:
                canvas = _Canvas((frame.shape[1], frame.shape[2]), maps, loud, path.name)
                video = _video_stream(film, canvas, fps)
                audio = film.add_stream("aac", rate=rate if rate in AAC_RATES else 48_000, layout="stereo")
            _encode(film, video, canvas.drawn(frame, (count - 1) / fps), count - 1)
        if video is None:
            raise ClipError(path, "no video in it", "a film needs pictures: give another file")
        film.mux(video.encode())
        _copy_sound(path, film, audio)
    return count


def _frames(path: Path, fps: float, end: float) -> Iterator[Tensor]:
    """Frames uint8 [3, H, W] at a fixed rate, each the one that is shown at its time; the last one until the end."""
    scaler, due, shown = make_scaler(), 0, None
    with open_media(path, math.inf) as source:
        stream = tracks(path, source)["video"]
        origin, tick = (source.start_time or 0) / 1e6, float(stream.time_base)
        for frame in _decoded(source, stream):
            begin = (frame.pts or 0) * tick - origin
            while shown is not None and due / fps + 1e-6 < begin:
                yield shown
                due += 1
            shown = picture(frame, scaler, stream.sample_aspect_ratio, SHORT_SIDE)
            shown = shown[:, : shown.shape[1] // 2 * 2, : shown.shape[2] // 2 * 2]
    while shown is not None and due / fps + 1e-6 < end:
        yield shown
        due += 1


def _video_stream(film: Any, canvas: "_Canvas", fps: float) -> Any:
    codec = "libx264" if "libx264" in require("av").codecs_available else "mpeg4"
    options = {"crf": CRF, "preset": "veryfast"} if codec == "libx264" else {"qscale": "3"}
    video = film.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options=options)
    video.height, video.width, video.pix_fmt = canvas.height, canvas.width, "yuv420p"
    context = video.codec_context
    context.colorspace = context.color_primaries = context.color_trc = BT601
    context.color_range = 1
    return video


def _encode(film: Any, video: Any, pixels: Pixels, number: int) -> None:
    frame = require("av").VideoFrame.from_ndarray(pixels, format="rgb24")
    frame = frame.reformat(format="yuv420p", dst_colorspace="ITU601", dst_color_range="MPEG")
    frame.pts, frame.time_base = number, 1 / video.codec_context.framerate
    film.mux(video.encode(frame))


def _copy_sound(path: Path, film: Any, audio: Any) -> None:
    """The sound of the file as AAC at its own rate, in time with the pictures."""
    rate, due = audio.codec_context.sample_rate, None
    resampler = require("av").AudioResampler("fltp", "stereo", rate)
    for frame, second in _sound(path):
        if due is None:
            due = round(second * rate)
        frame.pts = None
        for piece in resampler.resample(frame):
            piece.pts, piece.time_base = due, Fraction(1, rate)
            due += piece.samples
            film.mux(audio.encode(piece))
    film.mux(audio.encode())


def _sound(path: Path) -> Iterator[tuple[Any, float]]:
    """Frames of the sound, with the second at which each begins."""
    with open_media(path, math.inf) as source:
        stream = tracks(path, source)["audio"]
        tick, origin = float(stream.time_base), (source.start_time or 0) / 1e6
        for frame in _decoded(source, stream):
            yield frame, (frame.pts or 0) * tick - origin


def _decoded(source: Any, stream: Any) -> Iterator[Any]:
    """The frames of a track. As in windows, a broken end is left out and a broken middle is an error."""
    broken = None
    for packet in source.demux(stream):
        try:
            frames = packet.decode()
        except require("av.error").InvalidDataError as error:
            broken = error
            continue
        if frames and broken and packet.size:  # without a size: what the decoder held back
            raise broken
        yield from frames


def _loudness(model: Model, path: Path) -> Any:
    """The log-mel spectrogram of the whole sound, float16 [time, mel], with a time step of 10 ms."""
    pieces = {}
    for window in windows(path, model.inputs, ["audio"]):
        steps = (len(window.data) - LENGTH) // SHIFT + 1
        spectrogram = fbank(window.data[None], frames=steps, mels=MELS, normalise=False)[0]
        pieces[round(window.start * PER_SECOND)] = F.pad(spectrogram.mT, (0, LENGTH // SHIFT), mode="replicate").mT
    whole_sound = np.full((max(begin + len(piece) for begin, piece in pieces.items()), MELS), -15.9, np.float16)
    for begin, piece in pieces.items():
        whole_sound[begin : begin + len(piece)] = piece.numpy()
    return whole_sound


class _Canvas:
    """The film's frame: the picture with its map, a legend to the right, the sound below with a line for now."""

    def __init__(self, size: tuple[int, int], maps: Maps, loud: Any, name: str) -> None:
        from matplotlib import colormaps

        self.maps, self.loud, self.name, self.size = maps, loud, name, size
        self.width = EDGE + max(size[1], 480) + LEGEND
        self.height = EDGE + size[0] + BELOW
        self.colours = torch.tensor(colormaps[HEAT](np.linspace(0, 1, 256))[:, :3], dtype=torch.float32) * 255
        self.left = EDGE + (self.width - LEGEND - EDGE - size[1]) // 2
        self.strip = (EDGE, self.width - LEGEND)  # the sound, from left to right
        self.length = max(float(maps.end.max()), len(loud) / PER_SECOND)
        self.span = min(PAGE, self.length)
        self.page, self.background = -1, np.zeros(0, np.uint8)
        order = maps.times.flatten().argsort()
        self.times = maps.times.flatten()[order]
        self.heat = maps.heat.flatten(0, 1)[order]

    def drawn(self, frame: Tensor, now: float) -> Pixels:
        page = int(now // self.span)
        if page != self.page:
            self.page, self.background = page, self._paper(page * self.span)
        pixels = self.background.copy()
        height, width = self.size
        pixels[EDGE : EDGE + height, self.left : self.left + width] = self._overlaid(frame, now)
        x = self.strip[0] + int((now / self.span % 1) * (self.strip[1] - self.strip[0]))
        pixels[EDGE + height + 14 : self.height - 42, x : x + 2] = (255, 255, 255)
        return pixels

    def _overlaid(self, frame: Tensor, now: float) -> Pixels:
        """The heat over the centre square that the model sees; the more heat, the less of the picture."""
        height, width = self.size
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        heat = F.interpolate(self._heat(now)[None, None], (side, side), mode="bicubic", align_corners=False)[0, 0]
        heat = heat.clamp(0, 1)
        out = frame.permute(1, 2, 0).float() * HIDDEN
        seen = frame[:, top : top + side, left : left + side].permute(1, 2, 0).float()
        veil = (0.75 * heat.sqrt())[..., None]
        out[top : top + side, left : left + side] = seen * 0.92 * (1 - veil) + self.colours[(heat * 255).long()] * veil
        return out.clamp(0, 255).to(torch.uint8).numpy()

    def _heat(self, now: float) -> Tensor:
        """The map at a time, linear between the frames that the model sees."""
        after = int(torch.searchsorted(self.times, now))
        if after in (0, len(self.times)):
            return self.heat[min(after, len(self.times) - 1)]
        before = after - 1
        share = (now - float(self.times[before])) / max(1e-9, float(self.times[after] - self.times[before]))
        return torch.lerp(self.heat[before], self.heat[after], share)

    def _paper(self, begin: float) -> Pixels:
        """Everything that stands still during a page."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width / 100, self.height / 100), dpi=100, facecolor=PAPER)
        canvas, below = FigureCanvasAgg(figure), EDGE + self.size[0]
        sound = figure.add_axes(self._box(self.strip[0], below + 14, self.strip[1], below + 104))
        first, last = int(begin * PER_SECOND), int((begin + self.span) * PER_SECOND)
        extent = (begin, begin + self.span, 0, 1)
        shown = np.full((last - first, self.loud.shape[1]), self.loud.min(), np.float32)
        piece = self.loud[first:last]
        shown[: len(piece)] = piece
        low, high = np.percentile(self.loud.astype(np.float32), (5, 99.7))
        sound.imshow(shown.T, origin="lower", aspect="auto", extent=extent, cmap="bone", vmin=low, vmax=high)
        matter = figure.add_axes(self._box(self.strip[0], below + 108, self.strip[1], self.height - 42))
        matter.imshow(self._moments(begin)[None], aspect="auto", extent=extent, cmap=HEAT, vmin=0, vmax=1)
        for axes in (sound, matter):
            axes.set(yticks=[], xlim=(begin, begin + self.span), facecolor=PAPER)
            axes.tick_params(colors=FAINT, labelsize=8, length=3)
            axes.spines[:].set_visible(False)
        sound.set_xticks([])
        matter.set_xlabel(f"seconds of {self.name}", color=FAINT, fontsize=8, labelpad=3)
        for axes, words in ((sound, "sound"), (matter, "seconds\nthat matter")):
            axes.text(1.012, 0.5, words, transform=axes.transAxes, color=INK, fontsize=8, va="center")
        self._legend(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    def _legend(self, figure: Any) -> None:
        top, bottom = EDGE + 46, EDGE + min(self.size[0], 260)
        bar = figure.add_axes(self._box(self.width - LEGEND + 12, top, self.width - LEGEND + 26, bottom))
        bar.imshow(np.linspace(0, 1, 256)[:, None], origin="lower", aspect="auto", cmap=HEAT)
        bar.set(xticks=[], yticks=[0, 255], yticklabels=["least", "most"])
        bar.yaxis.tick_right()
        bar.tick_params(colors=INK, labelsize=8, length=0, pad=3)
        bar.spines[:].set_visible(False)
        x, y = (self.width - LEGEND + 12) / self.width, 1 - (EDGE + 2) / self.height
        figure.text(x, y, "where the\nsound is from", color=INK, fontsize=8, va="top", linespacing=1.25)

    def _moments(self, begin: float) -> Any:
        """Importance of the sound in 10 ms steps of a page; of overlapping windows the later one counts."""
        shown = np.zeros(round(self.span * PER_SECOND), np.float32)
        for seconds, sound in zip(self.maps.seconds, self.maps.sound, strict=True):
            step = float(seconds[1] - seconds[0]) if len(seconds) > 1 else self.span
            for second, value in zip(seconds.tolist(), sound.tolist(), strict=True):
                first, last = (round((moment - begin) * PER_SECOND) for moment in (second, second + step))
                shown[max(0, first) : max(0, last)] = value
        return shown

    def _box(self, left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
        """Pixels from the top left as a figure's fractions."""
        w, h = self.width, self.height
        return left / w, 1 - bottom / h, (right - left) / w, (bottom - top) / h
