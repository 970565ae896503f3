#!/usr/bin/env bash
# Checks and times the CUDA kernels on a machine with one GPU, PyTorch, Triton and nvcc; without SGLang, without network.
# FlashInfer is compared with if it is installed. Options go on to gpu_check.py; --dry-run needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# FlashInfer links to the toolkit that it finds first on PATH, which may lack the libraries.
if [ -z "${CUDA_HOME:-}" ] && [ -e /usr/local/cuda/lib64/libcudart.so ]; then export CUDA_HOME=/usr/local/cuda; fi
command -v "$PYTHON" >/dev/null || { echo "gpu_check failed: there is no $PYTHON: name one with PYTHON=..." >&2; exit 1; }
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit --format=csv,noheader || true
fi
exec "$PYTHON" benchmark/gpu_check.py "$@"
