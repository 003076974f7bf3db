"""Downstream tasks: what a finished model is good for. One file a task."""
