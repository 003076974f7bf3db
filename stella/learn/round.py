"""One round: set clips aside, train once over the others, measure, put the new state to use.

A learner is a run whose list of tasks grows. A round is one more task of a stream that already knows the lengths of
the earlier ones, so clips never share an id, and rounds given one call after the other end where one run over the same
tasks ends. Everything that a kill interrupts is repeated with the same outcome: the clips of a round are written down
before anything else, and the state in use changes last. A state is written while the next round trains; after a kill
there may therefore be two rounds to finish.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Self

from rich.console import Console

from stella.clip import Source
from stella.config import to_tree
from stella.data.skipped import Skipped, in_words
from stella.data.stream import Stream
from stella.data.workers import trim
from stella.embed.model import fingerprint
from stella.errors import StellaError, number_of
from stella.files import Line, write_bytes, write_json
from stella.learn.behind import Behind
from stella.learn.examine import Examiner
from stella.learn.held import HeldOut, measured, store, stored
from stella.learn.home import Home, Plan, RoundFolder
from stella.learn.items import Item, opened
from stella.learn.measure import by_round, caveats, chance_of, fall, fell, judged, measures, too_few
from stella.learn.past import Past
from stella.learn.records import learnt
from stella.learn.sides import set_aside
from stella.learn.vectors import Vectors, known_vectors, rows_of, write_vectors
from stella.model import weights
from stella.model.layouts import under
from stella.runs.build import build_method
from stella.runs.config import machine
from stella.runs.environment import environment
from stella.runs.progress import Display, say
from stella.runs.stop import Stop
from stella.runs.training import MOST_SKIPPED
from stella.train.checkpoint import Checkpoints, DamagedError, State, copied, fetched
from stella.train.trainer import Trainer


class KeptApartError(StellaError):
    """A round made old knowledge fall by more than the guard allows: it is kept apart until someone decides."""


class Learner:
    """Does rounds. The trainer stays in memory between them."""

    def __init__(self, home: Home, console: Console, stop: Stop) -> None:
        self.home, self.console, self.stop = home, console, stop
        self.config = home.config
        self.machine = machine(self.config.train)
        self._examiner = Examiner(self.config, self.machine)
        self._commit = environment(self.machine)["commit"]
        self._trainer: Trainer | None = None  # with the last round's state, between rounds
        self._last: Line | None = None  # the last round's record …
        self._known: Vectors = {}  # … and the embeddings by its state
        self._behind = Behind()
        self._seconds: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    def begin(self, items: Sequence[Item], epochs: int = 1) -> Line:
        """A round over these items, which are new."""
        held = set_aside(items, self.home.plans(), self.home.settings.share)
        aside = {item.id for item in held}
        train = [item for item in items if item.id not in aside]
        began = datetime.now(UTC).isoformat(timespec="seconds")
        self.home.next.write_plan(Plan(epochs, began, len(train), train, held))
        record = self.go_on()
        assert record is not None
        return record

    def go_on(self) -> Line | None:
        """Finish the round that was begun, if there is one, and put its state to use."""
        folder = self.home.next
        if not folder.plan.exists():
            return None
        record = folder.ended or self._round(folder, self.home.plan(folder.number))
        if record["kept_apart"]:
            self.settle()
            self._trainer = None
            raise KeptApartError(
                f"round {folder.number} is kept apart: A on old clips fell by {fell(record)}, more than the guard of "
                f"{record['guard']:g} ({judged(record)}); the state before it stays in use. Take it with stella learn "
                f"{self.home.root} --accept, or throw it away with --drop"
            )
        self._behind.do(lambda: self.home.use(folder.number))
        self._behind.do(trim)
        self.home.ahead = folder.number
        self._tidy()
        return record

    def once_in_use(self, work: Callable[[], object]) -> None:
        """Do this when the state of the last round is in use; never, if it cannot be written."""
        self._behind.do(work)

    def settle(self) -> None:
        """Wait until all is written. If it cannot be, the next round begins with what is on the disk."""
        try:
            self._behind.wait()
        except BaseException:
            self._trainer = self._last = None
            raise
        finally:
            self.home.ahead = 0

    def accept(self, folder: RoundFolder) -> None:
        """Put a finished round to use."""
        self.home.use(folder.number)
        self._tidy()

    def _tidy(self) -> None:
        """Remove clips that were set aside and are kept neither after the last round nor after one to go back to."""
        plans, settings = self.home.plans(), self.home.settings
        ends = range(max(0, len(plans) - settings.keep), len(plans) + 1)
        held = {clip.key for end in ends for clip in stored(plans[:end], settings.held)}
        for path in self.home.held.glob("*.tar"):
            if path.stem not in held:
                path.unlink(missing_ok=True)

    # ---- the parts of a round

    def _round(self, folder: RoundFolder, plan: Plan) -> Line:
        trainer, self._trainer = self._trainer, None  # lost if the round does not end
        skipped, began = Skipped(folder.skipped), time.monotonic()
        self._seconds = {}
        with self.stop.at_once(), self._timed("setting aside"):
            held = self._set_aside(folder, plan, skipped)
        with self.stop.at_once(), self._timed("decoding"):
            self._examiner.read(held)
        with self.stop.at_once(), self._timed("loading"):
            trainer = self._prepared(folder, plan, skipped, trainer)
            first = trainer.counters.step
        with self.stop.at_once(), self._timed("measuring"):
            before = self._before(folder, trainer, held)
        with self._timed("loading"):
            if (state := self._saved(folder)) is not None:
                trainer.load_state_dict(state["trainer"])
        loss = state["loss"] if state and "loss" in state else self._train(folder, plan, trainer, skipped)
        with self.stop.at_once():
            with self._timed("measuring"):
                after = self._examiner.embed(trainer.method, held, {})
                if unread := self._examiner.unread(held, after):
                    self.say(unread, "yellow")
                found = self._measured(folder, trainer, held, before, after)
            with self._timed("saving"):
                self._write_weights(folder, trainer, found, after)
            self._seconds["all"] = time.monotonic() - began
            steps = {"steps": trainer.counters.step, "steps_taken": trainer.counters.step - first}
            record = _record(folder, plan, skipped) | {**steps, "loss": loss, **found}
            record |= {"memory": self._memory(trainer, plan), **self._guarded(found)}
            record |= {"seconds": {k: round(v, 3) for k, v in self._seconds.items()}}
            self._behind.do(lambda: write_json(folder.record, record))
        self._trainer, self._last, self._known = trainer, json.loads(json.dumps(record)), after
        return self._last

    def _set_aside(self, folder: RoundFolder, plan: Plan, skipped: Skipped) -> HeldOut:
        """Store this round's held-out clips; returns those of all rounds to measure with."""
        plans, settings = [*self.home.plans(), plan], self.home.settings
        own = [clip for clip in stored(plans, settings.held) if clip.round == folder.number]
        if own:
            stream, items = self.config.stream, [clip.item for clip in own]
            seconds = self.home.inputs.duration
            source = opened(items, self.home.inputs)
            store(source, own, self.home.held, seconds, skipped, self._workers(items), stream.time_limit)
        return HeldOut(self.home.held, measured(plans, settings.measured(plan.epochs * plan.clips)))

    def _workers(self, items: Sequence[Item]) -> int:
        """A file can hang its decoder, and only another process can be killed."""
        packed = all(item.clip for item in items)
        return self.config.stream.workers if packed else max(1, self.config.stream.workers)

    def _prepared(self, folder: RoundFolder, plan: Plan, skipped: Skipped, trainer: Trainer | None) -> Trainer:
        """A trainer with the state in use, whose stream is positioned before the clips of this round."""
        tasks: list[tuple[str, Source]] = [
            (f"round {n}", Past(past.clips)) for n, past in enumerate(self.home.plans(), 1) if past.clips
        ]
        if plan.clips:
            tasks.append((f"round {folder.number}", opened(plan.train, self.home.inputs)))
        own: dict[str, Any] = {"epochs": plan.epochs, "most_bad": 1.0, "workers": self._workers(plan.train)}
        stream = Stream(tasks, replace(self.config.stream, **own), self.machine.device, skipped)
        if trainer is None:
            self.settle()
            state = self.home.state()
            method = build_method(self.config, self.machine.device, initial=state is None)
            shorter = Stream(tasks[:-1] if plan.clips else tasks, stream.config, self.machine.device)
            trainer = Trainer(method, shorter, self.config.train, self.machine)
            if state is not None:
                shorter.take_up(state["trainer"]["stream"])
                trainer.load_state_dict(state["trainer"] | {"stream": shorter.state_dict()})
        stream.take_up(trainer.stream.state_dict())
        trainer.stream = stream
        return trainer

    def _before(self, folder: RoundFolder, trainer: Trainer, held: HeldOut) -> Vectors:
        """Embeddings of the held-out clips by the state before the round, which the trainer has."""
        if (before := known_vectors(folder.before)) is None:
            if self._last is None:
                self._known = known_vectors(self.home.round(self.home.current).embeddings) or {}
            before = self._examiner.embed(trainer.method, held, self._known)
            write_vectors(folder.before, before, "")
        return before

    def _saved(self, folder: RoundFolder) -> State | None:
        """What a round that was interrupted has saved; None if there is nothing, or if it is damaged."""
        try:
            return folder.checkpoints.load()
        except DamagedError:
            self.say(f"what round {folder.number} had saved is damaged: it is trained from its beginning", "yellow")
            return None

    def _train(self, folder: RoundFolder, plan: Plan, trainer: Trainer, skipped: Skipped) -> dict[str, float]:
        """Train to the end of the round and save its state; returns the mean losses."""
        stream, counters, train = trainer.stream, trainer.counters, self.config.train
        place, saved = f"{self.config.method}: round {folder.number}", time.monotonic()
        total = counters.step + (trainer.steps_of(len(stream.sources[-1])) if plan.clips else 0)
        checkpoints = Checkpoints(folder.checkpoints.folder, train.keep_checkpoints)
        self._behind.go()
        with self._timed("training"), closing(stream), Display(self.console, total, counters.step) as display:
            while stream.finished_task is None and self._advance(plan, trainer, skipped):
                display.at(counters.step, place)
                self._check_finite(folder, trainer)
                ended, stopping = stream.finished_task is not None, self.stop.signal
                if not ended and (stopping or time.monotonic() - saved >= 60 * train.checkpoint_minutes):
                    with self.stop.writing():
                        self.settle()
                        checkpoints.save(counters.step, {"trainer": trainer.state_dict()})
                    saved = time.monotonic()
                if stopping and not ended:
                    self.stop.end()
        with self._timed("saving"), self.stop.writing():
            trainer.settle()
            loss, step = trainer.meter.read(), counters.step
            self.settle()
            state = copied({"trainer": trainer.state_dict(), "loss": loss})
            self._behind.pause()
            self._behind.do(lambda: folder.checkpoints.save(step, fetched(state)))
        return loss

    def _advance(self, plan: Plan, trainer: Trainer, skipped: Skipped) -> bool:
        """One step. A round without a usable clip ends at once."""
        try:
            return trainer.advance()
        except StellaError:
            if sum(isinstance(id, int) for id in skipped.records) < plan.clips:
                raise
        here = trainer.stream.position
        trainer.stream.position = replace(here, task=here.task + 1, epoch=0, chunk=0, used=0)
        trainer.stream.finished_task = here.task
        return True

    def _check_finite(self, folder: RoundFolder, trainer: Trainer) -> None:
        if trainer.counters.skipped_in_a_row >= MOST_SKIPPED:
            trainer.settle()
        if trainer.counters.skipped_in_a_row >= MOST_SKIPPED:
            raise StellaError(
                f"{MOST_SKIPPED} steps in a row of round {folder.number} were not finite "
                f"({', '.join(trainer.skipped[-1][1])}); look at its clips, and throw the round away with "
                f"stella learn {self.home.root} --drop"
            )

    def _measured(self, folder: RoundFolder, trainer: Trainer, held: HeldOut, before: Vectors, after: Vectors) -> Line:
        both = [i for i, key in enumerate(held.keys) if key in before and key in after]
        keys = [held.keys[i] for i in both]
        last = self._last or (self.home.record(self.home.current) if self.home.current else None)
        found = measures(rows_of(before, keys), rows_of(after, keys), held.rounds[both], folder.number, last)
        for worst in found["worst"]:
            clip = held.clips[both[worst["clip"]]]
            worst |= {"clip": clip.key, "id": clip.item.id, "round": clip.round}
        return found | self._examiner.matching(trainer.method, held)

    def _write_weights(self, folder: RoundFolder, trainer: Trainer, found: Line, after: Vectors) -> None:
        """Weights and embeddings, behind."""
        scores = {"A": found["old"] and found["old"]["after"], "F": found["F"], "gallery": found["gallery"]}
        extra = {"config": to_tree(self.config), "commit": self._commit, "round": folder.number}
        extra |= {"steps": trainer.counters.step, "scores": scores}
        inputs, model, avm = self.home.inputs, trainer.method.eval_model, trainer.method.avm
        state = copied(weights.state_of(model, avm))
        slow = None if trainer.slow is None else copied(weights.state_of(trainer.slow.model))

        def write() -> None:
            here = fetched(state)
            mark = fingerprint(model.config, under("backbone.", here), inputs)
            write_vectors(folder.embeddings, after, mark)
            write_bytes(folder.weights, weights.packed_state(here, model.config, avm, extra, inputs))
            if slow is not None:
                write_bytes(folder.slow_weights, weights.packed_state(fetched(slow), model.config, None, extra, inputs))

        self._behind.do(write)

    def _guarded(self, found: Line) -> Line:
        guard, points = self.home.settings.guard, fall(found)
        if guard is None:
            return {"guard": None, "kept_apart": False}
        few = too_few({"guard": guard, **found})
        return {"guard": guard, "kept_apart": points is not None and points > guard, "too_few": few}

    def _memory(self, trainer: Trainer, plan: Plan) -> dict[str, Any] | None:
        """How many clips of the memory came in each round, and from each source; how many are different ones."""
        memory = trainer.method.memory
        if memory is None:
            return None
        plans = [*self.home.plans(), plan]
        names = [root for p in plans for root in ([item.root for item in p.train] or ["a run"] * p.clips)]
        sources = Counter(names[id] for id in memory.ids.tolist())
        held = {"rounds": by_round(memory.ids, [p.clips for p in plans]), "sources": dict(sources.most_common())}
        return held | {"distinct": memory.distinct}

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + time.monotonic() - began

    def say(self, line: str, style: str = "") -> None:
        say(self.console, line, style)

    def tell(self, record: Line) -> None:
        """Say how a round went."""
        self.say(told(record))
        for line in caveats(record):
            self.say(line, "yellow")


