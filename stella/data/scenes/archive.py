"""Scenes in the layouts of public data sets, dirt included, to rehearse `stella prepare` and a benchmark."""

import csv
import io
import json
import tarfile
import tempfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from stella.clip import SAMPLE_RATE
from stella.data.archives.rows import MOST_TEST, tasks_of
from stella.data.scenes.export import FPS
from stella.data.scenes.source import Scenes
from stella.errors import StellaError
from stella.files import write_bytes, write_text
from stella.media.codecs import encode_jpegs
from stella.media.decode import read_cut, read_duration
from stella.media.encode import encode
from stella.media.files import in_memory

PREFIX = "scratch/shared/beegfs/hchen/train_data/VGGSound_final/video/"  # as in the copy that people have
CLASSES = 2  # of a task
TASKS = 2
OTHERS = ["zebra braying", "air horn"]  # of VGGSound, in no task of Continual-VS
STILLS = 10  # pictures of a clip of CAV-MAE
MISSING = 5  # every fifth training clip is not there

Clip = tuple[str, int, str, str]  # video, start, class, split
Writer = Callable[[Path, list[Clip], list[tuple[Clip, bytes]]], None]  # all that are listed, and those that are there


def clips_of(benchmark: str, clips: int) -> dict[str, list[Clip]]:
    """By task of the benchmark: `clips` training clips, and five test clips a class; at last of classes of no task."""
    found: dict[str, list[Clip]] = {}
    tasks = dict(list(tasks_of(benchmark).items())[:TASKS]) | ({"none": OTHERS} if benchmark == "continual-vs" else {})
    for number, (task, classes) in enumerate(tasks.items()):
        splits = [("train", clips), ("test", CLASSES * MOST_TEST)]
        found[task] = [
            (f"{split[:2]}_{number}-{n:06d}", 10 * (n % 7), classes[n % CLASSES], split)
            for split, count in splits
            for n in range(count)
        ]
    return found


def is_missing(clip: Clip) -> bool:
    return clip[3] == "train" and int(clip[0][-6:]) % MISSING == MISSING - 1


def archive(like: str, folder: Path, clips: int = 20, size: str = "scenes", seed: int = 0) -> tuple[int, Iterator[str]]:
    """The number of clips of a data set's miniature, and their names, each given once it is rendered. The files are in
    `folder` after the last one."""
    if like not in LAYOUTS:
        raise StellaError(f"--like {like} is no layout; choose one of {', '.join(LAYOUTS)}")
    if folder.exists() and any(folder.iterdir()):
        raise StellaError(f"{folder} holds other files; choose another folder, or an empty one")
    folder.mkdir(parents=True, exist_ok=True)
    benchmark, write = LAYOUTS[like]
    listed = clips_of(benchmark, clips)
    return sum(map(len, listed.values())), _rendered(listed, write, folder, size, seed)


