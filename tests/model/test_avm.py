"""The matching module: what it computes, what it is trained on, and that the backbone never feels it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stella import losses
from stella.model.avm import AVM, Scored, draw_pairs, match, score
from stella.model.cav import CAV, PRESETS, preset
from stella.rng import generator

TOY = preset("tiny", image_size=32, spec_frames=32, frames=2, dim=24, dec_dim=16)


@pytest.fixture(scope="module")
def model() -> CAV:
    torch.manual_seed(0)
    return CAV(TOY).double()


@pytest.fixture(scope="module")
def avm() -> AVM:
    torch.manual_seed(1)
    return AVM(TOY.dim, 4).double()


def clips(batch: int) -> tuple[Tensor, Tensor]:
    g = generator("avm", batch)
    audio = torch.randn(batch, TOY.spec_frames, TOY.mel_bins, generator=g, dtype=torch.float64)
    return audio, torch.randn(batch, TOY.frames, 3, TOY.image_size, TOY.image_size, generator=g, dtype=torch.float64)


def scored(model: CAV, avm: AVM, batch: int) -> Scored:
    audio, video = clips(batch)
    return score(model, avm, model.patches_a(audio), model.patches_v(video))


def test_is_3_18_percent_of_the_paper_backbone() -> None:
    base = PRESETS["base"]
    with torch.device("meta"):
        ours, backbone = AVM(base.dim, base.heads), CAV(base)
    module, whole = (sum(p.numel() for p in m.parameters()) for m in (ours, backbone))
    assert round(100 * module / whole, 2) == 3.18
    assert round((module + whole) / 1e6, 1) == 191.4


def test_logits_are_the_plain_computation(avm: AVM) -> None:
    """Each head's attention with loops; pooled over patches, heads side by side, audio values first."""
    g = generator("plain")
    o_a, o_v = (torch.randn(2, n, TOY.dim, generator=g, dtype=torch.float64) for n in (5, 7))
    d = TOY.dim // avm.heads

    def normed(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
        centred = x - x.mean()
        return centred / (centred.square().mean() + norm.eps).sqrt() * norm.weight + norm.bias

    def attend(queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> Tensor:
        heads = []
        for h in range(avm.heads):
            part = slice(h * d, (h + 1) * d)
            seen = []
            for q in queries:
                weights = torch.stack([(q[part] @ k[part] / math.sqrt(d)).exp() for k in keys])
                seen.append(sum(w / weights.sum() * v[part] for w, v in zip(weights, values, strict=True)))
            heads.append(sum(seen) / len(seen))
        return torch.cat(heads)

    expected = []
    for i in range(2):
        a, v = [normed(x, avm.norm_a) for x in o_a[i]], [normed(x, avm.norm_v) for x in o_v[i]]
        q_a, k_a, v_a = ([lin.weight @ x for x in a] for lin in (avm.to_a_q, avm.to_a_k, avm.to_a_v))
        q_v, k_v, v_v = ([lin.weight @ x for x in v] for lin in (avm.to_v_q, avm.to_v_k, avm.to_v_v))
        pooled = torch.cat([attend(q_v, k_a, v_a), attend(q_a, k_v, v_v)])
        expected.append(avm.fc.weight[0] @ (avm.dense.weight @ pooled + avm.dense.bias).tanh() + avm.fc.bias[0])
    torch.testing.assert_close(avm(o_a, o_v), torch.stack(expected), rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 33), st.integers(0, 10_000))
def test_half_is_mismatched_and_no_clip_meets_its_own_video(batch: int, seed: int) -> None:
    pairs = draw_pairs(batch, generator(seed))
    matched, audio, video = pairs.matched.tolist(), pairs.audio.tolist(), pairs.video.tolist()
    assert len(audio) == len(video) == batch // 2
    assert sorted(matched + audio) == list(range(batch))
    assert all(i != j for i, j in zip(audio, video, strict=True))
    if batch >= 4:
        assert sorted(audio) == sorted(video)  # permuted among themselves


def test_every_clip_is_mismatched_about_half_of_the_time() -> None:
    g = generator("often")
    counts = torch.zeros(8)
    for _ in range(2000):
        counts[draw_pairs(8, g).audio] += 1
    assert (counts - 1000).abs().max() < 5 * math.sqrt(2000 / 4)


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_match_is_fusion_of_the_pairs_it_was_given(model: CAV, avm: AVM, batch: int) -> None:
    s, pairs = scored(model, avm, batch), draw_pairs(batch, generator(batch))
    out = match(model, avm, s, pairs)
    a = torch.cat([pairs.matched, pairs.audio])
    v = torch.cat([pairs.matched, pairs.video])
    torch.testing.assert_close(out.logits, avm(*model.fuse_joint(s.x_a[a], s.x_v[v])))
    assert out.labels.tolist() == [1.0] * (batch - batch // 2) + [0.0] * (batch // 2)
    assert torch.isfinite(losses.matching(out.logits, out.labels)).all()


def test_only_the_mismatched_half_is_fused_again(model: CAV, avm: AVM) -> None:
    s = scored(model, avm, 6)
    calls: list[int] = []
    handle = model.blocks_u[0].register_forward_hook(lambda _module, args, _out: calls.append(len(args[0])))
    encoder = model.blocks_a[0].register_forward_hook(lambda *_: calls.append(-1))
    match(model, avm, s, draw_pairs(6, generator(0)))
    handle.remove()
    encoder.remove()
    assert calls == [3]


def test_no_gradient_reaches_the_backbone(model: CAV, avm: AVM) -> None:
    audio, video = clips(4)
    x_a, x_v = model.encode_a(model.patches_a(audio)), model.encode_v(model.patches_v(video))
    o_a, o_v = model.fuse_joint(x_a, x_v)
    attached = Scored(x_a, x_v, o_a, o_v, None, None, avm.project(o_a, o_v))
    out = match(model, avm, attached, draw_pairs(4, generator(0)))
    queries = sum(q.sum() for q in vars(attached.qk).values())
    model.zero_grad()
    avm.zero_grad()
    (losses.matching(out.logits, out.labels).mean() + queries + avm(o_a, o_v).sum()).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in avm.parameters())


def test_learns_to_tell_pairs_apart() -> None:
    """Audio and video that share a code: after some steps, unseen pairs are told apart."""
    torch.manual_seed(0)
    avm, g = AVM(24, 4), generator("learn")
    basis_a, basis_v = torch.randn(2, 4, 24, generator=g)
    optimizer = torch.optim.Adam(avm.parameters(), lr=3e-3)

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        code = torch.randint(4, (64,), generator=g)
        labels = torch.rand(64, generator=g) < 0.5
        other = torch.where(labels, code, (code + torch.randint(1, 4, (64,), generator=g)) % 4)
        noise_a, noise_v = 0.3 * torch.randn(2, 64, 6, 24, generator=g)
        return basis_a[code][:, None] + noise_a, basis_v[other][:, None] + noise_v, labels

    for _ in range(150):
        o_a, o_v, labels = draw()
        optimizer.zero_grad()
        losses.matching(avm(o_a, o_v), labels).mean().backward()
        optimizer.step()
    o_a, o_v, labels = draw()
    assert ((avm(o_a, o_v) > 0) == labels).float().mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_is_eager(model: CAV, avm: AVM, backend: str) -> None:
    """Scoring and matching as one graph without a break, their values and the module's gradients."""
    torch._dynamo.reset()
    audio, video = clips(4)
    pairs = draw_pairs(4, generator("compiled"))

    def loss() -> Tensor:
        found = match(model, avm, score(model, avm, model.patches_a(audio), model.patches_v(video)), pairs)
        return losses.matching(found.logits, found.labels).mean()

    eager = loss()
    expected = torch.autograd.grad(eager, list(avm.parameters()))
    compiled = torch.compile(loss, fullgraph=True, backend=backend)()
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=0)
    torch.testing.assert_close(torch.autograd.grad(compiled, list(avm.parameters())), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("every", [2, 3, 100])
def test_a_patch_that_is_left_out_has_its_neighbours_query_and_key(every: int, model: CAV, avm: AVM) -> None:
    """The patches looked at, of 2 times × 8 mels and of 2 frames of 2 × 2, are scored as if there were no others."""
    audio, video = [n - n % 8 % every for n in range(16)], [0, 0, 2, 2, 4, 4, 6, 6]
    sounds, pictures = clips(3)
    a, v = model.patches_a(sounds), model.patches_v(pictures)
    found = score(model, avm, a, v, every)
    some_a, some_v = (torch.tensor(sorted(set(which))) for which in (audio, video))
    x_a, x_v = model.encode_a(a.take(some_a.expand(3, -1))), model.encode_v(v.take(some_v.expand(3, -1)))
    plain = avm.project(*model.fuse_joint(x_a, x_v, some_a.expand(3, -1), some_v.expand(3, -1)))
    for name, of, some in (("a", audio, some_a), ("v", video, some_v)):
        for kind in "qk":
            alone, spread = (getattr(qk, f"{kind}_{name}") for qk in (plain, found.qk))
            expected = [alone[:, :, some.tolist().index(patch)] for patch in of]
            torch.testing.assert_close(spread, torch.stack(expected, 2))
    pairs = draw_pairs(3, generator("thin"))
    assert match(model, avm, found, pairs).logits.shape == (3,)
