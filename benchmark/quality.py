"""What does each compressed format cost in quality? `csa2 check` on texts that every installation has.

    python benchmark/quality.py --split report --formats k8v4,fp4,int4,csa2-2x,csa2-4x,csa2-8x --json quality.json

`--split development` is for choosing settings; only the report set, of other sources, is published. Seven documents of
different kinds, 4096 tokens of context and 512 scored tokens each; see docs/check.md for the protocol. More options go on
to `csa2 check`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from common import demo_model, environment

from csa2.check.documents import KINDS, write_documents
from sglang_csa2.check import main as check


def main() -> int:
    """Measure and print; the exit code of the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default: the demo model)")
    parser.add_argument("--split", choices=("development", "report"), default="report")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of documents, comma-separated (default: all)")
    options, more = parser.parse_known_args()
    wanted = options.kinds.split(",")
    print(json.dumps({"environment": environment(), "split": options.split, "kinds": wanted}, indent=2))
    with tempfile.TemporaryDirectory() as folder:
        texts = [path for path in write_documents(Path(folder), options.split) if path.stem in wanted]
        return check(["--model", str(options.model or demo_model()), "--text", *map(str, texts), *more])


if __name__ == "__main__":
    sys.exit(main())
