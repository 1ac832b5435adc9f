"""Messages of SDKs, servers and agents, converted to OpenAI's chat messages with text content.

Content parts become text, reasoning, tool calls or tool results by their type; other types are refused by name.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from data.text.files import filled
from heads.common.untrusted import parse_json

Message = dict[str, Any]
Messages = list[Message]


def _by_name(**names: str) -> dict[str, str]:
    """Return a dict that maps each of the space-separated names to its key."""
    return {name: key for key, value in names.items() for name in value.split()}


ROLES = _by_name(
    user="user human HumanMessage HumanMessageChunk UserMessage",
    assistant="assistant gpt chatgpt bing bard model chatbot function_call tool_call ai message AIMessage "
    "AIMessageChunk AssistantMessage",
    tool="tool observation function tool_response ToolMessage FunctionMessage",
    system="system SystemMessage",
)
PARTS = _by_name(  # a part's type, or its key in Bedrock and Gemini -> its kind
    text="text input_text output_text",
    reasoning="thinking reasoning reasoningContent reasoning_content reasoning_text reasoning.text",
    call="tool_use tool-call tool_call toolUse functionCall function_call custom_tool_call function",
    result="tool_result tool-result tool_call_response toolResult functionResponse function_response "
    "function_call_output custom_tool_call_output function_result tool_call_result",
    hidden="redacted_thinking redactedContent reasoning.encrypted reasoning.summary",
    refusal="refusal",
    nothing="cachePoint cache_point",
)
RESULTS = ("json", "error-json", "error-text", "content")  # types of a tool's result besides text parts
REASONING = ("reasoning_content", "thinking", "reasoning", "tool_plan")  # most servers; gpt-oss; newer servers; Cohere
GIVEN = ("arguments", "parameters")  # fields of calls and function definitions in which null is a value
CALLERS = ("function_call", "tool_call")  # ShareGPT's and ms-swift's roles for a tool call in JSON
CONTENTS = ("parts", "content", "contents", "value", "text", "blocks", "items")
NEW_TURN = {"reasoning": {"text", "call"}, "text": {"call"}}  # kind of part -> kinds after which it begins a turn
SCHEMAS = ("input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema")
SPEAKERS = ROLES.keys() - {*CALLERS}
IDS = ("tool_call_id", "tool_use_id", "toolUseId", "toolCallId", "call_id", "id")
FINISH = {
    "finish_reason", "finishReason", "stop_reason", "stopReason", "done_reason",
    "incomplete_details", "generation_info", "response_metadata", "amazon-bedrock-guardrailAction", "$ai_stop_reason",
}  # fmt: skip
ENDS = ("stop", "end_turn", "eos", "eos_token", "tool_use", "tool_calls")  # stop reasons that are not a stop string
WEIGHTS = {"weight", "training", "train", "loss"}  # fields by which a message is not trained: OpenAI's; others'
# Fields of a message that templates do not read: bookkeeping of replies, and fields renamed here.
BOOKKEEPING = {
    "from", "type", "id", "model", "usage", "status", "stop_reason", "stop_sequence", "stop_details", "phase",
    "container", "logprobs", "refusal", "annotations", "function_call", "tool_calls", "provider_specific_fields",
    "thinking_blocks", "finish_reason", "reasoning_details", "additional_kwargs", "response_metadata", "usage_metadata",
    "invalid_tool_calls", "example", "tool_call_chunks", "tool_call_ids", "is_demo", "function_call_name",
    "function_call_arguments_json", *CONTENTS, *WEIGHTS, *REASONING,
}  # fmt: skip
REASONS = _by_name(  # a reason for which an answer ended -> OpenAI's name of it; any other is a stop
    length="length max_tokens max_output_tokens model_context_window_exceeded stop_sequence pause_turn model_length "
    "incomplete malformed_function_call malformed_tool_use malformed_model_output malformed_response other unknown "
    "unexpected_tool_call too_many_tool_calls abort aborted cancelled canceled user_cancel timeout time_limit "
    "token_limit error_limit network_error insufficient_system_resource streaming input-streaming enum_2 enum_10",
    content_filter="content_filter refusal safety guardrail_intervened content_filtered prohibited_content recitation "
    "blocklist spii intervened language image_safety sensitive error_toxic enum_3 enum_4 enum_6 enum_7 enum_8 enum_9",
    error="error",
)
MEDIA = {  # keys and types of content that is not text
    f"{before}{kind}{after}"
    for kind in ("image", "video", "audio", "images", "videos", "audios")
    for before in ("", "input_")
    for after in ("", "_url")
}
STEP = re.compile(r"step-start|tool-(?!call$|result$)|dynamic-tool")  # types of parts of the AI SDK's UI messages
HIDDEN = "hidden"  # the field of a message whose server withheld the reasoning
# Patterns for `match`: `search` would try each of them at every character.
REPLACED = re.compile(  # what a log writes in place of a text: also Python's repr of a reply, Strands' parts in JSON
    r"(redacted-by-litellm|__REDACTED__)$|<truncated due to size|\[Scrubbed due to |<NoneType re|<[\w.]+ object at 0x"
    r"|[\[{]+'(message\.)?(?:role|messages|contents?|choices|id)': |(?:ChatCompletion|ModelResponse|Response)\((id|\s)"
    r'|\[\{"(?:text|toolUse|toolResult)": |(?s:.*)\(litellm_truncated'
)
# What Cline writes in place of an answer, or behind one that was interrupted.
CLIENT = re.compile(r"Failure: I did not provide a response\.$|(?s:.*)\n\n\[Response interrupted by [^\]]*\]\Z")


class BadSampleError(ValueError):
    """A record that cannot be used: of unknown shape, or without an exact mask."""

    def __init__(self, cause: str, message: str = "") -> None:
        self.cause, self.message = cause, message or f"holds {cause}"
        super().__init__(f"{self.message}, or set data.on_bad=drop")


class LeftOutError(BadSampleError):
    """A record of a log with an error or a refusal in place of an answer."""


def parsed(value: Any) -> Any:
    """Return the value of a JSON string; return other values, and deeply nested ones, unchanged."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def first(fields: Message, names: Iterable[str], default: Any = None) -> Any:
    """Return the first of the named fields that is not empty."""
    return next((fields[name] for name in names if fields.get(name)), default)


