#!/usr/bin/env bash
# make bench: a selection that takes some ten minutes
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/attention_kernels.py --context 4096 --batch 1
python benchmark/prefix_hit.py --rounds 3
python benchmark/capacity.py --prompts 6 --tokens 1024 --new-tokens 16 --arena-tokens 2048
python benchmark/load.py --scale 0.1 --classes short --concurrency 2 --rounds "prefix cache" csa2-4x --markdown /dev/stdout
