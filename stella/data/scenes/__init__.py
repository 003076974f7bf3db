"""The embedded benchmark: procedural clips with the two difficulties the method is about, and no download."""

from stella.data.scenes.classes import TASKS, SceneClass, classes
from stella.data.scenes.source import SIZES, Scenes, SceneSize

__all__ = ["SIZES", "TASKS", "SceneClass", "SceneSize", "Scenes", "classes"]
