#!/usr/bin/env bash
# README, and docs/performance.md, First token of a cached prompt
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/prefix_hit.py --rounds 7 "$@"
