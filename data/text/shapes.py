"""Shapes of records: the paths of request, reply, tools and model; docs/data_sources.md links to the schemas."""

import re
from typing import Any, NamedTuple

from data.text import parts, streams
from data.text.files import Raw
from data.text.parts import BadSampleError, LeftOutError, Message, Messages, finish_reasons, messages_of, reasons_in
from data.text.streams import at, check_error, opened, unbatched

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
    ("request and response", "attributes/input", "attributes/output"),
    ("OpenTelemetry gen_ai span", "attributes", "attributes/gen_ai.output.messages"),
    ("MLflow span", "attributes/mlflow.spanInputs", "attributes/mlflow.spanOutputs"),
    ("request and response", "span_data", "span_data/output"),
    ("PostHog", "properties", "properties/$ai_output_choices"),
    ("request and response", "request", "response"),
    ("LiteLLM spend log", "proxy_server_request", "response"),
    ("request and response", "requestBody", "responseBody"),
    ("request and response", "request_json", "response_json"),
    ("request and response", "raw_request", "raw_response"),
    ("request and response", "RequestBody", "ResponseBody"),
    ("request and response", "RequestMessages", "ResponseMessages"),
    ("request and response", "ai/proxy/payload/request", "ai/proxy/payload/response"),
    *((f"chat and {reply}", "", reply) for reply in (*REPLIES, "$ai_output_choices")),
    ("preference pair", "chosen", ""),
    ("OpenAI Batch input", "body", ""),
    ("Anthropic batch input", "params", ""),
    ("SWE-agent trajectory", "history", ""),
    ("chat", "", ""),
)
CHATS = (
    "messages", "conversations", "contents", "gen_ai.input.messages", "input", "prompt", "turns", "body",
    "args", "kwargs", "conversation", "values", "$ai_input",
)  # fmt: skip
TURNS = ("turns", "prompt")  # of them those whose texts are a user's turns
SYSTEM = (
    "system", "instructions", "systemInstruction", "system_instruction", "gen_ai.system_instructions",
    "system_prompt", "metadata/instructions", "model_parameters/instructions",
    "config/systemInstruction", "config/system_instruction",
)  # fmt: skip
TOOLS = (
    "tools", "toolConfig/tools", "gen_ai.tool.definitions", "functions", "config/tools",
    "model_parameters/tools", "optional_params/tools", "extra/invocation_params/tools",
    "metadata/tools", "kwargs/tools", "attributes/mlflow.chat.tools", "attributes/invocation_params/tools", "$ai_tools",
)  # fmt: skip
QUESTIONS = ("prompt", "question", "instruction", "query")
ANSWERS = ("answer", "output", "response", "completion", "chosen", "generation")
HOLDERS = (
    "choices", "candidates", "generations", "output", "message", "content", "gen_ai.output.messages",
    "messages", "streamed_data", "chunks", "outputs", "replies",
)  # fmt: skip
NO_ANSWER, STEP = "no answer", "a step of a trace that is no call of a model"
WRITTEN = {"text", "response", "reasoning_content", "tool_calls", "usage", "logprobs", "citations"}  # keys of an answer
CALL = {"function", "toolName"}  # keys of a call, of which a reply may be a list
MODELS = (
    "model", "modelId", "modelVersion", "gen_ai.response.model", "gen_ai.request.model", "llm.model_name", "$ai_model",
    "metadata/model", "provided_model_name", "extra/metadata/ls_model_name", "extra/invocation_params/model",
)  # fmt: skip
EARLIER = ("previous_response_id", "conversation", "cachedContent", "cached_content")  # what the server has
TRACES = {"trace_id", "traceId", "parentRunId"}  # keys of a trace's step
# Keys with a span's kind, and the kinds that call no model: a program's output, or a call that has its own span.
STEPS = (
    "type", "run_type", "span_kind", "attributes/gen_ai.operation.name", "attributes/openinference.span.kind",
    "attributes/traceloop.span.kind", "attributes/mlflow.spanType", "span_attributes/type", "attributes/weave/kind",
    "attributes/span_kind", "span_data/type", "event",
)  # fmt: skip
NO_CALLS = {
    "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL", "RERANKER",
    "PROMPT", "PARSER", "WORKFLOW", "TASK", "EMBEDDINGS", "EXECUTE_TOOL", "INVOKE_AGENT", "CREATE_AGENT",
    "INVOKE_WORKFLOW", "FUNCTION", "SCORE", "EVAL", "SEARCH", "RETRIEVAL", "$AI_SPAN", "$AI_TRACE", "$AI_EMBEDDING",
}  # fmt: skip
TAGGED = re.compile(r"\s*<(reasoning|thought)>(.*?)</\1>\s*", re.DOTALL)  # reasoning of Bedrock's gpt-oss; of Gemini
RENDERED = re.compile(  # what a chat template, or a client of an older API, writes between turns
    r"\A<(?:user|system)>\n|"  # Continue's
    r"<\|(?:im_start|start_header_id|start|user|begin_of_text)\|>|\[INST\]|<start_of_turn>|\n\nHuman:|<\uff5cUser\uff5c>"
)


