"""An index on the disk: `Index(path)` searches it and keeps it up to date.

INDEX/catalogue.sqlite   files, windows, models (catalogue.py): the truth
INDEX/vectors/           float16 unit vectors, memory-mapped (vectors.py)
INDEX/derived/           what can be built again from the two (ivf.py)
INDEX/lock               held by the one that writes
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import merge as merge_sorted
from itertools import chain, product
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from stella import embed
from stella.data.prepare import progress_bar
from stella.embed import Model
from stella.embed.translate import has_state, kept_weights, moved, state_in_use
from stella.errors import StellaError
from stella.files import lock
from stella.model.weights import from_anywhere
from stella.search import asked as asked_for
from stella.search import ivf, maintain
from stella.search.catalogue import MODALITIES, Catalogue, Modality, ModelRow, opened
from stella.search.hits import Hit, allowed_rows, files_of, hits_of
from stella.search.maintain import BadFile, State, Summary
from stella.search.nearest import Place, ranked
from stella.search.query import Query, embed_query, other
from stella.search.sources import open_source
from stella.search.translations import Translations
from stella.search.vectors import Mapped

DEFAULT_MODEL = "base-small"
T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    query: Query
    to: Modality
    hits: list[Hit]
    exact: bool
    note: str  # what the caller should know; may be empty
    seconds: float  # of the search alone


@dataclass(frozen=True)
class Moment:
    """A window of the index, without a search."""

    hit: Hit  # its score is 1
    query: Query  # to ask for more like it
    size: int  # of its file when it was indexed, in bytes
    mtime: int  # nanoseconds


class NoMomentError(StellaError):
    """A place without a vector: it was dropped, or never there."""


class OtherVersionError(StellaError):
    """A query's vector was made by another model than those of the index."""


