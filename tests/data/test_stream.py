"""The fake sources stand at module level: real worker processes import them from here."""

import gc
import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stella.clip import Batch, BatchSource, Clip, Labels, labels_of
from stella.data.skipped import Skipped
from stella.data.stream import Stream, StreamConfig, evaluation_batches
from stella.errors import ClipError, ConfigError, StellaError
from stella.media.augment import center_crop
from stella.media.fbank import fbank

CONFIG = StreamConfig(batch_size=4, epochs=2, size=16, spec_frames=24, mels=8, seed=3)


@dataclass(frozen=True)
class Clips:
    """Clips of different sizes and lengths; some are bad, hang for ever, or kill their process, always or once."""

    length: int
    seed: int = 0
    bad: frozenset[int] = frozenset()
    hang: frozenset[int] = frozenset()
    deadly: frozenset[int] = frozenset()
    once: dict[int, Path] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Clip:
        if index in self.bad:
            raise ClipError(f"file{index}.mp4", ("no audio track", "not a media file")[index % 2], "leave it out")
        if index in self.hang:
            time.sleep(1000)
        flag = self.once.get(index)
        if index in self.deadly or (flag and not flag.exists()):
            if flag:
                flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        gen = torch.Generator().manual_seed(1000 * self.seed + index)
        video = torch.randint(0, 256, (2, 3, 18, 20 + index % 3), generator=gen, dtype=torch.uint8)
        return Clip(
            f"{index}", video, torch.randn(2000 + 100 * (index % 4), generator=gen), Labels(name=f"c{index % 2}")
        )

    def location(self, index: int) -> str:
        return f"file{index}.mp4"


@dataclass(frozen=True)
class Rendered:
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Clip:
        raise AssertionError("a batch source is asked for batches")

    def tensors(self, indices: Any, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        video = torch.stack([torch.full((2, 3, 18, 18), index, dtype=torch.uint8) for index in indices])
        waveforms = torch.stack([torch.sin(torch.arange(4000) * (0.01 + 0.01 * index)) for index in indices])
        return video.to(device), waveforms.to(device)


def equal(ours: Batch, theirs: Batch) -> bool:
    pairs = ((ours.video, theirs.video), (ours.audio, theirs.audio), (ours.ids, theirs.ids))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def same(ours: list[Batch], theirs: list[Batch]) -> bool:
    return len(ours) == len(theirs) and all(map(equal, ours, theirs))


def ids(batches: list[Batch]) -> list[list[int]]:
    return [batch.ids.tolist() for batch in batches]


def two_tasks() -> list[tuple[str, Clips]]:
    return [("a", Clips(10)), ("b", Clips(7, seed=1, bad=frozenset({2})))]


def test_every_epoch_holds_every_clip_once_in_an_order_of_its_own() -> None:
    stream = Stream({"a": Clips(10), "b": Clips(5, seed=1)}, CONFIG)
    batches = list(stream)
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2, 4, 1, 4, 1] and len(stream) == 10
    assert batches[0].video.shape == (4, 2, 3, 16, 16) and batches[0].audio.shape == (4, 24, 8)
    assert batches[0].video.dtype == torch.uint8 and batches[0].ids.dtype == torch.int64
    epochs = [[id for batch in ids(batches)[a:b] for id in batch] for a, b in ((0, 3), (3, 6), (6, 8), (8, 10))]
    assert [sorted(e) for e in epochs] == [list(range(10))] * 2 + [list(range(10, 15))] * 2
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    assert not same(batches, list(Stream({"a": Clips(10), "b": Clips(5, seed=1)}, replace(CONFIG, seed=4))))


def test_names_of_tasks_change_no_number() -> None:
    named = [
        list(Stream(list(zip(names, (Clips(6), Clips(5, seed=1)), strict=True)), CONFIG))
        for names in ("ab", "zy", "cc")
    ]
    assert same(named[0], named[1]) and same(named[0], named[2])


def test_without_augmentation_a_batch_is_the_clips_cropped() -> None:
    source = Clips(6)
    batches = list(evaluation_batches(source, replace(CONFIG, drop_last=True)))
    assert ids(batches) == [[0, 1, 2, 3], [4, 5]]
    for index, (video, audio) in enumerate((v, a) for b in batches for v, a in zip(b.video, b.audio, strict=True)):
        assert torch.equal(video, center_crop(source[index].video[None], 16)[0])
        alone = fbank(source[index].audio[None], frames=24, mels=8)[0]
        assert torch.allclose(audio, alone, atol=1e-5)


