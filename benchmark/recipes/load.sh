#!/usr/bin/env bash
# The load test at a tenth of its lengths: table in load.md, plots in load-plots (an hour)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/load.py --scale 0.1 --concurrency 1 4 16 --json load.json --markdown load.md --plots load-plots "$@"
