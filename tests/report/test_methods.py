"""`stella methods`: the table of all methods, narrow enough for a pipe, and one method in detail."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from stella.cli import app
from stella.columns import bytes_per_clip
from stella.methods import METHODS
from stella.methods.ablations import AblationConfig
from stella.model.cav import CAV, PRESETS, CAVConfig, preset, split_by_noise
from stella.report.methods import format_bytes, hyper_parameters, step_flop
from stella.selection import visible


def shown(*args: str) -> str:
    done = CliRunner().invoke(app, ["methods", *args])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_table_lists_all_methods_in_order_with_the_size_of_their_memory() -> None:
    lines = shown().splitlines()
    firsts = [line.split()[0] for line in lines if line[:3].strip() and line[2:3].strip()]
    blocks = {name: firsts.index(name) for name in METHODS}
    assert list(blocks.values()) == sorted(blocks.values())
    assert max(map(len, lines)) <= 100
    text = " ".join(shown().split())
    assert "887 kB a clip" in text and "1.77 GB for 2,000" in text and "Buzzega et al., NeurIPS 2020" in text


def test_the_table_of_models_has_their_parameters_flops_and_bytes() -> None:
    rows = {line.split()[0]: line.split() for line in shown().splitlines() if "GiB" in line and " M " in line}
    assert list(rows) == list(PRESETS)
    assert rows["base"][-5:] == ["185.5", "M", "408.1", "2.76", "GiB"]  # results/speed: DER++ has twice these FLOPs
    assert rows["large"][1:] == ["1024", "2", "×", "22", "+", "2,", "8", "610.1", "M", "769.5", "9.09", "GiB"]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        passes(PRESETS["tiny"])
    assert counter.get_total_flops() / 2 == pytest.approx(step_flop(PRESETS["tiny"]), rel=0.03)  # plain attention: less


def passes(config: CAVConfig) -> None:
    """Two clips forward and back."""
    c, gen = config, torch.Generator().manual_seed(0)
    model = CAV(c)
    a = model.patches_a(torch.rand(2, c.spec_frames, c.mel_bins, generator=gen))
    v = model.patches_v(torch.rand(2, c.frames, 3, c.image_size, c.image_size, generator=gen))
    splits = [split_by_noise(torch.rand(2, n, generator=gen), visible(n, 0.8)) for n in (c.patches_a, c.patches_v)]
    out = model.pretrain(a, v, *splits)
    sum(t.sum() for t in (out.z_a, out.z_v, out.recon_a, out.recon_v)).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", METHODS)
def test_one_method_shows_its_hyper_parameters_and_every_column(name: str) -> None:
    text, method = shown(name), METHODS[name]
    words = text.split()
    assert " ".join(method.citation.split()) in " ".join(words)
    for parameter, default, _, _ in hyper_parameters(method.Config):
        given = {"None": "none", "True": "true", "False": "false"}.get(str(default), str(default))
        assert any(line.split()[:2] == [parameter, given] for line in text.splitlines())
    columns = method.columns(preset("base"), method.Config())
    if columns is None:
        assert "No memory" in text
    else:
        assert all(name in words and f"{column.bytes:,}" in words for name, column in columns.items())
        assert f"{bytes_per_clip(columns):,}" in words


def test_types_are_told_in_words() -> None:
    text = " ".join(shown("stella").split())
    assert "frequency or free" in text and "float or none" in text and "Literal" not in text and "None" not in text


def test_field_comments_are_read_also_from_base_classes() -> None:
    assert hyper_parameters(METHODS["finetune"].Config) == []
    assert hyper_parameters(METHODS["derpp"].Config) == [
        ("draws", 1.0, "float", "past clips for each current one"),
        ("alpha", 0.5, "float", "weight of the penalty (1.0 on Continual-AS)"),
    ]
    assert [name for name, *_ in hyper_parameters(AblationConfig)] == ["draws", "alpha", "keep_ratio"]
    assert hyper_parameters(AblationConfig)[1][3]

    @dataclass
    class Needs:
        value: int

    assert hyper_parameters(Needs) == [("value", "required", "int", "")]


def test_an_unknown_method_is_refused_with_the_list() -> None:
    done = CliRunner().invoke(app, ["methods", "stela"])
    assert done.exit_code and "did you mean stella? (known: initial, matching, finetune" in str(done.exception)


def test_bytes_have_three_digits() -> None:
    assert [format_bytes(n) for n in (8, 864_264, 1_467_000, 1_728_528_000)] == ["8 B", "864 kB", "1.47 MB", "1.73 GB"]
