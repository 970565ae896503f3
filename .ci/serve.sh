#!/usr/bin/env bash
# Serves the demo model on $PORT, in the foreground. Arguments go on to SGLang.
set -euo pipefail
STEP=serve
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

PORT="${PORT:-30000}"
HOST="${HOST:-127.0.0.1}"

check_port() {
    local said
    case "$PORT" in
    '' | *[!0-9]* | ??????*) fail "PORT=$PORT is no port: give a number from 1 to 65535" ;;
    esac
    [ "$PORT" -ge 1 ] && [ "$PORT" -le 65535 ] || fail "PORT=$PORT is no port: give a number from 1 to 65535"
    # Any Python 3 can try the port; whether it can run SGLang is for the set-up to say.
    command -v "$PYTHON" >/dev/null || fail "there is no $PYTHON: install Python 3.11 or 3.12, or name one with PYTHON=..."
    said="$("$PYTHON" - "$HOST" "$PORT" 2>&1 <<'END'
import socket, sys
host, port = sys.argv[1], int(sys.argv[2])
try:
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
except OSError as error:
    sys.exit(error.strerror or str(error))
END
    )" || fail "port $PORT on $HOST cannot be used (${said##*$'\n'}): choose another with PORT=..."
}

# First, to fail at once; again after the set-up, which can take minutes.
check_port
"$ROOT/.ci/setup.sh"
model="$("$VENV/bin/csa2" demo-model | tail -n 1)"
check_port

device=()
if ! "$VENV/bin/python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)'; then
    echo "serve: torch sees no CUDA device, so this runs on the CPU"
    device=(--device cpu)
fi
echo "serve: http://$HOST:$PORT (stop with Ctrl-C)"
# The logits in fp32: the demo model's first words are often so close that rounding to bf16 would decide.
exec "$VENV/bin/python" -m sglang.launch_server --kv-compress csa2 --model-path "$model" --enable-fp32-lm-head \
    --csa2-calibration "$ROOT/csa2/calibrations/smollm2-135m-instruct" \
    --host "$HOST" --port "$PORT" "${device[@]}" "$@"
