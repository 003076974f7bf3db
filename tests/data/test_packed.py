import io
import json
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.packs import CONFIG, close, levels, packed
from helpers.streams import check_it_resumes_at_every_batch, ids, same
from helpers.videos import Batched, Long, Videos
from rich.console import Console
from typer.testing import CliRunner

from stella.cli import app
from stella.clip import ArraySource, Batch, Labels
from stella.config import resolve
from stella.data.packed import PREFETCHED, Packed, PackedConfig
from stella.data.scenes import Scenes
from stella.data.stream import Stream, evaluation_batches
from stella.data.views import join, part
from stella.errors import StellaError
from stella.media.fbank import MEAN, STD
from stella.media.inputs import derived
from stella.methods.finetune import Finetune
from stella.runs.config import RunConfig
from stella.runs.loop import pretrain


def test_what_was_packed_is_read_back(tmp_path: Path) -> None:
    tasks = [("one", Videos(7, "a")), ("two", Videos(5, "bb"))]
    source = packed(tmp_path / "p", tasks)
    every = [clip for _, videos in tasks for clip in (videos[i] for i in range(len(videos)))]
    assert len(source) == 12 and isinstance(source, ArraySource)
    for index, clip in enumerate(every):
        ours = source[index]
        assert close(ours, clip) and ours.id == clip.id and ours.audio.dtype == torch.float32
        assert ours.labels == source.labels(index) == Labels(clip.labels.name, "one" if index < 7 else "two")
        assert source.location(index) == f"{tmp_path / 'p'}, {clip.id}"
    for outside in (12, -1):
        with pytest.raises(IndexError):
            source[outside]
    assert (source.header.pixels, source.header.spec_frames) == (16, 24)
    names = sorted(path.name for path in (tmp_path / "p").iterdir())
    assert names == ["clips.json", "frames.u8", "lengths.i64", "waveforms.i16"]
    unnamed = packed(tmp_path / "q", join([Videos(2, "a"), Videos(2, "bb")]))  # keeps the tasks of its clips
    assert unnamed.header.tasks == ["a", "a", "bb", "bb"] and unnamed.header.names == ["c0", "c1"] * 2


def test_the_arrays_are_plain(tmp_path: Path) -> None:
    """Whoever has numpy and the header can read them."""
    source = packed(tmp_path / "p", Videos(3))
    head = json.loads((tmp_path / "p" / "clips.json").read_text())
    frames = np.memmap(tmp_path / "p" / "frames.u8", np.uint8, "r").reshape(3, *head["frames"])
    sound = np.memmap(tmp_path / "p" / "waveforms.i16", "<i2", "r").reshape(3, head["samples"])
    assert np.array_equal(frames[1], source[1].video.numpy())
    assert np.array_equal(sound[0, :2000] / 32768, source[0].audio.double().numpy())
    assert not sound[0, 2000:].any()
    assert np.fromfile(tmp_path / "p" / "lengths.i64", "<i8").tolist() == [2000, 2700, 3400]


def test_full_scale_sound_does_not_wrap_around(tmp_path: Path) -> None:
    loud = part([replace(Videos(1)[0], audio=torch.tensor([1.0, -1.0]).repeat(500))], [0])
    assert packed(tmp_path / "p", loud)[0].audio[:2].tolist() == [32767 / 32768, -1.0]


def test_batches_are_the_clips_in_the_order_asked_for(tmp_path: Path) -> None:
    source = packed(tmp_path / "p", Videos(9))
    for indices in ([4, 1, 8], [0], [3, 3, 2], [8, 7, 6, 5, 4, 3, 2, 1, 0]):
        if len(indices) > 1:
            source.expect(indices)
        video, sound = source.tensors(indices)
        assert video.dtype == torch.uint8 and sound.dtype == torch.float32 and sound.shape == (len(indices), 4080)
        for row, index in enumerate(indices):
            length = source.lengths([index]).item()
            assert torch.equal(video[row], source[index].video)
            assert torch.equal(sound[row, :length], source[index].audio) and not sound[row, length:].any()
        assert source.lengths(indices).tolist() == [len(source[index].audio) for index in indices]
        video.zero_()  # what is handed out can be changed without harm
        assert torch.equal(source.tensors(indices)[0][0], source[indices[0]].video)


def test_what_nobody_comes_for_is_let_go(tmp_path: Path) -> None:
    source = packed(tmp_path / "p", Videos(9))
    for index in range(9):
        source.expect([index])
    assert len(source._prefetched) == PREFETCHED
    reading = list(source._prefetched.values())
    source.expect([8])  # once more: it is being read already
    assert list(source._prefetched.values()) == reading
    assert torch.equal(source.tensors([0])[0][0], source[0].video)


