"""Make the calibration of the demo model that ships in `csa2/calibrations`.

    python benchmark/calibrate_demo.py --out csa2/calibrations/smollm2-135m-instruct

The text is what the documents of `benchmark/quality.py` leave of their development sources: none of it is measured on. More
options go on to `csa2 calibrate`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from common import demo_model

from csa2.check.documents import write_documents
from csa2.cli import main as csa2

CHARACTERS = 120_000
"""Of each kind of text."""


def main() -> int:
    """Write the text, then calibrate; the exit code of `csa2 calibrate`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default: the demo model)")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = write_documents(Path(folder), "calibration", CHARACTERS)
        return csa2(["calibrate", "--model", str(options.model or demo_model()), "--text", *map(str, texts), *more])


if __name__ == "__main__":
    sys.exit(main())
