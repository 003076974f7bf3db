import gc
import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.streams import check_it_resumes_at_every_batch, ids, same
from helpers.videos import Batched, Long, Videos

from stella.clip import Batch, BatchSource, Clip, labels_of
from stella.data import workers
from stella.data.skipped import Skipped
from stella.data.stream import Stream, StreamConfig, evaluation_batches
from stella.errors import ClipError, ConfigError, StellaError
from stella.media.augment import center_crop
from stella.media.fbank import fbank

CONFIG = StreamConfig(batch_size=4, epochs=2, size=16, spec_frames=24, mels=8, seed=3)


def videos(length: int, task: str = "", bad: Any = (), **more: Any) -> Videos:
    """Clips of different sizes."""
    return Videos(length, task, width=20, widths=3, bad=frozenset(bad), **more)


def two_tasks() -> list[tuple[str, Videos]]:
    return [("a", videos(10)), ("b", videos(7, "b", bad={2}))]


def test_every_epoch_holds_every_clip_once_in_an_order_of_its_own() -> None:
    tasks = {"a": videos(10), "b": videos(5, "b")}
    stream = Stream(tasks, CONFIG)
    batches = list(stream)
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2, 4, 1, 4, 1] and len(stream) == 10
    assert batches[0].video.shape == (4, 2, 3, 16, 16) and batches[0].audio.shape == (4, 24, 8)
    assert batches[0].video.dtype == torch.uint8 and batches[0].ids.dtype == torch.int64
    epochs = [[id for batch in ids(batches)[a:b] for id in batch] for a, b in ((0, 3), (3, 6), (6, 8), (8, 10))]
    assert [sorted(e) for e in epochs] == [list(range(10))] * 2 + [list(range(10, 15))] * 2
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    assert not same(batches, Stream(tasks, replace(CONFIG, seed=4)))
    assert same(batches, Stream([("z", videos(10)), ("z", videos(5, "b"))], CONFIG))  # names change no number


def test_without_augmentation_a_batch_is_the_clips_cropped() -> None:
    source = videos(6)
    batches = list(evaluation_batches(source, replace(CONFIG, drop_last=True)))
    assert ids(batches) == [[0, 1, 2, 3], [4, 5]]
    for index, (video, audio) in enumerate((v, a) for b in batches for v, a in zip(b.video, b.audio, strict=True)):
        assert torch.equal(video, center_crop(source[index].video[None], 16)[0])
        assert torch.allclose(audio, fbank(source[index].audio[None], frames=24, mels=8)[0], atol=1e-5)
    assert [labels.name for labels in labels_of(source, batches[0].ids)] == ["c0", "c1", "c0", "c1"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_clips_decoded_one_by_one_are_made_on_the_gpu_and_are_the_same() -> None:
    config = StreamConfig(batch_size=3, size=16, spec_frames=32, mels=16)
    pairs = zip(*(evaluation_batches(Videos(7), config, device) for device in ("cuda", "cpu")), strict=True)
    for ours, theirs in pairs:
        assert ours.video.is_cuda and ours.audio.is_cuda and ours.ids.is_cuda
        assert torch.equal(ours.ids.cpu(), theirs.ids)
        torch.testing.assert_close(ours.video.cpu(), theirs.video, rtol=0, atol=1)  # a half may round either way
        torch.testing.assert_close(ours.audio.cpu(), theirs.audio, rtol=1e-3, atol=1e-3)


def test_augmentation_changes_pictures_and_sound_from_epoch_to_epoch() -> None:
    first, second = Stream({"a": videos(4)}, replace(CONFIG, shuffle=False))
    [plain] = evaluation_batches(videos(4), CONFIG)
    assert ids([first, second]) == [[0, 1, 2, 3]] * 2
    for other in (second, plain):
        assert not torch.equal(first.video, other.video) and not torch.equal(first.audio, other.audio)
    [cropped, _] = Stream({"a": videos(4)}, replace(CONFIG, shuffle=False, augment="crop"))
    assert not torch.equal(cropped.video, plain.video) and torch.equal(cropped.audio, plain.audio)


def test_the_number_of_workers_changes_no_number() -> None:
    runs = [list(Stream(two_tasks(), replace(CONFIG, workers=n, prefetch=p))) for n, p in ((0, 2), (1, 3), (2, 1))]
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])


