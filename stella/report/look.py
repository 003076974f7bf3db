"""`stella look`: clips of one's own as they are decoded, and what is odd about them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stella.clip import Clip, Source, Timed, location_of
from stella.data.archives.base import Item, Videos
from stella.data.config import data_config
from stella.data.folder import Folder
from stella.data.mirror import opened
from stella.data.packed import HEADER, Packed
from stella.data.shards import Shards
from stella.data.tasks import recording_of
from stella.errors import ClipError, number_of, skippable, some_of
from stella.files import is_address
from stella.media.decode import Plan, read_duration
from stella.media.odd import SILENT, STILL, oddities

PLAN = Plan(span=None)  # frames of the whole clip


@dataclass(frozen=True)
class Seen:
    """A clip that was decoded."""

    name: str
    clip: Clip
    seconds: float | None  # of its file, or of what is stored of it

    @property
    def remarks(self) -> list[str]:
        return oddities(self.clip.video, self.clip.audio)

    @property
    def title(self) -> str:
        label = [self.clip.labels.name] if self.clip.labels.name else []
        length = [] if self.seconds is None else [f"{self.seconds:.1f} s"]
        return " · ".join([self.name, *label, *length, *self.remarks])


def open_any(src: Path | str, clips: int) -> Source:
    """Videos or shards of a folder, packed arrays, or pieces of one file; shards or arrays of an address."""
    file = Path(src)
    if file.is_file():
        return Videos([Item(name, file, start=start) for name, start in _pieces(file, clips)], PLAN)
    folder = opened(src).folder
    if (folder / HEADER).is_file():
        return Packed(src)
    shards = is_address(src) or (folder.is_dir() and any(folder.glob("shard-*.tar")))
    return Shards(src, span=None) if shards else Folder(folder, PLAN)


def open_task(src: str, name: str) -> Source:
    """The training clips of `BENCHMARK:TASK` in a folder or at an address."""
    benchmark, _, task = name.partition(":")
    [(_, source)] = data_config({"source": benchmark, "path": src, "tasks": [task], "span": None}).train_tasks()
    return source


def _pieces(file: Path, clips: int) -> Iterator[tuple[str, float]]:
    """Clips spread over a file, named as `prepare --split` does."""
    length = read_duration(file) or 0.0
    whole = max(1, int(length // PLAN.duration))
    for number in range(min(clips, whole)):
        start = number * whole // min(clips, whole) * PLAN.duration
        yield (f"{file.name}@{start:.3f}" if whole > 1 else file.name), start


def look(source: Source, clips: int) -> Iterator[Seen | ClipError]:
    """At most so many clips, spread over the source."""
    tried = min(clips, len(source))
    for index in (number * len(source) // tried for number in range(tried)):
        try:
            with skippable(location_of(source, index)):
                clip = source[index]
                seconds = source.seconds(index) if isinstance(source, Timed) else None
                if isinstance(source, Videos) and seconds is not None:
                    seconds += source.items[index].start
        except ClipError as error:
            yield error
        else:
            yield Seen(clip.id, clip, seconds)


def told(seen: Sequence[Seen], source: Source) -> list[str]:
    """Sentences about what is odd."""
    odd = {what: [each.name for each in seen if what in each.remarks] for what in (SILENT, STILL)}
    lines = [f"{len(names)} of {len(seen)} {what}: {some_of(names, 3)}" for what, names in odd.items() if names]
    lengths = {recording_of(each.name): each.seconds or 0.0 for each in seen}
    longer = {name: seconds for name, seconds in lengths.items() if seconds > 1.5 * PLAN.duration}
    if longer and isinstance(source, Folder | Videos):
        files = number_of(len(lengths), "file")
        longest = max(longer, key=lambda name: longer[name])
        lines.append(
            f"longer than the {PLAN.duration:g} s of a clip: {len(longer)} of {files} ({longest}: "
            f"{longer[longest]:,.0f} s); stella prepare --split cuts them into consecutive clips"
        )
    return lines
