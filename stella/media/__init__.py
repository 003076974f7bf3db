"""A file becomes a Clip, and a Clip a file. PyAV is imported only when one is opened."""