def windows(batches: Any) -> list[int]:
    """Of all clips, from 0 to 80."""
    return [int(video[0, 0, 0, 0]) % 100 for batch in batches for video in batch.video]


def test_training_draws_a_window_for_each_clip_and_evaluation_takes_the_middle() -> None:
    config = replace(CONFIG, epochs=3, shuffle=False)
    drawn = windows(Stream({"a": Long(40)}, config))
    epochs = [drawn[:40], drawn[40:80], drawn[80:]]
    assert epochs[0] != epochs[1] != epochs[2] and all(len(set(epoch)) > 20 for epoch in epochs)
    assert min(drawn) < 8 and max(drawn) > 72 and 34 < sum(drawn) / 120 < 46
    assert drawn == windows(Stream({"a": Long(40)}, config))
    assert drawn != windows(Stream({"a": Long(40)}, replace(config, seed=4)))
    assert windows(evaluation_batches(Long(5), config)) == [40] * 5
    plain = list(Stream({"a": Long(5)}, replace(config, augment=False)))
    assert windows(plain) == [40] * 15 and same(plain[:2], evaluation_batches(Long(5), config))


def test_windows_change_no_other_draw() -> None:
    """Crops and sound are those of the same clips without windows, and so are the numbers that older versions drew."""
    fixed = [Long(6)[index] for index in range(6)]
    for one, other in zip(Stream({"a": Long(6)}, CONFIG), Stream({"a": fixed}, CONFIG), strict=True):
        assert torch.equal(one.audio, other.audio) and torch.equal(one.ids, other.ids)
        assert set(windows([other])) == {40}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "tasks",
    [
        two_tasks(),
        [("a", videos(11, bad={1, 5})), ("r", Batched(10))],
        [("a", Long(11, bad=frozenset({1, 5}))), ("b", Long(6, "b"))],
    ],
)
def test_it_resumes_at_every_batch(tasks: Any, drop_last: bool) -> None:
    check_it_resumes_at_every_batch(tasks, replace(CONFIG, drop_last=drop_last))


def test_it_resumes_with_workers_that_ran_ahead() -> None:
    tasks = [("a", Long(10)), ("b", Long(7, "b", bad=frozenset({2})))]
    batches = list(Stream(tasks, CONFIG))
    ahead = Stream(tasks, replace(CONFIG, workers=2, prefetch=3))
    for done, batch in enumerate(ahead, 1):
        assert same([batch], [batches[done - 1]])
        if done == 5:
            break
    state = ahead.state_dict()
    assert same([next(ahead)], [batches[5]])  # leaving the loop lost nothing
    for stream in (ahead, Stream(tasks, CONFIG)):
        stream.load_state_dict(state)
        assert same(stream, batches[5:])


def test_a_state_of_another_plan_is_refused() -> None:
    state = Stream(two_tasks(), CONFIG).state_dict()
    with pytest.raises(StellaError, match="batch_size was 4 and is now 3"):
        Stream(two_tasks(), replace(CONFIG, batch_size=3)).load_state_dict(state)
    with pytest.raises(StellaError, match="clips was"):
        Stream([("a", videos(10))], CONFIG).load_state_dict(state)


LAST = replace(CONFIG, shuffle=False, epochs=1, most_bad=1.0)


@pytest.mark.parametrize(
    ("tasks", "config", "expected"),
    [
        ({"a": videos(10), "b": videos(10)}, CONFIG, [*[None] * 5, 0, *[None] * 5, 1]),
        ({"a": Batched(10), "b": Batched(10)}, CONFIG, [*[None] * 5, 0, *[None] * 5, 1]),
        # whole chunks at the end are bad: the batch before them is known to be the last
        ({"a": videos(16, bad=range(8, 16)), "b": videos(4)}, LAST, [None, 0, 1]),
        ({"a": videos(11, bad={1}), "b": Batched(7)}, replace(LAST, drop_last=True), [None, 0, 1]),
    ],
)
def test_it_tells_when_a_task_ended(tasks: Any, config: StreamConfig, expected: list[int | None]) -> None:
    stream = Stream(tasks, config)
    assert [stream.finished_task for _ in stream] == expected


