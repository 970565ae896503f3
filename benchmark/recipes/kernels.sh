#!/usr/bin/env bash
# docs/performance.md, Kernels
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

taskset -c 1 python benchmark/attention_kernels.py --context 4096 16384 --batch 1 8 "$@"
