"""An agent that uses tools over several turns, its system prompt encoded once for all conversations.

    python examples/agent.py                      # a server with --kv-compress csa2 on port 30000

The system prompt with its tools is the fixed prefix of the program: it is pinned on the server before the first run. In
each turn the model writes one JSON object per step, until it answers: a call of a tool, which is carried out here, or the
answer. A grammar (`regex=`) leaves it no other way, so every step can be read, even with a model that is too small for
good ones. The first step of a turn is always a call, the last one always the answer.

For each step the server says how many tokens of the prompt were in the cache. From turn to turn nearly the whole
conversation is.
"""

import argparse
import ast
import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sglang as sgl

from sglang_csa2.frontend import fixed_prefix

FOLDER = Path(__file__).parent / "documents"
FILES = sorted(file.stem for file in FOLDER.glob("*.txt"))
MAX_STEPS = 3
MAX_RESULT_CHARS = 400
QUESTIONS = (
    "A return ticket for the ferry costs 7 crowns. What do 23 people pay?",
    "When is the library open on Saturday?",
    "The tower has 212 steps and is climbed by 12 visitors. How many steps is that?",
    "Where on the market is fish sold?",
)
SYSTEM = f"""You help the visitors of Marrow Bay. You do not know the answers yourself: you use tools, one at a time.
Each of your messages is one JSON object and nothing else.

To calculate, write an expression with whole numbers and + - * /:
{{"tool": "calculator", "input": "12 * 7 + 3"}}
The next message gives you the result. Division gives a decimal number.

To look something up, name one of the files {", ".join(FILES)}:
{{"tool": "lookup", "input": "{FILES[0]}"}}
The next message gives you the beginning of that file.

When you know the answer, give it in one sentence:
{{"tool": "answer", "input": "It costs 87 crowns."}}

Never guess a number that you can calculate, and never answer before you have used a tool. Keep answers short, friendly and
exact. If the tools do not help, say so in your answer."""

# No word before "tool": the grammar of the three kinds differs in the name and in what the input may be.
CALCULATOR = r'\{"tool": "calculator", "input": "[0-9]{1,5}( [-+*/] [0-9]{1,5}){1,3}"\}'
LOOKUP = r'\{"tool": "lookup", "input": "(' + "|".join(FILES) + r')"\}'
ANSWER = r'\{"tool": "answer", "input": "[A-Za-z0-9 ,.:\-]{1,80}"\}'
MAX_TOKENS = 110
"""More than the longest text that the grammar allows."""


@dataclass(frozen=True)
class Step:
    """One message of the model and what came of it."""

    turn: int
    call: dict[str, str]
    result: str | None
    prompt_tokens: int
    cached_tokens: int


@sgl.function
@fixed_prefix([{"role": "system", "content": SYSTEM}])
def agent(s, questions, report):
    for turn, question in enumerate(questions, 1):
        s += sgl.user(question)
        for step in range(1, MAX_STEPS + 1):
            name = f"call_{turn}_{step}"
            s += sgl.assistant(sgl.gen(name, regex=grammar(step), max_tokens=MAX_TOKENS))
            check(s)
            call = json.loads(s[name])
            meta = s.get_meta_info(name)
            result = None if call["tool"] == "answer" else TOOLS[call["tool"]](call["input"])
            report(Step(turn, call, result, meta["prompt_tokens"], meta["cached_tokens"]))
            if result is None:
                break
            s += sgl.user("Result: " + result)


def grammar(step: int) -> str:
    """What the model may write in a step of a turn."""
    if step == 1:
        return f"({CALCULATOR}|{LOOKUP})"
    return ANSWER if step == MAX_STEPS else f"({CALCULATOR}|{LOOKUP}|{ANSWER})"


def calculate(expression: str) -> str:
    """The value of an expression with numbers and + - * /."""
    try:
        return f"{_value(ast.parse(expression, mode='eval').body):.12g}"
    except (ZeroDivisionError, SyntaxError, ValueError) as error:
        return f"error: {error}"


OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers and + - * / are known")


def look_up(name: str) -> str:
    """The beginning of a file of the folder."""
    if name not in FILES:
        return f"error: there is no file {name}"
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")[:MAX_RESULT_CHARS]


TOOLS: dict[str, Callable[[str], str]] = {"calculator": calculate, "lookup": look_up}


def check(s: sgl.lang.interpreter.ProgramState) -> None:
    """A program whose request failed keeps the error to itself: raise it."""
    if (error := s.error()) is not None:
        raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="server with --kv-compress csa2")
    parser.add_argument("--api-key", help="key of the server")
    parser.add_argument(
        "--chat-template", default="chatml", help="SGLang's name for the turns of the model (demo model: chatml)"
    )
    args = parser.parse_args()
    backend = sgl.RuntimeEndpoint(args.url, api_key=args.api_key, chat_template_name=args.chat_template)

    steps: list[Step] = []

    def report(step: Step) -> None:
        steps.append(step)
        print(f"turn {step.turn}: {json.dumps(step.call)}" + ("" if step.result is None else f" -> {step.result[:60]!r}"))

    agent.run(QUESTIONS, report, backend=backend, temperature=0)
    for turn in range(1, len(QUESTIONS) + 1):
        own = [step for step in steps if step.turn == turn]
        prompt, cached = sum(step.prompt_tokens for step in own), sum(step.cached_tokens for step in own)
        print(f"turn {turn}: {len(own)} steps, {cached} of {prompt} prompt tokens cached, hit rate {cached / prompt:.0%}")


if __name__ == "__main__":
    main()
