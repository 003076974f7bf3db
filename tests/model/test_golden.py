"""Parity with tensors recorded from the published release, in float64, gradients included."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stella import losses, selection
from stella.model.avm import AVM, score
from stella.model.cav import CAV, CAVConfig, Pretrained, split_by_noise
from stella.model.weights import load_into

FOLDER = Path(os.environ.get("STELLA_GOLDEN", Path(__file__).parents[1] / "data" / "golden" / "tiny"))
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no recorded tensors in {FOLDER}; set STELLA_GOLDEN")


class Golden:
    """The recorded case, and our model with the recorded weights."""

    def __init__(self) -> None:
        self.sizes = c = json.loads((FOLDER / "config.json").read_text())
        self.tensors = load_file(FOLDER / "tensors.safetensors")
        self.config = CAVConfig(
            image_size=c["img_size"],
            patch_size=c["patch_size"],
            frames=c["num_frames"],
            spec_frames=c["spec_frames"],
            mel_bins=c["mel_bins"],
            dim=c["dim"],
            depth=c["depth"],
            fusion_from=c["fusion_from"],
            heads=c["heads"],
            dec_dim=c["dec_dim"],
            dec_depth=c["dec_depth"],
            dec_heads=c["dec_heads"],
            eps=c["layernorm_eps"],
        )
        self.model = CAV(self.config).double()
        self.avm = AVM(c["dim"], c["avm_heads"], eps=c["layernorm_eps"]).double()
        load_into(FOLDER / "weights.safetensors", self.model, self.avm)
        self.a = self.model.patches_a(self["in.audio"].squeeze(1))
        self.v = self.model.patches_v(self["in.video"])

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def close(self, value: Tensor, name: str) -> None:
        expected = self[name]
        assert value.dtype == torch.float64
        value = value.detach().reshape(1) if expected.shape == (1,) else value.detach()
        assert value.shape == expected.shape, name
        assert expected.abs().max() > 0, name
        assert (value - expected).abs().max() <= 1e-9 * expected.abs().max(), name

    def objective(self, out: Pretrained, norm_pix: bool) -> dict[str, Tensor]:
        def target(t: Tensor) -> Tensor:
            return losses.norm_pix(t) if norm_pix else t

        contrastive = losses.contrastive(out.z_a, out.z_v, self.sizes["tau"]).mean()
        return {
            "recon_audio": losses.reconstruction(out.recon_a, target(out.target_a)).mean(),
            "recon_video": losses.reconstruction(out.recon_v, target(out.target_v)).mean(),
            "contrastive_weighted": self.sizes["contrast_weight"] * contrastive,
        }


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


def test_encoders(golden: Golden) -> None:
    golden.close(golden.model.encode_a(golden.a), "enc.audio")
    golden.close(golden.model.encode_v(golden.v), "enc.video")


def test_fusion_alone(golden: Golden) -> None:
    golden.close(golden.model.fuse_a(golden["enc.audio"]), "modal.audio")
    golden.close(golden.model.fuse_v(golden["enc.video"]), "modal.video")


def test_fusion_joint(golden: Golden) -> None:
    o_a, o_v = golden.model.fuse_joint(golden["enc.audio"], golden["enc.video"])
    golden.close(o_a, "joint.audio")
    golden.close(o_v, "joint.video")


def test_retrieval_embeddings_are_the_mean_of_fusion_alone(golden: Golden) -> None:
    for ours, name in (
        (golden.model.represent_a(golden["in.audio"].squeeze(1)), "modal.audio"),
        (golden.model.represent_v(golden["in.video"]), "modal.video"),
    ):
        expected = golden[name].mean(1)
        assert (ours - expected).abs().max() <= 1e-9 * expected.abs().max()


@pytest.mark.parametrize(("case", "norm_pix"), [("mask.normpix", True), ("mask.raw", False)])
def test_masked_pretraining_and_its_gradients(golden: Golden, case: str, norm_pix: bool) -> None:
    ratio = golden.sizes["mask_ratio"]
    noise_a, noise_v = golden[f"{case}.noise_audio"], golden[f"{case}.noise_video"]
    split_a = split_by_noise(noise_a, selection.visible(golden.config.patches_a, ratio))
    split_v = split_by_noise(noise_v, selection.visible(golden.config.patches_v, ratio))
    out = golden.model.pretrain(golden.a, golden.v, split_a, split_v)
    golden.close(out.z_a, f"{case}.pooled_audio")
    golden.close(out.z_v, f"{case}.pooled_video")
    parts = golden.objective(out, norm_pix)
    for name, value in parts.items():
        golden.close(value, f"{case}.{name}")

    golden.model.zero_grad()
    sum(parts.values()).backward()
    prefix = f"{case}.grad.transformer."
    recorded = [name for name in golden.tensors if name.startswith(prefix)]
    assert recorded
    for name in recorded:
        golden.close(_release_gradient(golden.model, name.removeprefix(prefix)), name)


def _release_gradient(model: CAV, name: str) -> Tensor:
    """A gradient in the release's layout: convolutions as [D, channel, row, column], tokens as [1, 1, D]."""
    gradient = model.get_parameter(name.replace(".proj.weight", ".weight") if "patch_embed" in name else name).grad
    assert gradient is not None
    if "patch_embed" in name:
        p = model.config.patch_size
        return gradient.view(len(gradient), p, p, -1).permute(0, 3, 1, 2)
    return gradient if "." in name else gradient.view(1, -1, gradient.shape[-1])


