"""The data sources. To add one: a module with its config, and its name in this union. The first is the default."""

from collections.abc import Mapping
from typing import Any, cast

from stella.config import convert
from stella.data.folder import FolderConfig
from stella.data.packed import PackedConfig
from stella.data.scenes import ScenesConfig
from stella.data.shards import ShardsConfig

DataConfig = ScenesConfig | FolderConfig | ShardsConfig | PackedConfig


def data_config(tree: Mapping[str, Any]) -> DataConfig:
    """The config that `data.source` names, from a tree of plain values."""
    return cast(DataConfig, convert(tree, DataConfig, "data"))
