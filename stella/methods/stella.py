"""STELLA: trains on patches that carry the audio-video correlation and do not overwrite correlations of the past.

One step (Sec. 4), on top of DER++:
1. score all patches of the current clips without gradient: importance I from the matching module's queries and keys;
2. train the matching module on matched and mismatched pairs;
3. compute q̂, the weighted mean query of the κ most important patches;
4. compute the correlation C of those patches' keys with the drawn clips' q̂, relative to their own pair's;
5. prune by C, then draw κ patches by I;
6. select the drawn clips' patches anew from their stored I and C;
7. L on the selected patches, with 20% of *all* patches visible; 8. DER++'s penalty; 9. the reservoir.

The generator "select" draws audio's pruning and order, then video's, current clips first; "pairs" draws step 2's pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stella import selection
from stella.clip import Batch
from stella.columns import Column
from stella.config import check_values
from stella.memory import MemoryBatch
from stella.methods.base import (
    Losses,
    Method,
    ObjectiveConfig,
    ReplayConfig,
    check_kept,
    clip_columns,
    clip_rows,
    joined,
    output_columns,
    output_rows,
)
from stella.methods.derpp import stored_penalty
from stella.model.avm import AVM, Scored, check_heads, draw_pairs, score
from stella.model.cav import CAVConfig, Patches
from stella.model.slow import check_shares


@dataclass(frozen=True)
class STELLAConfig(ReplayConfig):
    """The paper's values on Continual-VS; the last four are for ablations."""

    alpha: float = 0.5  # weight of the penalty
    beta: float = 0.4  # temperature of importance (0.1 on Continual-AS)
    keep_ratio: float = 0.5  # ρ, share of the patches kept, both modalities
    keep_ratio_a: float | None = None  # ρ_a for audio; none: keep_ratio
    keep_ratio_v: float | None = None  # ρ_v for video; none: keep_ratio
    chunk: int = 4  # L_c, time steps (of patches) per audio chunk
    avm_heads: int | None = None  # heads of the matching module; none: as many as the model has
    score_every: int = 1  # cheaper scoring: encode only every n-th patch of a row, its neighbours share its score
    audio: Literal["time", "frequency", "free"] = "time"  # audio chunks: time steps, frequency bands, or no chunks
    video: Literal["free", "blocks"] = "free"  # video patches: one by one, or in 2 × 2 blocks of neighbours
    importance: bool = True  # false: draw unpruned patches uniformly ("RCA only")
    correlation: bool = True  # false: prune no patch ("LPIS only")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(
            self,
            "args.",
            alpha=(self.alpha >= 0, "not be negative"),
            beta=(self.beta > 0, "be above 0"),
            chunk=(self.chunk >= 1, "be at least 1"),
            score_every=(self.score_every >= 1, "be at least 1"),
            avm_heads=(self.avm_heads is None or self.avm_heads >= 1, "be at least 1"),
        )
        ratios = {name: getattr(self, name) for name in ("keep_ratio", "keep_ratio_a", "keep_ratio_v")}
        check_shares("args.", **{name: ratio for name, ratio in ratios.items() if ratio is not None})

    def kappa_a(self, model: CAVConfig) -> int:
        return selection.kappa(model.patches_a, self.keep_ratio if self.keep_ratio_a is None else self.keep_ratio_a)

    def kappa_v(self, model: CAVConfig) -> int:
        return selection.kappa(model.patches_v, self.keep_ratio if self.keep_ratio_v is None else self.keep_ratio_v)

    def heads(self, model: CAVConfig) -> int:
        return model.heads if self.avm_heads is None else self.avm_heads


def _free(importance: Tensor, correlation: Tensor, generator: torch.Generator, num_freq: int, chunk: int) -> Tensor:
    return selection.select_patches(importance, correlation, generator)


AUDIO_RULES: dict[str, Callable[[Tensor, Tensor, torch.Generator, int, int], Tensor]] = {
    "time": selection.select_time_chunks,
    "frequency": selection.select_freq_chunks,
    "free": _free,
}


@dataclass(frozen=True)
class Scores:
    """What patches are selected by. STELLA's memory has a column for each field."""

    importance_a: Tensor  # [B, La]
    importance_v: Tensor  # [B, Lv]
    correlation_a: Tensor  # [B, La]
    correlation_v: Tensor  # [B, Lv]
    q_a: Tensor  # [B, H, d], q̂
    q_v: Tensor  # [B, H, d]


