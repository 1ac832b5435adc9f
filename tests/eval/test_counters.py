"""Metrics pages and replies of vLLM, SGLang and llama.cpp, as they are written, against counts made by hand."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from eval.measures.counters import Counters, between, decoded_between, of_reply, read_counters, restarted, verified
from eval.measures.metrics import SpecDecodingStats, ratio, sum_counts
from tests.ops.endpoint_server import sglang_page, vllm_page

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b\\" {c}"} 0.0
vllm:generation_tokens_total{engine="0",model_name="m"} 140.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0
vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 2.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2e+01
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7638e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 120.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 15.0
process_start_time_seconds 1.76381e+09
"""
SGLANG = """\
# HELP sglang:spec_accept_length The average acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0"} 3.1
sglang:spec_accept_rate{engine_type="unified",model_name="m",tp_rank="0"} 0.7
sglang:spec_num_steps{engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:spec_num_draft_tokens{engine_type="unified",model_name="m",tp_rank="0"} 4.0
sglang:num_requests_total{model_name="m"} 6.0
sglang:spec_verify_calls_total{model_name="m"} 50.0
"""


LLAMA = """\
llamacpp:prompt_tokens_total 100
llamacpp:spec_decode_num_draft_tokens_total 375
llamacpp:spec_decode_num_accepted_tokens_total 159
llamacpp:spec_decode_num_drafts_total 125
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 80
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 46
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 33
"""


def read(page: str) -> Counters:
    found = read_counters(page)
    assert found is not None
    return found


def tau(counts: SpecDecodingStats) -> float | None:
    return ratio(counts.tokens, counts.steps)


def test_vllms_counters_are_summed_over_engines_and_reasons() -> None:
    found = read(VLLM)
    assert found == Counters("vllm", 60.0, 180.0, 75.0, (45.0, 20.0, 10.0), None, 6.0, 1.76381e9, 140.0)


def test_sglangs_counter_of_passes_and_the_width_of_its_tree() -> None:
    assert read(SGLANG) == Counters("sglang", 50.0, None, None, (), 4.0, 6.0, None)


def test_llama_cpps_counters_are_vllms_under_its_own_name() -> None:
    assert read(LLAMA) == Counters("llamacpp", 125.0, 375.0, 159.0, (80.0, 46.0, 33.0), None, None, None)
    idle = "".join(f"{line.rsplit(' ', 1)[0]} 0\n" for line in LLAMA.splitlines() if "per_pos" not in line)
    assert read(idle).drafts is None  # as without speculation


def test_names_without_total_or_with_underscores_are_the_same() -> None:
    for change in (("_total{", "{"), ("vllm:", "vllm_")):
        assert read(VLLM.replace(*change)) == read(VLLM)


def test_a_page_of_neither_engine_has_no_counters() -> None:
    for page in ("", "<html>login</html>", "other:requests_total 1\n", "vllm:x{ 1", "vllm:x one"):
        assert read_counters(page) is None


def test_what_is_no_count_is_not_counted_and_a_place_that_no_draft_has_takes_no_memory() -> None:
    for value in ("nan", "-inf", "1e308", "9" * 5000):
        told = f'vllm:spec_decode_num_drafts_total{{engine="2"}} {value}\nprocess_start_time_seconds {value}\n'
        assert read(told + VLLM) == read(VLLM)
    for position in ("9" * 12, "9" * 5000, "\N{SUPERSCRIPT TWO}", "-1"):
        told = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} 1.0\n'
        assert read(VLLM + told) == read(VLLM)


def test_without_speculation_there_are_no_drafts() -> None:
    counts = Counter(finished=2)
    assert (read(vllm_page(counts, False)).drafts, read(sglang_page(counts, False)).drafts) == (None, None)
    assert read(vllm_page(counts, True)).drafts == 0


def test_vllms_differences_in_our_terms() -> None:
    before = read(VLLM)
    after = replace(before, drafts=70.0, draft_tokens=210.0, accepted=95.0, by_depth=(53.0, 27.0, 15.0))
    whole = between(before, after, 30)
    assert whole == verified(10, 30, 20, (8, 7, 5))
    assert tau(whole) == 3.0  # vLLM's mean acceptance length: 1 + 20 / 10
    # Of 60 tokens the drafts account for 30: 20 accepted, and one for each of their 10 passes.
    assert between(before, after, 60) == verified(40, 30, 20, (8, 7, 5))


