"""A model on the clips that are set aside: their embeddings, and what its matching module makes of them."""

from dataclasses import dataclass, replace

from stella.data.stream import StreamConfig
from stella.evaluate.after_task import MATCHING_CLIPS
from stella.evaluate.matching import evaluate_matching, some_of
from stella.evaluate.retrieval import embed
from stella.learn.held import HeldOut
from stella.learn.vectors import Vectors
from stella.methods.base import Method
from stella.rng import generator
from stella.runs.config import RunConfig
from stella.train.device import Runtime


@dataclass(frozen=True)
class Examiner:
    config: RunConfig
    machine: Runtime

    def embed(self, method: Method, held: HeldOut, known: Vectors) -> Vectors:
        """Embeddings of the held-out clips, of which some may be known."""
        unknown = [clip for clip in held.clips if clip.key not in known]
        missing = HeldOut(held.folder, unknown, held.decoded, held.device)
        found = dict(known)
        if len(missing):
            missing.decode()
            made = embed(method.eval_model, missing, self._stream, self.machine.device, self.machine.autocast)
            for id, a, v in zip(made.ids.tolist(), made.a.cpu(), made.v.cpu(), strict=True):
                found[missing.keys[id]] = a, v
        return {key: found[key] for key in held.keys if key in found}

    def matching(self, method: Method, held: HeldOut) -> float | None:
        """Accuracy of the matching module in percent; None without one."""
        if method.avm is None or len(held) < 2:
            return None
        some = some_of(held, min(MATCHING_CLIPS, max(8, len(held) // 4)), generator("matching", 0))
        gen, device = generator(self.config.seed, "matching", 0), self.machine.device
        found = evaluate_matching(method.eval_model, method.avm, some, self._stream, gen, device, self.machine.autocast)
        return 100 * found.correct.double().mean().item()

    @property
    def _stream(self) -> StreamConfig:
        return replace(self.config.stream, batch_size=self.config.evaluate.batch, workers=0, most_bad=1.0)
