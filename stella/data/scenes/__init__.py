"""The embedded benchmark: procedural clips with the two difficulties that the method addresses, and no download."""

from stella.data.scenes.classes import TASKS, SceneClass, classes
from stella.data.scenes.config import ScenesConfig
from stella.data.scenes.source import SIZES, Scenes, SceneSize

__all__ = ["SIZES", "TASKS", "SceneClass", "SceneSize", "Scenes", "ScenesConfig", "classes"]
