"""Reading run folders, finished or not, and grouping them by experiment."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
from helpers.run_files import edit_config, write_run

from stella.data.scenes import Scenes
from stella.data.scenes.audit import audit
from stella.errors import StellaError
from stella.evaluate.forgetting import summary
from stella.runs.record import Group, Spread, ceilings, flatten, gallery_ceilings, group, read_run, unlike


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one", "stella", 3))
    assert run.finished and run.status == "finished" and run.method == "stella" and run.seed == 3
    assert run.tasks == ["task1", "task2", "task3", "task4"] and run.step == 240
    assert [line["task"] for line in run.evaluations] == [-1, 0, 1, 2, 3]
    assert run.summary == summary(run.evaluations) and run.summary["A"] > 0
    assert run.environment["commit"] == "0123456789abcdef" and len(run.speed) == 9 and len(run.skipped) == 0


def test_an_unknown_method_keeps_its_name(tmp_path: Path) -> None:
    assert [read_run(write_run(tmp_path / m, m)).title for m in ("derpp", "new")] == ["DER++", "new"]


def test_slow_weights_have_a_summary_and_a_group_of_their_own(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(seed), seed=seed, slow=True)) for seed in range(2)]
    (g,) = group(runs)
    lines = [[{**line, **line["slow"]} for line in run.evaluations] for run in runs]
    expected = [summary(each) for each in lines]
    assert [run.summary["slow"] for run in runs] == expected and runs[0].summary["A"] != expected[0]["A"]
    assert g.spread("slow", "A").values == [each["A"] for each in expected]
    assert g.spread("slow", "v2a", "5", "F").values == [each["v2a"]["5"]["F"] for each in expected]
    working, slow = g.versions
    assert working is g and slow.label == "STELLA, slow weights" and slow.progress == "2"
    assert slow.spread("A").values == g.spread("slow", "A").values and slow.tasks == g.tasks
    assert [run.slow for run in slow.runs] == [None, None]


def test_a_run_without_slow_weights_and_an_unfinished_one_have_no_result_of_them(tmp_path: Path) -> None:
    (g,) = group([read_run(write_run(tmp_path / "without"))])
    assert g.runs[0].slow is None and "slow" not in g.runs[0].summary
    assert g.versions == [g] and g.spread("slow", "A").values == []
    (g,) = group([read_run(write_run(tmp_path / "unfinished", slow=True, finished=False))])
    assert g.versions[1].spread("A").values == [] and g.versions[1].progress == "0 of 1"


def test_an_unfinished_run_says_so_and_is_not_in_means(tmp_path: Path) -> None:
    done, going = (
        read_run(write_run(tmp_path / name, seed=i, finished=not i)) for i, name in enumerate(("done", "going"))
    )
    assert not going.finished and going.status == "unfinished: step 120, 2 of 4 tasks evaluated"
    (both,) = group([done, going])
    assert both.finished == [done] and both.spread("A").values == [done.summary["A"]]


def test_a_run_killed_before_its_first_line_can_be_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "new")
    for name in ("metrics.jsonl", "speed.jsonl", "environment.json"):
        (path / name).unlink()
    run = read_run(path)
    assert run.tasks == [] and run.step == 0 and run.status == "unfinished: step 0, 0 of 4 tasks evaluated"
    assert run.summary == {"A": None, "F": None}
    for data, done in (
        ({"source": "scenes"}, "0 of 6 tasks"),
        ({"source": "continual-vs", "path": "x"}, "0 of 8 tasks"),
        ({"source": "folder", "path": "x"}, "0 tasks"),  # its clips would tell
        ({"source": "of another version"}, "0 tasks"),
    ):
        assert replace(run, config={"data": data}).status == f"unfinished: step 0, {done} evaluated"


def test_a_damaged_line_and_a_folder_without_a_run_are_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "damaged")
    (path / "speed.jsonl").write_text('{"kind"\n{"kind": "end"}\n')
    with pytest.raises(StellaError, match=r"line 1 of .*speed\.jsonl is damaged"):
        read_run(path)
    with pytest.raises(StellaError, match=r"config\.json"):
        read_run(tmp_path / "nowhere")


def test_reading_ignores_torn_last_lines_and_changes_no_file_of_a_run_in_progress(tmp_path: Path) -> None:
    path = write_run(tmp_path / "live", finished=False)
    whole = read_run(path).metrics
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    record = {"id": 1, "path": "a.mp4", "reason": "no audio track", "remedy": "leave it out"}
    (path / "skipped.jsonl").write_text(json.dumps(record) + '\n{"id": 2, "pa')
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.iterdir()}
    assert read_run(path).skipped.counts == {"no audio track": 1} and read_run(path).metrics == whole
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.iterdir()} == before


def test_seeds_are_one_experiment_in_the_usual_order(tmp_path: Path) -> None:
    names = ("multitask", "stella", "finetune", "derpp")
    runs = [read_run(write_run(tmp_path / f"{m}{s}", m, s)) for m in names for s in (1, 0)]
    groups = group(runs)
    assert [g.label for g in groups] == ["Finetune", "DER++", "STELLA", "Multitask"]
    assert all([run.seed for run in g.runs] == [0, 1] for g in groups)


def test_one_method_twice_is_labelled_by_what_differs(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / f"{keep}-{seed}", "stella", seed, keep_ratio=keep, chunk=4))
        for keep in (0.375, 0.5)
        for seed in (0, 1)
    ]
    groups = group(runs)
    assert [g.label for g in groups] == ["STELLA (args.keep_ratio=0.375)", "STELLA (args.keep_ratio=0.5)"]
    assert [len(g.runs) for g in groups] == [2, 2]


def test_settings_that_do_not_affect_results_do_not_split_a_group(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    edit_config(paths[1], lambda config: (config["stream"].update(workers=7), config["train"].update(log_every=3)))
    assert len(group(map(read_run, paths))) == 1
    change(paths[1], lr=0.5)
    assert [g.label for g in group(map(read_run, paths))] == ["STELLA (train.lr=0.0001)", "STELLA (train.lr=0.5)"]


def test_a_label_that_would_be_too_long_is_the_folder(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "runs" / name) for name in ("first", "second")]
    change(paths[1], lr=0.5, weight_decay=0.25, beta1=0.75)
    assert [g.label for g in group(map(read_run, paths))] == ["STELLA (runs/first)", "STELLA (runs/second)"]


def test_methods_with_different_settings_give_a_warning(tmp_path: Path) -> None:
    stella = write_run(tmp_path / "stella", "stella", chunk=8)
    paths = [stella, write_run(tmp_path / "er", "er", seed=1), write_run(tmp_path / "er2", "er", seed=2)]
    assert unlike([read_run(path) for path in paths]) is None
    change(paths[2], lr=0.5)
    told = unlike([read_run(path) for path in paths])
    assert told is not None and told.endswith("do not compare methods: train.lr")
    assert unlike([read_run(path) for path in paths[1:]]) is None  # one method: its labels show the difference


def test_a_setting_that_is_not_set_is_no_difference(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    change(paths[2], ema=0.99)
    edit_config(paths[1], lambda config: config["train"].pop("ema"))  # a run from before this setting
    groups = group(map(read_run, paths))
    assert [(g.label, len(g.runs)) for g in groups] == [("STELLA", 2), ("STELLA (train.ema=0.99)", 1)]
    edit_config(paths[0], lambda config: config.update(method="er"))
    assert str(unlike([read_run(path) for path in paths])).endswith("do not compare methods: train.ema")


def change(path: Path, **train: float) -> None:
    edit_config(path, lambda config: config["train"].update(train))


def test_spread_is_mean_and_sample_deviation(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(seed), seed=seed)) for seed in range(3)]
    values = [run.summary["a2v"]["5"]["F"] for run in runs]
    spread = Group("x", runs).spread("a2v", "5", "F")
    assert (spread.mean, spread.deviation) == (mean(values), stdev(values))
    assert str(Spread([1.0, 3.0])) == "2.0 ± 1.4" and str(Spread([2.25])) == "2.2" and str(Spread([])) == "–"
    joint = Group("x", [read_run(write_run(tmp_path / "joint", "multitask"))])
    assert str(joint.spread("F")) == "–" and joint.spread("A").values  # without forgetting
    assert str(Spread([-0.04])) == "0.0" and str(Spread([-0.06])) == "-0.1" and Spread([1.0, 3.0]).short == "2.0"


def test_ceilings_are_the_audit_of_the_evaluation_clips(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one"))
    assert ceilings([run]) == audit({task: Scenes(task, "eval", 24) for task in run.tasks})["mixed"]


def test_one_run_twice_gives_a_warning(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name)) for name in ("one", "two")]
    assert unlike(runs[:1]) is None
    assert "the same configuration and the same seed" in str(unlike(runs))


def test_runs_on_other_data_share_no_ceilings(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / "one")), read_run(write_run(tmp_path / "two", tasks=("task1", "task2")))]
    assert ceilings(runs) is None
    runs[0].config["data"] |= {"source": "folder", "path": "videos"}
    assert ceilings(runs[:1]) == {"chance": pytest.approx(100 / 18)}  # of 96 clips: (1 + 5 + 10) / 3 of 96


@pytest.mark.parametrize(("clips", "chance"), [([10], (10 + 50 + 100) / 3), ([1], 100), ([2, 2], (25 + 100 + 100) / 3)])
def test_chance_is_known_for_any_gallery(clips: list[int], chance: float) -> None:
    assert gallery_ceilings({"source": "folder", "path": "videos"}, clips) == {"chance": pytest.approx(chance)}
    assert gallery_ceilings({"source": "folder", "path": "videos"}) is None


def test_flatten_names_every_leaf() -> None:
    assert flatten({"a": 1, "b": {"c": [1, 2], "d": {"e": None}}}) == {"a": 1, "b.c": [1, 2], "b.d.e": None}