class Chat(NamedTuple):
    """A record as a chat."""

    shape: str
    messages: Messages
    tools: tuple[Message, ...] = ()
    model: str = ""  # the model that wrote the reply, as the record names it
    notes: tuple[str, ...] = ()  # keys for `Counts`


def chat_of(raw: Raw) -> Chat | None:
    """Return a record as a chat by the first shape that fits, or None; refuse errors, and what cannot be read."""
    nearly: list[tuple[bool, str]] = []
    for field in STEPS:
        kind = str(at(raw, field)).strip('"')
        if kind.upper() in NO_CALLS and (field != "type" or kind.isupper() or raw.keys() & TRACES):
            raise LeftOutError(STEP)
    if "op_name" in raw:  # Weave logs every function, and calls of models among them
        replies = at(raw, "inputs/messages") and isinstance(raw.get("output"), dict | None)
        if not ((replies or at(raw, "inputs/model")) and _asked(at(raw, "inputs"), False)):
            raise LeftOutError(STEP)
    label = raw.get("label") if raw.keys() & {"completion", "messages"} else None
    if raw.get("kto_tag", label) in (False, "0", "False", "false"):  # KTO's bad answer: TRL, ms-swift, LLaMA-Factory
        raise LeftOutError("an answer that is marked as bad")
    check_error({"error": raw.get("level") == "ERROR"})  # Langfuse's level
    for name, path, reply_path in SHAPES:
        request, reply = at(raw, path), at(raw, reply_path)
        if request is reply is None or (path == "history" and raw.keys() & {*QUESTIONS}):
            continue
        if isinstance(reply, str) and isinstance(request, dict) and isinstance(raw.get(path), str):
            reply = parts.parsed(streams.whole(reply, streams.JSON_TEXT))  # next to a request in JSON no answer in JSON
        holder = _asked(request, not path and "call_type" not in raw)  # LiteLLM's messages may be a text
        if holder is None and path and isinstance(request, str) and isinstance(reply, str):
            holder = _asked({"prompt": "" if streams.JSON_TEXT.match(request) else request}, False)
        if holder is not None and reply_path and (path or (reply is not None and not reply)):
            for side in (raw, holder[0], at(raw, reply_path.rpartition("/")[0])):
                check_error(side)
        if holder is None or reply is None:
            if path and reply_path and not holder is reply is None:
                other = ", which the batch's other file holds" if "custom_id" in raw else ""
                missing = path if holder is None else reply_path
                nearly.append((missing.split("/")[0] in raw, f"{name}, but has no {missing} with messages{other}"))
            continue
        request, items = holder
        roles = [parts.ROLES.get(str(parts.first(item, ("role", "from"))).lower()) for item in items]
        whole = roles[-1] == "assistant"
        if name == "preference pair" and "user" not in roles:
            continue
        if reply_path and whole and not path and _is_in(reply, items[-1]):
            continue
        if whole and reply_path:
            raise BadSampleError("an answer behind a prefilled one", "its answer continues one that the request begins")
        return _chat(name, raw, request, items, reply if reply_path else None)
    question = next((key for key in (*QUESTIONS, *["input"] * ("output" in raw)) if isinstance(at(raw, key), str)), "")
    if question:
        reply = parts.first(raw, ANSWERS)
        pairs = [zip(("user", "assistant"), list.copy(pair), strict=True) for pair in raw.get("history") or ()]
        earlier = [{"role": role, "content": text} for pair in pairs for role, text in pair]
        further = parts.first(raw, ("input", "context")) if question == "instruction" else ""
        message = _question(f"{raw[question]}\n\n{further}" if further else raw[question])
        return _chat("question and answer", raw, raw, [*earlier, message], reply)
    if nearly:
        nearest = max(nearly, key=lambda item: item[0])[1]  # a field that is there, though empty
        raise BadSampleError(f"nearly {nearest}", f"is nearly of the shape {nearest}")
    return None


