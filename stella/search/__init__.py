"""Search: an index of unit vectors with the files and moments they belong to."""

from stella.search.index import Found, Hit, Index

__all__ = ["Found", "Hit", "Index"]
