"""The data sources. To add one: a module with its config, and its name in this union. The first is the default."""

from collections.abc import Mapping
from typing import Any, cast, get_args

from stella.config import convert
from stella.data.archives.ave import AVEConfig
from stella.data.archives.avsbench import AVSBenchConfig
from stella.data.archives.benchmarks import (
    AudioSetConfig,
    ContinualASConfig,
    ContinualVSConfig,
    InitialVSConfig,
    VGGSoundConfig,
)
from stella.data.archives.msrvtt import MSRVTTConfig
from stella.data.archives.sources import FlickrConfig, VGGSSConfig
from stella.data.folder import FolderConfig
from stella.data.packed import PackedConfig
from stella.data.scenes import ScenesConfig
from stella.data.shards import ShardsConfig

DataConfig = (
    ScenesConfig
    | FolderConfig
    | ShardsConfig
    | PackedConfig
    | AVEConfig
    | AVSBenchConfig
    | FlickrConfig
    | MSRVTTConfig
    | VGGSSConfig
    | VGGSoundConfig
    | AudioSetConfig
    | ContinualVSConfig
    | ContinualASConfig
    | InitialVSConfig
)


def is_embedded(source: object = None) -> bool:
    """Whether the source of this name (None: the default) ships with the package."""
    kinds = get_args(DataConfig)
    return any(kind.embedded for kind in kinds if kind.source == (source or kinds[0].source))


def class_names(source: object) -> str:
    """What the names of a source's classes mean, as a sentence; empty if nothing is said of it."""
    return next((kind.class_names for kind in get_args(DataConfig) if kind.source == source), "")


def data_config(tree: Mapping[str, Any]) -> DataConfig:
    """The config that `data.source` names, from a tree of plain values."""
    return cast(DataConfig, convert(tree, DataConfig, "data"))
