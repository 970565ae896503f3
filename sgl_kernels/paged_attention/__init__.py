"""Attention over pages of mixed formats.

`plan` says which pages of a batch lie where (host side, once per step); `reference` computes (torch, the specification).
"""