def test_augmentation_changes_pictures_and_sound_from_epoch_to_epoch() -> None:
    batches = list(Stream({"a": Clips(4)}, replace(CONFIG, shuffle=False)))
    plain = list(evaluation_batches(Clips(4), CONFIG))
    assert ids(batches) == [[0, 1, 2, 3]] * 2
    for one, other in ((batches[0], batches[1]), (batches[0], plain[0])):
        assert not torch.equal(one.video, other.video) and not torch.equal(one.audio, other.audio)


def test_the_number_of_workers_changes_no_number() -> None:
    runs = [list(Stream(two_tasks(), replace(CONFIG, workers=n, prefetch=p))) for n, p in ((0, 2), (1, 3), (2, 1))]
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])


@dataclass(frozen=True)
class Long(Clips):
    """All frames tell the window that was asked for."""

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index, 0.5)

    def clip(self, index: int, window: float) -> Clip:
        clip = super().__getitem__(index)
        return replace(clip, video=torch.full((2, 3, 18, 20), round(255 * window), dtype=torch.uint8))


def windows(batches: list[Batch]) -> list[int]:
    """Of all clips, from 0 to 255."""
    return [int(video[0, 0, 0, 0]) for batch in batches for video in batch.video]


def test_training_draws_a_window_for_each_clip_and_evaluation_takes_the_middle() -> None:
    config = replace(CONFIG, epochs=3, shuffle=False)
    drawn = windows(list(Stream({"a": Long(40)}, config)))
    epochs = [drawn[:40], drawn[40:80], drawn[80:]]
    assert epochs[0] != epochs[1] != epochs[2] and all(len(set(epoch)) > 25 for epoch in epochs)
    assert min(drawn) < 25 and max(drawn) > 230 and 110 < sum(drawn) / 120 < 145
    assert drawn == windows(list(Stream({"a": Long(40)}, config)))
    assert drawn != windows(list(Stream({"a": Long(40)}, replace(config, seed=4))))
    assert windows(list(evaluation_batches(Long(5), config))) == [128] * 5
    plain = list(Stream({"a": Long(5)}, replace(config, augment=False)))
    assert windows(plain) == [128] * 15 and same(plain[:2], list(evaluation_batches(Long(5), config)))


def test_windows_change_no_other_draw() -> None:
    """Crops and sound are those of a source without windows, and so are the numbers that older versions drew."""
    crops = Stream({"a": Held(Long(6))}, CONFIG)
    for one, other in zip(Stream({"a": Long(6)}, CONFIG), crops, strict=True):
        assert torch.equal(one.audio, other.audio) and torch.equal(one.ids, other.ids)
        assert set(windows([other])) == {128}


class Held:
    """A source's clips without its windows."""

    def __init__(self, source: Long) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Clip:
        return self.source[index]


def test_windows_survive_workers_bad_clips_and_a_resume_in_mid_epoch() -> None:
    tasks = {"a": Long(11, bad=frozenset({1, 5})), "b": Long(6, seed=1)}
    batches, states = run_with_states(CONFIG, tasks)
    assert len(set(windows(batches))) > 20
    assert same(batches, list(Stream(tasks, replace(CONFIG, workers=2))))
    for done in (1, 2, 5):
        resumed = Stream(tasks, CONFIG)
        resumed.load_state_dict(states[done])
        assert same(list(resumed), batches[done:])


def run_with_states(config: StreamConfig, tasks: Any) -> tuple[list[Batch], list[dict[str, Any]]]:
    stream = Stream(tasks, config)
    states = [stream.state_dict()]
    batches = []
    for batch in stream:
        batches.append(batch)
        states.append(json.loads(json.dumps(stream.state_dict())))
    return batches, states


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("tasks", [two_tasks(), [("a", Clips(11, bad=frozenset({1, 5}))), ("r", Rendered(10))]])
def test_it_resumes_at_every_batch(tasks: Any, drop_last: bool) -> None:
    config = replace(CONFIG, drop_last=drop_last)
    batches, states = run_with_states(config, tasks)
    for done, state in enumerate(states):
        stream = Stream(tasks, config)
        stream.load_state_dict(state)
        assert stream.position.batches == done
        rest = list(stream)
        assert same(rest, batches[done:]), done
        assert stream.state_dict() == states[-1]


def test_it_resumes_with_workers_that_ran_ahead() -> None:
    batches, _ = run_with_states(CONFIG, two_tasks())
    ahead = Stream(two_tasks(), replace(CONFIG, workers=2, prefetch=3))
    for done, batch in enumerate(ahead, 1):
        assert equal(batch, batches[done - 1])
        if done == 5:
            break
    state = ahead.state_dict()
    assert equal(next(ahead), batches[5])  # leaving the loop lost nothing
    ahead.load_state_dict(state)
    assert same(list(ahead), batches[5:])
    alone = Stream(two_tasks(), CONFIG)
    alone.load_state_dict(state)
    assert same(list(alone), batches[5:])


