"""Methods of the development study in results/room: STELLA and DER++ with one thing changed, and a memory of patches.

They are not methods of the package. `register` adds them for this process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from draft import Draft
from torch import Tensor

from stella import losses, selection
from stella.clip import Batch
from stella.columns import Column
from stella.memory import MemoryBatch
from stella.methods import METHODS
from stella.methods.base import Losses, clip_rows, drawn_patches, joined, output_rows, patch_rows
from stella.methods.derpp import DERpp, stored_penalty
from stella.methods.stella import AUDIO_RULES, STELLA, Scores, STELLAConfig
from stella.methods.stella_plus import STELLAPlus
from stella.model.avm import Scored, score
from stella.model.cav import CAV, CAVConfig, Patches, Split

RULES = ("STELLA", "no pruning", "uniform importance", "random")  # see `rules`


def draw_blocks(importance: Tensor, pruned: Tensor, noise: Tensor, grid: tuple[int, int, int], size: int = 2) -> Tensor:
    """Video by blocks of size × size patches of a frame, drawn ∝ mean importance, pruned patches last."""
    frames, rows, columns = grid
    importance, across = selection._positive(importance), columns // size
    by_block = importance.view(-1, frames, rows // size, size, across, size).mean((3, 5)).flatten(1)
    drawn = selection._race(by_block, noise).argsort(dim=1, descending=True, stable=True)
    at = torch.arange(frames * rows * columns, device=importance.device)
    row = at // columns % rows // size
    block = (at // (rows * columns) * (rows // size) + row) * across + at % columns // size
    return selection._order(drawn.argsort(dim=1).int().gather(1, block.expand(importance.shape)), pruned, importance)


class Blocks(STELLA):
    """STELLA that selects video patches in blocks of 2×2."""

    def select(self, a: Patches, v: Patches, scores: Scores) -> tuple[Patches, Patches]:
        draw, c = self.generators["select"], self.model.config
        rule = AUDIO_RULES[self.config.audio]
        order_a = rule(scores.importance_a, scores.correlation_a, draw, c.grid_a[1], self.config.chunk)
        pruned = selection.prune(scores.correlation_v, selection.uniform(*scores.importance_v.shape, generator=draw))
        noise = selection.uniform(len(pruned), c.patches_v // 4, generator=draw)
        order_v = draw_blocks(scores.importance_v, pruned, noise, c.grid_v)
        return a.take(order_a[:, : self.kappa_a]), v.take(order_v[:, : self.kappa_v])


class BlocksPlus(Blocks, STELLAPlus):
    """STELLA+ that selects video patches in blocks of 2×2."""


class Frozen(STELLA):
    """STELLA whose matching module stays as the initial weights have it."""

    def matching(self, scored: Scored) -> Tensor:
        return scored.x_a.new_zeros((), dtype=torch.float32)


class MatchingPast(STELLA):
    """STELLA whose matching module is trained on the drawn clips too."""

    drawn: MemoryBatch | None

    def draw(self, batch: Batch) -> MemoryBatch | None:
        self.drawn = super().draw(batch)
        return self.drawn

    def matching(self, scored: Scored) -> Tensor:
        if self.drawn is None:
            return super().matching(scored)
        a, v = self.model.patches_a(self.drawn["audio"]), self.model.patches_v(self.drawn["video"])
        past = score(self.model, self.avm, a, v, self.config.score_every)
        both: dict[str, Any] = {
            name: torch.cat([getattr(scored, name), getattr(past, name)]) for name in ("x_a", "x_v", "o_a", "o_v")
        }
        return super().matching(replace(scored, **both))


@dataclass(frozen=True)
class PrunedInConfig(STELLAConfig):
    pruned: Literal["a", "v"] = "a"


class PrunedIn(STELLA):
    """STELLA that prunes patches of one modality alone."""

    Config = PrunedInConfig
    config: PrunedInConfig

    def scores(self, scored: Scored, drawn: MemoryBatch | None) -> Scores:
        found = super().scores(scored, drawn)
        other = "correlation_v" if self.config.pruned == "a" else "correlation_a"
        return replace(found, **{other: torch.zeros_like(getattr(found, other))})


@dataclass(frozen=True)
class PrunedClipsConfig(STELLAConfig):
    pruned: Literal["current", "drawn"] = "current"


class PrunedClips(STELLA):
    """STELLA that prunes patches of the current clips alone, or of the drawn ones alone. Memory stores C of all."""

    Config = PrunedClipsConfig
    config: PrunedClipsConfig

    def choose(self, a: Patches, v: Patches, scores: Scores, drawn: MemoryBatch | None) -> tuple[Patches, Patches]:
        if self.config.pruned == "drawn":
            scores = replace(scores, **unpruned(vars(scores)))
        elif drawn is not None:
            drawn = MemoryBatch(drawn.slots, {**drawn.columns, **unpruned(drawn.columns)})
        return super().choose(a, v, scores, drawn)


class PrunedAny(STELLA):
    """STELLA that prunes as many of a clip's important patches, but any of them: their C are permuted."""

    def scores(self, scored: Scored, drawn: MemoryBatch | None) -> Scores:
        found = super().scores(scored, drawn)
        kappa = {"a": self.kappa_a, "v": self.kappa_v}
        mixed = {}
        for m in "av":
            importance, correlation = getattr(found, f"importance_{m}"), getattr(found, f"correlation_{m}")
            top = importance.argsort(dim=1, descending=True, stable=True)[:, : kappa[m]]
            other = selection.random_order(selection.uniform(*top.shape, generator=self.generators["select"]))
            mixed[f"correlation_{m}"] = correlation.scatter(1, top, correlation.gather(1, top.gather(1, other)))
        return replace(found, **mixed)


