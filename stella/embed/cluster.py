"""`stella embed … --ray`: the files of a large corpus embedded by the machines of a Ray cluster."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from stella.data.cluster import RETRIES, cluster, in_order
from stella.embed.load import load
from stella.embed.model import Model
from stella.embed.vectors import Both, embed_each
from stella.errors import ClipError, require
from stella.model.weights import from_anywhere

FILES = 16  # of a task


def embed_on_ray(
    address: str, model: str, files: Sequence[Path], processors: int, **how: Any
) -> Iterator[tuple[Path, Both | ClipError]]:
    """The embeddings of each file's picture and sound, or why there are none, in the order of the files.

    All machines see the files and the model under the same paths. A task takes a GPU where the cluster has some.
    `how` are further arguments of `Model.embed_both`.
    """
    ray = require("ray", "ray")
    with cluster(address, processors):
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        remote = ray.remote(embed_all).options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
        name = from_anywhere(model)
        parts = [[file.absolute() for file in files[at : at + FILES]] for at in range(0, len(files), FILES)]
        tasks = ((part, lambda part=part: remote.remote(name, part, how)) for part in parts)
        done = (each for _, found in in_order(ray, tasks) for each in found)
        yield from zip(files, done, strict=True)


def embed_all(model: str, files: Sequence[Path], how: dict[str, Any]) -> list[Both | ClipError]:
    return [found for _, found in embed_each(_loaded(model), files, **how)]


@cache
def _loaded(model: str) -> Model:
    """A process of Ray does one task after another with the same model."""
    return load(model)
