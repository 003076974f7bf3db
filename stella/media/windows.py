"""Windows of a file of any length, read once from its beginning to its end, in bounded memory.

A window is what `decode(path, inputs.plan(start))` cuts out of the file, bit for bit: the same packets are decoded by
the same code. Here the packets come from one pass over the file, and those of several windows are decoded together.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stella.errors import ClipError, StellaError, require
from stella.media.decode import HELD_MOST, OWN_LENGTHS, SLACK, Cut, tracks
from stella.media.files import open_media
from stella.media.inputs import Inputs

KINDS = ("video", "audio")
MISSING = {"video": "it has no picture to embed", "audio": "it has no sound to embed"}
REST = 0.1  # seconds at a file's end that get no window of their own: encoders pad
TOGETHER = 8  # windows decoded at a time: a long way to the last keyframe is then decoded once for all of them
HELD = 1 << 26  # bytes of packets from which on fewer windows are decoded at a time
GAP_MOST = 3600.0  # seconds without a packet that are believed
GUESSED = ("mp3", "aac", "ac3", "amr")  # formats whose length FFmpeg may only estimate


@dataclass(frozen=True)
class Window:
    kind: str  # video or audio
    start: float  # seconds from the file's beginning
    end: float
    data: Tensor  # frames uint8 [T, 3, H, W], or the waveform float32 [S] at 16 kHz
    times: list[float] = field(default_factory=list)  # of the frames, in seconds from the file's beginning


def hop_of(inputs: Inputs, overlap: float) -> float:
    """Seconds from one window's start to the next."""
    if not 0 <= overlap < 1:
        raise StellaError(
            f"overlap={overlap} is the share of a window that the next one repeats; set it in 0…1, below 1"
        )
    return inputs.duration * (1 - overlap)


def starts(length: float, duration: float, hop: float) -> list[float]:
    """Where windows of a length in seconds begin: every `hop`, and the last one ends with it. One if it is short."""
    regular = [k * hop for k in range(max(0, math.floor((length - duration + 1e-6) / hop) + 1))]
    rest = length - (regular[-1] + duration) if regular else length
    return regular + ([max(0.0, length - duration)] if not regular or rest > REST else [])


def windows(
    path: Path | str,
    inputs: Inputs,
    kinds: Sequence[str] = KINDS,
    *,
    overlap: float = 0.0,
    aligned: bool = False,
    time_limit: float = 30.0,
) -> Iterator[Window]:
    """All windows of a file's tracks of these kinds, each kind in order of time, or `ClipError`.

    A track that the file does not have gives no windows; a file with none of these kinds is refused. The last window
    of a track ends with it, or with the video's end if `aligned`. Where a track has no data in a whole window, there is
    no window. `time_limit` is for one step of `TOGETHER` windows.
    """
    path, hop = Path(path), hop_of(inputs, overlap)
    with open_media(path, time.monotonic() + time_limit) as container:
        found = tracks(path, container)
        if not any(found[kind] for kind in kinds):
            raise ClipError(
                path, f"no {kinds[0]} track", MISSING[kinds[0]] if len(kinds) == 1 else "it has nothing to embed"
            )
        yield from _Reader(path, container, found, inputs, hop, time_limit).read(kinds, aligned)


