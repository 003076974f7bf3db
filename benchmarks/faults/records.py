"""Checkpoints, weights, shards and packed arrays with bytes cut off or flipped, and archives made to harm."""

import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.faults.kills import PLAN, ended, forked, videos
from benchmarks.faults.media import mutated
from stella.data.folder import Folder
from stella.data.pack import pack
from stella.data.packed import Packed
from stella.data.prepare import prepare
from stella.data.shards import Shards
from stella.errors import ClipError, StellaError, skippable
from stella.media.decode import decode
from stella.model import weights
from stella.model.avm import AVM
from stella.model.cav import CAV, preset

CHANGES = ("bits 1", "bits 10", "zeros 4096", "noise 512", "lost 1", "cut", "shuffled")


def checkpoints(run: Path, victim: Callable[[Path], None], root: Path, count: int) -> Iterator[tuple[str, str, str]]:
    """A stopped run whose newest checkpoint, or both, are damaged: it resumes from the older one or is refused."""
    whole = root / "whole-run"
    ended(forked(victim, whole))
    expected = (whole / "metrics.jsonl").read_bytes(), (whole / "model.safetensors").read_bytes()
    rng = random.Random(0)
    for number in range(count):
        out, both = root / f"damaged-{number}", number % 4 == 3
        shutil.copytree(run, out)
        stored = sorted((out / "checkpoints").glob("*.pt"))
        for path in stored if both else stored[-1:]:
            path.write_bytes(mutated(path.read_bytes(), CHANGES[number % len(CHANGES)], rng))
        status, _ = ended(forked(victim, out))
        if status == 0:
            found = (out / "metrics.jsonl").read_bytes(), (out / "model.safetensors").read_bytes()
            result = "same" if found == expected else "different"
        else:
            result = {2: "refused", None: "hung"}.get(status, f"ended with {status}")
        yield "both checkpoints" if both else "newest checkpoint", CHANGES[number % len(CHANGES)], result
        shutil.rmtree(out)


def weight_files(root: Path, count: int) -> Iterator[tuple[str, str, str]]:
    """Damaged weights: refused, or read as they were. Files of ours have a checksum; in others a flipped bit is another
    number, and nothing tells."""
    rng, model = random.Random(1), CAV(preset("tiny"))
    ours, theirs = root / "ours.safetensors", root / "theirs.pth"
    weights.save(ours, model, AVM(96, 3))
    torch.save({f"backbone.transformer.{k}": v for k, v in model.state_dict().items()}, theirs)
    for number in range(count):
        source = (ours, theirs)[number % 2]
        path, change = root / f"damaged{source.suffix}", CHANGES[number % len(CHANGES)]
        path.write_bytes(mutated(source.read_bytes(), change, rng))
        try:
            found = weights.load(path, preset("tiny")).model.state_dict()
            same = all(torch.equal(found[name], value) for name, value in model.state_dict().items())
            result = "same" if same else "another model" if source is ours else "other numbers"
        except StellaError:
            result = "refused"
        except Exception as error:
            result = f"crashed: {type(error).__name__}"
        yield f"weights {source.suffix}", change, result


def stored_clips(root: Path, count: int) -> Iterator[tuple[str, str, str]]:
    """Damaged shards and arrays: every clip is the one that was stored, or is refused."""
    src, rng = videos(root / "videos", 6), random.Random(2)
    prepare(src, root / "shards", seconds=0.5, size=48, workers=1, progress=False)
    pack(Folder(src, PLAN), root / "packed", pixels=32, spec_frames=64, size=37, workers=0, progress=False)
    for kind, open_source in (("shards", lambda path: Shards(path, 2, None)), ("packed", Packed)):
        whole = open_source(root / kind)
        clips = [whole[i] for i in range(len(whole))]
        files = sorted(path for path in (root / kind).iterdir() if path.suffix not in (".lock", ".jsonl", ""))
        for number in range(count):
            file, change, out = files[number % len(files)], CHANGES[number % len(CHANGES)], root / "damaged"
            shutil.copytree(root / kind, out, dirs_exist_ok=True)
            (out / file.name).write_bytes(mutated(file.read_bytes(), change, rng))
            yield f"{kind}: {file.suffix}", change, _read_back(lambda: open_source(out), clips)  # noqa: B023
            shutil.rmtree(out)


def _read_back(open_source: Callable[[], object], clips: list) -> str:
    skipped = 0
    try:
        source = open_source()
        for index, clip in enumerate(clips[: len(source)]):  # type: ignore[arg-type]
            try:
                with skippable("clip"):
                    found = source[index]  # type: ignore[index]
            except ClipError:
                skipped += 1
                continue
            if found.id == clip.id and not (
                torch.equal(found.video, clip.video) and torch.equal(found.audio, clip.audio)
            ):
                return "another clip"
    except StellaError:
        return "refused"
    except Exception as error:
        return f"crashed: {type(error).__name__}"
    return "clips skipped" if skipped else "same"


def hostile(root: Path) -> Iterator[tuple[str, str, str]]:
    """Files that reach outside, or grow when they are opened."""
    root.mkdir(parents=True, exist_ok=True)
    lists = {
        "ffconcat": "ffconcat version 1.0\nfile other.mpg\n",
        "ffconcat of itself": "ffconcat version 1.0\nfile a.mp4\nfile a.mp4\n",
        "HLS": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nother.mpg\n#EXT-X-ENDLIST\n",
        "SDP": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 50010 RTP/AVP 96\n",
    }
    for name, text in lists.items():
        (root / "a.mp4").write_text(text)
        try:
            decode(root / "a.mp4", PLAN, time_limit=5)
            yield name, "as .mp4", "opened"
        except ClipError as error:
            yield name, "as .mp4", f"refused: {error.reason}"
    buffer = io.BytesIO()
    torch.save({"norm.weight": torch.zeros(4)}, buffer)
    with zipfile.ZipFile(root / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as out:
        with zipfile.ZipFile(buffer) as whole:
            for member in whole.infolist():
                out.writestr(member.filename, whole.read(member))
        out.writestr("archive/data/9", bytes(1 << 28))
    header = json.dumps({"config": {"dim": 3 << 30, "heads": 3}})
    from safetensors.torch import save_file

    save_file({"backbone.norm.weight": torch.zeros(4)}, root / "absurd.safetensors", {"stella": header})
    for name in ("bomb.pth", "absurd.safetensors"):
        try:
            weights.load(root / name)
            yield name, "weights", "opened"
        except StellaError:
            yield name, "weights", "refused"
