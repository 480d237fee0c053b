"""An agent that knows nothing of reroll: it asks an OpenAI client until the answer is right, and keeps its own history.

As a function of the run:      {kind: function, path: agent_loop:solve, options: {max_tries: 3}}
As a program of its own:       {kind: command, argv: [python, examples/agent_loop.py]}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI


def solve(prompt: Any, *, base_url: str, api_key: str, max_tries: int = 3) -> float:
    """Ask, check, and ask again with a hint. A full point for the first try, less for each one after it."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        return talk(client, list(prompt.messages), prompt.answer, max_tries=max_tries)


def talk(client: OpenAI, history: list[Any], answer: str, *, max_tries: int) -> float:
    for num_wrong in range(max_tries):
        reply = client.chat.completions.create(model="policy", messages=history).choices[0].message
        if answer in (reply.content or ""):
            return 1.0 - num_wrong / max_tries
        history += [reply, {"role": "user", "content": "That is not right. Try again."}]
    return 0.0


def main() -> None:
    """The prompt is on standard input, address and key are in the environment, and the reward goes back to the endpoint."""
    prompt = json.load(sys.stdin)
    with OpenAI() as client:
        reward = talk(client, prompt["messages"], prompt["answer"], max_tries=3)
        client.post("/reward", cast_to=object, body={"reward": reward})


if __name__ == "__main__":
    main()
