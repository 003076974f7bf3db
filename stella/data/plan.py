"""The plan of a preparation: which clips go into which shard, decided before anything is decoded.

A group is a number of files, or one archive. Its clips go into its own shards in their order, so many into each: one
machine or many leave the same bytes. `plan.jsonl` has a line for each group, one when it is done, and one for each
folder that files came from. What turns up later becomes further groups.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from stella.files import Lines, read_lines

PLAN = "plan.jsonl"
SHARD_CLIPS = 200  # of ten seconds: about 256 MiB
SPLIT_VIDEOS = 16  # of a group, if videos are split: each may give any number of clips


@dataclass(frozen=True)
class Group:
    number: int
    jobs: tuple[str, ...] = ()  # their ids
    archive: str | None = None
    stamp: str | None = None  # of the archive
    wanted: str = ""  # of the archive
    split: bool = False

    @property
    def name(self) -> str:
        return f"shard-{self.number:06d}"

    def shard(self, position: int, clips: int) -> str:
        """The name of the shard of the clip at this position of the group."""
        several = self.split or self.archive is not None
        return f"{self.name}-{position // clips:04d}" if several else self.name


def folders_in(root: Path) -> list[str]:
    """The folders whose files were planned in `root`."""
    return [line["folder"] for line in read_lines(root / PLAN) if "folder" in line]


class Plan:
    def __init__(self, root: Path, first: int) -> None:
        """`first` is the first number that no shard has."""
        self.groups: dict[int, Group] = {}
        self.done: set[int] = set()
        self.folders = folders_in(root)
        for line in read_lines(root / PLAN):
            if "done" in line:
                self.done.add(line["done"])
            elif "folder" not in line:
                self.groups[line["number"]] = Group(**line | {"jobs": tuple(line["jobs"])})
        self._next = max([first, *(number + 1 for number in self.groups)])
        self._lines = Lines(root / PLAN)

    @property
    def archives(self) -> set[str]:
        return {group.archive for group in self.groups.values() if group.archive is not None}

    def add_folder(self, folder: str) -> None:
        if folder not in self.folders:
            self.folders.append(folder)
            self._lines.write({"folder": folder})

    @property
    def waiting(self) -> list[Group]:
        return [group for number, group in self.groups.items() if number not in self.done]

    @property
    def finished(self) -> set[str]:
        """The jobs of groups that are done."""
        return {id for number in self.done for id in self.groups[number].jobs}

    def add_files(self, ids: Iterable[str], known: Callable[[str], bool], per: int, split: bool) -> None:
        """Plan the jobs that are neither known nor in a group that waits, `per` of them in a group."""
        planned = {id for group in self.waiting for id in group.jobs}
        fresh = [id for id in dict.fromkeys(ids) if id not in planned and not known(id)]
        for begin in range(0, len(fresh), per):
            self._add(Group(self._next, tuple(fresh[begin : begin + per]), split=split))

    def add_archives(self, given: Iterable[tuple[str, str | None]], wanted: str, split: bool) -> list[Group]:
        """Plan archives (name and stamp) that are not planned; returns the groups of all of them that wait."""
        known = {(group.archive, group.stamp, group.wanted): group for group in self.groups.values()}
        found = []
        for name, stamp in given:
            group = known.get((name, stamp, wanted)) or self._add(Group(self._next, (), name, stamp, wanted, split))
            found += [group] if group.number not in self.done else []
        return found

    def _add(self, group: Group) -> Group:
        self.groups[group.number] = group
        self._next += 1
        self._lines.write(asdict(group))
        return group

    def finish(self, group: Group) -> None:
        self.done.add(group.number)
        self._lines.write({"done": group.number})
