"""Reads a `Clip` from a video file: seeks, decodes only the packets it needs, scales in FFmpeg's scaler.

Whatever is wrong with a file ends in one `ClipError`, whose `reason` is one of a few fixed phrases, so that a run can
count them. `time_limit` is checked between packets and, inside FFmpeg, between reads.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stella.clip import MIDDLE, SAMPLE_RATE, Clip
from stella.errors import ClipError, ConfigError, require
from stella.media.codecs import make_scaler
from stella.media.convert import Sound, picture
from stella.media.files import LIMITS, Limits, check_time, open_media, shorter_than_stated

# Seconds before the cut at which to look for a keyframe and early audio, one after the other; inf: the file's start.
SEEK_BACK = (1.0, 10.0, math.inf)
PATIENCE = 10.0  # seconds: a track this far past the cut without a packet of the other means the other has ended
SLACK = 0.5  # seconds by which a file may hold less than its header says
HELD_MOST = 1 << 30  # bytes of compressed video held for one clip
OWN_LENGTHS = ("mov", "avi")  # formats that state the length of each track, not only of the whole
NONREF_EXACT = ("h264", "mpeg4", "mpeg1video", "mpeg2video")  # skipping unreferenced frames changes no other frame

Times = Callable[[float, float], list[float]]  # (begin, end) of the video in a cut → the times of wanted frames


class Shown(NamedTuple):
    times: list[float]  # of the frames, in seconds from the file's beginning
    end: float  # of the clip, or of the video if it ends earlier


@dataclass(frozen=True)
class Plan:
    """The clip to cut out of a file, in seconds from the file's beginning, and the frames to take from it."""

    start: float = 0.0
    duration: float = 10.24
    frames: int = 4
    size: int = 256  # short side in pixels
    span: float | None = 4.0  # length in seconds of the window that the frames come from; none: the whole clip

    def __post_init__(self) -> None:
        if self.frames < 1 or self.size < 1:
            raise ConfigError(f"a plan needs frames and size of at least 1, not {self.frames} and {self.size}")
        if not (0 <= self.start < math.inf and 0 < self.duration < math.inf):
            raise ConfigError(f"a plan needs start ≥ 0 and duration > 0, not {self.start} and {self.duration}")
        if self.span is not None and not 0 < self.span < math.inf:
            raise ConfigError(f"a plan's span is a positive number of seconds or none, not {self.span}")

    def times(self, begin: float, end: float, window: float = MIDDLE) -> list[float]:
        """The centres of `frames` equal parts of a window; window 0 starts at `begin`, window 1 ends at `end`."""
        span = min(end - begin, self.span or math.inf)
        first = begin + window * (end - begin - span)
        return [first + (i + 0.5) * span / self.frames for i in range(self.frames)]


def decode(
    path: Path | str, plan: Plan, *, window: float = MIDDLE, time_limit: float = 30.0, limits: Limits = LIMITS
) -> Clip:
    """One clip of a file, or `ClipError`. `window` places the frames within the clip, as in `Plan.times`.

    Each time takes the frame being shown then. The waveform covers the whole clip: it is zero where the file has no
    data (before the track begins, in a gap), as a player plays it, and shorter than the clip where the file ends.
    """
    with _gathered(Path(path), plan.start, plan.duration, time_limit, limits) as cut:
        waveform = cut.waveform()
        return Clip(str(path), cut.pictures(partial(plan.times, window=window), plan.size), waveform)


def decode_shown(path: Path | str, plan: Plan, *, time_limit: float = 30.0) -> tuple[Clip, Shown]:
    """What `decode` gives, and when its frames are shown: the video may begin or end within the clip."""
    with _gathered(Path(path), plan.start, plan.duration, time_limit) as cut:
        waveform = cut.waveform()
        return Clip(str(path), cut.pictures(plan.times, plan.size), waveform), cut.shown


def read_cut(
    path: Path | str,
    start: float,
    duration: float,
    fps: float,
    size: int,
    *,
    time_limit: float = 300.0,
    limits: Limits = LIMITS,
) -> tuple[Tensor, Tensor]:
    """Frames uint8 [N, 3, H, W] at start, start + 1/fps, … as far as the file reaches, and the waveform [S]."""
    with _gathered(Path(path), start, duration, time_limit, limits) as cut:
        waveform = cut.waveform()
        return cut.pictures(cut.every(fps), size), waveform


def _regular(begin: float, end: float, fps: float) -> list[float]:
    return [begin + i / fps for i in range(max(1, math.ceil((end - begin) * fps - 1e-6)))]


