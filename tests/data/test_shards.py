import io
import json
import pickle
import tarfile
import zlib
from pathlib import Path

import pytest
import torch
from helpers.disk import small_disk

from stella.clip import Labels, Source
from stella.data.shards import END_OF_TAR, Shards, scan
from stella.data.shards import sample as encode_sample
from stella.data.skipped import Skipped
from stella.data.stream import StreamConfig, evaluation_batches
from stella.data.writer import ShardWriter
from stella.errors import ClipError, StellaError
from stella.media.codecs import encode_flac, encode_jpegs

pytest.importorskip("av")
FPS = 8.0


def content(seed: int, frames: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth pictures, so that JPEG keeps them, that get brighter by 16 a frame; and noise."""
    gen = torch.Generator().manual_seed(seed)
    coarse = torch.rand(frames, 3, 3, 4, generator=gen) * 60
    smooth = torch.nn.functional.interpolate(coarse, (33, 44), mode="bilinear", align_corners=True)
    video = (smooth + 16 * torch.arange(frames)[:, None, None, None]).round().to(torch.uint8)
    return video, torch.rand(16_000 + seed, generator=gen) * 1.8 - 0.9


def sample(seed: int) -> bytes:
    name = f"v{seed}.x/é.mp4"
    meta = {"id": name, "source": name, "start": 0.0, "duration": 1.5, "label": f"class {seed}"}
    return encode_sample(meta, *content(seed), FPS)


@pytest.fixture(scope="module")
def samples() -> list[bytes]:
    return [sample(seed) for seed in range(5)]


@pytest.fixture
def folder(tmp_path: Path, samples: list[bytes]) -> Path:
    """Five clips in shards of two, written in another order than that of their names."""
    writer = ShardWriter(tmp_path)
    for position, number in enumerate((3, 1, 4, 0, 2)):
        writer.turn(f"shard-00000{position // 2}")
        writer.append(samples[number])
    writer.close()
    return tmp_path


def test_clips_come_back_in_the_order_of_their_sources(folder: Path) -> None:
    names = [f"shard-00000{n}.{e}" for n in range(3) for e in ("json", "tar")]
    assert sorted(p.name for p in folder.iterdir()) == names  # and nothing left over
    shards = pickle.loads(pickle.dumps(Shards(folder, frames=12, span=None)))  # it travels to workers
    assert isinstance(shards, Source)
    assert [shards[i].id for i in range(len(shards))] == [f"v{i}.x/é.mp4" for i in range(5)]
    assert [shards.labels(i) for i in range(5)] == [Labels(f"class {i}") for i in range(5)]
    for seed in range(5):
        frames, waveform = content(seed)
        clip = shards[seed]
        assert clip.labels == Labels(f"class {seed}")
        assert clip.video.shape == frames.shape and clip.video.dtype == torch.uint8
        assert (clip.video.float() - frames.float()).abs().mean() < 3
        assert torch.allclose(clip.audio, waveform, atol=1 / 32768)
    assert len(Shards(folder, frames=30, span=None)[0].video) == 30  # more than there are: shown again
    assert Shards(folder, frames=2, size=16)[0].video.shape == (2, 3, 16, 21)  # scaled to that short side


@pytest.mark.parametrize(("window", "numbers"), [(0.0, [2, 6]), (0.5, [4, 8]), (0.75, [5, 9]), (1.0, [6, 10])])
def test_a_window_lies_anywhere_in_the_clip(folder: Path, window: float, numbers: list[int]) -> None:
    """12 frames at 8 a second; a window of 1 s begins at 0 … 0.5 s, and its halves centre 0.25 and 0.75 s later."""
    frames, _ = content(0)
    shards = Shards(folder, frames=2, span=1.0)
    clip = shards.clip(0, window)
    found = [int((frames.float() - got.float()).abs().mean((1, 2, 3)).argmin()) for got in clip.video]
    assert found == numbers and (window != 0.5 or torch.equal(clip.video, shards[0].video))
    assert torch.equal(clip.audio, shards[0].audio)  # the sound is that of the whole clip


def test_webdataset_reads_them(folder: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    data = webdataset.WebDataset([str(p) for p in sorted(folder.glob("*.tar"))], shardshuffle=False)
    found = {json.loads(s["json"])["id"]: s for s in data}
    assert sorted(found) == [f"v{i}.x/é.mp4" for i in range(5)]
    one = found["v3.x/é.mp4"]
    assert sorted(k for k in one if k.endswith("jpg")) == [f"{n:03d}.jpg" for n in range(12)]
    assert one["000.jpg"].startswith(b"\xff\xd8") and one["flac"].startswith(b"fLaC")
    meta = json.loads(one["json"])
    assert (meta["label"], meta["source"], meta["start"], meta["duration"]) == ("class 3", "v3.x/é.mp4", 0.0, 1.5)


def test_samples_are_plain_tar_and_reproducible(samples: list[bytes]) -> None:
    with tarfile.open(fileobj=io.BytesIO(samples[0] + END_OF_TAR)) as tar:
        assert len(tar.getmembers()) == 14
    assert sample(0) == samples[0]


def test_a_writer_continues_a_shard_cut_anywhere(tmp_path: Path, samples: list[bytes]) -> None:
    """Whatever byte a kill cuts at, the whole samples stay and the rest is written anew to the same bytes."""
    whole = b"".join(samples[:3])
    ends = [0, len(samples[0]), len(samples[0] + samples[1]), len(whole)]
    cuts = [0, 1, 511, 512, 600, *(e + d for e in ends[1:] for d in (-513, -1, 0, 1, 512) if e + d <= len(whole))]
    cuts += torch.randint(0, len(whole), (20,), generator=torch.Generator().manual_seed(0)).tolist()
    for number, cut in enumerate(cuts):
        root = tmp_path / str(number)
        root.mkdir()
        (root / "shard-000000.tar.part").write_bytes(whole[:cut])
        writer = ShardWriter(root)
        writer.turn("shard-000000")
        kept = sum(end <= cut for end in ends[1:])
        assert len(writer.ids) == kept, cut
        for data in samples[kept:]:
            writer.append(data)
        writer.close()
        assert (root / "shard-000000.tar").read_bytes() == b"".join(samples) + END_OF_TAR
        assert len(Shards(root)) == 5


def test_a_writer_continues_after_a_kill_between_closing_steps(tmp_path: Path, samples: list[bytes]) -> None:
    part, shard = tmp_path / "shard-000000.tar.part", tmp_path / "shard-000000.tar"
    part.write_bytes(samples[0] + END_OF_TAR)  # killed before the renaming
    assert len(ShardWriter(tmp_path).ids) == 1
    part.write_bytes(samples[0] + END_OF_TAR)
    part.rename(shard)  # killed before the indexing
    (tmp_path / "shard-000000.json.tmp").write_text("{half")
    writer = ShardWriter(tmp_path)
    writer.turn("shard-000001")
    writer.append(samples[1])
    writer.close()
    assert [Shards(tmp_path)[i].id for i in range(2)] == ["v0.x/é.mp4", "v1.x/é.mp4"]


def test_a_part_with_damage_inside_is_cut_before_it(tmp_path: Path, samples: list[bytes]) -> None:
    damaged = bytearray(b"".join(samples[:3]))
    damaged[len(samples[0]) + len(samples[1]) // 2] ^= 0xFF
    (tmp_path / "x.tar").write_bytes(damaged)
    entries, end = scan(tmp_path / "x.tar")
    assert ([e.id for e in entries], end) == (["v0.x/é.mp4"], len(samples[0]))


def test_no_clip_is_written_twice(tmp_path: Path, samples: list[bytes]) -> None:
    writer = ShardWriter(tmp_path)
    writer.turn("shard-000000")
    writer.append(samples[0])
    with pytest.raises(ValueError, match="already"):
        writer.append(samples[0])


def test_a_full_disk_leaves_whole_samples(tmp_path: Path, samples: list[bytes]) -> None:
    writer = ShardWriter(tmp_path)
    writer.turn("shard-000000")
    writer.append(samples[0])
    with small_disk(len(samples[0]) + 1000), pytest.raises(StellaError, match="free some space and run again"):
        writer.append(samples[1])
    writer.append(samples[2])
    writer.close()
    assert (tmp_path / "shard-000000.tar").read_bytes() == samples[0] + samples[2] + END_OF_TAR


def test_damage_is_told(folder: Path) -> None:
    shards = Shards(folder)
    place = next(i for i in range(5) if "shard-000001.tar" in shards.location(i))
    shard = folder / "shard-000001.tar"
    good = shard.read_bytes()
    at = good.index(b"fLaC") + 2000
    shard.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    outcomes = [_outcome(shards, i) for i in range(5)]
    assert outcomes.count("damaged shard") == 1
    shard.write_bytes(b"\0" * len(good))
    assert _outcome(shards, place) == "damaged shard"
    shard.write_bytes(good[:-1])
    with pytest.raises(StellaError, match=r"shard-000001\.tar is damaged"):
        Shards(folder)
    shard.unlink()
    assert _outcome(shards, place) == "damaged shard"
    with pytest.raises(StellaError, match=r"shard-000001\.tar is missing beside shard-000001\.json"):
        Shards(folder)


def _outcome(shards: Shards, index: int) -> str:
    try:
        return shards[index].id
    except ClipError as error:
        assert "shard-000001.tar" in error.path
        return error.reason


def test_a_missing_or_broken_index_is_told(folder: Path) -> None:
    index = folder / "shard-000002.json"
    index.write_text("{")
    with pytest.raises(StellaError, match=r"shard-000002\.json is not an index"):
        Shards(folder)
    index.unlink()
    with pytest.raises(StellaError, match=r"shard-000002\.json is missing"):
        Shards(folder)


def test_folders_without_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match="holds no finished shards"):
        Shards(tmp_path)
    with pytest.raises(StellaError, match="is not a folder"):
        Shards(tmp_path / "none")


def with_meta(good: bytes, **changed: object) -> bytes:
    """The first sample with other fields in its JSON."""
    size = tarfile.TarInfo.frombuf(good[:512], "utf-8", "strict").size
    meta = json.dumps(json.loads(good[512 : 512 + size]) | changed).encode()
    info = tarfile.TarInfo("x.json")
    info.size = len(meta)
    rest = good[512 + size + -size % 512 :]
    return info.tobuf(tarfile.USTAR_FORMAT) + meta + bytes(-len(meta) % 512) + rest


def with_member(good: bytes, number: int, data: bytes) -> bytes:
    """The first sample with another file in the place of a member, its checksum right."""
    size = tarfile.TarInfo.frombuf(good[:512], "utf-8", "strict").size
    meta = json.loads(good[512 : 512 + size])
    at, parts = 512 + size + -size % 512, []
    for length in meta["sizes"]:
        parts.append(good[at + 512 : at + 512 + length])
        at += 512 + length + -length % 512
    parts[number] = data
    changed = {"sizes": [len(part) for part in parts], "crc32": [zlib.crc32(part) for part in parts]}
    blocks = b"".join(bytes(512) + part + bytes(-len(part) % 512) for part in parts)
    return with_meta(good, **changed)[: 512 + -(-len(json.dumps(meta | changed)) // 512) * 512] + blocks


HOSTILE = {
    "fps 0": lambda good: with_meta(good, fps=0),
    "fps nan": lambda good: with_meta(good, fps=float("nan")),
    "fps 1e300": lambda good: with_meta(good, fps=1e300),
    "a text as fps": lambda good: with_meta(good, fps="fast"),
    "no frames": lambda good: with_meta(good, sizes=[5], crc32=[0]),
    "no members": lambda good: with_meta(good, sizes=[], crc32=[]),
    "absurd sizes": lambda good: with_meta(good, sizes=[10**15] * 13),
    "negative sizes": lambda good: with_meta(good, sizes=[-1] * 13),
    "no list of sizes": lambda good: with_meta(good, sizes=7),
    "another id": lambda good: with_meta(good, id=5),
    "a JSON list": lambda good: good[:512] + b"[" + good[513:],
    "deep JSON": lambda good: good[:512] + b"[" * 200 + good[712:],
    "no picture": lambda good: with_member(good, 4, b"hello"),
    "an empty picture": lambda good: with_member(good, 4, b""),
    "half a picture": lambda good: with_member(good, 4, encode_jpegs(content(0)[0])[4][:300]),
    "no sound": lambda good: with_member(good, 12, b"hello"),
    "half a sound": lambda good: with_member(good, 12, encode_flac(content(0)[1])[:9000]),
    "a list of sounds": lambda good: with_member(good, 12, b"ffconcat version 1.0\nfile x\n"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_broken_sample_is_a_skip_and_the_others_are_read(kind: str, tmp_path: Path, samples: list[bytes]) -> None:
    """A shard that anybody may have written, with an index that fits."""
    data = HOSTILE[kind](samples[0])
    shard = tmp_path / "shard-000000.tar"
    shard.write_bytes(data + samples[1] + END_OF_TAR)
    clips = [{"id": "v0.x/é.mp4", "source": "v0", "start": 0.0, "offset": 0}]
    clips.append({"id": "v1.x/é.mp4", "source": "v1", "start": 0.0, "offset": len(data)})
    index = {"bytes": shard.stat().st_size, "clips": clips}
    shard.with_suffix(".json").write_text(json.dumps(index))
    skipped = Skipped()
    config = StreamConfig(batch_size=2, size=16, spec_frames=24, mels=8)
    batches = list(evaluation_batches(Shards(tmp_path, frames=12, span=None), config, skipped=skipped))
    assert [batch.ids.tolist() for batch in batches] == [[1]]
    assert skipped.counts == {"damaged shard": 1}


@pytest.mark.parametrize("change", [{"offset": -5}, {"offset": "x"}, {"id": 7}, {"start": "x"}, {"label": [1]}])
def test_an_index_of_other_types_is_told(change: dict[str, object], folder: Path) -> None:
    index = folder / "shard-000000.json"
    tree = json.loads(index.read_text())
    tree["clips"][0] |= change
    index.write_text(json.dumps(tree))
    with pytest.raises(StellaError, match="is not an index of shards"):
        Shards(folder)
