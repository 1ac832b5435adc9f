"""A chat template is a program from outside: it ends, and what it raises is one line."""

from collections import Counter
from copy import copy
from dataclasses import replace
from threading import Thread

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data.text.masks import samples_of
from data.text.prompts import prompt_of
from data.text.records import parse
from eval.inputs.texts import _masking
from inference import chat_template
from inference.chat_template import RenderError, compile_as_it_is, compile_timed, rendering
from inference.run import chat_ids
from tests.data.families import CHATS, FAMILIES, GOLDEN, family_tokenizer

RECORD = parse(
    {"id": "r", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, 0, ""
)
LONG = "range(99999)"
ENDLESS = {
    "loops": f"{{% for a in {LONG} %}}{{% for b in {LONG} %}}{{% endfor %}}{{% endfor %}}",
    "output": f"{{% for a in {LONG} %}}{{% for b in {LONG} %}}{{{{ 'a' * 9 }}}}{{% endfor %}}{{% endfor %}}",
    "passed over": f"{{% for a in {LONG} if 'a' * 99999 == 'b' %}}{{% endfor %}}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "tagged": f"{{% generation %}}{{% for a in {LONG} %}}{{% for b in {LONG} %}}{{% endfor %}}{{% endfor %}}"
    "{% endgeneration %}",
    "filters": f"{{% set b = [{LONG}] * 99999 %}}{{{{ b|map('map', 'string')|map('list')|list }}}}",
}
BROKEN = (
    "{% for %}",
    "{{ 1|nothing }}",
    "{% break %}",
    "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "{% if a %}b{% endif %}" * 60_000,
)
FAILING = (
    "{{ 1 / 0 }}", "{{ 10.0 ** 1000 }}", "{{ 9 ** 9999 }}", "{{ 7 ** 9999999999 }}", "{{ 'a' * 10 ** 12 }}",
    "{{ 'a'.center(10 ** 15) }}", "{% for a in range(10 ** 9) %}{% endfor %}", "{{ lipsum(n=10 ** 9) }}",
    "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ 'a' | center(9000000000) }}", "{{ 'a'.ljust(9000000000) }}", "{{ ('a\n' * 9999) | indent(99999) }}",
    "{{ ('a\t' * 9999).expandtabs(99999) }}", "{{ '{:>9000000000}'.format(1) }}", "{{ '%999999999d' | format(1) }}",
    "{{ '%*d' % (999999999, 1) }}", "{{ '{:{}}'.format(1, 999999999) }}", "{{ [messages] | tojson(indent=900000000) }}",
    "{{ ('a' * 99999) | replace('a', 'a' * 99999) }}", "{{ ('a' * 99999).replace('a', 'a' * 99999) }}",
    "{{ ('a' * 99999) | replace('', 'b' * 99999) }}", "{{ ('a' * 99999).replace('a', 'b' * 99999, 9999) }}",
    "{{ ('a' * 99999) | replace(new='b' * 99999, old='a') }}", "{{ ('a' * 99999) | replace('a', 'b' * 99999, -1) }}",
    "{{ [1] | batch(9000000000, 'x') | list }}", "{{ ('a ' * 3000) | wordwrap(1, wrapstring='b' * 1000000) }}",
    "{{ ('a' * 3000).translate({97: 'b' * 1000000}) }}", "{{ (['a'] * 100000) | join('b' * 1000000) }}",
    "{{ ('b' * 1000000).join(['a'] * 100000) }}", "{{ range(99999) | map('string') | join('b' * 1000000) }}",
    "{{ ('a\n' * 9999) | indent('b' * 100000) }}", "{{ ([[1]] * 99999) | sum(start=[]) }}",
    *(
        "{% set n = namespace(x='aa') %}{% for i in range(99) %}" + grown + "{% endfor %}"
        for grown in (
            "{% set n.x = n.x ~ n.x %}", "{% set n.x = n.x + n.x %}", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}",
        )
    ),
    "{{ messages.__class__.__mro__ }}", "{{ foo.bar }}", "{{ 1 + 'a' }}", "{% for a, b in [1] %}{% endfor %}",
    "{% include 'x' %}", "{{ strftime_now(3) }}", "{{ namespace()|tojson }}", "{{ [1, 'a']|sort }}",
    "{{ '%d'|format('a') }}", "{{ raise_exception('no \x1b[2J\n way') }}", "{{ raise_exception('a' * 99999) }}",
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


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_ends(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.01)
    tokenizer = tokenizer_with(ENDLESS[kind])
    said: list[ValueError] = []

    def render() -> None:
        with pytest.raises(ValueError, match=r"the chat template of toy does not end") as caught:
            samples_of(RECORD, tokenizer, "f", _masking(), Counter())  # on_bad=drop is for records
        said.append(caught.value)

    render()
    thread = Thread(target=render)  # an endpoint's answers are rendered in threads
    thread.start()
    thread.join()
    assert len(said) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_clock_changes_nothing(family: str) -> None:
    template = (GOLDEN / f"{family}.jinja").read_text(encoding="utf-8")
    for name in FAMILIES[family]["chats"]:
        record = parse({"id": name, **CHATS[name]}, 0, "")
        given = {"messages": record.messages, "tools": list(record.tools) or None, "bos_token": "<s>", "eos_token": ""}
        outcomes = []
        for compiled in (compile_as_it_is, compile_timed):
            try:
                outcomes.append(compiled(template).render(given, add_generation_prompt=True))
            except (TemplateError, TypeError) as error:
                outcomes.append(repr(error))
        assert outcomes[0] == outcomes[1]


def test_a_clock_is_a_renderings_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.0)
    loop = "{% for a in range(9999) %}{% endfor %}"
    with pytest.raises(ValueError, match="does not end"), rendering(tokenizer_with(loop)):
        render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=loop)
    assert render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=loop)[0] == [""]


@pytest.mark.parametrize(
    ("replaced", "length"),
    [
        (".replace('b' * 999, 'c' * 999)", 99_999),
        (" | replace('b' * 999, '')", 99_999),
        (".replace('a' * 999, 'b' * 9)", 100 * 9 + 99),
        (".replace('a', 'b' * 999, 2)", 99_997 + 2 * 999),
        (" | replace('', 'b' * 999, 1)", 99_999 + 999),
        (" | replace('a', 'bb')", 2 * 99_999),
    ],
)
def test_a_long_text_may_have_parts_replaced(replaced: str, length: int) -> None:
    template = f"{{{{ ('a' * 99999){replaced} }}}}"
    tokenizer = tokenizer_with(template)
    with rendering(tokenizer):
        made = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert len(made) == length


def test_texts_that_are_formatted_stay_as_they_are() -> None:
    template = (
        '{{ \'{{"a": {:>3}}}\'.format(1) }}{{ \'100%% of {"a": {"b": %s}} 1234567\' | format(2) }}'
        "{{ 'a' | center(5) }}"
        "{{ 'a\nb' | indent(2) }}{{ 'abc'.replace('b', 'x') }}{{ 'a b' | replace(' ', '') }}{{ '%03d' % 7 }}{{ 7 % 4 }}"
    )
    tokenizer = tokenizer_with(template)
    with rendering(tokenizer):
        made = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert made == '{"a":   1}100% of {"a": {"b": 2}} 1234567  a  a\n  baxcab0073'
