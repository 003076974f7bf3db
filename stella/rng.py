"""Named random generators, `generator(seed, "memory")`, instead of the global one."""

import hashlib

import torch


def seed_for(*names: object) -> int:
    """A 63-bit seed: a hash of the names, the same on every machine."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose: `generator(config.seed, "augment", epoch)`."""
    return torch.Generator(device).manual_seed(seed_for(*names))