def test_sglangs_differences_in_our_terms() -> None:
    before = read(SGLANG)
    assert between(before, replace(before, drafts=60.0), 25) == verified(10, 30, 15, ())
    assert between(before, replace(before, drafts=60.0, width=None), 25).drafted is None
    assert tau(between(replace(before, drafts=None), replace(before, drafts=10.0), 25)) == 2.5


def test_what_sglang_had_answered_before_has_no_part_in_its_tokens() -> None:
    before = replace(read(SGLANG), generated=140.0)
    after = replace(before, generated=200.0, finished=10.0)
    assert decoded_between(before, after) == 56, "60 tokens, of which each of 4 answers has a first one"
    assert decoded_between(replace(before, generated=None, finished=None), after) == 190


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({}, False),
        ({"drafts": 61.0}, False),
        ({"drafts": 59.0}, True),
        ({"drafts": None}, True),
        ({"accepted": 0.0}, True),
        ({"finished": 5.0}, True),
        ({"by_depth": (45.0, 20.0, 9.0)}, True),
        ({"by_depth": (45.0, 20.0)}, True),
        ({"started": 1.77e9, "drafts": 999.0}, True),  # another process, whose counters have overtaken
        ({"engine": "sglang"}, True),
    ],
)
def test_counters_that_fell_began_anew(change: dict[str, Any], again: bool) -> None:
    assert restarted(read(VLLM), replace(read(VLLM), **change)) is again


def test_a_reply_of_vllms_tells_of_its_drafts() -> None:
    told = {
        "mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.5, "acceptance_histogram": [1, 1, 1, 1],
        "num_spec_steps": 4, "num_accepted_draft_tokens": 6, "num_draft_tokens": 12, "num_spec_tokens": 3,
    }  # fmt: skip
    reply = {"metrics": {"speculative_decoding": told}}
    assert of_reply(reply, 10) == verified(4, 12, 6, (3, 2, 1))
    assert of_reply(reply, 13) == verified(7, 12, 6, (3, 2, 1))  # and three passes without a draft
    assert of_reply({"metrics": {"speculative_decoding": told | {"acceptance_histogram": [4]}}}, 10) == verified(
        4, 12, 6, ()
    )


def test_a_reply_of_sglangs_tells_of_its_drafts() -> None:
    told = {
        "spec_accept_length": 2.5, "spec_verify_ct": 4, "spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 12,
        "spec_correct_drafts_histogram": [1, 1, 1, 1],
    }  # fmt: skip
    assert of_reply({"choices": [{"meta_info": told}]}, 10) == verified(4, 12, 6, (3, 2, 1))
    assert of_reply({"choices": [], "sglext": {"spec_tokens_details": told}}, 10) == verified(4, 12, 6, (3, 2, 1))


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"metrics": None, "choices": []},
        {"metrics": {"time_to_first_token_ms": 1.0}, "choices": [{"meta_info": {"spec_verify_ct": 4}}]},
        {"metrics": {"speculative_decoding": {"num_spec_steps": -1, "num_accepted_draft_tokens": 1}}},
        {"choices": [{"meta_info": {"spec_verify_ct": True, "spec_num_correct_drafts": 0}}]},
        {"metrics": {"speculative_decoding": {
            "num_spec_steps": 1, "num_accepted_draft_tokens": 9, "num_draft_tokens": 3}}},
    ],
)  # fmt: skip
def test_a_reply_that_tells_nothing_or_what_cannot_be(reply: dict[str, Any]) -> None:
    assert of_reply(reply, 10) is None


def test_a_sum_does_not_tell_what_a_part_does_not() -> None:
    known, unknown = verified(4, 12, 6, (3, 2, 1)), verified(2, None, 3, ())
    assert sum_counts([known, verified(3, 6, 1, (1,))]) == verified(7, 18, 7, (4, 2, 1))
    assert sum_counts([known, verified(1, 0, 0, ())]) == verified(5, 12, 6, (3, 2, 1))
    assert sum_counts([known, unknown]) == verified(6, None, 9, ())
    assert tau(sum_counts([])) is None
