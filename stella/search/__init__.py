"""Search: an index of unit vectors with the files and moments they belong to."""

from stella.search.hits import Hit
from stella.search.index import Found, Index

__all__ = ["Found", "Hit", "Index"]