def test_skipped_clips_shorten_no_batch_but_the_last(tmp_path: Path) -> None:
    path = tmp_path / "skipped.jsonl"
    skipped, config = Skipped(path), replace(CONFIG, shuffle=False)
    tasks = [("a", videos(5)), ("b", videos(11, bad={0, 3, 9}))]
    stream = Stream(tasks, config, skipped=skipped)
    assert ids(list(stream)) == [[0, 1, 2, 3], [4]] * 2 + [[6, 7, 9, 10], [11, 12, 13, 15]] * 2
    assert (stream.position.tried, stream.position.bad) == (32, 6)
    assert skipped.counts == {"not a media file": 2, "no audio track": 1}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == [5, 8, 14]
    assert lines[1] == {"id": 8, "path": "file3.mp4", "reason": "not a media file", "remedy": "leave it out"}
    again = Skipped(path)
    list(Stream(tasks, config, skipped=again))
    assert len(path.read_text().splitlines()) == 3 and again.counts == skipped.counts


def test_a_torn_line_of_the_list_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "skipped.jsonl"
    Skipped(path).add("a", ClipError("a.mp4", "time limit", "wait"))
    path.write_bytes(path.read_bytes() + b'{"id": "b", "pa')
    Skipped(path).add("c", ClipError("c.mp4", "time limit", "wait"))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "c"]


def test_too_many_bad_clips_stop_the_run_with_their_reasons() -> None:
    config, fifth = replace(CONFIG, epochs=1), set(range(0, 25, 5))
    assert len(list(Stream({"a": videos(25, bad=fifth)}, config))) == 5  # a fifth is borne
    with pytest.raises(StellaError, match=r"6 of 25 clips .*\(4 no audio track, 2 not a media file\)"):
        list(Stream({"a": videos(25, bad=fifth | {12})}, config))
    assert len(list(Stream({"a": videos(25, bad=fifth | {12})}, replace(config, most_bad=0.5)))) == 5
    assert len(list(Stream({"a": videos(19, bad=range(18))}, config))) == 1  # too few were tried to tell


def test_hopeless_runs_stop_at_once_and_hopeful_ones_survive_a_bad_start() -> None:
    config = replace(CONFIG, epochs=1, shuffle=False)
    with pytest.raises(StellaError, match="16 of 20"):
        list(Stream({"a": videos(400, bad=range(4, 400))}, config))
    assert len(list(Stream({"a": videos(100, bad=range(6))}, config))) == 24


def test_the_count_of_bad_clips_survives_a_restart() -> None:
    source, config = videos(60, bad={*range(0, 60, 5), 58}), replace(CONFIG, epochs=1, shuffle=False)
    stream, second = Stream({"a": source}, config), Stream({"a": source}, config)
    for _ in range(6):
        next(stream)
    second.load_state_dict(stream.state_dict())
    for rest in (stream, second):
        with pytest.raises(StellaError, match="13 of 60"):
            list(rest)


