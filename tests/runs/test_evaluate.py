"""`stella evaluate` repeats what a run measured after its last task, from its files alone."""

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.media_files import CLIPS
from helpers.run_files import edit_config, write_run
from helpers.small import quick
from rich.console import Console

from stella.config import resolve
from stella.data.config import data_config
from stella.errors import StellaError
from stella.model import weights
from stella.model.weights import read_inputs
from stella.runs import evaluate
from stella.runs.config import RunConfig, settle
from stella.runs.evaluate import evaluate_weights
from stella.runs.loop import pretrain, resume
from stella.runs.progress import Display

QUIET = Console(file=io.StringIO())
SCENES = ("data.clips=8", "data.eval_clips=8", 'data.tasks=["task1", "task2"]')


def test_a_run_is_evaluated_as_it_evaluated_itself_at_its_own_beta(tmp_path: Path) -> None:
    result = pretrain(quick("stella", "args.beta=0.05", *SCENES), tmp_path, console=QUIET)
    found, last = evaluate_weights(str(tmp_path)), result.evaluations[-1]
    for key in ("recall", "modality_gap", "avm_accuracy", "importance_ratio", "clips"):
        assert found[key] == last[key], key
    loaded = weights.load(tmp_path / "model.safetensors")
    assert loaded.avm is not None and loaded.avm.beta == 0.05
    loaded.avm.beta = 4.0
    weights.save(tmp_path / "model.safetensors", loaded.model, loaded.avm)
    assert evaluate_weights(str(tmp_path))["importance_ratio"] != found["importance_ratio"]
    assert any(ratio is not None for ratio in found["importance_ratio"])


def test_a_shipped_name_means_the_shipped_weights_where_a_run_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pretrain(quick("finetune", *SCENES), Path("base-tiny"), console=QUIET)
    found = evaluate_weights("base-tiny", None, ["data.eval_clips=4", 'data.tasks=["task2"]'])
    assert found["tasks"] == ["task2"]
    assert settle(resolve(RunConfig, None, ["model.weights=base-tiny"])).model.weights == "base-tiny"
    shutil.copytree("base-tiny", "mine")
    assert settle(resolve(RunConfig, None, ["model.weights=mine"])).model.weights == str(tmp_path / "mine")


def test_it_says_which_clips_it_embeds_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []

    class Heard(Display):
        @contextmanager
        def clips(self, total: int, when: str = "") -> Iterator[Callable[[str, int], None]]:
            told.append(("of", total))
            yield lambda what, count: told.append((what, count))

    monkeypatch.setattr(evaluate, "Display", Heard)
    few = ["data.eval_clips=4", 'data.tasks=["task2"]']
    for given in (few, ["data.source=scenes", *few]):
        console = Console(file=(file := io.StringIO()), width=200)
        evaluate_weights("base-tiny", None, given, console)
        assert (
            file.getvalue().splitlines()
            == [
                "evaluating base-tiny on 4 clips of 1 task, rendered scenes, the embedded benchmark",
                "for clips of your own give data.source=folder data.path=VIDEOS",
            ][: 1 + (given is few)]
        )
    assert told == 2 * [("of", 4), ("embedding task2", 4), ("of", 4), ("matching task2", 4)]


def test_a_run_is_evaluated_on_another_source_without_the_keys_of_its_own(tmp_path: Path) -> None:
    """Its sizes, its cache and its tasks are those of scenes."""
    pretrain(quick("finetune", *SCENES), tmp_path, console=QUIET)
    clips = Path(__file__).parents[1] / "data" / "clips"
    values = ["data.source=folder", f"data.path={clips}", "stream.workers=1"]
    found = evaluate_weights(str(tmp_path), None, values)
    assert (found["tasks"], found["clips"], found["data"]["eval_clips"]) == (["all"], [10], 8)
    with pytest.raises(StellaError, match=r"data\.size is not a key of data\.source=folder"):
        evaluate_weights(str(tmp_path), None, [*values, "data.size=scenes"])


def test_files_are_decoded_as_the_weights_say() -> None:
    """So that embeddings are those of `stella embed`; a size that is given stays."""
    for given, size in ((), 96), (("data.short_side=100",), 100), (("data.pixels=96",), 110):
        values = ["data.source=folder", f"data.path={CLIPS}", *given]
        found = data_config(evaluate_weights("base-small", None, values)["data"]).inputs()
        assert found == replace(read_inputs("base-small"), size=size)


def test_the_slow_weights_of_a_run_can_be_evaluated(tmp_path: Path) -> None:
    result = pretrain(quick("finetune", "train.ema=0.9", *SCENES), tmp_path / "run", console=QUIET)
    found, last = evaluate_weights(str(tmp_path / "run"), slow=True), result.evaluations[-1]
    assert found["recall"] == last["slow"]["recall"] and found["modality_gap"] == last["slow"]["modality_gap"]
    (tmp_path / "run" / "slow.safetensors").unlink()
    for model in (str(tmp_path / "run"), "base-tiny"):
        with pytest.raises(StellaError, match="has no slow weights; give a run that was trained with"):
            evaluate_weights(model, slow=True)


def test_a_run_of_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    edit_config(run, lambda config: config["data"].update(pixels=224))  # a key of every source, once
    for refused in (lambda: evaluate_weights(str(run)), lambda: resume(run, console=QUIET)):
        with pytest.raises(StellaError, match=r"was written by another version of stella \(data\.pixels .*start"):
            refused()


def test_a_downstream_run_is_refused_as_what_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    edit_config(run, lambda config: (config.pop("method"), config.update(task="classify")))
    for refused in (lambda: evaluate_weights(str(run)), lambda: resume(run, console=QUIET)):
        with pytest.raises(StellaError, match=r"is a run of stella transfer; .* stella transfer --resume"):
            refused()


def test_weights_of_other_sizes_are_refused_before_a_run_starts(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match=r"base-tiny.* does not fit this run: image_size was 96 and is now 32"):
        pretrain(quick("finetune", "model.weights=base-tiny"), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


def test_an_unfinished_run_has_no_weights_to_evaluate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StellaError, match="is not finished and has no weights yet; continue it with"):
        evaluate_weights(str(tmp_path))
