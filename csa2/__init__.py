"""Compressed, radix-integrated KV cache: formats, codec, arena and residency. Needs torch only."""

__version__ = "0.1.0"
