#!/usr/bin/env bash
# docs/performance.md, The whole server
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/serving_cpu.py --context 4096 --batch 1 8 --rounds 3 --csa2-ratio 1 "$@"