class Index:
    """Threads may share an index. A process that only searches never waits for one that writes."""

    def __init__(self, path: Path | str, shown: str | None = None) -> None:
        """`shown` is what the notes of a search call the index; none: its path."""
        self.path = Path(path)
        self.shown = str(path) if shown is None else shown
        self._mapped = Mapped(self.path)
        self._model: Model | None = None
        self._home = ""  # where the learner that made the index is now, if it was given
        self._translations = Translations()

    def update(
        self,
        *sources: Path | str,
        model: Model | Path | str | None = None,
        device: str | None = None,
        overlap: float | None = None,
        refresh: bool = False,
        progress: bool = False,
    ) -> Summary:
        """Add new files of these folders, embed changed ones again, drop vanished ones; without a folder, of all known.

        An index has one model: the first one given (default: base-small). With `refresh` another may be given; all
        known folders are then embedded by it, while the old vectors go on answering until all are done. `overlap` is
        the share of a window that the next one repeats, one for the whole index (default: half). A new index into
        which nothing was embedded is removed.
        """
        for source in sources:
            open_source(Path(source))  # a wrong path makes no index
        new = not (self.path / "catalogue.sqlite").exists()
        Catalogue.create(self.path)
        with lock(self.path / "lock"):
            try:
                with opened(self.path) as catalogue:
                    chosen, origin = self._choose(catalogue, model, device, refresh)
                    bar = progress_bar(progress)
                    done = maintain.update(
                        catalogue, sources, chosen, origin, overlap=overlap, refresh=refresh, bar=bar
                    )
                    if refresh or state_in_use(origin) in ("", chosen.fingerprint):
                        return done
                    how = "new files are embedded by the kept weights of the state that made the vectors"
                    return replace(done, note=f"{moved(origin, chosen.fingerprint)}; {how}; {_for_now(self.shown)}")
            except BaseException:
                if new and not self.state().files.get("ok"):
                    Catalogue.remove(self.path)
                raise

    def compact(self) -> int:
        """Remove the rows of dropped vectors; returns how many."""
        with opened(self.path) as catalogue, lock(self.path / "lock"):
            return maintain.compact(catalogue)

    def forget(self, source: Path | str) -> None:
        """Drop a folder and everything of it."""
        with opened(self.path) as catalogue, lock(self.path / "lock"):
            maintain.forget(catalogue, Path(source))

    def state(self) -> State:
        with opened(self.path) as catalogue:
            return maintain.state(catalogue)

    def serving(self) -> ModelRow:
        """The model whose vectors answer."""
        with opened(self.path) as catalogue:
            return self._answering(catalogue)[0]

    def take_home(self, given: Model | Path | str | None) -> None:
        """Remember where the learner that made the index is now, if this is it: it may have been moved."""
        with opened(self.path) as catalogue:
            serving = self._answering(catalogue)[0]
        if isinstance(given, Path | str) and has_state(given, serving.fingerprint):
            self._home = from_anywhere(given)

    def _answering(self, catalogue: Catalogue) -> list[ModelRow]:
        found = catalogue.answering()
        if not found:
            raise StellaError(f"{self.path} is empty; fill it with: stella index SRC {self.path}")
        return [replace(row, origin=self._home) for row in found] if self._home else found

    def caveat(self, *queries: str) -> str:
        """That its model knows rendered scenes alone, if it does and files or queries are no scenes; else nothing."""
        with opened(self.path) as catalogue:
            model, files = catalogue.model("serving"), catalogue.db.execute("SELECT path FROM files WHERE state = 'ok'")
            names = (os.fsdecode(path) for (path,) in files)
            return embed.caveat(model.origin if model else "", chain(filter(None, queries), names))

    def understands(self, fingerprint: str) -> bool:
        """Whether queries of a model with that fingerprint are answered, as they are or translated."""
        with opened(self.path) as catalogue:
            return self._translations.possible(fingerprint, self._answering(catalogue))

    def bad(self) -> list[BadFile]:
        with opened(self.path) as catalogue:
            return maintain.bad_files(catalogue)

    def model(self, given: Model | Path | str | None = None, device: str | None = None) -> Model:
        """The model for queries: the given one, or the one that made the index.

        Of another version only a state of the learner that made the index is taken, if its queries can be translated.
        If they cannot, the state that made the index answers as long as its weights are kept.
        """
        self.take_home(given)
        with opened(self.path) as catalogue:
            serving, *_ = answering = self._answering(catalogue)
        if given is None and self._model is not None and self._model.fingerprint == serving.fingerprint:
            return self._model
        chosen = given if given is not None else _there(serving.origin)
        found = load(chosen, device) if isinstance(chosen, Path | str) else chosen
        if found.fingerprint != serving.fingerprint and not self._translations.possible(found.fingerprint, answering):
            kept = kept_weights(chosen, serving.fingerprint) if isinstance(chosen, Path | str) else None
            if kept is None:
                raise StellaError(_another_version(self.path, chosen, None if given is None else serving.origin))
            found = load(kept, device)
        self._model = found
        return found

    def _choose(
        self, catalogue: Catalogue, given: Model | Path | str | None, device: str | None, refresh: bool
    ) -> tuple[Model, str]:
        """The model of an update, and what to load it from next time: by default that of the last one.

        If queries of a learner's state in use cannot be translated, it is the state that made the index, while its
        weights are kept.
        """
        if given is None:
            row = (catalogue.model("target") if refresh else None) or catalogue.model("serving")
            given = _there(row.origin) if row else DEFAULT_MODEL
        if not isinstance(given, Path | str):
            return given, ""
        found, origin, serving = load(given, device), from_anywhere(given), catalogue.model("serving")
        if serving is None or refresh or found.fingerprint == serving.fingerprint:
            return found, origin
        if not maintain.continues(catalogue, found, origin) and (kept := kept_weights(origin, serving.fingerprint)):
            found = load(kept, device)
        return found, origin

    def search(
        self,
        query: "Tensor | Query | Path | str",
        k: int = 10,
        *,
        to: Modality | None = None,
        by: Modality | None = None,
        path: str | None = None,
        label: str | None = None,
        merge: bool = True,
        model: Model | Path | str | None = None,
        device: str | None = None,
        faiss: bool = False,
    ) -> Found:
        """The `k` moments that fit a query best.

        A query is a vector [D], a sound file, a video, FILE@SECONDS (see `embed_query`), or a `Query`; one
        that another model made than the one that answers now is an `OtherVersionError`. `to` says what it is compared
        with: by default pictures for a sound and sounds for pictures. `path` is a pattern such as "cats/*",
        `label` a file's folder. `merge` leaves only the best of overlapping windows of a file.
        """
        if k < 1:
            raise StellaError(f"k={k} must be at least 1")
        for name, value in (("to", to), ("by", by)):
            if value not in (None, *MODALITIES):
                raise StellaError(f"{name}={value!r} must be video or audio")
        if isinstance(query, Path | str):
            query = embed_query(self.model(model, device), str(query), by)
        asked = Query(query) if isinstance(query, Tensor) else query
        target: Modality = to or other(asked.by)
        began = time.perf_counter()
        hits, exact, note = self._read(lambda c: self._nearest(c, asked, k, target, path, label, merge, faiss))
        seconds = time.perf_counter() - began
        serving = self.serving()
        if asked.file and hits and state_in_use(serving.origin) not in ("", serving.fingerprint):
            note = f"{moved(serving.origin, serving.fingerprint)}; {note or _by_kept(self.shown)}"
        return Found(asked, target, hits, exact, note, seconds)

    def vector(self, hit: Hit) -> Tensor:
        """The vector of a hit, float32 [D], to ask for more like it."""

        def read(catalogue: Catalogue) -> Tensor:
            shard, row = hit.place
            for model in catalogue.answering():
                shards = self._mapped.open(catalogue, model, hit.modality)
                if shard in shards:
                    return shards[shard][row].float()
            raise StellaError(f"{hit.path} has been embedded again since; search again")

        return self._read(read)

    def moment(self, place: Place) -> Moment:
        """The window whose vector is stored there."""

        def read(catalogue: Catalogue) -> Moment:
            for model, modality in product(catalogue.answering(), MODALITIES):
                shards = self._mapped.open(catalogue, model, modality)
                for hit in hits_of(catalogue, iter([(place, 1.0)] if place[0] in shards else []), modality, 1, False):
                    vector = shards[place[0]][place[1]].float()
                    query = Query(vector, modality, "", hit.start, hit.end, model.fingerprint)
                    stamp = catalogue.db.execute(
                        "SELECT size, mtime FROM files JOIN windows ON file = id WHERE shard = ? AND row = ?", place
                    ).fetchone()
                    return Moment(hit, query, *stamp)
            raise NoMomentError("this moment is not in the index any more; search again")

        return self._read(read)

    def build_ivf(self) -> None:
        """Build the derived indexes that `faiss=True` uses. They are ignored once the catalogue has changed."""

        def build(catalogue: Catalogue) -> None:
            serving, version = self._answering(catalogue)[0], catalogue.meta("version")
            for modality in MODALITIES:
                ivf.build(self.path, modality, self._mapped.open(catalogue, serving, modality), version or 0)

        self._read(build)

    def _read(self, work: Callable[[Catalogue], T]) -> T:
        """Do `work` in one snapshot; again if a compaction removed a shard of it before it was mapped."""
        with opened(self.path) as catalogue:
            for _ in range(20):
                try:
                    with catalogue.snapshot():
                        return work(catalogue)
                except FileNotFoundError as error:
                    lost = error.filename
        raise StellaError(f"{lost} is missing; restore it, or index again into another folder")

    def _nearest(
        self,
        catalogue: Catalogue,
        asked: Query,
        k: int,
        to: Modality,
        path: str | None,
        label: str | None,
        merge: bool,
        faiss: bool,
    ) -> tuple[list[Hit], bool, str]:
        serving, *older = self._answering(catalogue)
        made_by = asked.fingerprint or serving.fingerprint
        if made_by != serving.fingerprint and not self._translations.possible(made_by, [serving, *older]):
            raise OtherVersionError(f"the model of {self.path} has changed; embed the query again")
        filtered = path is not None or label is not None
        derived, note = None, ""
        if faiss and (filtered or older or made_by != serving.fingerprint):
            note = "searched exactly: the derived index knows no filters and no older vectors"
        elif faiss:
            derived = ivf.load(self.path, to, catalogue.meta("version") or 0)
            note = (
                "" if derived else f"searched exactly: build the derived index with stella index {self.shown} --faiss"
            )
        unit = _unit(asked.vector, serving)
        found: list[Iterator[tuple[Place, float]]] = []
        stale: set[int] = set()  # shards
        for model in (serving, *older):
            shards = self._mapped.open(catalogue, model, to)
            query = self._translations.carry(unit, made_by, model)
            if derived:
                found.append(ivf.ranked(derived, shards, query))
            else:
                found.append(ranked(shards, query, allowed_rows(catalogue, shards, path, label) if filtered else None))
            stale |= set(shards) if model.fingerprint != made_by else set()
        hits = hits_of(catalogue, merge_sorted(*found, key=lambda each: -each[1]), to, k, merge)
        translated = [hit.place for hit in hits if hit.place[0] in stale]
        if translated:
            asked_for.note(self.path, files_of(catalogue, translated))
            note = ". ".join(each for each in (note, _translated(len(translated), len(hits), self.shown)) if each)
        return hits, derived is None, note


