"""STELLA: trains on the patches that carry the audio-video correlation and do not overwrite the past's.

One step (Sec. positive region proposal, forget-robust selection, patch selection), on top of DER++:
1. score all patches of the current clips without gradient: importance I, from the matching module's queries and keys;
2. train the matching module on matched and mismatched pairs;
3. q̂, the mean query of the κ most important patches;
4. correlation C of those patches' keys with the drawn clips' q̂ against their own pair's;
5. prune by C, then draw κ patches by I;
6. the drawn clips are selected anew by their stored I and C;
7. L on the patches selected, 20% of *all* patches visible; 8. DER++'s penalty; 9. the reservoir.

`generators` beside "mask": "select" draws audio's pruning and order, then video's, current clips first; "pairs" draws
step 2's pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stella import selection
from stella.clip import Batch
from stella.errors import ConfigError
from stella.memory import Column, MemoryBatch
from stella.methods.base import (
    Losses,
    MemoryConfig,
    Method,
    ObjectiveConfig,
    check_kept,
    clip_columns,
    clip_rows,
    joined,
    output_columns,
    output_rows,
    penalty,
)
from stella.model.avm import AVM, Scored, check_heads, draw_pairs, matching_loss, score
from stella.model.cav import CAV, CAVConfig, Patches
from stella.rng import generator


@dataclass(frozen=True)
class STELLAConfig:
    """The paper's values on Continual-VS; the last three are for ablations."""

    alpha: float = 0.5  # the penalty's weight
    beta: float = 0.4  # the temperature of importance (0.1 on Continual-AS)
    keep_ratio: float = 0.5  # ρ, of both modalities
    keep_ratio_a: float | None = None  # ρ_a where it differs from keep_ratio
    keep_ratio_v: float | None = None  # ρ_v likewise
    chunk: int = 4  # L_c, time steps of patches
    avm_heads: int | None = None  # none: as many as the model has
    score_every: int = 1  # cheaper scoring: of so many neighbouring patches one is looked at
    audio: Literal["time", "frequency", "free"] = "time"  # what a chunk of audio is: time steps, bands, or none
    importance: bool = True  # false: unpruned patches are drawn uniformly ("RCA only")
    correlation: bool = True  # false: no patch is pruned ("LPIS only")

    def __post_init__(self) -> None:
        least = {"chunk": self.chunk, "score_every": self.score_every, "avm_heads": self.avm_heads}
        if not self.beta > 0 or any(value is not None and value < 1 for value in least.values()):
            given = ", ".join(f"{name}={value}" for name, value in least.items())
            raise ConfigError(f"beta={self.beta} must be above 0, and {given} at least 1")

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
    """What decides over patches. STELLA's memory has a column for each field."""

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

    config: STELLAConfig
    avm: AVM

    def __init__(
        self, model: CAV, config: STELLAConfig, objective: ObjectiveConfig, memory: MemoryConfig, seed: int
    ) -> None:
        super().__init__(model, config, objective, memory, seed)
        c = model.config
        self.beta = config.beta
        self.kappa_a, self.kappa_v = config.kappa_a(c), config.kappa_v(c)
        self.avm = AVM(c.dim, config.heads(c), c.eps).to(next(model.parameters()))  # its device and precision
        self.generators |= {name: generator(seed, name, device=self.device) for name in ("select", "pairs")}

    @classmethod
    def check(cls, model_config: CAVConfig, config: STELLAConfig, objective: ObjectiveConfig) -> None:
        check_kept(config.kappa_a(model_config), model_config.patches_a, objective)
        check_kept(config.kappa_v(model_config), model_config.patches_v, objective)
        check_heads(model_config.dim, config.heads(model_config))

    @classmethod
    def columns(cls, model_config: CAVConfig, config: STELLAConfig) -> dict[str, Column]:
        a, v = (Column(torch.float32, (n,)) for n in (model_config.patches_a, model_config.patches_v))
        scores = {"importance_a": a, "importance_v": v, "correlation_a": a, "correlation_v": v}
        return clip_columns(model_config) | output_columns(model_config) | query_columns(model_config, config) | scores

    def loss(self, batch: Batch) -> Losses:
        a, v = self.model.patches_a(batch.audio), self.model.patches_v(batch.video)
        drawn = self.draw(batch)
        scored = score(self.model, self.avm, a, v, self.config.score_every)
        scores, matching = self.scores(scored, drawn), self.matching(scored)
        del scored  # large, and not needed any more
        kept_a, kept_v = self.choose(a, v, scores, drawn)
        out = self.pretrain(kept_a, kept_v)
        parts = self.parts(out) | {"penalty": self.config.alpha * penalty(out, drawn), "avm": matching}
        return Losses(parts, output_rows(out, batch) | self.remember(batch, scores, kept_a, kept_v))

    def scores(self, scored: Scored, drawn: MemoryBatch | None) -> Scores:
        """Steps 1, 3 and 4: I, q̂ and, against the drawn clips' q̂, C."""
        qk, beta = scored.qk, self.beta
        importance_a = selection.importance(qk.q_v, qk.k_a, beta)
        importance_v = selection.importance(qk.q_a, qk.k_v, beta)
        q_a = selection.weighted_query(qk.q_a, importance_a, self.kappa_a)
        q_v = selection.weighted_query(qk.q_v, importance_v, self.kappa_v)
        past = drawn if self.config.correlation else None
        past_a, past_v = (past["q_a"], past["q_v"]) if past is not None else (None, None)
        correlation_a = selection.correlation(qk.k_a, q_v, past_v, importance_a, self.kappa_a)
        correlation_v = selection.correlation(qk.k_v, q_a, past_a, importance_v, self.kappa_v)
        if not self.config.importance:  # only now: C is about the patches that attention finds important
            importance_a, importance_v = torch.ones_like(importance_a), torch.ones_like(importance_v)
        return Scores(importance_a, importance_v, correlation_a, correlation_v, q_a, q_v)

    def choose(self, a: Patches, v: Patches, scores: Scores, drawn: MemoryBatch | None) -> tuple[Patches, Patches]:
        """Steps 5 and 6: κ patches of the current clips, and anew of the drawn ones by their stored I and C."""
        if drawn is not None:
            a = Patches.cat([a, self.model.patches_a(drawn["audio"])])
            v = Patches.cat([v, self.model.patches_v(drawn["video"])])
            scores = Scores(**{name: joined(now, drawn, name) for name, now in vars(scores).items()})
        return self.select(a, v, scores)

    def select(self, a: Patches, v: Patches, scores: Scores) -> tuple[Patches, Patches]:
        draw, chosen = self.generators["select"], AUDIO_RULES[self.config.audio]
        num_freq = self.model.config.grid_a[1]
        order_a = chosen(scores.importance_a, scores.correlation_a, draw, num_freq, self.config.chunk)  # [B, La]
        order_v = selection.select_patches(scores.importance_v, scores.correlation_v, draw)  # [B, Lv]
        return a.take(order_a[:, : self.kappa_a]), v.take(order_v[:, : self.kappa_v])

    def matching(self, scored: Scored) -> Tensor:
        """Step 2: the matching module's own loss, which reaches nothing but the module."""
        pairs = draw_pairs(len(scored.x_a), self.generators["pairs"])
        return matching_loss(self.model, self.avm, scored, pairs)

    def remember(self, batch: Batch, scores: Scores, kept_a: Patches, kept_v: Patches) -> dict[str, Tensor]:
        """Step 9, beside the pooled outputs: the clips and their scores."""
        return clip_rows(batch) | vars(scores)


def query_columns(model: CAVConfig, config: STELLAConfig) -> dict[str, Column]:
    heads = config.heads(model)
    query = Column(torch.float32, (heads, model.dim // heads))
    return {"q_a": query, "q_v": query}
