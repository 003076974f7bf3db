"""Gives a model without a matching module one, trained on its frozen backbone."""

from contextlib import closing
from typing import Any

import torch

from stella.clip import Source
from stella.data.skipped import Skipped, in_words
from stella.data.stream import Stream, StreamConfig
from stella.embed.model import Model
from stella.errors import StellaError, number_of
from stella.model.avm import AVM, draw_pairs, score
from stella.rng import generator


def train_matching(
    model: Model,
    source: Source,
    steps: int = 300,
    *,
    batch: int = 16,
    lr: float = 5e-4,
    workers: int = 0,
    seed: int = 0,
    skipped: Skipped | None = None,
) -> float:
    """Train a new matching module on clips of a source and put it into the model; returns its last mean loss.

    The loss is that of initial pre-training (Eq. 11, chance is 0.69); the backbone and so all embeddings stay as they
    are. The result depends on the seed and not on the number of workers. Clips that cannot be used are added to
    `skipped`; if fewer than a batch can be, all of them are one.
    """
    if len(source) < 2 or steps < 1:
        raise StellaError(f"a matching module needs two clips and a step to learn from, not {len(source)} and {steps}")
    c, i, batch = model.cav.config, model.inputs, min(batch, len(source))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        avm = AVM(c.dim, c.heads, eps=c.eps).to(model.device)
    sizes: dict[str, Any] = {"size": i.pixels, "spec_frames": i.spec_frames, "mels": i.mels}
    config = StreamConfig(batch, steps, workers, seed=seed, augment=False, drop_last=True, most_bad=1.0, **sizes)
    optimizer, gen, losses = torch.optim.Adam(avm.parameters(), lr), generator(seed, "matching"), []
    stream = Stream([("matching", source)], config, model.device, skipped)
    try:
        with closing(stream):
            for _, clips in zip(range(steps), stream, strict=False):
                scored = score(model.cav, avm, model.cav.patches_a(clips.audio), model.cav.patches_v(clips.video))
                loss = avm.loss(model.cav, scored, draw_pairs(len(clips), gen))
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                losses.append(loss.detach())
    except StellaError as error:
        usable = len(source) - len(stream.skipped)
        if usable >= batch:
            raise
        if usable < 2:
            of = f"{usable} of {number_of(len(source), 'clip')} can be used ({in_words(stream.skipped.counts)})"
            raise StellaError(f"{of} and a matching module needs 2 to learn from; add clips or repair them") from error
        return train_matching(model, source, steps, batch=usable, lr=lr, workers=workers, seed=seed, skipped=skipped)
    model.avm = avm.eval().requires_grad_(False)
    return float(torch.stack(losses[-50:]).mean())
