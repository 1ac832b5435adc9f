"""Files whose lines are no records of their own: agents' transcripts, OpenTelemetry's exports, a batch's two files.

Also the choice of records by their fields.
"""

import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from data.text.shapes import Raw, at

CLAUDE_CODE = ("parentUuid", "leafUuid", "messageId", "sessionId")  # a line of any of its types has one of these
CODEX = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
SYNTHETIC = "<synthetic>"  # the model's name in a line that Claude Code itself wrote
SNAPSHOT = "ghost_snapshot"  # an item that Codex keeps for itself
SIGNS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "!=": operator.ne}
SIGNED = re.compile(rf"({'|'.join(SIGNS)})\s*(.*)")


def records_in(lines: Iterable[Raw]) -> Iterator[Raw]:
    """Yield a file's records: a transcript's chats, an export's spans, and anything else as it is.

    A transcript is held in memory whole.
    """
    rest = iter(lines)
    for raw in rest:
        if "resourceSpans" in raw:
            group, reader = [raw], _spans
        elif raw.get("type") in CODEX and "payload" in raw:
            group, reader = [raw, *rest], _codex
        elif "type" in raw and "messages" not in raw and any(key in raw for key in CLAUDE_CODE):
            group, reader = [raw, *rest], _claude_code
        else:
            yield raw
            continue
        try:
            yield from list(reader(group))
        except (TypeError, KeyError, AttributeError):  # it is none, or broken: its lines are of no known shape
            yield from group


def _claude_code(lines: list[Raw]) -> Iterator[Raw]:
    """Yield the longest branch of a transcript, whose lines name their parents, as a chat.

    Lines with one message's id are one message. Of calls in parallel all results but the last are leaves of their own:
    each is put behind its call.
    """
    nodes = {line["uuid"]: line for line in lines if line.get("uuid")}
    spoken = {uuid: line["message"] for uuid, line in nodes.items() if isinstance(line.get("message"), dict)}
    parts: dict[str, list[Raw]] = {}
    for uuid, message in spoken.items():
        content = message.get("content") or []
        parts[uuid] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    results = {piece["tool_use_id"]: piece for given in parts.values() for piece in given if "tool_use_id" in piece}
    parents = {line.get("parentUuid") for line in nodes.values()}
    branch: dict[str, Raw] = {}  # from its leaf on
    for leaf in [uuid for uuid in nodes if uuid not in parents]:
        path, uuid = dict[str, Raw](), leaf
        while uuid in nodes and uuid not in path:
            path[uuid] = nodes[uuid]
            uuid = path[uuid].get("parentUuid") or ""
        branch = max(path, branch, key=len)  # of equals the later one
    uuids = [uuid for uuid in reversed(branch) if uuid in spoken and spoken[uuid].get("model") != SYNTHETIC]
    messages: list[Raw] = []
    for uuid in uuids:
        message = spoken[uuid]
        for piece in parts[uuid]:
            results.pop(piece.get("tool_use_id"), None)
        if message.get("id") and messages and messages[-1].get("id") == message["id"]:
            messages[-1]["content"] += parts[uuid]
        else:
            messages.append({**message, "content": parts[uuid]})
    chat: list[Raw] = []
    for message in messages:
        aside = [results[piece["id"]] for piece in message["content"] if piece.get("id") in results]
        chat += [message, *([{"role": "user", "content": aside}] if aside else [])]
    if chat:
        others = spoken.keys() - {*uuids}
        left_out = any(spoken[uuid].get("role") == "assistant" for uuid in others)
        model = next((message["model"] for message in messages[::-1] if message.get("model")), "")
        last = next(iter(branch.values()))
        named = {"id": last.get("sessionId"), "model": model}
        yield {**last, **named, "claude_code": {"messages": chat, "left_out": left_out}}


def _codex(lines: list[Raw]) -> Iterator[Raw]:
    """Yield a session as a chat, and one more after each compaction, which replaces the chat."""
    meta: Raw = {}
    items: list[Raw] = []
    for line in [*lines, {"type": "session_meta", "payload": {}}]:
        kind, payload = line.get("type"), line.get("payload") or {}
        if kind in ("session_meta", "compacted"):
            if items:
                instructions = (meta.get("base_instructions") or {}).get("text") or meta.get("instructions") or ""
                yield {**meta, "codex": {"instructions": instructions, "input": items}}
            meta = payload if kind == "session_meta" else meta
            summary = [{"role": "user", "content": payload["message"]}] if payload.get("message") else []
            items = [{**item, "weight": 0} for item in payload.get("replacement_history") or summary]
        elif kind == "turn_context":
            meta = meta | {"model": payload.get("model")}
        elif kind == "response_item" and payload.get("type") != SNAPSHOT:
            items.append(payload)


def _spans(lines: list[Raw]) -> Iterator[Raw]:
    """Yield the spans of an OTLP export that hold a chat, with their attributes as a dict."""
    scopes = [scope for line in lines for resource in line["resourceSpans"] for scope in resource["scopeSpans"]]
    for span in [span for scope in scopes for span in scope.get("spans", ())]:
        events = [attribute for event in span.get("events", ()) for attribute in event.get("attributes", ())]
        attributes = {item["key"]: _value(item["value"]) for item in [*span.get("attributes", ()), *events]}
        if attributes.keys() & {"gen_ai.input.messages", "gen_ai.output.messages"}:
            yield {**span, "id": span.get("spanId"), "attributes": attributes}


def _value(value: Raw) -> Any:
    """Return an attribute's value, which OTLP holds under its type."""
    inner: Any
    kind, inner = next(iter(value.items()), ("", None))
    if kind == "arrayValue":
        return [_value(item) for item in inner.get("values", ())]
    if kind == "kvlistValue":
        return {item["key"]: _value(item["value"]) for item in inner.get("values", ())}
    return inner


def batches_joined(records: Iterable[Raw]) -> Iterator[Raw]:
    """Yield records, the requests of OpenAI's batches with their replies, which other files hold.

    Raises:
        ValueError: two requests or two replies have the same custom_id.
    """
    waiting: dict[str, Raw] = {}  # by custom_id the requests or replies whose other sides are still to come
    for raw in records:
        name, side = raw.get("custom_id"), "body" if "body" in raw else "response"
        if not isinstance(name, str) or ("body" in raw) == ("response" in raw):
            yield raw
            continue
        other = waiting.pop(name, None)
        if other is None:
            waiting[name] = raw
        elif side in other:
            raise ValueError(f"two batches hold the custom_id {name}: give the files of one batch at a time")
        else:
            request, reply = (raw, other) if side == "body" else (other, raw)
            yield {**request, "response": reply["response"], "error": reply.get("error")}
    yield from waiting.values()


def is_wanted(raw: Raw, where: Mapping[str, Any]) -> bool:
    """Whether a record's fields have the values that `data.where` names, by their paths with dots.

    A field has one of the values that are listed, and is within the bounds, such as `>=2026-11-01`; numbers as numbers.
    """
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
