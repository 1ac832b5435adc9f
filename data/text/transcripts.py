"""Files whose lines are not records: transcripts, OpenTelemetry exports, batches; selection of records by fields."""

import operator
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from data.text.files import Raw
from data.text.parts import PARTS, first, parsed, reasons_in
from data.text.streams import at

Records = list[Raw]
Yielded = Iterator[Raw]
CLAUDE_CODE = {"parentUuid", "leafUuid", "messageId", "sessionId"}  # keys, one of which is in each line
MESSAGE = {"role", "content", "parts", "ts"}  # keys of a message, where a file is a chat, as Cline writes it
COLUMN = "attributes."  # prefix of the columns in which Phoenix exports a span's attributes
COMPACTED = ("compaction", "compaction_summary", "context_compaction")  # items in place of turns that the server has
CODEX = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
# Starts of messages that Codex itself writes as the user.
CODEX_USER = ("environment_context", "user_instructions", "skill", "user_shell_command", "turn_aborted")
CONTEXT = re.compile(rf"\s*(<({'|'.join(CODEX_USER)}|subagent_notification)>|# AGENTS\.md instructions)")
SENT = re.compile(r'\{"author":.*"trigger_turn":|author: .*\nrecipient: .*\nother_recipients: ')  # of another agent
SYNTHETIC = "<synthetic>"  # model name of lines that Claude Code itself wrote
SNAPSHOT = "ghost_snapshot"  # an item for Codex's own use
OTHER_NAMES = {  # prefixes of flat lists (`PREFIX.0.…`) in other conventions -> OpenTelemetry's names
    "gen_ai.prompt": "gen_ai.input.messages",
    "gen_ai.completion": "gen_ai.output.messages",
    "llm.input_messages": "gen_ai.input.messages",
    "llm.output_messages": "gen_ai.output.messages",
    "llm.request.functions": "gen_ai.tool.definitions",
    "llm.tools": "gen_ai.tool.definitions",
}
ITEM = ("message", "tool_call", "message_content", "tool")  # names around an item of OpenInference's lists
IN_JSON = {"mlflow.spanInputs", "mlflow.spanOutputs", "mlflow.chat.tools", "gen_ai.usage.raw"}  # texts too; Logfire's
EVENT = re.compile(r"gen_ai\.(?:(system|user|assistant|tool)\.message|(choice))")  # of a span, before its attributes
STATUS_ERROR = (2, "2", "ERROR", "STATUS_CODE_ERROR")
# Lists of records in a record: of traces, of CloudWatch, of a batch's requests.
EXPORTS = ("observations", "data/spans", "spans", "data", "child_runs", "logEvents", "requests")
FETCHED = {"events", "searchedLogStreams", "nextForwardToken", "nextBackwardToken"}  # keys of what `aws logs` prints
LINES = ("message", "@message")  # fields with a log's line, which may be a record
OUTER = {"observations", "data", "spans", "child_runs", "logEvents", "requests", "events", *LINES}
BATCHES = (  # a batch's two files: the name of a request, and the fields of a request and of its reply
    ("custom_id", "body", "response"),  # OpenAI
    ("custom_id", "params", "result"),  # Anthropic
    ("key", "request", "response"),  # Gemini
)
INTERRUPTED = "[Request interrupted by user]"
FLAT = re.compile(rf"({'|'.join(map(re.escape, OTHER_NAMES))})\.(?=\d+\.)")
SIGNS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "!=": operator.ne}
SIGNED = re.compile(rf"({'|'.join(SIGNS)})\s*(.*)")


