"""Shapes of records: the keys by which each is recognised, and the paths of request, reply, tools and model.

docs/data_sources.md links to each shape's schema.
"""

import re
from typing import Any, NamedTuple

from data.text.parts import (
    CUT,
    HIDDEN,
    REASONING,
    REFUSED,
    ROLES,
    SHORTENED,
    BadSampleError,
    LeftOutError,
    Message,
    finish_reasons,
    media_in,
    messages_of,
    parsed,
    text_of,
    tools_of,
    unread,
)

Raw = dict[str, Any]


REPLIES = ("response", "choices", "completion", "chosen", "preferred_output", "output", "gen_ai.output.messages")
# Shapes of records; the first that matches counts. Each has a name and the paths of request and reply, with keys joined
# by `/`. An empty request path means the record itself; without a reply path the request holds the whole chat.
SHAPES = (
    ("Claude Code transcript", "claude_code", ""),
    ("Codex transcript", "codex", ""),
    ("OpenAI Batch", "body", "response/body"),
    ("Bedrock invocation log", "input/inputBodyJson", "output/outputBodyJson"),
    ("Bedrock batch", "modelInput", "modelOutput"),
    ("Anthropic batch", "params", "result/message"),
    ("Vertex AI log", "full_request", "full_response"),
    ("Helicone", "request_body", "response_body"),
    ("LangSmith run", "inputs", "outputs"),
    ("Weave call", "inputs", "output"),
    ("OpenTelemetry gen_ai span", "attributes", "attributes/gen_ai.output.messages"),
    ("MLflow span", "attributes/mlflow.spanInputs", "attributes/mlflow.spanOutputs"),
    ("promptfoo", "prompt/raw", "response/output"),
    ("LiteLLM spend log", "proxy_server_request", "response"),
    ("request and response", "request", "response"),
    ("request and response", "requestBody", "responseBody"),
    ("request and response", "request_json", "response_json"),
    ("request and response", "raw_request", "raw_response"),
    *((f"chat and {reply}", "", reply) for reply in REPLIES),
    ("preference pair", "chosen", ""),
    ("OpenAI Batch input", "body", ""),
    ("Anthropic batch input", "params", ""),
    ("chat", "", ""),
)
CHATS = (
    *("messages", "conversations", "contents", "gen_ai.input.messages", "input", "prompt", "turns", "body"),
    *("kwargs", "conversation"),
)
TURNS = ("turns", "prompt")  # of them those whose texts are a user's turns
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
    *("messages", "streamed_data", "chunks"),
)
ERRORS = {"error", "errorCode", "error.type", "error_str", "exception"}
STATUS = {"status_code", "response_status", "status", "level", "type"}
FAILED = {"failed", "failure", "error", "cancelled", "errored", "canceled", "expired"}
NO_ANSWER, FAILURE = "no answer", "an error in place of an answer"
LOGGED = (  # keys by which a JSON text is recognised as a request or a reply
    *({name} for name in ("messages", "contents", "choices", "candidates", "generations")),
    *({"role", "content"}, {"model", "input"}, {"object", "output"}, {"output", "stopReason"}, {"message", "done"}),
)
MODELS = (*("model", "modelId", "modelVersion", "gen_ai.response.model", "gen_ai.request.model", "llm.model_name"),)
# Fields that say what a step of a trace is, and the kinds of steps that are no call of a model. Some hold what a model
# was asked and what a program returned; others hold a call that has a step of its own.
STEPS = (
    *("type", "run_type", "span_kind", "attributes/gen_ai.operation.name", "attributes/openinference.span.kind"),
    *("attributes/traceloop.span.kind", "attributes/mlflow.spanType"),
)
NO_CALLS = {
    *("SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL", "RERANKER"),
    *("PROMPT", "PARSER", "WORKFLOW", "TASK", "EMBEDDINGS", "EXECUTE_TOOL", "INVOKE_AGENT", "CREATE_AGENT"),
    "INVOKE_WORKFLOW",
}
COUNTED = (  # the tokens of reasoning, by the reply's usage
    *("usage/completion_tokens_details/reasoning_tokens", "usage/output_tokens_details/reasoning_tokens"),
    "usageMetadata/thoughtsTokenCount",
)
RENDERED = re.compile(  # what a chat template, or a client of an older API, writes between turns
    r"<\|(?:im_start|start_header_id|start|user|begin_of_text)\|>|\[INST\]|<start_of_turn>|\n\nHuman:|<\uff5cUser\uff5c>"
)
# Fields of a stream that are replaced, not appended.
WHOLE = ("role", "id", "type", "name", "finish_reason", "stop_reason", "stop_sequence", "format", "signature")
SSE = ("data:", "event:", "id:", "retry:", ":")  # starts of a server-sent event's lines
EVENTS = {"delta", "candidates", "done", "response", "output_index"}  # keys by which an object is a part of a stream
CONVERSE = (  # the events of Bedrock's ConverseStream, each around its fields
    *("messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop"),
)
ENDS = ("finish_reason", "done", "stopReason")  # fields of events that say whether the answer ends
UNFINISHED = {"type": "message", "role": "assistant", "content": "", "finish_reason": "length"}


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
        if not isinstance(value, dict) or (value := value.get(name)) is None:
            return None
        value = opened(value)
    return value


