"""Segmentation of the sounding object (AVS): a mask for each frame."""

from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import Batch, Source
from stella.data.downstream import masked
from stella.model.heads import MaskDecoder
from stella.transfer.base import Columns, Downstream
from stella.transfer.metrics import f_curve, f_measure, iou


class Segment(Downstream):
    """Binary cross-entropy of the decoder's masks. mIoU and F are those of AVSBench, over all frames with a mask."""

    title = "Segmentation"
    figure = "miou"
    head: MaskDecoder

    def setup(self) -> None:
        c = self.model.config
        self.head = MaskDecoder(c.dim, c.image_size, self.options.channels).to(self.device)

    def clips(self, source: Source, test: bool = False) -> Source:
        return masked(source)

    def columns_of(self, batch: Batch, source: Source) -> Columns:
        model, c = self.model, self.model.config
        frames, mask, known = batch.video[:, :, :3], batch.video[:, :, 3], batch.video[:, :, 4]
        x_a, x_v = model.encode_a(model.patches_a(batch.audio)), model.encode_v(model.patches_v(frames))
        stages = model.fuse_stages(x_a, x_v)[-2:]
        first, last = (s[:, c.patches_a :].reshape(len(batch), *c.grid_v, c.dim) for s in (stages[0], stages[-1]))
        sound = stages[-1][:, : c.patches_a].mean(1)
        return {
            "first": first,  # [B, T, s, s, D]
            "last": last,
            "sound": sound,  # [B, D]
            "mask": mask > 127,  # [B, T, H, W]
            "known": known.flatten(2).amax(2) > 127,  # [B, T]
        }

    def objective_of(self, columns: Columns) -> dict[str, Tensor]:
        first, last, mask, known = (columns[name] for name in ("first", "last", "mask", "known"))
        if self.options.mask_frames:  # the first frames whose mask is known
            chosen = known.int().argsort(dim=1, descending=True, stable=True)[:, : self.options.mask_frames]
            rows = torch.arange(len(chosen), device=chosen.device)[:, None]
            first, last, mask, known = (x[rows, chosen] for x in (first, last, mask, known))
        logits, features = self.head(first, last, columns["sound"])
        each = F.binary_cross_entropy_with_logits(logits.float(), mask.float(), reduction="none").mean((2, 3))  # [B, T]
        parts = {"cross_entropy": (each * known).sum() / known.sum().clamp_min(1)}
        if self.options.align:
            parts["align"] = self.options.align * self._align(logits, features, columns["sound"])
        return parts

    def _align(self, logits: Tensor, features: Tensor, sound: Tensor) -> Tensor:
        """KL divergence of the masked visual features from the sound's, both as distributions over channels."""
        size = features.shape[-2:]
        share = F.interpolate(logits.sigmoid(), size=size, mode="bilinear", align_corners=False)[:, :, None]
        seen = (features * share).mean((1, 3, 4))  # [B, C]
        heard = self.head.heard(sound)
        return F.kl_div(seen.log_softmax(1), heard.softmax(1), reduction="batchmean")

    def shown(self, columns: Columns) -> Columns:
        return {"maps": self.head(columns["first"], columns["last"], columns["sound"])[0].sigmoid()}

    def judged(self, columns: Columns) -> Columns:
        logits, _ = self.head(columns["first"], columns["last"], columns["sound"])
        known = columns["known"]
        predicted, true = logits.float()[known], columns["mask"][known]  # [N, H, W]
        return {"iou": iou(predicted, true), "f": f_curve(predicted, true)}

    def figures(self, judged: Columns) -> dict[str, float]:
        size = self.options.mean_of or len(judged["iou"])
        miou = [100 * each.mean().item() for each in torch.split(judged["iou"], size)]
        f = [f_measure(each) for each in torch.split(judged["f"], size)]
        return {"miou": fmean(miou), "f": fmean(f)}
