"""An agent's traces with tools, as messages and as a server's tokens, from the log to a trained head."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from heads.common.resolvers import ROOT
from tests.train import jobs

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}call {{ c.function.name }}({{ c.function.arguments.x }}){% endfor %}<|end|>"
    "{% endgeneration %}{% else %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def messages(number: int) -> list[dict[str, Any]]:
    """Return a question, a call, the tool's result and an answer."""
    function = {"name": "double", "arguments": json.dumps({"x": number})}
    return [
        {"role": "user", "content": f"def twice_{number}(x):"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": f"the result is {2 * number}"},
        {"role": "assistant", "content": f"return {2 * number}"},
    ]


def logged(number: int, tokenizer: Any) -> dict[str, Any]:
    """Return the same as a server logs it: a prompt and an answer for each request."""
    question = f"<|user|>user: def twice_{number}(x):<|end|><|assistant|>"
    call, answer = f"call double({number})<|end|>", f"return {2 * number}<|end|>"
    result = f"<|user|>tool: the result is {2 * number}<|end|><|assistant|>"
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, call, result, answer)]
    first = {"prompt_token_ids": parts[0], "token_ids": parts[1]}
    return {
        "id": f"t{number}",
        "tokens": [first, {"prompt_token_ids": [*parts[0], *parts[1], *parts[2]], "token_ids": parts[3]}],
    }


@pytest.mark.slow
def test_a_trace_goes_from_the_log_to_a_trained_head(tmp_path: Path) -> None:
    target, log = tmp_path / "target", tmp_path / "log.jsonl"
    shutil.copytree(ROOT / "examples" / "tiny", target, ignore=shutil.ignore_patterns("*.xz", "*.py", "prompts*"))
    (target / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(target)
    records = [{"id": f"m{n}", "messages": messages(n)} if n % 2 else logged(n, tokenizer) for n in range(40)]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = [f"model.path={target}", f"data.path={log}", "data.prompts=", "data.contamination=null"]

    words = [sys.executable, str(ROOT / "data" / "run.py"), *data, "data.held_out=4", "inspect=2"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout.replace("\n", "")
    for number in (0, 1):  # as tokens, and as messages
        assert f"<|assistant|>⟦call double({number})<|end|>⟧<|user|>tool: the result is {2 * number}<|end|>" in shown
        assert f"<|assistant|>⟦return {2 * number}<|end|>⟧" in shown

    out = tmp_path / "run"
    printed = jobs.finish(jobs.start([*data, *jobs.QUICK, "head=eagle", "trainer.steps=16", f"out={out}"]))
    losses = jobs.losses(out)
    assert all(map(math.isfinite, losses.values())), printed
    assert losses[16] < losses[1]
    (row,) = [row for row in json.loads((out / "report.json").read_text())["rows"] if row["drafter"] != "plain"][:1]
    assert row["lossless"]["identical"] == row["lossless"]["checked"] > 0
