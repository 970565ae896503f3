"""What SGLang and this plugin make of the flags of a server, without starting one.

`python -m sglang_csa2.preflight FLAGS` resolves the flags as a start does: refusals, the model's configuration, the
calibration, the compiled kernels. It prints the resolved values as one line of JSON, the last, or ends as the start would:
with the error as the last line of the error stream.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any


def resolve(flags: Sequence[str]) -> dict[str, Any]:
    """The resolved arguments that are text, numbers, or nothing, by field.

    Raises:
        Csa2Error: what the plugin refuses. SGLang raises what it raises, and exits for flags that it does not know.
    """
    # First: it puts our options into SGLang's.
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt import server_args

    record = server_args.prepare_server_args(list(flags))
    record.resolve_once()
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(record)
    values = {name: getattr(view, name) for name in type(record).__struct_fields__ if not name.startswith("_")}
    return {name: value for name, value in values.items() if value is None or isinstance(value, bool | int | float | str)}


if __name__ == "__main__":
    resolved = resolve(sys.argv[1:])
    sys.stdout.write("\n" + json.dumps(resolved) + "\n")
