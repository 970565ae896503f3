#!/usr/bin/env bash
# docs/troubleshooting.md, Short prompts behind long ones
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/mixed_load.py "$@"