def finish_reasons(fields: Message) -> list[str]:
    """Return the reasons for which a reply or a message ended, by OpenAI's names."""
    given = [fields[key] for key in fields.keys() & FINISH if fields[key] and fields[key] != "NONE"]  # a guardrail's
    given += [f"enum_{fields[key]}" for key in ("finish_reason", "finishReason") if type(fields.get(key)) is int]
    matched = first(fields, ("stop_reason", "matched_stop")) if "finish_reason" in fields else None
    given += ["stop_sequence"] * (isinstance(matched, str) and matched not in ENDS)  # vLLM's and SGLang's stop string
    holders = [value if isinstance(value, dict) else {"": value} for value in given]
    holders += [inner for holder in holders for inner in holder.values() if isinstance(inner, dict)]
    names = [str(reason).lower().rpartition(".")[2] for holder in holders for reason in holder.values()]
    return [REASONS.get(name.replace("-", "_"), "stop") for name in names]


def reasons_in(reply: Any) -> list[str]:
    """Return the reasons for which a reply, or the first of its choices, ended."""
    while isinstance(reply, list) and reply:
        reply = reply[0]
    if not isinstance(reply, dict):
        return []
    inner = first(reply, ("choices", "candidates", "generations"))
    return finish_reasons(reply) or reasons_in(inner)


def content_text(message: Message) -> str:
    """Return a message's text, or the joined text parts of its content."""
    return text_of(message.get("content") or "")


def unread(name: str) -> BadSampleError:
    """Return the error for a part, item or field of an unsupported type."""
    if name in MEDIA:
        why = f"it holds more than text ({name}), and only text is read, of vision checkpoints too; remove the record"
        return BadSampleError("more than text", why)
    return BadSampleError(f"a part of type {name}", f"it holds a part of type {name}, which is not read; remove it")


def media_in(fields: Message) -> str:
    """Return the name of the first field with content that is not text, empty without one."""
    return next((key for key in fields if key in MEDIA and fields[key]), "")


def text_of(value: Any) -> str:
    """Return the text of a system prompt, content or a tool's result (JSON if that is no text); refuse other parts."""
    if isinstance(value, str | None):
        return value or ""
    pieces = value if isinstance(value, list) else [value]
    if not all(isinstance(piece, dict) for piece in pieces):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return "".join(map(_part_text, pieces))


