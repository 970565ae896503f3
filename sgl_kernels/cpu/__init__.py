"""Compiled CPU kernels: built from `csrc` on first use (`build`), chosen by instruction set (`isa`)."""
