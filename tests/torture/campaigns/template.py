"""Hostile chat templates: text or a sentence, in bounded time, and nothing left running."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from engine.errors import ChatTemplateError
from engine.gguf.chat import MAX_OUTPUT, MAX_WALL, ChatTemplate
from tests.torture import awake
from tests.torture.campaign import Campaign, Case, Figures

_PIECES = (
    "{{ 'a' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ 10**10**7 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum(n=10**6) }}",
    "{{ raise_exception('no \x1b[31m\n' * 99) }}",
    "{{ strftime_now('%Y' * 10**6) }}",
    "{{ messages | tojson(indent=10**6) }}",
    "{{ messages | map(attribute='content') | list | join(',') * 10**7 }}",
    "{{ range(10**9) | list | length }}",
    "{{ (messages * 10**7) | sort(attribute='content') }}",
    "{{ 'é\ud800' }}",
    "{{ undefined.a.b }}",
    "{{ 1 / 0 }}",
    "{{ messages[99]['content'] }}",
    "{{ bos_token ~ eos_token }}",
    "{{ tools[0] }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{% raw %}{{{% endraw %}",
    "{# " + "x" * 999,
    "{% set x = 'ab' %}",
    "{% set ns = namespace(x='a') %}",
    "{% set ns.x = ns.x ~ ns.x %}",
    "{% set x = x ~ x %}",
    "{{ x }}",
    "{{ ns.x }}",
    "{{ caller() }}",
    "{{ m() }}",
    "{% break %}",
    "plain text\n",
    "{{ '" + "(" * 999 + "' }}",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{{ " + "-" * 3000 + "1 }}",
    "{{ messages[0]['content'] }}",
)
_BLOCKS = (
    ("{% for i in range(10**9) %}", "{% endfor %}"),
    ("{% for i in range(1000) %}", "{% endfor %}"),
    ("{% for m in messages recursive %}", "{{ loop(messages) }}{% endfor %}"),
    ("{% macro m() %}", "{{ m() }}{% endmacro %}"),
    ("{% if messages %}", "{% endif %}"),
    ("{% filter upper %}", "{% endfilter %}"),
    ("{% set y %}", "{% endset %}"),
    ("{% call m() %}", "{% endcall %}"),
    ("{% generation %}", "{% endgeneration %}"),
    ("{% autoescape true %}", "{% endautoescape %}"),
    ("{% if", " %}"),
)


_WHOLE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _draw(random: np.random.Generator, number: int) -> Case:
    """One of four is harmless."""
    if number % 4 == 0:
        return {"steps": [_WHOLE], "content": str(random.choice(["hi", "", "{{ 1 }}", "\x1b[31m"]))}
    return {
        "steps": [
            _part(random, int(random.integers(3))) for _ in range(int(random.integers(1, 5)))
        ],
        "content": str(random.choice(["hi", "", "{{ 1 }}", "\0", "x" * 10**5, "\x1b[31m"])),
    }


def _part(random: np.random.Generator, depth: int) -> str:
    text = _PIECES[int(random.integers(len(_PIECES)))]
    for _ in range(depth):
        before, behind = _BLOCKS[int(random.integers(len(_BLOCKS)))]
        text = before + text + behind
    if random.random() < 0.1:
        at = int(random.integers(len(text)))
        text = text[:at] + text[at + 1 :]
    return text


def _play(case: Case, _: Path) -> Figures:
    messages = [{"role": "user", "content": case["content"]}]
    template = ChatTemplate("".join(case["steps"]), "<s>", None)
    start = awake.now()
    before = sum(os.times()[2:4])
    try:
        text = template.render(messages)
        figures: Figures = {"texts": 1}
    except ChatTemplateError as error:
        text = ""
        for sentence in (error.message, error.remedy):
            assert sentence.isprintable() and len(sentence) < 600, sentence[:600]
        figures = {"refused": 1}
    assert len(text) <= MAX_OUTPUT
    if case["steps"] == [_WHOLE]:
        wanted = f"<|im_start|>user\n{case['content']}<|im_end|>\n<|im_start|>assistant\n"
        assert text == wanted, f"a harmless template gives {text!r}"
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        raise AssertionError("a worker is left, or was never reaped")
    seconds = awake.now() - start
    assert seconds < MAX_WALL + 4, f"it took {seconds:.1f} s"
    return {**figures, "worker_cpu_s_max": sum(os.times()[2:4]) - before}


CAMPAIGN = Campaign(
    "template",
    "Text or a sentence, in bounded time and memory, and no process left.",
    _draw,
    _play,
    seconds=30.0,
    batch=4,
    share=0.7,
    n_least=8,
)
