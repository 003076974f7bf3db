"""The backbone, its matching module, and their weights."""
