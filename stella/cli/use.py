"""`stella embed` and `localise`: a trained model in use."""

import os
from pathlib import Path
from typing import Annotated

import typer

from stella.cli.common import Ray, console, say
from stella.errors import StellaError, number_of, plain

ModelName = Annotated[str, typer.Option(help="Shipped name, finished run, learner, saved folder or weight file.")]
Overlap = Annotated[float, typer.Option(help="Share of a window that the next one repeats, below 1.")]
DeviceName = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="a GPU if there is one")]


def embed(
    files: Annotated[list[Path], typer.Argument(help="Video and sound files, or folders of them.")],
    out: Annotated[Path, typer.Option(help="File to write: .npz or .safetensors.")] = Path("vectors.npz"),
    model: ModelName = "base-small",
    overlap: Overlap = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Windows that go through a GPU at a time.")] = 32,
    device: DeviceName = None,
    ray: Ray = None,
) -> None:
    """Embed files of any length: a unit vector for the picture and for the sound of each window, with its seconds."""
    from rich.progress import track

    from stella.embed import load
    from stella.embed.cluster import embed_on_ray
    from stella.embed.vectors import Collected, embed_each, media_files
    from stella.errors import ClipError

    if ray and device:
        raise StellaError("--device is of this machine; leave it out with --ray, which takes a GPU where there is one")
    collected = Collected(out)
    found, loaded, bad = media_files(files), load(model, device), []
    for note in loaded.notes[1:]:
        say(f"{model}: {note}", "yellow")
    how = {"overlap": overlap, "batch": batch}
    both = embed_on_ray(ray, model, found, os.cpu_count() or 1, **how) if ray else embed_each(loaded, found, **how)
    for file, made in track(both, "embedding", total=len(found), console=console, disable=not console.is_terminal):
        if isinstance(made, ClipError):
            bad.append(made)
        else:
            collected.add(file, *made)
    for refused in bad:
        say(f"skipped {refused}", "yellow")
    if len(bad) == len(found):
        raise StellaError(f"none of {number_of(len(bad), 'file')} could be embedded; see the reasons above")
    used = number_of(len(found) - len(bad), "file")
    say(f"{out}  {collected.write(loaded)} of {used}" + (f"; {len(bad)} skipped" if bad else ""))
    raise typer.Exit(bool(bad))


def classify(
    run: Annotated[Path, typer.Argument(help="Finished run of stella transfer classify.")],
    files: Annotated[list[Path], typer.Argument(help="Videos with sound, or folders of them.")],
    out: Annotated[Path, typer.Option(help="CSV to write: the score of every class for each window.")] = Path(
        "windows.csv"
    ),
    overlap: Overlap = 0.0,
    device: DeviceName = None,
) -> None:
    """Say what is seen and heard in each file: the classes that `stella transfer classify` learnt."""
    from rich.progress import track
    from rich.table import Table
    from rich.text import Text

    from stella.data.folder import VIDEO_SUFFIXES
    from stella.embed.vectors import media_files
    from stella.errors import ClipError
    from stella.transfer.classifier import Classifier, classify_each, write_csv

    judge, found = Classifier(run, device), media_files(files, VIDEO_SUFFIXES)
    table, kept, bad = Table("file", "windows", "best classes"), [], 0
    answered = classify_each(judge, found, overlap)
    for path, answers in track(answered, "classifying", len(found), console=console, disable=not console.is_terminal):
        if isinstance(answers, ClipError):
            say(f"skipped {answers}", "yellow")
            bad += 1
            continue
        kept.append((path, answers))
        best = zip(*answers.mean.topk(min(3, len(judge.classes))), strict=True)
        said = ", ".join(f"{judge.classes[int(number)]} {100 * float(score):.0f}%" for score, number in best)
        table.add_row(Text(plain(path.name)), str(len(answers.start)), Text(plain(said)))
    if not kept:
        raise StellaError(f"none of {number_of(len(found), 'file')} could be classified; see the reasons above")
    write_csv(out, judge.classes, kept)
    console.print(table)
    used = number_of(len(kept), "file")
    say(f"{out}  {used}" + (f"; {bad} skipped" if bad else ""))
    raise typer.Exit(bool(bad))


def localise(
    video: Annotated[Path, typer.Argument(help="Video with sound.")],
    out: Annotated[Path, typer.Option(help="Film to write (.mp4).")] = Path("heat.mp4"),
    model: ModelName = "base-wide",
    overlap: Overlap = 0.5,
    device: DeviceName = None,
    train_on: Annotated[
        Path | None,
        typer.Option(help="Folder of videos, or shards, to train a matching module on first.", show_default="none"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of that training.")] = 300,
    save: Annotated[
        Path | None, typer.Option(help="Folder to save the model with its new module to.", show_default="none")
    ] = None,
) -> None:
    """Write the film with a heat map over it: where its sound comes from, and below it which seconds matter."""
    from stella.data.folder import Folder
    from stella.data.shards import Shards
    from stella.data.skipped import Skipped
    from stella.embed import caveat, load
    from stella.embed.film import write_film
    from stella.embed.matching import train_matching
    from stella.runs.plan import FEW_CLIPS

    if out.suffix.lower() != ".mp4":
        raise StellaError(f"--out {out} must end in .mp4: the film is one")
    if out.exists() and video.exists() and out.samefile(video):
        raise StellaError(f"--out {out} is the video itself; choose another name")
    loaded = load(model, device)
    if train_on is not None:
        i, shards = loaded.inputs, any(train_on.glob("shard-*.tar"))
        source = Shards(train_on, i.frames, i.span, i.size, i.duration) if shards else Folder(train_on, i.plan())
        with console.status(f"training a matching module on {number_of(len(source), 'clip')}"):
            loss = train_matching(loaded, source, steps, skipped=(skipped := Skipped()))
        used = number_of(len(source) - len(skipped.records), "clip")
        say(
            f"matching module trained for {number_of(steps, 'step')}: loss {loss:.3f} on these {used} (by chance 0.693)"
        )
        if len(source) - len(skipped.records) < FEW_CLIPS:
            say(f"{used} teach it little about others", "yellow")
        for bad in skipped.records.values():
            say(f"skipped {bad['path']}: {bad['reason']}; {bad['remedy']}", "yellow")
        if save is not None:
            loaded.save(save)
            say(f"{save}  the model with its matching module")
    maps = loaded.localise(video, overlap=overlap, progress=console.is_terminal)
    frames = number_of(write_film(loaded, maps, video, out), "frame")
    say(f"{out}  {frames}, {number_of(len(maps), 'window')}")
    if line := caveat(model, [video]):
        say(line, "dim")
