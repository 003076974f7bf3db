"""Evaluation: zero-shot retrieval, forgetting, modality gap, matching module."""
