"""Evaluate the matching module: does it tell pairs apart, and is its importance high on the sounding object?"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from stella.clip import Batch, Labels, Source, labels_of
from stella.data.downstream import sounds
from stella.data.stream import StreamConfig, evaluation_batches
from stella.data.views import part
from stella.evaluate.retrieval import Autocast, Done
from stella.media.augment import center_crop
from stella.model.avm import AVM, Pairs, Scored, match, score
from stella.model.cav import CAV, CAVConfig
from stella.selection import importance


@dataclass(frozen=True)
class Matched:
    correct: Tensor  # bool [2N]: each clip with its own video, and with another clip's video
    # float64 [N] each, NaN if a region is empty
    ratio: Tensor  # median importance inside over outside
    auc: Tensor  # the chance that a patch inside is more important than one outside
    pointing: Tensor  # 1 if the most important patch lies inside, else 0 (the pointing game)
    chance: Tensor  # the share of patches inside: the pointing game by chance


@torch.no_grad()
def evaluate_matching(
    model: CAV,
    avm: AVM,
    source: Source,
    config: StreamConfig,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    autocast: Autocast = nullcontext,
    done: Done = lambda clips: None,
) -> Matched:
    """Judge every clip once with its own video and once with another video of its batch (App. D).

    Importance is that of selection (Eq. 2, at the module's β), over all patches of a clip.
    """
    correct: list[Tensor] = []
    where: list[tuple[Tensor, Tensor, Tensor]] = []  # importance, inside, outside
    for batch in evaluation_batches(source, config, device):
        scored, right = judged(model, avm, batch, generator, autocast)
        correct.append(right)
        found = torch.stack([regions(labels, model.config) for labels in labels_of(source, batch.ids)])  # [B, 2, Lv]
        inside, outside = found.to(device).unbind(1)
        where.append((importance(scored.qk.q_a, scored.qk.k_v, avm.beta), inside, outside))
        done(len(batch))
    ratio, area, point = (torch.cat([judge(*each) for each in where]) for judge in (importance_ratio, auc, pointing))
    share = torch.cat([i.sum(1, dtype=torch.float64) / (i | o).sum(1) for _, i, o in where])
    return Matched(torch.cat(correct), ratio, area, point, share.where(~point.isnan(), torch.nan))


@torch.no_grad()
def judged(
    model: CAV, avm: AVM, batch: Batch, generator: torch.Generator, autocast: Autocast = nullcontext
) -> tuple[Scored, Tensor]:
    """What the module makes of a batch, and whether it is right, bool [2B]: each clip with its own video and with
    another one of the batch."""
    with autocast():
        scored = score(model, avm, model.patches_a(batch.audio), model.patches_v(batch.video))
        matching = match(model, avm, scored, _every_pair(len(batch), generator, batch.ids.device))
    return scored, (matching.logits > 0) == (matching.labels > 0)


def importance_ratio(importance: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Median importance inside over median importance outside, from [B, L] each: float64 [B], NaN if one is empty."""
    scores = importance.double()

    def median(where: Tensor) -> Tensor:
        return scores.masked_fill(~where, torch.nan).nanquantile(0.5, dim=1)

    return median(inside) / median(outside).clamp_min(torch.finfo(torch.float32).tiny)


def auc(importance: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """The share of pairs (patch inside, patch outside) in which the one inside is more important; ties count half.

    From [B, L] each: float64 [B], NaN if a region is empty.
    """
    pairs = inside[:, :, None] & outside[:, None, :]  # [B, L, L]
    more, same = (compare(importance[:, :, None], importance[:, None, :]) for compare in (torch.gt, torch.eq))
    won = (pairs & more).sum((1, 2)) + (pairs & same).sum((1, 2)) / 2
    return won.double() / pairs.sum((1, 2))


def pointing(importance: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Whether the most important patch of both regions lies inside: float64 [B], 1 or 0, NaN if a region is empty."""
    top = importance.masked_fill(~(inside | outside), -torch.inf).argmax(1, keepdim=True)
    known = inside.any(1) & outside.any(1)
    return inside.gather(1, top)[:, 0].double().where(known, torch.nan)


def regions(labels: Labels, config: CAVConfig) -> Tensor:
    """Patches of the frames with an event, bool [2, Lv]: those at least half of which is the sounding object, and the
    others. Both are all false without a mask. Evaluation batches show the centre crop.

    Only frames with an event count; without `labels.events` every frame does.
    """
    frames, rows, columns = config.grid_v
    if labels.mask is None:
        return torch.zeros(2, config.patches_v, dtype=torch.bool)
    pixels = labels.mask.to(torch.uint8)[None, :, None].expand(-1, -1, 3, -1, -1) * 255  # [1, T, 3, H, W]
    mask = center_crop(pixels, config.image_size)[0, :, 0] / 255  # [T, H, W]
    covered = mask.view(frames, rows, config.patch_size, columns, config.patch_size).mean((2, 4))  # [T, rows, columns]
    counts = sounds(labels, frames)
    inside = covered >= 0.5
    return (torch.stack([inside, ~inside]) & counts[:, None, None]).flatten(1)


def some_of(source: Source, ids: Tensor, clips: int, generator: torch.Generator) -> Source:
    """A random subset of at most `clips` of these clips of a source, in order."""
    if len(ids) == len(source) <= clips:
        return source
    chosen = torch.randperm(len(ids), generator=generator)[:clips].sort().values
    return part(source, ids.cpu()[chosen].tolist())


def _every_pair(batch: int, generator: torch.Generator, device: torch.device) -> Pairs:
    """Every clip matched, and every clip mismatched by rotating the videos; a single clip is only matched."""
    order = torch.randperm(batch, generator=generator).to(device)
    wrong = order if batch > 1 else order[:0]
    return Pairs(order, wrong, wrong.roll(-1))
