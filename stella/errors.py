"""Errors that a user can cause. Each message names the value, the place and the remedy in one sentence.

What a message quotes may come from anywhere; `plain` makes it safe to print. `number_of` counts in words.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType


def plain(text: object) -> str:
    """A text of somebody else's (a file's name, a task, metadata) as one line that is safe to print.

    Control characters, terminal escapes and bytes that are not UTF-8 are spelt out: `\\n`, `\\x1b`, `\\udce9`.
    """
    joiners = "\u200c\u200d"  # of many scripts
    return "".join(c if c.isprintable() or c in joiners else ascii(c)[1:-1] for c in str(text))


def number_of(count: int, noun: str) -> str:
    """`1 clip`, `2,000 clips`, `3 classes`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun[-1] in 'sx' else 's'}"


def some_of(names: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: at most so many of these."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def one_line(error: BaseException) -> str:
    """An error in one line: the sentence of a `StellaError`, the repr of any other."""
    return str(error) if isinstance(error, StellaError) else repr(error)


class StellaError(Exception):
    """An error that a user can fix. The command line prints the message and exits with status 2."""

    told = False  # True once one process of a run has taken it upon itself to print it; the others stay silent


class ConfigError(StellaError):
    """A configuration key or value that does not fit."""


class MissingExtraError(StellaError):
    """An optional package that is not installed."""


class BeyondEndError(StellaError):
    """A moment after the end of its file."""


class ClipError(StellaError):
    """A clip that cannot be used. A run skips it, counts it by `reason` and lists it in `skipped.jsonl`."""

    def __init__(self, path: object, reason: str, remedy: str) -> None:
        super().__init__(plain(f"{path}: {reason}; {remedy}"))
        self.path = str(path)
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["ClipError"], tuple[str, str, str]]:
        return ClipError, (self.path, self.reason, self.remedy)  # picklable, for loader workers


@contextmanager
def skippable(path: object) -> Iterator[None]:
    """Whatever goes wrong with one clip becomes a `ClipError`, so that it is skipped and the run goes on.

    Other `StellaError`s pass: a missing package or a wrong setting is not the clip's fault.
    """
    try:
        yield
    except StellaError:
        raise
    except MemoryError as error:
        raise ClipError(path, "too much memory", "re-encode it, or allow a worker more memory") from error
    except Exception as error:
        what = " ".join(str(error).split())[:200]
        raise ClipError(
            path, "unforeseen error", f"{what or 'no more is known'}: leave it out and report this"
        ) from error


def require(module: str, extra: str | None = None) -> ModuleType:
    """Import an optional package, or raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        how = f"in a clone of stella: pip install '.[{extra}]'" if extra else f"pip install {module.split('.')[0]}"
        raise MissingExtraError(f"{module} is not installed; {how}") from error
