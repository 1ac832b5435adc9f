"""Shapes of records: the keys by which each is recognised, and the paths of request, reply, tools and model.

docs/data_sources.md links to each shape's schema.
"""

from typing import Any, NamedTuple

from data.text.parts import (
    CUT,
    HIDDEN,
    REFUSED,
    ROLES,
    BadSampleError,
    LeftOutError,
    Message,
    media_in,
    messages_of,
    parsed,
    text_of,
    tools_of,
    unread,
)

Raw = dict[str, Any]


REPLIES = ("response", "choices", "completion", "chosen", "output", "gen_ai.output.messages")
# Shapes of records; the first that matches counts. Each has a name and the paths of request and reply, with keys joined
# by `/`. An empty request path means the record itself; without a reply path the request holds the whole chat.
SHAPES = (
    ("Claude Code transcript", "claude_code", ""),
    ("Codex transcript", "codex", ""),
    ("OpenAI Batch", "body", "response/body"),
    ("Bedrock invocation log", "input/inputBodyJson", "output/outputBodyJson"),
    ("Helicone", "request_body", "response_body"),
    ("LangSmith run", "inputs", "outputs"),
    ("OpenTelemetry gen_ai span", "attributes", "attributes/gen_ai.output.messages"),
    ("LiteLLM spend log", "proxy_server_request", "response"),
    ("request and response", "request", "response"),
    *((f"chat and {reply}", "", reply) for reply in REPLIES),
    ("preference pair", "chosen", ""),
    ("OpenAI Batch input", "body", ""),
    ("chat", "", ""),
)
CHATS = ("messages", "conversations", "contents", "gen_ai.input.messages", "input", "prompt", "turns", "body")
SYSTEM = (
    *("system", "instructions", "systemInstruction", "system_instruction", "gen_ai.system_instructions"),
    *("system_prompt", "config/systemInstruction", "config/system_instruction"),
)
TOOLS = (
    *("tools", "toolConfig/tools", "gen_ai.tool.definitions", "functions", "config/tools"),
    *("model_parameters/tools", "optional_params/tools", "extra/invocation_params/tools"),
)
QUESTIONS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "output", "response", "completion", "chosen")
HOLDERS = (
    *("choices", "candidates", "generations", "output", "message", "content", "gen_ai.output.messages"),
    "messages",
)
FINISH = (
    *("finish_reason", "finishReason", "stop_reason", "stopReason", "done_reason"),
    *("incomplete_details", "generation_info"),
)
ERRORS = ("error", "errorCode", "error.type")
STATUS = ("status_code", "response_status", "status", "level", "type")
FAILED = ("failed", "failure", "error", "cancelled")
LOGGED = (  # keys by which a JSON text is recognised as a request or a reply
    *({name} for name in ("messages", "contents", "choices", "candidates", "generations")),
    *({"role", "content"}, {"model", "input"}, {"object", "output"}, {"output", "stopReason"}, {"message", "done"}),
)
MODELS = ("model", "modelId", "modelVersion", "gen_ai.response.model", "gen_ai.request.model")
# Fields of a stream that are replaced, not appended.
WHOLE = ("role", "id", "type", "name", "finish_reason", "stop_reason", "stop_sequence")
SSE = ("data:", "event:", "id:", "retry:", ":")  # starts of a server-sent event's lines
EVENTS = {"delta", "candidates", "done"}  # keys by which an object is recognised as an event of a stream


class Chat(NamedTuple):
    """A record as a chat."""

    shape: str
    messages: list[Message]
    tools: tuple[Message, ...] = ()
    model: str = ""  # the model that wrote the reply, as the record names it
    notes: tuple[str, ...] = ()  # keys for `Counts`


def at(value: Any, path: str) -> Any:
    """Return the value at a path of a record, or None."""
    for name in path.split("/") if path else ():
        value = opened(value.get(name)) if isinstance(value, dict) else None
    return value


def opened(value: Any) -> Any:
    """Return the value of a JSON text with a request, a reply or messages; an answer in JSON remains text."""
    plain = parsed(value)
    if isinstance(plain, dict):
        holds = any(keys <= plain.keys() for keys in LOGGED)
    else:
        holds = isinstance(plain, list) and all(isinstance(item, dict) and "role" in item for item in plain)
    return plain if holds and plain else value


