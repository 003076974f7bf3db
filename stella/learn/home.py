"""The folder of a learner. What is in use is what the link `current` names; everything else is whole or ignored.

HOME/
  home.json            version, configuration, settings
  current              → rounds/000007, the state in use; replaced atomically
  model.safetensors    → current/model.safetensors, so that HOME can be used as a model
  rounds/000007/       plan.json (the clips of this round, written first), checkpoints/ (the newest is its state),
                       skipped.jsonl, model.safetensors, embeddings.pt, round.json (its record, written last),
                       learner.json (a copy of home.json, to restore it from)
  held/KEY.tar         clips that are set aside to measure with
  stamps.json          of video files, so that unchanged ones are not read again; may be deleted
  dropped/, undone/    rounds that were thrown away (their clips count as seen) and rolled back (these do not)
  undo                 what is being dropped or rolled back, until it is done
  takeover.json        the run that it was taken over from, if it was
"""

import json
import math
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from stella.config import build, to_tree
from stella.data.skipped import Skipped
from stella.errors import ConfigError, StellaError
from stella.files import Line, lock, read_json, sync_folder, write_bytes, write_json, write_text
from stella.learn.items import Item, Seen, Signature
from stella.learn.records import Records
from stella.learn.undo import recover
from stella.media.inputs import Inputs
from stella.runs.config import RunConfig, inputs_of
from stella.train.checkpoint import Checkpoints, DamagedError, State

VERSION = 1
LEAST = 80  # clips to measure with, if so many are kept


