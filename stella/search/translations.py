"""Queries for vectors of other states of the learner that made an index (`stella.embed.translate`)."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from stella.embed.translate import is_learner, translation
from stella.errors import StellaError
from stella.search.catalogue import ModelRow

MOST = 128  # kept: 300 MB at D = 768


class Translations:
    """Those that were needed last. Threads may share it."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], Tensor] = OrderedDict()  # by what made the query, and the vectors
        self._lock = threading.Lock()

    def possible(self, made_by: str, models: Sequence[ModelRow]) -> bool:
        try:
            return all(model.fingerprint == made_by or self._between(made_by, model) is not None for model in models)
        except StellaError:
            return False

    def carry(self, query: Tensor, made_by: str, model: ModelRow) -> Tensor:
        """A query [D] in the space of a model's vectors; StellaError if there is no way."""
        return query if model.fingerprint == made_by else query.float() @ self._between(made_by, model)

    def _between(self, made_by: str, model: ModelRow) -> Tensor:
        key = made_by, model.fingerprint
        with self._lock:
            if key not in self._known:
                if not is_learner(model.origin):
                    raise StellaError(f"{model.origin or 'the model'} is no learner: its versions cannot be compared")
                self._known[key] = translation(model.origin, *key)
            self._known.move_to_end(key)
            while len(self._known) > MOST:
                self._known.popitem(last=False)
            return self._known[key]