class _Track:
    """The packets of one track that are still needed, and how far its windows have come."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.packets: list[Any] = []
        self.bytes = 0
        self.count = 0  # windows given
        self.last = 0.0  # start of the last of them
        self.reached = -math.inf  # no later packet begins before this
        self.end = -math.inf


class _Reader(Cut):
    def __init__(
        self, path: Path, container: Any, found: dict[str, Any], inputs: Inputs, hop: float, time_limit: float
    ) -> None:
        self.limit = time_limit
        super().__init__(path, container, found["video"], found["audio"], 0.0, math.inf, time.monotonic() + time_limit)
        self.inputs, self.hop = inputs, hop
        self.by_kind = {kind: _Track(stream) for kind, stream in found.items() if stream is not None}

    def read(self, kinds: Sequence[str], aligned: bool) -> Iterator[Window]:
        by_stream = {track.stream.index: (kind, track) for kind, track in self.by_kind.items()}
        for packet in self._demux():  # of both tracks, whichever is wanted: together they tell where the file ends
            kind, track = by_stream[packet.stream_index]
            self._add(kind, track, packet, keep=kind in kinds)
            while kind in kinds and ((due := self._due(track)) >= TOGETHER or (due and track.bytes > HELD)):
                yield from self._give(kind, track, [(track.count + i) * self.hop for i in range(min(due, TOGETHER))])
                self._trim(aligned)
        self.at_end, ends = True, {kind: track.end - self.origin for kind, track in self.by_kind.items()}
        self._check_whole()
        self.at_end = False  # that is enough: one track may end long before the other
        for kind in [kind for kind in KINDS if kind in kinds and kind in self.by_kind]:
            track, length = self.by_kind[kind], ends["video"] if aligned and "video" in ends else ends[kind]
            every = enumerate(starts(length, self.inputs.duration, self.hop))
            rest = [at for i, at in every if i >= track.count or at != i * self.hop] if track.packets else []
            for first in range(0, len(rest), TOGETHER):
                yield from self._give(kind, track, rest[first : first + TOGETHER], length)

    def _add(self, kind: str, track: _Track, packet: Any, keep: bool) -> None:
        begin, end = self._span(packet)
        if begin > max(track.end, self.origin) + GAP_MOST:
            raise ClipError(self.path, "damaged timestamps", f"they jump by more than {GAP_MOST / 3600:g} h: re-mux it")
        if end == begin and kind == "video":  # some formats keep no durations
            end += 1 / float(self.video.average_rate or 25)
        if kind == "audio" or packet.dts is None:
            track.reached = max(track.reached, begin)
        else:
            track.reached = max(track.reached, packet.dts * self.tick[packet.stream_index])
        track.end = max(track.end, end)
        if keep and (track.packets or kind == "audio" or packet.is_keyframe):
            track.packets.append(packet)
            track.bytes += packet.size
        if track.bytes > HELD_MOST:
            raise ClipError(self.path, "too much data in the clip", "re-encode it with more keyframes")

    def _due(self, track: _Track) -> int:
        """How many further windows a track has all packets of."""
        reached = (track.reached - self.origin - self.inputs.duration) / self.hop
        return max(0, math.floor(reached) + 1 - track.count) if reached > -1 else 0

    def _trim(self, aligned: bool) -> None:
        """Drop packets that no later window needs: the last window of all begins after those already given."""
        for kind, track in self.by_kind.items():
            last = min(t.last for t in self.by_kind.values() if t.packets) if aligned else track.last
            if kind == "video":
                first = self._keyframe(track.packets, self.origin + last)
            else:
                ends = (self._span(packet)[1] for packet in track.packets)
                first = next((i for i, end in enumerate(ends) if end > self.origin + last - SLACK), 0)
            track.bytes -= sum(packet.size for packet in track.packets[:first])
            del track.packets[:first]

    def _keyframe(self, packets: Sequence[Any], moment: float) -> int:
        """The position of the last keyframe that is shown by then; 0 if there is none."""
        tick = self.tick[self.video.index] if self.video is not None else 0
        return next((i for i in range(len(packets) - 1, -1, -1) if self._opens(packets[i], moment, tick)), 0)

    @staticmethod
    def _opens(packet: Any, moment: float, tick: float) -> bool:
        return bool(packet.is_keyframe and packet.pts * tick <= moment)

    def _give(self, kind: str, track: _Track, at: Sequence[float], length: float = math.inf) -> Iterator[Window]:
        self.deadline = time.monotonic() + self.limit
        duration = self.inputs.duration
        found = self._frames(track, at) if kind == "video" else self._sounds(track, at)
        track.count, track.last = track.count + len(at), at[-1]
        for start, data, times in found:
            yield Window(kind, start, min(start + duration, length), data, times)
        self.deadline = time.monotonic() + self.limit  # time between windows is the caller's, not the decoder's

    def _frames(self, track: _Track, at: Sequence[float]) -> list[tuple[float, Tensor, list[float]]]:
        """The frames of windows that begin at these times, without windows that end before the first frame."""
        duration, plan = self.inputs.duration, self.inputs.plan()
        self.begin, self.end = self.origin + at[0], self.origin + at[-1] + duration
        self.video_packets = track.packets[self._keyframe(track.packets, self.begin) :]
        wanted: dict[float, list[float]] = {}

        def times(begin: float, end: float) -> list[float]:
            for start in at:
                first, last = max(self.origin + start, begin), min(self.origin + start + duration, end)
                if first < last:
                    wanted[start] = plan.times(first, last)
            return [moment for moments in wanted.values() for moment in moments]

        if not self.video_packets or self._span(self.video_packets[0])[0] >= self.end:
            return []
        pictures = torch.split(self.pictures(times, self.inputs.size), plan.frames)
        shown = [[moment - self.origin for moment in moments] for moments in wanted.values()]
        return list(zip(wanted, pictures, shown, strict=True))

    def _sounds(self, track: _Track, at: Sequence[float]) -> Iterator[tuple[float, Tensor, list[float]]]:
        for start in at:
            self.begin, self.end = self.origin + start, self.origin + start + self.inputs.duration
            spans = ((packet, *self._span(packet)) for packet in track.packets)
            self.audio_packets = [p for p, begin, end in spans if end > self.begin - SLACK and begin < self.end]
            try:
                waveform = self.waveform()
            except ClipError as error:
                if error.reason != "no audio in the clip":
                    raise
            else:
                yield start, waveform, []
            self._renew_decoder()

    def _renew_decoder(self) -> None:
        """The audio decoder as it is before its first packet. FFmpeg's AAC draws noise, and a flush keeps its state."""
        self.audio_decoder.flush_buffers()
        if self.audio_decoder.name == "aac":
            fresh = require("av").CodecContext.create("aac", "r")
            fresh.extradata, fresh.options = self.audio_decoder.extradata, self.audio_decoder.options
            self.audio_decoder = fresh

    def _check_whole(self) -> None:
        """Refuse a file that ends before its header says, in any track whose own length is stated."""
        names, self.end = self.container.format.name, math.inf
        last = max(track.end for track in self.by_kind.values())
        for track in self.by_kind.values():
            own = any(name in names for name in OWN_LENGTHS)
            if names not in GUESSED:
                self._check_reached(track.stream, track.end if own else last)