def _part_text(piece: Message) -> str:
    if PARTS.get(piece.get("type") or next(iter(piece), "")) == "nothing":
        return ""
    default = media_in(piece) or ("text" if "text" in piece else "json")
    kind = piece.get("type") or default
    if PARTS.get(kind) == "text":
        return text_of(first(piece, ("text", "content", "value")))
    if kind not in RESULTS:
        raise unread(str(kind))
    value = piece.get("json", piece.get("value", piece))
    if kind == "content":
        return text_of(value)
    compact = (",", ":") if "type" in piece else None  # as JavaScript writes it
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=compact)


def messages_of(items: Any) -> Messages:
    """Return messages with OpenAI's keys and roles; items of the Responses API are joined into turns; refuse others."""
    messages: Messages = []
    for item in items:
        is_item = item.get("type") in PARTS and "role" not in item
        for message in _messages({"role": "assistant", "content": [item]} if is_item else item):
            last = messages[-1] if messages else {}
            spoken = last.get("content") or "tool_calls" in last
            is_part = is_item or item.get("type") == "message" or (HIDDEN in last and not spoken)
            answers = is_part and message["role"] == last.get("role") == "assistant"
            thinks = any(name in message for name in (*REASONING, HIDDEN))
            if answers and not (spoken and (thinks or message["content"])):  # parts of one turn: reasoning, text, calls
                merged = {**last, **message, "content": last["content"] or message["content"]}
                thoughts = [one["reasoning_content"] for one in (last, message) if "reasoning_content" in one]
                merged |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
                calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
                messages[-1] = merged | ({"tool_calls": calls} if calls else {})
            else:
                messages.append(message)
    return messages


