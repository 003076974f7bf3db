"""What the matching module has learnt: does it tell pairs apart, and does its importance fall on what sounds?"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from stella.clip import Labels, Source, labels_of
from stella.data.stream import StreamConfig, evaluation_batches
from stella.data.views import part
from stella.evaluate.retrieval import Autocast
from stella.media.augment import center_crop
from stella.model.avm import AVM, Pairs, match, score
from stella.model.cav import CAV, CAVConfig
from stella.selection import importance


@dataclass(frozen=True)
class Regions:
    """A clip's video patches in the frames that hold an event, bool [Lv]; both all false if nothing is known."""

    inside: Tensor  # at least half of the patch is the sounding object
    outside: Tensor  # the other patches of the same frames


@dataclass(frozen=True)
class Matched:
    correct: Tensor  # bool [2N]: each clip with its own video, and with another clip's
    ratio: Tensor  # float64 [N]: median importance inside over outside; NaN where a region is empty


@torch.no_grad()
def evaluate_matching(
    model: CAV,
    avm: AVM,
    source: Source,
    config: StreamConfig,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    autocast: Autocast = nullcontext,
    beta: float = 0.4,
) -> Matched:
    """Every clip is judged once matched, and once with a video of its batch that is not its own (App. D).

    The importance is that of selection (Eq. imp_score_cal, with its β) over all patches of a clip's frames.
    """
    correct: list[Tensor] = []
    ratio: list[Tensor] = []
    for batch in evaluation_batches(source, config, device):
        with autocast():
            scored = score(model, avm, model.patches_a(batch.audio), model.patches_v(batch.video))
            matching = match(model, avm, scored, _every_pair(len(batch), generator, batch.ids.device))
        correct.append((matching.logits > 0) == (matching.labels > 0))
        where = [regions(labels, model.config) for labels in labels_of(source, batch.ids)]
        inside = torch.stack([r.inside for r in where]).to(device)  # [B, Lv]
        outside = torch.stack([r.outside for r in where]).to(device)
        ratio.append(importance_ratio(importance(scored.qk.q_a, scored.qk.k_v, beta), inside, outside))
    return Matched(torch.cat(correct), torch.cat(ratio))


def importance_ratio(importance: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Median importance of the patches inside over that of those outside, all [B, L]: float64 [B], NaN for none."""
    scores = importance.double()

    def median(where: Tensor) -> Tensor:
        return scores.masked_fill(~where, torch.nan).nanquantile(0.5, dim=1)

    return median(inside) / median(outside).clamp_min(torch.finfo(torch.float32).tiny)


def regions(labels: Labels, config: CAVConfig) -> Regions:
    """Where the sounding object is, in patches, after the crop an evaluation batch gets.

    Frame t of T counts as the middle of the t-th of T equal parts of the clip; it holds an event if that tenth of the
    clip does. Without `labels.events` every frame counts.
    """
    frames, rows, columns = config.grid_v
    if labels.mask is None:
        nothing = torch.zeros(config.patches_v, dtype=torch.bool)
        return Regions(nothing, nothing)
    pixels = labels.mask.to(torch.uint8)[None, :, None].expand(-1, -1, 3, -1, -1) * 255  # [1, T, 3, H, W]
    mask = center_crop(pixels, config.image_size)[0, :, 0] / 255  # [T, H, W]
    covered = mask.view(frames, rows, config.patch_size, columns, config.patch_size).mean((2, 4))  # [T, rows, columns]
    counts = torch.ones(frames, dtype=torch.bool)
    if labels.events is not None:
        tenths = len(labels.events)
        counts = labels.events[((torch.arange(frames) + 0.5) / frames * tenths).long()]
    inside = covered >= 0.5
    return Regions((inside & counts[:, None, None]).flatten(), (~inside & counts[:, None, None]).flatten())


def some_of(source: Source, clips: int, generator: torch.Generator) -> Source:
    """At most so many clips of a source, drawn once, in order."""
    if len(source) <= clips:
        return source
    indices = torch.randperm(len(source), generator=generator)[:clips].sort().values.tolist()
    return part(source, indices)


def _every_pair(batch: int, generator: torch.Generator, device: torch.device) -> Pairs:
    """All clips matched, and all passing their videos on in a circle; a clip alone meets no other."""
    order = torch.randperm(batch, generator=generator).to(device)
    wrong = order if batch > 1 else order[:0]
    return Pairs(order, wrong, wrong.roll(-1))
