"""Search: an index of unit vectors with the files and moments they belong to. `index.Index` is the way in."""