def _messages(raw: Message) -> Iterator[Message]:
    """Yield the tool results in a message, then the message; Anthropic and others put them into a user's message."""
    raw = {key: value for key, value in raw.items() if value is not None}
    if raw.keys() == {"role", "content"} and raw["role"] in SPEAKERS and isinstance(raw["content"], str):
        yield {**raw, "role": ROLES[raw["role"]]}  # most messages, in a fifth of the time
        return
    inner = first(raw, ("kwargs", "data"))
    if isinstance(inner, dict):  # LangChain's message, serialised or as a dict
        raw = {"role": raw["id"][-1] if "lc" in raw else raw["type"], **inner}  # ChatMessage has a role
    if isinstance(more := raw.get("additional_kwargs"), dict):  # LangChain's extra fields, unless the message has them
        names = "tool_calls", "function_call", "tool_call_id", "refusal", *REASONING
        raw |= {key: more[key] for key in names if more.get(key) and not raw.get(key)}
    if raw.get("toolInvocations") and not raw.get("parts"):
        raise unread("toolInvocations")
    if any(isinstance(piece, dict) and STEP.match(str(piece.get("type"))) for piece in raw.get("parts") or ()):
        for step in _steps(raw):
            yield from _messages(step)
        return
    name = first(raw, ("role", "from", "type")) or ("user" if "parts" in raw else raw["type"])
    role = ROLES.get(name, ROLES.get(name.lower(), name))
    role = "tool" if role == "user" and "tool_call_id" in raw else role  # OpenInference's, of Anthropic's results
    if name == raw.get("type") and name not in ROLES:
        raise unread(name)
    fields = filled({key: value for key, value in raw.items() if key not in BOOKKEEPING}, GIVEN)
    if media := media_in(raw):
        raise unread(media)
    if raw.get("channel") == "analysis":  # gpt-oss's, a message for each channel
        raise unread("channel")
    if role == "user" and raw.keys().isdisjoint(CONTENTS):
        raise BadSampleError("a user's message without a text that is read")
    content = first(raw, CONTENTS, "")
    if name in CALLERS and isinstance(content, str):
        value = parsed(content)
        value = value if isinstance(value, list) else [value]
        if value and all(isinstance(call, dict) and "name" in call for call in value):
            content = [{"type": "function_call", **call} for call in value]
    by_kind: dict[str, list[Any]] = {}
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    others: list[Any] = [raw["function_call"]] if raw.get("function_call") else []
    others += raw.get("invalid_tool_calls") or ()  # LangChain's, of broken arguments
    if role == "assistant" and "function_call_name" in raw:  # OpenInference's, until 2024
        others.append({"name": raw["function_call_name"], "arguments": raw.get("function_call_arguments_json")})
    for i, piece in enumerate([*parts, *({**call, "type": "function_call"} for call in others)]):
        before = {*by_kind}
        kind = _take(piece, by_kind)
        begins = before & NEW_TURN.get(kind, set()) and (kind == "text" or before != {"text"})  # OpenLLMetry's
        if role == "assistant" and begins and "tool_calls" not in raw:
            rest = {key: value for key, value in raw.items() if key not in CONTENTS}  # two turns, as Responses' items
            yield from _messages({key: rest[key] for key in rest.keys() - FINISH} | {"content": parts[:i]})
            yield from _messages({**rest, "content": parts[i:]})
            return
    calls = [_call(call) for call in parsed(raw.get("tool_calls")) or ()]
    listed = {None, *(call.get("id") for call in calls)} if calls else ()  # LangChain also has them in its content
    calls = [call for call in map(_call, by_kind.get("call", ())) if call.get("id") not in listed] + calls
    for result in by_kind.get("result", ()):
        named = {"tool_call_id": first(result, IDS), "name": result.get("name")}
        answer = {"role": "tool", "content": _result_text(result)}
        yield answer | {key: value for key, value in named.items() if value}
    if raw.get("refusal") or "refusal" in by_kind:
        raise LeftOutError("a refusal")
    details: dict[str, list[Any]] = {}
    for piece in first(raw, ("reasoning_details", "thinking_blocks"), ()):  # OpenRouter's, also summaries; LiteLLM's
        _take(piece, details)
    thought = "".join(by_kind.get("reasoning", ()))
    result = {**fields, "role": role, "content": "".join(by_kind.get("text", ()))}
    if "reasoning" in details or "hidden" not in details:
        result |= {key: raw[key] for key in REASONING if isinstance(raw.get(key), str)}
        thought = thought or "".join(() if result.keys() & {*REASONING} else details.get("reasoning", ()))
    ends = [raw.get("status"), *(piece.get("state") for piece in parts)]  # of Responses' items; of the AI SDK's parts
    reasons = finish_reasons(raw) + [REASONS.get(str(end), "") for end in ends] if role == "assistant" else []
    cut = "length" if "length" in reasons else ""
    hidden = "hidden" in by_kind or "hidden" in details or isinstance(raw.get("reasoning"), dict)
    added = {"reasoning_content": thought, "tool_calls": calls, "finish_reason": cut, HIDDEN: hidden}
    result |= {key: value for key, value in added.items() if value}
    result |= {"tool_call_id": raw["tool_call_ids"][0]} if raw.get("tool_call_ids") else {}  # SWE-agent's
    untrained = "content_filter" in reasons or any(raw[key] in (0, "0") for key in raw.keys() & WEIGHTS)
    result |= {"weight": 0} if untrained or raw.get("is_demo") or CLIENT.match(result["content"]) else {}
    if "result" not in by_kind or {*by_kind} - {"result", "nothing"} or calls:
        yield result


def _result_text(result: Message) -> str:
    """Return the text of a tool's result; a `response` or `result` without known parts is any JSON (Gemini, OTel)."""
    key = next((key for key in ("content", "output", "response", "result") if key in result), "")
    value = result.get(key, "")
    listed = value if isinstance(value, list) and value else [value]
    plain = [{"text"}] if listed is value else ()  # Strands'
    are_parts = all(isinstance(one, dict) and (one.get("type") in PARTS or one.keys() in plain) for one in listed)
    is_text = key in ("content", "output") or isinstance(value, str | None) or are_parts
    return text_of(value) if is_text else json.dumps(value, ensure_ascii=False)


def _steps(raw: Message) -> Iterator[Message]:
    """Yield the AI SDK's message for the UI as those of its steps: what the model wrote, then its tools' results."""
    content, results = Messages(), Messages()
    for piece in [*raw["parts"], {"type": "step-start"}]:
        tool = piece.get("toolInvocation", piece)
        if piece.get("type") == "step-start":
            messages = {raw["role"]: content, "tool": results}
            yield from ({"role": role, "content": pieces} for role, pieces in messages.items() if pieces)
            content, results = [], []
        elif "toolCallId" not in tool:
            content.append(piece)
        else:
            if tool.get("providerExecuted"):
                raise unread("providerExecuted")
            name = tool.get("toolName") or piece["type"].removeprefix("tool-")
            arguments = first(tool, ("input", "args", "rawInput"), {})
            fields = {"toolCallId": tool["toolCallId"], "toolName": name, "input": arguments}
            content.append({"type": "tool-call", "state": tool.get("state"), **fields})
            output = next((tool[key] for key in ("output", "result", "errorText") if key in tool), None)
            if output is not None:
                value = output if isinstance(output, str) else {"type": "json", "value": output}
                results.append({"type": "tool-result", "toolCallId": tool["toolCallId"], "output": value})


