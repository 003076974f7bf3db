"""STELLA: continual audio-video pre-training. Start reading with `stella.clip`; CONTRIBUTING.md follows one clip."""

import os
from typing import TYPE_CHECKING, Any

# OpenMP threads spin while they wait for one another. On a busy machine spinning takes the time they wait for: the demo
# ran at a twelfth of its speed, with a short spin at a sixth or better; on a quiet machine it makes no difference. This
# must be set before torch is imported. It would override OMP_WAIT_POLICY, so it is left alone where that is set.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.1.0"
__all__ = ["Embeddings", "Index", "Maps", "Model", "load"]

if TYPE_CHECKING:
    from stella.embed.load import load
    from stella.embed.localise import Maps
    from stella.embed.model import Embeddings, Model
    from stella.search.index import Index
else:

    def __getattr__(name: str) -> Any:
        """The public names are imported when they are first used, since torch takes seconds."""
        if name not in __all__:
            raise AttributeError(f"module 'stella' has no attribute {name!r}")
        from stella import embed, search

        return getattr(search if name == "Index" else embed, name)
