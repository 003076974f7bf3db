"""From a finished run to a learner: its tasks become the first rounds, its evaluation clips are set aside."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from stella import methods
from stella.clip import Source
from stella.data.folder import Folder
from stella.data.packed import Packed
from stella.data.shards import Shards
from stella.data.skipped import Skipped
from stella.data.tasks import Tasks
from stella.data.views import View, part, view
from stella.embed import load
from stella.embed.translate import Measured
from stella.errors import StellaError
from stella.files import Line, write_bytes, write_json
from stella.learn.held import HeldClip, kept, store
from stella.learn.home import Home, Plan, Settings, without_end
from stella.learn.items import Item, content
from stella.runs.config import RunConfig, inputs_of, stored_config
from stella.runs.folder import RunFolder
from stella.train.checkpoint import Checkpoints


def take_over(home: Home, run: Path | str, settings: Settings) -> None:
    """Make a learner that goes on where a run ended; call this with its lock held. What a kill leaves is repeated.

    HOME/takeover.json names the run before anything else is made. What needed the end of the run's stream is left out,
    so the learning rate is the highest of the run again.
    """
    folder = RunFolder(run)
    config = stored_config(folder)
    if folder.end is None:
        raise StellaError(f"{run} is not finished; finish it first with stella pretrain --resume {run}")
    if methods.find(config.method).joint:
        raise StellaError(f"{run} trained on all tasks at once ({config.method}); a learner needs a run over a stream")
    state = Checkpoints(folder.checkpoints).load()
    if state is None:
        raise StellaError(f"the checkpoints of {run} are gone, and its weights alone are not a state; restore them")
    evaluated, plans = _tasks(config, run, state["trainer"]["stream"]["plan"]["clips"])
    home.check_free(Path(run).resolve())
    write_json(home.root / "takeover.json", {"run": str(Path(run).resolve())})
    for number, (plan, (name, source)) in enumerate(zip(plans, evaluated, strict=True), 1):
        there = home.round(number)
        there.write_plan(_listed(plan))
        own = [clip for clip in kept(plans, settings.held) if clip.round == number]
        home.held.mkdir(exist_ok=True)
        _store(own, plan, source, home, inputs_of(config).duration)
        write_json(there.record, _record(number, plan, f"{run}, {name}"))
    config = without_end(config)
    state["trainer"]["stream"]["plan"]["drop_last"] = config.stream.drop_last
    last = home.round(len(plans))
    last.checkpoints.save(state["trainer"]["counters"]["step"], {"trainer": state["trainer"], "loss": {}})
    for old, new in ((folder.weights, last.weights), (folder.slow_weights, last.slow_weights)):
        if old.exists():
            write_bytes(new, old.read_bytes())
    nothing = torch.empty(0, 1)  # its evaluation embedded other clips
    Measured(load(last.weights, "cpu").fingerprint, [], nothing, nothing).write(last.embeddings)
    home.link(len(plans))
    home.create(config, settings)


def _tasks(config: RunConfig, run: Path | str, clips: Sequence[int]) -> tuple[Tasks, list[Plan]]:
    """The evaluation clips of a run, and its tasks as plans of rounds. `clips` are the numbers that it trained on.

    A run whose data are gone, or moved, has a state all the same: its plans list no clips.
    """
    epochs, began = config.stream.epochs, datetime.now(UTC).isoformat(timespec="seconds")
    try:
        trained, evaluated = config.data.train_tasks(cache=False), config.data.eval_tasks(cache=False)
    except StellaError:
        nothing: Tasks = [(f"task {number}", view([], [])) for number in range(1, len(clips) + 1)]
        return nothing, [Plan(epochs, began, count, [], []) for count in clips]
    plans = [
        Plan(epochs, began, len(t), _items(t, run), _items(e, run, f"evaluation/{name}/"))
        for (name, t), (_, e) in zip(trained, evaluated, strict=True)
    ]
    if [plan.clips for plan in plans] != list(clips):
        raise StellaError(f"the clips of {run} are not those that it was trained on; restore them")
    return evaluated, plans


def unknown(plans: Sequence[Plan]) -> int:
    """How many clips of these rounds, taken over from a run, are not known when they come again."""
    lost = sum(plan.clips for plan in plans if not (plan.train or plan.held))
    return lost + sum(not item.content for plan in plans for item in (*plan.train, *plan.held) if not item.clip)


def _items(source: Source, run: Path | str, rendered: str = "") -> list[Item]:
    """The clips of folders, shards and packed arrays, which later rounds know again. Of others those with a name in
    `rendered`. A file that cannot be read is listed without a stamp."""
    items = []
    for index in range(len(source)):
        found = source.stored(index) if isinstance(source, View) else None
        stored, inside = found or (None, 0)
        if not isinstance(stored, Folder | Shards | Packed):
            name = f"{rendered}{index}"
            items.append(Item(str(Path(run).absolute()), "", name, name, ""))
            continue
        origin, root = stored.origin(inside), str(stored.root)
        if isinstance(stored, Folder):
            stamp = ""
            with suppress(OSError):
                stamp = content(Path(root) / origin.id)
            items.append(Item(root, origin.id, "", origin.id, stamp))
        else:
            items.append(Item(root, "", origin.id, origin.recording, stored.stamp(inside)))
    return items


def _listed(plan: Plan) -> Plan:
    """Without the clips that are on no disk, which never come again."""
    return replace(plan, train=[item for item in plan.train if item.path or item.stamp])


def _store(own: list[HeldClip], plan: Plan, source: Source, home: Home, seconds: float) -> None:
    place = {item.id: i for i, item in enumerate(plan.held)}
    store(part(source, [place[clip.item.id] for clip in own]), own, home.held, seconds, Skipped(), 0)


def _record(number: int, plan: Plan, origin: str) -> Line:
    nothing = dict.fromkeys(("old", "new", "F", "gap", "matching", "memory", "guard"))
    return {
        "round": number,
        "began": plan.began,
        "ended": plan.began,
        "from": origin,
        "epochs": plan.epochs,
        "clips": plan.clips,
        "set_aside": len(plan.held),
        "sources": {},
        "skipped": {},
        **nothing,
        "rounds": {},
        "gallery": 0,
        "worst": [],
        "kept_apart": False,
        "seconds": {"all": 0.0},
    }
