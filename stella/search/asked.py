"""Which files with stale vectors are asked for: a refresh embeds them first.

INDEX/asked holds the numbers of files that searches found by vectors of an older state, eight bytes each. Whoever may
only read an index leaves no trace in it.
"""

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

MOST = 1 << 22  # bytes: half a million answers say enough


def note(root: Path, files: Iterable[int]) -> None:
    data = np.array(list(files), np.int64).tobytes()
    with suppress(OSError):
        descriptor = os.open(root / "asked", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size + len(data) <= MOST:
                os.write(descriptor, data)
        finally:
            os.close(descriptor)


def counts(root: Path) -> Counter[int]:
    """How often each file was found."""
    try:
        data = (root / "asked").read_bytes()
    except OSError:
        return Counter()
    return Counter(np.frombuffer(data[: len(data) // 8 * 8], np.int64).tolist())


def clear(root: Path) -> None:
    (root / "asked").unlink(missing_ok=True)
