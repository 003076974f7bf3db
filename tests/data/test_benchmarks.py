"""Continual-VS and Continual-AS out of shards, and out of a list beside videos."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.media_files import level_frame, tone, write, write_video

from stella.clip import labels_of, names_of
from stella.data.accounts import write_listed
from stella.data.archives.benchmarks import (
    AudioSetConfig,
    ContinualASConfig,
    ContinualVSConfig,
    InitialVSConfig,
    VGGSoundConfig,
)
from stella.data.archives.rows import Row, read_rows
from stella.data.material import recognise
from stella.data.prepare import prepare
from stella.data.scenes.archive import archive
from stella.data.shards import sample
from stella.data.tasks import Tasks
from stella.data.writer import ShardWriter
from stella.errors import ClipError, StellaError

SPORT, TUNE, OTHER = "motorboat, speedboat acceleration", "playing banjo", "zebra braying"
HEADER = "# a\n# b\n# YTID, start_seconds, end_seconds, positive_labels\n"


def store(folder: Path, rows: Sequence[Row], lists: Sequence[Path] = ()) -> Path:
    """Shards of these clips, as `stella prepare --csv` leaves them: tiny pictures, a tenth of a second."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder)
    writer.turn("shard-000000")
    frames, sound = torch.zeros(1, 3, 16, 16, dtype=torch.uint8), torch.full((1600,), 0.1)
    for row in rows:
        meta = {"id": row.id, "source": f"x.tar.gz/{row.id}.mp4", "start": 0.0, "duration": 0.1}
        meta |= {"label": row.classes[0], "row": row.number, "split": row.split, "nth": row.nth}
        writer.append(sample(meta | {"classes": list(row.classes)}, frames, sound, 10))
    writer.close()
    return folder


def ids(tasks: Tasks) -> dict[str, list[str]]:
    return {name: [source[i].id for i in range(len(source))] for name, source in tasks}


def vggsound(file: Path, clips: Sequence[tuple[str, str, str]]) -> list[Row]:
    file.write_text("".join(f'{video},3,"{label}",{split}\n' for video, label, split in clips))
    return read_rows([file])


def test_continual_vs_out_of_shards(tmp_path: Path) -> None:
    clips = [(f"s{n}", SPORT, "train") for n in range(5)] + [(f"b{n}", TUNE, "train") for n in range(3)]
    clips += [(f"q{n}", label, "test") for n, label in enumerate([SPORT] * 7 + [TUNE] * 2)]
    clips += [("z", OTHER, "train"), ("zt", OTHER, "test")]
    rows = vggsound(tmp_path / "vggsound.csv", clips)
    missing = {"s1", "b0", "q1"}
    have = [row for row in rows if row.video not in missing]
    root = store(tmp_path / "shards", list(reversed(have)))
    config = ContinualVSConfig(path=str(root), tasks=("music", "sports"))
    assert ids(config.train_tasks()) == {
        "music": ["b1_000003", "b2_000003"],
        "sports": ["s0_000003", "s2_000003", "s3_000003", "s4_000003"],
    }
    gallery = ids(config.eval_tasks())  # the first five that are there, in the order of the list
    assert gallery["sports"] == [f"q{n}_000003" for n in (0, 2, 3, 4, 5)] and gallery["music"] == [
        "q7_000003",
        "q8_000003",
    ]
    [remark] = config.remarks()
    assert "6 training clips are here (music 2, sports 4); the paper has 6,000 to 8,000 a task" in remark
    parts = config.downstream("classify")
    assert len(parts.classes) == 40 and len(parts.train) + len(parts.validation) == 6 and not parts.several
    assert ids([("all", parts.test)])["all"] == [
        f"q{n}_000003" for n in (7, 8, 0, 2, 3, 4, 5, 6)
    ]  # beyond five a class
    assert len(config.downstream("retrieval").test) == 7
    whole = VGGSoundConfig(path=str(store(tmp_path / "partial", rows[5:])))  # no training clip of sports
    assert ids([("all", whole.downstream("classify").test)])["all"] == ["q7_000003", "q8_000003", "zt_000003"]
    with pytest.raises(StellaError, match="has no train clips of vehicle"):
        ContinualVSConfig(path=str(root), tasks=("vehicle",)).train_tasks()
    with pytest.raises(StellaError, match="has no task opera"):
        ContinualVSConfig(path=str(root), tasks=("opera",))
    whole = VGGSoundConfig(path=str(root))
    assert [len(source) for _, source in whole.train_tasks()] == [7] and whole.train_tasks()[0][0] == "all"
    assert ids(InitialVSConfig(path=str(root)).train_tasks()) == {"all": ["z_000003"]}
    assert ids(InitialVSConfig(path=str(root)).eval_tasks()) == {"all": ["zt_000003"]}


