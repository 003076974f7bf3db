"""A query becomes a vector."""

import math
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stella.data.folder import AUDIO_SUFFIXES
from stella.embed import Model
from stella.errors import ClipError, StellaError
from stella.search.catalogue import Modality


@dataclass(frozen=True)
class Query:
    vector: Tensor  # float32 [D]
    by: Modality | None = None  # what of the file was embedded; None: unknown
    file: str = ""
    start: float = 0.0  # seconds
    end: float = 0.0
    fingerprint: str = ""  # of the model that made the vector; empty: unknown


def other(modality: Modality | None) -> Modality:
    """The modality that a query is compared with by default: the other one."""
    return "audio" if modality == "video" else "video"


def embed_query(model: Model, text: str, by: Modality | None = None) -> Query:
    """The vector of a file, the mean over its windows, or with FILE@SECONDS of the window around that moment.

    A sound file is embedded by its sound; any other by its pictures if it has some. `by` chooses.
    """
    file, moment = split_moment(text)
    if by is None:
        by = "audio" if Path(file).suffix.lower() in AUDIO_SUFFIXES else "video"
        try:
            return _embed(model, file, moment, by)
        except ClipError as error:
            if error.reason != "no video track":
                raise
            by = "audio"
    return _embed(model, file, moment, by)


def split_moment(text: str) -> tuple[str, float | None]:
    """`dog.mp4@12.5` → (`dog.mp4`, 12.5). A file whose own name has an @ is taken as it is."""
    file, at, tail = text.rpartition("@")
    if not at or Path(text).exists():
        return text, None
    try:
        moment = float(tail)
    except ValueError:
        if not Path(file).is_file():
            return text, None
        moment = math.nan
    if not 0 <= moment < math.inf:
        raise StellaError(f"{text}: a moment is a number of seconds from 0, such as {file}@12.5")
    return file, moment


def _embed(model: Model, file: str, moment: float | None, by: Modality) -> Query:
    if moment is not None:
        found = model.embed_moment(file, moment, by)
    else:
        found = (model.embed_video if by == "video" else model.embed_audio)(file)
    mean = found.vectors.mean(0)
    return Query(mean / mean.norm(), by, file, float(found.start.min()), float(found.end.max()), model.fingerprint)
