"""What is written of a round, and kept small: thousands of rounds are read again and again.

The record of a round also says where all earlier ones stand after it: the level of their clips, and how many of the
memory are theirs. That is needed only as long as its state is kept, to go on from; afterwards its own part stays.
"""

from pathlib import Path

from stella.files import Line, read_json, write_json


def learnt(record: Line) -> int:
    """How many clips a round was trained on: those that could be used."""
    found: int = record["learnt"] if "learnt" in record else record["clips"]
    return found


def own_part(record: Line) -> Line:
    """A record without what it says of other rounds."""
    own, memory = str(record["round"]), record["memory"]
    levels = {number: level for number, level in record["rounds"].items() if number == own}
    return record | {"rounds": levels, "memory": memory and {k: v for k, v in memory.items() if k != "rounds"}}


class Records:
    """The own parts of records. Each is read once, and again when its file is another one, as after a rollback."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], Line, bool]] = {}

    def own_part(self, path: Path) -> Line:
        return self._look(path)[0]

    def shorten(self, path: Path) -> None:
        """Keep the own part alone. Earlier versions kept all, so that the files of many rounds grew with the square."""
        own, whole = self._look(path)
        if not whole:
            write_json(path, own)

    def _look(self, path: Path) -> tuple[Line, bool]:
        """The own part of a record, and whether that is all of it."""
        signature = _signature(path)
        if self._known.get(path, ((), {}, False))[0] != signature or not signature:
            record = read_json(path)
            own = own_part(record)
            self._known[path] = signature, own, own == record
        return self._known[path][1:]


def _signature(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()  # reading says why
    return status.st_ino, status.st_size, status.st_mtime_ns