def _record(folder: RoundFolder, plan: Plan, skipped: Skipped) -> Line:
    return {
        "round": folder.number,
        "began": plan.began,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "epochs": plan.epochs,
        "clips": plan.clips,
        "learnt": plan.clips - sum(isinstance(id, int) for id in skipped.records),
        "set_aside": len(plan.held) - sum(isinstance(id, str) for id in skipped.records),
        "sources": dict(Counter(item.root for item in plan.train)),
        "skipped": skipped.counts,
    }


def told(record: Line) -> str:
    """One line about a round."""
    taken = record.get("steps_taken")  # earlier versions did not count them
    steps = "" if taken is None else f" in {number_of(taken, 'step')}"
    parts = [f"round {record['round']}: {number_of(learnt(record), 'clip')} learnt{steps}"]
    parts.append(f"{record['set_aside']} set aside")
    both = {name: record[name] for name in ("old", "new") if record[name]}
    for name, each in both.items():
        clips = number_of(each["clips"], f"{name} clip")
        parts.append(f"A on {clips} {each['before']:.1f} → {each['after']:.1f}")
    if not both:
        parts.append("too few to measure with")
    else:
        parts[-1] += f" among {number_of(record['gallery'], 'clip')} (chance {chance_of(record):.1f})"
    if record["F"] is not None:
        parts.append(f"F {record['F']:z.1f}")
    if record["guard"] is not None and too_few(record):
        parts.append(judged(record))
    if record["skipped"]:
        parts.append(f"skipped {in_words(record['skipped'])}")
    return ", ".join(parts) + f" ({record['seconds']['all']:.0f} s)"
