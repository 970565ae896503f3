"""Answer questions from a folder of documents that stay in the cache of the server.

    python examples/rag.py                        # a server with --kv-compress csa2 on port 30000

Each question goes to the document that a small BM25 finds for it. Documents are pinned on first use; with
`--csa2-documents examples/documents` the server has them before. Three things are done with them:

1. all questions at once, with `run_batch`;
2. several statements about one document, with `fork`, each judged by `select`: a model must say yes or no;
3. what the server counted: prompt tokens that were already in the cache, and hits per document.

The answers are as good as the model. What the example shows is that a document is encoded once, not once per question.
"""

import argparse
import math
import re
from collections import Counter
from pathlib import Path

import requests
import sglang as sgl

from sglang_csa2.frontend import static

FOLDER = Path(__file__).parent / "documents"
QUESTIONS = (
    "How many steps does the lighthouse tower have?",
    "Who was the last keeper of the lighthouse?",
    "How long does the ferry crossing take?",
    "What does a return ticket for the ferry cost?",
    "On which days is the market held?",
    "How long may films be kept by readers of the library?",
)
STATEMENTS = ("The ferry carries cars.", "Tickets are sold on board.", "The ferry runs on batteries.")


class Bm25:
    """Which documents share rare words with a question (Robertson and Zaragoza, 2009)."""

    def __init__(self, texts: dict[str, str], k1: float = 1.5, b: float = 0.75) -> None:
        self._words = {name: Counter(words(text)) for name, text in texts.items()}
        self._k1, self._b = k1, b
        self._mean_length = sum(count.total() for count in self._words.values()) / len(texts)
        found_in = Counter(word for count in self._words.values() for word in count)
        self._weight = {word: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in found_in.items()}

    def best(self, question: str) -> tuple[str, float]:
        """Name of the best document and its score."""
        scores = {name: self._score(words(question), name) for name in self._words}
        name = max(scores, key=lambda name: scores[name])
        return name, scores[name]

    def _score(self, question: list[str], name: str) -> float:
        count = self._words[name]
        damping = self._k1 * (1 - self._b + self._b * count.total() / self._mean_length)
        return sum(self._weight[w] * count[w] * (self._k1 + 1) / (count[w] + damping) for w in question if count[w])


def words(text: str) -> list[str]:
    """Lower-case words, without the s of a plural."""
    return [word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", text.lower())]


@sgl.function
def answer(s, document, text, question):
    s += static(document, text)
    s += "\nQuestion: " + question + "\nAnswer:"
    s += sgl.gen("answer", max_tokens=24, stop="\n")


@sgl.function
def judge(s, document, text, statements):
    s += static(document, text)
    forks = s.fork(len(statements))
    for fork, statement in zip(forks, statements, strict=True):
        fork += "\nStatement: " + statement + "\nIs this true, yes or no? Answer:"
        fork += sgl.select("verdict", [" yes", " no"])
    forks.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="server with --kv-compress csa2")
    parser.add_argument("--api-key", help="key of the server")
    parser.add_argument("--documents", type=Path, default=FOLDER, help="folder of *.txt files")
    args = parser.parse_args()
    sgl.set_default_backend(sgl.RuntimeEndpoint(args.url, api_key=args.api_key))
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(args.documents.glob("*.txt"))}
    if not texts:
        parser.error(f"{args.documents} has no *.txt file")

    retriever = Bm25(texts)
    found = [retriever.best(question) for question in QUESTIONS]
    batch = [
        {"document": name, "text": texts[name], "question": question}
        for question, (name, _) in zip(QUESTIONS, found, strict=True)
    ]
    states = answer.run_batch(batch, temperature=0)
    for question, (name, score), state in zip(QUESTIONS, found, states, strict=True):
        check(state)
        meta = state.get_meta_info("answer")
        print(f"{question}\n  document {name} (score {score:.1f}), {share(meta['cached_tokens'], meta['prompt_tokens'])}")
        print(f"  answer: {state['answer'].strip()}")

    name, _ = retriever.best(" ".join(STATEMENTS))
    state = judge.run(document=name, text=texts[name], statements=STATEMENTS)
    check(state)
    print(f"Statements about {name}:")
    for statement, verdict in zip(STATEMENTS, state["verdict"], strict=True):
        print(f"  {statement} verdict: {verdict.strip()}")

    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    reply = requests.get(f"{args.url}/csa2/documents", headers=headers, timeout=60)
    reply.raise_for_status()
    for document in reply.json()["documents"]:
        if document["id"] in texts:
            print(f"document {document['id']}: {document['tokens']} tokens pinned, {document['hits']} hits")


def check(state: sgl.lang.interpreter.ProgramState) -> None:
    """A program whose request failed keeps the error to itself: raise it."""
    if (error := state.error()) is not None:
        raise error


def share(cached_tokens: int, prompt_tokens: int) -> str:
    return f"{cached_tokens} of {prompt_tokens} prompt tokens cached ({cached_tokens / prompt_tokens:.0%})"


if __name__ == "__main__":
    main()
