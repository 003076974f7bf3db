"""Writes the shards that `shards` reads, for `stella prepare`."""

import io
import uuid
from collections import Counter
from pathlib import Path

from stella.data.away import Away
from stella.data.mirror import Disk
from stella.data.shards import (
    END_OF_TAR,
    Entry,
    entry_of,
    finished_shards,
    read_head,
    read_index,
    scan,
    write_index,
)
from stella.errors import StellaError
from stella.files import Appended, read_json


class ShardWriter:
    """Appends samples to shards. After a kill it keeps all whole samples and continues after the last.

    Once `append` has returned, a kill does not lose the sample. `ids` are those of all samples in the folder. A sample
    goes into the shard that `turn` named. With `of` only shards whose names begin so are known, others may be written
    at the same time, and only whole shards survive. With `away` finished shards go there, and only their indexes stay.
    """

    def __init__(self, root: Path, of: str = "", away: Away | None = None) -> None:
        self.root, self.of, self.away = root, of, away
        shards = [root / name for name in finished_shards(root) if name.startswith(of)]
        for shard in shards:
            if not shard.with_suffix(".json").exists():  # killed between renaming and indexing
                write_index(shard, scan(shard)[0])
        self.parts = [] if of else sorted(root.glob("shard-*.tar.part"))
        found = {shard.stem: read_index(shard, None if away else Disk(root).size) for shard in shards}
        found |= {part.name.removesuffix(".tar.part"): scan(part)[0] for part in self.parts}
        entries = [entry for name in sorted(found) for entry in found[name]]
        self.ids: dict[str, str] = {}  # the shard of each clip
        self.twice: set[str] = set()  # shards with clips that another has
        for name in sorted(found):
            held = [self.ids.setdefault(entry.id, name) for entry in found[name]]
            self.twice |= {name for first in held if first != name}
        self.sources = {entry.id: entry.source for entry in entries}  # the file that each clip was made of
        self.odd = Counter(what for entry in entries for what in entry.odd or ())
        self.next = 1 + max((int(shard.name[6:12]) for shard in shards), default=-1)  # number that no shard has
        self._name: str | None = None  # of the shard that is written, or begun by the next sample
        self._file: Appended | None = None
        self._entries: list[Entry] = []

    @staticmethod
    def ids_in(root: Path) -> set[str]:
        """The ids of the clips in finished shards."""
        return {entry.id for shard in finished_shards(root) for entry in read_index(root / shard, None)}

    def drop(self, name: str) -> None:
        """Remove a shard; its clips are to be made again."""
        for ending in ("json", "tar", "tar.part"):  # a shard without an index is whole, an index without a shard is not
            (self.root / f"{name}.{ending}").unlink(missing_ok=True)
            if self.away is not None:
                self.away.remove(f"{name}.{ending}")
        self.ids = {id: shard for id, shard in self.ids.items() if shard != name}

    def total(self) -> int:
        """The bytes of all finished shards."""
        return sum(int(read_json(index)["bytes"]) for index in self.root.glob("shard-*.json"))

    def finished(self, name: str) -> bool:
        return (self.root / f"{name}.json").exists()

    def unused(self, group: str) -> str:
        """A name that no finished shard has, for clips of a group whose own shards are finished."""
        return next(name for n in range(9999, 0, -1) if not self.finished(name := f"{group}-{n:04d}"))

    def turn(self, name: str) -> None:
        """Put the next samples into this shard; the one before it is finished."""
        if name != self._name:
            self.close()
            self._name = name

    def append(self, sample: bytes) -> None:
        """Write a `sample`."""
        if self._file is None:
            self._file = self._open()
        entry = entry_of(read_head(io.BytesIO(sample), 0).meta, self._file.end)
        if entry.id in self.ids:
            raise ValueError(f"{entry.id} is in {self.root} already")
        self._write(self._file, sample)
        self._entries.append(entry)
        self.ids[entry.id] = self._part.name.partition(".")[0]
        self.sources[entry.id] = entry.source
        self.odd.update(entry.odd or ())

    def close(self) -> None:
        """Finish the shard that is written."""
        if self._file is None and self._name is not None and (self.root / f"{self._name}.tar.part").exists():
            self._file = self._open()  # all of its samples were there already
        if self._file is not None:
            if self._entries:
                self._finish(self._file)
            else:
                self._file.close()
                self._part.unlink()
        self._file, self._name, self._entries = None, None, []

    def _open(self) -> Appended:
        ending = f"{uuid.uuid4().hex[:8]}.tmp" if self.of else "part"
        self._part = self.root / f"{self._name}.tar.{ending}"
        self._entries, end = scan(self._part) if self._part.exists() else ([], 0)
        return Appended(self._part, end)

    def _write(self, file: Appended, data: bytes) -> None:
        try:
            file.append(data)
        except OSError as error:
            raise StellaError(
                f"{self._part} cannot be written ({error.strerror}); free some space and run again"
            ) from error

    def _finish(self, file: Appended) -> None:
        self._write(file, END_OF_TAR)
        file.sync()
        file.close()
        shard = self.root / f"{self._name}.tar"
        self._part.rename(shard)
        write_index(shard, self._entries)
        if self.away is not None:
            self.away.put_shard(shard.stem)
