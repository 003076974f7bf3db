"""Training speed, memory and profiles: `stella bench`, `stella reproduce efficiency`, `benchmarks/train_step.py`."""
