"""Public data sets in the layouts in which people have them on disk."""
