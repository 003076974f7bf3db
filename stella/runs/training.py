"""Training in a run's folder, whatever is trained: steps, checkpoints, metrics, signals; resumed at any moment.

Resume is exact because of the order of writes. A checkpoint holds everything that a step depends on, and the length of
metrics.jsonl. At the end of a task it is begun *before* the evaluation, which has no state: whatever a kill
interrupts is repeated with the same outcome. Training goes on while a checkpoint is written.
"""

import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from signal import Signals
from typing import Any, ClassVar, Protocol

from rich.console import Console

from stella.config import differences, to_tree
from stella.data.skipped import Skipped
from stella.errors import StellaError, number_of, one_line
from stella.files import Line, Lines, Unwritten, read_lines, write_json
from stella.peers import ALONE, Peers
from stella.runs.config import FREE
from stella.runs.environment import where
from stella.runs.folder import RunFolder
from stella.runs.progress import Board, Display, say
from stella.runs.stop import Stop, Stopped
from stella.train.checkpoint import Checkpoints, size_of
from stella.train.config import TrainConfig
from stella.train.device import Runtime
from stella.train.processes import job, restarts
from stella.train.trainer import Trainer

MOST_SKIPPED = 10  # steps in a row without a finite loss


@dataclass(frozen=True)
class RunResult:
    run: Path
    finished: bool
    end: Line = field(default_factory=dict)  # A, F and more, once it is finished
    evaluations: list[Line] = field(default_factory=list)
    exit_code: int = 0  # 128 + signal if a signal stopped it
    speaks: bool = True  # this is the process that tells of it, or the only one


class Settings(Protocol):
    """What every configuration of a training has."""

    @property
    def train(self) -> TrainConfig: ...


def changed_keys(old: dict[str, Any], config: Settings) -> list[str]:
    """The keys on which results depend and whose values differ."""
    new = to_tree(config)
    for key in FREE:
        table, name = key.split(".")
        if name in new[table]:
            old[table][name] = new[table][name]
    return differences(old, new)


