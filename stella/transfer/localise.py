"""Sound-source localisation: where in a frame the model finds the sound. Nothing is trained."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stella import selection
from stella.clip import Batch, Source
from stella.data.downstream import masked
from stella.model.avm import AVM, score
from stella.model.cav import CAV
from stella.transfer.base import Columns
from stella.transfer.metrics import ciou, ciou_summary

FIGURE = "adaptive_ciou"


@torch.no_grad()
def sound_maps(model: CAV, avm: AVM | None, batch: Batch) -> Tensor:
    """How much each patch belongs to the sound, [B, T, s, s].

    With a matching module its attention at temperature 1, the mean over heads and audio queries; else the cosine of
    each video patch with the mean audio embedding.
    """
    a, v = model.patches_a(batch.audio), model.patches_v(batch.video)
    if avm is not None:
        qk = score(model, avm, a, v).qk
        found = selection.importance(qk.q_a, qk.k_v, 1.0)
    else:
        heard = model.fuse_a(model.encode_a(a)).mean(1, keepdim=True)
        found = F.cosine_similarity(model.fuse_v(model.encode_v(v)).float(), heard.float(), dim=2)
    return found.view(len(batch), *model.config.grid_v)


def read(source: Source) -> Source:
    """The clips with their masks; the frames with an event count."""
    return masked(source, sounding=True)


def counted(batch: Batch) -> Tensor:
    """Which frames of a batch of `read` have a figure, bool [B, T]: those with a known mask that is not empty."""
    mask, known = (batch.video[:, :, channel].flatten(2).amax(2) for channel in (3, 4))
    return (known > 127) & (mask > 0)


def judged(model: CAV, avm: AVM | None, batch: Batch) -> Columns:
    """The cIoU of each frame that counts, [N], with the regions of the benchmark and with adaptive ones."""
    frames, mask, counts = batch.video[:, :, :3], batch.video[:, :, 3] / 255, counted(batch)
    maps = sound_maps(model, avm, Batch(frames, batch.audio, batch.ids)).float()
    maps = F.interpolate(maps, size=mask.shape[-2:], mode="bilinear", align_corners=False)
    predicted, true = maps[counts], mask[counts]
    return {"ciou": ciou(predicted, true), "adaptive": ciou(predicted, true, adaptive=True)}


def figures(found: Columns) -> dict[str, float]:
    return {FIGURE: 100 * found["adaptive"].mean().item(), **ciou_summary(found["ciou"])}