def _take(piece: Message, by_kind: dict[str, list[Any]]) -> str:
    """Add a part's content to the lists of its kind, and return the kind."""
    piece = {key: value for key, value in piece.get("message_content", piece).items() if value is not None}
    name = first(piece, ("type", "kind", "block_type", "content_type"))  # Pydantic AI's; LlamaIndex'; Semantic Kernel's
    name = name or next((key for key in piece if key in PARTS), next(iter(piece), "none"))
    kind, inner = PARTS.get(name, str(name)), piece.get(name)
    body: Any = inner if isinstance(inner, dict) else piece
    if kind == "text":
        body = first(piece, ("text", "content"), "")
        if not isinstance(body, str):
            raise TypeError("a text part holds no text")
        if body.startswith('{"reasoningContent": '):  # OpenLLMetry's, of Bedrock's
            return _take(parsed(body), by_kind)
        kind = "nothing" if not body else "reasoning" if piece.get("thought") is True else "text"  # Gemini
    elif kind == "reasoning":
        body = body["content"] if isinstance(body.get("content"), dict) else body  # Strands'
        text = body.get("reasoningText", body)
        value = first(text, ("thinking", "text", "content", "reasoning"), "")
        if isinstance(value, list):  # a Responses item's own reasoning; its summary is by another model
            value = [{"text": item["text"]} for item in value]
        elif '"type": "summary_text"' in value or str(text.get("id")).startswith("rs_"):  # OpenLLMetry's, LangChain's
            value = ""
        kind, body = "reasoning" if value else "hidden", text_of(value)
    elif kind not in ("call", "result", "hidden", "nothing", "refusal"):
        raise unread(kind)
    by_kind.setdefault(kind, []).append(body)
    return kind


def _call(call: Message) -> Message:
    """Return a call in OpenAI's format, except that the arguments are an object, as chat templates expect."""
    call = filled(call, (*GIVEN, "input", "args"))
    function = dict(first(call, ("function", "custom"), {"name": first(call, ("name", "toolName", "tool_name"))}))
    if not function.get("name"):
        raise unread(f"{call.get('type', 'call')} without a name")
    names = "arguments", "input", "args", "tool_kwargs"
    given: Any = next((holder.pop(key) for holder in (function, call) for key in names if key in holder), {})
    function["arguments"] = parsed(given)  # OpenAI encodes them as JSON text
    ids = {"id": identity} if (identity := first(call, IDS)) else {}
    return {"type": "function", **ids, "function": filled(function, GIVEN)}


def tools_of(value: Any) -> tuple[Message, ...]:
    """Return function definitions in OpenAI's format, as endpoints and many templates expect."""
    listed = parsed(value or [])
    if not isinstance(listed, list):
        raise TypeError("tools are no list")
    tools: Messages = []
    several = (tool.get("functionDeclarations", tool.get("function_declarations", [tool])) for tool in listed)
    for given in (filled(tool, (*GIVEN, "input_schema")) for declared in several for tool in declared):
        tool = parsed(given.get("json_schema", given))  # OpenInference's, of Bedrock's too
        tool = tool.get("toolSpec", tool)
        if "cachePoint" in tool:
            continue
        if "function" not in tool and "name" in tool:
            schema = first(tool, SCHEMAS)
            schema = schema["json"] if isinstance(schema, dict) and "json" in schema else schema  # Bedrock's
            function = {key: value for key, value in tool.items() if key not in ("type", "cache_control", *SCHEMAS)}
            tool = {"type": "function", "function": function | ({} if schema is None else {"parameters": schema})}
        if "function" not in tool:
            raise unread(f"tool {tool.get('type') or next(iter(tool), '')}")
        tools.append(tool)
    return tuple(tools)
