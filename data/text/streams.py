"""Bodies of requests and replies as logs keep them: JSON texts, and streams as events or as their lines."""

import re
from collections.abc import Set
from typing import Any

from data.text.files import Raw
from data.text.parts import LeftOutError, finish_reasons, first, parsed

ERRORS = {"error", "errors", "errorCode", "error.type", "error_str", "exception", "error_info", "$ai_is_error"}
STATUS = {"status_code", "response_status", "status", "level", "type"}
FAILED = {"failed", "failure", "error", "cancelled", "errored", "canceled", "expired"}
FAILURE, FURTHER = "an error in place of an answer", "with further choices, which are left out"
WITHHELD = "whose reasoning the record does not hold"
USAGE = {"usage", "usageMetadata", "usage_metadata", "usageDetails", "usage_details", "metrics", "attributes"}
REASONED = {  # keys of a usage that count the tokens of reasoning
    "reasoning_tokens", "reasoningTokens", "thoughtsTokenCount", "thoughts_token_count", "reasoning",
    "output_reasoning_tokens", "output_reasoning", "completion_reasoning_tokens", "gen_ai.usage.reasoning_tokens",
    "gen_ai.usage.reasoning.output_tokens", "llm.token_count.completion_details.reasoning",
    "ai.usage.reasoningTokens", "original_usage.completion_tokens_details.reasoning_tokens", "$ai_reasoning_tokens",
}  # fmt: skip
LOGGED = [  # keys by which a JSON text is recognised as a request or a reply
    {*keys.split()}
    for keys in (
        "messages", "contents", "choices", "candidates", "generations", "role content", "role parts", "role tool_calls",
        "model input", "object output", "output stopReason", "model done", "type call_id",
        "type content additional_kwargs", "args kwargs", "$ai_input",
    )
]  # fmt: skip
# Fields of a stream that are replaced, not appended.
WHOLE = ("role", "id", "type", "name", "finish_reason", "stop_reason", "stop_sequence", "format", "signature")
CHOICES = ("choices", "candidates")
SSE = ("data:", "event:", "id:", "retry:", ":")  # starts of a server-sent event's lines
EVENTS = {"delta", "candidates", "done", "response", "output_index"}  # keys by which an object is a part of a stream
# The events of Bedrock's ConverseStream, each around its fields.
CONVERSE = ("messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop")
CUT_OFF = "a text that the log has shortened or rewritten"
LOGGED_TEXT = re.compile(r'\s*\[?\s*\{\s*"(role|parts|messages|choices|candidates|id": ?"(chatcmpl|msg_|resp_))')
JSON_TEXT = re.compile(r'\s*(\[\s*)?\{\s*"')  # the start of an object, or of a list of objects
ENDS = ("finish_reason", "done", "stopReason")  # fields of events that say whether the answer ends
UNFINISHED = {"type": "message", "role": "assistant", "content": "", "finish_reason": "length"}


def at(value: Any, path: str) -> Any:
    """Return the value at a path of a record, or None."""
    for name in path.split("/") if path else ():
        if not isinstance(value, dict) or (value := value.get(name)) is None:
            return None
        value = opened(value)
    return value


def opened(value: Any) -> Any:
    """Return the value of a JSON text with a request, a reply or messages; an answer in JSON remains text."""
    value = parsed(value) if isinstance(value, str) and value.startswith('"{') else value  # encoded twice
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    plain = unbatched(parsed(value))
    items = plain if isinstance(plain, list) else [plain]
    if not all(isinstance(item, dict) for item in items):
        return value
    holds = [isinstance(item.get("error"), dict) or any(keys <= item.keys() for keys in LOGGED) for item in items]
    return plain if any(holds) else value


def unbatched(value: Any) -> Any:
    """Return the messages in LangChain's batch of one; return other values unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value


def whole(text: str, begin: re.Pattern[str] = LOGGED_TEXT) -> str:
    """Return a text; refuse one that begins as JSON of messages or of a reply does, and is cut off."""
    if begin.match(text) and parsed(text) is text and not events_of(text):
        raise LeftOutError(CUT_OFF)
    return text


def check_error(holder: Any) -> None:
    """Raise LeftOutError for an error in place of an answer."""
    if not isinstance(holder, dict):
        return
    status = [str(holder[key]).lower() for key in holder.keys() & STATUS]
    failed = [holder[key] for key in holder.keys() & ERRORS]
    failed += [value in FAILED or (value.isdigit() and int(value) >= 400) for value in status]
    if any(failed):
        raise LeftOutError(FAILURE)


def counts_reasoning(fields: Raw, names: Set[str] = USAGE | {"properties"}) -> bool:
    """Return whether a usage in a record or a reply, or one of its fields `names`, counts tokens of reasoning."""
    for name in fields.keys() & names:
        value = fields[name]
        is_counted = name in REASONED and value not in (None, 0, "0")
        if counts_reasoning(value, value.keys()) if isinstance(value, dict) else is_counted:
            return True
    return False


def events_of(text: Any) -> list[Raw]:
    """Return the objects of server-sent events or of Ollama's lines, but for a last one cut off; empty for others."""
    lines = [line for line in map(str.strip, text.split("\n")) if line] if isinstance(text, str) else []
    is_sse = bool(lines) and lines[0].startswith(SSE)
    data = [line[5:] for line in lines if line.startswith("data:") and not line.endswith("[DONE]")]
    events = [parsed(line) for line in (data if is_sse else lines)]
    least = set[str]() if is_sse else {"model", "done"}
    is_stream = all(isinstance(event, dict) and event.keys() >= least for event in events[:-1] or events)
    return [event for event in events if isinstance(event, dict)] if is_stream else []


