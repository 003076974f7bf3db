"""CLS-ER and ESMER against plain Python versions of their equations, and the slow weights of both."""

import statistics

import pytest
import torch
from helpers.method_scenes import SHAPES, Told, scenes
from helpers.method_toys import batch, method, plain_losses, plain_parts, spy, train
from torch import Tensor, nn

from stella.data.stream import Stream, StreamConfig
from stella.methods import Method
from stella.methods.esmer import ESMERLosses, trimmed_mean
from stella.model.cav import CAV
from stella.model.slow import SlowWeights
from stella.train.config import TrainConfig
from stella.train.device import runtime
from stella.train.trainer import Trainer

YES, NO = torch.tensor(True), torch.tensor(False)


@torch.no_grad()
def fill(model: nn.Module, value: float) -> None:
    for p in model.parameters():
        p.fill_(value)


@torch.no_grad()
def shake(model: nn.Module, by: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p += by * torch.randn(p.shape, generator=g, dtype=p.dtype)


def copies(one: Method) -> list[SlowWeights]:
    return [module for module in one.modules() if isinstance(module, SlowWeights)]


# ---- the copies


def test_an_average_by_hand() -> None:
    """½·0 + ½·8 = 4; ⅔·4 + ⅓·7 = 5; then the decay 0.7 is less than ¾: 0.7·5 + 0.3·15 = 8; 0.7·8 + 0.3·(-2) = 5."""
    model = method("finetune", dtype=torch.float64).model
    fill(model, 0)
    average = SlowWeights(model, decay=0.7)
    for value, expected in ((8, 4), (7, 5), (15, 8), (-2, 5)):
        fill(model, 1e6)
        average.follow(model, NO)  # neither moves it nor counts
        fill(model, value)
        average.follow(model, YES)
        for p in average.model.parameters():
            torch.testing.assert_close(p, torch.full_like(p, expected), rtol=1e-6, atol=0)


def test_slow_weights_are_a_model_of_their_own() -> None:
    model = method("finetune").model
    average = SlowWeights(model, 0.9)
    for ours, theirs in zip(average.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
        assert theirs.requires_grad and not ours.requires_grad


@pytest.mark.parametrize(
    ("name", "rates", "alphas"),
    [
        ("cls_er", {"rate_stable": 0.6, "rate_plastic": 0.8}, {"alpha_stable": 0.75, "alpha_plastic": 0.85}),
        ("esmer", {"rate": 0.4}, {"alpha": 0.8}),
    ],
)
def test_copies_keep_their_places_in_the_publications(
    name: str, rates: dict[str, float], alphas: dict[str, float]
) -> None:
    """Each with its own draws, decay and rate, over steps some of which are not taken: a loop over plain numbers."""
    one = method(name, clips=0, dtype=torch.float64, **rates, **alphas)
    for model in (one.model, *(copy.model for copy in copies(one))):
        fill(model, 0)
    draws, values = one.generators["ema"].clone_state(), torch.rand(12, generator=torch.Generator().manual_seed(1))
    expected, t = [0.0] * len(rates), 0
    for i, value in enumerate(values.tolist()):
        taken = i % 4 != 2
        fill(one.model, value)
        for copy in copies(one):
            copy.follow(one.model, torch.tensor(taken))
        t += taken
        for which, (rate, alpha) in enumerate(zip(rates.values(), alphas.values(), strict=True)):
            if float(torch.rand((), generator=draws)) < rate and taken:
                decay = min(1 - 1 / (t + 1), alpha)
                expected[which] = decay * expected[which] + (1 - decay) * value
        for copy, mean in zip(copies(one), expected, strict=True):
            assert copy.model.norm.weight[0].item() == pytest.approx(mean, rel=1e-6)
            assert copy.model.decoder_pred_v.bias[-1].item() == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "args"), [("cls_er", {"rate_stable": 1.0, "rate_plastic": 1.0}), ("esmer", {"rate": 1.0, "beta": 1e9})]
)
def test_copies_follow_once_a_step_and_clips_are_offered_batch_by_batch(name: str, args: dict[str, float]) -> None:
    one = method(name, **args)
    stream = Stream([("task1", Told(scenes("task1", 22)))], StreamConfig(batch_size=6, **SHAPES))
    loop = Trainer(one, stream, TrainConfig(lr=1e-3, accumulate=2), runtime("cpu"))
    first = [p.detach().clone() for p in one.model.parameters()]
    loop.advance()
    for copy in copies(one):
        assert copy.steps == 1
        for mean, before, after in zip(copy.model.parameters(), first, one.model.parameters(), strict=True):
            torch.testing.assert_close(mean, (before + after) / 2)
    assert one.memory.seen == 12


