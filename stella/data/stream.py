"""Tasks in, batches out: shuffled, the same for a seed whatever the number of workers, resumable at any batch.

The order of an epoch is cut into chunks of `batch_size` positions. A chunk is made whole by one worker, with a random
generator of its own, and the parent joins chunks into batches; a skipped clip thereby shortens no batch but the last of
its epoch. The state is a place in this plan: what was made ahead of it is simply made again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, pairwise
from typing import Any

import torch

from stella.clip import ArraySource, Batch, BatchSource, Source, place_of
from stella.config import differences
from stella.data.chunk import Chunk, Held, Job, Maker, Position
from stella.data.skipped import Skipped, spell
from stella.data.workers import Done, Lost, Pool
from stella.errors import ClipError, ConfigError, StellaError
from stella.rng import generator


@dataclass(frozen=True)
class StreamConfig:
    batch_size: int = 32
    epochs: int = 1  # for each task
    workers: int = 0  # processes; 0: in this one, where packed clips are read in any case
    prefetch: int = 2  # chunks made ahead by each worker
    size: int = 224  # pixels
    spec_frames: int = 1024
    mels: int = 128
    augment: bool = True
    shuffle: bool = True
    drop_last: bool = False  # the short batch at the end of an epoch
    seed: int = 0
    time_limit: float = (
        60.0  # seconds for one clip, then its worker is killed; a process cannot kill itself, so not with workers=0
    )
    most_bad: float = 0.2  # a larger share of skipped clips stops the run
    tried_before_stop: int = 20

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "epochs": 1, "workers": 0, "prefetch": 1, "size": 1, "spec_frames": 1, "mels": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name} must be at least {value}, not {getattr(self, name)}")
        if not 0 <= self.most_bad <= 1 or self.time_limit <= 0:
            raise ConfigError(f"most_bad={self.most_bad} must lie in 0…1 and time_limit={self.time_limit} above 0")


class Stream:
    """The batches of a sequence of tasks, each for `epochs` epochs. Iterate over it; it goes on from where it is.

    The names of tasks are for messages and reports: no number depends on them, and batches carry none. After the last
    batch of a task `finished_task` is its position in the sequence, else None; `position` has counters for progress.
    Ids count through all sources, one after the other.
    """

    def __init__(
        self,
        tasks: Mapping[str, Source] | Sequence[tuple[str, Source]],
        config: StreamConfig,
        device: torch.device | str = "cpu",
        skipped: Skipped | None = None,
    ) -> None:
        self._pool: Pool | None = None
        self._batches: Iterator[Batch] | None = None
        pairs = list(tasks.items()) if isinstance(tasks, Mapping) else list(tasks)
        self.names = [name for name, _ in pairs]
        self.sources = [source for _, source in pairs]
        self.config, self.device = config, torch.device(device)
        self.skipped = Skipped() if skipped is None else skipped
        self.position = Position()
        self.finished_task: int | None = None
        least = config.batch_size if config.drop_last else 1
        for name, source in pairs:
            if len(source) < least:
                raise StellaError(
                    f"task {name} has {len(source)} clips and one batch needs {least}; add clips or leave it out"
                )

    def __len__(self) -> int:
        """All batches from beginning to end, if no clip is skipped."""
        return self.config.epochs * sum(self._batches_of(source) for source in self.sources)

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
        """Where the stream is: after a batch was received, this leads to the next one."""
        return {"position": asdict(self.position), "finished_task": self.finished_task, "plan": self._shape()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the batch that would have followed, with any number of workers."""
        if changed := differences(state["plan"], self._shape()):
            raise StellaError(f"the stream cannot go on where it was: {'; '.join(changed)}; set it back or start anew")
        self.close()
        self.position = Position(**state["position"])
        self.finished_task = state["finished_task"]

    def _shape(self) -> dict[str, Any]:
        """What a position is only valid with."""
        names = ("batch_size", "epochs", "shuffle", "drop_last", "seed")
        return {name: getattr(self.config, name) for name in names} | {"clips": [len(s) for s in self.sources]}

    def close(self) -> None:
        """Stop the workers, as the end of the stream does. It can still be iterated: it goes on where it is."""
        self._batches = None
        if self._pool:
            self._pool.close()
            self._pool = None

    @property
    def pooled(self) -> bool:
        """Whether worker processes make the clips: for those that only have to be copied they would be a detour."""
        return self.config.workers > 0 and not all(isinstance(source, ArraySource) for source in self.sources)

    def _batches_of(self, source: Source) -> int:
        size = self.config.batch_size
        return len(source) // size if self.config.drop_last else math.ceil(len(source) / size)

    def _chunks_of(self, source: Source) -> int:
        """How many chunks are made of a source. A short one is never needed if it is dropped and nothing is skipped."""
        dropped = self.config.drop_last and isinstance(source, BatchSource)
        return (len(source) if dropped else len(source) + self.config.batch_size - 1) // self.config.batch_size

    def _run(self) -> Iterator[Batch]:
        chunks = self._pooled(self._plan()) if self.pooled else self._made(self._plan())
        while self.position.task < len(self.sources):
            yield from self._epoch(chunks)

    def _epoch(self, chunks: Iterator[Chunk]) -> Iterator[Batch]:
        """The batches left of an epoch. The state moves on before one is handed out, for which it must be known
        whether another follows."""
        here, size = self.position, self.config.batch_size
        source = self.sources[here.task]
        held = Held(here)
        least = size if self.config.drop_last else 1
        complete = isinstance(source, BatchSource)  # skips nothing, so there is no need to look ahead

        def fill(clips: int) -> None:
            while held.clips < clips and here.chunk + len(held.chunks) < self._chunks_of(source):
                self._admit(next(chunks), held)

        fill(least)
        if held.clips < least:
            raise StellaError(
                f"too few clips of task {self.names[here.task]} can be used for one batch; "
                f"skipped so far: {spell(self.skipped.counts)}; repair them or leave the task out"
            )
        more = True
        while more:
            fill(size if complete else size + least)  # all that can fail comes before the state is touched
            batch = held.take(size)
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
            yield self._deliver(batch)

    def _deliver(self, batch: Batch) -> Batch:
        if self.device.type == "cuda" and not batch.video.is_cuda:
            batch = batch.pin_memory()
        return batch.to(self.device)

    def _admit(self, chunk: Chunk, held: Held) -> None:
        """Count and list what a chunk skipped, and stop if it is too much."""
        before = sum(len(source) for source in self.sources[: self.position.task])
        for index, error in chunk.skipped.items():
            self.skipped.add(before + index, error)
        held.add(chunk)
        tried, bad, most = held.tried, held.bad, self.config.most_bad
        whole = self.position.chunk + len(held.chunks) == self._chunks_of(self.sources[self.position.task])
        # Until an epoch is through, the share is an estimate: a run below the limit must not stop for a bad start.
        chance = 0.0 if whole else 3 * math.sqrt(tried * most * (1 - most))
        if tried >= self.config.tried_before_stop and bad > most * tried + chance:
            raise StellaError(
                f"{bad} of {tried} clips could not be used ({spell(self.skipped.counts)}); repair or remove them"
                f"{f', see {self.skipped.path}' if self.skipped.path else ''}, or raise most_bad"
            )

    def _plan(self) -> Iterator[Job]:
        """All chunks from here to the end, in order."""
        here, size = replace(self.position), self.config.batch_size
        for task in range(here.task, len(self.sources)):
            for epoch in range(here.epoch if task == here.task else 0, self.config.epochs):
                order = self._order(task, epoch)
                first = here.chunk if (task, epoch) == (here.task, here.epoch) else 0
                for chunk in range(first, self._chunks_of(self.sources[task])):
                    yield Job(task, epoch, chunk, order[chunk * size : (chunk + 1) * size])

    def _order(self, task: int, epoch: int) -> list[int]:
        length = len(self.sources[task])
        if not self.config.shuffle:
            return list(range(length))
        order: list[int] = torch.randperm(length, generator=generator(self.config.seed, "order", task, epoch)).tolist()
        return order

    def _maker(self) -> Maker:
        c = self.config
        device = "cpu" if self.pooled else self.device
        return Maker(self.sources, c.size, c.spec_frames, c.mels, c.augment, c.seed, device)

    def _made(self, jobs: Iterator[Job]) -> Iterator[Chunk]:
        maker = self._maker()
        for job, following in pairwise(chain(jobs, [None])):
            assert job is not None  # only what follows the last one is
            if following is not None:
                maker.expect(following)
            yield maker(job, lambda item: None)

    def _pooled(self, jobs: Iterator[Job]) -> Iterator[Chunk]:
        """The chunks in order, made by workers that run ahead."""
        workers, ahead = self.config.workers, self.config.workers * self.config.prefetch
        pool = self._pool = Pool(self._maker(), workers, self.config.prefetch, self.config.time_limit)
        flying: dict[int, Job] = {}
        ready: dict[int, Chunk] = {}
        deaths: dict[int, int] = {}  # at which item of a job a worker died
        submitted = 0
        for wanted in count():
            while len(flying) + len(ready) < ahead and (job := next(jobs, None)):
                flying[submitted] = job
                pool.submit(submitted, job)
                submitted += 1
            if wanted == submitted:
                return
            while wanted not in ready:
                event = pool.wait()
                if isinstance(event, Done):
                    del flying[event.key]
                    ready[event.key] = event.result
                else:
                    flying[event.key] = self._retry(flying[event.key], event, deaths)
                    pool.submit(event.key, flying[event.key])
            yield ready.pop(wanted)

    def _retry(self, job: Job, lost: Lost, deaths: dict[int, int]) -> Job:
        """What to do about a worker that hung or died: without the clip if that is to blame, once more if not."""
        if lost.hung:
            error = self._blame(job, lost.item, "time limit", "re-encode it, or raise time_limit")
        elif lost.key not in deaths:
            deaths[lost.key] = lost.item
            return job
        elif deaths.pop(lost.key) == lost.item >= 0:
            error = self._blame(job, lost.item, "worker died", "re-encode it or leave it out")
        else:
            raise StellaError(
                f"loader workers keep dying (exit status {lost.exitcode}), most likely for lack of memory or of shared "
                "memory (/dev/shm); use fewer workers, a smaller batch_size or a smaller prefetch"
            )
        return replace(job, bad={**job.bad, lost.item: error})

    def _blame(self, job: Job, item: int, reason: str, remedy: str) -> ClipError:
        return ClipError(place_of(self.sources[job.task], job.indices[item]), reason, remedy)

    def __del__(self) -> None:
        self.close()


def evaluation_batches(
    source: Source, config: StreamConfig, device: torch.device | str = "cpu", skipped: Skipped | None = None
) -> Iterator[Batch]:
    """Every clip of a source once, in order, not augmented, the last short batch included; ids are its indices."""
    plain = replace(config, epochs=1, shuffle=False, augment=False, drop_last=False)
    stream = Stream([("evaluation", source)], plain, device, skipped)
    try:
        yield from stream
    finally:
        stream.close()
