"""Reads and writes clips as media files. PyAV is imported only when a file is opened."""