def test_a_state_of_another_plan_is_refused() -> None:
    state = Stream(two_tasks(), CONFIG).state_dict()
    with pytest.raises(StellaError, match="batch_size was 4 and is now 3"):
        Stream(two_tasks(), replace(CONFIG, batch_size=3)).load_state_dict(state)
    with pytest.raises(StellaError, match="clips was"):
        Stream([("a", Clips(10))], CONFIG).load_state_dict(state)


def finished(stream: Stream) -> list[int | None]:
    return [stream.finished_task for _ in stream]


def test_it_tells_when_a_task_ended() -> None:
    none = [None] * 5
    assert finished(Stream({"a": Clips(10), "b": Clips(10)}, CONFIG)) == [*none, 0, *none, 1]
    assert finished(Stream({"a": Rendered(10), "b": Rendered(10)}, CONFIG)) == [*none, 0, *none, 1]
    config = replace(CONFIG, shuffle=False, epochs=1, most_bad=1.0)
    # whole chunks at the end are bad: the batch before them is known to be the last
    assert finished(Stream({"a": Clips(16, bad=frozenset(range(8, 16))), "b": Clips(4)}, config)) == [None, 0, 1]
    dropping = replace(config, drop_last=True)
    assert finished(Stream({"a": Clips(11, bad=frozenset({1})), "b": Rendered(7)}, dropping)) == [None, 0, 1]


def test_skipped_clips_shorten_no_batch_but_the_last(tmp_path: Path) -> None:
    skipped = Skipped(tmp_path / "skipped.jsonl")
    tasks = [("a", Clips(5)), ("b", Clips(11, bad=frozenset({0, 3, 9})))]
    config = replace(CONFIG, shuffle=False)
    stream = Stream(tasks, config, skipped=skipped)
    batches = list(stream)
    epoch = [[6, 7, 9, 10], [11, 12, 13, 15]]
    assert ids(batches) == [[0, 1, 2, 3], [4]] * 2 + epoch * 2
    assert (stream.position.tried, stream.position.bad) == (32, 6)
    assert skipped.counts == {"not a media file": 2, "no audio track": 1}
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [5, 8, 14]
    assert lines[1] == {"id": 8, "path": "file3.mp4", "reason": "not a media file", "remedy": "leave it out"}
    again = Skipped(tmp_path / "skipped.jsonl")
    list(Stream(tasks, config, skipped=again))
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == 3 and again.counts == skipped.counts


def test_a_torn_line_of_the_list_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "skipped.jsonl"
    Skipped(path).add("a", ClipError("a.mp4", "time limit", "wait"))
    path.write_bytes(path.read_bytes() + b'{"id": "b", "pa')
    skipped = Skipped(path)
    skipped.add("c", ClipError("c.mp4", "time limit", "wait"))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "c"]


def every(step: int, length: int) -> frozenset[int]:
    return frozenset(range(0, length, step))


def test_too_many_bad_clips_stop_the_run_with_their_reasons() -> None:
    config = replace(CONFIG, epochs=1)
    assert len(list(Stream({"a": Clips(25, bad=every(5, 25))}, config))) == 5  # a fifth is borne
    with pytest.raises(StellaError, match=r"6 of 25 clips .*\(4 no audio track, 2 not a media file\)"):
        list(Stream({"a": Clips(25, bad=every(5, 25) | {12})}, config))
    assert len(list(Stream({"a": Clips(25, bad=every(5, 25) | {12})}, replace(config, most_bad=0.5)))) == 5
    assert len(list(Stream({"a": Clips(19, bad=frozenset(range(18)))}, config))) == 1  # too few were tried to tell


def test_hopeless_runs_stop_at_once_and_hopeful_ones_survive_a_bad_start() -> None:
    config = replace(CONFIG, epochs=1, shuffle=False)
    stream = Stream({"a": Clips(400, bad=frozenset(range(4, 400)))}, config)
    with pytest.raises(StellaError, match="16 of 20"):
        list(stream)
    assert len(list(Stream({"a": Clips(100, bad=frozenset({0, 1, 2, 3, 4, 5}))}, config))) == 24


def test_the_count_of_bad_clips_survives_a_restart() -> None:
    source = Clips(60, bad=every(5, 60) | {58})
    config = replace(CONFIG, epochs=1, shuffle=False)
    stream = Stream({"a": source}, config)
    for _ in range(6):
        next(stream)
    second = Stream({"a": source}, config)
    second.load_state_dict(stream.state_dict())
    for rest in (stream, second):
        with pytest.raises(StellaError, match="13 of 60"):
            list(rest)


