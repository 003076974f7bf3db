"""`stella learn`: go on from a learner's state with whatever is new, now or as it arrives."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from stella import methods
from stella.config import spelt, to_tree
from stella.errors import ConfigError, StellaError, number_of
from stella.files import Line
from stella.learn import undo
from stella.learn.disks import GoneError, explained, full, gone, is_there
from stella.learn.home import ENDS, Home, Settings
from stella.learn.items import Item, Scanner, Seen, Signature, check_source
from stella.learn.page import drawn
from stella.learn.records import learnt, own_part
from stella.learn.round import KeptApartError, Learner
from stella.learn.takeover import take_over, unknown
from stella.runs.build import check
from stella.runs.config import RunConfig, settle
from stella.runs.progress import say
from stella.runs.stop import Stop, Stopped
from stella.runs.training import changed_keys

UNUSABLE = 1  # exit status if no new clip could be used
KEPT_APART = 3  # exit status
PAUSE = 60.0  # seconds between attempts while a disk is full or gone
SETTLE = 10.0  # seconds without a change after which a file is taken to be whole
REST = 10  # times as long as a scan takes: so long the next one is waited for, at least
LONGEST = 60.0  # seconds: a mount that hung once does not keep it from looking
DRAWN = 300.0  # seconds between two pages, while there are rounds to do


def with_unit(seconds: float) -> str:
    """90 → 90 s, 3600 → 60 min, 86400 → 24 h."""
    if seconds < 120:
        return f"{seconds:g} s"
    return f"{seconds / 60:g} min" if seconds < 7200 else f"{seconds / 3600:g} h"


@dataclass(frozen=True)
class Outcome:
    rounds: list[Line] = field(default_factory=list)
    exit_code: int = 0


@dataclass(frozen=True)
class Watch:
    """When a round begins: with `clips` new clips, or with what has come `every` seconds after the last one."""

    clips: int = 500
    every: float = 3600.0
    settle: float = SETTLE
    scan: float = 5.0  # seconds between scans
    idle: float | None = None  # seconds without anything new after which to end; none: never

    def __str__(self) -> str:
        return f"a round begins with {number_of(self.clips, 'new clip')}, or with fewer after {with_unit(self.every)}"


def create(home: Home, config: RunConfig, settings: Settings) -> None:
    """Make a new learner; call this with its lock held."""
    config = settle(config)
    if methods.find(config.method).joint:
        raise ConfigError(f"method={config.method} trains on all tasks at once; choose one that learns from a stream")
    for of, name, without in ENDS:
        if (value := getattr(getattr(config, of), name)) != without:
            remedy = f"set {of}.{name}={spelt(without)}"
            raise ConfigError(f"{of}.{name}={spelt(value)} needs an end, and a learner's stream has none; {remedy}")
    home.check_free()
    check(config, unbounded=True)
    home.create(config, settings)


def change(home: Home, config: RunConfig | None, settings: Settings | None) -> None:
    """Change what no state depends on; refuse anything else."""
    if config is not None and (found := changed_keys(to_tree(home.config), config)):
        raise StellaError(f"{home.root} was made otherwise: {'; '.join(found)}; leave it out, or start a new learner")
    was = home.settings
    if settings is not None and (settings.share, settings.held) != (was.share, was.held):
        raise StellaError(
            f"{home.root} was made with --share {was.share:g} --held {was.held}, which stay as they are; leave them out"
        )
    home.change(config, settings)


def learn(
    root: Path | str,
    sources: Sequence[str],
    config: RunConfig | None = None,
    settings: Settings | None = None,
    *,
    run: Path | str | None = None,
    epochs: int = 1,
    clips: int | None = None,
    watch: Watch | None = None,
    console: Console | None = None,
) -> Outcome:
    """Learn everything in these folders and archives that is new, in one round or in rounds of at most `clips` clips.

    A new learner needs `config`, or a finished `run` to go on from; for one that is there `config` is its own
    (`Home.config`) with changes. Without sources `run` is taken over and nothing is learnt. With `watch` it goes on
    until a signal comes. SIGTERM and Ctrl-C save what is done and stop; the outcome then has an exit code. A round that
    was interrupted is finished first.
    """
    home, console = Home(root), console or Console()
    roots = [str(Path(source).absolute()) for source in sources]
    for source in roots:
        if not watch or is_there(source):
            check_source(source)
    with home.locked(), Stop() as stop, explained(home.root):
        _opened(home, config, settings, run)
        if run is not None:
            say(console, _taken(home, run))
        if run is not None and not roots:
            say(console, f"go on with: stella learn {home.root} SRC…")
            _draw(home, console)
            return Outcome()
        learner = Learner(home, console, stop)
        session = Session(learner, roots, epochs)
        try:
            with learner:
                session.watch(watch) if watch else session.once(clips)
        except Stopped:
            assert stop.signal is not None
            session.draw()
            session.learner.say(f"stopped by {stop.signal.name}; the same command goes on from here")
            return Outcome(session.rounds, 128 + stop.signal)
        except KeptApartError as error:
            session.learner.say(str(error), "bold red")
            session.write_page()
            return Outcome(session.rounds, KEPT_APART)
        session.draw()
        if not watch and session.rounds and not any(map(_of_use, session.rounds)):
            reasons = home.root / "current" / "skipped.jsonl"
            learner.say(f"none of the new clips could be used; {reasons} says why", "bold red")
            return Outcome(session.rounds, UNUSABLE)
        return Outcome(session.rounds)


def _opened(home: Home, config: RunConfig | None, settings: Settings | None, run: Path | str | None) -> None:
    if home.exists:
        if run is not None and home.run != Path(run).resolve():
            raise StellaError(f"{home.root} is a learner already; leave --from {run} out, or choose a new folder")
        change(home, config, settings)
    elif run is not None:
        take_over(home, run, settings or Settings())
    elif config is None:
        raise StellaError(f"{home.root} is not the folder of a learner; check the path")
    else:
        create(home, config, settings or Settings())


def _taken(home: Home, run: Path | str) -> str:
    records = [record for record in home.history() if "from" in record]
    clips, rounds = number_of(sum(map(learnt, records)), "clip"), number_of(len(records), "round")
    said = f"{home.root} goes on from {run}: its model, optimiser and memory, {clips} learnt in {rounds}"
    if lost := unknown(home.plans()[: len(records)]):
        said += f"; {number_of(lost, 'clip')} of it cannot be read, and will count as new; "
        said += "to have them known, bring them back and take the run over in another folder"
    return said


def _of_use(record: Line) -> bool:
    """Whether a round could use any of its clips."""
    return bool(learnt(record) or record["set_aside"])


class Session:
    """One process's rounds."""

    def __init__(self, learner: Learner, roots: Sequence[str], epochs: int) -> None:
        self.learner, self.home, self.roots, self.epochs = learner, learner.home, roots, epochs
        self.rounds: list[Line] = []
        self.scanner = Scanner(self.home.inputs, self.home.read_stamps())
        self._told: set[str] = set()
        self._away: set[str] = set()  # folders that are not there, or empty
        self._drawn, self._page = time.monotonic(), True  # when the page was drawn, and whether it shows all rounds
        self._later = 0.0  # when it may be tried again, if it could not be written
        self._took = 0.0  # seconds of a scan that found no new file to read
        self._unchanged: dict[str, tuple[Signature, float]] = {}  # since when a file has not changed

    def once(self, clips: int | None) -> None:
        while (left := self.learner.go_on()) is not None:
            self._done(left)
        new = self._whole(self.home.seen())
        for problem in self.scanner.problems:
            self.learner.say(problem, "yellow")
        if not new:
            self.learner.settle()  # the record of a round that was finished just now
            known, rounds = sum(map(learnt, self.home.history())), number_of(self.home.current, "round")
            self.learner.say(f"nothing new: {number_of(known, 'clip')} learnt in {rounds}")
        for start in range(0, len(new), clips or len(new) or 1):
            self._done(self.learner.begin(new[start : start + clips if clips else None], self.epochs))

    def watch(self, when: Watch) -> None:
        """Rounds as clips arrive, until a signal. A disk that is full or gone is waited for."""
        last = arrived = time.monotonic()
        seen = self.home.seen()
        self.learner.say(f"watching {', '.join(self.roots)}: {when}")
        while True:
            with self.learner.stop.at_once():
                new = self._settled(seen, when.settle)
            now = time.monotonic()
            due = len(new) >= when.clips or (bool(new) and now - last >= when.every)
            if new and not due:
                self._say_once(f"new clips are waiting; the round begins within {with_unit(when.every)}")
            if self.home.next.plan.exists() or due:
                if self._attempt(partial(self._one, new[: when.clips])):
                    last = arrived = time.monotonic()
                    if not _of_use(self.rounds[-1]):  # what is lost may be listed again at once
                        self._wait(min(PAUSE, when.every))
                seen = self.home.seen()  # also if it failed: its clips may be those of a round by then
                continue
            if not self._attempt(self.learner.settle):
                continue
            arrived = now if self._unchanged else arrived
            if when.idle is not None and not new and now - arrived >= when.idle:
                return
            self.draw()
            self._wait(max(when.scan, min(REST * self._took, LONGEST, when.every)))

    def _one(self, new: Sequence[Item]) -> None:
        """Finish the round that was begun, or begin one."""
        self._keep_stamps()
        self._done(self.learner.go_on() or self.learner.begin(new, self.epochs))

    def _attempt(self, work: Callable[[], None]) -> bool:
        """False, after a while, if a disk is full or gone."""
        try:
            work()
            return True
        except GoneError as error:
            give_up = f"to give the round up, stop this process and run stella learn {self.home.root} --drop"
            self._say_once(f"waiting: {error}, and round {self.home.next.number} needs it; {give_up}")
        except (OSError, StellaError) as error:
            if (cause := full(error)) is None:
                raise
            self._say_once(
                f"waiting: {self.home.root} cannot be written ({cause.strerror}); it goes on with free space"
            )
        self._wait(PAUSE)
        return False

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self.learner.stop.at_once():
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, 0.2))

    def _done(self, record: Line | None) -> None:
        if record is not None:
            earlier = [each for each in self.rounds if each["round"] < record["round"]]
            self.rounds = [*earlier, own_part(record)]  # one whose state could not be written is done again
            self.learner.once_in_use(partial(self.learner.tell, record))
            self._page = False
            if time.monotonic() - self._drawn >= DRAWN:
                self.draw()

    def draw(self) -> None:
        """Bring the page up to date, if there is anything new."""
        if not self._page and time.monotonic() >= self._later:
            self.learner.settle()
            self.write_page()

    def write_page(self) -> None:
        """Write the page, or say once that it cannot be: no round fails for that."""
        if problem := drawn(self.home):
            self._say_once(problem)
            self._later = time.monotonic() + PAUSE
            return
        self._told.clear()
        self._drawn, self._page = time.monotonic(), True

    def _scan(self, seen: Seen) -> list[tuple[Item, Signature]]:
        """All new items. Of those with the same content only the first counts."""
        self.scanner.problems.clear()
        began, known = time.monotonic(), len(self.scanner.stamps)
        found: dict[str, tuple[Item, Signature]] = {}
        for root in self.roots:
            if gone(root):
                continue
            for item, signature in self.scanner.scan(root, seen):
                found.setdefault(item.content or item.id, (item, signature))
        if len(self.scanner.stamps) == known:  # a new file is read once, which may take far longer
            self._took = time.monotonic() - began
        return list(found.values())

    def _tell_away(self) -> None:
        """Say which folders are not there or are empty, as those that are not mounted, when that changes."""
        away = {root for root in self.roots if gone(root)}
        for root in sorted(away - self._away):
            empty = "is empty; if it should not be, mount it"
            line = empty if is_there(root) else "is not there; mount it, or start without it"
            self.learner.say(f"waiting: {root} {line}", "yellow")
        for root in sorted(self._away - away):
            self.learner.say(f"{root} is back")
        self._away = away

    def _whole(self, seen: Seen) -> list[Item]:
        """The new items. Files that have just changed are waited for once; those that go on changing are left."""
        for root in filter(gone, self.roots):
            self.learner.say(f"{root} is empty: skipped; if it should not be, mount it", "yellow")
        found, now = self._scan(seen), time.time()
        youngest = min((now - signature[1] / 1e9 for _, signature in found if signature), default=SETTLE)
        new = [item for item, _ in found]
        if youngest < SETTLE:
            wait = min(SETTLE, SETTLE - youngest)  # a file may be of the future, by another machine's clock
            self.learner.say(f"waiting {wait:.0f} s: there are files that have just been written")
            self._wait(wait)
            before = {Path(item.root, item.path): signature for item, signature in found}
            found = self._scan(seen)
            new = [item for item, after in found if not after or before.get(Path(item.root, item.path)) == after]
            if left := len(found) - len(new):
                self.learner.say(f"{number_of(left, 'video')} changed meanwhile, left for the next call", "yellow")
        self._keep_stamps()
        return new

    def _keep_stamps(self) -> None:
        if self.scanner.fresh:
            self.home.write_stamps(self.scanner.stamps)
            self.scanner.fresh = False

    def _settled(self, seen: Seen, seconds: float) -> list[Item]:
        """The new items that are not being written, in the order in which they came."""
        self._tell_away()
        now, found = time.monotonic(), self._scan(seen)
        for problem in self.scanner.problems:
            self._say_once(problem)
        before, self._unchanged = self._unchanged, {}
        for item, signature in found:
            was = before.get(item.id)
            self._unchanged[item.id] = was if was and was[0] == signature else (signature, now)
        whole = [(i, s) for i, s in found if not s or now - self._unchanged[i.id][1] >= seconds]
        return [item for item, signature in sorted(whole, key=lambda each: each[1][1:])]

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self.learner.say(line, "yellow")


