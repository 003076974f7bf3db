"""VGGSound with labels, as Continual-VS takes it: 160 classes in eight tasks."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from stella.clip import Device, Source
from stella.data.archives.base import ArchiveConfig, Item, Videos, find_named, first_existing, read_table, read_tree
from stella.data.tasks import Tasks
from stella.data.views import join, part
from stella.errors import StellaError

TASKS_FILE = Path(__file__).with_name("vggsound_tasks.json")
MOST_TRAIN, MOST_TEST = 400, 5  # clips of a class, the first in the file's order


@dataclass(frozen=True)
class VGGSoundConfig(ArchiveConfig):
    """`vggsound.csv` (`id,start,"label",train|test`, with or without a header) and videos anywhere below `path`.

    Videos may be named ID_START (six digits), ID_START_END in milliseconds, ID_END or ID.
    """

    source: Literal["vggsound"] = "vggsound"  # a public data set
    serves: ClassVar[tuple[str, ...]] = ("classify", "retrieval", "matching")

    def part(self, name: str) -> Source:
        if name == "test":
            return join([source for _, source in self.eval_tasks()])
        train = join([source for _, source in self.train_tasks()])
        return part(train, [i for i in range(len(train)) if (i % 10 == 9) == (name == "validation")])

    def classes(self) -> tuple[str, ...]:
        return tuple(label for labels in self._task_labels().values() for label in labels)

    def train_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        return self._tasks("train", MOST_TRAIN)

    def eval_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        return self._tasks("test", MOST_TEST)

    def _task_labels(self) -> dict[str, list[str]]:
        known: dict[str, list[str]] = read_tree(TASKS_FILE)
        if unknown := [name for name in self.tasks if name not in known]:
            raise StellaError(f"Continual-VS has no task {', '.join(unknown)}; its tasks are {', '.join(known)}")
        return {name: known[name] for name in self.tasks or known}

    def _tasks(self, split: str, most: int) -> Tasks:
        found = find_named(self.root)
        by_label: dict[str, list[Item]] = {}
        for row in read_table(first_existing(self.root, "vggsound.csv")):
            if len(row) != 4:
                raise StellaError(
                    f'{self.root / "vggsound.csv"} has the row {",".join(row)[:60]!r}, not id,start,"label",split; '
                    "put labels that hold commas in quotes"
                )
            video, start, label, which = (cell.strip() for cell in row)
            if which == split and start.isdigit():  # a header has no number there
                path, begin = _file(found, self.root, video, int(start))
                by_label.setdefault(label, []).append(Item(f"{video}_{int(start):06d}", path, label, begin))
        tasks: Tasks = []
        for name, labels in self._task_labels().items():
            items = [item for label in labels for item in by_label.get(label, [])[:most]]
            if not items:
                raise StellaError(
                    f"{self.root / 'vggsound.csv'} has no {split} clips of the task {name}; check the file"
                )
            tasks.append((name, Videos(items, self.plan)))
        return tasks


def _file(found: dict[str, Path], root: Path, video: str, start: int) -> tuple[Path, float]:
    """The file of a clip and where the clip starts in it. A missing file is skipped later, with its name."""
    cut = (f"{video}_{start:06d}", f"{video}_{start * 1000}_{(start + 10) * 1000}", f"{video}_{start + 10}.000")
    for name in cut:
        if name in found:
            return found[name], 0.0
    if video in found:
        return found[video], 0.0
    return root / f"{cut[0]}.mp4", 0.0
