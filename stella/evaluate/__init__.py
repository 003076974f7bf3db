"""What a model knows: zero-shot retrieval, forgetting, modality gap, and what its matching module has learnt."""