def chat_of(raw: Raw) -> Chat | None:
    """Return a record as a chat by the first shape that fits, or None.

    Raises:
        BadSampleError: all keys but one match, a part is unsupported, or there is an error in place of an answer.
        TypeError, KeyError, AttributeError, IndexError, ValueError: a value has another type.
    """
    nearly = ""
    for name, path, reply_path in SHAPES:
        holder, reply = _asked(at(raw, path), not path), at(raw, reply_path)
        if holder is not None and reply_path and (path or (reply is not None and not reply)):
            _check_error(raw)
            _check_error(holder[0])
        if holder is None or reply is None:
            if path and reply_path and not holder is reply is None:
                other = ", which the batch's other file holds" if "custom_id" in raw else ""
                nearly = nearly or f"{name}, but has no {path if holder is None else reply_path}{other}"
            continue
        request, items = holder
        whole = ROLES.get(str(items[-1].get("role") or items[-1].get("from")).lower()) == "assistant"
        if reply_path and whole and not path:
            continue
        if whole and reply_path:
            raise BadSampleError("an answer behind a prefilled one", "its answer continues one that the request begins")
        return _chat(name, raw, request, items, reply if reply_path else None)
    question = next((key for key in (*QUESTIONS, *["input"] * ("output" in raw)) if isinstance(raw.get(key), str)), "")
    if question:
        reply = next((raw[key] for key in ANSWERS if raw.get(key) is not None), None)
        further = raw.get("input") or raw.get("context") if question == "instruction" else ""
        message = {"role": "user", "content": f"{raw[question]}\n\n{further}" if further else raw[question]}
        return _chat("question and answer", raw, raw, [message], reply)
    if nearly:
        raise BadSampleError(f"nearly {nearly}", f"is nearly of the shape {nearly}")
    return None


def _chat(name: str, raw: Raw, request: Raw, items: list[Raw], reply: Any) -> Chat:
    """Return the chat of a request's messages and a reply; None for a reply that the messages already contain."""
    notes = [str(note) for note in at(raw, "claude_code/notes") or ()]
    if reply is None and raw.keys() & {"error", "level"} and items[-1].get("role") != "assistant":
        _check_error(raw)
    messages = messages_of(items)
    system = next((value for key in SYSTEM if isinstance(value := at(request, key), str | list | dict)), "")
    system = parsed(system) if "gen_ai.system_instructions" in request else system
    instruction = text_of(system.get("parts", system) if isinstance(system, dict) else system)
    if instruction and (messages[0]["role"] != "system" or request.get("instructions")):  # Responses allows both
        messages.insert(0, {"role": "system", "content": instruction})
    if "gen_ai.input.messages" in request and isinstance(reply, list):  # each choice is a chat
        reply = [{"message": choice} for choice in reply]
    if reply is not None:
        replied = _answered(reply, notes)
        messages = replied if any(message["role"] == "user" for message in replied) else messages + replied
    holders = [holder for holder in (reply, request, raw) if isinstance(holder, dict)]
    model = next((str(holder[key]) for holder in holders for key in MODELS if holder.get(key)), "")
    hidden = [message.pop(HIDDEN, False) for message in messages]
    notes += ["whose reasoning the record does not hold"] * any(hidden)
    notes += ["whose earlier turns the record does not hold"] * any(h.get("previous_response_id") for h in holders)
    if media := media_in(request) or media_in(raw):
        raise unread(media)
    tools = next((value for path in TOOLS for holder in (request, raw) if (value := at(holder, path))), None)
    return Chat(name, messages, tools_of(tools), model, tuple(notes))


def _asked(request: Any, is_record: bool) -> tuple[Raw, list[Raw]] | None:
    """Return the dict with a request's messages, and the messages; None without messages.

    A string is a question if it is in a request; at the top level of a record it may be anything.
    """
    if isinstance(request, list):
        return ({}, request) if request and isinstance(request[0], dict) else None
    for key in CHATS if isinstance(request, dict) else ():
        value = opened(request.get(key))
        if isinstance(value, dict) and (inner := _asked(value, False)):
            return inner
        if isinstance(value, list) and value and isinstance(value[0], list):  # LangChain's batch of one
            value = value[0]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return request, value
        if isinstance(value, list) and value and isinstance(value[0], str) and is_record:  # turns: the first is asked
            return request, [{"role": "user", "content": value[0]}]
        if isinstance(value, str) and value and not is_record and key != "body":
            return request, [{"role": "user", "content": value}]
    return None


def _check_error(holder: Raw) -> None:
    """Raise LeftOutError for an error in place of an answer."""
    status = [str(holder[key]).lower() for key in STATUS if holder.get(key) is not None]
    if any(holder.get(key) for key in ERRORS) or any(
        value in FAILED or (value.isdigit() and int(value) >= 400) for value in status
    ):
        raise LeftOutError("an error in place of an answer", "holds an error in place of an answer")


