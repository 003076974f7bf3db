"""A model on the clips that are set aside: their embeddings, and what its matching module makes of them."""

from collections.abc import Iterator, Sequence

import torch

from stella.clip import Batch
from stella.data.chunk import Job, Maker
from stella.errors import number_of
from stella.evaluate.after_task import MATCHING_CLIPS
from stella.evaluate.matching import judged
from stella.evaluate.retrieval import unit_a, unit_v
from stella.files import Line
from stella.learn.held import HeldOut
from stella.learn.vectors import Vectors
from stella.methods.base import Method
from stella.rng import generator
from stella.runs.config import RunConfig
from stella.train.device import Runtime

BATCH = 16  # clips of a pass, always: a GPU loads kernels for every new number, which takes longer than the pass
SHOWN = 3  # names of clips that could not be read
READY = 500  # clips that stay on the device, as the model takes them: 0.6 GB at the paper's sizes


class Examiner:
    def __init__(self, config: RunConfig, machine: Runtime) -> None:
        self.config, self.machine = config, machine
        self._ready: dict[str, Batch] = {}  # one clip each, by key
        self._unread: set[str] = set()  # keys of clips that could not be read, as was said

    def read(self, held: HeldOut) -> None:
        """Read the clips to measure with, unless they are there since the last time. Forget all others."""
        self._ready = {key: self._ready[key] for key in held.keys if key in self._ready}
        for keys in _in_batches(held.keys):
            if len(self._ready) < READY:
                self._ready |= self._read(held, keys)

    @torch.no_grad()
    def embed(self, method: Method, held: HeldOut, known: Vectors) -> Vectors:
        """Embeddings of the held-out clips, of which some may be known."""
        model, found = method.eval_model, dict(known)
        for keys, batch in self._batches(held, [key for key in held.keys if key not in known]):
            with self.machine.autocast():
                a, v = unit_a(model, batch.audio), unit_v(model, batch.video)
            rows = slice(len(keys))
            found |= zip(keys, zip(a[rows].cpu(), v[rows].cpu(), strict=True), strict=True)
        return {key: found[key] for key in held.keys if key in found}

    def unread(self, held: HeldOut, found: Vectors) -> str:
        """Which clips could not be read and so are not among the embeddings, in words, each once; else empty."""
        keys = [key for key in held.keys if key not in found and key not in self._unread]
        self._unread.update(keys)
        if not keys:
            return ""
        names = ", ".join(f"{key}.tar" for key in keys[:SHOWN]) + (", …" if keys[SHOWN:] else "")
        clips = f"{number_of(len(keys), 'clip')} set aside {'is' if len(keys) == 1 else 'are'}"
        return f"{clips} damaged and not measured; delete from {held.folder}: {names}"

    def matching(self, method: Method, held: HeldOut) -> Line:
        """The record's part on the matching module: its accuracy in percent, None without one, and of how many pairs.

        A quarter of the clips are judged, with two pairs each: one clip takes as long as embedding two or three.
        """
        if method.avm is None or len(held) < 2:
            return {"matching": None, "pairs": 0}
        clips = min(MATCHING_CLIPS, BATCH * max(1, len(held) // (4 * BATCH)))
        some = torch.randperm(len(held), generator=generator("matching", 0))[:clips].tolist()
        draw, correct = generator(self.config.seed, "matching", 0), []
        for keys, batch in self._batches(held, [held.keys[index] for index in some]):
            correct.append(judged(method.eval_model, method.avm, batch[: len(keys)], draw, self.machine.autocast)[1])
        right = torch.cat(correct).double() if correct else None
        return {"matching": None if right is None else 100 * right.mean().item(), "pairs": sum(map(len, correct))}

    def _batches(self, held: HeldOut, keys: Sequence[str]) -> Iterator[tuple[list[str], Batch]]:
        """These clips, if they can be read, in full batches: after its keys a batch repeats its last clip."""
        for some in _in_batches(keys):
            if clips := self._read(held, some):
                every = list(clips.values())
                yield list(clips), Batch.cat([*every, *every[-1:] * (BATCH - len(every))])

    def _read(self, held: HeldOut, keys: Sequence[str]) -> dict[str, Batch]:
        """Those of these clips that can be read, as the model takes them, in this order."""
        missing, c = held.only([key for key in keys if key not in self._ready]), self.config.stream
        make = Maker([missing], c.size, c.spec_frames, c.mels, False, c.seed, self.machine.device)
        clips = dict(self._ready)
        if made := make(Job(0, 0, 0, range(len(missing))), lambda position: None).batch:
            clips |= {missing.keys[id]: made[row : row + 1] for row, id in enumerate(made.ids.tolist())}
        return {key: clips[key] for key in keys if key in clips}


def _in_batches(keys: Sequence[str]) -> list[Sequence[str]]:
    return [keys[start : start + BATCH] for start in range(0, len(keys), BATCH)]