def test_a_task_without_a_usable_batch_is_an_error() -> None:
    with pytest.raises(StellaError, match=r"too few clips of task a .*2 no audio track, 1 not a media file"):
        list(Stream({"a": Clips(3, bad=frozenset({0, 1, 2}))}, CONFIG))
    with pytest.raises(StellaError, match="task a has 0 clips"):
        Stream({"a": Clips(0)}, CONFIG)
    with pytest.raises(StellaError, match="task a has 3 clips and one batch needs 4"):
        Stream({"a": Clips(3)}, replace(CONFIG, drop_last=True))
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        StreamConfig(batch_size=0)


def test_hanging_and_dying_workers_cost_only_their_clip(tmp_path: Path) -> None:
    """In one run: a clip that hangs, one that kills its process each time, and a worker killed once from outside."""
    harm = {"hang": frozenset({5}), "deadly": frozenset({9}), "once": {2: tmp_path / "flag"}}
    skipped = Skipped()
    config = replace(CONFIG, epochs=1, shuffle=False, workers=2, time_limit=0.5)
    stream = Stream({"a": Clips(12, **harm)}, config, skipped=skipped)
    began = time.monotonic()
    batches = list(stream)
    assert time.monotonic() - began < 30
    expected = list(Stream({"a": Clips(12, bad=frozenset({5, 9}))}, replace(config, workers=0)))
    assert same(batches, expected)
    assert ids(batches) == [[0, 1, 2, 3], [4, 6, 7, 8], [10, 11]]
    assert {id: (r["path"], r["reason"]) for id, r in skipped.records.items()} == {
        5: ("file5.mp4", "time limit"),
        9: ("file9.mp4", "worker died"),
    }


@dataclass(frozen=True)
class Doomed(Clips):
    """Dies at another clip each time, as when memory is short."""

    flags: Path = Path()

    def __getitem__(self, index: int) -> Clip:
        flag = self.flags / str(index)
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@dataclass(frozen=True)
class Faulty(Clips):
    def __getitem__(self, index: int) -> Clip:
        return super().__getitem__(index + 1 // (2 - index))


def test_what_is_not_a_clips_fault_stops_the_run(tmp_path: Path) -> None:
    config = replace(CONFIG, workers=1, shuffle=False)
    with pytest.raises(StellaError, match=r"workers keep dying .*use fewer workers"):
        list(Stream({"a": Doomed(8, flags=tmp_path)}, config))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(Stream({"a": Faulty(8)}, config))

    class Local(Clips):
        pass

    with pytest.raises(StellaError, match="cannot be sent to worker processes"):
        list(Stream({"a": Local(8)}, config))


def test_workers_end_with_the_stream_and_when_it_is_left() -> None:
    stream = Stream({"a": Clips(40)}, replace(CONFIG, workers=2))
    next(stream)
    processes = multiprocessing.active_children()
    assert len(processes) == 2 and all(process.is_alive() for process in processes)
    del stream
    gc.collect()
    assert not any(process.is_alive() for process in processes)


def test_batch_sources_are_rendered_in_one_call() -> None:
    assert isinstance(Rendered(3), BatchSource) and not isinstance(Clips(3), BatchSource)
    config = replace(CONFIG, epochs=1)
    batches = list(Stream({"r": Rendered(10)}, config))
    assert [len(b) for b in batches] == [4, 4, 2]
    for batch in batches:
        assert torch.equal(batch.video[:, 0, 0, 0, 0].long(), batch.ids)
    assert same(batches, list(Stream({"r": Rendered(10)}, replace(config, workers=1))))


def test_clips_of_unequal_frames_or_without_sound_are_told() -> None:
    with pytest.raises(StellaError, match=r"have \[1, 2\] frames"):
        list(Stream({"a": Uneven(4)}, CONFIG))
    skipped = Skipped()
    assert ids(list(evaluation_batches(Silent(4), CONFIG, skipped=skipped))) == [[0, 1, 3]]
    assert skipped.counts == {"too little audio": 1}


@dataclass(frozen=True)
class Uneven(Clips):
    def __getitem__(self, index: int) -> Clip:
        clip = super().__getitem__(index)
        return replace(clip, video=clip.video[: 1 + index % 2])


@dataclass(frozen=True)
class Silent(Clips):
    def __getitem__(self, index: int) -> Clip:
        clip = super().__getitem__(index)
        return replace(clip, audio=clip.audio[:100]) if index == 2 else clip


def test_labels_are_looked_up_for_evaluation() -> None:
    batch = next(evaluation_batches(Clips(4), CONFIG))
    assert [labels.name for labels in labels_of(Clips(4), batch.ids)] == ["c0", "c1", "c0", "c1"]
