"""Tasks in, batches out: shuffled, independent of the number of workers, resumable at any batch.

The order of an epoch is cut into chunks of `batch_size` clips. Each clip has a random generator of its own, and chunks
are joined into batches; a skipped clip therefore shortens only the last batch of its epoch. The state is a position in
this plan: chunks made ahead of it are made again after a restart.

Processes that share a run have streams at the same position. Each makes its own rows of every chunk, so that no clip is
read twice, and delivers its own rows of every batch. They differ if clips were skipped; then rows change hands.
"""

import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from stella.clip import ArraySource, Batch, BatchSource, Device, Source
from stella.config import differences
from stella.data.chunk import Chunk, Job, Maker, make
from stella.data.skipped import Skipped, in_words
from stella.data.workers import MOST_WORKERS, WORKER_GB
from stella.errors import ConfigError, StellaError, number_of
from stella.peers import ALONE, Peers, cut, owners
from stella.rng import generator


@dataclass(frozen=True)
class StreamConfig:
    batch_size: int = 32  # clips of the stream in a step; rehearsal adds its own
    epochs: int = 1  # for each task
    workers: int = 0  # processes; 0: this one, which always reads packed clips
    prefetch: int = 2  # chunks made ahead by each worker
    size: int = 224  # pixels; follows from the model
    spec_frames: int = 1024  # time steps of the spectrogram; follows from the model
    mels: int = 128  # mel bands; follows from the model
    augment: bool | Literal["crop"] = True  # random crop, time shift and noise, as in the paper; crop: that alone
    shuffle: bool = True  # a new order of clips in each epoch of a task
    drop_last: bool = False  # the short batch at the end of an epoch
    seed: int = 0  # follows from the run's seed
    time_limit: float = 60.0  # seconds for one clip, or clips made at once, before a worker is killed; needs workers
    worker_gb: float = WORKER_GB  # GB of memory for one worker; a clip that needs more is skipped
    most_bad: float = 0.2  # a larger share of skipped clips stops the run …
    tried_before_stop: int = 20  # … once this many clips were tried

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "epochs": 1, "workers": 0, "prefetch": 1, "size": 1, "spec_frames": 1, "mels": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"stream.{name} must be at least {value}, not {getattr(self, name)}")
        if self.workers > MOST_WORKERS:
            raise ConfigError(f"stream.workers={self.workers} must be at most {MOST_WORKERS}: each is a process")
        if not 0 <= self.most_bad <= 1:
            raise ConfigError(f"stream.most_bad={self.most_bad} must lie in 0…1")
        for name in ("time_limit", "worker_gb"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"stream.{name}={value} must be above 0 and finite")

    def batches(self, clips: int) -> int:
        """Of a task with so many clips, in all epochs, if none is skipped."""
        full = clips // self.batch_size
        return self.epochs * (full if self.drop_last else math.ceil(clips / self.batch_size))


@dataclass
class Position:
    """The next clip to deliver: all before it are in delivered batches."""

    task: int = 0
    epoch: int = 0
    chunk: int = 0
    used: int = 0  # clips of the chunk that are in delivered batches
    batches: int = 0  # delivered
    tried: int = 0  # clips, in the chunks before
    bad: int = 0  # of these, skipped


class Held:
    """The chunks of an epoch that are not used up; `here` advances as they are."""

    def __init__(self, here: Position, peers: Peers) -> None:
        self.here, self.peers = here, peers
        self.chunks: deque[Chunk] = deque()

    @property
    def clips(self) -> int:
        return sum(map(len, self.chunks)) - (self.here.used if self.chunks else 0)

    def take(self, clips: int) -> tuple[Batch, int]:
        """The next clips, in order, at most this many: those of this process, and how many they are in all."""
        parts: list[Chunk] = []
        while self.chunks and clips:
            chunk, used = self.chunks[0], self.here.used
            if len(chunk):
                parts.append(chunk.some(used, used + clips, self.peers.rank))
                clips -= len(parts[-1])
                self.here.used += len(parts[-1])
            if self.here.used == len(chunk):
                self._pop()
        batches = [part.batch for part in parts if part.batch is not None]
        batch = batches[0] if len(batches) == 1 else Batch.cat(batches)
        return self._dealt(batch, [part.counts for part in parts]), sum(map(len, parts))

    def _dealt(self, batch: Batch, counts: list[tuple[int, ...]]) -> Batch:
        """The rows of this process; `counts` says who has how many of each part of the batch."""
        if self.peers.count == 1:
            return batch
        found = [owners(each) for each in counts]
        before = torch.tensor(counts).cumsum(0) - torch.tensor(counts)  # [parts, processes]
        owner = torch.cat([each for each, _ in found])
        at = torch.cat([at + row[each] for (each, at), row in zip(found, before, strict=True)])
        to, _ = owners(cut(len(owner), self.peers.count))
        if owner.equal(to):
            return batch
        return Batch(*(self.peers.move(rows, owner, at, to) for rows in (batch.video, batch.audio, batch.ids)))

    def drop(self) -> None:
        """Discard the rest of an epoch."""
        while self.chunks:
            self._pop()

    def _pop(self) -> None:
        chunk = self.chunks.popleft()
        self.here.tried += len(chunk) + len(chunk.skipped)
        self.here.bad += len(chunk.skipped)
        self.here.chunk += 1
        self.here.used = 0