def _translated(stale: int, every: int, index: str) -> str:
    return (
        f"{stale} of {every} were found by vectors of another state of the learner, into whose space the query was "
        f"translated; for exact answers run stella index {index} --refresh"
    )


def _by_kept(index: str) -> str:
    return f"the query was embedded by the kept weights of the state that made the vectors; {_for_now(index)}"


def _for_now(index: str) -> str:
    return f"for the state in use run stella index {index} --refresh"


def load(what: Path | str, device: str | None = None) -> Model:
    """`stella.load`, where a path or a name is known."""
    if not str(what):
        raise StellaError("the index does not know where its model came from; name it with --model")
    return embed.load(what, device)


def _unit(vector: Tensor, model: ModelRow) -> Tensor:
    if vector.shape != (model.dim,):
        raise StellaError(f"a query of shape {list(vector.shape)} does not fit vectors of {model.dim} numbers")
    wide = vector.detach().cpu().double()
    if not bool(wide.isfinite().all()) or not bool(wide.any()):
        raise StellaError("a query vector must be finite and not zero")
    unit: Tensor = (wide / wide.norm()).float()
    return unit


def _there(origin: str) -> str:
    """What an index takes its model from."""
    if Path(origin).is_absolute() and not Path(origin).exists():
        raise StellaError(f"{origin}, which made the vectors, is gone; name the place where it is now with --model")
    return origin


def _another_version(index: Path, model: Model | Path | str, instead_of: str | None) -> str:
    name = model if isinstance(model, Path | str) else "this model"
    refresh = f"embed all files again: stella index {index} --refresh"
    if instead_of is not None:
        gone = Path(instead_of).is_absolute() and not Path(instead_of).exists()
        other = f"name the place where {instead_of} is now" if gone else "leave it out"
        return f"the vectors of {index} were made by another model than {name}; {other}, or {refresh} --model {name}"
    return f"{name} has changed since it made the vectors of {index}, and its queries do not fit them; {refresh}"