def opened(value: Any) -> Any:
    """Return the value of a JSON text with a request, a reply or messages; an answer in JSON remains text."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
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
    nearly: list[tuple[bool, str]] = []
    for field in STEPS:
        kind = str(at(raw, field)).strip('"')
        if kind.upper() in NO_CALLS and (field != "type" or kind.isupper()):
            raise LeftOutError("a step of a trace that is no call of a model", f"is no call of a model but a {kind}")
    if raw.get("label") is False and "completion" in raw:  # TRL's unpaired preference
        raise LeftOutError("an answer that is marked as bad", "its answer is marked as bad")
    for name, path, reply_path in SHAPES:
        request, reply = at(raw, path), at(raw, reply_path)
        if request is reply is None:
            continue
        holder = _asked(request, not path)
        if holder is None and path and isinstance(request, str) and isinstance(reply, str):
            holder = _asked({"prompt": request}, False)
        if holder is not None and reply_path and (path or (reply is not None and not reply)):
            for side in (raw, holder[0], at(raw, reply_path.rpartition("/")[0])):
                _check_error(side)
        if holder is None or reply is None:
            if path and reply_path and not holder is reply is None:
                other = ", which the batch's other file holds" if "custom_id" in raw else ""
                missing = path if holder is None else reply_path
                nearly.append((missing.split("/")[0] in raw, f"{name}, but has no {missing}{other}"))
            continue
        request, items = holder
        roles = [ROLES.get(str(item.get("role") or item.get("from")).lower()) for item in items]
        whole = roles[-1] == "assistant"
        if name == "preference pair" and "user" not in roles:
            continue
        if reply_path and whole and not path and _is_in(reply, items[-1]):
            continue
        if whole and reply_path:
            raise BadSampleError("an answer behind a prefilled one", "its answer continues one that the request begins")
        return _chat(name, raw, request, items, reply if reply_path else None)
    question = next((key for key in (*QUESTIONS, *["input"] * ("output" in raw)) if isinstance(raw.get(key), str)), "")
    if question:
        reply = next((raw[key] for key in ANSWERS if raw.get(key) is not None), None)
        further = raw.get("input") or raw.get("context") if question == "instruction" else ""
        message = _question(f"{raw[question]}\n\n{further}" if further else raw[question])
        return _chat("question and answer", raw, raw, [message], reply)
    if nearly:
        nearest = max(nearly, key=lambda item: item[0])[1]  # a field that is there, though empty
        raise BadSampleError(f"nearly {nearest}", f"is nearly of the shape {nearest}")
    return None


def _is_in(reply: Any, last: Raw) -> bool:
    """Whether a chat's last message is the reply beside it, or what stands there is no reply."""
    try:
        answers = _answered(reply, [])
    except LeftOutError as error:
        if error.cause == NO_ANSWER:
            return True
        raise
    except (TypeError, KeyError, AttributeError, IndexError):
        return True
    return not answers or answers[-1]["content"] == messages_of([last])[-1]["content"]


