"""A small index to serve, and tasks for worker processes that hang or die."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import stella
from helpers.media_files import CLIPS, tone, write
from stella.data.workers import Tick
from stella.serve.work import Refusal


def make_index(root: Path, model: Any = "base-tiny") -> "stella.Index":
    """Two rendered scenes, a real clip, a sound, a mute film, and a file that is none."""
    from stella.data.scenes import Scenes
    from stella.data.scenes.export import export

    videos = root / "videos"
    list(export(Scenes("task1", "eval", 2), videos))
    (videos / "more").mkdir()
    (videos / "more" / "face.mpg").write_bytes((CLIPS / "bbaf2n.mpg").read_bytes())
    write(videos / "more" / "tone.wav", None, tone(3, 16_000), audio_codec="pcm_s16le")
    (videos / "more" / "text.mp4").write_text("no video")
    index = stella.Index(root / "index")
    index.update(videos, model=model)
    return index


def misbehave(job: Any, tick: Tick) -> Any:
    """`job` says how."""
    tick(0)
    if job == "hang":
        time.sleep(600)
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "refuse":
        return Refusal("it is green; give a blue one", "secret")
    if job == "full":
        return Refusal("there is no room", "", 507, retry=30)
    if job == "fail":
        raise ValueError("/a/path")
    if isinstance(job, Path):
        job.touch()
    if isinstance(job, float):
        time.sleep(job)
    return job