@dataclass(frozen=True)
class Settings:
    share: float = 0.05  # of the recordings is set aside to measure with
    held: int = 500  # clips set aside are kept, a uniform sample of all
    effort: float = 0.08  # clips to measure with in a round, as a share of those it trains on
    keep: int = 3  # states kept, for --rollback
    guard: float | None = None  # points that A on old clips may fall in a round; none: any

    def __post_init__(self) -> None:
        for name in ("share", "effort", "guard"):
            if (given := getattr(self, name)) is not None and not math.isfinite(given):
                remedy = "; --guard 100 turns it off" if name == "guard" else ""
                raise ConfigError(f"--{name} {given:g} must be a finite number{remedy}")
        if not 0 <= self.share < 1:
            raise ConfigError(f"--share {self.share:g} must be at least 0 and below 1")
        for name, least in (("held", 0), ("effort", 0), ("keep", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"--{name} {value:g} must be at least {least}")

    def measured(self, clips: int) -> int:
        """The number of kept clips to measure a round with that trains on `clips`."""
        return min(self.held, max(LEAST, round(self.effort * clips)))


@dataclass(frozen=True)
class Plan:
    """The clips of a round: those it trains on, in order, and those it sets aside."""

    epochs: int
    began: str  # ISO time
    clips: int  # trained on; `train` lists them, unless they came from a run whose clips are on no disk
    train: list[Item]
    held: list[Item]


class RoundFolder:
    def __init__(self, root: Path, number: int, keep: int = 1) -> None:
        self.root, self.number = root, number
        self.plan = root / "plan.json"
        self.checkpoints = Checkpoints(root / "checkpoints", keep)
        self.skipped = root / "skipped.jsonl"
        self.weights = root / "model.safetensors"
        self.slow_weights = root / "slow.safetensors"
        self.before = root / "before.pt"  # embeddings by the state before it, until it is in use
        self.embeddings = root / "embeddings.pt"
        self.record = root / "round.json"
        self.learner = root / "learner.json"

    def write_plan(self, plan: Plan) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        listed = {name: [astuple(item) for item in getattr(plan, name)] for name in ("train", "held")}
        tree = {"epochs": plan.epochs, "began": plan.began, "clips": plan.clips, **listed}
        write_text(self.plan, json.dumps(tree) + "\n")

    def read_plan(self) -> Plan:
        tree = read_json(self.plan)
        return Plan(**tree | {name: [Item(*row) for row in tree[name]] for name in ("train", "held")})

    def skips(self) -> dict[str | int, Line]:
        """What is known of the clips that could not be used."""
        return Skipped(self.skipped).records if self.skipped.exists() else {}

    @property
    def ended(self) -> Line | None:
        """The record of a round that is trained and measured, else None."""
        again = "delete it: the round is measured again"
        return read_json(self.record, again, again) if self.record.exists() else None

    @property
    def kept_apart(self) -> Line | None:
        """The record of a round that ended and exceeds the guard, else None: what ended otherwise is put to use."""
        return record if (record := self.ended) and record["kept_apart"] else None


# What only a stream with an end can have (part, name), and what stands for none.
ENDS = (("train", "decay", 0.0), ("train", "schedule", "linear"), ("stream", "drop_last", False))


def without_end(config: RunConfig) -> RunConfig:
    """The configuration without what a stream that never ends cannot have."""
    for of, name, without in ENDS:
        config = replace(config, **{of: replace(getattr(config, of), **{name: without})})
    return config


class Home:
    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.file = self.root / "home.json"
        self.held = self.root / "held"
        self.stamps = self.root / "stamps.json"
        self._plans: dict[int, Plan] = {}
        self._records = Records()
        self.ahead = 0  # a round that this process is past, while its state is being written

    @property
    def exists(self) -> bool:
        return self.file.exists()

    @property
    def run(self) -> Path | None:
        """The finished run that this learner was, or is being, taken over from."""
        file = self.root / "takeover.json"
        return Path(read_json(file)["run"]) if file.exists() else None

    def check_free(self, run: Path | None = None) -> None:
        """Refuse to make a learner, or take `run` over, in a folder with anything but what a killed such call left."""
        if self.round(1).plan.exists() and (self.run is None or self.round(self.current).learner.exists()):
            raise StellaError(f"{self.file} is missing; {self._restore()}")
        if self.run is not None and self.run == run:
            return
        if self.run is not None:
            raise StellaError(
                f"{self.root} is being made from {self.run}; go on with --from {self.run}, or choose a new folder"
            )
        if self.root.exists() and not all(map(_left_by_a_kill, self.root.iterdir())):
            raise StellaError(f"{self.root} holds something else; choose a new folder for the learner")

    def create(self, config: RunConfig, settings: Settings) -> None:
        """Write the folder of a new learner; `config` has been through `settle`."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.held.mkdir(exist_ok=True)
        self._link_model()
        tree = {
            "version": VERSION,
            "config": to_tree(config),
            "settings": asdict(settings),
            "inputs": asdict(inputs_of(config)),
        }
        write_json(self.file, tree)

    @cached_property
    def _tree(self) -> dict[str, Any]:
        if self.round(1).plan.exists():
            tree = read_json(self.file, self._restore(), self._restore())
        else:
            tree = read_json(self.file, f"is {self.root} the folder of a learner? stella learn HOME SRC… makes one")
        if tree.get("version") != VERSION:
            raise StellaError(
                f"{self.root} has version {tree.get('version')} and this program reads version {VERSION}; "
                "use the program that made it, or start a new one: nothing was changed"
            )
        return tree

    def _restore(self) -> str:
        """How to get home.json back."""
        if (copy := self.round(self.current).learner).exists():
            return f"restore it as it was after round {self.current}: cp {copy} {self.file}"
        return "restore it from a backup, or start a new learner in another folder"

    def check(self) -> None:
        """Refuse a folder that is not a learner's, or is one of another version."""
        _ = self._tree

    def change(self, config: RunConfig | None = None, settings: Settings | None = None) -> None:
        new = dict(self._tree)
        new |= {"config": to_tree(config)} if config else {}
        new |= {"settings": asdict(settings)} if settings else {}
        if new != self._tree:
            write_json(self.file, new)
            self.__dict__.pop("_tree")

    @property
    def config(self) -> RunConfig:
        """Learners taken over by earlier versions have a schedule with an end; it is left out."""
        try:
            return without_end(build(RunConfig, self._tree["config"]))
        except ConfigError as error:
            raise StellaError(
                f"{self.root} was made by another version of stella ({error}); use that one, or start a new learner "
                f"from its weights, {self.root / 'model.safetensors'}: nothing was changed"
            ) from error

    @property
    def settings(self) -> Settings:
        return build(Settings, self._tree["settings"], "settings.")

    @property
    def inputs(self) -> Inputs:
        """How inputs are made: fixed when the learner was made, even if its first clips have moved since."""
        return build(Inputs, self._tree["inputs"], "inputs.")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: a second learner is refused."""
        there, file = self.root.exists(), self.root / "lock"
        ours = not file.exists()
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            with lock(file):
                try:
                    recover(self)
                    yield
                finally:
                    if ours and not self.exists:  # refused before anything was made
                        file.unlink(missing_ok=True)
        finally:
            if not there and not self.exists:
                with suppress(OSError):
                    self.root.rmdir()

    # ---- rounds

    @property
    def current(self) -> int:
        """The number of the round whose state is in use; 0 before the first."""
        link = self.root / "current"
        return max(self.ahead, int(link.readlink().name) if link.is_symlink() else 0)

    @property
    def in_use(self) -> str:
        """Which round is in use, in words."""
        return f"round {self.current} is in use" if self.current else "no round is in use yet"

    def round(self, number: int) -> RoundFolder:
        return RoundFolder(self.root / "rounds" / f"{number:06d}", number)

    @property
    def next(self) -> RoundFolder:
        return self.round(self.current + 1)

    def after(self, number: int) -> list[Path]:
        """The folders of all rounds after this one, in use or not, in order."""
        paths = [path for path in (self.root / "rounds").glob("*") if path.is_dir()]
        found = {int(path.name): path for path in paths if re.fullmatch(r"\d{6}|[1-9]\d{6,}", path.name)}
        return [found[each] for each in sorted(found) if each > number]

    @property
    def kept(self) -> list[int]:
        """The rounds before the one in use whose states are kept."""
        return [number for number in range(1, self.current) if self.round(number).checkpoints.folder.exists()]

    def plan(self, number: int) -> Plan:
        if number not in self._plans:
            with self._explained(number, self.round(number).plan):
                self._plans[number] = self.round(number).read_plan()
        return self._plans[number]

    def record(self, number: int) -> Line:
        """That of a round in use."""
        with self._explained(number, self.round(number).record):
            return read_json(self.round(number).record)

    def state(self) -> State | None:
        """The state in use; None before the first round."""
        if not self.current:
            return None
        checkpoints = self.round(self.current).checkpoints
        with self._explained(self.current, checkpoints.folder):
            if (state := checkpoints.load()) is None:
                raise DamagedError(f"{checkpoints.folder} is empty")
            return state

    @contextmanager
    def _explained(self, number: int, path: Path) -> Iterator[None]:
        """Where something of a round cannot be read, say how to go on."""
        try:
            yield
        except StellaError as error:
            remedy = "start a new learner in another folder: no earlier state is kept"
            if number > self.current:
                remedy = f"throw the round away with stella learn {self.root} --drop"
            elif earlier := [kept for kept in self.kept if kept < number]:
                remedy = f"go back with stella learn {self.root} --rollback {earlier[-1]}"
            raise StellaError(f"{path} is missing or damaged; restore it from a backup, or {remedy}") from error

    def plans(self) -> list[Plan]:
        """Those of all rounds in use, the first round's first."""
        return [self.plan(number) for number in range(1, self.current + 1)]

    def forget_plans(self) -> None:
        """Rounds are others now."""
        self._plans.clear()

    def history(self) -> list[Line]:
        """The records of all rounds in use. Only the last one tells of other rounds."""
        current = self.current
        return [*map(self._own_part, range(1, current)), self.record(current)] if current else []

    def _own_part(self, number: int) -> Line:
        with self._explained(number, self.round(number).record):
            return self._records.own_part(self.round(number).record)

    def seen(self) -> Seen:
        """Everything that was learnt, set aside, found unusable or dropped, and what rounds in progress have."""
        seen, first = Seen(), 0
        for number, plan in enumerate(self.plans(), 1):
            _add(seen, plan, self.round(number).skips(), count(first))
            first += plan.clips
        for later in (RoundFolder(path, int(path.name)) for path in self.after(self.current)):
            if later.plan.exists():
                seen.add([*self.plan(later.number).train, *self.plan(later.number).held])
        for path in sorted((self.root / "dropped").glob("*")):
            if (folder := RoundFolder(path, 0)).plan.exists():
                plan = folder.read_plan()
                _add(seen, plan, folder.skips(), (item.id for item in plan.train))
        return seen

    def read_stamps(self) -> dict[str, tuple[Signature, str]]:
        """Those of `Scanner.stamps` that were kept."""
        with suppress(StellaError):  # damaged: the files are read again
            return {path: (tuple(signature), stamp) for path, (signature, stamp) in read_json(self.stamps).items()}
        return {}

    def write_stamps(self, stamps: dict[str, tuple[Signature, str]]) -> None:
        with suppress(OSError):  # a full disk: the files are read again
            write_text(self.stamps, json.dumps(stamps) + "\n")

    # ---- what is in use

    def link(self, number: int) -> None:
        """Let a round be the one in use."""
        _link(self.root / "current", f"rounds/{number:06d}")
        self._link_model()  # something may have written a file there

    def _link_model(self) -> None:
        _link(self.root / "model.safetensors", "current/model.safetensors")

    def use(self, number: int) -> None:
        """Put a finished round to use, then remove what is no longer needed."""
        write_bytes(self.round(number).learner, self.file.read_bytes())
        self.link(number)
        for each in map(self.round, range(1, number + 1)):
            each.before.unlink(missing_ok=True)
        for old in map(self.round, range(1, number + 1 - self.settings.keep)):
            shutil.rmtree(old.checkpoints.folder, ignore_errors=True)
            old.weights.unlink(missing_ok=True)
            old.slow_weights.unlink(missing_ok=True)
            with suppress(OSError, StellaError):  # a full disk, a lost record: the next time
                self._records.shorten(old.record)


def _add(seen: Seen, plan: Plan, skips: Mapping[str | int, Line], names: Iterable[str | int]) -> None:
    """Add a round's clips. `names` are those in `skips` of the clips that it trains on."""
    named = [*zip(plan.train, names, strict=False), *((item, item.id) for item in plan.held)]
    seen.add_round([item for item, _ in named], {item: skips[name]["reason"] for item, name in named if name in skips})


def _left_by_a_kill(path: Path) -> bool:
    """Whether this is in a folder because a learner was killed while it was made."""
    held = path.name == "held" and path.is_dir() and not any(path.iterdir())
    return held or path.name == "lock" or (path.name == "model.safetensors" and path.is_symlink())


def _link(path: Path, target: str) -> None:
    """Let `path` name `target`, atomically."""
    if path.is_symlink() and str(path.readlink()) == target:
        return
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    fresh.symlink_to(target)
    fresh.replace(path)
    sync_folder(path.parent)
