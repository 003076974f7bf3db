"""A day in an hour: a learner watches a folder into which clips of six tasks arrive, and everything goes wrong once.

    python benchmarks/day_clips.py clips                    # 2,000 rendered clips, beforehand
    python benchmarks/day.py clips work --minutes 60        # needs root: work/home is a small tmpfs of its own
    python benchmarks/day_check.py work --out results/learner/day.json

Clips come in bursts, task after task. 5% of the files are bad, and some of these are mended later; 5% are written in
pieces over a quarter of a minute; files are renamed and deleted, learnt or not; once the disk of the learner's folder
is full for a minute; the learner is killed three times (SIGKILL) and started again by the same command, as a service
would be. Everything that is done to the folder goes into work/events.jsonl, the learner's memory and descriptors into
work/samples.csv, what it says into work/learn.log.
"""

import argparse
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stella

# isort: split
from stella.learn.home import Home
from stella.learn.items import content

BURSTS = 18
BAD, GROWING, MENDED = 0.05, 0.05, 0.3  # shares: of the files, of the files, of the bad ones
RENAMED, DELETED = 60, 60
PIECES, PAUSE = 8, 2.0  # of a file that grows, and the seconds between them: less than SETTLE
SETTLE, SCAN = 5, 5.0
DISK = "2g"
LEARN = (
    *("--watch", "--round", "150", "--every", "120s", "--settle", str(SETTLE), "--share", "0.1", "--keep", "1000"),
    *("method=stella", "model.weights=base-tiny", "memory.clips=200", "stream.batch_size=16", "stream.workers=1"),
    *("stream.augment=false", "train.lr=2e-4", "train.checkpoint_minutes=1"),
)


@dataclass
class Day:
    clips: Path
    work: Path
    seconds: float
    seed: int = 0
    process: subprocess.Popen[bytes] | None = None
    over: bool = False
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.inbox, self.home = self.work / "in", self.work / "home"
        self.draw = random.Random(self.seed)
        self.lock = threading.Lock()
        self.events = (self.work / "events.jsonl").open("w")
        self.threads: list[threading.Thread] = []

    def now(self) -> float:
        return time.monotonic() - self.began

    def tell(self, what: str, **more: Any) -> None:
        with self.lock:
            self.events.write(json.dumps({"t": round(self.now(), 2), "what": what, **more}) + "\n")
            self.events.flush()

    # ---- the learner

    def start(self) -> None:
        command = [sys.executable, "-m", "stella", "learn", str(self.home), str(self.inbox), *LEARN]
        with (self.work / "learn.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
            )
        self.tell("start", pid=self.process.pid)

    def keep_running(self) -> None:
        """Start the learner again when it has ended, as a service manager does; sample what it uses."""
        with (self.work / "samples.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("t", "pid", "round", "mb", "mb_with_workers", "descriptors", "threads"))
            while not self.over:
                assert self.process is not None
                code = self.process.poll()
                if code is not None:
                    self.tell("ended", code=code)
                    time.sleep(3)
                    self.start()
                elif (used := usage(self.process.pid)) is not None:
                    table.writerow((round(self.now(), 1), self.process.pid, Home(self.home).current, *used))
                    file.flush()
                time.sleep(5)

    def kill(self, phase: str) -> None:
        self.wait_for(phase)
        assert self.process is not None
        self.tell("kill", doing=doing(self.home))
        self.process.send_signal(signal.SIGKILL)

    def wait_for(self, phase: str, most: float = 400.0) -> None:
        end = self.now() + most
        while doing(self.home) != phase and self.now() < end:
            time.sleep(0.02)

    # ---- what happens to the folder

    def arrive(self, source: Path, kind: str) -> None:
        """A clip comes into the folder. Bad ones have no content that anyone could use."""
        path = self.inbox / source.parent.name / source.name
        path.parent.mkdir(exist_ok=True)
        data = source.read_bytes()
        if kind == "grows":
            self.tell("grows", path=str(path))
            size = len(data) // PIECES + 1
            with path.open("wb") as file:
                for first in range(0, len(data), size):
                    file.write(data[first : first + size])
                    file.flush()
                    time.sleep(PAUSE)
        elif kind != "plain":
            path.write_bytes(spoilt(data, kind))
        else:
            path.write_bytes(data)
        self.tell("bad" if kind not in ("plain", "grows") else "good", path=str(path), stamp=content(path), kind=kind)

    def mend(self, source: Path) -> None:
        path = self.inbox / source.parent.name / source.name
        path.write_bytes(source.read_bytes())
        self.tell("good", path=str(path), stamp=content(path), kind="mended")

    def rename(self) -> None:
        if path := self._some():
            to = path.with_name(f"renamed-{path.name}")
            path.rename(to)
            self.tell("rename", path=str(path), to=str(to))

    def delete(self) -> None:
        if path := self._some():
            stamp = content(path)
            path.unlink()
            self.tell("delete", path=str(path), stamp=stamp)

    def _some(self) -> Path | None:
        """A file that is whole; early ones, which may be learnt, and the newest, which may not, alike."""
        names = [path for path in self.inbox.glob("*/*.mp4") if time.time() - path.stat().st_mtime > PIECES * PAUSE]
        names.sort(key=lambda path: path.stat().st_mtime)
        if not names:
            return None
        return self.draw.choice(names[-20:] if self.draw.random() < 0.5 else names)

    def fill_disk(self, seconds: float) -> None:
        self.wait_for("training")
        filler = self.home / "filler.bin"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * (1 << 16))
            except OSError as error:
                self.tell("disk full", error=error.strerror, doing=doing(self.home))
            end = self.now() + seconds
            while self.now() < end:  # what the learner gives back is taken as well
                try:
                    file.write(b"\0" * 4096)
                except OSError:
                    time.sleep(0.05)
        filler.unlink()
        self.tell("disk free", doing=doing(self.home))

    # ---- the plan

    def plan(self) -> list[tuple[float, Any, tuple[Any, ...]]]:
        """When what is done; clips arrive in the first 85% of the time."""
        files = sorted(self.clips.glob("task*/*.mp4"))
        todo: list[tuple[float, Any, tuple[Any, ...]]] = []
        length = 0.85 * self.seconds / BURSTS
        for number, path in enumerate(files):
            burst = number * BURSTS // len(files)
            when = burst * length + self.draw.uniform(0, 0.3 * length)
            chance = self.draw.random()
            kind = "grows" if chance < GROWING else "plain"
            if chance > 1 - BAD:
                kind = self.draw.choice(("empty", "noise", "text", "headless"))
                if self.draw.random() < MENDED:
                    todo.append((min(when + 0.1 * self.seconds, 0.9 * self.seconds), self.mend, (path,)))
            grows = (self._thread, (self.arrive, path, kind))
            todo.append((when, *(grows if kind == "grows" else (self.arrive, (path, kind)))))
        for action, count in ((self.rename, RENAMED), (self.delete, DELETED)):
            todo += [(self.draw.uniform(0.05, 0.9) * self.seconds, action, ()) for _ in range(count)]
        for phase, *span in (("training", 0.1, 0.3), ("measuring", 0.4, 0.6), ("swap", 0.7, 0.85)):
            todo.append((self.draw.uniform(*span) * self.seconds, self._thread, (self.kill, phase)))
        todo.append((0.33 * self.seconds, self._thread, (self.fill_disk, 60.0)))
        return sorted(todo, key=lambda each: each[0])

    def _thread(self, work: Any, *args: Any) -> None:
        self.threads.append(threading.Thread(target=work, args=args))
        self.threads[-1].start()

    def live(self) -> None:
        todo = self.plan()
        self.inbox.mkdir(parents=True, exist_ok=True)
        self.start()
        self.threads.append(watcher := threading.Thread(target=self.keep_running))
        watcher.start()
        for when, action, args in todo:
            time.sleep(max(0.0, when - self.now()))
            action(*args)
        self.tell("evening")
        self.wait_until_idle()
        assert self.process is not None
        self.over = True
        self.process.terminate()
        self.tell("over", code=self.process.wait(60))
        for thread in self.threads:
            thread.join()

    def wait_until_idle(self) -> None:
        """Until nothing new is left, and no round is under way."""
        quiet = 0
        while quiet < 3:
            home = Home(self.home)
            pending = home.next.plan.exists() or unseen(home, self.inbox)
            quiet = 0 if pending else quiet + 1
            time.sleep(10)


