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
    """Yield a chat for each branch of a transcript, whose lines name their parents, the longest branch first.

    An answer that several branches share is trained in the first.
    """
    nodes = {line["uuid"]: line for line in lines if line.get("uuid")}
    parents = {line.get("parentUuid") for line in nodes.values()}
    branches = [_branch(line, nodes) for uuid, line in nodes.items() if uuid not in parents]
    trained: set[str] = set()
    for branch in sorted(branches, key=len, reverse=True):
        spoken = [line for line in branch if isinstance(line.get("message"), dict)]
        by_model = [line for line in spoken if line["message"].get("model") != SYNTHETIC]
        answers = {line["uuid"] for line in by_model if line["message"].get("role") == "assistant"}
        if by_model and (answers - trained or not trained):
            fields = {key: value for key, value in branch[-1].items() if key != "message"}
            chat = {"messages": _merged(by_model, nodes, trained), "left_out": len(spoken) - len(by_model)}
            model = next((line["message"]["model"] for line in by_model[::-1] if line["message"].get("model")), "")
            yield {**fields, "id": branch[-1].get("sessionId"), "model": model, "claude_code": chat}
        trained |= answers


def _branch(leaf: Raw, nodes: Mapping[str, Raw]) -> list[Raw]:
    """Return the lines from the first to a leaf."""
    branch: dict[str, Raw] = {}
    node: Raw | None = leaf
    while node is not None and node["uuid"] not in branch:
        branch[node["uuid"]] = node
        node = nodes.get(node.get("parentUuid") or "")
    return list(branch.values())[::-1]


def _merged(lines: list[Raw], nodes: Mapping[str, Raw], trained: set[str]) -> list[Raw]:
    """Return the messages of a branch: lines with one message's id are one, and each call has its result behind it.

    Of calls in parallel all results but the last are leaves of their own.
    """
    messages: list[Raw] = []
    for line in lines:
        message = line["message"]
        parts = _parts(message)
        if message.get("id") and messages and messages[-1].get("id") == message["id"]:
            messages[-1]["content"] += parts
        else:
            messages.append({**message, "content": parts} | ({"weight": 0} if line["uuid"] in trained else {}))
    given = {piece.get("tool_use_id") for message in messages for piece in message["content"]}
    others = [
        piece for line in nodes.values() if isinstance(line.get("message"), dict) for piece in _parts(line["message"])
    ]
    results = {piece["tool_use_id"]: piece for piece in others if piece.get("type") == "tool_result"}
    whole: list[Raw] = []
    for message in messages:
        calls = [piece.get("id") for piece in message["content"] if piece.get("type") == "tool_use"]
        aside = [results[call] for call in calls if call in results and call not in given]
        whole += [message, *([{"role": "user", "content": aside}] if aside else [])]
    return whole


def _parts(message: Raw) -> list[Raw]:
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


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
    """Yield the spans of an OTLP export that hold a chat, with their attributes as a dict; without any the export."""
    scopes = [scope for line in lines for resource in line["resourceSpans"] for scope in resource["scopeSpans"]]
    has_chat = False
    for span in [span for scope in scopes for span in scope.get("spans", ())]:
        events = [attribute for event in span.get("events", ()) for attribute in event.get("attributes", ())]
        attributes = {item["key"]: _value(item["value"]) for item in [*span.get("attributes", ()), *events]}
        if any(key in attributes for key in ("gen_ai.input.messages", "gen_ai.output.messages")):
            has_chat = True
            yield {**span, "id": span.get("spanId"), "attributes": attributes}
    if not has_chat:
        yield from lines


def _value(value: Raw) -> Any:
    """Return an attribute's value, which OTLP holds under its type."""
    if "arrayValue" in value:
        return [_value(item) for item in value["arrayValue"].get("values", ())]
    if "kvlistValue" in value:
        return {item["key"]: _value(item["value"]) for item in value["kvlistValue"].get("values", ())}
    return next(iter(value.values()), None)


def batches_joined(records: Iterable[Raw]) -> Iterator[Raw]:
    """Yield records, the requests of OpenAI's batches with their replies, which other files hold.

    Raises:
        ValueError: two requests or two replies have the same custom_id.
    """
    waiting: dict[tuple[str, str], Raw] = {}
    for raw in records:
        name = raw.get("custom_id")
        sides = [side for side in ("body", "response") if side in raw]
        if not isinstance(name, str) or len(sides) != 1:
            yield raw
            continue
        other = waiting.pop(("response" if sides == ["body"] else "body", name), None)
        if other is not None:
            request, reply = (raw, other) if sides == ["body"] else (other, raw)
            yield {**request, "response": reply["response"], "error": reply.get("error")}
        elif (sides[0], name) in waiting:
            raise ValueError(f"two batches hold the custom_id {name}: give the files of one batch at a time")
        else:
            waiting[sides[0], name] = raw
    yield from waiting.values()


def is_wanted(raw: Raw, where: Mapping[str, Any]) -> bool:
    """Whether a record's fields have the values that `data.where` names, by their paths with dots."""
    return all(
        _meets(raw[path] if path in raw else at(raw, path.replace(".", "/")), bounds) for path, bounds in where.items()
    )


def _meets(value: Any, bounds: Any) -> bool:
    """Whether a value is one of those wanted, and within the bounds, such as `>=2026-11-01`; numbers as numbers."""
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
    return not equal or any(equal)
