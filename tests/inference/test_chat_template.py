"""What a chat template raises is one line."""

from collections import Counter
from copy import copy
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from data.text.masks import samples_of
from data.text.prompts import prompt_of
from data.text.records import parse
from eval.inputs.workloads import _masking
from inference.chat_template import RenderError
from inference.run import chat_ids
from tests.data.families import family_tokenizer

RECORD = parse(
    {"id": "r", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, 0, ""
)
BROKEN = ("{% for %}", "{{ 1|nothing }}", "{% break %}", "{% for a in [1] %}" * 30 + "{% endfor %}" * 30)
FAILING = (
    "{{ 1 / 0 }}", "{{ 10.0 ** 1000 }}", "{% for a in range(10 ** 9) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages.__class__.__mro__ }}", "{{ foo.bar }}",
    "{{ 1 + 'a' }}", "{% for a, b in [1] %}{% endfor %}", "{% include 'x' %}", "{{ strftime_now(3) }}",
    "{{ namespace()|tojson }}", "{{ [1, 'a']|sort }}", "{{ '%d'|format('a') }}",
    "{{ raise_exception('no \x1b[2J\n way') }}", "{{ raise_exception('a' * 99999) }}",
)  # fmt: skip


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    made = copy(family_tokenizer("chatml", False))
    made.chat_template, made.name_or_path = template, "toy"
    return made


@pytest.mark.parametrize("template", [*FAILING, *BROKEN])
def test_what_a_template_raises_is_one_line(template: str) -> None:
    tokenizer = tokenizer_with(template)
    for render in (
        lambda: prompt_of(RECORD, tokenizer),
        lambda: samples_of(RECORD, tokenizer, "f", replace(_masking(), on_bad="fail"), Counter()),
        lambda: chat_ids([{"role": "user", "content": "a"}], tokenizer),
    ):
        with pytest.raises(ValueError, match=r"the chat template of toy (refuses it|is broken): .") as caught:
            render()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400
    assert isinstance(caught.value, RenderError) == (template in FAILING)
