"""STELLA: continual audio-video pre-training. Begin with `stella.clip`; CONTRIBUTING.md shows the way of one clip."""

__version__ = "0.1.0"
