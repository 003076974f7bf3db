"""A run from its configuration to its result, in a folder from which it can be resumed at any moment.

Resume is exact because of the order of writes. A checkpoint holds everything that a step depends on, and the length of
metrics.jsonl. At the end of a task it is written *before* the evaluation, which has no state: whatever a kill
interrupts is repeated with the same outcome.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stella.config import build, differences, merged, overridden, to_tree
from stella.data.config import DataConfig
from stella.data.skipped import Skipped, in_words
from stella.data.stream import Stream
from stella.data.tasks import Tasks
from stella.data.views import join
from stella.errors import StellaError
from stella.evaluate.after_task import evaluate_tasks
from stella.evaluate.forgetting import summary
from stella.files import Line, Lines, explain_full_disk, read_json, read_lines, write_bytes, write_json
from stella.model import weights
from stella.model.avm import AVM
from stella.model.cav import CAV
from stella.runs.build import build_method, check
from stella.runs.clips import keep_clips
from stella.runs.config import FREE, RunConfig, inputs_of, machine, settle, stored_config
from stella.runs.environment import environment, provenance
from stella.runs.folder import RunFolder
from stella.runs.plan import plan
from stella.runs.progress import Board, Display, say
from stella.runs.stop import Stop, Stopped
from stella.train.checkpoint import Checkpoints
from stella.train.trainer import Trainer

MOST_SKIPPED = 10  # steps in a row without a finite loss


@dataclass(frozen=True)
class RunResult:
    run: Path
    finished: bool
    end: Line = field(default_factory=dict)  # A, F and more, once it is finished
    evaluations: list[Line] = field(default_factory=list)
    exit_code: int = 0  # 128 + signal if a signal stopped it


def pretrain(config: RunConfig, run: Path | str, resume: bool = False, console: Console | None = None) -> RunResult:
    """Train as configured in the folder `run`; with `resume` continue the run that is there, if there is one.

    SIGTERM and Ctrl-C save a checkpoint and stop; the result then has an exit code.
    """
    config, folder = settle(config), RunFolder(run)
    if folder.end is None:
        check(config, folder.started)
    again = "nothing up to the last checkpoint is lost: free some space and continue with --resume"
    with explain_full_disk(folder.root, again), folder.locked():
        if folder.started:
            if not resume:
                raise StellaError(f"{run} already holds a run; continue it with --resume, or choose another folder")
            check_unchanged(folder, config)
            if folder.end is not None:
                return _result(folder)
        with Stop() as stop:
            try:
                return Run(config, folder, console or Console(), stop).go()
            except (Stopped, Exception):  # whatever fails after a signal is part of the stop: workers end by it too
                if stop.signal is None:
                    raise
                return _result(folder, 128 + stop.signal)


def resume(
    run: Path | str,
    overrides: Sequence[str] = (),
    console: Console | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> RunResult:
    """Continue a run with its own configuration; a recipe and `overrides` may only change what no result depends on."""
    folder = RunFolder(run)
    stored_config(folder)
    tree = overridden(merged(folder.read_config(), recipe or {}), overrides)
    if folder.end is not None:
        go_on = f"stella learn HOME SRC… --from {run}"
        say(console or Console(), f"{run} is finished: nothing is left to do; to go on with new clips: {go_on}")
    return pretrain(build(RunConfig, tree), run, resume=True, console=console)


def check_unchanged(folder: RunFolder, config: RunConfig) -> None:
    """Refuse to resume a run with another configuration, as far as results depend on it."""
    if found := changed(to_tree(settle(stored_config(folder))), config):
        raise StellaError(f"{folder.root} was started otherwise: {'; '.join(found)}; restore it or start a new run")


def changed(old: dict[str, Any], config: RunConfig) -> list[str]:
    """The keys on which results depend and whose values differ."""
    new = to_tree(config)
    for key in FREE:
        table, name = key.split(".")
        if name in old[table] and name in new[table]:
            old[table][name] = new[table][name]
    return differences(old, new)


def open_tasks(config: DataConfig, workers: bool, device: str) -> tuple[Tasks, Tasks]:
    """Training and evaluation tasks. A cache in this process is useless to workers."""
    return config.train_tasks(device, cache=not workers), config.eval_tasks(device)


class Run:
    """One process's part of a run: from its newest checkpoint, or from the start, to its end or a stop."""

    def __init__(self, config: RunConfig, folder: RunFolder, console: Console, stop: Stop) -> None:
        self.config, self.folder, self.stop, self.console = config, folder, stop, console
        self.machine = machine(config.train)
        self.checkpoints = Checkpoints(folder.checkpoints, config.train.keep_checkpoints)
        state = self._load()
        self.method = build_method(config, self.machine.device, initial=state is None)
        self.tasks, self.eval_tasks = open_tasks(config.data, config.stream.workers > 0, str(self.machine.device))
        keep_clips(folder.clips, self.tasks, self.eval_tasks)
        shown = [("all tasks", join([source for _, source in self.tasks]))] if self.method.joint else self.tasks
        self.skipped = Skipped(folder.skipped)
        self.stream = Stream(shown, config.stream, self.machine.device, self.skipped)
        self.trainer = Trainer(self.method, self.stream, config.train, self.machine)
        self.environment = _with_earlier(environment(self.machine), folder)
        self.board = Board(folder.root / "tensorboard") if config.train.tensorboard else None
        write_json(folder.config, to_tree(config))
        write_json(folder.environment, self.environment)
        if state is not None:
            self.trainer.load_state_dict(state["trainer"])
        folder.cut(0 if state is None else state["metrics_bytes"])
        self._mark = (time.monotonic(), self.trainer.counters.clips)
        self._saved = time.monotonic()
        self._rates = 0  # recorded by this process
        self._written = 0  # skipped steps already in metrics.jsonl
        self._compiled = self.machine.seconds_compiling()

    def _load(self) -> dict[str, Any] | None:
        """The newest checkpoint. Refuses one of another run or configuration, and a run whose checkpoints are gone."""
        state, root = self.checkpoints.load(), self.folder.root
        if state is None:
            if any(line["kind"] == "checkpoint" for line in read_lines(self.folder.speed)):
                raise StellaError(f"the checkpoints of {root} are gone; restore them, or start a new run elsewhere")
            return None
        if found := changed(state.get("config", to_tree(self.config)), self.config):
            raise StellaError(
                f"the checkpoint in {self.folder.checkpoints} is of another run, or config.json was edited: "
                f"{'; '.join(found)}; restore them, or start a new run"
            )
        return state

    def go(self) -> RunResult:
        counters = self.trainer.counters
        with ExitStack() as stack:
            self.metrics = stack.enter_context(closing(Lines(self.folder.metrics)))
            self.speed = stack.enter_context(closing(Lines(self.folder.speed)))
            self.display = stack.enter_context(Display(self.console, self.trainer.steps, counters.step))
            if self.board:
                stack.enter_context(closing(self.board))
            stack.enter_context(closing(self.stream))
            for path in self.checkpoints.damaged:
                self.display.say(f"{path.name} is damaged and was renamed; resuming from step {counters.step}")
            if earlier := self.environment.get("earlier"):
                self.display.say(f"started at {_where(earlier[0])}, resumed at {_where(self.environment)}")
            for remark in self.machine.remark.splitlines():
                self.display.say(remark)
            if not counters.step:
                memory, stream = self.method.memory, self.config.stream
                for line in plan(self.tasks, self.eval_tasks, stream, self.trainer.steps, memory):
                    self.display.say(line)
            self.speed.write({"kind": "start", "time": datetime.now(UTC).isoformat(), "step": counters.step})
            try:
                self._evaluate_if_due()
                while self._train_task():
                    self._evaluate_if_due()
                with self.stop.writing():
                    self._finish()
            except (Stopped, Exception):
                if self.stop.signal is None:
                    raise
                again = f"stella pretrain --resume {self.folder.root}"
                self.display.say(f"stopped by {self.stop.signal.name} at step {counters.step}; resume with {again}")
                return _result(self.folder, 128 + self.stop.signal)
            if self.stop.signal:
                self.display.say(f"{self.stop.signal.name} arrived while the run was ending; the run is finished")
        return _result(self.folder, 128 + self.stop.signal if self.stop.signal else 0)

    def _train_task(self) -> bool:
        """Train to the end of a task; False if no step was left."""
        minutes = self.config.train.checkpoint_minutes
        while self._advance():
            ended, stopping = self.stream.finished_task is not None, self.stop.signal
            self._record(ended)
            stuck = self._stuck()
            if ended or stuck or stopping or time.monotonic() - self._saved >= 60 * minutes:
                self._save()
            if stuck:
                not_finite = self.trainer.skipped[-1][1]
                raise StellaError(
                    f"{MOST_SKIPPED} steps in a row up to step {self.trainer.counters.step} were not finite "
                    f"({', '.join(not_finite)}); a checkpoint is saved: check the data, or start a new run with a "
                    "lower train.lr or train.precision=float32"
                )
            if stopping:
                raise Stopped
            if ended:
                return True
        return False

    def _advance(self) -> bool:
        """One step; False if no step was left. A checkpoint is saved if a stop ends the wait for its batches."""
        step, position = self.trainer.counters.step, replace(self.stream.position)
        try:
            return self.trainer.advance()
        except (Stopped, Exception):
            begun = (self.trainer.counters.step, self.stream.position) != (step, position)
            if self.stop.signal and not begun:
                self._save()
            raise

    def _stuck(self) -> bool:
        """Whether the last steps were all skipped. Waits for the device only if it seems so."""
        counters = self.trainer.counters
        if counters.skipped_in_a_row >= MOST_SKIPPED:
            self.trainer.settle()
        return counters.skipped_in_a_row >= MOST_SKIPPED

    def _record(self, ended: bool) -> None:
        counters = self.trainer.counters
        self.display.at(counters.step, self._place())
        self._write_skipped()
        if counters.step % self.config.train.log_every and not ended:
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

    def _say_time(self, rate: float) -> None:
        """Say once how long the rest takes, at the rate of the second record: the first includes start-up."""
        self._rates += 1
        left = (self.trainer.steps - self.trainer.counters.step) * self.config.stream.batch_size / rate
        if self._rates == 2 and left > 60:
            self.display.say(f"about {left / 60:,.0f} minutes of training left at {rate:,.0f} clips/s")

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
        return f"{self.config.method}: {self.stream.names[task]}, epoch {epoch + 1} of {self.config.stream.epochs}"

    def _evaluate_if_due(self) -> None:
        """Evaluate before the first step and after the last step of each task.

        There is no checkpoint between an evaluation and the next step, so a run that resumes here has not been
        evaluated here, or its metrics were cut back to before that.
        """
        due = -1 if self.trainer.counters.step == 0 else self.stream.finished_task
        if due is None:
            return
        began = time.monotonic()
        with self.stop.at_once():
            found = self._evaluate(self.method.eval_model, self.method.avm)
            if self.trainer.slow is not None:
                found["slow"] = self._evaluate(self.trainer.slow.model, None)
        counters = self.trainer.counters
        # A joint method has learnt all tasks when its only one ends.
        task = len(self.tasks) - 1 if self.method.joint and due == 0 else due
        names = [name for name, _ in self.eval_tasks]
        line = {"kind": "evaluation", "task": task, "step": counters.step, "tasks": names, **found}
        self.metrics.write(line | {"memory_by_task": self._memory_by_task()})
        self._mark = (time.monotonic(), counters.clips)
        self.speed.write({"kind": "evaluation", "task": task, "seconds": time.monotonic() - began})
        self._report_evaluation(task, summary([line | {"task": 0}])["A"])

    def _evaluate(self, model: CAV, avm: AVM | None) -> dict[str, Any]:
        workers = 0 if self.config.data.cached else self.config.stream.workers
        stream = replace(self.config.stream, batch_size=self.config.evaluate.batch, workers=workers)
        machine = self.machine
        return evaluate_tasks(
            model, avm, self.eval_tasks, stream, machine.device, self.config.seed, machine.autocast, self.skipped
        )

    def _report_evaluation(self, task: int, mean_recall: float) -> None:
        """One line per task, which stays on the terminal when the progress bar moves on."""
        counters = self.trainer.counters
        after = "before the first task"
        if task >= 0:
            after = f"after {self.tasks[task][0]} ({task + 1} of {len(self.tasks)})"
        steps = f", {counters.skipped} non-finite steps skipped" if counters.skipped else ""
        clips = f", skipped clips: {in_words(self.skipped.counts)}" if len(self.skipped) else ""
        self.display.say(
            f"{self.config.method} {after}: step {counters.step}, mean recall {mean_recall:.1f}%{steps}{clips}"
        )
        if self.board:
            self.board.scalars({"mean recall": mean_recall}, counters.step)

    def _memory_by_task(self) -> list[int] | None:
        if self.method.memory is None:
            return None
        ids = self.method.memory.ids.cpu()
        ends = torch.tensor([len(source) for _, source in self.tasks]).cumsum(0)
        counts: list[int] = torch.searchsorted(ends, ids, right=True).bincount(minlength=len(ends)).tolist()
        return counts

    def _save(self) -> None:
        with self.stop.writing():
            self._save_now()

    def _save_now(self) -> None:
        began, step = time.monotonic(), self.trainer.counters.step
        self.trainer.settle()
        self._write_skipped()
        state: dict[str, Any] = {
            "trainer": self.trainer.state_dict(),
            "metrics_bytes": self.metrics.sync(),
            "config": to_tree(self.config),
        }
        path = self.checkpoints.save(step, state)
        self._saved = time.monotonic()
        size = path.stat().st_size
        self.speed.write({"kind": "checkpoint", "step": step, "seconds": self._saved - began, "bytes": size})

    def _finish(self) -> None:
        counters, slow = self.trainer.counters, self.trainer.slow
        if counters.step and counters.skipped == counters.step:
            raise StellaError("no step of this run was finite; check the data, or start a new run")
        for model in (self.method.eval_model, *([] if slow is None else [slow.model])):
            if not all(bool(p.isfinite().all()) for p in model.parameters()):
                raise StellaError(
                    "the weights of this run are not finite, so it is no success; start a new run with a lower train.lr"
                )
        evaluations = _evaluations(self.folder)
        scores = summary(evaluations)
        extra = {"config": to_tree(self.config), "commit": self.environment["commit"]}
        self._write_weights(self.folder.weights, self.method.eval_model, self.method.avm, extra | {"scores": scores})
        if slow is not None:
            scores["slow"] = summary([line | line["slow"] for line in evaluations])
            self._write_weights(self.folder.slow_weights, slow.model, None, extra | {"scores": scores["slow"]})
        end = {"kind": "end", "step": counters.step, "clips": counters.clips, "skipped_steps": counters.skipped}
        self.metrics.write(end | scores)
        self.metrics.sync()

    def _write_weights(self, path: Path, model: CAV, avm: AVM | None, extra: dict[str, Any]) -> None:
        write_bytes(path, weights.packed(model, avm, extra, inputs_of(self.config)))


def _with_earlier(facts: Line, folder: RunFolder) -> Line:
    """The environment, with those of earlier parts of this run if commit or machine changed."""
    if not folder.environment.exists():
        return facts
    before = read_json(folder.environment)
    earlier = before.pop("earlier", [])
    if _where(before) != _where(facts):
        earlier = [*earlier, before]
    return facts | {"earlier": earlier} if earlier else facts


def _where(facts: Line) -> str:
    found = provenance(facts)
    return f"commit {str(found['commit'])[:10]} on {found['hardware']}"


def _evaluations(folder: RunFolder) -> list[Line]:
    return [line for line in read_lines(folder.metrics) if line["kind"] == "evaluation"]


def _result(folder: RunFolder, exit_code: int = 0) -> RunResult:
    end = folder.end
    return RunResult(folder.root, end is not None, end or {}, _evaluations(folder), exit_code)
