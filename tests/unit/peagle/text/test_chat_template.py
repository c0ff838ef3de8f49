from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from peagle.errors import InvalidParameterError, ModelLoadError, RequestError
from peagle.text import ChatTemplate, Tokenizer
from tests.builders.tokenizer import CHATML_TEMPLATE, build_tokenizer_directory

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCTION = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        [INST] {{ message.content | trim }} [/INST]
    {%- elif message.role == 'assistant' %}
        {% generation %}
        {%- set answer = message.content %}
        {{ answer }}{{ eos_token }}
        {% endgeneration %}
    {%- endif %}
{% endfor %}
"""
LOOP_CONTROLS = """\
{% for message in messages %}
  {% if message['role'] == 'system' %}
    {% continue %}
  {% endif %}
  {% set ns = namespace(seen=0) %}
  {% for word in message['content'].split(' ') %}
    {% if word == 'stop' %}{% break %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
  {% endfor %}
{{ ns.seen }} {{ message['content'] }}
{% endfor %}
"""
JSON = (
    "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}"
)
VISIBLE_NAMES = (
    "{{ tools is defined }} {{ tools is none }} {{ documents is none }} {{ pad_token }} {{ unk_token is defined }} "
    "{{ unk_token }} {{ nothing }} {{ add_generation_prompt }} {{ 'name' in messages[0] }} {{ strftime_now('%Y-%m') }}"
)
TEMPLATES = {
    "smollm2": SMOLLM2,
    "chatml": CHATML_TEMPLATE,
    "instruction": INSTRUCTION,
    "loop_controls": LOOP_CONTROLS,
    "json": JSON,
    "visible_names": VISIBLE_NAMES,
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "Hi", "name": None}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " a <b> & 'c' \"d\" \n"}],
    [
        {"role": "user", "content": "one two stop three"},
        {"role": "assistant", "content": "你好 🙂 {{ not_jinja }}"},
        {"role": "user", "content": "", "name": "ann"},
    ],
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(tmp_path: Path, name: str) -> None:
    build_tokenizer_directory(tmp_path, chat_template=TEMPLATES[name])
    ours, theirs = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for messages in CONVERSATIONS:
        for add_generation_prompt in (True, False):
            text = ours.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
            kwargs = {"add_generation_prompt": add_generation_prompt}
            assert text == theirs.apply_chat_template(messages, tokenize=False, **kwargs)
            ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)
            assert ours.encode(text, add_special_tokens=False) == ids


def test_the_template_of_smollm2_brings_its_own_system_prompt() -> None:
    assert ChatTemplate(SMOLLM2).render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_have_their_names() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}",
        bos_token="B",
        eos_token="E",
        other_tokens={"pad_token": "P"},
    )
    assert template.render([{"role": "user"}]) == "BEP"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing.deeper }}", "missing"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "append"),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(source: str, reason: str) -> None:
    with pytest.raises(InvalidParameterError, match=reason) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "Hi"}])
    assert caught.value.param == "messages"
    assert caught.value.code == "invalid_value"


def test_a_message_without_content_is_the_clients_error() -> None:
    with pytest.raises(InvalidParameterError, match="does not accept these messages"):
        ChatTemplate(SMOLLM2).render([{"role": "user", "content": None}])


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="must not be empty"):
        ChatTemplate(SMOLLM2).render([])


def test_a_checkpoint_without_template_says_so() -> None:
    template = ChatTemplate(None)
    assert not template.is_present
    with pytest.raises(RequestError, match="has no chat template") as caught:
        template.render([{"role": "user", "content": "Hi"}])
    assert caught.value.param == "messages"


def test_a_broken_template_fails_the_load() -> None:
    with pytest.raises(ModelLoadError, match="not valid Jinja"):
        ChatTemplate("{% for message in messages %}")


def test_messages_are_left_alone() -> None:
    messages = [{"role": "user", "content": "Hi", "name": None}]
    ChatTemplate(SMOLLM2).render(messages)
    assert messages == [{"role": "user", "content": "Hi", "name": None}]
