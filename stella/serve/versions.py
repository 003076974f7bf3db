"""Which weights embed queries: those that made the index's vectors, also when their owner has gone on learning."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stella import embed
from stella.embed.translate import is_learner, kept_weights, moved
from stella.errors import StellaError
from stella.search.index import Index


@dataclass(frozen=True)
class Weights:
    file: str
    fingerprint: str


@dataclass(frozen=True)
class Now:
    weights: Weights | None  # None: those that made the vectors cannot be found
    stale: str  # that the vectors are of an older model, in words; empty: they are not


class Versions:
    """`now` is what `look` found last. Threads may share it."""

    def __init__(self, index: Index, given: str | None = None) -> None:
        self.index, self.given = index, given
        self._told: tuple[object, str] = None, ""  # what `_stale` said last, and of which states
        self._known: dict[tuple[Path, int, int], str] = {}  # fingerprints, by file, size and time
        self._lock = threading.Lock()
        self.now = Now(None, "")
        index.take_home(given)
        self.look()
        if self.now.weights is None:
            raise StellaError(
                f"the weights that made {index.path} are not to be found; name them with --model, or run: "
                f"stella index {index.path} --refresh"
            )

    def look(self) -> Now:
        """Look at the index and at the model again. Only weights that are new are read."""
        with self._lock:
            serving = self.index.serving()
            name = self.given or serving.origin
            if not name:
                raise StellaError(f"{self.index.path} does not know where its model came from; name it with --model")
            weights = self.now.weights
            if weights is None or weights.fingerprint != serving.fingerprint or not Path(weights.file).is_file():
                found = (file for file in _files(name) if self._fingerprint(file) == serving.fingerprint)
                file = next(found, None) or kept_weights(name, serving.fingerprint)  # also of what was rolled back
                weights = Weights(str(file), serving.fingerprint) if file else self._newest(name)
            self.now = Now(weights, self._stale(name, serving.fingerprint))
            return self.now

    def home(self) -> str | None:
        """The folder of the learner that made the index; None if none did."""
        name = self.given or self.index.serving().origin
        return name if is_learner(name) else None

    def _newest(self, name: str) -> Weights | None:
        """Those of the state in use, if their queries can be translated: older ones are not kept for ever."""
        file = next(_files(name), None)
        made_by = self._fingerprint(file) if file else ""
        return Weights(str(file), made_by) if made_by and self.index.understands(made_by) else None

    def _stale(self, name: str, fingerprint: str) -> str:
        newest = next(_files(name), None)
        both = self._fingerprint(newest) if newest else fingerprint, fingerprint
        if both[0] == fingerprint:
            return ""
        if self._told[0] != both:
            what = moved(name, fingerprint) if is_learner(name) else "the model has changed"
            command = f"stella index {self.index.shown} --refresh"
            says = f"{what}, and this index is of another version; bring it up to date with: {command}"
            self._told = both, says
        return self._told[1]

    def _fingerprint(self, file: Path) -> str:
        try:
            status = file.stat()
            key = file, status.st_size, status.st_mtime_ns
            if key not in self._known:
                self._known[key] = embed.load(file, "cpu").fingerprint
        except (OSError, StellaError):  # it is being replaced
            return ""
        return self._known[key]


def _files(name: str) -> Iterator[Path]:
    """The weights of a model: those in use, then those of a learner's earlier rounds, the latest first."""
    with suppress(StellaError):
        found = embed.resolve(name).resolve()
        if found.is_file():
            yield found
    if home := _home(name):
        for number in range(home.current, 0, -1):
            file = home.round(number).weights.resolve()
            if file.is_file():
                yield file


def _home(name: str) -> Any:
    """The learner of that name; None for other models, which need no import of the training code."""
    if not is_learner(name):
        return None
    from stella.learn.home import Home

    return Home(name)
