"""FlashInfer for pages that it can read as they lie: rows of keys and values without metadata.

`plan` splits a batch by format, on the host; `views` are the layers of the arena as FlashInfer takes them; `variant` is the
attention of entries with a bias; `wrappers` own FlashInfer's own objects. Only `wrappers` and `variant` import flashinfer.
Today's ladder has one such format, the plain one. FP8 pages hold means and scales, so the Triton kernels read them; a format
of bare E4M3 rows would be read from here.
"""
