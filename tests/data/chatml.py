"""ChatML's special tokens, two chat templates that render it, without and with {% generation %}, and chats for them."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{%- generation -%}{{ m['content'] + '<|im_end|>' }}{%- endgeneration -%}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Tokens = Callable[[str | None], PreTrainedTokenizerFast]

RECORDS = [{"id": f"r{i}", "prompt": f"why {i}", "answer": "so " * (i % 7 + 1)} for i in range(60)]