@dataclass(frozen=True)
class SharpConfig(STELLAConfig):
    sharp: float = 10.0


class Sharp(STELLA):
    """STELLA with a sharper C: the logits of past and present are multiplied before their softmax."""

    Config = SharpConfig
    config: SharpConfig

    def scores(self, scored: Scored, drawn: MemoryBatch | None) -> Scores:
        found = super().scores(scored, drawn)
        if drawn is None:
            return found
        times, kappa_a, kappa_v = self.config.sharp, self.kappa_a, self.kappa_v
        c_a = selection.correlation(scored.qk.k_a, times * found.q_v, times * drawn["q_v"], found.importance_a, kappa_a)
        c_v = selection.correlation(scored.qk.k_v, times * found.q_a, times * drawn["q_a"], found.importance_v, kappa_v)
        return replace(found, correlation_a=c_a, correlation_v=c_v)


@dataclass(frozen=True)
class EvenRestConfig(STELLAConfig):
    counted: float = 0.5  # share of all patches whose importance counts


class EvenRest(STELLA):
    """STELLA that draws by importance among the most important patches alone; the others follow uniformly."""

    Config = EvenRestConfig
    config: EvenRestConfig

    def scores(self, scored: Scored, drawn: MemoryBatch | None) -> Scores:
        found = super().scores(scored, drawn)
        even = {}
        for m in "av":
            importance = getattr(found, f"importance_{m}")
            ranked = importance.sort(dim=1, descending=True).values
            at = selection.kappa(ranked.shape[1], self.config.counted)
            least = ranked[:, at : at + 1]
            even[f"importance_{m}"] = torch.where(importance > least, importance, 1e-6 * least)
        return replace(found, **even)


@dataclass(frozen=True)
class WholeStepsConfig(STELLAConfig):
    every: int = 2


class WholeSteps(STELLA):
    """STELLA that trains on whole clips in every n-th step. Needs train.graph=false: steps differ in shape."""

    Config = WholeStepsConfig
    config: WholeStepsConfig
    steps = 0

    def choose(self, a: Patches, v: Patches, scores: Scores, drawn: MemoryBatch | None) -> tuple[Patches, Patches]:
        self.steps += 1
        return (
            whole(self.model, a, v, drawn)
            if self.steps % self.config.every == 0
            else super().choose(a, v, scores, drawn)
        )


@dataclass(frozen=True)
class TwoPassesConfig(STELLAConfig):
    contrast: Literal["chosen", "all"] = "chosen"  # the other patches are reconstructed


