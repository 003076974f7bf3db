"""Clips that were left out: counted by reason, and listed in a JSON-lines file that survives a kill."""

import json
from collections import Counter
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from stella.errors import ClipError

Record = dict[str, Any]


class Skipped:
    """A list of skipped clips, each once however often it is met; opened on an existing file it goes on from there."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path else None
        self.records: dict[str | int, Record] = {}
        self._where = ""
        if self.path and self.path.exists():
            for line in self.path.read_bytes().split(b"\n"):
                if record := _parse(line):  # a kill can tear the last line
                    self.records[record["id"]] = record
            self._rewrite()

    def under(self, where: str) -> "Skipped":
        """The same list, for clips whose ids count anew: they are listed as `where/id`."""
        same = copy(self)
        same._where = f"{where}/"
        return same

    def add(self, id: str | int, error: ClipError, **more: Any) -> None:
        """List a clip unless it is listed already; `more` are further fields of its record."""
        id = f"{self._where}{id}" if self._where else id
        if id in self.records:
            return
        record = {"id": id, "path": error.path, "reason": error.reason, "remedy": error.remedy, **more}
        self.records[id] = record
        if self.path:
            with self.path.open("ab") as file:
                file.write(_line(record))

    def forget(self, condition: Callable[[Record], bool]) -> None:
        """Strike the clips for which `condition` holds from the list, so that they are tried again."""
        self.records = {id: record for id, record in self.records.items() if not condition(record)}
        self._rewrite()

    @property
    def counts(self) -> dict[str, int]:
        """How many clips for each reason, the most frequent first."""
        return dict(Counter(str(record["reason"]) for record in self.records.values()).most_common())

    def __contains__(self, id: object) -> bool:
        return id in self.records

    def __len__(self) -> int:
        return len(self.records)

    def _rewrite(self) -> None:
        if self.path:
            fresh = self.path.with_name(self.path.name + ".tmp")
            fresh.write_bytes(b"".join(map(_line, self.records.values())))
            fresh.replace(self.path)


def spell(counts: dict[str, int]) -> str:
    """The counts in words: `3 no audio track, 1 time limit`."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def _line(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"id", "path", "reason", "remedy"} <= record.keys() else None
