#!/usr/bin/env bash
# README, and docs/performance.md, How many prompts at once, and again (an hour)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/capacity.py "$@"