def _is_in(reply: Any, last: Raw) -> bool:
    """Whether a chat's last message repeats the reply next to it, or that is no reply."""
    try:
        answers = _answered(reply, [], [])
    except LeftOutError as error:
        if error.cause == NO_ANSWER:
            return True
        raise
    except (TypeError, KeyError, AttributeError, IndexError):
        return True
    return answers[-1]["content"] == messages_of([last])[-1]["content"]


def _chat(name: str, raw: Raw, request: Raw, items: list[Raw], reply: Any) -> Chat:
    """Return the chat of a request's messages and a reply; None for a reply that the messages already contain."""
    notes = [str(note) for note in at(raw, "claude_code/notes") or ()]
    if reply is None and raw.keys() & streams.ERRORS and items[-1].get("role") != "assistant":
        check_error(raw)
    tools = (item.get("content") for item in items if item.get("role") == "tool" and "tool_call_id" not in item)
    offered = [content for content in tools if type(content) is dict]  # Langfuse's
    called = at(reply, "automatic_function_calling_history") or at(reply, "automaticFunctionCallingHistory")  # Gemini's
    messages = messages_of(called or [item for item in items if item.get("content") not in offered])
    given = (at(holder, key) for holder in (request, reply) for key in SYSTEM)  # a reply of Responses repeats them
    system: Any = next((value for value in given if isinstance(value, str | list | dict)), "")
    system = parts.parsed(system) if "gen_ai.system_instructions" in request else system
    if isinstance(system, list) and "role" in next(iter(system), ()):  # a stored prompt of Responses
        system, messages = "", messages_of([{**item, "weight": 0} for item in system]) + messages
    instruction = parts.text_of(system.get("parts", system) if isinstance(system, dict) else system)
    if messages[-1]["role"] == "system" and "span_attributes" in raw:  # Braintrust's, of Anthropic's requests
        messages.insert(0, messages.pop())
    if instruction and (messages[0]["role"] != "system" or request.get("instructions")):  # Responses allows both
        messages.insert(0, {"role": "system", "content": instruction})
    elif instruction and instruction != messages[0]["content"]:
        notes.append("with a second system prompt, which is left out")
    if "gen_ai.input.messages" in request and isinstance(reply, list):  # each choice is a chat
        reason = next(iter(parts.parsed(request.get("gen_ai.response.finish_reasons")) or ()), None)
        thought = "".join(one["content"] for one in reply if one.get("role") == "thinking") or None  # OpenLLMetry's
        spoken = ({"reasoning": thought, **one, "role": one.get("role") or "assistant"} for one in reply)  # Gemini's
        reply = [{"message": one, "finish_reason": reason} for one in spoken if one["role"] != "thinking"]
    if reply is not None:
        replied = _answered(reply, notes, reasons_in(raw.get("metadata", raw.get("properties"))))  # tracers'
        if streams.FURTHER not in notes and {at(raw, "modelParameters/n"), at(raw, "metadata/n")} & {*range(2, 129)}:
            raise LeftOutError("several choices in one text")  # Langfuse's, Opik's and Braintrust's of a stream
        messages = replied if any(message["role"] == "user" for message in replied) else messages + replied
    holders = [holder for holder in (reply, request, raw) if isinstance(holder, dict)]
    model = next((str(value) for holder in holders for key in MODELS if (value := at(holder, key))), "")
    for message in messages:
        is_tagged = message.pop("extra_content", "gpt-oss" in model) and message["role"] == "assistant"
        if is_tagged and (tagged := TAGGED.match(message["content"])):
            message |= {"reasoning_content": tagged[2], "content": message["content"][tagged.end() :]}
    hidden = [message.pop(parts.HIDDEN, False) for message in messages]
    if not (messages[-1].keys() & {*parts.REASONING} or messages[-1]["content"].lstrip().startswith("<think>")):
        hidden += [streams.WITHHELD in notes or streams.counts_reasoning(raw)]
    notes = [note for note in notes if note != streams.WITHHELD] + [streams.WITHHELD] * any(hidden)
    if any(holder.get(key) and type(holder[key]) is not list for holder in holders for key in EARLIER):
        notes.append("whose earlier turns the record does not hold")
    keys = {"content", "tool_calls", *parts.REASONING}
    written = (str(message[key]) for message in messages for key in message.keys() & keys)
    if any(map(parts.REPLACED.match, written)):
        raise LeftOutError(streams.CUT_OFF)
    if media := parts.media_in(request) or parts.media_in(raw):
        raise parts.unread(media)
    listed = next((value for path in TOOLS for holder in (request, raw, reply) if (value := at(holder, path))), None)
    return Chat(name, messages, parts.tools_of(listed or offered), model, tuple(notes))