def _chat(name: str, raw: Raw, request: Raw, items: list[Raw], reply: Any) -> Chat:
    """Return the chat of a request's messages and a reply; None for a reply that the messages already contain."""
    notes = [str(note) for note in at(raw, "claude_code/notes") or ()]
    if reply is None and raw.keys() & {*ERRORS, "level"} and items[-1].get("role") != "assistant":
        _check_error(raw)
    messages = messages_of(items)
    system = next((value for key in SYSTEM if isinstance(value := at(request, key), str | list | dict)), "")
    system = parsed(system) if "gen_ai.system_instructions" in request else system
    instruction = text_of(system.get("parts", system) if isinstance(system, dict) else system)
    if instruction and (messages[0]["role"] != "system" or request.get("instructions")):  # Responses allows both
        messages.insert(0, {"role": "system", "content": instruction})
    if "gen_ai.input.messages" in request and isinstance(reply, list):  # each choice is a chat
        reason = next(iter(request.get("gen_ai.response.finish_reasons") or ()), None)
        reply = [{"message": choice, "finish_reason": reason} for choice in reply]
    if reply is not None:
        replied = _answered(reply, notes)
        messages = replied if any(message["role"] == "user" for message in replied) else messages + replied
    holders = [holder for holder in (reply, request, raw) if isinstance(holder, dict)]
    model = next((str(holder[key]) for holder in holders for key in MODELS if holder.get(key)), "")
    hidden = [message.pop(HIDDEN, False) for message in messages]
    if not messages[-1].keys() & {*REASONING}:
        hidden += [at(reply, path) for path in COUNTED]
    notes += ["whose reasoning the record does not hold"] * any(hidden)
    earlier = [h.get("previous_response_id") or isinstance(h.get("conversation"), str | dict) for h in holders]
    notes += ["whose earlier turns the record does not hold"] * any(earlier)
    if any(SHORTENED.search(message["content"]) for message in messages):
        raise LeftOutError("a text that the log has shortened", "holds a text that the log has shortened")
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
        if isinstance(value, list) and value and isinstance(value[0], dict) and key != "kwargs":
            return request, value
        if isinstance(value, list) and value and isinstance(value[0], str) and is_record and key in TURNS:
            return request, [_question(value[0])]  # the first turn is asked
        if isinstance(value, str) and value and not is_record and key not in ("body", "conversation"):
            return request, [_question(value)]
    return None


def _question(text: str) -> Raw:
    """Return a text as a user's message; refuse one that a chat template has written."""
    if RENDERED.search(text):
        why = "its prompt is a chat that a template has rendered; give its messages"
        raise BadSampleError("a prompt that a chat template has rendered", why)
    return {"role": "user", "content": text}


def _check_error(holder: Any) -> None:
    """Raise LeftOutError for an error in place of an answer."""
    if not isinstance(holder, dict):
        return
    status = [str(holder[key]).lower() for key in holder.keys() & STATUS]
    if any(holder[key] for key in holder.keys() & ERRORS) or any(
        value in FAILED or (value.isdigit() and int(value) >= 400) for value in status
    ):
        raise LeftOutError(FAILURE, f"holds {FAILURE}")


