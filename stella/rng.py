"""Random numbers come from named generators: `generator(seed, "memory")`. Nothing here touches the global one."""

import hashlib

import torch


def seed_for(*names: object) -> int:
    """A 63-bit seed that is the same on every machine for the same names, and unrelated for any others."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for a purpose: `generator(config.seed, "augment", epoch)`."""
    return torch.Generator(device).manual_seed(seed_for(*names))
