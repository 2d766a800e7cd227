"""Records that tests of data write, and what is read of them."""

import json
from pathlib import Path

from lowmem.run.data import load


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write(name, records):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return name


def rows(config):
    return [{key: value for key, value in row.items() if key != "source"} for row in load(config)[0]]


CHATS = [
    {"messages": [user(f"what is {n} plus {n}?"), assistant(f"it is {2 * n}"), user("thanks"), assistant("welcome")]}
    for n in range(6)
]
INSTRUCTIONS = [{"instruction": f"Double {n}", "input": "quickly", "output": f"{2 * n}"} for n in range(6)]
