"""The pictures that a run keeps for its page: they show what the evaluation found."""

import io
from base64 import b64decode
from typing import Any

import av
import pytest
import torch
from helpers.noise import Noise

from stella.data.stream import StreamConfig, evaluation_batches
from stella.evaluate.examples import FOUND, QUERIES, SIDE, _heat, examples
from stella.evaluate.retrieval import embed, ranks
from stella.model.avm import AVM, score
from stella.model.cav import CAV, preset
from stella.selection import importance

STREAM = StreamConfig(batch_size=4, size=32, spec_frames=64)


def decoded(picture: str) -> tuple[int, int]:
    with av.open(io.BytesIO(b64decode(picture)), format="jpeg_pipe") as container:
        frame = next(container.decode(video=0))
        return frame.width, frame.height


@pytest.mark.parametrize(("clips", "queries"), [(5, QUERIES), (1, 2)])
def test_examples_show_what_the_evaluation_found(clips: int, queries: int) -> None:
    torch.manual_seed(0)
    model = CAV(preset("tiny", image_size=32, spec_frames=64, frames=4)).eval()
    tasks: Any = [(name, Noise(number, clips, name)) for number, name in enumerate(("one", "two"))]
    embeddings = [embed(model, source, STREAM) for _, source in tasks]
    a, v = torch.cat([e.a for e in embeddings]), torch.cat([e.v for e in embeddings])
    for avm in (None, AVM(model.config.dim, model.config.heads)):
        found = examples(model, avm, tasks, embeddings, STREAM)
        rows = [number * 2 * clips // queries for number in range(queries)]
        assert [query["task"] for query in found] == ["one" if row < clips else "two" for row in rows]
        assert [query["rank"] for query in found] == ranks(a, v)[rows].tolist()
        for query, row in zip(found, rows, strict=True):
            nearest = (a[row].double() @ v.double().T).argsort(descending=True)[:FOUND].tolist()
            assert [hit["task"] for hit in query["found"]] == ["one" if each < clips else "two" for each in nearest]
            assert [hit["right"] for hit in query["found"]] == [each == row for each in nearest]
            assert query["of"] == 2 * clips and decoded(query["picture"]) == (SIDE, SIDE)
            if avm is None:
                assert query["heat"] is None
            else:
                heat = torch.tensor(query["heat"])
                assert heat.shape == model.config.grid_v[1:] and heat.min() >= 0 and heat.max() == 1


def test_a_heat_map_is_the_importance_of_the_picture_for_its_sound() -> None:
    torch.manual_seed(0)
    model = CAV(preset("tiny", image_size=32, spec_frames=64, frames=4)).eval()
    avm = AVM(model.config.dim, model.config.heads)
    batch = next(evaluation_batches(Noise(0, 3), STREAM, torch.device("cpu")))
    qk = score(model, avm, model.patches_a(batch.audio), model.patches_v(batch.video)).qk
    by_sound = importance(qk.q_a, qk.k_v, avm.beta).view(3, *model.config.grid_v)
    for found, want in zip(_heat(model, avm, batch), by_sound, strict=True):
        torch.testing.assert_close(found, (want - want.min()) / (want.max() - want.min()))
