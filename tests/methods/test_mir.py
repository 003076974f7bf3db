"""MIR against plain versions: loops over clips."""

import pytest
import torch
from helpers.method_toys import batch, batches, method, next_draw, step, train, trainer
from helpers.virtual import losses_of, stepped, virtual_noise


@pytest.mark.parametrize("clips", [7, 30])  # fewer and more than are asked for
def test_mir_keeps_the_candidates_whose_loss_rises_most(clips: int) -> None:
    one = method("mir", clips=clips, dtype=torch.float64, candidates=3)
    train(one, [12, 12, 12])
    b = batch(4, 36)
    candidates = next_draw(one, 12)
    assert len(candidates) == min(clips, 12)
    rows = one.memory.state_dict()["rows"]
    audio, video = rows["audio"][candidates], rows["video"][candidates]
    noise, noise_past = virtual_noise(one, 4, len(candidates))
    after = stepped(one, b, noise)
    with torch.no_grad():
        rises = losses_of(after, audio, video, noise_past) - losses_of(one.model, audio, video, noise_past)
    ranked = sorted(range(len(candidates)), key=lambda i: -rises[i].item())
    chosen = one.draw(b)
    assert chosen.slots.tolist() == [candidates[i].item() for i in ranked[:4]]
    for name, column in rows.items():
        assert torch.equal(chosen[name], column[chosen.slots])


def test_mir_looks_at_candidates_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While memory fills there are more of them each step: the model sees shapes it knows, and takes no more memory."""
    one, sizes = method("mir", clips=30), []
    forward = one.model.forward
    monkeypatch.setattr(one.model, "forward", lambda a, *more: sizes.append(len(a.values)) or forward(a, *more))
    train(one, [4, 4, 4])  # 12 clips: 3 batches of candidates, before and after
    one.draw(batch(4, 12))
    assert sizes[-7:] == [4] + [4, 4, 4] * 2  # the virtual step's own, then candidates'
    train(one, [4, 3])  # 19
    one.draw(batch(4, 19))
    assert sizes[-11:] == [4] + [4, 4, 4, 4, 3] * 2


def test_mir_then_is_er_on_the_clips_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    mir, er, b = method("mir"), method("er"), batch(4, 12)
    train(mir, [6, 6])
    train(er, [6, 6])
    er.model.load_state_dict(mir.model.state_dict())
    states = {key: g.get_state() for key, g in mir.generators.items()}
    memory = mir.memory.generator.get_state()
    chosen = mir.draw(b)
    for key, state in states.items():
        mir.generators[key].set_state(state)
    mir.memory.generator.set_state(memory)
    monkeypatch.setattr(er, "draw", lambda _: chosen)
    ours, theirs = mir.loss(b), er.loss(b)
    assert ours.parts == theirs.parts
    assert ours.rows.keys() == theirs.rows.keys()


def test_mir_replays_as_many_different_clips_as_the_batch_has_or_all_there_are() -> None:
    one = method("mir", clips=6)
    loop = trainer(one)
    for b, replayed in zip(batches([2, 1, 2, 4, 7, 3]), [0, 1, 2, 4, 6, 3], strict=True):
        drawn = one.draw(b)
        assert (0 if drawn is None else len(set(drawn.slots.tolist()))) == replayed
        step(loop, b)