def _asked(request: Any, is_record: bool) -> tuple[Raw, list[Raw]] | None:
    """Return the dict with a request's messages, and the messages, or None; a text is a question in requests alone."""
    request = unbatched(request)
    if isinstance(request, list):
        return ({}, request) if request and isinstance(request[0], dict) else None
    for key in CHATS if isinstance(request, dict) else ():
        value = unbatched(opened(request.get(key)))
        if isinstance(value, dict) and (inner := _asked(value, False)):
            return inner
        if isinstance(value, list) and value and isinstance(value[0], dict) and key != "kwargs":
            return request, value
        if isinstance(value, list) and value and isinstance(value[0], str) and is_record and key in TURNS:
            return request, [_question(value[0])]  # the first turn is asked
        if isinstance(value, str) and value and not is_record and key not in ("args", "body", "conversation"):
            return request, [_question(value)]
    return None


def _question(text: str) -> Raw:
    """Return a text as a user's message; refuse one that a chat template has written."""
    if RENDERED.search(text):
        why = "its prompt is a chat that a template has rendered; give its messages"
        raise BadSampleError("a prompt that a chat template has rendered", why)
    return {"role": "user", "content": streams.whole(text)}


def _answered(reply: Any, notes: list[str], reasons: list[str]) -> Messages:
    """Return a reply's messages; the last one is marked if it was cut off, of which `reasons` next to it may tell."""
    while not _are_items(reply := streams.joined(reply, notes)):
        if isinstance(reply, str):
            reply = [{"role": "assistant", "content": streams.whole(reply)}]
        elif isinstance(reply, list) and any(isinstance(call, dict) and call.keys() & CALL for call in reply):
            reply = [{"role": "assistant", "tool_calls": reply}]
        elif isinstance(reply, list):
            notes += [streams.FURTHER] * (len(reply) > 1)
            first = [choice for choice in reply if isinstance(choice, list) or choice.get("index") == 0]
            reply = (first or reply or [{"role": "assistant"}])[0]
        else:
            check_error(reply)
            reasons += finish_reasons(reply)
            if reply.keys() >= {"result", "success"}:  # Cloudflare's
                reply = {"usage": None, **reply["result"]}
                continue
            body = opened(reply.get("body"))
            is_call = parts.PARTS.get(str(reply.get("type"))) == "call"  # Langfuse's, of a reply with one item
            if is_call or isinstance(body, dict) or streams.events_of(body):
                reply = [reply] if is_call else body
                continue
            keys = reply.keys()  # DSPy's; Cloudflare's
            if keys <= WRITTEN and (keys & {"tool_calls", "reasoning_content"} or keys >= {"response", "usage"}):
                reply = {"content" if key in ("text", "response") else key: value for key, value in reply.items()}
            holder = parts.first(reply, HOLDERS)
            if isinstance(reply.get("message"), str) and not reply.keys() <= {"message", "role", *parts.FINISH}:
                holder = None  # an object that the model was asked for, with a field of this name
            if reply.keys() & {"tokens_predicted", "generation"} or (
                holder is None and isinstance(reply.get("text"), str)
            ):  # llama.cpp's
                raise TypeError("a completion of a text is no chat")
            has_content = isinstance(reply.get("content"), str | list)
            has_data = "type" in reply and isinstance(reply.get("data"), dict)
            if has_content or has_data or reply.keys() & {"role", "parts", "kwargs", "from", "tool_calls"}:
                reply = [{"role": "assistant", **reply}]
                continue
            reply = holder or [{"role": "assistant"}]
    last = reply[-1].get("kwargs", reply[-1])
    reasons = reasons + finish_reasons(last)
    notes += [streams.WITHHELD] * streams.counts_reasoning(last)
    if "error" in reasons:
        raise LeftOutError(streams.FAILURE)
    if "content_filter" in reasons:
        raise LeftOutError("a refusal")
    messages = messages_of(reply)
    if not any(message["content"] or message.keys() & {"tool_calls", *parts.REASONING} for message in messages):
        raise LeftOutError(NO_ANSWER)
    if "length" in reasons:
        messages[-1]["finish_reason"] = "length"
    return messages


def _are_items(reply: Any) -> bool:
    """Return whether a reply is a list of messages or of items of the Responses API, and not of choices."""
    first = reply[0] if isinstance(reply, list) and reply else None
    if not isinstance(first, dict) or first.keys() & {"message", "delta", "response", *CALL}:
        return False
    if len(reply) > 1 and all(item.keys() <= {"role", "content"} and item["role"] == "assistant" for item in reply):
        return False  # Langfuse's choices
    return bool(first.keys() & {"role", "type", "from", "kwargs"})