class Training(ABC):
    """One process's part of a run: from its newest checkpoint, or from the start, to its end or a stop.

    A subclass says what is trained (`build`), what is measured after each task of the stream (`evaluate`), and what is
    left at the end (`finish`).
    """

    again: ClassVar[str] = "stella pretrain --resume {run}"  # the command that resumes a run

    def __init__(
        self,
        config: Settings,
        folder: RunFolder,
        console: Console,
        stop: Stop,
        place: Runtime,
        facts: Line,
        peers: Peers = ALONE,
    ) -> None:
        """`facts` is the environment of this process, for environment.json. The first of `peers` writes and speaks."""
        self.folder, self.stop, self.settings, self.peers = folder, stop, config.train, peers
        self.console = console if peers.first else Console(quiet=True)
        self.machine, self._tree = place, to_tree(config)
        self.checkpoints = Checkpoints(folder.checkpoints, config.train.keep_checkpoints, peers)
        state = self._load(config)
        self.skipped = Skipped(folder.skipped if peers.first else None)
        self.trainer = self.build(initial=state is None)
        self.stream = self.trainer.stream
        self.environment = facts
        self.board = Board(folder.root / "tensorboard") if config.train.tensorboard and peers.first else None
        if state is not None:
            self.trainer.load_state_dict(state["trainer"])
        if peers.first:
            write_json(folder.environment, self.environment)
            write_json(folder.config, self._tree)  # last: with it, there is a run
            folder.cut(0 if state is None else state["metrics_bytes"])
        self._mark = (time.monotonic(), self.trainer.counters.clips)
        self._saved = time.monotonic()
        self._held = 0.0  # seconds that the run lost to the checkpoint that is being written
        self._rates = 0  # recorded by this process
        self._written = 0  # skipped steps already in metrics.jsonl
        self._kept = None if state is None else self.trainer.counters.step  # the step of the last checkpoint
        self._compiled = self.machine.seconds_compiling()

    def _load(self, config: Settings) -> dict[str, Any] | None:
        """The newest checkpoint. Refuses one of another run or configuration, and a run whose checkpoints are gone."""
        state, root = self.checkpoints.load(), self.folder.root
        if state is None:
            if any(line["kind"] == "checkpoint" for line in read_lines(self.folder.speed)):
                raise StellaError(f"the checkpoints of {root} are gone; restore them, or start a new run elsewhere")
            return None
        if changed := changed_keys(state.get("config", to_tree(config)), config):
            raise StellaError(
                f"the checkpoint in {self.folder.checkpoints} is of another run, or config.json was edited: "
                f"{'; '.join(changed)}; restore them, or start a new run"
            )
        return state

    @abstractmethod
    def build(self, initial: bool) -> Trainer:
        """What is trained, on its stream; without `initial` the weights come from a checkpoint."""

    @abstractmethod
    def evaluate(self, due: int) -> None:
        """Measure after the task `due` of the stream (-1: before the first) and write it to `metrics`."""

    @abstractmethod
    def finish(self) -> None:
        """Write weights and the last line of `metrics`. Called by all processes; the first one writes."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What is trained, for the progress bar."""

    def announced(self) -> list[str]:
        """Lines to print before the first step."""
        return []

    def go(self) -> RunResult:
        counters = self.trainer.counters
        with ExitStack() as stack:
            lines = Lines if self.peers.first else Unwritten
            self.metrics = stack.enter_context(closing(lines(self.folder.metrics)))
            self.speed = stack.enter_context(closing(lines(self.folder.speed)))
            self.display = stack.enter_context(Display(self.console, self.trainer.steps, counters.step))
            if self.board:
                stack.enter_context(closing(self.board))
            stack.enter_context(closing(self.stream))
            stack.enter_context(closing(self.checkpoints))
            for path in self.checkpoints.damaged:
                self.display.say(f"{path.name} is damaged and was renamed; resuming from step {counters.step}")
            if earlier := self.environment.get("earlier"):
                self.display.say(f"started at {where(earlier[0])}, resumed at {where(self.environment)}")
            for remark in [*self.machine.remark.splitlines(), *self.trainer.remark.splitlines()]:
                self.display.say(remark)
            for line in self.announced() if self.peers.first and not counters.step else []:
                self.display.say(line)
            self.speed.write(
                {"kind": "start", "time": datetime.now(UTC).isoformat(), "step": counters.step} | self._team()
            )
            try:
                self.display.at(counters.step, self._place())
                self._evaluate_if_due()
                while self._train_task():
                    self._evaluate_if_due()
                if counters.step and counters.skipped == counters.step:
                    raise StellaError("no step of this run was finite; check the data, or start a new run")
                with self.stop.writing():
                    self._note_saved(wait=True)
                    self.finish()
                    self.peers.gather_objects("finished")
            except (Stopped, Exception) as error:
                if self.stop.signal is None:
                    raise
                self._tell_stop(self.stop.signal.name, error)
                return result_of(self.folder, 128 + self.stop.signal)
            if self.stop.signal:
                self.display.say(f"{self.stop.signal.name} arrived while the run was ending; the run is finished")
        return result_of(self.folder, 128 + self.stop.signal if self.stop.signal else 0)

    def _train_task(self) -> bool:
        """Train to the end of a task; False if no step was left."""
        minutes = self.settings.checkpoint_minutes
        while self._advance():
            self._note_saved()
            ended, late = self.stream.finished_task is not None, time.monotonic() - self._saved >= 60 * minutes
            self._record(ended)
            skipped = self.trainer.counters.skipped_in_a_row
            stopping, due, skipped = self.peers.maxima(self.stop.signal or 0, late, skipped)
            stuck = self._stuck(skipped)
            if ended or stuck or stopping or due:
                self._save(wait=bool(stuck or stopping))
            if stuck:
                not_finite = self.trainer.skipped[-1][1]
                raise StellaError(
                    f"{MOST_SKIPPED} steps in a row up to step {self.trainer.counters.step} were not finite "
                    f"({', '.join(not_finite)}); a checkpoint is saved: check the data, or start a new run with a "
                    "lower train.lr or train.precision=float32"
                )
            if stopping:
                self.stop.signal = self.stop.signal or Signals(stopping)  # another process's
                raise Stopped
            if ended:
                return True
        return False

    def _advance(self) -> bool:
        """One step; False if no step was left.

        A checkpoint is saved if a stop ends the wait for its batches. Between two tasks there is one. Workers end by
        the same signal: what they raise then is part of the stop.
        """
        step, position = self.trainer.counters.step, replace(self.stream.position)
        try:
            return self.trainer.advance()
        except (Stopped, Exception) as error:
            if self.stop.signal is None or self.trainer.counters.step != step:
                raise
            if self.stream.position == position and self._due() is None and self.peers.count == 1:
                self._save(wait=True)
            raise Stopped from error

    def _stuck(self, known: int) -> bool:
        """Whether the last steps were all skipped; the process that has learnt of most knows of `known`.

        All processes then wait for their devices, after which they know the same.
        """
        if known >= MOST_SKIPPED:
            self.trainer.settle()
        return known >= MOST_SKIPPED and self.trainer.counters.skipped_in_a_row >= MOST_SKIPPED

    def _record(self, ended: bool) -> None:
        counters = self.trainer.counters
        self.display.at(counters.step, self._place())
        self._write_skipped()
        if counters.step % self.settings.log_every and not ended:
            return
        self.trainer.settle()
        self._write_skipped()
        self._report_compiling()
        parts = self.trainer.meter.read()
        loss = parts.pop("loss", None)
        at = {"step": counters.step, "clips": counters.clips}
        self.metrics.write({"kind": "step", **at, "loss": loss, "parts": parts})
        (before, clips), now = self._mark, time.monotonic()
        self._mark = (now, counters.clips)
        rate = (counters.clips - clips) / (now - before)
        peak = self.machine.peak_bytes()
        self.speed.write({"kind": "step", **at, "clips_per_second": rate, "peak_bytes": peak})
        if loss is not None:
            self.display.losses({"loss": loss, **parts}, rate, peak)
        self._say_time(rate)
        if self.board:
            curves = {"loss": loss, **{f"loss/{name}": part for name, part in parts.items()}, "clips/s": rate}
            self.board.scalars(curves, counters.step)

    def _team(self) -> Line:
        """For the record: how many processes, and how often torchrun has started them again."""
        alone = self.peers.count == 1 and job() is None
        return {} if alone else {"processes": self.peers.count, "restarts": restarts()}

    def _say_time(self, rate: float) -> None:
        """Say once how long the rest takes, at the rate of the second record (the first includes start-up) and in the
        time of the fastest evaluation so far (the first may render its clips)."""
        self._rates += 1
        if self._rates != 2:
            return
        clips = self.stream.config.batch_size * self.trainer.config.accumulate  # of a step
        training = (self.trainer.steps - self.trainer.counters.step) * clips / rate
        took = [line["seconds"] for line in read_lines(self.folder.speed) if line["kind"] == "evaluation"]
        evaluations = self._evaluations_left() * min(took, default=0.0)
        if training + evaluations > 60:
            minutes, more = number_of(max(1, round(training / 60)), "minute"), round(evaluations / 60)
            and_of = f", and {more:,} of evaluations" if more else ""
            self.display.say(f"about {minutes} of training left at {rate:,.0f} clips/s{and_of}")

    def _evaluations_left(self) -> int:
        """One after each task that has not ended, and one that is due."""
        return len(self.stream.names) - self.stream.position.task + (self.stream.finished_task is not None)

    def _report_compiling(self) -> None:
        spent = self.machine.seconds_compiling()
        if (seconds := spent - self._compiled) > 1:
            self.display.say(f"compiled in {seconds:.0f} s")
            self.speed.write({"kind": "compiled", "step": self.trainer.counters.step, "seconds": seconds})
            self._compiled = spent

    def _write_skipped(self) -> None:
        for step, not_finite in self.trainer.skipped[self._written :]:
            self.metrics.write({"kind": "skip", "step": step, "not_finite": not_finite})
        self._written = len(self.trainer.skipped)

    def _place(self) -> str:
        position = self.stream.position
        task, epoch = min(position.task, len(self.stream.names) - 1), position.epoch
        return f"{self.title}: {self.stream.names[task]}, epoch {epoch + 1} of {self.stream.config.epochs}"

    def _evaluate_if_due(self) -> None:
        """Evaluate before the first step and after the last step of each task.

        There is no checkpoint between an evaluation and the next step, so a run that resumes here has not been
        evaluated here, or its metrics were cut back to before that.
        """
        due = self._due()
        if due is None:
            return
        began = time.monotonic()
        self.evaluate(due)
        self._mark = (time.monotonic(), self.trainer.counters.clips)
        self.speed.write({"kind": "evaluation", "task": due, "seconds": time.monotonic() - began})

    def _due(self) -> int | None:
        """The task to evaluate after, until the next step; -1 before the first step."""
        return self.stream.finished_task if self.trainer.counters.step else -1

    def _save(self, wait: bool) -> None:
        """Begin a checkpoint, when the one before is written; with `wait`, write it."""
        with self.stop.writing():
            self._note_saved(wait=True)
            self._begin_checkpoint()
            self._note_saved(wait)

    def _begin_checkpoint(self) -> None:
        began = self._saved = time.monotonic()
        self.trainer.settle()
        self._write_skipped()
        state: dict[str, Any] = {
            "trainer": self.trainer.state_dict(),
            "metrics_bytes": self.peers.gather_objects(self.metrics.sync())[0],
            "config": self._tree,
        }
        self.checkpoints.begin(self.trainer.counters.step, state)
        self._held = time.monotonic() - began

    def _tell_stop(self, signal: str, why: BaseException) -> None:
        """After a stop: wait for what is being written; tell what failed, and where a resumed run begins."""
        self.checkpoints.close()
        errors = [why]
        try:
            self._note_saved()
        except Exception as late:
            errors.append(late)
        for each in errors:
            if not isinstance(each, Stopped):  # a process that is not the first tells its own
                say(self.console if self.peers.first else Console(), one_line(each))
        where = "before the first checkpoint" if self._kept is None else f"at step {self._kept}"
        how = self.again.format(run=self.folder.root)
        if self.peers.count > 1:
            how += f", with torchrun in front as before, for {number_of(self.peers.count, 'process')}"
        self.display.say(f"stopped by {signal} {where}; resume with {how}")

    def _note_saved(self, wait: bool = False) -> None:
        """Record a checkpoint that was begun, if it is written by now. An error in writing it is raised here."""
        began = time.monotonic()
        if (done := self.checkpoints.finished(wait)) is not None:
            self._kept, held = done.step, self._held + time.monotonic() - began  # the run's loss of time
            size = size_of(done.path) if self.peers.first else 0
            line = {"kind": "checkpoint", "step": done.step, "seconds": done.seconds, "held": held, "bytes": size}
            self.speed.write(line)


def evaluations_of(folder: RunFolder) -> list[Line]:
    return [line for line in read_lines(folder.metrics) if line["kind"] == "evaluation"]


def result_of(folder: RunFolder, exit_code: int = 0) -> RunResult:
    end = folder.end
    return RunResult(folder.root, end is not None, end or {}, evaluations_of(folder), exit_code)
