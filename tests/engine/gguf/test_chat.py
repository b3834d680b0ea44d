"""Chat templates: what published ones need, and what hostile ones try."""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from engine.errors import Cancelled, ChatTemplateError
from engine.gguf import chat
from engine.gguf.chat import ChatTemplate
from engine.gguf.file import GgufFile
from engine.gguf.metadata import TypedMetadata

DATA = Path(__file__).parents[2] / "data"
DOUBLING = "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s|length }}"
HELLO = [{"role": "user", "content": "Hello"}]

# the constructs that templates of this family use, in a template of our own
FAMILY = """
{%- set pictures = namespace(count=0) %}
{%- macro words(content, counted) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if part is mapping and 'image' in part %}
                {%- if counted %}
                    {%- set pictures.count = pictures.count + 1 %}
                {%- endif %}
                {{- '<image ' ~ pictures.count ~ '>' }}
            {%- elif part.text is defined %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception('Unknown part of a message.') }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('There are no messages.') }}
{%- endif %}
{%- if tools and tools is iterable %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = words(message.content, true) | trim %}
    {%- if message.role == 'assistant' %}
        {%- if content.startswith('<think>') and '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n').strip() %}
        {%- endif %}
        {%- generation %}
            {{- '<|im_start|>assistant\\n' ~ content ~ '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'comment' %}
        {%- continue %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""


def render(source: str, messages: list[dict[str, Any]] = HELLO, /, **kwargs: Any) -> str:
    return ChatTemplate(source, "<s>", None).render(messages, **kwargs)


def failure(source: str) -> ChatTemplateError:
    """The error of a template, which must come as two short sentences."""
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    error = caught.value
    assert error.message.startswith("The chat template ")
    assert len(error.message) < 400
    assert "\n" not in error.message
    for sentence in (error.message, error.remedy):
        assert sentence.endswith(".")
        assert ". " not in sentence
    return error


def test_template_and_tokens_come_from_the_file() -> None:
    with GgufFile.open(DATA / "qwen35-a-f32.gguf") as file:
        template = ChatTemplate.from_gguf(file)
    assert template is not None
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HELLO) == prompt
    assert template.render(HELLO, add_generation_prompt=False) == prompt[:33]


def test_special_tokens_are_named_where_the_file_has_them() -> None:
    with GgufFile.open(DATA / "qwen35-a-f32.gguf") as file:
        entries = dict(file.metadata)
    entries["tokenizer.chat_template"] = "{{ bos_token is defined }} {{ eos_token }}"
    template = ChatTemplate.from_gguf(TypedMetadata(Path("m.gguf"), entries))
    assert template is not None
    assert template.render([]) == "False <|im_end|>"


@pytest.mark.parametrize("entries", [{}, {"tokenizer.chat_template": ""}])
def test_a_file_without_a_template_has_none(entries: dict[str, Any]) -> None:
    assert ChatTemplate.from_gguf(TypedMetadata(Path("m.gguf"), entries)) is None


def test_conversation_in_the_familys_style() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"image": 1}, {"text": " What? "}, {"image": 2}]},
        {"role": "comment", "content": "skipped"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA cat. "},
        {"role": "user", "content": "Größe <b>?"},
    ]
    tools = [{"name": "größe", "of": ["<a>", None]}]
    start, end = "<|im_start|>", "<|im_end|>\n"
    assert render(FAMILY, messages, tools=tools, enable_thinking=False) == (
        f'{start}system\nTools:\n{{"name": "größe", "of": ["<a>", null]}}{end}'
        f"{start}system\nBe brief.{end}"
        f"{start}user\n<image 1> What? <image 2>{end}"
        f"{start}assistant\nA cat.{end}"
        f"{start}user\nGröße <b>?{end}"
        f"{start}assistant\n<think>\n\n</think>\n\n"
    )
    assert render(FAMILY).endswith(f"{start}assistant\n<think>\n")


def test_neighbours_in_a_loop_safe_text_and_sorted_tables() -> None:
    """What templates of the other families use."""
    messages = [{"role": role, "content": f"<{role}>"} for role in ("user", "tool", "tool", "user")]
    grouped = """
{%- macro turn(message, mark='-', more=none) -%}
    {{ mark }}{{ message.content | safe }}{{ more if more is not none }}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' and (loop.previtem is undefined
            or loop.previtem.role != 'tool') %}[{% endif -%}
    {{ turn(message, mark='=') if loop.first else turn(message, more='!') }}
    {%- if message.role == 'tool' and loop.nextitem.role != 'tool' %}]{% endif -%}
{%- endfor -%}
"""
    assert render(grouped, messages) == "=<user>[-<tool>!-<tool>!]-<user>!"
    table = "{% for key, value in t | dictsort %}{{ key }}{{ value | tojson(ensure_ascii=False) }}"
    assert render(table + "{% endfor %}", t={"b": "ß", "a": [1, True]}) == 'a[1, true]b"ß"'
    assert render("{{ t | tojson(ensure_ascii=True) }}", t="ß") == '"\\u00df"'


def test_blocks_are_trimmed_and_loops_can_end_early() -> None:
    loop = "  {% for i in range(9) %}\n{{ i }},\n    {% if i == 2 %}{% break %}{% endif %}\n"
    assert render(loop + "{% endfor %}") == "0,\n1,\n2,\n"


def test_tojson_takes_an_indent_and_escapes_nothing() -> None:
    assert (
        render("{{ messages | tojson(indent=1) }}", [{"é": "<&'"}]) == '[\n {\n  "é": "<&\'"\n }\n]'
    )


def test_the_clock_is_there() -> None:
    years = {str(datetime.date.today().year)}
    shown = render("{{ strftime_now('%Y') }}")
    assert shown in years | {str(datetime.date.today().year)}


def test_variables_have_the_names_templates_use() -> None:
    source = "{{ tools }}|{{ documents }}|{{ bos_token }}|{{ eos_token is defined }}|{{ mood }}"
    assert render(source, mood="calm") == "None|None|<s>|False|calm"
    assert render("{{ documents[0] }}", documents=["d"]) == "d"


def test_any_text_survives_the_way_to_the_child_and_back() -> None:
    content = "\x00\r\n\u2028 🙂 \ud800 é"
    assert render("{{ messages[0].content }}", [{"content": content}]) == content


def test_a_message_larger_than_a_pipe_arrives_though_the_child_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat, "LOOK_S", 0.001)  # the first look comes before the child reads
    monkeypatch.setattr(chat, "MAX_WALL", 20.0)
    content = "long " * 200_000
    assert render("{{ messages[0].content }}", [{"content": content}]) == content


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{% for %}", "broken at line 1"),
        ("\n\n{% if a %}", "broken at line 3"),
        ("{% nonsense %}", "nonsense"),
        ("\n{{ nothing.method() }}", "broken at line 2: 'nothing' is undefined"),
        ("\n\n{{ 1 + 'a' }}", "broken at line 3: unsupported operand"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{% include 'other' %}", "broken at line 1"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "recursion"),
        ("{% set a = [] %}{{ a.append(1) }}", "unsafe"),
        ("x" * (chat.MAX_TEMPLATE + 1), "longer than 1,000,000"),
        ("{{ raise_exception('No.\n  Really. ' ~ 'x' * 9999) }}", "refuses these messages: No; Re"),
    ],
    ids=lambda value: value[:20].strip(),
)
def test_a_broken_template_is_an_error_with_its_line(source: str, named: str) -> None:
    assert named in failure(source).message


def test_a_refusal_repeats_the_templates_words() -> None:
    error = failure("{{ raise_exception('Roles must take turns.') }}")
    assert error.message == "The chat template refuses these messages: Roles must take turns."
    coloured = failure("{{ raise_exception('a\x1b[31mb') }}").message
    assert coloured == "The chat template refuses these messages: a\ufffd[31mb."


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.sys }}",
        "{{ strftime_now.__code__.co_code }}",
    ],
)
def test_a_template_cannot_reach_the_interpreter(source: str) -> None:
    assert "unsafe" in failure(source).message


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{{ '%1000000000d' % 1 }}", "memory"),
        ("{{ '{:>1000000000}'.format(1) }}", "memory"),
        ("{{ 'a'.center(messages|length * 10 ** 9) }}", "memory"),
        ("{{ ([0] * 10 ** 10)|length }}", "memory"),
        ("{% set n = namespace(s='01') %}" + DOUBLING, "memory"),
        ("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 4,000,000 char"),
        ("{{ messages[0].content * 10 ** 6 }}", "more than 4,000,000 char"),
    ],
    ids=lambda value: value[:20].strip(),
)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit memory")
@pytest.mark.thinned(4)
def test_a_template_that_takes_too_much_is_an_error(source: str, named: str) -> None:
    tracemalloc.start()
    try:
        assert named in failure(source).message
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # at most, in this process
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 7 ** 99999999 % 7 }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    ],
    ids=["loops", "power", "modulus", "macros"],
)
@pytest.mark.skipif(sys.platform == "win32", reason="no limit of processor time")
@pytest.mark.thinned(4)
def test_a_template_that_does_not_end_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MAX_CPU", 1)
    assert "too long" in failure(source).message


def test_the_wall_clock_ends_it_where_no_other_limit_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_CPU", 600)
    monkeypatch.setattr(chat, "MAX_WALL", 1.0)
    with pytest.raises(ChatTemplateError, match="too long"):
        render("{{ 7 ** 99999999 % 7 }}")


def test_time_in_which_everything_is_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One look that takes longer than all may take: as after SIGSTOP and SIGCONT."""
    communicate, answers = subprocess.Popen.communicate, []

    def look(worker: subprocess.Popen[bytes], timeout: float) -> Any:
        if answers:
            return answers[0]
        answers.append(communicate(worker))
        time.sleep(chat.MAX_WALL)
        raise subprocess.TimeoutExpired("", timeout)

    monkeypatch.setattr(chat, "MAX_WALL", 3 * chat.LOOK_S)
    monkeypatch.setattr(subprocess.Popen, "communicate", look)
    assert render("{{ 1 + 1 }}") == "2"


def test_a_child_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit(3)")
    monkeypatch.setattr(chat, "_WORKER", worker)
    assert "exit status 3" in failure("x").message
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    assert "No such file" in failure("x").message


def test_a_rendering_ends_with_the_look_at_which_it_is_cancelled() -> None:
    looks: list[bool] = []

    def cancelled() -> bool:
        looks.append(len(looks) >= 10)
        return looks[-1]

    template = ChatTemplate("{{ 7 ** 99999999 % 7 }}", "<s>", None)
    with pytest.raises(Cancelled):
        template.render(HELLO, cancelled)
    assert looks == [False] * 10 + [True], "the first look that says so is the last"
    assert chat.LOOK_S <= 0.05


@pytest.mark.parametrize("name", ["messages", "self", "cancelled"])
def test_a_variable_of_any_name_is_one_of_the_template(name: str) -> None:
    expected = "calm" if name == "cancelled" else "Hello"  # Jinja has a `self` of its own
    source = f"{{{{ messages[0].content if {name} is not string else {name} }}}}"
    assert render(source, **{name: "calm"}) == expected
