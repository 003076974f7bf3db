"""Training: one loop for all methods, a run folder, exact resume."""
