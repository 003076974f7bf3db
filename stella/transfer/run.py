"""A downstream run: trains a head (and the backbone, unless frozen) in a folder like any run's, then tests it once.

After every epoch the validation part is measured; the best epoch's weights are kept, and only they meet the test part.
Which epoch was best follows from metrics.jsonl, so that it needs no state of its own.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from rich.console import Console

from stella.clip import Batch, Source
from stella.config import build, overridden, to_tree
from stella.data.downstream import Parts
from stella.data.skipped import Skipped, in_words
from stella.data.stream import evaluation_batches
from stella.data.views import part as part_of
from stella.embed.translate import is_learner
from stella.errors import ConfigError, StellaError, number_of
from stella.files import Line, Lines, explain_full_disk, lock, write_bytes, write_json
from stella.model import weights
from stella.model.avm import AVM
from stella.runs.clips import fingerprint, keep_clips
from stella.runs.config import machine
from stella.runs.environment import environment, with_earlier
from stella.runs.folder import RunFolder
from stella.runs.plan import too_little
from stella.runs.progress import Display, say
from stella.runs.stop import Stop, Stopped
from stella.runs.training import RunResult, Training, changed_keys, evaluations_of
from stella.train.trainer import Trainer
from stella.transfer import localise
from stella.transfer.base import Columns, Downstream
from stella.transfer.ceilings import ceilings
from stella.transfer.classify import unlearnt, untested
from stella.transfer.config import TransferConfig, features_key, inputs_of, settle
from stella.transfer.features import Epochs, Rows, Table, tabulate
from stella.transfer.predictions import ROW, answered, localised, measured, write_answers
from stella.transfer.tasks import task_of
from stella.transfer.weights import open_weights

BEST = "best.safetensors"
PREDICTIONS = "predictions.safetensors"
SHOWN = 6  # clips whose predictions are kept


def transfer(
    config: TransferConfig, run: Path | str, resume: bool = False, console: Console | None = None
) -> RunResult:
    """Train and test as configured in the folder `run`; with `resume` continue the run that is there."""
    folder, console = RunFolder(run), console or Console()
    loaded, digest = open_weights(config.weights, config.seed)
    config = settle(config, loaded, digest)
    machine(config.train)
    with folder.locked(), explain_full_disk(folder.root):
        if folder.started:
            if not resume:
                raise StellaError(
                    f"{run} already holds a run; continue it with --resume {run}, or give this one a folder with --run"
                )
            _check_unchanged(folder, config)
            if folder.end is not None:
                return RunResult(folder.root, True, folder.end)
        for remark in config.data.remarks():
            say(console, f"{config.data.source}: {remark}", "yellow")
        if config.task == "matching" and loaded.avm is not None:
            say(console, f"{config.weights.source} has a matching module; this trains a new one", "yellow")
        with Stop() as stop:
            try:
                if config.task == "localise":
                    return _localise(config, folder, console, loaded)
                return TransferRun(config, folder, console, stop, loaded).go()
            except Stopped:  # while features were computed
                assert stop.signal is not None
                say(console, f"stopped by {stop.signal.name} before the first step")
                return RunResult(folder.root, False, exit_code=128 + stop.signal)


def resume(run: Path | str, values: Iterable[str] = (), console: Console | None = None) -> RunResult:
    """Continue a downstream run with its own configuration."""
    tree = RunFolder(run).read_config()
    if "method" in tree:
        raise StellaError(f"{run} is a run of stella pretrain; continue it with stella pretrain --resume {run}")
    try:
        build(TransferConfig, tree)
    except ConfigError as error:
        raise StellaError(f"{run} is no downstream run of this version ({error}); start a new one") from error
    return transfer(build(TransferConfig, overridden(tree, list(values))), run, resume=True, console=console)


def _check_unchanged(folder: RunFolder, config: TransferConfig) -> None:
    old = to_tree(build(TransferConfig, folder.read_config())) | {"features": config.features}
    if changed := changed_keys(old, config):
        raise StellaError(f"{folder.root} was started otherwise: {'; '.join(changed)}; restore it or start a new run")


class TransferRun(Training):
    again = "stella transfer --resume {run}"

    def __init__(
        self, config: TransferConfig, folder: RunFolder, console: Console, stop: Stop, loaded: weights.Loaded
    ) -> None:
        self.config, self.loaded = config, loaded
        self.parts: Parts = config.data.downstream(config.task)
        named = {name: getattr(self.parts, name) for name in ("train", "validation", "test")}
        keep_clips(folder.clips, [("train", named.pop("train"))], list(named.items()), folder.started)
        self.tables: dict[str, Table] = {}
        self.measured: list[int] | None = None  # rows of the test part
        place = machine(config.train)
        super().__init__(config, folder, console, stop, place, with_earlier(environment(place), folder.environment))

    @property
    def title(self) -> str:
        return self.config.task

    def announced(self) -> list[str]:
        parts = {name: len(getattr(self.parts, name)) for name in ("validation", "test")}
        few = too_little(list(parts.items()), self.config.stream, self.trainer.steps)
        if self.title != "classify":
            return few
        table = self.tables.get("train")  # of a backbone that is trained it is not known
        learnt = [] if table is None else unlearnt(self.parts, table.columns["target"])
        return [*few, *learnt, *untested(self.parts)]

    def _place(self) -> str:
        names = self.stream.names
        return f"{self.title}: {names[min(self.stream.position.task, len(names) - 1)]}"

    def build(self, initial: bool) -> Trainer:
        config, device = self.config, self.machine.device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = self.loaded.model.to(device)
            self.task: Downstream = task_of(config.task, self.parts)(model, self.parts, config.head, config.seed)
        self.source, epochs = self.task.source, config.stream.epochs
        stream: Epochs
        if config.head.frozen and self.task.cached and (config.views or not config.stream.augment):
            self.task.table = self._table("train", self.source)
            stream = Rows(self.task.table, epochs, config.stream)
        else:
            stream = Epochs(self.source, epochs, config.stream, device, self.skipped.under("train"))
        warmup = config.warmup_epochs * math.ceil(len(stream) / epochs / config.train.accumulate)
        return Trainer(self.task, stream, replace(config.train, warmup_steps=warmup), self.machine)

    def _table(self, part: str, source: Source) -> Table:
        """The columns of a part, computed at the first call."""
        if part not in self.tables:
            config, views = self.config, self.config.views or 1 if part == "train" else 1
            shared = config.features is not None
            name = features_key(config, part, fingerprint(getattr(self.parts, part))) if shared else part
            folder = Path(config.features or self.folder.root / "features") / name
            if shared:
                folder.mkdir(parents=True, exist_ok=True)
            stream = replace(config.stream, batch_size=config.evaluate.batch, shuffle=False, drop_last=False)
            clips, rows = len(getattr(self.parts, part)), len(source) * views
            each = f", {rows // clips} windows of each" if rows > clips else ""
            say(self.console, f"features of {number_of(clips, 'clip')} to {_PURPOSE[part]}{each}", "dim")

            def columns(batch: Batch) -> Columns:
                with self.machine.autocast():
                    made = self.task.columns_of(batch, source) | {ROW: batch.ids}
                done("features", len(batch))
                return made

            shown = Display(self.console) if part == "train" else nullcontext(self.display)  # train: none is shown yet
            locked = lock(folder / "lock", wait=True) if shared else nullcontext()
            with shown as display, display.clips(rows) as done, self.stop.at_once(), locked:
                skipped = Skipped(folder / "skipped.jsonl") if shared else self.skipped.under(part)
                batches: Iterable[Batch] = evaluation_batches(source, stream, self.machine.device, skipped)
                if part == "train" and config.stream.augment:
                    batches = Epochs(source, views, stream, self.machine.device, skipped)
                table = tabulate(columns, batches, rows, self.machine.device, views, folder, keep=shared)
            for record in skipped.records.values() if shared else ():  # whichever run computed the features
                if (id := f"{part}/{record['id']}") not in self.skipped:
                    self.skipped.keep({**record, "id": id})
            self.tables[part] = table
        return self.tables[part]

    @torch.no_grad()
    def measure(self, part: str) -> dict[str, float]:
        """The figures of a part with the weights as they are; of the test part also writes each clip's answer."""
        source = self.task.clips(getattr(self.parts, part), test=part == "test")
        size = self.config.evaluate.batch
        rows: Iterable[Columns]
        if self.config.head.frozen and self.task.cached:
            rows = self._table(part, source).batches(size)
        else:
            stream = replace(self.config.stream, batch_size=size)
            found = evaluation_batches(source, stream, self.machine.device, self.skipped.under(part))
            rows = (self.task.columns_of(batch, source) | {ROW: batch.ids} for batch in found)
        with self.machine.autocast():
            if part != "test":
                return self.task.measure(rows)
            figures, answers = answered(self.task, rows)
        write_answers(self.folder.root, self.config.task, self.parts, answers)
        self.measured = measured(answers)
        return figures

    def evaluate(self, due: int) -> None:
        if due < 0 and self.config.task != "retrieval":  # a head that has learnt nothing
            return
        with self.stop.at_once():
            found = self.measure("validation")
        figure, before = self.task.figure, evaluations_of(self.folder)
        if all(line[figure] < found[figure] for line in before):
            write_bytes(self.folder.root / BEST, safetensors.torch.save(_contiguous(self.task.state_dict())))
        line = {"kind": "evaluation", "epoch": due + 1, "step": self.trainer.counters.step, "part": "validation"}
        self.metrics.write(line | found)
        shown = f"epoch {due + 1} of {self.config.stream.epochs}: {figure} {found[figure]:.1f}"
        self.display.say(f"{self.title}, {shown} on the validation part")

    def finish(self) -> None:
        lines = evaluations_of(self.folder)
        figure = self.task.figure
        best = max(lines, key=lambda line: float(line[figure]))  # the first of equal ones
        self.task.load_state_dict(safetensors.torch.load((self.folder.root / BEST).read_bytes()))
        with self.stop.at_once():
            found = self.measure("test")
        self._keep_predictions()
        if self.skipped.counts:
            self.display.say(f"skipped clips: {in_words(self.skipped.counts)}; {self.folder.skipped} names them")
        own = self.task.head if isinstance(self.task.head, AVM) else None
        frozen, source = self.config.head.frozen, self.config.weights.source
        extra = {"transfer": to_tree(self.config), "commit": self.environment["commit"], "test": found}
        if own or not frozen or is_learner(source):  # a learner replaces its weights
            kept = own if frozen else None  # a module of another backbone is of no use
            write_bytes(self.folder.weights, weights.packed(self.task.model, kept, extra, inputs_of(self.config)))
        counters = self.trainer.counters
        end = {"kind": "end", "step": counters.step, "clips": counters.clips, "skipped_steps": counters.skipped}
        known = figure, found, best, self.skipped.counts, self.measured
        self.metrics.write(end | _result_line(self.config, self.parts, *known))
        self.metrics.sync()

    def _keep_predictions(self) -> None:
        def said(batch: Batch, source: Source) -> Columns:
            with self.machine.autocast():
                return self.task.shown(self.task.columns_of(batch, source))

        stream = replace(self.config.stream, batch_size=self.config.evaluate.batch)
        batches = partial(evaluation_batches, config=stream, device=self.machine.device)
        _keep_predictions(self.folder, self.parts, self.task.clips, batches, said)


