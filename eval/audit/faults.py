"""Faults of speculating servers by name: what they are, and public incidents of each."""

from collections.abc import Sequence
from typing import NamedTuple

from eval.audit.compare import FAILED, FAULT, PASSED, Finding

ISSUES = {"vllm": "vllm-project/vllm", "sglang": "sgl-project/sglang", "llama.cpp": "ggml-org/llama.cpp",
          "ik_llama.cpp": "ikawrakow/ik_llama.cpp", "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
          "transformers": "huggingface/transformers", "mistral.rs": "EricLBuehler/mistral.rs"}  # fmt: skip


class Fault(NamedTuple):
    """A fault: what it is in a clause, and public threads about it where there are, such as vllm#43559."""

    what: str
    incidents: tuple[str, ...]

    def links(self) -> list[tuple[str, str]]:
        """Return each thread and its address."""
        threads = [(thread, *thread.split("#")) for thread in self.incidents]
        return [(thread, f"https://github.com/{ISSUES[name]}/issues/{number}") for thread, name, number in threads]


FAULTS = {
    "wrong_token": Fault("a token that is not the target's choice", ("vllm#46834",)),
    "rejected_draft": Fault("a drafted token is kept that verification should have rejected", ("vllm#46834",)),
    "draft_bonus": Fault(
        "the token after a wholly accepted draft is the draft's and not the target's", ("vllm#3951", "vllm#8320")
    ),
    "lost_token": Fault("a token is missing in the text", ()),
    "early_stop": Fault("answers end before the target ends them", ("vllm#42781", "ik_llama.cpp#2358")),
    "leak": Fault("text of another request in an answer", ("vllm#9441",)),
    "stale_cache": Fault("the prefix cache holds what another request or the draft left there", ("vllm#43559",)),
    "history": Fault("conversations are answered as if earlier messages were others", ()),
    "prompt_chunk": Fault("prompts that are cut into chunks are read wrongly", ("vllm#53488",)),
    "batch": Fault("answers differ when requests run together", ("vllm#9441", "llama.cpp#27117")),
    "cancelled": Fault("a cancelled request changes its neighbours", ()),
    "streaming": Fault("a streamed answer and a whole one differ", ()),
    "penalty": Fault("penalties miss some of the tokens of a pass", ("sglang#33643", "vllm#18902")),
    "limit": Fault(
        "answers that cross max_tokens within a pass do not end there, or give another finish_reason",
        ("ik_llama.cpp#2358",),
    ),
    "stop_string": Fault("text after a stop string is delivered", ("sglang#31599", "vllm#47616")),
    "logprobs": Fault("logprobs are not the target's", ("llama.cpp#27972", "vllm#17876")),
    "usage": Fault("tokens are counted wrongly", ("sglang#39826", "ik_llama.cpp#2358")),
    "choices": Fault("several choices of one request are not what they are alone", ("TensorRT-LLM#19487",)),
    "tool_call": Fault("tool calls are cut off or malformed", ("vllm#35800", "vllm#41967")),
    "schema": Fault("the schema or grammar is not applied to all tokens of a pass", ("vllm#9423", "vllm#44006")),
    "seed": Fault("a request's seed is ignored", ("vllm#6038", "vllm#55005", "TensorRT-LLM#17599")),
    "top_p": Fault("top_p is applied to draft and target in different ways", ("transformers#47932",)),
    "distribution": Fault("sampled text is not the target's", ("vllm#55005", "transformers#47932", "mistral.rs#2424")),
    "crash": Fault("the server goes away under requests in flight that the baseline answers", ("sglang#4188",)),
    "error": Fault("the server fails where the baseline answers", ("vllm#20531",)),
}
# What the first failure looks like, or its check; another check with its status, which tells it apart; the fault then.
DISTINCTIONS = (
    ("identity", "streaming", PASSED, "streaming"),  # the same answers, not streamed
    ("tool_calls", "schemas", FAILED, "schema"),
    ("seed", "sampling", FAILED, "distribution"),
)


def diagnosed(findings: Sequence[Finding]) -> str:
    """Return the fault that the failed checks together look like, a key of FAULTS; empty if none failed.

    Checks come in the order in which a fault that one shows makes later ones fail too, so the first failure says it,
    but for those that another check tells from it. A server that fails is named so.
    """
    statuses = {finding.check: finding.status for finding in findings}
    first = next((finding for finding in findings if finding.status == FAILED), None)
    if first is None:
        return ""
    for look, other, status, fault in DISTINCTIONS if first.fault not in ("error", "crash") else ():
        distinct = look in (first.fault, first.check) and statuses.get(other) == status
        if distinct and (fault != "streaming" or _most(first)):
            return fault
    return first.fault or ("wrong_token" if first.check == "identity" else first.check)


def _most(finding: Finding) -> bool:
    """Whether most answers have a fault; whole replies may be without one that is rarer by chance."""
    return 2 * sum(d.kind == FAULT for d in finding.differences) > finding.figures.get("answers", 0)
