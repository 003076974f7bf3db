"""What became of every clip of a preparation: used, left out by a rule, missing, or broken."""

import filecmp
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stella.data.archives.rows import BENCHMARKS, Row, chosen, class_in
from stella.data.lengths import ENOUGH, SHORT
from stella.data.material import Job, Material
from stella.data.skipped import Skipped, in_words
from stella.data.tasks import ONLY_TASK
from stella.errors import ClipError, StellaError, number_of
from stella.files import is_remote, read_json, write_json

LISTED = "listed.json"  # how many clips the lists name for each task of a benchmark, beside the shards


@dataclass(frozen=True)
class Summary:
    clips: int  # in the folder now
    added: int  # by this run
    skipped: dict[str, int]  # broken clips by reason
    bytes: int
    seconds: float
    gone: tuple[str, ...] = ()  # files that clips in the folder were made of and that are there no more
    odd: dict[str, int] = field(default_factory=dict)  # clips in the folder with a still picture, muted or short
    left_out: dict[str, int] = field(default_factory=dict)  # by rule or option
    missing: int = 0  # wanted clips without a file
    listed: int | None = None  # rows of the lists: used + left out + missing + broken
    wanted: int | None = None  # those that no rule leaves out
    least: float | None = None  # seconds; clips of fewer are short

    def __str__(self) -> str:
        clips, size = number_of(self.clips, "clip"), f"{self.bytes / 2**20:.1f} MiB"
        text = f"{clips} ({self.added:,} new) in {size}, {self.seconds:.0f} s"
        parts = [text if self.clips else "no clip could be used"]
        parts += [f"skipped: {in_words(self.skipped)} (see skipped.jsonl)" if self.skipped else "none skipped"]
        parts += [f"left out: {self._told(self.left_out)}"] if self.left_out else []
        parts += [f"kept: {self._told(self.odd)}"] if self.odd else []
        parts += [missing_of(self.missing, self.wanted or 0)] if self.missing else []
        named = f"{', '.join(self.gone[:5])}{' …' if len(self.gone) > 5 else ''}"
        parts += [f"gone: {number_of(len(self.gone), 'file')} whose clips remain, {named}"] if self.gone else []
        return "; ".join(parts)

    def _told(self, counts: dict[str, int]) -> str:
        than = f" (less than {self.least:g} s, {100 * ENOUGH:.0f}% of a clip)" if self.least else ""
        return in_words({f"{what}{than if what == SHORT else ''}": count for what, count in counts.items()})


def missing_of(missing: int, wanted: int) -> str:
    return f"missing: {missing:,} of {number_of(wanted, 'wanted clip')}"


def gone_of(files: Iterable[str], folders: Sequence[str]) -> tuple[str, ...]:
    """Of these files, or files in archives, those that are below none of the folders now."""

    def there(path: Path) -> bool:
        return any(each.is_file() for each in (path, *path.parents))

    return tuple(sorted(file for file in files if not any(there(Path(folder, file)) for folder in folders)))


def leave_out(material: Material, used: Collection[str], skipped: Skipped) -> None:
    """List the rows that a rule leaves out; forget those of other rules and what was missing before. Clips that were
    made before there was such a rule are used."""
    left = {_id(row, why): why for row in material.rows if (why := material.left_out.get(row.number))}
    rules = {id: why for id, why in left.items() if id not in used}

    def outdated(record: dict[str, object]) -> bool:
        by_rule = record.get("left_out") == "rule" and rules.get(str(record["id"])) != record["reason"]
        return by_rule or record.get("left_out") == "missing"

    skipped.forget(outdated)
    for id, why in rules.items():
        skipped.add(id, ClipError(id, why, "it is not of this benchmark"), left_out="rule")


def _id(row: Row, why: str) -> str:
    return f"{row.id} (row {row.number + 1})" if why == "listed twice" else row.id


def list_missing(material: Material, used: Collection[str], skipped: Skipped) -> None:
    for row in material.kept:
        if row.id not in used and row.id not in skipped:
            skipped.add(row.id, ClipError(row.id, "missing file", "fetch it, or go on without"), left_out="missing")


def counted(skipped: Skipped) -> tuple[dict[str, int], dict[str, int], int]:
    """Broken clips and clips left out, by reason, and the number of missing ones."""
    kinds: dict[object, Counter[str]] = {}
    for record in skipped.records.values():
        kinds.setdefault(record.get("left_out"), Counter())[str(record["reason"])] += 1
    none: Counter[str] = Counter()
    broken, out = kinds.get(None, none), kinds.get("rule", none) + kinds.get("option", none)
    return dict(broken.most_common()), dict(out.most_common()), kinds.get("missing", none).total()


def check_lists(folder: Path, material: Material, name: object) -> None:
    """Refuse lists that do not begin with those that the folder was filled by: clips are known by their rows."""
    before = read_json(folder / LISTED)["lists"] if (folder / LISTED).exists() else []
    if material.lists[: len(before)] != before:
        raise StellaError(
            f"{name} holds clips of {', '.join(before)}; give these lists first, or choose another folder"
        )


def check_names(folders: Iterable[str], material: Material, made: Collection[str], name: object) -> None:
    """Refuse a file that has the name of another one, in another of `folders`, which clips were `made` of: a clip is
    known by that name, and one of the two would be lost."""
    if material.listed or is_remote(material.root):
        return
    known = [file for file in (*material.files, *map(material.name, material.archives)) if file in made]
    for folder in folders:
        for file in known:
            here, there = material.root / file, Path(folder, file)
            if there.is_file() and not _same(here, there):
                raise StellaError(
                    f"{here} has the name of {there}, whose clips {name} holds, and clips are known by these names; "
                    "rename it, or prepare the folder above both into another folder"
                )


def _same(one: Path, other: Path) -> bool:
    try:
        return filecmp.cmp(one, other)
    except OSError:  # what cannot be read is listed when its turn comes
        return True


def write_listed(folder: Path, material: Material) -> None:
    """Keep how many clips the lists name for each task: a run states it beside what it has."""
    tree: dict[str, dict[str, dict[str, int]]] = {}
    for benchmark in (*BENCHMARKS, None):
        for row in chosen(material.rows, benchmark)[0]:
            task = class_in(row, benchmark)[1] or ONLY_TASK
            splits = tree.setdefault(benchmark or ONLY_TASK, {}).setdefault(task, {"train": 0, "test": 0})
            splits[row.split] += 1
    write_json(folder / LISTED, {"lists": material.lists, "only": material.only, "tasks": tree})


def dry_run(material: Material, done: Collection[str] = ()) -> list[str]:
    """What would be found, missing and left out, in sentences. Archives are read to their end, nothing is written."""
    found, notes = {job.id for job in material.loose()}, []
    for each in (each for archive in material.archives for each in material.unpacked(archive, read=False)):
        if isinstance(each, Job):
            found.add(each.id)
        elif each.error is not None:
            notes.append(str(each.error))
    found -= set(done)
    lines = [f"found: {number_of(len(found), 'clip')}" + (f"; prepared already: {len(done):,}" if done else "")]
    if material.listed:
        missing = len(material.kept) - len(found | {row.id for row in material.kept if row.id in done})
        lines += [missing_of(missing, len(material.kept))]
    return lines + notes