def decode_track(
    path: Path | str, plan: Plan, kind: str, *, fps: float | None = None, time_limit: float = 30.0
) -> Tensor:
    """What `decode` gives of one track, video or audio, of a file that may have no other.

    With `fps`: the frames at the clip's beginning and every 1/fps seconds after it, as far as the track reaches.
    """
    with _gathered(Path(path), plan.start, plan.duration, time_limit, kinds=(kind,)) as cut:
        if kind == "audio":
            return cut.waveform()
        return cut.pictures(plan.times if fps is None else cut.every(fps), plan.size)


def read_duration(path: Path | str, *, time_limit: float = 30.0) -> float | None:
    """The length of a file in seconds, as far as it can be read; None if it holds no packets.

    What its header states is taken if the file reaches that far, which its end tells; else all packets are read.
    """
    path, deadline = Path(path), time.monotonic() + time_limit
    with open_media(path, deadline) as container:
        stated = (container.duration or 0) / 1e6
        reached = _reach(path, container, deadline, stated - PATIENCE) if stated > 0 else None
    if reached is None or reached < stated - SLACK:
        with open_media(path, deadline) as container:
            return _reach(path, container, deadline)
    return max(stated, reached)


def _reach(path: Path, container: Any, deadline: float, start: float = 0.0) -> float | None:
    """Where the last packet after `start` ends, in seconds from the file's beginning; None if there is none."""
    error, origin = require("av.error"), (container.start_time or 0) / 1e6
    streams = [*container.streams.video, *container.streams.audio]
    ends: list[float] = []
    with suppress(IndexError):  # see `_demux`
        try:
            if start > 0:
                container.seek(int((origin + start) * 1e6))
            for packet in container.demux(streams) if streams else ():
                check_time(path, deadline)
                if packet.size and packet.pts is not None:
                    ends.append(float((packet.pts + (packet.duration or 0)) * packet.time_base) - origin)
                    ends = [max(ends)]
        except error.ExitError:
            raise
        except error.FFmpegError:  # not every format can seek, and a damaged file ends where it cannot be read
            pass
    return max(ends, default=None)


@contextmanager
def _gathered(
    path: Path,
    start: float,
    duration: float,
    time_limit: float,
    limits: Limits = LIMITS,
    kinds: Sequence[str] = ("video", "audio"),
) -> Iterator["Cut"]:
    """A cut of the tracks of these kinds, with all packets that it needs, in a file that stays open."""
    deadline = time.monotonic() + time_limit
    for back in SEEK_BACK:
        with open_media(path, deadline, limits) as container:
            found = tracks(path, container)
            for kind in kinds:
                if found[kind] is None:
                    remedy = "a clip needs sound and picture: leave this file out"
                    raise ClipError(path, f"no {kind} track", remedy if len(kinds) > 1 else "give a file that has one")
            video, audio = (found[kind] if kind in kinds else None for kind in ("video", "audio"))
            cut = Cut(path, container, video, audio, start, duration, deadline)
            if cut.gather(back):
                yield cut
                return
    raise AssertionError("a read from the start of a file always succeeds")


def tracks(path: Path, container: Any) -> dict[str, Any]:
    """The first video track that is not a cover picture, and the first audio track; None where there is none."""
    covers = [s for s in container.streams.video if s.disposition & s.disposition.attached_pic]
    found = {
        "video": next((s for s in container.streams.video if s not in covers), None),
        "audio": next(iter(container.streams.audio), None),
    }
    for kind, stream in found.items():
        if stream is not None and stream.codec_context is None:
            raise ClipError(path, f"unknown {kind} codec", "re-encode it, for example to H.264 and AAC")
    return found