class Stream:
    """The batches of a sequence of tasks, each for `epochs` epochs. An interrupted loop over it can be continued.

    Task names are for messages and reports: no number depends on them, and batches carry none. After the last batch of
    a task `finished_task` is its position in the sequence, else None; `position` has counters for progress. The ids of
    clips are numbered through all sources.
    """

    def __init__(
        self,
        tasks: Mapping[str, Source] | Sequence[tuple[str, Source]],
        config: StreamConfig,
        device: Device = "cpu",
        skipped: Skipped | None = None,
        peers: Peers = ALONE,
    ) -> None:
        self._batches: Generator[Batch, None, None] | None = None
        pairs = list(tasks.items()) if isinstance(tasks, Mapping) else list(tasks)
        self.names = [name for name, _ in pairs]
        self.sources = [source for _, source in pairs]
        self.config, self.device = config, torch.device(device)
        self.skipped = Skipped() if skipped is None else skipped
        self.peers = peers
        self.total = 0  # clips of the last batch, in all processes
        self.position = Position()
        self.finished_task: int | None = None
        least = config.batch_size if config.drop_last else 1
        for name, source in pairs:
            if len(source) < least:
                raise StellaError(
                    f"task {name} has {number_of(len(source), 'clip')} and one batch needs {least}; "
                    "add clips or leave it out"
                )

    def __len__(self) -> int:
        """All batches from beginning to end, if no clip is skipped."""
        return sum(self.config.batches(len(source)) for source in self.sources)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._run()
        try:
            return next(self._batches)
        except BaseException:  # also at the end; an interrupted iterator must not look like one that ended
            self.close()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The position of the batch that follows the last delivered one."""
        return {"position": asdict(self.position), "finished_task": self.finished_task, "plan": self._shape()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the batch that would have followed, with any number of workers."""
        if changed := differences(state["plan"], self._shape()):
            raise StellaError(f"the stream cannot be resumed: {'; '.join(changed)}; set it back or start a new run")
        self.close()
        self.position = Position(**state["position"])
        self.finished_task = state["finished_task"]

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Continue after the last task of a stream that had the first tasks of this one, with any number of epochs."""
        plan, own = state["plan"], self._shape()
        clips = [*plan["clips"], *own["clips"][len(plan["clips"]) :]]
        self.load_state_dict({**state, "plan": plan | {"clips": clips, "epochs": own["epochs"]}})
        self.finished_task = None

    def _shape(self) -> dict[str, Any]:
        """The settings that give a position its meaning."""
        names = ("batch_size", "epochs", "shuffle", "drop_last", "seed")
        return {name: getattr(self.config, name) for name in names} | {"clips": [len(s) for s in self.sources]}

    def close(self) -> None:
        """Stop the workers. The stream can still be iterated from its position."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    @property
    def pooled(self) -> bool:
        """Whether worker processes make the clips. Clips that are only copied are read in this process."""
        return self.config.workers > 0 and not all(isinstance(source, ArraySource) for source in self.sources)

    def _run(self) -> Generator[Batch, None, None]:
        c, device = self.config, "cpu" if self.pooled else self.device
        rank, count = self.peers.rank, self.peers.count
        maker = Maker(self.sources, c.size, c.spec_frames, c.mels, c.augment, c.seed, device, rank, count)
        jobs, workers = (self._jobs(), c.workers) if self.pooled else (maker.announced(self._jobs()), 0)
        with closing(make(maker, jobs, workers, c.prefetch, c.time_limit, c.worker_gb)) as chunks:
            while self.position.task < len(self.sources):
                yield from self._epoch(chunks)

    def _epoch(self, chunks: Iterator[Chunk]) -> Iterator[Batch]:
        """The remaining batches of an epoch. The state advances before a batch is delivered, so it must be known by
        then whether another follows."""
        here, size = self.position, self.config.batch_size
        source = self.sources[here.task]
        held = Held(here, self.peers)
        least = size if self.config.drop_last else 1
        complete = isinstance(source, BatchSource)  # skips no clip, so there is no need to look ahead

        def fill(clips: int) -> None:
            while held.clips < clips and here.chunk + len(held.chunks) < self._chunks_of(source):
                self._admit(self._known(next(chunks), complete), held)

        fill(least)
        if held.clips < least:
            raise StellaError(
                f"too few clips of task {self.names[here.task]} can be used for one batch; "
                f"skipped so far: {in_words(self.skipped.counts)}; repair them or leave the task out"
            )
        more = True
        while more:
            fill(size if complete else size + least)  # everything that can fail comes before the state changes
            batch, self.total = held.take(size)
            left = len(source) - here.chunk * size - here.used if complete else held.clips
            more = left >= least
            here.batches += 1
            self.finished_task = None
            if not more:
                held.drop()
                here.chunk, here.epoch = 0, here.epoch + 1
                if here.epoch == self.config.epochs:
                    self.finished_task = here.task
                    here.epoch, here.task = 0, here.task + 1
            pinned = batch.pin_memory() if self.device.type == "cuda" and not batch.video.is_cuda else batch
            yield pinned.to(self.device)

    def _known(self, chunk: Chunk, complete: bool) -> Chunk:
        """A chunk as all processes know it: the clips of each, and what any of them skipped."""
        if not chunk.counts or (complete and min(chunk.counts)):
            return chunk
        own = (
            None
            if chunk.batch is None
            else (len(chunk.batch), chunk.batch.video.shape[1:], chunk.batch.audio.shape[1:])
        )
        told = self.peers.gather_objects((own, chunk.skipped))
        skipped = {id: error for _, each in told for id, error in each.items()}
        counts = tuple(each[0] if each else 0 for each, _ in told)
        batch, some = chunk.batch, next((each for each, _ in told if each), None)
        if batch is None and some:
            device = "cpu" if self.pooled else self.device
            video, audio = torch.empty(0, *some[1], dtype=torch.uint8), torch.empty(0, *some[2])
            batch = Batch(video, audio, torch.empty(0, dtype=torch.int64)).to(device)
        return Chunk(batch, skipped, counts)

    def _admit(self, chunk: Chunk, held: Held) -> None:
        """List a chunk's skipped clips, and stop if there are too many."""
        for id, error in chunk.skipped.items():
            self.skipped.add(id, error)
        held.chunks.append(chunk)
        here, most = self.position, self.config.most_bad
        bad = here.bad + sum(len(chunk.skipped) for chunk in held.chunks)
        tried = here.tried + sum(len(chunk) + len(chunk.skipped) for chunk in held.chunks)
        ended = here.chunk + len(held.chunks) == self._chunks_of(self.sources[here.task])
        # Within an epoch the share is an estimate: allow three standard deviations above the limit.
        chance = 0.0 if ended else 3 * math.sqrt(tried * most * (1 - most))
        if tried >= self.config.tried_before_stop and bad > most * tried + chance:
            raise StellaError(
                f"{bad:,} of {number_of(tried, 'clip')} could not be used ({in_words(self.skipped.counts)}); "
                f"repair or remove them{f', see {self.skipped.path}' if self.skipped.path else ''}, or raise most_bad"
            )

    def _chunks_of(self, source: Source) -> int:
        """The chunks of an epoch. A short last one is not needed if it is dropped and nothing is skipped."""
        dropped = self.config.drop_last and isinstance(source, BatchSource)
        return (len(source) if dropped else len(source) + self.config.batch_size - 1) // self.config.batch_size

    def _jobs(self) -> Iterator[Job]:
        """All chunks from the position to the end, in order."""
        here, size = replace(self.position), self.config.batch_size
        for task in range(here.task, len(self.sources)):
            for epoch in range(here.epoch if task == here.task else 0, self.config.epochs):
                length, gen = len(self.sources[task]), generator(self.config.seed, "order", task, epoch)
                order = torch.randperm(length, generator=gen).tolist() if self.config.shuffle else range(length)
                first = here.chunk if (task, epoch) == (here.task, here.epoch) else 0
                for chunk in range(first, self._chunks_of(self.sources[task])):
                    yield Job(task, epoch, chunk, order[chunk * size : (chunk + 1) * size])

    def __del__(self) -> None:
        self.close()


def evaluation_batches(
    source: Source,
    config: StreamConfig,
    device: Device = "cpu",
    skipped: Skipped | None = None,
    peers: Peers = ALONE,
) -> Iterator[Batch]:
    """Every clip of a source once, in order, not augmented, including the last short batch; ids are its indices.

    Processes that share it have their rows of each batch.
    """
    plain = replace(config, epochs=1, shuffle=False, augment=False, drop_last=False)
    with closing(Stream([("evaluation", source)], plain, device, skipped, peers)) as stream:
        yield from stream
