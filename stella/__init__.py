"""STELLA: continual audio-video pre-training. Begin with `stella.clip`; CONTRIBUTING.md shows the way of one clip."""

import os

# Threads of the processor wait for one another by turning in a loop. On a machine that others use as well that takes
# away the very time they wait for: steps of the demo at a twelfth of their speed, with this at a sixth or better, and
# as fast as ever on a quiet one. It must be said before torch is imported, and goes before OMP_WAIT_POLICY.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.1.0"
