#!/usr/bin/env bash
# docs/performance.md, Ten minutes at a full arena
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

CSA2_SOAK_MINUTES=10 python -m pytest -s test/server/test_soak.py "$@"
