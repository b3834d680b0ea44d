"""`draftscope conform`: exit status, reports, what is refused."""

from __future__ import annotations

import json

import pytest

from app.__main__ import main


def test_our_kernels_pass(tmp_path, capsys):
    written = [tmp_path / "out.md", tmp_path / "out.xml"]
    status = main(
        [
            *(
                "conform",
                "draftscope",
                "--only",
                "causal_conv_slots.torch",
                "--checks",
                "depths,batch",
            ),
            *("--json", "--markdown", str(written[0]), "--junit", str(written[1])),
        ]
    )
    assert status == 0
    answer = json.loads(capsys.readouterr().out)
    assert [check["check"] for check in answer["checks"]] == ["depths", "batch"]
    assert answer["failed"] == 0
    assert r"causal\_conv\_slots.torch conv | ok |" in written[0].read_text()
    assert 'failures="0"' in written[1].read_text()


def test_a_wrong_kernel_fails_and_says_how_to_see_it_again(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("def adapter(shape, memory):\n    raise RuntimeError('no such op')\n")
    assert main(["conform", f"{path}:adapter", "--checks", "depths"]) == 1
    out = capsys.readouterr().out
    assert "crash" in out
    assert "RuntimeError: no such op" in out
    assert f"draftscope conform {path}:adapter --only adapter --checks depths --seed 1" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "not a package with an adapter"),
        (["draftscope", "--only", "nope"], "Known: gated_delta_slots"),
        (["draftscope", "--checks", "nope"], "'nope' is not one of depths, "),
    ],
)
def test_wrong_use_is_refused(arguments, words, capsys):
    try:
        status = main(["conform", *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert words in capsys.readouterr().err


def test_a_version_that_was_not_tried_needs_force(tmp_path, capsys):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm-9.9.dist-info").mkdir()
    assert main(["conform", str(tmp_path), "--checks", "depths"]) == 2
    assert "tested: 0.33.0" in capsys.readouterr().err