class TwoPasses(STELLA):
    """STELLA with one pass over the chosen patches and one over whole clips: one is contrasted (and has the penalty),
    the other reconstructed. 20% of all patches are visible in both."""

    Config = TwoPassesConfig
    config: TwoPassesConfig

    def loss(self, batch: Batch) -> Losses:
        a, v = self.model.patches_a(batch.audio), self.model.patches_v(batch.video)
        drawn = self.draw(batch)
        scored = score(self.model, self.avm, a, v, self.config.score_every)
        scores, matching = self.scores(scored, drawn), self.matching(scored)
        chosen, every = self.choose(a, v, scores, drawn), whole(self.model, a, v, drawn)
        contrasted, rebuilt = (chosen, every) if self.config.contrast == "chosen" else (every, chosen)
        out = self.pretrain(*rebuilt)
        split_a, split_v = self.splits(*contrasted)
        z_a = self.model.pooled_a(contrasted[0].take(split_a.visible))
        z_v = self.model.pooled_v(contrasted[1].take(split_v.visible))
        out = replace(out, z_a=z_a, z_v=z_v)
        parts = self.parts(out) | {"penalty": self.config.alpha * stored_penalty(out, drawn), "avm": matching}
        return Losses(parts, output_rows(out, batch) | self.remember(batch, scores, *chosen))


def rules(scores: Scores) -> dict[str, Scores]:
    """STELLA's selection with and without its parts, as scores to select by."""
    even = {f"importance_{m}": torch.ones_like(getattr(scores, f"importance_{m}")) for m in "av"}
    kept = unpruned(vars(scores))
    changed: list[dict[str, Tensor]] = [{}, kept, even, even | kept]
    return {rule: replace(scores, **each) for rule, each in zip(RULES, changed, strict=True)}


