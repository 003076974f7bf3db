"""Runs, folder runs with workers, `prepare` and `pack`, killed at random moments or on a disk that is full.

Each victim is done once undisturbed. Then it is disturbed and done again in the same folder: the result must be the
same, to the last byte. Victims run in forked processes, so that a kill costs no start of Python.
"""

import contextlib
import io
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console

from stella.config import resolve
from stella.data import workers
from stella.data.folder import Folder
from stella.data.pack import pack
from stella.data.prepare import prepare
from stella.errors import StellaError
from stella.media.decode import Plan
from stella.runs.config import RunConfig
from stella.runs.loop import pretrain

CLIPS = Path(__file__).parents[2] / "tests" / "data" / "clips"
PLAN = Plan(0.0, 0.64, 2, 37, None)
ANSWER = 10.0  # seconds in which a run answers SIGTERM
HUNG = 180.0
QUICK = ("method=er", "stream.batch_size=4", "memory.clips=7", "train.device=cpu", "train.log_every=1")
QUICK += ("evaluate.batch=8", "train.checkpoint_minutes=0.002")

Victim = Callable[[Path], None]


def videos(root: Path, count: int) -> Path:
    """Real clips, under many names."""
    root.mkdir(parents=True)
    found = sorted(CLIPS.glob("*.mpg"))
    for k in range(count):
        (root / f"{k:02d}.mpg").symlink_to(found[k % len(found)])
    (root / "bad.mpg").write_text("hello")
    return root


def victims(root: Path) -> dict[str, Victim]:
    src = videos(root / "videos", 20)
    packed = root / "packed"
    pack(Folder(src, PLAN), packed, pixels=32, spec_frames=64, size=37, workers=0, progress=False)
    small = [f"data.path={src}", "data.pixels=32", "data.duration=0.64", "data.frames=2", "data.span=none"]
    return {
        "run": lambda out: _run(out, ["data.source=packed", f"data.path={packed}", "stream.epochs=4"]),
        "folder run with workers": lambda out: _run(out, ["data.source=folder", *small, "stream.workers=2"]),
        "prepare": lambda out: _quiet(prepare(src, out, seconds=0.5, size=48, workers=2, progress=False)),
        "pack": lambda out: _quiet(
            pack(Folder(src, PLAN), out, pixels=32, spec_frames=64, size=37, workers=2, progress=False)
        ),
    }


def _quiet(_: object) -> None:
    pass


def _run(out: Path, more: list[str]) -> None:
    config = resolve(RunConfig, None, [*QUICK, *more])
    result = pretrain(config, out, resume=True, console=Console(file=io.StringIO()))
    if result.exit_code:
        os._exit(result.exit_code)


def forked(victim: Victim, out: Path, file_bytes: int | None = None) -> int:
    """The process in which a victim works; status 0 if it ends well, 2 for an error that is told."""
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    workers.START_METHOD = "fork"
    log = os.open(out.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        if file_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        victim(out)
        status = 0
    except StellaError:
        status = 2
    except BaseException:
        import traceback

        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        os._exit(status)


def ended(pid: int, seconds: float = HUNG) -> tuple[int | None, float]:
    """The exit status of a process (None: it hung, and is killed) and how long it took."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), time.monotonic() - began
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None, time.monotonic() - began


def contents(out: Path) -> dict[str, bytes]:
    """What must not depend on disturbances. The order of clips in shards is that in which workers end."""
    names = ("metrics.jsonl", "model.safetensors", "clips.json", "frames.u8", "waveforms.i16", "lengths.i64")
    found = {name: (out / name).read_bytes() for name in names if (out / name).exists()}
    if any(out.glob("shard-*.tar")):
        from stella.data.shards import Shards

        shards = Shards(out, 2, None)
        for clip in (shards[i] for i in range(len(shards))):
            found[clip.id] = clip.video.numpy().tobytes() + clip.audio.numpy().tobytes()
    return found


def verdict(victim: Victim, out: Path, whole: dict[str, bytes]) -> str:
    """What doing it again, undisturbed, leads to."""
    status, _ = ended(forked(victim, out))
    if status is None:
        return "hung"
    if status:
        return f"failed ({status})"
    return "same" if contents(out) == whole else "different"


def kills(root: Path, counts: dict[str, int], seed: int) -> Iterator[tuple[str, str, str]]:
    """(victim, kind of kill, outcome) for each kill."""
    rng = random.Random(seed)
    for name, victim in victims(root).items():
        whole = root / "whole" / name
        whole.parent.mkdir(exist_ok=True)
        status, seconds = ended(forked(victim, whole))
        expected = contents(whole)
        assert status == 0 and len(expected) > 1, f"{name} does not work undisturbed ({status}): see {root}/whole/log"
        for number in range(counts.get(name, 0)):
            out = root / "killed" / f"{name}-{number}"
            out.parent.mkdir(exist_ok=True)
            kind = rng.choices(["SIGKILL", "SIGTERM", "SIGTERM to the group", "worker stopped, SIGTERM"], [4, 1, 1, 1])[
                0
            ]
            pid = forked(victim, out)
            time.sleep(rng.uniform(0, 0.9 * seconds))
            yield name, kind, _strike(pid, kind) or verdict(victim, out, expected)


def _strike(pid: int, kind: str) -> str:
    """Kill; a text only if the victim did not answer in time."""
    with contextlib.suppress(ProcessLookupError):
        if kind == "SIGKILL":
            os.kill(pid, signal.SIGKILL)
        elif kind == "SIGTERM to the group":
            os.killpg(pid, signal.SIGTERM)
        else:
            if kind.startswith("worker"):
                for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[:1]:
                    os.kill(int(child), signal.SIGSTOP)
            os.kill(pid, signal.SIGTERM)
    status, seconds = ended(pid)
    if status is None:
        return "hung"
    if status not in (0, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM):
        return f"ended with {status}"
    return "" if seconds <= ANSWER else f"answered after {seconds:.0f} s"


def full_disks(root: Path, each: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Files may not grow beyond some size, chosen so that each file of the victim is the one that does not fit."""
    rng = random.Random(seed)
    for name, victim in victims(root).items():
        whole = root / "whole" / name
        whole.parent.mkdir(exist_ok=True)
        status, _ = ended(forked(victim, whole))
        assert status == 0, f"{name} does not work undisturbed: see {root}/whole/log"
        expected = contents(whole)
        sizes = sorted({path.stat().st_size for path in whole.rglob("*") if path.is_file()} - {0})
        limits = [size - 1 for size in sizes] + [rng.randrange(1, max(sizes)) for _ in range(each)]
        for number, limit in enumerate(limits[: max(each, len(sizes))]):
            out = root / "full" / f"{name}-{number}"
            out.parent.mkdir(exist_ok=True)
            status, _ = ended(forked(victim, out, limit))
            told = {0: "fitted", 2: "told", None: "hung"}.get(status, f"ended with {status}")
            yield name, f"full disk, {told}", verdict(victim, out, expected)
