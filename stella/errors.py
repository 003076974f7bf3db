"""Errors that a user can cause. Each message names the value, the place and the remedy in one sentence."""

import importlib
from types import ModuleType


class StellaError(Exception):
    """An error that a user can fix. The command line prints the message and exits with status 2."""


class ConfigError(StellaError):
    """A configuration key or value that does not fit."""


class MissingExtraError(StellaError):
    """An optional package that is not installed."""


class ClipError(StellaError):
    """A clip that cannot be used. A run skips it, counts it by `reason` and lists it in `skipped.jsonl`."""

    def __init__(self, path: object, reason: str, remedy: str) -> None:
        super().__init__(f"{path}: {reason}; {remedy}")
        self.path = str(path)
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["ClipError"], tuple[str, str, str]]:
        return ClipError, (self.path, self.reason, self.remedy)  # picklable, for loader workers


def require(module: str, extra: str | None = None) -> ModuleType:
    """Import an optional package, or raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = f"'stella-av[{extra}]'" if extra else module.split(".")[0]
        raise MissingExtraError(f"{module} is not installed; pip install {package}") from error
