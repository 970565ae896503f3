#!/usr/bin/env bash
# Makes the virtual environment at $VENV with the versions of requirements.lock, and the demo model.
# A stamp in the environment makes a second run short; it is written last, so a failed run leaves none.
set -euo pipefail
STEP=setup
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

NEEDED_GB=12
STAMP="$VENV/csa2-setup.stamp"
LOG="$VENV/csa2-setup.log"

# What the environment depends on: the versions, then the checkout that the editable install points to.
wanted_versions="$(cat requirements.lock pyproject.toml | sha256sum | cut -d' ' -f1)"
wanted_checkout="$(cat csa2/__init__.py | sha256sum | cut -d' ' -f1) $ROOT"

# Last line that pip marked as an error, without the time in front.
last_error() {
    sed -n 's/^[^ ]* *ERROR: *//p' "$LOG" | tail -n 1
}

explain_pip() {
    local said
    said="$(last_error)"
    if grep -q 'No space left on device' "$LOG"; then
        fail "the disk is full: free some (about $NEEDED_GB GB for a new environment) and run it again; log: $LOG"
    # Before conflicts: pip takes a package it could not reach for one that has no versions.
    elif grep -qE 'Max retries exceeded|Retry\(total=0|ReadTimeoutError|IncompleteRead|ProtocolError' "$LOG"; then
        fail "the package index does not answer: check the network, or set PIP_INDEX_URL to an index you can reach; log: $LOG"
    elif grep -qE 'ResolutionImpossible|conflicting dependencies' "$LOG"; then
        said="$(sed -n 's/^.*ERROR: *\(Cannot install .*\)/\1/p' "$LOG" | tail -n 1)"
        fail "requirements.lock and pyproject.toml ask for versions that exclude each other (${said:-no reason given}); log: $LOG"
    else
        fail "pip said: ${said:-nothing}; log: $LOG"
    fi
}

# PIP_CONSTRAINT rather than -c: it also holds for the packages that build this one.
# pip's errors fill a screen; they are in the log, and explain_pip says what matters.
install() {
    rm -f "$STAMP" "$LOG"
    PIP_CONSTRAINT=requirements.lock PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$VENV/bin/python" -m pip --log "$LOG" install "$@" 2>/dev/null || explain_pip
}

check_disk() {
    local parent free_kb used_kb=0
    parent="$VENV"
    while [ ! -d "$parent" ]; do parent="$(dirname "$parent")"; done
    free_kb="$(df -Pk "$parent" | awk 'NR == 2 { print $4 }')"
    # What an interrupted run has already installed does not come again.
    if [ -d "$VENV" ]; then used_kb="$(du -skH "$VENV" | cut -f1)"; fi
    if [ $((free_kb + used_kb)) -lt $((NEEDED_GB * 1024 * 1024)) ]; then
        fail "not enough disk at $parent: $((free_kb / 1024 / 1024)) GB free, a new environment needs $NEEDED_GB GB; free some, or choose another place with VENV=..."
    fi
}

make_venv() {
    local said
    if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV" 2>&1)" ]; then
        fail "$VENV is there and is no virtual environment: choose another place with VENV=..."
    fi
    echo "setup: making the environment $VENV with $("$PYTHON" --version)"
    said="$("$PYTHON" -m venv --prompt sglang-csa2 "$VENV" 2>&1)" ||
        fail "$PYTHON cannot make $VENV (${said##*$'\n'}): on Debian and Ubuntu, install python3-venv; otherwise check VENV=..."
}

have_versions= have_checkout=
if [ -f "$STAMP" ] && [ -x "$VENV/bin/python" ]; then
    { read -r have_versions && read -r have_checkout; } <"$STAMP" || have_versions=
fi

if [ "$have_versions" != "$wanted_versions" ]; then
    check_disk
    if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        check_python "$PYTHON" "name one with PYTHON=python3.12"
        make_venv
    fi
    check_python "$VENV/bin/python" "remove $VENV (make clean), then name another with PYTHON=python3.12"
    echo "setup: installing the versions of requirements.lock (11 GB, some minutes the first time)"
    install --editable '.[dev]'
elif [ "$have_checkout" != "$wanted_checkout" ]; then
    echo "setup: pointing $VENV to this checkout"
    install --no-deps --editable .
fi
if [ ! -f "$STAMP" ]; then
    printf '%s\n%s\n' "$wanted_versions" "$wanted_checkout" >"$STAMP"
    echo "setup: the environment $VENV is ready"
fi

"$VENV/bin/csa2" demo-model