def test_a_stream_tells_it_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, asked = packed(tmp_path / "p", Videos(10)), list[tuple[str, list[int]]]()

    def noted(name: str) -> Callable[..., Any]:
        plain = getattr(Packed, name)
        return lambda self, indices, *more: (asked.append((name, list(indices))), plain(self, indices, *more))[1]

    for name in ("expect", "tensors"):
        monkeypatch.setattr(Packed, name, noted(name))
    first, second, third = ids(list(Stream({"p": source}, replace(CONFIG, epochs=1))))
    order = [(second, first), (third, second), (None, third)]  # what is announced, and then read
    calls = [
        [("expect", following)] * bool(following) + [("tensors", now), ("expect", now)] for following, now in order
    ]
    assert asked == [call for each in calls for call in each]


def test_a_stream_gives_the_same_batches_as_from_the_source_itself(tmp_path: Path) -> None:
    """Lengths count: what is behind a short clip's end is padding, not silence. Sound is rounded, hence the 1e-3."""
    videos = Videos(10)
    plain, ours = (list(evaluation_batches(s, CONFIG)) for s in (videos, packed(tmp_path / "p", videos)))
    assert len(plain) == 3 and same(ours, plain, sound=1e-3)
    assert (ours[0].audio[0, -1] == -MEAN / STD).all() and (ours[0].audio[3, -2] != -MEAN / STD).all()


def test_augmentation_is_that_of_every_source(tmp_path: Path) -> None:
    """Crop for crop that of a batch source; and crops and shifts reach as far as a plain source's do."""
    source = packed(tmp_path / "p", Videos(10))
    assert same(Stream({"p": source}, CONFIG), Stream({"p": Batched(10)}, CONFIG), sound=torch.inf)
    one = Videos(1)
    alone = packed(tmp_path / "one", one)
    many = replace(CONFIG, epochs=200, batch_size=1)
    crops = [{batch.video.numpy().tobytes() for batch in Stream({"p": s}, many)} for s in (one, alone)]
    assert len(crops[0]) > 50 and len(crops[0] & crops[1]) > 0.7 * len(crops[0])


def test_worker_processes_are_not_used_and_change_nothing(tmp_path: Path) -> None:
    source = packed(tmp_path / "p", Videos(10))
    alone, pooled = (Stream({"p": source}, replace(CONFIG, workers=n)) for n in (0, 2))
    assert not pooled.pooled
    next(pooled)
    assert not multiprocessing.active_children()
    next(alone)
    assert same(alone, pooled)
    mixed = Stream({"p": source, "v": Videos(4)}, replace(CONFIG, workers=1))  # workers open the folder for themselves
    assert mixed.pooled and same(mixed, Stream({"p": source, "v": Videos(4)}, CONFIG))
    assert torch.equal(pickle.loads(pickle.dumps(source))[3].video, source[3].video)


def test_it_resumes_at_every_batch(tmp_path: Path) -> None:
    check_it_resumes_at_every_batch({"p": packed(tmp_path / "p", Long(10), windows=5)}, CONFIG)


def change(root: Path, **changed: Any) -> None:
    path = root / "clips.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda root: os.truncate(root / "frames.u8", 1000),
            r"frames\.u8 is damaged: it has 1000 bytes instead of 5832; restore it",
        ),
        (lambda root: (root / "waveforms.i16").unlink(), r"waveforms\.i16 is missing; restore it"),
        (lambda root: (root / "clips.json").unlink(), r"holds no packed clips; make them with: stella pack"),
        (lambda root: (root / "clips.json").write_text("[1]"), r"clips\.json is damaged"),
        (lambda root: (root / "clips.json").write_text("{"), r"clips\.json is damaged"),
        (lambda root: change(root, colour=1), r"clips\.json does not describe packed clips"),
        (lambda root: change(root, version=1), r"has version 1 and this program reads version 3; pack again"),
        (lambda root: change(root, names=[]), r"ids, names, tasks and checksums differ in number"),
        (shutil.rmtree, r"p holds no packed clips"),
    ],
)
def test_what_is_not_a_whole_folder_is_refused_in_one_sentence(
    spoil: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    packed(tmp_path / "p", Videos(3))
    spoil(tmp_path / "p")
    with pytest.raises(StellaError, match=told) as error:
        Packed(tmp_path / "p")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["frames.u8", "waveforms.i16", "lengths.i64"])