def _answered(reply: Any, notes: list[str]) -> list[Message]:
    """Return a reply's messages; the last message is marked if it was cut off."""
    reasons: list[str] = []
    while not _are_items(reply := _joined(reply)):
        if isinstance(reply, str):
            reply = [{"role": "assistant", "content": reply}]
        elif isinstance(reply, list):
            notes += ["with further choices, which are left out"] * (len(reply) > 1)
            if not reply:
                raise LeftOutError("no answer", "holds no answer")
            first = [choice for choice in reply if isinstance(choice, list) or choice.get("index") == 0]
            reply = (first or reply)[0]
        else:
            _check_error(reply)
            reasons += [inner for key in FINISH if reply.get(key) for inner in _reasons(reply[key])]
            if isinstance(body := opened(reply.get("body")), dict):
                reply = body
                continue
            if isinstance(reply.get("content"), str | list) or reply.keys() & {"role", "parts", "kwargs"}:
                reply = [{"role": "assistant", **reply}]
                continue
            holder = next((reply[key] for key in HOLDERS if reply.get(key)), None)
            if holder is None and "text" in reply:
                raise TypeError("a completion of a text is no chat")
            if holder is None:
                raise LeftOutError("no answer", "holds no answer")
            reply = holder
    reasons += [reason for item in reply if item.get("finish_reason") for reason in _reasons(item["finish_reason"])]
    if any(reason in REFUSED for reason in reasons):
        raise LeftOutError("a refusal", "its answer is a refusal")
    messages = messages_of(reply)
    if {*CUT} & {*reasons} and messages:
        messages[-1]["finish_reason"] = "length"
    return messages


def _are_items(reply: Any) -> bool:
    """Return whether a reply is a list of messages or of items of the Responses API, and not of choices."""
    first = reply[0] if isinstance(reply, list) and reply else None
    if not isinstance(first, dict) or first.keys() & {"message", "delta", "response"}:
        return False
    return bool(first.keys() & {"role", "type", "from", "kwargs"})


def _events(text: str) -> list[Any]:
    """Return the objects of server-sent events; empty for any other text."""
    lines = text.splitlines()
    data = [line[5:].strip() for line in lines if line.startswith("data:")]
    is_stream = all(line.startswith(SSE) for line in lines if line) and any(item.startswith("{") for item in data)
    return [parsed(item) for item in data if item != "[DONE]"] if is_stream else []


def _reasons(value: Any) -> list[str]:
    return [str(inner).lower() for inner in (value.values() if isinstance(value, dict) else [value])]


def _joined(reply: Any) -> Any:
    """Return the reply of a stream that was logged as events or their lines; return anything else unchanged.

    The events are those of OpenAI, Anthropic, the Responses API, Gemini or Ollama, with or without their names.
    """
    if isinstance(reply, list) and reply and all(isinstance(line, str) for line in reply):
        reply = "\n".join(reply) if _events("\n".join(reply)) else reply
    events = (_events(reply) or reply) if isinstance(reply, str) else reply
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        return reply
    events = [parsed(event["data"]) if event.keys() <= {"event", "data", "id"} else event for event in events]
    if not any(inner.keys() & EVENTS for event in events for inner in (event, *(event.get("choices") or ()))):
        return reply
    message: Raw = {"role": "assistant"}
    blocks: dict[int, Raw] = {}
    parts: list[Raw] = []  # parts of Gemini's events
    for event in events:
        response, delta = event.get("response"), event.get("delta")
        if isinstance(response, dict) and response.get("status") in ("completed", "incomplete"):
            return dict(response)
        _check_error(event)
        for choice in event.get("choices") or ():
            if not choice.get("index"):
                _merge(message, {**(choice.get("delta") or {}), "finish_reason": choice.get("finish_reason")})
        for candidate in event.get("candidates", ())[:1]:
            parts += candidate.get("content", {}).get("parts", ())
            _merge(message, {"finish_reason": candidate.get("finishReason")})
        if "done" in event:
            _merge(message, {**event.get("message", {}), "finish_reason": event.get("done_reason")})
        if "content_block" in event:
            blocks[event["index"]] = dict(event["content_block"])
        if isinstance(delta, dict):
            _merge(blocks[event["index"]] if "index" in event else message, {**delta, "type": None})
    for block in blocks.values():
        if "partial_json" in block:
            block["input"] = parsed(block.pop("partial_json") or "{}")
    calls = [*message.pop("tool_calls", {}).values()]
    content = parts or [blocks[i] for i in sorted(blocks)]
    return message | ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})


def _merge(into: Raw, delta: Raw) -> None:
    """Add a stream's delta: text is appended; a call is identified by its index until another id or name comes."""
    for key, value in delta.items():
        if isinstance(value, list):
            calls = into.setdefault(key, {})
            for call in value:
                same_index = [number for number, other in calls.items() if other.get("index") == call.get("index")]
                old, number = (calls[same_index[-1]], same_index[-1]) if same_index else ({}, len(calls))
                named = [bool((one.get("function") or {}).get("name")) for one in (old, call)]
                if call["id"] != old.get("id") if call.get("id") else all(named) and "index" not in call:
                    number = len(calls)
                _merge(calls.setdefault(number, {}), call)
        elif isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        elif isinstance(value, str) and key not in WHOLE:
            into[key] = into.get(key, "") + value
        elif value is not None:
            into[key] = value