def test_pretraining_on_selected_patches(golden: Golden) -> None:
    kept, splits = [], []
    for modality, patches in (("audio", golden.a), ("video", golden.v)):
        order, noise = golden[f"select.order_{modality}"], golden[f"select.noise_{modality}"]
        length = order.shape[1]
        kappa = selection.kappa(length, golden.sizes["keep_ratio"])
        assert noise.shape[1] == kappa
        kept.append(patches.take(order[:, :kappa]))
        splits.append(split_by_noise(noise, selection.visible(length, golden.sizes["mask_ratio"])))
    out = golden.model.pretrain(*kept, *splits)
    golden.close(out.z_a, "select.pooled_audio")
    golden.close(out.z_v, "select.pooled_video")
    for name, value in golden.objective(out, norm_pix=True).items():
        golden.close(value, f"select.{name}")


def test_queries_and_keys(golden: Golden) -> None:
    qk = score(golden.model, golden.avm, golden.a, golden.v).qk
    golden.close(qk.q_a, "score.q_audio")
    golden.close(qk.k_a, "score.k_audio")
    golden.close(qk.q_v, "score.q_video")
    golden.close(qk.k_v, "score.k_video")


def test_importance_and_correlation(golden: Golden) -> None:
    beta, keep = golden.sizes["beta"], golden.sizes["keep_ratio"]
    qk = score(golden.model, golden.avm, golden.a, golden.v).qk
    kappa_a, kappa_v = selection.kappa(golden.config.patches_a, keep), selection.kappa(golden.config.patches_v, keep)
    importance_a, importance_v = selection.importance(qk.q_v, qk.k_a, beta), selection.importance(qk.q_a, qk.k_v, beta)
    golden.close(importance_a, "score.importance_audio")
    golden.close(importance_v, "score.importance_video")
    query_a = selection.weighted_query(qk.q_a, importance_a, kappa_a)
    query_v = selection.weighted_query(qk.q_v, importance_v, kappa_v)
    golden.close(query_a, "rca.query_audio")
    golden.close(query_v, "rca.query_video")
    past_a, past_v = golden["rca.past_query_audio"], golden["rca.past_query_video"]
    golden.close(selection.correlation(qk.k_a, query_v, past_v, importance_a, kappa_a), "rca.correlation_audio")
    golden.close(selection.correlation(qk.k_v, query_a, past_a, importance_v, kappa_v), "rca.correlation_video")