def test_damage_is_an_error_when_it_is_read(name: str, tmp_path: Path) -> None:
    source = packed(tmp_path / "p", Videos(9))
    data = bytearray((tmp_path / "p" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "p" / name).write_bytes(data)
    with pytest.raises(StellaError, match=r"fails its checksum|lengths.i64 is damaged"):
        Packed(tmp_path / "p").tensors(range(9))
    with pytest.raises(StellaError, match=r"fails its checksum|lengths.i64 is damaged"):
        [Packed(tmp_path / "p")[i] for i in range(9)]
    if name != "lengths.i64":
        os.truncate(tmp_path / "p" / name, 1000)  # while it is open: not a bus error
        with pytest.raises(StellaError, match="ends at byte 1000"):
            source.tensors(range(9))


def test_a_stream_draws_the_stored_window_nearest_to_that_of_the_videos(tmp_path: Path) -> None:
    config = replace(CONFIG, epochs=8)
    five = packed(tmp_path / "5", Long(6), windows=5)
    stored, direct = (
        [level % 100 for batch in Stream({"p": source}, config) for level in levels(batch.video)]
        for source in (five, Long(6))
    )
    assert set(stored) == {0, 20, 40, 60, 80}
    assert max(abs(a - b) for a, b in zip(stored, direct, strict=True)) <= 16


def test_parts_and_joined_parts_read_ahead_too(tmp_path: Path) -> None:
    source = packed(tmp_path / "p", Videos(9))
    first, second = part(source, [5, 0, 7]), part(source, [2, 8])
    whole = join([first, second])
    assert isinstance(whole, ArraySource) and isinstance(first, ArraySource) and len(whole) == 5
    whole.expect([3, 1])
    assert list(source._prefetched) == [(torch.device("cpu"), 2, 0)]
    assert torch.equal(whole.tensors([3, 1])[0], torch.stack([source[2].video, source[0].video]))
    assert whole.lengths([3]).item() == len(source[2].audio) and whole[0].id == source[5].id
    other = part(packed(tmp_path / "q", Videos(2, "q")), [0])
    assert [join([first, other])[i].id for i in (0, 3)] == [source[5].id, "q/0"]


def test_a_configuration_finds_tasks_sizes_and_what_is_set_aside(tmp_path: Path) -> None:
    packed(tmp_path / "p", [("b", Videos(20, "b")), ("a", Videos(10, "aa"))])
    packed(tmp_path / "e", [("b", Videos(3, "bbb")), ("a", Videos(3, "aaaa"))])
    config = PackedConfig(path=str(tmp_path / "p"), eval_share=0.4)
    assert config.inputs() == derived(16, 24, 2)
    train, evaluate = config.train_tasks(), config.eval_tasks()
    assert [(name, len(s)) for name, s in train] == [("a", 6), ("b", 9)]
    assert [(name, len(s)) for name, s in evaluate] == [("a", 4), ("b", 11)]
    assert all(isinstance(s, ArraySource) for _, s in (*train, *evaluate))
    assert len({s[i].id for _, s in (*train, *evaluate) for i in range(len(s))}) == 30
    apart = replace(config, eval_path=str(tmp_path / "e"), tasks=("b", "a"))
    assert [(name, len(s)) for name, s in apart.eval_tasks()] == [("b", 3), ("a", 3)]
    assert [(name, len(s)) for name, s in apart.all_tasks()] == [("b", 20), ("a", 10)]
    assert apart.all_tasks(evaluation=True)[0][1][0].id == "bbb/0"
    with pytest.raises(StellaError, match=r"set data\.eval_path=FOLDER"):
        config.all_tasks(evaluation=True)


SCENES = ("data.source=scenes", "data.tasks=['task1','task2']", "data.clips=10", "data.eval_clips=4")
QUICK = (
    *("model.preset=tiny", "stream.batch_size=4", "memory.clips=7", "train.device=cpu", "train.log_every=1"),
    *("evaluate.batch=4", "data.source=packed"),
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of scenes, packed by the command, to train on and to evaluate on."""
    root = tmp_path_factory.mktemp("scenes")
    for name, more in (("train", []), ("eval", ["--eval"])):
        done = CliRunner().invoke(app, ["pack", str(root / name), *SCENES, "--workers", "1", *more])
        assert done.exit_code == 0 and ("20 clips" if name == "train" else "8 clips") in done.output, done.output
    return root


def test_the_command_packs_what_a_configuration_names(scenes: Path) -> None:
    source = Packed(scenes / "train")
    assert source.header.frames == [4, 3, 96, 96] and (source.header.pixels, source.header.spec_frames) == (96, 256)
    assert close(source[12], Scenes("task2", "train", 10)[2], 41200) and source.labels(12).task == "task2"
    assert source[12].id == Scenes("task2", "train", 10)[2].id
    assert Packed(scenes / "eval")[0].id == Scenes("task1", "eval", 4)[0].id


def test_a_run_trains_on_packed_clips(scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Batch] = []
    plain = Finetune.loss
    monkeypatch.setattr(Finetune, "loss", lambda self, batch: (seen.append(batch), plain(self, batch))[1])
    quiet, paths = Console(file=io.StringIO()), (f"data.path={scenes / 'train'}", f"data.eval_path={scenes / 'eval'}")
    for method in ("finetune", "multitask"):
        result = pretrain(
            resolve(RunConfig, None, [f"method={method}", *QUICK, *paths]), tmp_path / method, console=quiet
        )
        assert result.finished and result.end["A"] is not None
    assert [len(batch) for batch in seen[:6]] == [4, 4, 2] * 2
    assert seen[0].video.shape == (4, 4, 3, 96, 96) and seen[0].audio.shape == (4, 256, 128)
    assert sorted(id for batch in ids(seen[:6]) for id in batch) == list(range(20))
    assert len({int(i) // 10 for i in seen[6].ids}) == 2  # of both tasks in one batch