def records_in(lines: Iterable[Raw]) -> Yielded:
    """Yield a file's records: the chats of a transcript, held in memory whole, an export's spans, any other line."""
    rest = iter(lines)
    for raw in rest:
        if raw.keys() & OUTER and not ("messages" in raw or "custom_id" in raw):
            lists = [at(raw, path) for path in EXPORTS] + [raw.get("events")] * (raw.keys() <= FETCHED)
            lists += [[parsed(raw[key])] for key in LINES if isinstance(raw.get(key), str)]
            if inner := next(filter(_are_records, lists), None):
                yield from records_in(inner)
                continue
        if raw.keys() & {"resourceSpans", "resource_spans", "resourceLogs", "resource_logs"}:
            group, reader = [raw], _spans
        elif isinstance(raw.get("attributes"), dict) or any(name.startswith(COLUMN) for name in raw):
            group, reader = [raw], _span
        elif raw.get("type") in CODEX and "payload" in raw:
            group, reader = [raw, *rest], _codex
        elif "type" in raw and "messages" not in raw and raw.keys() & CLAUDE_CODE:
            group, reader = [raw, *rest], _claude_code
        elif "role" in raw and raw.keys() <= MESSAGE:
            yield {"messages": [raw, *rest]}
            continue
        else:
            yield raw
            continue
        try:
            yield from list(reader(group))
        except (TypeError, KeyError, AttributeError):  # another or a broken file: its lines have no known shape
            yield from group


def _are_records(value: Any) -> bool:
    return bool(value) and isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _claude_code(lines: Records) -> Yielded:
    """Yield each branch of a transcript, whose lines name their parents, as a chat; a turn is trained once.

    The branch with the most assistant lines comes first; later branches have the turns shared with it as context. A
    sidechain is a subagent's chat, without the lines before it. Lines with the same message id are one message. Of
    parallel calls, all results but the last are separate leaves: each is put after its call.
    """
    nodes = {line["uuid"]: line for line in lines if line.get("uuid")}
    spoken = {uuid: line["message"] for uuid, line in nodes.items() if isinstance(line.get("message"), dict)}
    parts: dict[str, Records] = {}
    for uuid, message in spoken.items():
        content = first(message, ("content", "parts"), [])  # Claude Code's, Qwen Code's
        parts[uuid] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    results = {piece["tool_use_id"]: piece for given in parts.values() for piece in given if "tool_use_id" in piece}
    client = {uuid for uuid, message in spoken.items() if message.get("model") == SYNTHETIC}
    written = {uuid for uuid in spoken if nodes[uuid].get("type") == "assistant"} - client

    def path_to(uuid: str, stop: Container[str] = ()) -> dict[str, Raw]:
        """Return the lines from `uuid` back to the first line, or to a line in `stop`."""
        path, is_aside = dict[str, Raw](), bool(nodes[uuid].get("isSidechain"))
        while uuid in nodes and uuid not in path and bool(nodes[uuid].get("isSidechain")) == is_aside:
            path[uuid] = nodes[uuid]
            if len(path) > 1 and uuid in stop:
                break
            uuid = path[uuid].get("parentUuid") or ""
        return path

    # A branch ends at an assistant line without an assistant line below it.
    ends = written - {[*path][-1] for path in (path_to(uuid, written) for uuid in written) if len(path) > 1}
    branches = [path_to(uuid) for uuid in nodes if uuid in ends]
    trained: set[str] = set()
    for branch in sorted(branches, key=lambda path: len(path.keys() & written), reverse=True):
        messages: Records = []
        by_id: dict[str, Raw] = {}
        missing = dict(results)
        for uuid in [uuid for uuid in reversed(branch) if uuid in spoken and uuid not in client]:
            message = by_id.get(spoken[uuid].get("id") or "")
            if message is None:
                message = {**spoken[uuid], "parts": []} | ({"weight": 0} if uuid in trained else {})
                messages.append(message)
                by_id |= {message["id"]: message} if message.get("id") else {}
            message["stop_reason"] = spoken[uuid].get("stop_reason")
            message["parts"] += parts[uuid]
            for piece in parts[uuid]:
                missing.pop(piece.get("tool_use_id"), None)
                if str(piece.get("text")).startswith(INTERRUPTED) and len(messages) > 1:
                    messages[-2]["finish_reason"] = "length"
        if all(message.get("role") == "user" or "weight" in message for message in messages):
            continue
        chat: Records = []
        for message in messages:
            aside = [missing[piece["id"]] for piece in message["parts"] if piece.get("id") in missing]
            chat += [message, *([{"role": "user", "content": aside}] if aside else [])]
        last = next(iter(branch.values()))
        counts = {
            "of a subagent": last.get("isSidechain"),
            "behind a summary of earlier turns": any(line.get("isCompactSummary") for line in branch.values()),
            "with turns of another branch as context": branch.keys() & trained,
            "with lines of its client, which are left out": not trained
            and (client or any(line.get("type") in ("summary", "attachment") for line in lines)),
        }
        trained |= branch.keys() & written
        model = next((message["model"] for message in messages[::-1] if message.get("model")), last.get("model"))
        notes = [name for name, holds in counts.items() if holds]
        yield {**last, "id": last.get("sessionId"), "model": model, "claude_code": {"messages": chat, "notes": notes}}