def unseen(home: Home, inbox: Path) -> bool:
    from stella.learn.items import Scanner

    return bool(Scanner(home.inputs, home.read_stamps()).scan(str(inbox.absolute()), home.seen()))


def spoilt(data: bytes, kind: str) -> bytes:
    """No two alike: a file is known by its content."""
    if kind == "empty":
        return b""
    if kind == "noise":
        return random.Random(len(data)).randbytes(len(data))
    if kind == "text":
        return b"a note, not a film: " + data[:2000].hex().encode()
    return b"\0" * 4096 + data[4096:]


def doing(home: Path) -> str:
    """What the learner is at, from the files of its round."""
    there = Home(home)
    if not there.exists or not there.next.plan.exists():
        return "waiting"
    folder = there.next
    marks = (("swap", folder.record), ("saving", folder.weights), ("measuring", folder.embeddings))
    for name, mark in marks:
        if mark.exists():
            return name
    return "training" if (folder.root / "before.pt").exists() else "setting aside"


def usage(pid: int) -> tuple[float, float, int, int] | None:
    """MB of a process, of it and its workers, its open descriptors, its threads."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        mb = [_mb(each) for each in (str(pid), *children)]
        descriptors, threads = (len(list(Path(f"/proc/{pid}/{name}").iterdir())) for name in ("fd", "task"))
        return round(mb[0], 1), round(sum(mb), 1), descriptors, threads
    except (OSError, ValueError):
        return None


def _mb(pid: str) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6
    except OSError:
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    given = parser.parse_args()
    given.work.mkdir(parents=True)
    (given.work / "home").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(given.work / "home")], check=True)
    Day(given.clips.absolute(), given.work.absolute(), 60 * given.minutes).live()
    (given.work / "version").write_text(stella.__version__)
    shutil.copytree(given.work / "home", given.work / "home-after", symlinks=True)
    subprocess.run(["umount", str(given.work / "home")], check=True)


if __name__ == "__main__":
    main()
