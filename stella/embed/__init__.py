"""A trained model in use: embeddings of files and arrays of any length, heat maps, saving and export."""

from stella.embed.load import caveat, load, resolve
from stella.embed.localise import Maps
from stella.embed.model import Embeddings, Model

__all__ = ["Embeddings", "Maps", "Model", "caveat", "load", "resolve"]
