"""Configurations of downstream runs: names of their folders, what a source has no truth for, and the defaults."""

import pytest

from stella.data.config import data_config
from stella.errors import StellaError
from stella.transfer.config import run_name, transfer_config


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ("runs/c/derpp/seed-0", "classify-derpp-seed-0"),
        ("runs/c/mine.py:Mine/seed-1", "classify-mine.py-Mine-seed-1"),
        ("runs/a", "classify-a"),
        ("random:tiny", "classify-random-tiny"),
        ("m/model.safetensors", "classify-model"),
    ],
)
def test_runs_of_a_comparison_have_folders_of_their_own(source: str, folder: str) -> None:
    assert run_name(transfer_config("classify", None, [f"weights.source={source}"])) == folder


def test_a_source_without_masks_serves_no_segmentation() -> None:
    with pytest.raises(StellaError, match="has no ground truth for segment"):
        data_config({"source": "folder", "path": "x"}).downstream("segment")


def test_defaults_on_public_data_are_the_papers() -> None:
    """Tab. 6: epochs, warm-up, batch, rate, decay; which augmentation; a backbone sees another crop in every epoch."""
    expected = {
        "retrieval": (15, 0, 48, 1e-4, 5e-7, True, False),
        "classify": (10, 0, 48, 1e-4, 5e-7, True, True),
        "segment": (20, 3, 48, 5e-4, 5e-6, "crop", True),
        "events": (15, 2, 12, 1e-3, 5e-6, "crop", True),
    }
    for task, values in expected.items():
        c = transfer_config(task, {"source": "vggsound", "path": "x"})
        s, t = c.stream, c.train
        found = (s.epochs, c.warmup_epochs, s.batch_size, t.lr, t.weight_decay, s.augment, c.head.frozen)
        assert found == values and c.views == 0, task
    own = {"source": "folder", "path": "x"}  # whose features are computed once
    kept = [(c.views, c.stream.augment) for c in (transfer_config(task, own) for task in ("classify", "retrieval"))]
    assert kept == [(1, False), (0, True)]
    trained = transfer_config("classify", own, ["head.frozen=false"])
    assert (trained.views, trained.stream.augment) == (0, True)
    for subset, weight in (("s4", 0.0), ("ms3", 0.5)):
        data = {"source": "avsbench", "path": "x", "subset": subset}
        assert transfer_config("segment", data).head.align == weight
    assert transfer_config("segment", data, ["head.align=0.1"]).head.align == 0.1
