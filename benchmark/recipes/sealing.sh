#!/usr/bin/env bash
# docs/performance.md, Sealing
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/sealing.py --tokens 4096 --prompts 2 "$@"
