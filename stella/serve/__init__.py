"""`stella serve`: a page that searches an index by sounds and videos, plays what fits and shows where it sounds."""
