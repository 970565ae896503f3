"""Attention over compressed pages in Triton, for CUDA devices.

`pieces` describes layouts to the kernels, `codes` and `tiles` open what lies in a page, `attend` is attention over pages,
`causal` among new tokens, `merge` combines partial results, `write` stores new tokens; `attention` is the whole of it.
`gate` compiles everything ahead of time, without a device.
"""