def _codex(lines: Records) -> Yielded:
    """Yield a session as a chat, and another chat after each compaction, which replaces the messages."""
    meta: Raw = {}
    items: Records = []
    for line in [*lines, {"type": "session_meta", "payload": {}}]:
        kind, payload = line.get("type"), line.get("payload") or {}
        rewrites = kind == "compacted" or payload.get("type") == "thread_rolled_back"
        of_users = [i for i, item in enumerate(items) if item.get("role") == "user"] if rewrites else []
        turns = [i for i in of_users if not any(CONTEXT.match(str(text)) for text in _texts(items[i]))]
        if kind == "session_meta" and payload.get("id") == meta.get("id", 0):  # written again
            meta = meta | payload
        elif kind in ("session_meta", "compacted"):
            if items:
                instructions = at(meta, "base_instructions/text") or meta.get("instructions") or ""
                left = [item for item in items if item.get("type") not in COMPACTED]
                earlier = len(items) - len(left)
                yield {**meta, "codex": {"instructions": instructions, "input": left, "previous_response_id": earlier}}
            meta = payload if kind == "session_meta" else meta
            summary = {"role": "user", "content": payload.get("message")}
            summarised = [*(items[i] for i in turns), summary] if payload.get("message") else []
            items = [{**_received(item), "weight": 0} for item in payload.get("replacement_history") or summarised]
        elif kind == "turn_context":
            meta = meta | {"model": payload.get("model")}
        elif payload.get("type") == "thread_rolled_back":  # the user's last turns, with all behind them
            del items[next(iter(turns[-payload["num_turns"] :]), len(items)) :]
        elif kind == "response_item" and payload.get("type") == "additional_tools":
            meta = meta | {"tools": [*meta.get("tools", ()), *payload["tools"]]}
        elif kind in ("response_item", "inter_agent_communication") and payload.get("type") != SNAPSHOT:
            items.append(_received(payload))


def _texts(item: Raw) -> list[Any]:
    content: Any = item.get("content")
    return [piece.get("text") for piece in content] if isinstance(content, list) else [content]


def _received(item: Raw) -> Raw:
    """Return an item; another agent's message as the user's, or, if encrypted, as a turn that the server keeps."""
    texts = _texts(item)
    if item.get("type") == "agent_message" or "trigger_turn" in item:
        return {"role": "user", "content": "".join(texts)} if all(texts) else {"type": COMPACTED[0]}
    is_sent = item.get("role") == "assistant" and SENT.match("".join(map(str, texts)))
    return {**item, "role": "user"} if is_sent else item


def _spans(lines: Records) -> Yielded:
    """Yield the spans of an OTLP export that contain a chat, with their attributes as a dict, from log records too."""

    def inner(holders: Iterable[Raw], *names: str) -> Records:
        return [item for holder in holders for name in names for item in holder.get(name, ())]

    scopes = inner(inner(lines, "resourceSpans", "resource_spans"), "scopeSpans", "scope_spans")
    by_span: dict[Any, Raw] = {}  # spans by the events of older conventions, which are log records
    for record in inner(inner(inner(lines, "resourceLogs", "resource_logs"), "scopeLogs", "scope_logs"), "logRecords"):
        span = by_span.setdefault(record.get("spanId"), {"spanId": record.get("spanId"), "events": []})
        given = [*record.get("attributes", ()), *(at(record, "body/kvlistValue/values") or ())]
        span["events"].append({"name": record.get("eventName", _fields(record).get("event.name")), "attributes": given})
    for span in [*inner(scopes, "spans"), *by_span.values()]:
        named = {"id": first(span, ("spanId", "span_id"))}
        events = [{"name": event.get("name"), "attributes": _fields(event)} for event in span.get("events", ())]
        yield from _span([{"kind": 0, **span, **named, "attributes": _fields(span), "events": events}])