@pytest.mark.parametrize(
    ("source", "more", "says"),
    [
        (videos(3, bad=range(3)), {}, r"too few clips of task a .*2 no audio track, 1 not a media file"),
        (videos(0), {}, "task a has 0 clips"),
        (videos(3), {"drop_last": True}, "task a has 3 clips and one batch needs 4"),
        (videos(3), {"batch_size": 0}, "batch_size must be at least 1"),
        (videos(3), {"most_bad": 2.0}, "most_bad=2.0 must lie in 0…1"),
        ([replace(videos(4)[i], video=videos(4)[i].video[: 1 + i % 2]) for i in range(4)], {}, r"\[1, 2\] frames"),
    ],
)
def test_what_gives_no_batch_is_an_error(source: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises((StellaError, ConfigError), match=says):
        list(Stream({"a": source}, replace(CONFIG, **more)))


def test_a_clip_without_enough_sound_is_skipped() -> None:
    clips, skipped = [videos(4)[i] for i in range(4)], Skipped()
    clips[2] = replace(clips[2], audio=clips[2].audio[:100])
    assert ids(list(evaluation_batches(clips, CONFIG, skipped=skipped))) == [[0, 1, 3]]
    assert skipped.counts == {"too little audio": 1}


def test_hanging_and_dying_workers_cost_only_their_clip(tmp_path: Path) -> None:
    """In one run: a clip that hangs, one that kills its process each time, and a worker killed once from outside."""
    harm = {"hang": frozenset({5}), "deadly": frozenset({9}), "once": {2: tmp_path / "flag"}}
    skipped, config = Skipped(), replace(CONFIG, epochs=1, shuffle=False, workers=2, time_limit=0.5)
    began = time.monotonic()
    batches = list(Stream({"a": videos(12, **harm)}, config, skipped=skipped))
    assert time.monotonic() - began < 30
    assert same(batches, Stream({"a": videos(12, bad={5, 9})}, replace(config, workers=0)))
    assert ids(batches) == [[0, 1, 2, 3], [4, 6, 7, 8], [10, 11]]
    assert {id: (r["path"], r["reason"]) for id, r in skipped.records.items()} == {
        5: ("file5.mp4", "time limit"),
        9: ("file9.mp4", "worker died"),
    }


@dataclass(frozen=True)
class Doomed(Videos):
    """Dies at another clip each time, as when memory is short."""

    flags: Path = Path()

    def __getitem__(self, index: int) -> Clip:
        flag = self.flags / str(index)
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Faulty(Videos):
    def __getitem__(self, index: int) -> Clip:
        return super().__getitem__(index + 1 // (2 - index))


@pytest.mark.parametrize("workers", [0, 1])
def test_any_exception_of_one_clip_is_a_counted_skip(workers: int) -> None:
    skipped, config = Skipped(), replace(CONFIG, epochs=1, shuffle=False, workers=workers)
    assert ids(list(Stream({"a": Faulty(7)}, config, skipped=skipped))) == [[0, 1, 3, 4], [5, 6]]
    [record] = skipped.records.values()
    assert record["reason"] == "unforeseen error" and record["path"] == "file2.mp4"


def test_what_is_not_a_clips_fault_stops_the_run(tmp_path: Path) -> None:
    class Local(Videos):
        pass

    for source, says in (
        (Doomed(8, flags=tmp_path), r"workers keep dying .*use fewer workers"),
        (Local(8), "cannot be sent to worker processes"),
    ):
        with pytest.raises(StellaError, match=says):
            list(Stream({"a": source}, replace(CONFIG, workers=1, shuffle=False)))


def test_workers_end_with_the_stream_and_when_it_is_left() -> None:
    stream = Stream({"a": videos(40)}, replace(CONFIG, workers=2))
    next(stream)
    processes = multiprocessing.active_children()
    assert len(processes) == 2 and all(process.is_alive() for process in processes)
    del stream
    gc.collect()
    assert not any(process.is_alive() for process in processes)


def test_batch_sources_are_rendered_in_one_call() -> None:
    assert isinstance(Batched(3), BatchSource) and not isinstance(Videos(3), BatchSource)
    config = replace(CONFIG, epochs=1)
    batches: list[Batch] = list(Stream({"r": Batched(10)}, config))
    assert [len(b) for b in batches] == [4, 4, 2]
    assert same(batches, Stream({"r": Batched(10)}, replace(config, workers=1)))
    for ours, theirs in zip(
        evaluation_batches(Batched(10), CONFIG), evaluation_batches(Videos(10), CONFIG), strict=True
    ):
        assert torch.equal(ours.video, theirs.video) and torch.equal(ours.ids, theirs.ids)


class Late(Batched):
    def tensors(self, indices: Any, device: Any = "cpu") -> Any:
        time.sleep(1.5)
        return super().tensors(indices, device)


def test_clips_made_at_once_may_take_the_time_limit_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SILENCE", 1.0)
    config = replace(CONFIG, epochs=1, workers=1)
    assert ids(list(Stream({"r": Late(4)}, replace(config, shuffle=False)))) == [[0, 1, 2, 3]]
    with pytest.raises(StellaError, match=r"could not make 4 clips at once \(time limit\)"):
        next(Stream({"r": Late(4)}, replace(config, time_limit=0.5)))