@pytest.mark.parametrize("name", ["cls_er", "esmer"])
def test_the_working_model_is_evaluated_unless_the_stable_one_is_asked_for(name: str) -> None:
    one, original = method(name), method(name, evaluate="stable")
    assert one.eval_model is one.model
    train(original, [4, 4, 4, 4, 4, 4])
    assert original.eval_model is original.stable.model
    assert not torch.equal(original.eval_model.norm.weight, original.model.norm.weight)
    assert torch.equal(original.eval_model.pixel_scale, original.model.pixel_scale)


# ---- CLS-ER


def test_each_output_is_taught_by_the_copy_that_is_surer_of_the_true_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen for each clip and for each modality, with the drawn clips as the only negatives."""
    one = method("cls_er", clips=8, weight=0.7, dtype=torch.float64)
    train(one, [8])
    shake(one.stable.model, 0.05, 1)
    shake(one.plastic.model, 0.05, 2)
    calls = spy(monkeypatch, one.model)
    part = one.loss(batch(10, 8)).parts["consistency"]
    *given, out = calls[0]
    assert len(out.z_a) == 18

    def outputs(model: CAV) -> tuple[list[Tensor], list[Tensor], list[float], list[float]]:
        _, z_a, z_v = plain_parts(model, *(x[10:] for x in given))
        unit_a, unit_v = [z / z.norm() for z in z_a], [z / z.norm() for z in z_v]
        similar = torch.stack([torch.stack([a @ v for v in unit_v]) for a in unit_a]) / 0.05
        video = [similar[i].softmax(0)[i].item() for i in range(8)]  # the own video among all, given the audio
        audio = [similar[:, i].softmax(0)[i].item() for i in range(8)]
        return z_a, z_v, audio, video

    (a_s, v_s, sure_a_s, sure_v_s), (a_p, v_p, sure_a_p, sure_v_p) = (
        outputs(one.stable.model),
        outputs(one.plastic.model),
    )
    from_stable = [(sure_a_s[i] > sure_a_p[i], sure_v_s[i] > sure_v_p[i]) for i in range(8)]
    assert {True, False} == {a for a, _ in from_stable} == {v for _, v in from_stable}
    assert any(a != v for a, v in from_stable)
    expected = []
    for i, (a, v) in enumerate(from_stable):
        expected.append((out.z_a[10 + i] - (a_s if a else a_p)[i]).square().mean())
        expected.append((out.z_v[10 + i] - (v_s if v else v_p)[i]).square().mean())
    torch.testing.assert_close(part, 0.7 * sum(expected) / 8)


def test_nothing_is_taught_while_the_memory_is_empty() -> None:
    for one in (method("cls_er"), method("esmer")):
        first, second = train(one, [4, 4])
        assert first["consistency"] == 0
        assert second["consistency"] > 0


# ---- ESMER


def errors_of(one: Method, values: list[float], first: int = 0) -> None:
    """What follows a batch on which the slow copy's losses are these."""
    b, errors = batch(len(values), first), torch.tensor(values, dtype=torch.float32)
    one.after_batch(b, ESMERLosses({}, {"video": b.video, "audio": b.audio}, errors, one.low(errors)))


def test_errors_are_the_copys_losses_of_the_current_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("esmer", dtype=torch.float64)
    train(one, [5])
    shake(one.stable.model, 0.05, 1)
    calls = spy(monkeypatch, one.model)
    made = one.loss(batch(6, 5))
    assert len(calls[0][-1].z_a) == 11
    expected = plain_losses(one.stable.model, *(x[:6] for x in calls[0][:4]))
    torch.testing.assert_close(made.errors, expected)


def test_clips_weigh_less_where_the_copy_errs_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """And memory's clips weigh 1; one mean over all."""
    one = method("esmer", dtype=torch.float64, beta=1.2)
    train(one, [5])
    shake(one.stable.model, 0.05, 1)
    state = one.generators["mask"].get_state(), one.memory.generator.get_state()
    errors = one.loss(batch(6, 5)).errors.tolist()
    one.generators["mask"].set_state(state[0])
    one.memory.generator.set_state(state[1])
    low, high = sorted(errors)[2:4]
    mean = (low + high) / 2 / 1.2
    one.mean.fill_(mean)
    one.updates.fill_(1)
    calls = spy(monkeypatch, one.model)
    parts = one.loss(batch(6, 5)).parts
    weights = [1 if error <= 1.2 * mean else mean / error for error in errors] + [1] * 5
    assert sum(weight == 1 for weight in weights) == 8
    for name, each in one.clip_parts(calls[0][-1]).items():
        expected = sum(weight * part for weight, part in zip(weights, each, strict=True)) / 11
        torch.testing.assert_close(parts[name], expected, rtol=1e-6, atol=0)  # the mean is kept in float32


