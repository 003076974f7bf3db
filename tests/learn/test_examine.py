"""Clips that are set aside go through the model in batches of one size, and come out as they do one by one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.learning import config_for, packed, quiet

import stella
from stella.evaluate import matching, retrieval
from stella.learn.examine import BATCH, in_full_batches
from stella.learn.held import HeldOut, kept
from stella.learn.home import Home, Settings
from stella.learn.loop import learn
from stella.learn.vectors import read_vectors
from stella.model.cav import Patches


@pytest.mark.parametrize("clips", [1, BATCH - 1, BATCH, BATCH + 1])
def test_only_the_last_clip_is_repeated(clips: int) -> None:
    source: Any = list(range(clips))
    full = in_full_batches(source)
    assert len(full) % BATCH == 0 and [full[i] for i in range(len(full))][:clips] == source
    assert {full[i] for i in range(clips, len(full))} <= {clips - 1} and len(full) < clips + BATCH


def test_all_passes_have_one_size_and_all_clips_their_own_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, list[int]] = {"unit_a": [], "unit_v": [], "score": []}

    def noted(module: Any, name: str, position: int) -> None:
        plain: Callable[..., Any] = getattr(module, name)

        def call(*given: Any) -> Any:
            passed = given[position]
            sizes[name].append(len(passed.values if isinstance(passed, Patches) else passed))
            return plain(*given)

        monkeypatch.setattr(module, name, call)

    noted(retrieval, "unit_a", 1)
    noted(retrieval, "unit_v", 1)
    noted(matching, "score", 2)
    sources = packed(tmp_path / "in", (30, 19, 23))
    home = tmp_path / "home"
    learn(home, sources, config_for(sources[0], method="stella"), Settings(share=0.4), clips=30, console=quiet())
    assert all(found and set(found) == {BATCH} for found in sizes.values())

    monkeypatch.undo()
    opened = Home(home)
    held = HeldOut(opened.held, kept(opened.plans(), 1000))
    assert len(held) > BATCH and len(held) % BATCH
    model, config = stella.load(home).cav, replace(opened.config.stream, batch_size=1, workers=0)
    one_by_one = retrieval.embed(model, held, config)
    vectors = read_vectors(opened.round(opened.current).embeddings)
    assert vectors.keys() == set(held.keys)
    for key, a, v in zip(held.keys, one_by_one.a, one_by_one.v, strict=True):
        torch.testing.assert_close(vectors[key][0], a, rtol=0, atol=1e-5)
        torch.testing.assert_close(vectors[key][1], v, rtol=0, atol=1e-5)
