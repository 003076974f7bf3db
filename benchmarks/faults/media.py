"""Intact files of many kinds, and files mutated from real clips: what becomes of each when it is decoded.

An outcome is `same` or `near` (what the intact file shows), `shorter` (its beginning: of a file that states no length),
`grey` or `gross` (something else, in silence), or `refused: REASON`. Everything is decoded by the worker processes of
the library, so that hangs and crashes are counted.
"""

import random
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from stella.data.workers import Done, Pool
from stella.errors import ClipError, StellaError, skippable
from stella.media.decode import Plan, decode
from stella.media.files import Limits

CLIPS = Path(__file__).parents[2] / "tests" / "data" / "clips"
PLAN = Plan(0.0, 2.5, 4, 128, None)
NEAR, GROSS = 3.0, 20.0  # mean absolute differences of pixels, on a scale of 255
GREY = 4.0  # deviation of a picture's pixels


@dataclass(frozen=True)
class Job:
    kind: str
    file: str  # decoded
    of: str  # the intact file, without damage
    strict: bool
    change: str = ""  # what `mutated` does to it
    seed: int = 0


# ---- intact files


def material() -> tuple[list[np.ndarray], np.ndarray]:
    """Frames [H, W, 3] and a waveform [1, S] at 48 kHz of a real clip."""
    with av.open(str(CLIPS / "bbaf2n.mpg")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    with av.open(str(CLIPS / "bbaf2n.mpg")) as container:
        resampler = av.AudioResampler("fltp", "mono", 48_000)
        parts = [f.to_ndarray() for frame in container.decode(audio=0) for f in resampler.resample(frame)]
    return frames, np.concatenate(parts, 1)


VIDEO: dict[str, tuple[str, str, dict[str, str]]] = {  # name: codec, pixel format, options
    "h264": ("libx264", "yuv420p", {}),
    "h264 baseline": ("libx264", "yuv420p", {"profile": "baseline"}),
    "h264 open GOP": ("libx264", "yuv420p", {"x264-params": "open-gop=1:keyint=20:bframes=3:b-pyramid=normal"}),
    "h264 intra refresh": ("libx264", "yuv420p", {"x264-params": "intra-refresh=1:keyint=20"}),
    "h264 slices": ("libx264", "yuv420p", {"x264-params": "slices=8:sliced-threads=1"}),
    "h264 interlaced": ("libx264", "yuv420p", {"x264-params": "interlaced=1"}),
    "h264 4:4:4": ("libx264", "yuv444p", {}),
    "h264 10 bit": ("libx264", "yuv420p10le", {}),
    "h264 lossless": ("libx264", "yuv420p", {"qp": "0"}),
    "h264 16 references": ("libx264", "yuv420p", {"refs": "16", "bf": "8", "preset": "slow"}),
    "h264 low quality": ("libx264", "yuv420p", {"crf": "48"}),
    "hevc": ("libx265", "yuv420p", {"x265-params": "log-level=none"}),
    "hevc open GOP": ("libx265", "yuv420p", {"x265-params": "log-level=none:open-gop=1:keyint=20"}),
    "hevc 10 bit": ("libx265", "yuv420p10le", {"x265-params": "log-level=none"}),
    "av1": ("libsvtav1", "yuv420p", {"preset": "12"}),
    "vp8": ("libvpx", "yuv420p", {"deadline": "realtime"}),
    "vp8 altref": ("libvpx", "yuv420p", {"auto-alt-ref": "1", "lag-in-frames": "16"}),
    "vp9": ("libvpx-vp9", "yuv420p", {"deadline": "realtime", "cpu-used": "8"}),
    "mpeg1": ("mpeg1video", "yuv420p", {"bf": "2"}),
    "mpeg2": ("mpeg2video", "yuv420p", {"bf": "2"}),
    "mpeg2 interlaced": ("mpeg2video", "yuv420p", {"flags": "+ildct+ilme"}),
    "mpeg2 4:2:2": ("mpeg2video", "yuv422p", {}),
    "mpeg4": ("mpeg4", "yuv420p", {"bf": "2"}),
    "mpeg4 quarter pixel": ("mpeg4", "yuv420p", {"flags": "+qpel+mv4"}),
    "mpeg4 data partitioning": ("mpeg4", "yuv420p", {"data_partitioning": "1", "ps": "300"}),
    "h263": ("h263", "yuv420p", {}),
    "msmpeg4": ("msmpeg4", "yuv420p", {}),
    "msmpeg4v2": ("msmpeg4v2", "yuv420p", {}),
    "wmv1": ("wmv1", "yuv420p", {}),
    "wmv2": ("wmv2", "yuv420p", {}),
    "flv1": ("flv", "yuv420p", {}),
    "mjpeg": ("mjpeg", "yuvj420p", {}),
    "mjpeg 4:2:2": ("mjpeg", "yuvj422p", {}),
    "prores": ("prores_ks", "yuv422p10le", {}),
    "dnxhd": ("dnxhd", "yuv422p", {"profile": "dnxhr_sq"}),
    "ffv1": ("ffv1", "yuv420p", {}),
    "ffv1 slices": ("ffv1", "yuv420p", {"slices": "4", "level": "3", "slicecrc": "1"}),
    "huffyuv": ("huffyuv", "yuv422p", {}),
    "ffvhuff": ("ffvhuff", "yuv420p", {}),
    "utvideo": ("utvideo", "yuv420p", {}),
    "magicyuv": ("magicyuv", "yuv420p", {}),
    "png": ("png", "rgb24", {}),
    "qtrle": ("qtrle", "rgb24", {}),
    "svq1": ("svq1", "yuv410p", {}),
    "cinepak": ("cinepak", "rgb24", {}),
    "snow": ("snow", "yuv420p", {"strict": "experimental"}),
    "dirac (vc2)": ("vc2", "yuv420p", {}),
    "jpeg2000": ("jpeg2000", "yuv420p", {}),
    "raw": ("rawvideo", "yuv420p", {}),
}
AUDIO: dict[str, tuple[str, dict[str, str]]] = {
    "aac": ("aac", {}),
    "aac low": ("aac", {"b": "24000"}),
    "mp3": ("libmp3lame", {}),
    "mp3 low": ("libmp3lame", {"b": "32000"}),
    "mp2": ("mp2", {}),
    "opus": ("libopus", {}),
    "opus narrow": ("libopus", {"b": "6000", "application": "voip"}),
    "flac": ("flac", {}),
    "alac": ("alac", {}),
    "ac3": ("ac3", {}),
    "eac3": ("eac3", {}),
    "wmav1": ("wmav1", {"b": "64000"}),
    "wmav2": ("wmav2", {"b": "64000"}),
    "pcm": ("pcm_s16le", {}),
    "pcm float": ("pcm_f32le", {}),
    "adpcm": ("adpcm_ms", {}),
    "mulaw": ("pcm_mulaw", {}),
    "wavpack": ("wavpack", {}),
    "tta": ("tta", {}),
}
CONTAINERS = ("mp4", "mov", "mkv", "webm", "avi", "ts", "mpg", "flv", "wmv", "ogv", "3gp", "mxf", "nut")


def write_intact(folder: Path) -> list[tuple[str, Path]]:
    """Every codec in every container that takes it; (kind, file). Combinations that FFmpeg refuses are left out."""
    frames, sound = material()
    pairs = [(video, "aac" if k % 2 else "mp3") for k, video in enumerate(VIDEO)]
    pairs += [("h264", audio) for audio in AUDIO] + [("mpeg4", audio) for audio in AUDIO]
    pairs += [
        ("vp8", "opus"),
        ("vp9", "opus"),
        ("wmv2", "mp3"),
        ("mpeg2", "mp2"),
        ("mpeg1", "mp2"),
        ("flv1", "mp3"),
    ]
    written = []
    for video, audio in dict.fromkeys(pairs):
        for container in ("nut", "mkv", "mov", "wmv"):  # not every one takes every codec
            with suppress(av.error.FFmpegError, ValueError):
                whole = folder / f"whole.{container}"
                _write(whole, frames, sound, VIDEO[video], AUDIO[audio])
                break
        else:
            continue
        for container in CONTAINERS:
            path = folder / f"{video} {audio}.{container}"
            try:
                _remux(whole, path)
                _play(path)
            except (av.error.FFmpegError, ValueError, IndexError):
                path.unlink(missing_ok=True)
            else:
                written.append((f"{video} + {audio} in {container}", path))
    return written


def _remux(whole: Path, path: Path) -> None:
    with av.open(str(whole)) as source, av.open(str(path), "w") as out:
        streams = {stream.index: out.add_stream_from_template(stream) for stream in source.streams}
        for packet in source.demux():
            if packet.size:
                packet.stream = streams[packet.stream_index]
                out.mux(packet)


def _write(path: Path, frames: list[np.ndarray], sound: np.ndarray, video: Any, audio: Any) -> None:
    codec, pix_fmt, options = video
    sizes = {"h263": (352, 288), "svq1": (352, 288)}
    width, height = sizes.get(codec, (frames[0].shape[1] // 2 * 2, frames[0].shape[0] // 2 * 2))
    with av.open(str(path), "w") as out:
        v = out.add_stream(codec, rate=25, options=options)
        v.width, v.height, v.pix_fmt = width, height, pix_fmt
        a = out.add_stream(audio[0], rate=48_000, layout="mono", options=audio[1])
        v.codec_context.thread_count = 1
        resampler = av.AudioResampler(a.codec_context.format.name, "mono", 48_000)
        raw = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound[:, : 48_000 * 3]), format="fltp", layout="mono")
        raw.sample_rate = 48_000
        packets = []
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(width, height, pix_fmt)
            frame.pts, frame.time_base = i, Fraction(1, 25)
            packets += v.encode(frame)
        packets += v.encode()
        for f in [*resampler.resample(raw), *resampler.resample(None)]:
            if f is not None:
                f.pts, f.time_base = 0, Fraction(1, 48_000)
                packets += a.encode(f)
        packets += a.encode()
        packets.sort(key=lambda packet: float((packet.dts or 0) * packet.time_base))
        for packet in packets:
            out.mux(packet)


def _play(path: Path) -> None:
    """Whether FFmpeg itself decodes all frames of both tracks: else the file does not count as intact."""
    with av.open(str(path)) as container:
        video = sum(1 for _ in container.decode(video=0))
    with av.open(str(path)) as container:
        sound = sum(f.samples / f.sample_rate for f in container.decode(audio=0))
    if video < 60 or sound < 2.5:
        raise ValueError(f"{path} holds less than was written")


# ---- damage


def mutated(data: bytes, change: str, rng: random.Random) -> bytes:
    """The bytes after one kind of damage."""
    b = bytearray(data)
    match change.split():
        case ["bits", count]:
            for _ in range(int(count)):
                b[rng.randrange(len(b))] ^= 1 << rng.randrange(8)
        case ["header"]:
            for _ in range(4):
                b[rng.randrange(min(1024, len(b)))] = rng.randrange(256)
        case ["zeros", count]:
            at = rng.randrange(len(b))
            b[at : at + int(count)] = bytes(len(b[at : at + int(count)]))
        case ["noise", count]:
            at = rng.randrange(len(b))
            b[at : at + int(count)] = rng.randbytes(len(b[at : at + int(count)]))
        case ["lost", count]:
            at = rng.randrange(len(b))
            del b[at : at + int(count)]
        case ["doubled", count]:
            at = rng.randrange(len(b))
            b[at:at] = b[at : at + int(count)]
        case ["cut"]:
            del b[rng.randrange(1, len(b)) :]
        case ["shuffled"]:
            size = 1 + len(b) // 16
            blocks = [b[i : i + size] for i in range(0, len(b), size)]
            i, j = rng.sample(range(len(blocks)), 2)
            blocks[i], blocks[j] = blocks[j], blocks[i]
            b = bytearray(b"".join(blocks))
    return bytes(b)


CHANGES = ("bits 1", "bits 10", "bits 100", "header", "zeros 188", "zeros 4096", "noise 512", "lost 1", "lost 3000")
CHANGES += ("doubled 500", "cut", "shuffled")
MUTATED = ("h264 aac.mp4", "h264 aac.mkv", "h264 aac.ts", "hevc aac.mp4", "vp8 opus.webm")
MUTATED += ("vp9 opus.webm", "mpeg4 mp3.avi", "wmv2 mp3.wmv", "flv1 mp3.flv", "mpeg2 mp2.mpg", "mjpeg aac.mov")


def outcome(job: Job, tick: Any) -> str:
    """What becomes of a file, in a worker."""
    tick(0)
    path = Path(job.file)
    try:
        with skippable(path):
            if job.change:
                damage = random.Random(f"{Path(job.of).name} {job.change} {job.seed}")
                path.write_bytes(mutated(Path(job.of).read_bytes(), job.change, damage))
            found = decode(path, PLAN, limits=Limits(strict=job.strict), time_limit=20)
    except ClipError as error:
        return f"refused: {error.reason}"
    except StellaError as error:
        return f"error: {error}"
    finally:
        if job.change:
            path.unlink(missing_ok=True)
    return compared(found.video, found.audio, *truth(job.of))


_truths: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


def truth(file: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The clip of an intact file, decoded leniently."""
    if file not in _truths:
        clip = decode(file, PLAN, limits=Limits(strict=False))
        _truths[file] = clip.video, clip.audio
    return _truths[file]


def compared(video: torch.Tensor, audio: torch.Tensor, video_0: torch.Tensor, audio_0: torch.Tensor) -> str:
    if video.shape != video_0.shape:
        return "other size"
    off = (video.float() - video_0.float()).abs().mean((1, 2, 3))  # [frames]
    flat = (video.float().std((1, 2, 3)) < GREY) & (video_0.float().std((1, 2, 3)) > 3 * GREY)
    if bool(flat.any()):
        return "grey"
    if float(off.max()) > GROSS:
        return "gross"
    size = min(len(audio), len(audio_0))
    power = float(audio_0[:size].square().mean()) + 1e-6 * float(audio_0.square().mean())
    wrong = float((audio[:size] - audio_0[:size]).square().mean()) / power
    silent = float(audio[:size].square().mean()) < 0.01 * power
    if silent or wrong > 0.5:
        return "gross sound"
    if size < 0.9 * len(audio_0):
        return "shorter"
    return "same" if float(off.max()) <= NEAR and wrong < 0.01 and len(audio) == len(audio_0) else "near"


def outcomes(jobs: list[Job], workers: int, time_limit: float = 40.0) -> Iterator[tuple[Job, str]]:
    """The outcome of each job; one that hangs or kills its worker is `hung` or `died`."""
    left = list(enumerate(jobs))[::-1]
    with closing(Pool(outcome, workers, 2, time_limit)) as pool:
        while left or pool.running:
            while left and pool.running < pool.capacity:
                pool.submit(*left.pop())
            event = pool.wait()
            if isinstance(event, Done):
                yield event.job, event.result
            else:
                yield event.job, "hung" if event.hung else f"died ({event.exitcode})"


def jobs_intact(written: list[tuple[str, Path]]) -> list[Job]:
    real = [(f"real {path.stem}", path) for path in sorted(CLIPS.glob("*.mpg"))]
    both = [Job(kind, str(path), str(path), True) for kind, path in real + written]
    return both + [replace(job, strict=False) for job in both]


def jobs_mutated(folder: Path, count: int) -> list[Job]:
    """`count` damaged files, half of them real MPEG-1 clips; every fifth is also decoded leniently, for comparison."""
    sources = sorted(CLIPS.glob("*.mpg")) + [folder / name for name in MUTATED if (folder / name).exists()]
    jobs = []
    for k in range(count):
        of, change = sources[k % len(sources)], CHANGES[k // len(sources) % len(CHANGES)]
        kind = "real mpeg1" if of.parent == CLIPS else of.name
        for strict in (True, False) if k % 5 == 0 else (True,):
            file = folder / f"mutated-{k}-{strict}{of.suffix}"
            jobs.append(Job(kind, str(file), str(of), strict, change, k))
    return jobs