class Cut:
    """The packets of one clip of an open file, and what is decoded from them; a track may be None."""

    def __init__(
        self, path: Path, container: Any, video: Any, audio: Any, start: float, duration: float, deadline: float
    ) -> None:
        self.path, self.container, self.deadline = path, container, deadline
        self.video, self.audio = video, audio
        self.audio_decoder: Any = audio.codec_context if audio is not None else None
        self.streams = [stream for stream in (video, audio) if stream is not None]
        for stream in container.streams:
            if stream not in self.streams:
                stream.discard = require("av.stream").Discard.all
        if video is not None:
            video.codec_context.thread_type = "NONE"  # clips are decoded in parallel, not their frames
            video.codec_context.thread_count = 1
        self.tick = {stream.index: float(stream.time_base) for stream in self.streams}
        self.origin = (container.start_time or 0) / 1e6
        self.begin = self.origin + start
        self.end = self.begin + duration
        self.video_packets: list[Any] = []
        self.audio_packets: list[Any] = []
        self.shown = Shown([], 0.0)  # of the pictures that were decoded last
        self.at_end = False  # the file ended, or became unreadable, inside the clip

    def _span(self, packet: Any) -> tuple[float, float]:
        """When a packet's content begins and ends, in seconds of the file's clock."""
        tick = self.tick[packet.stream_index]
        begin = packet.pts * tick
        return begin, begin + (packet.duration or 0) * tick

    def gather(self, back: float) -> bool:
        """Collect the packets that the clip needs; False if the seek landed behind the first of a track.

        A track may be stored ahead of the other, so that a seek to a picture lands behind the sound of its time.
        """
        from_start = self.begin - back <= self.origin
        if not from_start:
            try:
                lead = self.streams[0]
                self.container.seek(int((self.begin - back) / self.tick[lead.index]), stream=lead)
            except require("av.error").FFmpegError:  # not every format can
                return False
        reached = {stream.index: -math.inf for stream in self.streams}
        held = 0
        for packet in self._demux():
            begin, end = self._span(packet)
            if packet.stream is self.audio:
                if reached[packet.stream_index] == -math.inf and begin > self.begin - SLACK and not from_start:
                    return False
                reached[packet.stream_index] = max(reached[packet.stream_index], begin)
                if end > self.begin - SLACK and begin < self.end:
                    self.audio_packets.append(packet)
            else:
                if not self.video_packets and not packet.is_keyframe:
                    continue
                if not self.video_packets and begin > self.begin and not from_start:
                    return False
                reached_v = reached[packet.stream_index]
                if reached_v < self.end:  # the first packet past the end tells how long the last frame is shown
                    self.video_packets.append(packet)
                    held += packet.size
                now = begin if packet.dts is None else packet.dts * self.tick[packet.stream_index]
                reached[packet.stream_index] = max(reached_v, now)
            if held > HELD_MOST:
                raise ClipError(self.path, "too much data in the clip", "re-encode it with more keyframes")
            if min(reached.values()) >= self.end or max(reached.values()) >= self.end + PATIENCE:
                break
        else:
            self.at_end = True
        return from_start or min(reached.values()) > -math.inf

    def _demux(self) -> Iterator[Any]:
        """Packets up to the end of the file's readable part; `_check_reached` decides whether that is enough."""
        av = require("av")
        try:
            for packet in self.container.demux(*self.streams):
                check_time(self.path, self.deadline)
                if packet.size and packet.pts is not None:
                    yield packet
        except av.error.ExitError:
            raise
        except (av.error.FFmpegError, IndexError):  # PyAV's own at the end of a file whose tracks begin in mid-file
            return

    def waveform(self) -> Tensor:
        """float32 [S], 16 kHz mono; sample 0 is the beginning of the clip."""
        av = require("av")
        sound = Sound(self.begin, self.end)
        hole = False
        for packet in self.audio_packets:
            check_time(self.path, self.deadline)
            try:
                frames = [] if packet.is_corrupt else self.audio_decoder.decode(packet)
                broken = packet.is_corrupt
            except av.error.InvalidDataError:
                frames, broken = [], True
            hole = hole or (broken and self._span(packet)[1] > self.begin)  # earlier packets may depend on unread ones
            if frames and hole:
                raise ClipError(self.path, "damaged audio", "fetch the file again or leave it out")
            for frame in frames:
                sound.add(frame, self.tick[self.audio.index])
        for frame in self.audio_decoder.decode(None):
            sound.add(frame, self.tick[self.audio.index])
        waveform = sound.waveform()
        self._check_reached(self.audio, self.begin + len(waveform) / SAMPLE_RATE)
        if len(waveform) < SAMPLE_RATE // 40:  # less than one frame of the filterbank
            raise ClipError(self.path, "no audio in the clip", "choose another start or leave the file out")
        return torch.from_numpy(waveform)

    def every(self, fps: float) -> Times:
        """Times from the clip's beginning on, also where the video begins later."""
        return lambda _, end: _regular(self.begin, end, fps)

    def pictures(self, times: Times, size: int) -> Tensor:
        """uint8 [N, 3, H, W], one for each wanted time."""
        packets = self.video_packets
        # frames before the first keyframe depend on unread packets
        usable = [(p.pts >= packets[0].pts and not p.is_discard and not p.is_corrupt) for p in packets]
        shown = sorted((p.pts, i) for i, p in enumerate(packets) if usable[i])
        empty = ClipError(self.path, "no video in the clip", "choose another start or leave the file out")
        if not shown:
            raise empty
        tick = self.tick[self.video.index]
        last, last_end = self._span(packets[shown[-1][1]])
        if last_end == last:  # some formats keep no durations
            last_end += 1 / float(self.video.average_rate or 25)
        begin, end = max(self.begin, shown[0][0] * tick), min(self.end, last_end)
        self._check_reached(self.video, end)
        if end <= begin:
            raise empty
        pts = [p for p, _ in shown]
        moments = times(begin, end)
        self.shown = Shown([moment - self.origin for moment in moments], end - self.origin)
        wanted = [shown[max(0, bisect_right(pts, (t + 1e-6) / tick) - 1)][1] for t in moments]
        found: dict[int, Tensor] = {}
        with suppress(ClipError):
            found = self._decode(sorted(set(wanted)), size, exact_skip=self.video.codec_context.name in NONREF_EXACT)
        missing = sorted(set(wanted) - found.keys())
        if missing:  # decode from the first packet: some decoders drop frames while they guess the order, and files
            # with intra refresh have keyframes in name only
            self.video.codec_context.flush_buffers()
            found |= self._decode(missing, size, exact_skip=False, first=0)
        if len({p.shape for p in found.values()}) > 1:
            raise ClipError(self.path, "picture size changes", "re-encode it to one size")
        if not set(wanted) <= found.keys():
            raise ClipError(self.path, "damaged video", "fetch the file again or leave it out")
        return torch.stack([found[i] for i in wanted])

    def _decode(
        self, wanted: Sequence[int], size: int, *, exact_skip: bool, first: int | None = None
    ) -> dict[int, Tensor]:
        """Pictures of the packets at these positions, decoding only from the keyframe before each (or from `first`)."""
        context, packets = self.video.codec_context, self.video_packets
        by_pts = {packets[i].pts: i for i in wanted}
        found: dict[int, Tensor] = {}
        scaler = make_scaler()
        for begin, end in _stretches([(self._key(i) if first is None else first, i) for i in wanted]):
            for i in [*range(begin, end + 1), None]:
                check_time(self.path, self.deadline)
                context.skip_frame = "NONREF" if exact_skip and i is not None and i not in wanted else "DEFAULT"
                for frame in self._decoded(None if i is None else packets[i]):
                    if frame.pts in by_pts and not frame.is_corrupt:
                        found[by_pts[frame.pts]] = picture(frame, scaler, self.video.sample_aspect_ratio, size)
            context.flush_buffers()
        return found

    def _decoded(self, packet: Any) -> list[Any]:
        try:
            if packet is None or not packet.is_corrupt:
                return list(self.video.codec_context.decode(packet))
        except require("av.error").InvalidDataError as error:
            raise ClipError(self.path, "damaged video", f"FFmpeg says {error.strerror!r}: fetch it again") from error
        raise ClipError(self.path, "damaged video", "its container marks a broken packet: fetch it again")

    def _key(self, i: int) -> int:
        packets = self.video_packets
        return next(k for k in range(i, -1, -1) if packets[k].is_keyframe and packets[k].pts <= packets[i].pts)

    def _check_reached(self, stream: Any, reached: float) -> None:
        """Refuse a file that ends before its header says: missing content is never filled in."""
        if not self.at_end:
            return
        if stream.duration and any(name in self.container.format.name for name in OWN_LENGTHS):
            stated = float(((stream.start_time or 0) + stream.duration) * stream.time_base)
        else:
            stated = self.origin + (self.container.duration or 0) / 1e6
            both = (*self.video_packets, *self.audio_packets)
            reached = max(reached, *(self._span(p)[1] for p in both)) if both else reached
            if len(self.streams) == 1 and reached < min(self.end, stated) - SLACK:  # another track may go on
                left = max(0.001, self.deadline - time.monotonic())
                reached = self.origin + (read_duration(self.path, time_limit=left) or 0.0)
        if reached < min(self.end, stated) - SLACK or (reached < self.end - SLACK and shorter_than_stated(self.path)):
            raise ClipError(self.path, "truncated file", "it holds less than its header says: fetch it again")


def _stretches(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (first, last) merged where they overlap, so that nothing is decoded twice."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined
