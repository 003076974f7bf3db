"""What search asks of a model."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


class Embeddings(Protocol):
    vectors: Tensor  # float32 [n, D], unit
    start: Tensor  # float64 [n], seconds
    end: Tensor


class Embedder(Protocol):
    fingerprint: str
    dim: int

    def embed_video(self, what: Any) -> Any: ...

    def embed_audio(self, what: Any) -> Any: ...

    def embed_both(self, path: Path) -> tuple[Embeddings | None, Embeddings | None]: ...