def _rendered(listed: dict[str, list[Clip]], write: Writer, folder: Path, size: str, seed: int) -> Iterator[str]:
    made: list[tuple[Clip, bytes]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, each in enumerate(listed.values(), 1):
            for split in ("train", "test"):
                wanted = [clip for clip in each if clip[3] == split]
                scenes = Scenes(
                    f"task{number}", "eval" if split == "test" else split, len(wanted), size=size, seed=seed
                )
                for index, clip in enumerate(wanted):
                    if not is_missing(clip):
                        file = Path(scratch) / "clip.mp4"
                        encode(file, scenes.film(index, FPS), scenes[index].audio, FPS)
                        made.append((clip, file.read_bytes()))
                    yield clip[0]
    write(folder, [clip for each in listed.values() for clip in each], made)


def _vggsound(folder: Path, listed: list[Clip], made: list[tuple[Clip, bytes]]) -> None:
    """Two archives, the second of them cut off behind its clips; a clip listed twice, one of no task."""
    files = {f"{PREFIX}{video}_{start:06d}.mp4": data for (video, start, _, _), data in made}
    names = list(files)
    half = len(names) // 2
    write_bytes(folder / "vggsound_00.tar.gz", _tar({name: files[name] for name in names[:half]}, "w:gz"))
    rest = {name: files[name] for name in names[half:]} | {f"{PREFIX}cut-off-001_000000.mp4": files[names[0]]}
    write_bytes(folder / "vggsound_01.tar.gz", _tar(rest, "w:gz")[: -len(files[names[0]]) // 2])
    odd = [listed[0], ("no-task-001", 0, "zebra braying", "train"), ("cut-off-001", 0, listed[0][2], "train")]
    write_text(folder / "vggsound.csv", _csv([*listed, *odd]))


def _audioset(folder: Path, listed: list[Clip], made: list[tuple[Clip, bytes]]) -> None:
    """Single files named in milliseconds; a training clip with classes of two tasks."""
    for (video, start, _, _), data in made:
        write_bytes(folder / f"{video}_{1000 * start}_{1000 * (start + 10)}.mp4", data)
    _segments(folder, listed)


def _segments(folder: Path, listed: list[Clip]) -> dict[str, str]:
    """AudioSet's lists; returns the mid of each class."""
    names = list(dict.fromkeys(clip[2] for clip in listed))
    mids = {name: f"/m/{number:04d}" for number, name in enumerate(names)}
    rows = [[str(number), mid, name] for number, (name, mid) in enumerate(mids.items())]
    write_text(folder / "class_labels_indices.csv", _csv([["index", "mid", "display_name"], *rows]))
    for file, split in (("balanced_train_segments.csv", "train"), ("eval_segments.csv", "test")):
        lines = [f'{v}, {s}.000, {s + 10}.000, "{mids[name]}"' for v, s, name, which in listed if which == split]
        lines += [f'both-tasks1, 0.000, 10.000, "{mids[names[0]]},{mids[names[-1]]}"'] * (split == "train")
        head = "# Segments csv\n# num_segs\n# YTID, start_seconds, end_seconds, positive_labels\n"
        write_text(folder / file, head + "\n".join(lines) + "\n")
    return mids


def _cav_mae(folder: Path, listed: list[Clip], made: list[tuple[Clip, bytes]]) -> None:
    """Ten pictures and a sound of each clip in files of their own; a clip without a sound."""
    mids, items = _segments(folder, listed), []
    for number, ((video, _, name, _), data) in enumerate(made):
        with in_memory(data) as film:
            length = read_duration(film) or 1.0
            frames, sound = read_cut(film, 0.0, length, STILLS / length, 256)
        for second, picture in enumerate(encode_jpegs(frames[:STILLS])):
            (folder / f"frames/frame_{second}").mkdir(parents=True, exist_ok=True)
            write_bytes(folder / f"frames/frame_{second}/{video}.jpg", picture)
        if number:
            _wav(folder / f"{video}.wav", sound)
        own = {"video_id": video, "wav": str(folder.absolute() / f"{video}.wav"), "labels": mids[name]}
        items.append(own | {"video_path": str(folder.absolute() / "frames")})
    write_text(folder / "data.json", json.dumps({"data": items}))


def _wav(path: Path, sound: Tensor) -> None:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((sound.clamp(-1, 1) * 32767).short().numpy().tobytes())
    write_bytes(path, out.getvalue())


def _video2dataset(folder: Path, listed: list[Clip], made: list[tuple[Clip, bytes]]) -> None:
    files: dict[str, bytes] = {}
    have = dict(made)
    for number, clip in enumerate(listed):
        url = f"https://www.youtube.com/watch?v={clip[0]}"
        failed = None if clip in have else "Video unavailable"
        status = "failed_to_download" if failed else "success"
        about = {"url": url, "key": f"{number:09d}", "status": status, "error_message": failed}
        files |= {f"{number:09d}.mp4": have[clip]} if clip in have else {}
        files[f"{number:09d}.json"] = json.dumps(about).encode()
    write_bytes(folder / "00000.tar", _tar(files, "w"))
    write_text(folder / "00000_stats.json", json.dumps({"count": len(listed), "successes": len(have)}))
    write_text(folder / "vggsound.csv", _csv(listed))


LAYOUTS: dict[str, tuple[str, Writer]] = {
    "vggsound": ("continual-vs", _vggsound),
    "audioset": ("continual-as", _audioset),
    "cav-mae": ("continual-as", _cav_mae),
    "video2dataset": ("continual-vs", _video2dataset),
}


def _csv(rows: list[Clip] | list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _tar(files: dict[str, bytes], mode: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()
