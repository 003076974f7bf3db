"""Archives and lists as people have them, with their dirt."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np

PREFIX = "scratch/shared/beegfs/hchen/train_data/VGGSound_final/video/"
SPORT, TUNE = "motorboat, speedboat acceleration", "playing banjo"


def pack(path: Path, members: dict[str, bytes], cut: int | None = None) -> Path:
    """An archive; `cut` takes so many bytes off its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])
    return path


def write_vggsound(folder: Path, videos: list[bytes]) -> Path:
    """Two archives, one of them cut off; a clip in both, one twice in the list, one missing, one of no task."""
    root = folder / "have"
    good = {f"{PREFIX}{id}.mp4": videos[n % 4] for n, id in enumerate(("a_000005", "b_000000", "c_000010", "z_000001"))}
    good |= {"../../outside_000007.mp4": videos[1], f"{PREFIX}broken_000001.mp4": b"hello", f"{PREFIX}notes.txt": b"x"}
    pack(root / "vggsound_00.tar.gz", good)
    more = {f"{PREFIX}{id}.mp4": videos[n % 4] for n, id in enumerate(("a_000005", "d_000002", "e_000003"))}
    noise = np.random.default_rng(0).bytes(300_000)  # the cut falls into it
    pack(root / "vggsound_01.tar.gz", more | {f"{PREFIX}f_000004.mp4": noise}, cut=100_000)
    listed = [
        ("a", 5, SPORT, "train"),
        ("b", 0, TUNE, "test"),
        ("c", 10, TUNE, "train"),
        ("z", 1, "zebra braying", "train"),
    ]
    listed += [("a", 5, SPORT, "train"), ("outside", 7, TUNE, "train"), ("broken", 1, TUNE, "train")]
    listed += [("d", 2, SPORT, "train"), ("e", 3, SPORT, "test"), ("f", 4, SPORT, "train"), ("gone", 0, SPORT, "train")]
    (folder / "vggsound.csv").write_text("".join(f'{v},{s},"{c}",{w}\n' for v, s, c, w in listed))
    return root


def reasons(dst: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (dst / "skipped.jsonl").read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line["reason"] for line in lines}


def shard_bytes(dst: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(dst.glob("shard-*"))}