_PURPOSE = {"train": "train on", "validation": "choose on", "test": "test on"}


def spread_over(length: int, segments: int = 1) -> list[int]:
    """The rows of `SHOWN` clips spread over a part, each with all its segments."""
    clips = length // segments
    chosen = [i * clips // min(SHOWN, clips) for i in range(min(SHOWN, clips))]
    return [segments * clip + k for clip in chosen for k in range(segments)]


@torch.no_grad()
def _keep_predictions(
    folder: RunFolder,
    parts: Parts,
    clips: Callable[[Source], Source],
    batches: Callable[[Source], Iterable[Batch]],
    said: Callable[[Batch, Source], Columns],
) -> None:
    """What a model says of a few test clips, with their rows in the test part, for pictures."""
    rows = torch.tensor(spread_over(len(parts.test), parts.segments))
    source, found = clips(part_of(parts.test, rows.tolist())), []
    with suppress(StellaError):  # none of them can be used
        found = [{"rows": rows[batch.ids.cpu()], **said(batch, source)} for batch in batches(source)]
    if found and len(found[0]) > 1:
        joined = {name: torch.cat([each[name] for each in found]) for name in found[0]}
        clip = joined["rows"] // parts.segments
        whole = clip.bincount()[clip] == parts.segments  # no segment of the clip was skipped
        if whole.any():
            kept = _contiguous({name: column[whole] for name, column in joined.items()})
            write_bytes(folder.root / PREDICTIONS, safetensors.torch.save(kept))


def _contiguous(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _result_line(
    config: TransferConfig,
    parts: Parts,
    figure: str,
    found: dict[str, float],
    best: Line,
    skipped: dict[str, int],
    tested: Sequence[int] | None,
) -> Line:
    return {
        "task": config.task,
        "classes": list(parts.classes),
        "figure": figure,
        "test": found,
        "best_epoch": best.get("epoch"),
        "validation": best.get(figure),
        "ceilings": ceilings(config.task, parts, config.stream.size, tested),
        "parts": [len(parts.train), len(parts.validation), len(parts.test)],
        "measured": len(parts.test) if tested is None else len(tested),  # of the test part
        "skipped": skipped,
    }


def _localise(config: TransferConfig, folder: RunFolder, console: Console, loaded: weights.Loaded) -> RunResult:
    """Nothing is trained: the figures of the test part."""
    place, parts = machine(config.train), config.data.downstream("localise")
    write_json(folder.config, to_tree(config))
    write_json(folder.environment, environment(place))
    folder.cut(0)
    model, avm = loaded.to(place.device)
    say(console, f"localise with {'the matching module' if avm else 'cosines, as the model has no matching module'}")
    stream, source = replace(config.stream, batch_size=config.evaluate.batch), localise.read(parts.test)
    skipped = Skipped(folder.skipped)
    found: list[Columns] = []
    with place.autocast(), Display(console) as display, display.clips(len(source)) as done:
        for batch in evaluation_batches(source, stream, place.device, skipped):
            found.append(localise.judged(model, avm, batch) | localised(batch))
            done("localising", len(batch))
    answers = {name: torch.cat([each[name] for each in found]) for name in found[0]}
    write_answers(folder.root, "localise", parts, answers)
    figures = localise.figures(answers)

    def said(batch: Batch, _: Source) -> Columns:
        with place.autocast():
            return {"maps": localise.sound_maps(model, avm, replace(batch, video=batch.video[:, :, :3]))}

    batches_of = partial(evaluation_batches, config=stream, device=place.device)
    _keep_predictions(folder, parts, localise.read, batches_of, said)
    lines = Lines(folder.metrics)
    line = _result_line(config, parts, localise.FIGURE, figures, {}, skipped.counts, measured(answers))
    lines.write({"kind": "end", "step": 0, "map": "matching" if avm else "cosine"} | line)
    lines.sync()
    lines.close()
    if skipped.counts:
        say(console, f"skipped clips: {in_words(skipped.counts)}; {folder.skipped} names them", "yellow")
    assert folder.end is not None
    return RunResult(folder.root, True, folder.end)
