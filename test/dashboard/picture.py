"""Picture of the dashboard of a real server under load: the one in docs/monitoring.md.

    make serve ARGS="--enable-metrics --csa2-arena-size 48MB --context-length 1600 --max-running-requests 4"
    python test/dashboard/picture.py http://127.0.0.1:30000 --seconds 60 --out docs/images/dashboard.png

Needs Chromium on PATH. Pins two documents, sends questions about them and other texts, and watches the page meanwhile.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from browser import Browser, open_browser

TEXTS = [topics[name] for name in sorted(topics) if len(topics[name]) > 2800]
DOCUMENTS = {"manual": TEXTS[0][:1400] + "\n", "handbook": TEXTS[1][:1400] + "\n"}
OTHERS = [text[:2800] + "\n" for text in TEXTS[2:]]
CLIENTS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("dashboard.png"))
    parser.add_argument("--width", type=int, default=1000)
    arguments = parser.parse_args()
    for name, text in DOCUMENTS.items():
        post(arguments.url + "/csa2/documents", {"id": name, "text": text})
    done = threading.Event()
    clients = [threading.Thread(target=ask, args=(arguments.url, seed, done)) for seed in range(CLIENTS)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, open_browser(Path(profile)) as browser:
        for client in clients:
            client.start()
        try:
            watch(browser, arguments)
        finally:
            done.set()
            for client in clients:
                client.join()
    print(arguments.out)
    return 0


def watch(browser: Browser, arguments: argparse.Namespace) -> None:
    """Have the page open for a while, and take its picture."""
    browser.call("Emulation.setScrollbarsHidden", hidden=True)
    browser.set_window(arguments.width, 1000)
    browser.open(arguments.url + "/csa2/dashboard")
    time.sleep(arguments.seconds)
    browser.screenshot(arguments.out, arguments.width, 1000)
    if faults := browser.faults():
        sys.exit("\n".join(faults))


def ask(url: str, seed: int, done: threading.Event) -> None:
    """One client, which asks one question after the other."""
    chance = random.Random(seed)
    while not done.is_set():
        text = chance.choice([*DOCUMENTS.values(), chance.choice(OTHERS)])
        question = f"Question {chance.randrange(10**6)}: what is said here?\nAnswer:"
        sampling = {"max_new_tokens": 48, "temperature": 0, "ignore_eos": True}
        post(url + "/generate", {"text": text + question, "sampling_params": sampling})


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


if __name__ == "__main__":
    sys.exit(main())