def test_only_the_first_400_listed_of_a_class_are_trained_on(tmp_path: Path) -> None:
    rows = vggsound(tmp_path / "vggsound.csv", [(f"s{n}", SPORT, "train") for n in range(402)])
    root = store(tmp_path / "shards", [rows[n] for n in (0, 399, 400, 401)])
    config = ContinualVSConfig(path=str(root), tasks=("sports",))
    assert ids(config.train_tasks()) == {"sports": ["s0_000003", "s399_000003"]}


def test_continual_as_leaves_out_clips_in_several_tasks(tmp_path: Path) -> None:
    names = {"/m/01": "Banjo", "/m/02": "Giggle", "/m/03": "Speech", "/m/04": "Harp"}
    (tmp_path / "class_labels_indices.csv").write_text("".join(f'0,{mid},"{name}"\n' for mid, name in names.items()))
    train = 'a, 0.0, 10.0, "/m/03,/m/01"\nb, 0.0, 10.0, "/m/01,/m/02"\nc, 0.0, 10.0, "/m/03"\nd, 0.0, 10.0, "/m/02"\n'
    (tmp_path / "balanced_train_segments.csv").write_text(HEADER + train)
    (tmp_path / "eval_segments.csv").write_text(HEADER + 'e, 0.0, 10.0, "/m/04"\nf, 0.0, 10.0, "/m/02"\n')
    rows = read_rows([tmp_path / "balanced_train_segments.csv", tmp_path / "eval_segments.csv"])
    root = store(tmp_path / "shards", rows)
    config = ContinualASConfig(path=str(root), tasks=("human", "music"))
    assert ids(config.train_tasks()) == {"human": ["d_000000"], "music": ["a_000000"]}
    assert names_of(config.train_tasks()[1][1], [0]) == ["Banjo"]  # not Speech, which no task has
    assert ids(config.eval_tasks()) == {"human": ["f_000000"], "music": ["e_000000"]}
    whole = AudioSetConfig(path=str(root))
    assert len(whole.train_tasks()[0][1]) == 4
    parts = whole.downstream("classify")  # with all classes of a clip, and those of all training clips
    assert parts.several and parts.classes == ("Banjo", "Giggle", "Speech") and len(parts.test) == 2
    found = {source[i].id: source[i].labels for source in (parts.train, parts.validation) for i in range(len(source))}
    assert {id[0]: {labels.name, *labels.others} for id, labels in found.items()} == {
        "a": {"Speech", "Banjo"},
        "b": {"Banjo", "Giggle"},
        "c": {"Speech"},
        "d": {"Giggle"},
    }
    [(_, banjos)] = ContinualASConfig(path=str(root), tasks=("music",)).train_tasks()
    assert (banjos[0].labels.name, banjos[0].labels.others) == ("Banjo", ("Speech",))
    vgg = store(tmp_path / "vgg", vggsound(tmp_path / "v.csv", [("v", OTHER, "train"), ("w", SPORT, "train")]))
    both = InitialVSConfig(path=str(vgg), audioset=str(root))
    assert ids(both.train_tasks()) == {"all": ["v_000003", "c_000000", "d_000000"]}  # Banjo is a later class


def test_a_list_beside_videos_serves_without_preparation(tmp_path: Path) -> None:
    write_video(tmp_path / "a_000003.mp4")
    (tmp_path / "some/where").mkdir(parents=True)
    muted = [level_frame(n) for n in range(8)], 0 * tone(1, 16_000)  # kept, as `stella prepare` keeps it
    write(tmp_path / "some/where/b_3000_13000.mp4", *muted, fps=8)
    write_video(tmp_path / "t_000003.mp4", seed=2)
    vggsound(
        tmp_path / "vggsound.csv",
        [("a", SPORT, "train"), ("b", SPORT, "train"), ("gone", SPORT, "train"), ("t", SPORT, "test")],
    )
    sizes: dict[str, Any] = {"pixels": 32, "duration": 1.0, "span": None}
    config = ContinualVSConfig(path=str(tmp_path), tasks=("sports",), **sizes)
    [(_, source)] = config.train_tasks()
    assert [source[i].id for i in range(len(source))] == ["a_000003", "b_000003"] and source[0].labels.name == SPORT
    assert labels_of(source, [0])[0].others == ()
    assert "2 training clips of 3 listed are here (sports 2 of 3)" in config.remarks()[0]
    with pytest.raises(StellaError, match=r"holds neither shards nor vggsound\.csv"):
        ContinualVSConfig(path=str(tmp_path / "some")).train_tasks()