def test_a_clip_at_the_limit_may_be_remembered_and_weighs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("esmer", beta=2.0, clips=0)
    state = one.generators["mask"].get_state()
    errors = one.loss(batch(6)).errors
    one.generators["mask"].set_state(state)
    one.mean.copy_(errors.sort().values[2] / 2)
    one.updates.fill_(1)
    calls = spy(monkeypatch, one.model)
    made = one.loss(batch(6))
    weights = torch.where(errors < 2 * one.mean, 1, one.mean / errors)
    assert made.admit.sum() == 3 and sorted(weights.tolist())[-3:] == [0.5, 1, 1]
    for name, each in one.clip_parts(calls[0][-1]).items():
        torch.testing.assert_close(made.parts[name], (weights * each).mean())


def test_memorys_clips_are_taught_by_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("esmer", dtype=torch.float64, gamma=0.7)
    train(one, [5])
    shake(one.stable.model, 0.05, 1)
    calls = spy(monkeypatch, one.model)
    part = one.loss(batch(6, 5)).parts["consistency"]
    out = calls[0][-1]
    _, z_a, z_v = plain_parts(one.stable.model, *(x[6:] for x in calls[0][:4]))
    expected = [(out.z_a[6 + i] - z_a[i]).square().mean() + (out.z_v[6 + i] - z_v[i]).square().mean() for i in range(5)]
    torch.testing.assert_close(part, 0.7 * sum(expected) / 5)


def test_what_counts_in_full_may_be_remembered_also_where_a_step_has_several_batches() -> None:
    """μ moves with the first of them, and the others were weighed before."""
    one = method("esmer", clips=40, beta=0.5)
    stream = Stream([("task1", Told(scenes("task1", 24)))], StreamConfig(batch_size=6, **SHAPES))
    Trainer(one, stream, TrainConfig(lr=1e-3, accumulate=4), runtime("cpu")).advance()
    assert one.updates == 4 and len(one.memory) == 24


ERRORS = [[1, 1, 1, 5], [2, 2, 2, 2], [1, 1.05, 1.95, 2], [1, 1, 1, 1, 1, 2.5], [3], [0.4, 9, 0.5, 8, 0.3, 1]]


def test_the_running_mean_by_hand() -> None:
    """The 5 is over 2 + 2, so ½·0 + ½·1 = 0.5; ⅔·0.5 + ⅓·2 = 1; of the third none is over 1.5 + 0.549, and α_l = 0.7 is
    less than ¾: 0.7·1 + 0.3·1.5 = 1.15; of the fourth the 2.5 is left out: 0.7·1.15 + 0.3·1 = 1.105."""
    one = method("esmer", alpha_loss=0.7)
    assert one.low(torch.tensor([0.0, 1e9])).all()  # μ is unknown
    for values, expected in zip(ERRORS, (0.5, 1, 1.15, 1.105), strict=False):
        errors_of(one, values)
        assert one.mean.item() == pytest.approx(expected)


def test_what_is_weighed_remembered_and_averaged_follows_the_definition() -> None:
    """A loop over steps and clips, with plain numbers."""
    one = method("esmer", alpha_loss=0.8, beta=1.1, clips=50)
    mean, held, first = 0.0, [], 0
    for t, values in enumerate([*ERRORS, *reversed(ERRORS)]):
        full = [t == 0 or error <= 1.1 * mean for error in values]
        assert one.low(torch.tensor(values)).tolist() == full
        errors_of(one, values, first)
        held += [first + i for i, enters in enumerate(full) if enters]
        limit = statistics.fmean(values) + (statistics.stdev(values) if len(values) > 1 else 0)
        now = statistics.fmean([error for error in values if error <= limit])
        decay = min(1 - 1 / (t + 2), 0.8)  # after t + 1 updates
        mean = decay * mean + (1 - decay) * now
        first += len(values)
        assert one.mean.item() == pytest.approx(mean, rel=1e-5)
        assert one.memory.ids.tolist() == held
        assert one.memory.seen == len(held)
    assert 0 < len(held) < first


def test_equal_errors_have_a_mean() -> None:
    for n in range(1, 40):
        for value in (0.1, 0.7, 1.3):
            assert trimmed_mean(torch.full((n,), value)).item() == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("before", [[], [1.0, 2.0]])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_error_that_is_not_finite_does_not_spoil_the_mean(before: list[float], bad: float) -> None:
    one = method("esmer")
    if before:
        errors_of(one, before)
    mean = one.mean.clone()
    errors_of(one, [1.0, bad, 1.0])
    assert torch.equal(one.mean, mean) and one.updates == bool(before)
    errors_of(one, [1.0, 1.0])
    assert one.mean.isfinite() and one.mean > 0
