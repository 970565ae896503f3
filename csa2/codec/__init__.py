"""The codec: score, merge, reduce, quantise. Each stage works alone; `codec.PageCodec` runs them in that order."""
