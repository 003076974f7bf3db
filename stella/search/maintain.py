"""What a writer does with an index besides embedding: choosing the model, switching versions, compaction, counting."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from stella.data.skipped import in_words
from stella.embed import Model
from stella.embed.translate import is_learner, state_in_use, translation
from stella.errors import StellaError, number_of
from stella.search.asked import clear
from stella.search.catalogue import MODALITIES, Catalogue, Modality, ModelRow
from stella.search.update import Counts, Update
from stella.search.vectors import Mapped, Writer, remove_unknown

NAMED = 5  # bad files, where an index is refused
OVERLAP = 0.5  # unless told: what happens at the edge of one window is in the middle of another


@dataclass(frozen=True)
class State:
    """What an index holds."""

    model: ModelRow | None  # whose vectors answer
    target: ModelRow | None  # what a refresh is changing to
    files: dict[str, int]  # by state: ok, bad, gone
    windows: dict[Modality, int]  # that answer
    stale: int  # files that the target, or else the learner's state in use, has not embedded
    dead: int  # rows of dropped windows, which `--compact` removes
    bytes: int  # of all vectors
    sources: list[Path]
    version: int  # counts changes


@dataclass(frozen=True)
class BadFile:
    file: Path
    reason: str


@dataclass(frozen=True)
class Summary:
    counts: Counts
    state: State
    switched: bool  # a refresh has ended, and the new vectors answer
    seconds: float
    note: str = ""  # what the caller should know; may be empty

    def __str__(self) -> str:
        c, files = self.counts, self.state.files
        done = {"added": c.added, "embedded again": c.redone, "renamed": c.renamed, "dropped": c.dropped}
        text = ", ".join(f"{count} {word}" for word, count in done.items() if count) or "nothing new"
        windows = ", ".join(f"{count:,} {modality}" for modality, count in self.state.windows.items())
        bad = f"; bad: {in_words(c.bad)}" if c.bad else ""
        return f"{text} in {self.seconds:.0f} s{bad}; {number_of(files.get('ok', 0), 'file')}, windows: {windows}"


def update(
    catalogue: Catalogue,
    sources: Sequence[Path | str],
    model: Model,
    origin: str,
    *,
    overlap: float | None,
    refresh: bool,
    bar: Progress,
) -> Summary:
    began = time.monotonic()
    share = _take_overlap(catalogue, overlap)
    model_id = _take_model(catalogue, model, origin, refresh)
    roots = [Path(source).resolve() for source in sources]
    known = state(catalogue).sources
    _check_nested(roots, known)
    roots += [root for root in known if root not in roots and (refresh or not sources)]
    if not roots:
        raise StellaError(f"{catalogue.root} has no folder yet; name one: stella index SRC {catalogue.root}")
    _tidy(catalogue)
    work = Update(catalogue, model, model_id, share, bar, refresh)
    work.run(roots)
    now = state(catalogue)
    _drop_emptied(catalogue)
    switched = now.target is not None and now.target.id == model_id and not now.stale and now.files.get("ok", 0) > 0
    if switched:
        with catalogue.change():
            catalogue.set_meta("serving", model_id)
            catalogue.set_meta("target", None)
            drop_models(catalogue, [row.id for row in catalogue.answering()[1:]])
        _tidy(catalogue)
    if not now.files.get("ok"):
        raise StellaError(_none_usable(bad_files(catalogue), roots))
    return Summary(work.counts, state(catalogue), switched, time.monotonic() - began)


def _none_usable(bad: Sequence[BadFile], roots: Sequence[Path]) -> str:
    """Names the first files: an index of nothing usable is not kept, so `--state` cannot list them."""
    why = [one.reason.split(";")[0] for one in bad]
    named = [f"{one.file} ({reason})" for one, reason in zip(bad, why, strict=True)][:NAMED]
    more = f" and {len(bad) - NAMED:,} more" if len(bad) > NAMED else ""
    of = f"none of {number_of(len(bad), 'file')} of {', '.join(map(str, roots))}"
    return f"{of} can be used ({in_words(Counter(why))}): {', '.join(named)}{more}"


def _take_model(catalogue: Catalogue, model: Model, origin: str, refresh: bool) -> int:
    """The model's id in the catalogue, as the serving one or as the target of a refresh.

    A later state of the learner that made the index serves at once: its queries are carried to the older vectors.
    """
    serving, target = catalogue.model("serving"), catalogue.model("target")
    same = serving is not None and continues(catalogue, model, origin)
    if same:
        catalogue.move_models(origin)
    if same and serving and serving.fingerprint != model.fingerprint:
        with catalogue.change():
            id = catalogue.add_model(model.fingerprint, model.dim, origin)
            catalogue.set_meta("serving", id)
            catalogue.set_meta("target", None)
            drop_models(catalogue, [target.id] if target and target.id != id else [])
        return id
    if serving and serving.fingerprint != model.fingerprint and not refresh:
        raise StellaError(
            f"{catalogue.root} was made by version {serving.fingerprint[:12]} of {serving.origin or 'a model'}, and "
            f"{origin or 'this one'} is {model.fingerprint[:12]}: all its vectors are stale; add --refresh to embed "
            "everything again"
        )
    with catalogue.change():
        id = catalogue.add_model(model.fingerprint, model.dim, origin)
        if serving is None:
            catalogue.set_meta("serving", id)
        elif refresh and id != (target.id if target else serving.id):
            catalogue.set_meta("target", None if id == serving.id else id)
            drop_models(catalogue, [target.id] if target else [])
    return id


def continues(catalogue: Catalogue, model: Model, origin: str) -> bool:
    """Whether a model is a state of the learner that made all vectors, whose queries can be translated for them."""
    if not is_learner(origin):
        return False
    try:
        for row in catalogue.answering():
            if row.fingerprint != model.fingerprint:
                translation(origin, model.fingerprint, row.fingerprint)
    except StellaError:
        return False
    return True


def _take_overlap(catalogue: Catalogue, given: float | None) -> float:
    """The overlap of all windows of the index; the first update decides."""
    known: float | None = catalogue.meta("overlap")
    if known is not None:
        if given not in (None, known):
            raise StellaError(f"the windows of {catalogue.root} overlap by {known:g}, not {given:g}; use another index")
        return known
    share = OVERLAP if given is None else given
    if not 0 <= share < 1:
        raise StellaError(f"overlap={share} is the share of a window that the next one repeats; set it in 0…1, below 1")
    with catalogue.change():
        catalogue.set_meta("overlap", share)
    return share


def drop_models(catalogue: Catalogue, models: Sequence[int]) -> None:
    """Remove models and all their vectors. Part of a change."""
    listed = ", ".join(map(str, models))
    catalogue.db.execute(f"DELETE FROM windows WHERE shard IN (SELECT id FROM shards WHERE model IN ({listed}))")
    catalogue.db.execute(f"DELETE FROM shards WHERE model IN ({listed})")
    catalogue.db.execute(f"DELETE FROM models WHERE id IN ({listed})")


def _drop_emptied(catalogue: Catalogue) -> None:
    """Remove older states without vectors; with the last of them, the counts of what was asked for."""
    older = [row.id for row in catalogue.answering()[1:]]
    live = "SELECT 1 FROM windows JOIN shards ON id = shard WHERE model = ? LIMIT 1"
    empty = [id for id in older if catalogue.db.execute(live, (id,)).fetchone() is None]
    if empty:
        with catalogue.change():
            drop_models(catalogue, empty)
        _tidy(catalogue)
    if older == empty:
        clear(catalogue.root)


def _tidy(catalogue: Catalogue) -> None:
    """Remove what killed writers have left: empty shards, and files that no shard names."""
    if catalogue.db.execute("SELECT 1 FROM shards WHERE rows = 0").fetchone():
        with catalogue.change() as db:
            db.execute("DELETE FROM shards WHERE rows = 0")
    remove_unknown(catalogue)


def _check_nested(roots: Sequence[Path], known: Sequence[Path]) -> None:
    for root in roots:
        for one in (*roots, *known):
            if one != root and (one in root.parents or root in one.parents):
                raise StellaError(f"{root} and {one} hold the same files; index only one of them")


def compact(catalogue: Catalogue) -> int:
    """Copy the live rows of shards that have dead ones into new shards; returns how many rows went."""
    _tidy(catalogue)
    target = catalogue.model("target")
    models = [*catalogue.answering(), *([target] if target else [])]
    went = sum(_compact(catalogue, model, modality) for model in models for modality in MODALITIES)
    _tidy(catalogue)
    return went


def _compact(catalogue: Catalogue, model: ModelRow, modality: Modality) -> int:
    writer = Writer(catalogue, model.id, model.dim, fresh=True)
    moved: list[tuple[int, int, int, int]] = []
    emptied: list[tuple[int]] = []
    went = 0
    shards = Mapped(catalogue.root).open(catalogue, model, modality)
    for shard, vectors in shards.items():
        rows = [
            row for (row,) in catalogue.db.execute("SELECT row FROM windows WHERE shard = ? ORDER BY row", (shard,))
        ]
        if len(rows) == len(vectors):
            continue
        places = writer.append(modality, vectors[rows])
        moved += [(*place, shard, row) for place, row in zip(places, rows, strict=True)]
        emptied.append((shard,))
        went += len(vectors) - len(rows)
    if emptied:
        grown = writer.sync()
        with catalogue.change() as db:
            db.executemany("UPDATE windows SET shard = ?, row = ? WHERE shard = ? AND row = ?", moved)
            db.executemany("UPDATE shards SET rows = ? WHERE id = ?", grown)
            db.executemany("DELETE FROM shards WHERE id = ?", emptied)
    writer.close()
    return went


def forget(catalogue: Catalogue, source: Path) -> None:
    root = source.resolve()
    known = state(catalogue).sources
    if root not in known:
        listed = ", ".join(map(str, known)) or "no folder"
        raise StellaError(f"{root} is no folder of {catalogue.root}, which has {listed}")
    with catalogue.change() as db:
        (id,) = db.execute("SELECT id FROM sources WHERE root = ?", (os.fsencode(root),)).fetchone()
        db.execute("DELETE FROM windows WHERE file IN (SELECT id FROM files WHERE source = ?)", (id,))
        db.execute("DELETE FROM files WHERE source = ?", (id,))
        db.execute("DELETE FROM sources WHERE id = ?", (id,))


def state(catalogue: Catalogue) -> State:
    with catalogue.snapshot() as db:
        serving, target = catalogue.model("serving"), catalogue.model("target")
        counts = dict(
            db.execute(
                "SELECT modality, count(*) FROM windows JOIN shards ON id = shard WHERE model IS NOT ? "
                "GROUP BY modality",
                (target.id if target else None,),
            )
        )
        newest = target.fingerprint if target else serving and (state_in_use(serving.origin) or serving.fingerprint)
        (stale,) = db.execute(
            "SELECT count(*) FROM files WHERE state = 'ok' AND NOT EXISTS (SELECT 1 FROM windows JOIN shards "
            "ON shards.id = shard JOIN models ON models.id = model WHERE file = files.id AND fingerprint = ?)",
            (newest,),
        ).fetchone()
        rows, size = db.execute(
            "SELECT total(rows), total(rows * dim * 2) FROM shards JOIN models ON models.id = model"
        ).fetchone()
        return State(
            model=serving,
            target=target,
            files=dict(db.execute("SELECT state, count(*) FROM files GROUP BY state")),
            windows={modality: counts.get(modality, 0) for modality in MODALITIES},
            stale=stale,
            dead=int(rows) - db.execute("SELECT count(*) FROM windows").fetchone()[0],
            bytes=int(size),
            sources=[Path(os.fsdecode(root)) for (root,) in db.execute("SELECT root FROM sources ORDER BY id")],
            version=catalogue.meta("version") or 0,
        )


def bad_files(catalogue: Catalogue) -> list[BadFile]:
    rows = catalogue.db.execute(
        "SELECT root, path, reason FROM files JOIN sources ON sources.id = source WHERE state = 'bad' ORDER BY 1, 2"
    )
    return [BadFile(Path(os.fsdecode(root)) / os.fsdecode(path), reason) for root, path, reason in rows]
