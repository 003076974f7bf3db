"""The lists of VGGSound and AudioSet: what a clip is called, its classes, its split; what a benchmark takes of it."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from stella.data.archives.base import read_table, read_tree
from stella.errors import StellaError

HERE = Path(__file__).parent
MOST_TRAIN, MOST_TEST = 400, 5  # clips of a class: of Continual-VS, the first in the file's order; of a gallery
SECONDS = 10.0  # of a clip
TASKED = ("continual-vs", "continual-as")


@dataclass(frozen=True)
class Row:
    """A line of a list: a clip of ten seconds, or of fewer where AudioSet says so."""

    number: int  # among the rows of all lists
    video: str  # on YouTube
    start: float
    classes: tuple[str, ...]
    split: str  # train or test
    nth: int = 0  # among the rows of its first class and split, from 0
    seconds: float = SECONDS

    @property
    def id(self) -> str:
        return f"{self.video}_{int(self.start):06d}"

    @property
    def cut_names(self) -> tuple[str, ...]:
        """The names of files that hold this clip alone: ID_START6, ID_START_END in milliseconds, ID_END."""
        end = self.start + self.seconds
        return self.id, f"{self.video}_{round(self.start * 1000)}_{round(end * 1000)}", f"{self.video}_{end:.3f}"


@cache
def tasks_of(benchmark: str) -> dict[str, list[str]]:
    """The classes of each task of `continual-vs` or `continual-as`, in the paper's order."""
    tasks: dict[str, list[str]] = json.loads((HERE / f"{benchmark}.json").read_text(encoding="utf-8"))
    return tasks


def read_rows(files: Iterable[Path]) -> list[Row]:
    """The rows of lists of VGGSound or AudioSet, which are told apart by their columns. Headers are left out."""
    rows: list[Row] = []
    for file in files:
        table = [[cell.strip() for cell in row] for row in read_table(file) if not row[0].startswith("#")]
        header, kind = _kind(file, table)
        for cells in table[header:]:
            if (found := kind(cells)) is None:
                raise StellaError(
                    f"{file} has the row {','.join(cells)[:60]!r}, unlike those before it; correct it, and put labels "
                    "that hold commas in quotes"
                )
            rows.append(found)
    seen: set[str] = set()
    taken: Counter[tuple[str | None, str]] = Counter()
    numbered = []
    for number, row in enumerate(rows):
        both = next(iter(row.classes), None), row.split
        numbered.append(replace(row, number=number, nth=taken[both]))
        taken[both] += row.id not in seen
        seen.add(row.id)
    return numbered


def _kind(file: Path, table: Sequence[Sequence[str]]) -> tuple[int, Callable[[Sequence[str]], Row | None]]:
    """The lines of a header, none or one, and what reads a row: a clip, or None if it is none."""
    for header, row in enumerate(table[:2]):
        if _vggsound(row):
            return header, _vggsound
        if _vggsound_test(row):
            return header, _vggsound_test
        if len(row) >= 4 and _number(row[1]) is not None and _number(row[2]) is not None:
            names = display_names(file)
            if names is None:
                raise StellaError(
                    f"{file} names classes by number; copy class_labels_indices.csv (or ontology.json) beside it"
                )
            split = "test" if "eval" in file.stem.lower() else "train"
            return header, partial(_audioset, file, names, split)
    shown = ",".join(table[0])[:60] if table else "nothing"
    raise StellaError(
        f"{file} begins with {shown!r}, which is neither VGGSound's id,start,\"label\",split nor AudioSet's "
        'YTID, start, end, "mids"; put labels that hold commas in quotes'
    )


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _vggsound(row: Sequence[str]) -> Row | None:
    if len(row) != 4 or row[3] not in ("train", "test") or (seconds := _number(row[1])) is None:
        return None
    return Row(0, row[0], seconds, (row[2],), row[3])


def _vggsound_test(row: Sequence[str]) -> Row | None:
    found = re.fullmatch(r"(.+)_(\d{6})(\.mp4)?", row[0]) if len(row) == 2 else None
    return Row(0, found[1], float(found[2]), (row[1],), "test") if found else None


