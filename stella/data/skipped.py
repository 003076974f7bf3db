"""Skipped clips: counted by reason, and listed in a JSON-lines file that survives a kill."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stella.errors import ClipError, StellaError
from stella.files import Line, Lines, read_lines, write_text


class Skipped:
    """The list of skipped clips, each once however often it is met. An existing file is continued."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path else None
        lines = read_lines(self.path) if self.path else []
        self.records: dict[str | int, Line] = {}
        for number, line in enumerate(lines, 1):
            if not {"id", "path", "reason"} <= line.keys() or not isinstance(line["id"], str | int):
                raise StellaError(f"line {number} of {self.path} lists no clip; restore or remove it")
            self.records[line["id"]] = line
        self._lines: Lines | None = None  # opened when a clip is listed

    def under(self, prefix: str) -> "Skipped":
        """The same list for another source, whose clips are listed as `prefix/id`."""
        return _Under(self, prefix)

    def add(self, id: str | int, error: ClipError, **more: Any) -> None:
        """List a clip unless it is listed already; `more` are further fields of its record."""
        if id in self.records:
            return
        self.keep({"id": id, "path": error.path, "reason": error.reason, "remedy": error.remedy, **more})

    def keep(self, record: Line) -> None:
        """List a clip by its record."""
        self.records[record["id"]] = record
        if self.path:
            self._lines = self._lines or Lines(self.path)
            self._lines.write(record)

    def forget(self, condition: Callable[[Line], bool]) -> None:
        """Remove the clips for which `condition` holds, so that they are tried again."""
        kept = {id: record for id, record in self.records.items() if not condition(record)}
        if self.path and len(kept) < len(self.records):
            write_text(self.path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept.values()))
            self._lines = None
        self.records = kept

    @property
    def counts(self) -> dict[str, int]:
        """The number of clips for each reason, the most frequent first."""
        return dict(Counter(str(record["reason"]) for record in self.records.values()).most_common())

    def __contains__(self, id: object) -> bool:
        return id in self.records

    def __len__(self) -> int:
        return len(self.records)


class _Under(Skipped):
    def __init__(self, whole: Skipped, prefix: str) -> None:
        super().__init__()
        self.path, self.records = whole.path, whole.records
        self._whole, self._prefix = whole, prefix

    def add(self, id: str | int, error: ClipError, **more: Any) -> None:
        self._whole.add(f"{self._prefix}/{id}", error, **more)


def in_words(counts: Mapping[str, int]) -> str:
    """`3 no audio track, 1 time limit`."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
