#!/usr/bin/env bash
# docs/performance.md, Eviction
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/eviction.py --arena-tokens 2048 --seeds 5 --first-seed 1 --pages csa2 "$@"
python benchmark/eviction.py --arena-tokens 8192 --seeds 5 --first-seed 1 "$@"
