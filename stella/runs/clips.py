"""The list of a run's clips on a disk, `clips.csv`: a resumed run must find the clips that it was started with."""

import csv
import hashlib
import io
import json
from pathlib import Path

from stella.clip import Source, same_stamp
from stella.data.tasks import Tasks
from stella.data.views import stored_at
from stella.errors import StellaError
from stella.files import write_bytes

HEADER = ["set", "task", "clip", "stamp"]
NAMED = 3  # clips named in a refusal


def keep_clips(path: Path, train: Tasks, evaluation: Tasks, started: bool) -> None:
    """Write the list of a new run; of one that was started, refuse clips that differ from those of its list."""
    rows = [row for kind, tasks in (("train", train), ("evaluation", evaluation)) for row in _rows(kind, tasks)]
    if not rows:  # nothing is on a disk
        return
    if not (started and path.exists()):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([HEADER, *rows])
        write_bytes(path, text.getvalue().encode(errors="surrogateescape"))
        return
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        before = list(csv.reader(file))[1:]
    old, new = ({tuple(row[:3]): row[3] for row in each} for each in (before, rows))
    differ = [f"{key[2]} is gone" for key in old if key not in new]
    differ += [f"{key[2]} is new" for key in new if key not in old]
    changed = [key for key in old if key in new and not same_stamp(old[key], new[key])]
    differ += [f"{key[2]} had {old[key]} and has {new[key]}" for key in changed]
    if differ or [row[:3] for row in before] != [row[:3] for row in rows]:
        more = f" and {len(differ) - NAMED} more" if len(differ) > NAMED else ""
        raise StellaError(
            f"the clips are not those that this run was started with ({path}): "
            f"{'; '.join(differ[:NAMED]) or 'their order differs'}{more}; restore them, or start a new run"
        )


def fingerprint(source: Source) -> str:
    """A text that changes with the clips of a source on a disk."""
    text = json.dumps(_rows("", [("", source)])).encode(errors="surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _rows(kind: str, tasks: Tasks) -> list[list[str]]:
    rows = []
    for task, source in tasks:
        for index in range(len(source)):
            if found := stored_at(source, index):
                stored, inside = found
                rows.append([kind, task, stored.origin(inside).id, stored.stamp(inside)])
    return rows