def _fields(holder: Raw) -> Raw:
    return {item["key"]: _value(item["value"]) for item in holder.get("attributes", ())}


def _span(lines: Records) -> Yielded:
    """Yield a span; messages in a field or an event each, as older conventions have them, become lists."""
    (raw,) = lines
    given: Raw = {name.removeprefix(COLUMN): value for name, value in (raw.get("attributes") or raw).items()}
    tree: Raw = {f"llm.{name}": value for name, value in (given.get("llm") or {}).items()}
    if any(at(raw, path) in STATUS_ERROR for path in ("status/code", "status/status_code", "status_code")):
        given.setdefault("error.type", "status")
    spoken: Raw = {"gen_ai.input.messages": [], "gen_ai.output.messages": []}
    chunks: Raw = {}  # MLflow's
    logged = [{"name": fields.get("event.name"), "attributes": fields} for fields in parsed(given.get("events")) or ()]
    for event in [*(raw.get("events") or ()), *logged]:  # Pydantic AI's older events are an attribute
        fields, named = event.get("attributes") or {}, EVENT.fullmatch(str(event.get("name")))
        given = {name: value for name, value in fields.items() if name.startswith("gen_ai.")} | given
        if "mlflow.chunk.value" in fields:
            chunks[event["name"]] = parsed(fields["mlflow.chunk.value"])
        body = parsed(fields.get("gen_ai.event.content")) or fields
        if named and named[2]:
            reply = parsed(body.get("message")) or body
            reply = reply if isinstance(reply, dict) else {"content": reply}
            reason = body.get("finish_reason")
            spoken["gen_ai.output.messages"].append({**reply, "role": "assistant", "finish_reason": reason})
        elif named:
            message = {name: value for name, value in body.items() if not name.startswith(("gen_ai.", "event."))}
            message |= {"content": _listed(body.get("content"))}
            ids = {"tool_call_id": body["id"]} if body.get("id") else {}
            spoken["gen_ai.input.messages"].append({**message, "role": named[1], **ids})
    given |= {OTHER_NAMES[name]: _listed(parsed(given[name])) for name in OTHER_NAMES.keys() & given.keys()}
    if "ai.prompt.messages" in given:  # the AI SDK's
        keys = {"content": "text", "reasoning": "reasoning", "tool_calls": "toolCalls", "finish_reason": "finishReason"}
        reply = {field: given.get(f"ai.response.{name}") for field, name in keys.items()}
        reply["content"] = reply["content"] or given.get("ai.response.object")
        spoken["gen_ai.output.messages"].append({"role": "assistant", **reply})
        spoken["gen_ai.input.messages"] = parsed(given["ai.prompt.messages"])
        spoken["gen_ai.tool.definitions"] = [parsed(tool) for tool in parsed(given.get("ai.prompt.tools")) or ()]
    given = {name: listed for name, listed in spoken.items() if listed} | given
    for name, value in list(given.items()):
        prefix, field = FLAT.match(name), tree
        for key in [prefix[1], *name[prefix.end() :].split(".")] if prefix else ():
            field, parent, last = field.setdefault(key, {}), field, key
        if prefix:
            parent[last] = value
    lists = {OTHER_NAMES[key]: _listed(value) for key, value in tree.items() if key in OTHER_NAMES}
    response = parsed(given.get("output.value") or at(given, "output/value"))
    reason = given.get("llm.finish_reason") or tree.get("llm.finish_reason")  # OpenInference's, since April 2026
    given.setdefault("gen_ai.response.finish_reasons", [reason] if reason else reasons_in(response))
    given |= {name: parsed(given[name]) for name in IN_JSON & given.keys()}
    output = given.get("mlflow.spanOutputs")
    if "mlflow.chunk.item.0" in chunks:  # a stream's output holds text alone
        given["mlflow.spanOutputs"] = [*chunks.values()]
    elif chunks and isinstance(output, dict):  # a span keeps its last 128 events
        given["mlflow.spanOutputs"] = {**output, "finish_reason": "length"}
    match given.get("mlflow.spanOutputs"):
        case [str(answer)]:  # DSPy's
            given["mlflow.spanOutputs"] = answer
    request = parsed(given.get("input.value"))
    whole = str(at(response, "object")).startswith(("response", "chat.completion"))
    if (whole or not tree) and isinstance(request, dict):  # lists have no reasoning, and Responses' items as choices
        raw, lists = {**raw, "request": request, "response": response}, {}
    given = {"gen_ai.output.messages": [], "gen_ai.tool.definitions": at(request, "tools")} | lists | given
    is_chat = "request" in raw or given.keys() & {"gen_ai.input.messages", *IN_JSON}
    yield {**raw, "attributes": given} if is_chat or not raw.keys() & {"kind", "traceId"} else {"type": "SPAN"}


