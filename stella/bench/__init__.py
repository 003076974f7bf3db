"""How fast a training step is, where its time goes and what it holds: `stella bench`, `benchmarks/train_step.py`."""