def _answered(reply: Any, notes: list[str]) -> list[Message]:
    """Return a reply's messages; the last message is marked if it was cut off."""
    reasons: list[str] = []
    while not _are_items(reply := _joined(reply)):
        if isinstance(reply, str):
            reply = [{"role": "assistant", "content": reply}]
        elif isinstance(reply, list):
            notes += ["with further choices, which are left out"] * (len(reply) > 1)
            if not reply:
                raise LeftOutError(NO_ANSWER, f"holds {NO_ANSWER}")
            first = [choice for choice in reply if isinstance(choice, list) or choice.get("index") == 0]
            reply = (first or reply)[0]
        else:
            _check_error(reply)
            reasons += finish_reasons(reply)
            if isinstance(body := opened(reply.get("body")), dict):
                reply = body
                continue
            is_message = isinstance(reply.get("content"), str | list) or (
                "type" in reply and isinstance(reply.get("data"), dict)
            )
            if is_message or reply.keys() & {"role", "parts", "kwargs", "from"}:
                reply = [{"role": "assistant", **reply}]
                continue
            holder = next((reply[key] for key in HOLDERS if reply.get(key)), None)
            if holder is None and "text" in reply:
                raise TypeError("a completion of a text is no chat")
            if holder is None and not REFUSED & {*reasons}:
                raise LeftOutError(NO_ANSWER, f"holds {NO_ANSWER}")
            reply = holder or [{"role": "assistant"}]
    reasons += [reason for item in reply[-1:] for reason in finish_reasons(item)]
    if "error" in reasons:
        raise LeftOutError(FAILURE, f"holds {FAILURE}")
    if REFUSED & {*reasons}:
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


def _joined(reply: Any) -> Any:
    """Return the reply of a stream that was logged as events or their lines; return anything else unchanged.

    The events are those of OpenAI, Anthropic, the Responses API, Bedrock, Gemini or Ollama, with or without their
    names. An answer is cut off if neither it nor its last item has an end.
    """
    is_lines = isinstance(reply, list) and all(isinstance(line, str) for line in reply)
    text = "\n".join(reply) if is_lines else reply
    events = (_events(text) or reply) if isinstance(text, str) else reply
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        return reply
    events = [parsed(event["data"]) if event.keys() <= {"event", "data", "id"} else event for event in events]
    events = [next((event[name] for name in CONVERSE if name in event), event) for event in events]
    if not any(inner.keys() & EVENTS for event in events for inner in (event, *(event.get("choices") or ()))):
        return reply
    message: Raw = {"role": "assistant"}
    blocks: dict[int, Raw] = {}
    parts: list[Raw] = []  # parts of Gemini's events
    items: dict[int, Raw] = {}  # items of the Responses API
    ends: list[Any] = []  # of each event that may end the answer whether it does
    for event in events:
        response, delta, kind = event.get("response"), event.get("delta"), str(event.get("type"))
        index = event.get("index", event.get("contentBlockIndex"))
        if isinstance(response, dict) and response.get("status") not in (None, "queued", "in_progress"):
            return dict(response)
        _check_error(event)
        choices = [choice for choice in event.get("choices") or () if not choice.get("index")]
        candidates = event.get("candidates", ())[:1]
        for one in (event, *choices, *candidates):
            ends += [one[key] for key in ENDS if key in one]
            for reason in finish_reasons(one):
                message["finish_reason"] = reason
        ends += [kind == "message_stop"] if kind in ("message_start", "message_stop") else []
        ends += [False] * ("contentBlockIndex" in event)
        for choice in choices:
            _merge(message, choice.get("delta") or {})
        for candidate in candidates:
            parts += candidate.get("content", {}).get("parts", ())
        if "done" in event:
            _merge(message, event.get("message", {}))
        if kind.startswith("response.output_"):
            item = items.setdefault(event.get("output_index", 0), {**UNFINISHED})
            _merge(item, {"content": delta if kind == "response.output_text.delta" else None})
            items |= {event["output_index"]: event["item"]} if kind == "response.output_item.done" else {}
        elif begun := event.get("content_block", event.get("start")):
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