def joined(reply: Any, notes: list[str]) -> Any:
    """Return the reply of a stream that was logged as events or their lines, and note further choices; else `reply`.

    The events are those of OpenAI, Anthropic, the Responses API, Bedrock, Gemini or Ollama, with or without their
    names. An answer is cut off if neither it nor its last item has an end.
    """
    if isinstance(reply, dict) and "done" not in reply:
        notes += [WITHHELD] * counts_reasoning(reply)
        return reply
    is_lines = isinstance(reply, list) and all(isinstance(line, str) for line in reply)
    lines = events_of("\n".join(reply) if is_lines else reply)
    events: Any = lines or ([reply] if isinstance(reply, dict) else reply)
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        return reply
    events = [parsed(event["data"]) if event.keys() <= {"event", "data", "id"} else event for event in events]
    events = [first(event, CONVERSE, event) for event in events]
    choices = [choice for event in events for key in CHOICES for choice in event.get(key) or ()]
    stream_keys = EVENTS - {"done"} if any({"role", "done"} <= event.keys() for event in events) else EVENTS
    are_whole = any(event.keys() >= {"delta", "message"} for event in events)  # Helicone's choices
    if not lines and (are_whole or not any(inner.keys() & stream_keys for inner in (*events, *choices))):
        return reply
    notes += [FURTHER] * any(choice.get("index") for choice in choices)
    notes += [WITHHELD] * any(map(counts_reasoning, events))
    message: Raw = {"role": "assistant"}
    blocks: dict[int, Raw] = {}
    parts: list[Raw] = []  # parts of Gemini's events
    items: dict[int, Raw] = {}  # items of the Responses API
    ends: list[Any] = []  # whether the answer ends, by each event that may end it
    for event in events:
        response, delta, kind = event.get("response"), event.get("delta"), str(event.get("type"))
        index = event.get("index" if kind.startswith("content_block") else "contentBlockIndex")
        if isinstance(response, dict) and response.get("status") not in (None, "queued", "in_progress"):
            return joined(dict(response), notes)
        check_error(event)
        choices = [choice for key in CHOICES for choice in event.get(key) or () if not choice.get("index")]
        for one in (event, *choices):
            ends += [one[key] for key in ENDS if key in one]
            for reason in finish_reasons(one):
                message["finish_reason"] = reason
        ends += [kind == "message_stop"] if kind in ("message_start", "message_stop") else []
        ends += [False] * bool(event.keys() & {"contentBlockIndex", "candidates"})
        for choice in choices:
            piece = choice.get("delta") or {}
            thinks = at(piece, "extra_content/google/thought")  # Gemini's, in OpenAI's form
            _merge(message, {"reasoning_content": piece.get("content")} if thinks else piece)
            parts += at(choice, "content/parts") or ()
        if "done" in event or isinstance(response, str):  # Ollama's; Cloudflare's
            fields = {name: event.get(name) for name in ("thinking", "tool_calls")}
            _merge(message, event.get("message") or {"content": response, **fields})
        if kind.startswith("response.output_"):
            item = items.setdefault(event.get("output_index", 0), {**UNFINISHED})
            _merge(item, {"content": delta if kind == "response.output_text.delta" else None})
            items |= {event["output_index"]: event["item"]} if kind == "response.output_item.done" else {}
        elif begun := first(event, ("content_block", "start")):
            blocks[index] = {key: {**value} if isinstance(value, dict) else value for key, value in begun.items()}
        elif isinstance(delta, dict):
            _merge(message if index is None else blocks.setdefault(index, {}), {**delta, "type": None})
    if items:
        return [items[i] for i in sorted(items)]
    for block in blocks.values():
        if "partial_json" in block:
            block["input"] = parsed(block.pop("partial_json") or "{}")
    listed = {key: [*value.values()] for key, value in message.items() if isinstance(value, dict) and 0 in value}
    content = parts or [blocks[i] for i in sorted(blocks)]
    cut = {"finish_reason": "length"} if ends and not any(ends) and not finish_reasons(message) else {}
    return message | listed | cut | ({"content": content} if content else {})


def _merge(into: Raw, delta: Raw) -> None:
    """Add a stream's delta: text is appended; a call is identified by its index until another id or name comes."""
    for key, value in delta.items():
        if isinstance(value, list) and key != "tool_calls":
            old = into.get(key) or ()
            into[key] = [*([{"text": old}] if isinstance(old, str) else old), *value]
        elif isinstance(value, str) and isinstance(into.get(key), list):
            into[key].append({"text": value})
        elif isinstance(value, list):
            calls = into.setdefault(key, {})
            for call in value:
                same_index = [number for number, other in calls.items() if other.get("index") == call.get("index")]
                old, number = (calls[same_index[-1]], same_index[-1]) if same_index else ({}, len(calls))
                named = [bool((one.get("function") or one).get("name")) for one in (old, call)]
                if call["id"] != old.get("id") if call.get("id") else all(named) and "index" not in call:
                    number = len(calls)
                _merge(calls.setdefault(number, {}), call)
        elif isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        elif isinstance(value, str) and key not in WHOLE:
            into[key] = into.get(key, "") + value
        elif value not in (None, ""):
            into[key] = value