def _audioset(file: Path, names: dict[str, str], split: str, row: Sequence[str]) -> Row | None:
    start, end = (_number(row[1]), _number(row[2])) if len(row) >= 4 else (None, None)
    if start is None or end is None:
        return None
    mids = [mid.strip().strip('"') for cell in row[3:] for mid in cell.split(",")]
    if unknown := [mid for mid in mids if mid and mid not in names]:
        raise StellaError(
            f"{file} names the class {unknown[0]}, which class_labels_indices.csv lacks; fetch both again"
        )
    return Row(0, row[0], start, tuple(names[mid] for mid in mids if mid), split, seconds=end - start)


def display_names(file: Path) -> dict[str, str] | None:
    """The name of each mid of AudioSet, from a file beside `file`; None if there is none."""
    table, tree = file.with_name("class_labels_indices.csv"), file.with_name("ontology.json")
    if table.exists():
        return {row[1].strip(): row[2].strip() for row in read_table(table) if len(row) == 3}
    if tree.exists():
        return {str(each["id"]): str(each["name"]) for each in read_tree(tree)}
    return None


def class_in(row: Row, benchmark: str | None) -> tuple[str | None, str | None]:
    """The class and the task of a clip in a benchmark; of a clip with several classes the first that the task has."""
    task_of = _task_of(benchmark) if benchmark in TASKED else {}
    label = next((name for name in row.classes if name in task_of), next(iter(row.classes), None))
    return label, task_of.get(str(label))


@cache
def _task_of(benchmark: str) -> dict[str, str]:
    """The task of each class."""
    return {name: task for task, names in tasks_of(benchmark).items() for name in names}


# ---- what a benchmark takes


def _without(rows: Iterable[Row], reason: Callable[[Row], str | None]) -> tuple[list[Row], dict[int, str]]:
    kept, out = [], {}
    for row in rows:
        if why := reason(row):
            out[row.number] = why
        else:
            kept.append(row)
    return kept, out


def chosen(rows: Sequence[Row], only: str | None = None) -> tuple[list[Row], dict[int, str]]:
    """The rows that a benchmark (none: all) takes, and by row number why others are left out."""
    seen: set[str] = set()

    def twice(row: Row) -> str | None:
        again = row.id in seen
        seen.add(row.id)
        return "listed twice" if again else None

    kept, out = _without(rows, twice)
    if only is not None:
        kept, more = _without(kept, rules(only))
        out |= more
    return kept, out


def rules(only: str) -> Callable[[Row], str | None]:
    """For one row after the other: why the benchmark leaves it out, or None."""
    if only not in BENCHMARKS:
        raise StellaError(f"--only {only} is no benchmark; choose one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[only]()


def _continual_vs() -> Callable[[Row], str | None]:
    classes = {name for names in tasks_of("continual-vs").values() for name in names}

    def reason(row: Row) -> str | None:
        if not classes & set(row.classes):
            return "class of no task"
        beyond = row.split == "train" and row.nth >= MOST_TRAIN
        return f"beyond the first {MOST_TRAIN} of its class" if beyond else None

    return reason


def _continual_as() -> Callable[[Row], str | None]:
    task_of = _task_of("continual-as")

    def reason(row: Row) -> str | None:
        found = {task_of[name] for name in row.classes if name in task_of}
        return None if len(found) == 1 else "in several tasks" if found else "class of no task"

    return reason


def _initial_vs() -> Callable[[Row], str | None]:
    used = {plain_class(name) for names in tasks_of("continual-vs").values() for name in names}

    def reason(row: Row) -> str | None:
        return "class of a later task" if used & set(map(plain_class, row.classes)) else None

    return reason


def plain_class(name: str) -> str:
    """A class as VGGSound and AudioSet spell it alike: `Subway, metro, underground`."""
    return name.lower().removeprefix("playing ")


BENCHMARKS: dict[str, Callable[[], Callable[[Row], str | None]]] = {
    "continual-vs": _continual_vs,
    "continual-as": _continual_as,
    "initial-vs": _initial_vs,
}