class STELLA(Method):
    Config = STELLAConfig
    title = "STELLA"
    summary = "trains on patches chosen by cross-modal importance and by what the past would lose; memory keeps clips"
    citation = (
        "Lee et al., STELLA: Continual Audio-Video Pre-training with Spatio-Temporal Localized Alignment, ICML 2024"
    )
    cost = (
        "twice the clips a step, the decoder on half their patches; "
        "+ one pass without gradient over all of the current clips, + the matching module"
    )

    random = ("select", "pairs")

    config: STELLAConfig
    avm: AVM

    @classmethod
    def check(cls, model: CAVConfig, config: STELLAConfig, objective: ObjectiveConfig) -> None:
        lengths = {"keep_ratio_a": model.patches_a, "keep_ratio_v": model.patches_v}
        shared = [length for key, length in lengths.items() if getattr(config, key) is None]
        check_kept(objective, shared, config.keep_ratio)
        for key, length in lengths.items():
            if (own := getattr(config, key)) is not None:
                check_kept(objective, [length], own, key)
        check_heads(model.dim, config.heads(model))

    @classmethod
    def columns(cls, model: CAVConfig, config: STELLAConfig) -> dict[str, Column]:
        a, v = (Column(torch.float32, (n,)) for n in (model.patches_a, model.patches_v))
        scores = {"importance_a": a, "importance_v": v, "correlation_a": a, "correlation_v": v}
        return clip_columns(model) | output_columns(model) | query_columns(model, config) | scores

    def setup(self) -> None:
        c, config = self.model.config, self.config
        self.kappa_a, self.kappa_v = config.kappa_a(c), config.kappa_v(c)
        self.avm = AVM(c.dim, config.heads(c), config.beta, c.eps).to(next(self.model.parameters()))  # device and dtype

    def loss(self, batch: Batch) -> Losses:
        a, v = self.model.patches_a(batch.audio), self.model.patches_v(batch.video)
        drawn = self.draw(batch)
        scored = score(self.model, self.avm, a, v, self.config.score_every)
        scores, matching = self.scores(scored, drawn), self.matching(scored)
        del scored  # large, and no longer needed
        kept_a, kept_v = self.choose(a, v, scores, drawn)
        out = self.pretrain(kept_a, kept_v)
        parts = self.parts(out) | {"penalty": self.config.alpha * stored_penalty(out, drawn), "avm": matching}
        return Losses(parts, output_rows(out, batch) | self.remember(batch, scores, kept_a, kept_v))

    def scores(self, scored: Scored, drawn: MemoryBatch | None) -> Scores:
        """Steps 1, 3 and 4: I, q̂ and, against the drawn clips' q̂, C."""
        qk, beta = scored.qk, self.config.beta
        importance_a = selection.importance(qk.q_v, qk.k_a, beta)
        importance_v = selection.importance(qk.q_a, qk.k_v, beta)
        q_a = selection.weighted_query(qk.q_a, importance_a, self.kappa_a)
        q_v = selection.weighted_query(qk.q_v, importance_v, self.kappa_v)
        past = drawn if self.config.correlation else None
        past_a, past_v = (past["q_a"], past["q_v"]) if past is not None else (None, None)
        correlation_a = selection.correlation(qk.k_a, q_v, past_v, importance_a, self.kappa_a)
        correlation_v = selection.correlation(qk.k_v, q_a, past_a, importance_v, self.kappa_v)
        if not self.config.importance:  # after C, which is defined on the most important patches
            importance_a, importance_v = torch.ones_like(importance_a), torch.ones_like(importance_v)
        return Scores(importance_a, importance_v, correlation_a, correlation_v, q_a, q_v)

    def choose(self, a: Patches, v: Patches, scores: Scores, drawn: MemoryBatch | None) -> tuple[Patches, Patches]:
        """Steps 5 and 6: κ patches of the current clips, and of the drawn ones by their stored I and C."""
        if drawn is not None:
            a = Patches.cat([a, self.model.patches_a(drawn["audio"])])
            v = Patches.cat([v, self.model.patches_v(drawn["video"])])
            scores = Scores(**{name: joined(now, drawn, name) for name, now in vars(scores).items()})
        return self.select(a, v, scores)

    def select(self, a: Patches, v: Patches, scores: Scores) -> tuple[Patches, Patches]:
        draw, chosen = self.generators["select"], AUDIO_RULES[self.config.audio]
        num_freq = self.model.config.grid_a[1]
        order_a = chosen(scores.importance_a, scores.correlation_a, draw, num_freq, self.config.chunk)  # [B, La]
        if self.config.video == "blocks":
            grid = self.model.config.grid_v
            order_v = selection.select_blocks(scores.importance_v, scores.correlation_v, draw, grid)  # [B, Lv]
        else:
            order_v = selection.select_patches(scores.importance_v, scores.correlation_v, draw)
        return a.take(order_a[:, : self.kappa_a]), v.take(order_v[:, : self.kappa_v])

    def matching(self, scored: Scored) -> Tensor:
        """Step 2. Its gradient reaches the matching module only."""
        return self.avm.loss(self.model, scored, draw_pairs(len(scored.x_a), self.generators["pairs"]))

    def remember(self, batch: Batch, scores: Scores, kept_a: Patches, kept_v: Patches) -> dict[str, Tensor]:
        """Step 9, besides the pooled outputs: the clips and their scores."""
        return clip_rows(batch) | vars(scores)


def query_columns(model: CAVConfig, config: STELLAConfig) -> dict[str, Column]:
    heads = config.heads(model)
    query = Column(torch.float32, (heads, model.dim // heads))
    return {"q_a": query, "q_v": query}