def test_whole_videos_beside_a_list_are_read_where_it_says(tmp_path: Path) -> None:
    frames = [level_frame(10 * second) for second in range(20)]
    write(tmp_path / "a.mp4", frames, tone(20.0, 16_000), fps=1)
    write(tmp_path / "b.mp4", frames[:10], tone(10.0, 16_000), fps=1)
    listed = [("a", 4), ("a", 12), ("b", 7), ("b", 9)]
    (tmp_path / "vggsound.csv").write_text("".join(f"{video},{start},{TUNE},train\n" for video, start in listed))
    [(_, source)] = VGGSoundConfig(path=str(tmp_path), pixels=32, duration=2.0).train_tasks()
    levels = [float(source[i].video.float().mean()) for i in range(2)]
    assert levels == pytest.approx([45, 125], abs=6)
    for index in (2, 3):
        with pytest.raises(ClipError, match="ambiguous name"):
            source[index]
    (tmp_path / "a cut").mkdir()
    for name, level in (("b_000007", 200), ("b_000009", 220)):  # found before b.mp4, and meant
        write(tmp_path / "a cut" / f"{name}.mp4", [level_frame(level)] * 10, tone(10.0, 16_000), fps=1)
    [(_, source)] = VGGSoundConfig(path=str(tmp_path), pixels=32, duration=2.0).train_tasks()
    levels = {source[i].id: float(source[i].video.float().mean()) for i in range(4)}
    assert levels["b_000007"] == pytest.approx(200, abs=6) and levels["b_000009"] == pytest.approx(220, abs=6)


def test_shards_without_a_list_are_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.turn("shard-000000")
    meta = {"id": "a.mp4", "source": "a.mp4", "start": 0.0, "duration": 0.1}
    writer.append(sample(meta, torch.zeros(1, 3, 16, 16, dtype=torch.uint8), torch.full((1600,), 0.1), 10))
    writer.close()
    with pytest.raises(StellaError, match=r"clips without a list, such as a\.mp4; prepare them with --csv"):
        ContinualVSConfig(path=str(tmp_path)).train_tasks()
    with pytest.raises(StellaError, match="needs your copy of it"):
        ContinualVSConfig()


def test_what_is_here_stands_beside_what_is_listed(tmp_path: Path) -> None:
    rows = vggsound(tmp_path / "vggsound.csv", [(f"s{n}", SPORT, "train") for n in range(5)] + [("t", SPORT, "test")])
    root = store(tmp_path / "shards", rows[2:])
    (tmp_path / "src").mkdir()
    write_video(tmp_path / "src" / "s0_000003.mp4")
    write_listed(root, recognise(tmp_path / "src", lists=[tmp_path / "vggsound.csv"]))
    assert (
        "3 training clips of 5 listed are here (sports 3 of 5)"
        in ContinualVSConfig(path=str(root), tasks=("sports",)).remarks()[0]
    )
    assert "of 5 listed" in VGGSoundConfig(path=str(root)).remarks()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("like", "lists", "source", "tasks"),
    [
        ("vggsound", ["vggsound.csv"], ContinualVSConfig, ("sports", "music")),
        ("video2dataset", ["vggsound.csv"], ContinualVSConfig, ("sports", "music")),
        ("cav-mae", ["balanced_train_segments.csv", "eval_segments.csv"], ContinualASConfig, ("human", "vehicle")),
        ("audioset", ["balanced_train_segments.csv", "eval_segments.csv"], ContinualASConfig, ("human", "vehicle")),
    ],
)
def test_a_miniature_becomes_shards_and_tasks(
    like: str, lists: list[str], source: Any, tasks: tuple[str, str], tmp_path: Path
) -> None:
    have, dst = tmp_path / "have", tmp_path / "dst"
    total, names = archive(like, have, clips=5)
    assert len(list(names)) == total == (30 if source is ContinualASConfig else 45)
    only, src = source.benchmark, have / "data.json" if like == "cav-mae" else have
    summary = prepare(src, dst, csv=[have / name for name in lists], only=only, seconds=2.56, size=96, progress=False)
    used, out = summary.clips, sum(summary.left_out.values())
    broken = sum(count for reason, count in summary.skipped.items() if reason != "damaged archive")
    assert used == 28 - (like == "cav-mae") and used + out + summary.missing + broken == summary.listed
    config = source(path=str(dst), tasks=tasks, pixels=96)
    assert [len(clips) for _, clips in config.train_tasks()] == [3 if like == "cav-mae" else 4, 4]
    assert [len(clips) for _, clips in config.eval_tasks()] == [10, 10]
    with pytest.raises(StellaError, match="holds other files"):
        archive(like, have)
