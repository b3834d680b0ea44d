"""The language of memory scripts: what it says, and one sentence for all that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compare.memory_script import (
    CompareRanges,
    ContextSpec,
    DecodeTokens,
    ExpectFacts,
    MeasureBound,
    PositionRange,
    SequenceOperation,
)
from engine.compare.memory_script_parser import memory_scripts, parse_script, read_script
from engine.errors import OptionError
from engine.options import ROLLBACK_POLICIES
from resources import MEMORY_SCRIPTS

OLD_FILES = Path(__file__).resolve().parents[2] / "data" / "memory_scripts"


def actions(text: str) -> list[object]:
    return [one.action for one in parse_script("s", "s.memory", text).statements]


def ids(text: str, seq: int = 0, n_vocab: int = 1000) -> list[int]:
    """What `decode A <seq>: tokens` decodes; texts are their characters."""
    *_, found = actions(f"{text}")
    assert isinstance(found, DecodeTokens)
    (tokens,) = (tokens for number, tokens in found.batch if number == seq)
    encode = lambda words: [ord(letter) for letter in words]  # noqa: E731
    return [token for part in tokens for token in part.resolve(seq, n_vocab, encode)]


def test_tokens() -> None:
    head = 'tokens p = 5 6 7 8\ntokens t = "ab # c"  # a text\ncontext A n_seqs=2\n'
    assert ids(f"{head}decode A 0: p") == [5, 6, 7, 8]
    assert ids(f"{head}decode A 0: p[1:3] 9 p[-1:]+1 999") == [6, 7, 9, 9, 999]
    assert ids(f"{head}decode A 0: 1002 p[:1]", n_vocab=1000) == [2, 5]
    assert ids(f"{head}decode A 0: 1, 1: p+2", seq=1) == [7, 8, 9, 10]
    assert ids(f"{head}decode A 0: t[:2]+1") == [98, 99]
    assert ids(f"{head}decode A 0: t") == [ord(letter) for letter in "ab # c"]
    assert ids(f"{head}tokens q = p[2:] p\ndecode A 0: q+1") == [8, 9, 6, 7, 8, 9]
    # token(seq, pos) = 7 pos + 31 seq + 1
    assert ids(f"{head}decode A 0: 3, 1: pattern[2:4]", seq=1) == [46, 53]


def test_statements() -> None:
    found = actions(
        "context A n_seqs=2 n_rs_seq=3 kv=unified keep=0  # two of them\n"
        "seq_rm A 1 4 refused\nseq_rm A 1 4 9\nclear A\nseq_add A 0 1 -1 -2\n"
        "check A 0 3:5 = A 1 3:5 nmse<=1e-6\ncheck A 0 7 = A 1 8 top1\ncheck A 0 = A 1 exact\n"
        "check A 0 7 = A exact\ncheck A 0 7 = A 1 exact\nexpect A 0 pos=-1 valid>=2"
    )
    assert found == [
        ContextSpec("A", n_seqs=2, n_rs_seq=3, kv="unified", keep=0),
        SequenceOperation("A", "seq_rm", (1, 4), accepted=False),
        SequenceOperation("A", "seq_rm", (1, 4, 9)),
        SequenceOperation("A", "clear", ()),
        SequenceOperation("A", "seq_add", (0, 1, -1, -2)),
        CompareRanges(
            PositionRange("A", 0, 3, 5),
            PositionRange("A", 1, 3, 5),
            MeasureBound("nmse", "<=", 1e-6),
            False,
        ),
        CompareRanges(
            PositionRange("A", 0, 7, 8), PositionRange("A", 1, 8, 9), MeasureBound("top1"), False
        ),
        CompareRanges(PositionRange("A", 0), PositionRange("A", 1), MeasureBound("error"), True),
        CompareRanges(
            PositionRange("A", 0, 7, 8), PositionRange("A", 0, 7, 8), MeasureBound("max_abs"), False
        ),
        CompareRanges(
            PositionRange("A", 0, 7, 8), PositionRange("A", 1, 7, 8), MeasureBound("max_abs"), False
        ),
        ExpectFacts("A", 0, (("pos", "=", -1), ("valid", ">=", 2))),
    ]


def test_policies_of_single_lines_and_of_blocks() -> None:
    script = parse_script(
        "s",
        "s.memory",
        "title Some\nabout One\nabout two.\npolicies ring planes carry\ncontext A\n"
        "[ring] clear A\n[carry planes]\nclear A\n[carry] clear A\n[all]\nclear A",
    )
    assert (script.title, script.about) == ("Some", "One two.")
    assert script.policies == ("planes", "carry", "ring")
    lines = {policy: [s.line for s in script.for_policy(policy)] for policy in ROLLBACK_POLICIES}
    assert lines == {
        "planes": [5, 8, 11],
        "carry": [5, 8, 9, 11],
        "ring": [5, 6, 11],
        "replay": [],
        "checkpoint": [],
    }


A = "context A n_seqs=2\ntokens p = 1 2 3\n"
BAD = [
    ("rollback A 1", "there is no context"),
    (f"{A}jump A 1", "'jump' is not a statement"),
    (f"{A}decode B 0: 1", "there is no context 'B' (known: A)"),
    (f"{A}decode A 2: 1", "sequences 0..1, not 2"),
    (f"{A}decode A 0 1", "written as `0: tokens`"),
    (f"{A}decode A 0: 1, 0: 2", "sequence 0 is given twice"),
    (f"{A}decode A 0: q", "no tokens 'q'"),
    (f"{A}decode A 0: 1;2", "'1;2' is not a token, name or pattern"),
    (f"{A}decode A 0:", "tokens are missing"),
    (f"{A}decode A 0: pattern", "pattern needs positions"),
    (f"{A}decode A 0: pattern[4:2]", "pattern needs positions"),
    (f"{A}decode A 0: pattern[0:999999999]", "more than 16384 tokens"),
    (f"{A}decode A 0: 12345678901", "is not a whole number"),
    (f"{A}tokens r = p[1:]\ndecode A 0: r[1:]", "cannot be sliced"),
    (f"{A}tokens pattern = 1", "cannot be the name"),
    (f"{A}seq_rm A 0", "seq_rm takes 2 or 3 numbers"),
    (f"{A}seq_rm A 0 x", "'x' is not a whole number"),
    (f"{A}seq_cp A 0 5", "sequences 0..1, not 5"),
    (f"{A}load A 0 s", "there is no sequence saved as s"),
    (f"{A}save A 0 ../s", "takes a context, a sequence and a name"),
    (f"{A}checkpoint A 0 s\ncontext B\nrestore B 0 s", "there is no checkpoint s of B"),
    (f"{A}[ring] save A 0 s\nload A 0 s", "under carry, checkpoint, planes, replay"),
    (f"{A}[ring] context B\nclear B", "no context B under carry"),
    (f"{A}check A 0 1:3 = A 1 1:4 exact", "equally many positions"),
    (f"{A}check A 0 = A 1 1:3 exact", "equally many positions"),
    (f"{A}check A 0 3:3 = A 1 exact", "no positions"),
    (f"{A}check A 0 1 A 1 1", "a check is written as"),
    (f"{A}check A 0 1 = A 1 1 nmse<1", "is not a bound on nmse, max_abs, relative"),
    (f"{A}check A 0 1 = A 1 1 nmse<=few", "'few' is not a number"),
    (f"{A}check A 0 1 = A 1 1 nmse<=nan", "'nan' is not a number"),
    (f"{A}check A 0 = A 1 nmse<=1", "is not a bound on error"),
    (f"{A}expect A 0", "names no fact"),
    (f"{A}expect A 0 depth=3", "is not a fact about pos, valid"),
    (f"{A}context A", "a context 'A' already"),
    ("context A n_seqs=65", "n_seqs is 65, outside 1..64"),
    ("context A n_rs_seq=1000000", "outside 0..256"),
    ("context A n_ctx=99999999", "outside 1..65536"),
    ("context A kv=both", "kv is 'both', not one of per-seq, unified"),
    ("context A depth=1", "has no 'depth'"),
    ("context A fault=fire", "fault is 'fire', not one of"),
    ("context 1", "cannot be the name of a context"),
    ("policies spiral", "'spiral' is not a policy"),
    ("[ring\ncontext A", "no closing bracket"),
    ("context A\npolicies ring", "policies come before"),
    ("\n".join(f"context c{i}" for i in range(33)), "more than 32 contexts"),
    (f"{A}" + "decode A 0: pattern[0:9000]\n" * 2, "more than 16384 tokens have been decoded"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_script("s", "s.memory", text)
    n_lines = len(text.splitlines())
    assert caught.value.message.startswith("s.memory, line ")
    assert 1 <= int(caught.value.message.split()[2].rstrip(":")) <= n_lines
    assert message in caught.value.message
    assert "draftscope memory --help-all" in caught.value.remedy


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "x.memory"
    with pytest.raises(OptionError, match="cannot be read"):
        read_script(path)
    path.write_bytes(b"\xff")
    with pytest.raises(OptionError, match="not UTF-8"):
        read_script(path)
    path.write_text("# nothing\n")
    with pytest.raises(OptionError, match=r"x\.memory does nothing"):
        read_script(path)
    path.write_text("# long\n" * 10_000)
    with pytest.raises(OptionError, match="larger than 64 KiB"):
        read_script(path)
    path.write_text("context A\n")
    assert read_script(path).name == "x"


def test_files_of_earlier_versions_say_the_same_as_the_bundled_ones() -> None:
    """The bundled scripts as they were before they became TOML, and before some of their lines
    were for models with states other than rings alone."""
    bundled = memory_scripts(MEMORY_SCRIPTS)
    assert len(bundled) == 12
    for new in bundled:
        old = read_script(OLD_FILES / f"{new.name}.memory")
        for name in ("name", "title", "about", "policies"):
            assert getattr(new, name) == getattr(old, name)
        said, same = (
            [(one.text.partition("] ")[2] or one.text, one.policies, one.action) for one in of]
            for of in (new.for_models("states").statements, old.statements)
        )
        assert said == same


def test_statements_for_kinds_of_models() -> None:
    script = parse_script(
        "s",
        "s.memory",
        "title Some\nabout One\ncontext A\n[ring rings] clear A\n[states]\nclear A\n[all]\nclear A",
    )
    lines = {
        kind: [one.line for one in script.for_models(kind).for_policy("ring")]
        for kind in ("rings", "states")
    }
    assert lines == {"rings": [3, 4, 8], "states": [3, 6, 8]}
    assert 4 not in [one.line for one in script.for_policy("carry")]


def test_lines_are_those_of_the_file() -> None:
    for script in memory_scripts(MEMORY_SCRIPTS):
        text = (MEMORY_SCRIPTS / f"{script.name}.toml").read_text(encoding="utf-8")
        lines = text.splitlines()
        for one in script.statements:
            assert lines[one.line - 1].startswith(one.text)
        ended = parse_script("s", "s.toml", text.replace("\n", "\r\n")).statements
        assert [one.line for one in ended] == [one.line for one in script.statements]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = 'x'\nsteps = 3", "s.toml: steps is 3, not str"),
        ("title = 'x'\nsteps = 'context A'", "s.toml: steps is not a text between ''' and '''"),
        ("steps = '''context A'''", "has no title"),
        ("about = 'x'", "has no title and no steps"),
        ("title = 'x'\n\nsteps = '''\ncontext A\njump A'''", "s.toml, line 5: 'jump'"),
        ("title = 'x'\nsteps = '''jump A'''", "s.toml, line 2: there is no context 'A'"),
        ("title = 'x'\nsteps = '''\ntitle A'''", "line 3: title is a key of the file"),
        ("title = 'x'\nsteps = '''\n# none\n'''", "s.toml does nothing"),
        ("title = 'x'\npolicies = ['fire']\nsteps = ''''''", "policies is wrong: 'fire'"),
        ("title = 'x'\npolicies = []\nsteps = ''''''", "no policy is named"),
        ("title = 'x'\nlanes = []\nsteps = ''''''", "lanes is unknown; known are title, steps"),
        ("title = 'x'\ntitle x", "not valid TOML (Expected '=' after a key in a key/value pair"),
    ],
)
def test_a_bad_key_or_line_of_toml_is_named(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_script("s", "s.toml", text)
    assert message in caught.value.message and caught.value.remedy


TEXT = (
    "context A B check expect decode replay seq_rm save load [ ring ] : = , 0 1 9:3 -1 p "
    "pattern[0:2] exact nmse<=1 nmse<=nan refused tokens policies title n_seqs=2 #"
)
WORDS = st.sampled_from(TEXT.split())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(WORDS, max_size=7).map(" ".join), max_size=6).map("\n".join))
def test_any_text_is_a_script_or_an_error_of_a_line(text: str) -> None:
    message = ""
    try:
        parse_script("s", "s.memory", text)
    except OptionError as error:
        message = error.message
    assert message == "" or message.startswith("s.memory")
