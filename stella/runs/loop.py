"""A run from its configuration to its result, in a folder from which it can be resumed (`training.py`)."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stella.config import build, layered, to_tree
from stella.data.config import DataConfig
from stella.data.lengths import too_short
from stella.data.skipped import in_words
from stella.data.stream import Stream, StreamConfig
from stella.data.tasks import Tasks
from stella.data.views import join
from stella.errors import StellaError, number_of, one_line
from stella.evaluate.after_task import evaluate_tasks
from stella.evaluate.examples import examples
from stella.evaluate.forgetting import summary
from stella.evaluate.pairs import plane
from stella.evaluate.retrieval import Embeddings
from stella.files import explain_full_disk, read_json, write_bytes, write_json
from stella.methods import find, own_file
from stella.model import weights
from stella.model.avm import AVM
from stella.model.cav import CAV
from stella.peers import ALONE, Peers
from stella.runs.build import build_method, check, passes
from stella.runs.clips import keep_clips
from stella.runs.config import RunConfig, inputs_of, machine, settle, stored_config
from stella.runs.environment import environment, with_earlier
from stella.runs.folder import RunFolder
from stella.runs.plan import plan, told
from stella.runs.progress import say
from stella.runs.stop import Stop, Stopped
from stella.runs.training import RunResult, Training, changed_keys, evaluations_of, result_of
from stella.train.processes import job, processes, restarts
from stella.train.trainer import Trainer

Models = tuple[CAV, AVM | None]
RUNS = Path("runs/pretrain")  # the folder of a run that is given none; of the next ones runs/pretrain-2, …


def pretrain(
    config: RunConfig, run: Path | str | None = None, resume: bool = False, console: Console | None = None
) -> RunResult:
    """Train as configured in the folder `run` (none: a new one); with `resume` continue the run that is there, if any.

    SIGTERM and Ctrl-C save a checkpoint and stop; the result then has an exit code.
    """
    config, folder, console = settle(config), RunFolder(run or free_folder(RUNS)), console or Console()
    again = "nothing up to the last checkpoint is lost: free some space and continue with --resume"
    with (
        processes(config.train.patience_minutes, config.train.device) as peers,
        explain_full_disk(folder.root, again),
        folder.locked(wait=_came_back(folder)) if peers.first else nullcontext(),
    ):
        started, came_back = peers.gather_objects((folder.started, _came_back(folder)))[0]
        if folder.end is None:
            check(config, started, peers=peers)
        if started:
            if not resume and not came_back:
                raise StellaError(
                    f"{run} holds a finished run; give this one another folder"
                    if folder.end is not None
                    else f"{run} already holds a run; continue it with --resume {run}, or give this one another folder"
                )
            check_unchanged(folder, config)
            if folder.end is not None:
                return replace(result_of(folder), speaks=peers.first)
        elif run is None and peers.first:
            say(console, f"new run in {folder.root}")
        with Stop() as stop:
            try:
                done = Run(config, folder, console, stop, peers).go()
                return replace(done, speaks=peers.first)
            except (Stopped, Exception) as error:
                if stop.signal is None:
                    raise
                if not isinstance(error, Stopped):
                    say(console, one_line(error))
                return result_of(folder, 128 + stop.signal)


def resume(
    run: Path | str,
    overrides: Sequence[str] = (),
    console: Console | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> RunResult:
    """Continue a run with its own configuration; a recipe and `overrides` may only change what no result depends on."""
    folder = RunFolder(run)
    stored_config(folder)
    tree = layered(RunConfig, folder.read_config(), recipe or {}, overrides)
    finished = folder.end is not None
    result = pretrain(build(RunConfig, tree), run, resume=True, console=console)
    if finished and result.speaks:
        go_on = f"stella learn HOME SRC… --from {run}"
        say(console or Console(), f"{run} is finished: nothing is left to do; to go on with new clips: {go_on}")
    return result


def free_folder(root: Path) -> Path:
    """This folder, or the first of root-2, root-3, … that is not there; of what torchrun starts again the last one."""
    number, last, free = 1, None, root
    while free.exists():
        number, last = number + 1, free
        free = root.with_name(f"{root.name}-{number}")
    return last if last and _came_back(RunFolder(last)) else free


def _came_back(folder: RunFolder) -> bool:
    """Whether torchrun has started this run again, on the same machines or others.

    A process of an earlier start may still be ending somewhere: whoever comes back waits for the folder.
    """
    known = read_json(folder.environment).get("job") if folder.environment.exists() else None
    return restarts() > 0 or (known is not None and known == job())


def check_unchanged(folder: RunFolder, config: RunConfig) -> None:
    """Refuse to resume a run with another configuration, as far as results depend on it."""
    if changed := changed_keys(to_tree(settle(stored_config(folder))), config):
        raise StellaError(f"{folder.root} was started otherwise: {'; '.join(changed)}; restore it or start a new run")
    file = own_file(config.method)
    if file and folder.method.exists() and folder.method.read_bytes() != file.read_bytes():
        raise StellaError(
            f"{folder.root} was started with another version of {file}, which is {folder.method}; restore it, or give "
            "the new version a name of its own"
        )


def _keep_method(folder: RunFolder, method: str) -> None:
    if file := own_file(method):
        write_bytes(folder.method, file.read_bytes())


def open_tasks(config: DataConfig, workers: bool, device: str) -> tuple[Tasks, Tasks]:
    """Training and evaluation tasks. A cache in this process is useless to workers."""
    return config.train_tasks(device, cache=not workers), config.eval_tasks(device)


class Run(Training):
    """Pre-training with one method."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, console: Console, stop: Stop, peers: Peers = ALONE
    ) -> None:
        self.config, place = config, machine(config.train)
        here = environment(place) | {"title": find(config.method).title} | ({"job": job()} if job() else {})
        facts = with_earlier(here, folder.environment)
        super().__init__(config, folder, console, stop, place, facts, peers)

    @property
    def title(self) -> str:
        return self.method.title

    def announced(self) -> list[str]:
        memory, stream, data = self.method.memory, self.config.stream, self.config.data
        with self.stop.at_once():
            clips = join([source for _, source in self.tasks])
            inputs = inputs_of(self.config)
            short = too_short(clips, min(inputs.seconds, inputs.duration), stream.workers)
        remarks = [*data.remarks(), *([short] if short else [])]
        weights = [f"{self.config.model.weights}: {note}" for note in self.imported]
        speed = self.trainer.remark.splitlines()
        write_json(self.folder.notes, {"weights": weights, "data": remarks, "speed": speed})
        steps, accumulate = self.trainer.steps, self.config.train.accumulate
        return [*weights, *plan(self.tasks, self.eval_tasks, stream, steps, memory, accumulate), *remarks]

    def build(self, initial: bool) -> Trainer:
        config, device = self.config, self.machine.device
        self.tasks, self.eval_tasks = open_tasks(config.data, config.stream.workers > 0, str(device))
        self.imported: list[str] = []
        self.method = build_method(config, device, initial, passes(self.tasks, config.stream), self.imported.extend)
        if self.peers.first:
            _keep_method(self.folder, config.method)
            keep_clips(self.folder.clips, self.tasks, self.eval_tasks, self.folder.started)
        shown = [("all tasks", join([source for _, source in self.tasks]))] if self.method.joint else self.tasks
        stream = Stream(shown, config.stream, device, self.skipped, self.peers)
        return Trainer(self.method, stream, config.train, self.machine, self.peers)

    def evaluate(self, due: int) -> None:
        when = f"after {self.stream.names[due]}" if due >= 0 else "before the first task"
        with self.stop.at_once():
            embeddings: list[Embeddings] = []
            models = self._models()
            found = self._evaluate(*models, when, embeddings)
            if self.trainer.slow is not None:
                slow = self.trainer.plain(self.trainer.slow.model)
                found["slow"] = self._evaluate(slow, None, f"{when}, slow weights")
        if self.peers.first:
            self._keep(due, models, found, embeddings)

    def _models(self) -> Models:
        """What is evaluated and saved."""
        method, plain = self.method, self.trainer.plain
        return plain(method.eval_model), None if method.avm is None else plain(method.avm)

    def _keep(self, due: int, models: Models, found: dict[str, Any], embeddings: list[Embeddings]) -> None:
        """Write what was measured."""
        counters = self.trainer.counters
        # A joint method has learnt all tasks when its only one ends.
        task = len(self.tasks) - 1 if self.method.joint and due == 0 else due
        if task == len(self.tasks) - 1:
            self._keep_examples(models, embeddings)
            write_json(self.folder.pairs, plane(self.eval_tasks[0][0], embeddings[0]))
        names = [name for name, _ in self.eval_tasks]
        line = {"kind": "evaluation", "task": task, "step": counters.step, "tasks": names, **found}
        memory = self.method.memory
        distinct = None if memory is None else memory.distinct
        self.metrics.write(line | {"memory_by_task": self._memory_by_task(), "memory_distinct": distinct})
        self._keep_weights(task, models)
        self._report_evaluation(task, summary([line | {"task": 0}])["A"])

    def _keep_weights(self, task: int, models: Models) -> None:
        """Weights after a task, in half precision: for what changes from task to task."""
        if self.config.train.keep_task_weights and task >= 0:
            extra = {"config": to_tree(self.config), "commit": self.environment["commit"], "task": task}
            path = self.folder.task_weights(task)
            path.parent.mkdir(exist_ok=True)
            write_bytes(path, weights.packed(*models, extra, inputs_of(self.config), torch.float16))

    def _evaluate(self, model: CAV, avm: AVM | None, when: str, keep: list[Embeddings] | None = None) -> dict[str, Any]:
        place = self.machine.device, self.config.seed, self.machine.autocast
        how = *place, self.skipped, keep, self.peers, partial(self.display.clips, when=when)
        return evaluate_tasks(model, avm, self.eval_tasks, self._eval_stream, *how)

    @property
    def _eval_stream(self) -> StreamConfig:
        workers = 0 if self.config.data.cached else self.config.stream.workers
        return replace(self.config.stream, batch_size=self.config.evaluate.batch, workers=workers)

    def _keep_examples(self, models: Models, embeddings: list[Embeddings]) -> None:
        """Pictures for the page. A run does without them if a clip is gone since, or PyAV is missing."""
        with suppress(StellaError), self.stop.at_once():
            place = self.machine.device, self.machine.autocast
            found = examples(*models, self.eval_tasks, embeddings, self._eval_stream, *place)
            write_json(self.folder.examples, {"queries": found})

    def _report_evaluation(self, task: int, mean_recall: float) -> None:
        """One line per task, which stays on the terminal when the progress bar moves on."""
        counters = self.trainer.counters
        after, meaning = "before the first task", " (A: mean of R@1/5/10 over all tasks in %)"
        if task >= 0:
            after = f"after {self.tasks[task][0]} ({task + 1} of {len(self.tasks)})"
            meaning = ""
        steps = f", {number_of(counters.skipped, 'non-finite step')} skipped" if counters.skipped else ""
        clips = f", skipped clips: {in_words(self.skipped.counts)}" if len(self.skipped) else ""
        held = f", memory holds {told(self.method.memory)}" if self.method.memory is not None and task >= 0 else ""
        self.display.say(
            f"{self.title} {after}: step {counters.step}, A {mean_recall:.1f}{meaning}{held}{steps}{clips}"
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

    def finish(self) -> None:
        counters, (model, avm) = self.trainer.counters, self._models()
        slow = None if self.trainer.slow is None else self.trainer.plain(self.trainer.slow.model)
        if not self.peers.first:
            return
        for each in (model, *([] if slow is None else [slow])):
            if not all(bool(p.isfinite().all()) for p in each.parameters()):
                raise StellaError(
                    "the weights of this run are not finite, so it is no success; start a new run with a lower train.lr"
                )
        evaluations = evaluations_of(self.folder)
        scores = summary(evaluations)
        extra = {"config": to_tree(self.config), "commit": self.environment["commit"], "steps": counters.step}
        self._write_weights(self.folder.weights, model, avm, extra | {"scores": scores})
        if slow is not None:
            scores["slow"] = summary([line | line["slow"] for line in evaluations])
            self._write_weights(self.folder.slow_weights, slow, None, extra | {"scores": scores["slow"]})
        end = {"kind": "end", "step": counters.step, "clips": counters.clips, "skipped_steps": counters.skipped}
        self.metrics.write(end | scores)
        self.metrics.sync()

    def _write_weights(self, path: Path, model: CAV, avm: AVM | None, extra: dict[str, Any]) -> None:
        write_bytes(path, weights.packed(model, avm, extra, inputs_of(self.config)))
