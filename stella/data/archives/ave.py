"""AVE: videos of ten seconds, each with one event; the class, or background, of every second."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from stella.clip import BACKGROUND, Clip, Labels
from stella.data.archives.base import ArchiveConfig, first_existing, read_list, repeated
from stella.data.downstream import Parts
from stella.errors import StellaError, number_of, require
from stella.media.decode import Plan, decode

SECONDS = 10
HEADER = "Category&"
FILES = {"train": "trainSet.txt", "validation": "valSet.txt", "test": "testSet.txt"}
ORDERS = {"train": "train_order.h5", "validation": "val_order.h5", "test": "test_order.h5"}


@dataclass(frozen=True)
class Event:
    """A row of the annotations: the event is heard and seen from second `begin` up to second `end`."""

    category: str
    video: str
    begin: int
    end: int


@dataclass(frozen=True)
class AVEConfig(ArchiveConfig):
    """`Annotations.txt` (with a header or without), `AVE/ID.mp4`, and a split: `trainSet.txt` … or `train_order.h5` …

    Classes are numbered in the order of their first appearance, background is the last. A clip is one second of a
    video. Its spectrogram is padded with zeros on both sides, before normalisation, as in the authors' release.
    """

    source: Literal["ave"] = "ave"  # a public data set
    serves: ClassVar[tuple[str, ...]] = ("events",)

    def part(self, name: str) -> "Seconds":
        return Seconds(self._split(name), self._folder(), self.plan)

    def classes(self) -> tuple[str, ...]:
        return (*dict.fromkeys(event.category for event in self.events()), BACKGROUND)

    def downstream(self, task: str) -> Parts:
        found = super().downstream(task)
        return Parts(found.train, found.validation, found.test, found.classes, SECONDS)

    def events(self) -> list[Event]:
        return read_events(first_existing(self.root, "Annotations.txt"))

    def _folder(self) -> Path:
        return self.root / "AVE" if (self.root / "AVE").is_dir() else self.root

    def _split(self, name: str) -> list[Event]:
        if (self.root / FILES[name]).exists():
            return read_events(self.root / FILES[name])
        order = first_existing(self.root, FILES[name], ORDERS[name])
        events = self.events()
        rows = read_order(order)
        if rows and not 0 <= min(rows) <= max(rows) < len(events):
            raise StellaError(
                f"{order} names row {max(rows)} and Annotations.txt has {len(events)}; use files of the same copy"
            )
        return [events[row] for row in rows]

    def remarks(self) -> list[str]:
        """What is odd about this copy, in sentences. Nothing is left out because of it."""
        events = self.events()
        parts = {name: {event.video for event in self._split(name)} for name in FILES}
        twice, shared = repeated([e.video for e in events]), parts["train"] & parts["test"]
        empty = [e.video for e in events if e.end <= e.begin]
        found = {
            f"more than once: {number_of(len(twice), 'video')}": twice,
            f"also in the training part: {number_of(len(shared), 'test video')}": shared,
            f"with an empty event: {number_of(len(empty), 'row')}": empty,
        }
        return [sentence for sentence, videos in found.items() if videos]


def read_events(path: Path) -> list[Event]:
    """Rows `Category&VideoID&Quality&StartTime&EndTime`; a header is left out."""
    events = []
    for number, line in enumerate(read_list(path), 1):
        cells = line.split("&")
        if line.startswith(HEADER):
            continue
        try:
            category, video, _, begin, end = cells
            events.append(Event(category, video, int(begin), int(end)))
        except ValueError as error:
            raise StellaError(
                f"{path}, line {number} is {line[:60]!r}, not Category&VideoID&Quality&StartTime&EndTime; correct it"
            ) from error
    if not events:
        raise StellaError(f"{path} has no rows; fetch it again")
    return events


def read_order(path: Path) -> list[int]:
    """The row numbers of a split, from 0."""
    h5py = require("h5py", "archives")
    try:
        with h5py.File(path) as file:
            if "order" not in file:
                raise StellaError(f"{path} has no key `order` but {', '.join(file) or 'nothing'}; fetch it again")
            rows: list[int] = [int(row) for row in file["order"][:]]
            return rows
    except OSError as error:
        raise StellaError(f"{path} is not an HDF5 file ({error}); fetch it again") from error


class Seconds:
    """The seconds of videos as clips of their own: clip 10·i + k is second k of row i, with frames of its own."""

    def __init__(self, events: list[Event], folder: Path, plan: Plan) -> None:
        self.events, self.folder, self.plan = events, folder, plan

    def __len__(self) -> int:
        return SECONDS * len(self.events)

    def __getitem__(self, index: int) -> Clip:
        event, second = self.events[index // SECONDS], index % SECONDS
        clip = decode(
            self.folder / f"{event.video}.mp4", Plan(float(second), 1.0, self.plan.frames, self.plan.size, None)
        )
        return Clip(f"{event.video}/{second}", clip.video, clip.audio, self.labels(index), centred=True)

    def labels(self, index: int) -> Labels:
        return Labels(self.class_of(index))

    def class_of(self, index: int) -> str:
        event, second = self.events[index // SECONDS], index % SECONDS
        return event.category if event.begin <= second < event.end else BACKGROUND

    def location(self, index: int) -> str:
        return str(self.folder / f"{self.events[index // SECONDS].video}.mp4")
