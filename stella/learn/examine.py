"""A model on the clips that are set aside: their embeddings, and what its matching module makes of them."""

from dataclasses import dataclass, replace

import torch

from stella.clip import Source
from stella.data.stream import StreamConfig
from stella.data.views import View, part
from stella.evaluate.after_task import MATCHING_CLIPS
from stella.evaluate.matching import evaluate_matching
from stella.evaluate.retrieval import embed
from stella.learn.held import HeldOut
from stella.learn.vectors import Vectors
from stella.methods.base import Method
from stella.rng import generator
from stella.runs.config import RunConfig
from stella.train.device import Runtime

BATCH = 8  # clips of a pass, always: a GPU loads kernels for every new number, which takes longer than the pass


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
            full = in_full_batches(missing)
            made = embed(method.eval_model, full, self._stream, self.machine.device, self.machine.autocast)
            for id, a, v in zip(made.ids.tolist(), made.a.cpu(), made.v.cpu(), strict=True):
                if id < len(missing):
                    found[missing.keys[id]] = a, v
        return {key: found[key] for key in held.keys if key in found}

    def matching(self, method: Method, held: HeldOut) -> float | None:
        """Accuracy of the matching module in percent; None without one."""
        if method.avm is None or len(held) < 2:
            return None
        clips = min(MATCHING_CLIPS, BATCH * max(1, len(held) // (4 * BATCH)))
        some = part(held, torch.randperm(len(held), generator=generator("matching", 0))[:clips].tolist())
        gen, device = generator(self.config.seed, "matching", 0), self.machine.device
        found = evaluate_matching(method.eval_model, method.avm, some, self._stream, gen, device, self.machine.autocast)
        return 100 * found.correct.double().mean().item()

    @property
    def _stream(self) -> StreamConfig:
        return replace(self.config.stream, batch_size=BATCH, workers=0, most_bad=1.0)


def in_full_batches(source: Source) -> View:
    """A source and, after its end, its last clip until the last batch is full."""
    clips = len(source)
    return part(source, [*range(clips), *[clips - 1] * (-clips % BATCH)])