def _draw(home: Home, console: Console) -> None:
    if problem := drawn(home):
        say(console, problem, "yellow")


def accept(root: Path | str, console: Console) -> None:
    """Use the round that was kept apart."""
    home = Home(root)
    home.check()
    with home.locked(), Stop() as stop, explained(home.root):
        folder = home.next
        if folder.ended is None:
            raise StellaError(f"no round of {root} is kept apart; there is nothing to accept")
        if not folder.checkpoints.newest_is_intact:
            raise StellaError(
                f"the state of round {folder.number} in {folder.checkpoints.folder} is missing or damaged; throw the "
                f"round away with stella learn {root} --drop"
            )
        Learner(home, console, stop).accept(folder)
        say(console, f"round {folder.number} is in use")
        _draw(home, console)


def drop(root: Path | str, console: Console) -> None:
    """Discard the round that is kept apart or in progress."""
    home = Home(root)
    home.check()
    with home.locked(), explained(home.root):
        if not home.next.plan.exists():
            raise StellaError(f"no round of {root} is kept apart or in progress; there is nothing to drop")
        say(console, f"round {home.current + 1} is dropped: {undo.drop(home)}; {home.in_use}")
        _draw(home, console)


def rollback(root: Path | str, number: int, console: Console) -> None:
    home = Home(root)
    home.check()
    with home.locked(), explained(home.root):
        undo.rollback(home, number)
        say(console, f"round {number} is in use; later rounds are in {home.root / 'undone'}, their clips count as new")
        _draw(home, console)


def with_changes(settings: Settings, **given: float | int | None) -> Settings:
    """The settings with those values that are given."""
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(settings, **changes)