def _listed(value: Any) -> Any:
    """Return a value with dicts keyed by numbers as lists, and items replaced by their message or tool call."""
    if isinstance(value, str):  # OpenLLMetry and Strands write content in parts as JSON
        parts: Any = parsed(value) if value.startswith("[") else None
        return parts if _are_records(parts) and all({item.get("type"), *item} & {*PARTS} for item in parts) else value
    if not isinstance(value, dict | list):
        return value
    fields = {str(i): inner for i, inner in enumerate(value)} if isinstance(value, list) else value
    fields = {key.removeprefix("message."): _listed(inner) for key, inner in fields.items()}
    if isinstance(value, list) or (fields and all(key.isdigit() for key in fields)):
        items = [fields[key] for key in sorted(fields, key=int)]
        return [_item(item) for item in items]
    return fields


def _item(item: Raw) -> Raw:
    """Return what is around an item's fields no more: OpenInference has a part's type next to its call."""
    inner = [item[name] for name in ITEM if name in item]
    return {key: value for one in inner for key, value in one.items()} if inner else item


def _value(value: Raw) -> Any:
    """Return an attribute's value, which OTLP stores under its type."""
    inner: Any
    kind, inner = next(iter(value.items()), ("", None))
    if kind in ("arrayValue", "array_value"):
        return [_value(item) for item in inner.get("values", ())]
    if kind in ("kvlistValue", "kvlist_value"):
        return {item["key"]: _value(item["value"]) for item in inner.get("values", ())}
    return inner


def batches_joined(records: Iterable[Raw]) -> Yielded:
    """Yield records, with a batch's requests joined to their replies from the other file; refuse a name given twice."""
    waiting: dict[str, Raw] = {}  # name -> a request or reply whose other side is still to come
    for raw in records:
        is_error = "error" in raw  # Gemini's in place of a response
        row = next((row for row in BATCHES if row[0] in raw and (row[1] in raw) != (is_error or row[2] in raw)), None)
        if row is None or not isinstance(name := raw[row[0]], str):
            yield raw
            continue
        _, request, reply = row
        other = waiting.pop(name, None)
        if other is None:
            waiting[name] = raw
        elif (request in raw) == (request in other):
            raise ValueError(f"two batches hold the {row[0]} {name}: give the files of one batch at a time")
        else:
            first, second = (raw, other) if request in raw else (other, raw)
            yield {**first, **{key: second[key] for key in (reply, "error") if key in second}}
    yield from waiting.values()


def is_wanted(raw: Raw, where: Mapping[str, Any]) -> bool:
    """Return whether fields, by dotted paths, have one of the values of `data.where` and are within its bounds."""
    for path, bounds in where.items():
        value = raw[path] if path in raw else at(raw, path.replace(".", "/"))
        equal: list[bool] = []
        for bound in bounds if isinstance(bounds, list) else [bounds]:
            signed = SIGNED.fullmatch(bound) if isinstance(bound, str) else None
            if signed is None:
                equal.append(value == bound or str(value) == str(bound))
                continue
            pair: tuple[Any, Any] = str(value), signed[2]
            with suppress(TypeError, ValueError):
                pair = float(value), float(signed[2])
            if value is None or not SIGNS[signed[1]](*pair):
                return False
        if equal and not any(equal):
            return False
    return True
