"""Drafts on the way to Chorus (`stella/methods/chorus.py`), most of them dead ends; results/chorus has what they gave.

A memory of random patches; how many clips are drawn from it, which ones, and what else they are contrasted with.
`room_variants.register` adds them for this process.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stella import losses, selection
from stella.clip import Batch
from stella.columns import Column
from stella.memory import MemoryBatch
from stella.methods.base import (
    Losses,
    Method,
    ObjectiveConfig,
    check_kept,
    drawn_patches,
    patch_columns,
    patch_rows,
)
from stella.model.cav import CAV, CAVConfig, Patches
from stella.model.slow import SlowWeights


@dataclass(frozen=True)
class DraftConfig:
    keep: float = 0.5  # share of the patches stored, and trained on
    past: Literal["all", "contrast"] = "all"  # contrast: drawn clips are contrasted, not reconstructed
    seen: float | None = None  # share of the patches of drawn clips that the encoders see; none: as of current ones
    draws: float = 1.0  # clips drawn for each current clip
    bank: bool = False  # stored outputs of all of memory are negatives
    near: float = 0.0  # sharpness of the draw around anchors; 0: uniform
    anchors: int = 2
    refresh: bool = True  # drawn clips' stored outputs are renewed
    teach: float = 0.0  # weight of the slow weights' similarities as targets, relative to the contrastive loss
    decay: float = 0.99
    mse: float = 0.0  # weight of the distance to the slow weights' outputs on drawn clips


@dataclass(frozen=True)
class DraftLosses(Losses):
    slots: Tensor | None = None
    again: dict[str, Tensor] | None = None


class Draft(Method):
    Config = DraftConfig
    title = summary = citation = cost = "draft"
    random = ("select", "anchor")
    config: DraftConfig

    @classmethod
    def check(cls, model: CAVConfig, config: DraftConfig, objective: ObjectiveConfig) -> None:
        check_kept(model, objective, *(selection.kappa(n, config.keep) for n in (model.patches_a, model.patches_v)))

    @classmethod
    def columns(cls, model: CAVConfig, config: DraftConfig) -> dict[str, Column]:
        rows = patch_columns(model, *(selection.kappa(n, config.keep) for n in (model.patches_a, model.patches_v)))
        if config.bank or config.near:
            rows |= {"z_a": Column(torch.float16, (model.dim,)), "z_v": Column(torch.float16, (model.dim,))}
        return rows

    def setup(self) -> None:
        if self.config.teach or self.config.mse:
            self.slow = SlowWeights(self.model, self.config.decay)

    def some(self, patches: Patches, share: float) -> Patches:
        shape = patches.positions.shape
        order = selection.random_order(selection.uniform(*shape, generator=self.generators["select"]))
        return patches.take(order[:, : selection.kappa(shape[1], share)])

    def near(self, n: int) -> MemoryBatch | None:
        """n clips of memory close to some of its clips, in the sense of the contrastive loss."""
        m = self.memory
        m._asked = max(m._asked, n)
        n = min(n, m.offered, m.capacity)
        if n < 1:
            return None
        held = m._seen.clamp(1, m.capacity)
        free = torch.arange(m.capacity, device=m.device) >= held
        draw = self.generators["anchor"]
        at = (torch.rand(self.config.anchors, generator=draw, device=m.device) * held).long()
        z_a, z_v = (F.normalize(m._rows[k][:-1].float(), dim=1) for k in ("z_a", "z_v"))
        s = (z_a[at] @ z_v.T + z_v[at] @ z_a.T) / 2
        noise = torch.rand(m.capacity, generator=m.generator, device=m.device).clamp(1e-9, 1 - 1e-7)
        score = self.config.near * s.amax(0) - torch.log(-torch.log(noise))
        slots = score.masked_fill(free, -torch.inf).argsort(descending=True)[:n] % held
        taken = {name: m._take(rows, slots, self.device) for name, rows in m._rows.items()}
        return MemoryBatch(slots, {name: m.columns[name].decode(rows) for name, rows in taken.items()})

    def loss(self, batch: Batch) -> Losses:
        c = self.config
        n = round(len(batch) * c.draws)
        drawn = self.near(n) if c.near else self.memory.draw(n, to=self.device)
        a, v = self.model.patches_a(batch.audio), self.model.patches_v(batch.video)
        a, v = self.some(a, c.keep), self.some(v, c.keep)
        kept = patch_rows(a, v)
        ids = batch.ids
        if c.past == "contrast":
            return self.contrast_only(a, v, batch, drawn, kept)
        if drawn is not None:
            past_a, past_v = drawn_patches(drawn)
            a, v = Patches.cat([a, past_a]), Patches.cat([v, past_v])
            ids = torch.cat([ids, drawn.ids])
        splits = self.splits(a, v)
        out = self.model.pretrain(a, v, *splits)
        parts = {name: part.mean() for name, part in self.recon_parts(out).items()}
        parts["contrastive"] = self.objective.contrast_weight * self.contrast(out.z_a, out.z_v, ids).mean()
        if c.teach or c.mse:
            with torch.no_grad():
                seen_a, seen_v = a.take(splits[0].visible), v.take(splits[1].visible)
                t_a, t_v = self.outputs(self.slow.model, seen_a, seen_v)
            if c.teach:
                taught = self.taught(out.z_a, out.z_v, t_a, t_v)
                parts["teach"] = self.objective.contrast_weight * c.teach * taught.mean()
            if c.mse:
                now = len(batch)
                apart = losses.feature_penalty(out.z_a[now:], t_a[now:]) + losses.feature_penalty(
                    out.z_v[now:], t_v[now:]
                )
                parts["mse"] = c.mse * apart.sum() / max(1, len(ids) - now)
        if not (c.bank or c.near):
            return DraftLosses(parts, kept)
        z = {"z_a": out.z_a.detach(), "z_v": out.z_v.detach()}
        again = {k: x[len(batch) :] for k, x in z.items()}
        return DraftLosses(
            parts, kept | {k: x[: len(batch)] for k, x in z.items()}, drawn.slots if drawn is not None else None, again
        )

    def contrast_only(
        self, a: Patches, v: Patches, batch: Batch, drawn: MemoryBatch | None, kept: dict[str, Tensor]
    ) -> Losses:
        c, model = self.config, self.model
        splits = self.splits(a, v)
        out = model.pretrain(a, v, *splits)
        z_a, z_v, ids, t = out.z_a, out.z_v, batch.ids, None
        seen_a, seen_v = a.take(splits[0].visible), v.take(splits[1].visible)
        if c.teach:
            t = [z.detach() for z in self.outputs(self.slow.model, seen_a, seen_v)]
        if drawn is not None:
            a, v = drawn_patches(drawn)
            share = c.seen or 1 - self.objective.mask_ratio
            counts = [int(share * n) for n in (model.config.patches_a, model.config.patches_v)]
            seen_a, seen_v = self.first(a, counts[0]), self.first(v, counts[1])
            past_a, past_v = self.outputs(model, seen_a, seen_v)
            z_a, z_v = torch.cat([z_a, past_a]), torch.cat([z_v, past_v])
            ids = torch.cat([ids, drawn.ids])
            if c.teach:
                t = [
                    torch.cat([x, y.detach()])
                    for x, y in zip(t, self.outputs(self.slow.model, seen_a, seen_v), strict=True)
                ]
        parts = {name: part.mean() for name, part in self.recon_parts(out).items()}
        parts["contrastive"] = self.objective.contrast_weight * self.contrast(z_a, z_v, ids).mean()
        if c.teach:
            parts["teach"] = self.objective.contrast_weight * c.teach * self.taught(z_a, z_v, *t).mean()
        return DraftLosses(parts, kept)

    def first(self, patches: Patches, count: int) -> Patches:
        noise = selection.uniform(*patches.positions.shape, generator=self.generators["mask"])
        return patches.take(selection.random_order(noise)[:, :count])

    @staticmethod
    def outputs(model: CAV, a: Patches, v: Patches) -> tuple[Tensor, Tensor]:
        return model.pooled_a(a), model.pooled_v(v)

    def contrast(self, z_a: Tensor, z_v: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast(z_a.device.type, enabled=False):
            a, v = (F.normalize(z.float(), dim=-1) for z in (z_a, z_v))
            tau = self.objective.tau
            to_v, to_a = a @ v.T / tau, v @ a.T / tau
            same = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool, device=ids.device)
            to_v, to_a = to_v.masked_fill(same, -torch.inf), to_a.masked_fill(same, -torch.inf)
            own_v, own_a = to_v.diagonal(), to_a.diagonal()
            if self.config.bank:
                m = self.memory
                b_a, b_v = (F.normalize(m._rows[k][:-1].clone().float(), dim=1, eps=1e-6) for k in ("z_a", "z_v"))
                none = torch.arange(m.capacity, device=m.device) >= m._seen
                hide = none | (ids[:, None] == m._rows["id"][:-1])
                to_v = torch.cat([to_v, (a @ b_v.T / tau).masked_fill(hide, -torch.inf)], 1)
                to_a = torch.cat([to_a, (v @ b_a.T / tau).masked_fill(hide, -torch.inf)], 1)
            return (to_v.logsumexp(1) - own_v + to_a.logsumexp(1) - own_a) / 2

    def taught(self, z_a: Tensor, z_v: Tensor, t_a: Tensor, t_v: Tensor) -> Tensor:
        with torch.autocast(z_a.device.type, enabled=False):
            a, v, ta, tv = (F.normalize(z.float(), dim=-1) for z in (z_a, z_v, t_a, t_v))
            tau, total = self.objective.tau, 0.0
            for x, y, tx, ty in ((a, v, ta, tv), (v, a, tv, ta)):
                total = total - ((tx @ ty.T / tau).softmax(1) * (x @ y.T / tau).log_softmax(1)).sum(1)
            return total / 2

    def after_batch(self, batch: Batch, losses: Losses) -> None:
        if losses.slots is not None and self.config.refresh:
            self.memory.update(losses.slots, **losses.again)
        super().after_batch(batch, losses)