def unpruned(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """C of nothing: no patch is pruned."""
    return {f"correlation_{m}": torch.zeros_like(scores[f"correlation_{m}"]) for m in "av"}


def whole(model: CAV, a: Patches, v: Patches, drawn: MemoryBatch | None) -> tuple[Patches, Patches]:
    """All patches of x ∪ m."""
    if drawn is None:
        return a, v
    past_a, past_v = model.patches_a(drawn["audio"]), model.patches_v(drawn["video"])
    return Patches.cat([a, past_a]), Patches.cat([v, past_v])


class Whole(STELLA):
    """STELLA that drops no patch: a subclass says what the selection decides."""

    def loss(self, batch: Batch) -> Losses:
        a, v = self.model.patches_a(batch.audio), self.model.patches_v(batch.video)
        drawn = self.draw(batch)
        scored = score(self.model, self.avm, a, v, self.config.score_every)
        now, matching = self.scores(scored, drawn), self.matching(scored)
        both = now
        a, v = whole(self.model, a, v, drawn)
        if drawn is not None:
            both = Scores(**{name: joined(each, drawn, name) for name, each in vars(now).items()})
        draw, rule = self.generators["select"], AUDIO_RULES[self.config.audio]
        num_freq = self.model.config.grid_a[1]
        order_a = rule(both.importance_a, both.correlation_a, draw, num_freq, self.config.chunk)
        order_v = selection.select_patches(both.importance_v, both.correlation_v, draw)
        splits = self.split(order_a, self.kappa_a), self.split(order_v, self.kappa_v)
        out = self.model.pretrain(a, v, *splits)
        parts = self.parts(out) | {"penalty": self.config.alpha * stored_penalty(out, drawn), "avm": matching}
        return Losses(parts, output_rows(out, batch) | clip_rows(batch) | vars(now))

    def split(self, order: Tensor, kappa: int) -> Split:
        raise NotImplementedError

    def visible(self, length: int) -> int:
        return selection.visible(length, self.objective.mask_ratio)


class SeeChosen(Whole):
    """Visible patches among the κ selected; all others are reconstructed."""

    def split(self, order: Tensor, kappa: int) -> Split:
        noise = selection.uniform(*order.shape, generator=self.generators["mask"])
        dropped = torch.ones_like(noise).scatter(1, order[:, :kappa], 0.0)
        return Split(*selection.random_mask(noise + 2 * dropped, self.visible(order.shape[1])))


class TargetChosen(Whole):
    """Visible patches at random; only selected ones are reconstructed, as many as STELLA reconstructs."""

    def split(self, order: Tensor, kappa: int) -> Split:
        length = order.shape[1]
        count = self.visible(length)
        noise = selection.uniform(*order.shape, generator=self.generators["mask"])
        seen = noise.argsort(dim=1, stable=True)[:, :count]
        place = order.argsort(dim=1).scatter(1, seen, length)  # visible patches last
        return Split(seen, place.argsort(dim=1, stable=True)[:, : kappa - count])


@dataclass(frozen=True)
class PatchMemoryConfig(STELLAConfig):
    rule: Literal["random", "importance", "block"] = "random"


class PatchMemory(STELLAPlus):
    """ER on whole current clips whose memory stores κ patches of a clip: no penalty, no pruning, no stored outputs."""

    Config = PatchMemoryConfig
    config: PatchMemoryConfig

    @classmethod
    def columns(cls, model: CAVConfig, config: Any) -> dict[str, Column]:
        stored = super().columns(model, config)
        return {name: column for name, column in stored.items() if name.startswith(("patches", "positions"))}

    def loss(self, batch: Batch) -> Losses:
        a, v = self.model.patches_a(batch.audio), self.model.patches_v(batch.video)
        drawn = self.draw(batch)
        kept_a, kept_v, parts = self.keep(a, v)
        outs = [self.pretrain(a, v)]
        if drawn is not None:
            outs.append(self.pretrain(*drawn_patches(drawn)))
        recon = [self.recon_parts(out) for out in outs]
        parts |= {name: torch.cat([each[name] for each in recon]).mean() for name in recon[0]}
        z_a, z_v = torch.cat([out.z_a for out in outs]), torch.cat([out.z_v for out in outs])
        parts |= {"contrastive": self.contrastive_part(z_a, z_v).mean()}
        return Losses(parts, patch_rows(kept_a, kept_v))

    def keep(self, a: Patches, v: Patches) -> tuple[Patches, Patches, dict[str, Tensor]]:
        """The patches to store, and the matching loss where a rule needs the matching module."""
        if self.config.rule == "random":
            draw, kept = self.generators["select"], []
            for patches, kappa in ((a, self.kappa_a), (v, self.kappa_v)):
                order = selection.random_order(selection.uniform(*patches.positions.shape, generator=draw))
                kept.append(patches.take(order[:, :kappa]))
            return kept[0], kept[1], {}
        scored = score(self.model, self.avm, a, v)
        scores, matching = self.scores(scored, None), self.matching(scored)
        select = Blocks.select if self.config.rule == "block" else STELLA.select
        return *select(self, a, v, scores), {"avm": matching}  # type: ignore[arg-type]


class SameMask(DERpp):
    """DER++ whose penalty compares outputs of the same visible patches: memory stores which were visible."""

    @classmethod
    def columns(cls, model: CAVConfig, config: Any) -> dict[str, Column]:
        counts = {"seen_a": selection.visible(model.patches_a, 0.8), "seen_v": selection.visible(model.patches_v, 0.8)}
        return super().columns(model, config) | {name: Column(torch.int16, (n,)) for name, n in counts.items()}

    def loss(self, batch: Batch) -> Losses:
        a, v, drawn = self.with_memory(batch)
        split_a, split_v = self.splits(a, v)
        out, now, model = self.model.pretrain(a, v, split_a, split_v), len(batch), self.model
        penalty = out.z_a.new_zeros(())
        if drawn is not None:
            z_a = model.pooled_a(a[now:].take(drawn["seen_a"].long()))
            z_v = model.pooled_v(v[now:].take(drawn["seen_v"].long()))
            distance = losses.feature_penalty(z_a, drawn["z_a"]) + losses.feature_penalty(z_v, drawn["z_v"])
            penalty = distance.mean()
        seen = {"seen_a": split_a.visible[:now], "seen_v": split_v.visible[:now]}
        parts = self.parts(out) | {"penalty": self.config.alpha * penalty}
        return Losses(parts, clip_rows(batch) | output_rows(out, batch) | seen)


def register() -> None:
    METHODS.update(
        stella_blocks=Blocks,
        stella_plus_blocks=BlocksPlus,
        stella_frozen=Frozen,
        stella_matching_past=MatchingPast,
        stella_pruned_in=PrunedIn,
        stella_pruned_clips=PrunedClips,
        stella_pruned_any=PrunedAny,
        stella_sharp=Sharp,
        stella_even_rest=EvenRest,
        stella_whole_steps=WholeSteps,
        stella_two_passes=TwoPasses,
        see_chosen=SeeChosen,
        target_chosen=TargetChosen,
        patch_memory=PatchMemory,
        derpp_same_mask=SameMask,
        draft=Draft,
    )
