"""The program that makes the demo models, on configurations that train in a second."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.session import Session
from resources import DEMO_TARGET
from tests.demo_training import eagle3, export, repair
from tests.demo_training.corpus import (
    Corpus,
    CorpusFile,
    Stream,
    is_suitable,
    layout_tokens,
    newline_tokens,
)
from tests.demo_training.model import DemoConfig, DemoModel
from tests.demo_training.optimiser import decay, orthogonalise
from tests.demo_training.stages import Plan, Stage, language_loss
from tests.demo_training.tokenizer import EOT, N_VOCAB, from_file, train

TINY = DemoConfig("tiny", 2, 64, 64, 1, 1, 1, 2, interval=2, n_mtp=1, d_state=32)


def tiny(seed: int = 0) -> DemoModel:
    torch.manual_seed(seed)
    model = DemoModel(TINY)
    with torch.no_grad():  # output projections start at zero, which would hide mistakes
        for parameter in model.parameters():
            if parameter.ndim == 2 and not parameter.any():
                parameter.normal_(std=0.1)
    return model


@pytest.fixture(scope="module")
def sources() -> list[CorpusFile]:
    folder = Path(torch.__file__).parent / "utils"
    texts = [(p.name, p.read_text(encoding="utf-8")) for p in sorted(folder.rglob("*.py"))]
    return [CorpusFile("library", name, text) for name, text in texts[:80]]


@pytest.fixture(scope="module")
def tokenizer(sources: list[CorpusFile]) -> Tokenizer:
    return train(source.text for source in sources)


@pytest.fixture(scope="module")
def corpus(sources: list[CorpusFile], tokenizer: Tokenizer) -> Corpus:
    return Corpus.build(sources, tokenizer)


def test_a_few_steps_lower_the_loss_and_a_resumed_run_is_the_same(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    plan = Plan("tiny", 6, 0.02, 0.01, mtp_from=0.5)
    ids = torch.from_numpy(corpus.batch(0, plan.shares, 2, 33))
    model = tiny()
    before = language_loss(model, ids, False)[0].item()
    with ThreadPoolExecutor(1) as threads:
        Stage(model, corpus, tokenizer, plan, tmp_path).run(threads, lambda _: None)
        assert language_loss(model, ids, False)[0].item() < before - 0.1

        resumed = tiny(seed=1)
        stage = Stage(resumed, corpus, tokenizer, plan, tmp_path)
        stage.resume()
        stage.run(threads, lambda _: None)  # nothing left to do
    assert stage.step == plan.n_steps
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_export_reloads_with_equal_weights_and_logits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = tiny()
    path = tmp_path / "tiny.gguf"
    export.save(model, tokenizer, path)
    again = tiny(seed=1)
    export.load(again, path)
    assert from_file(path).to_str() == tokenizer.to_str()
    for name, value in export.tensors(again).items():
        wanted = export.tensors(model)[name]
        # Q8_0 rounds to 1/127 of the largest of 32 values; the rest is kept exactly
        step = np.abs(wanted).max() / 127 if export._is_quantised(name, wanted) else 1e-6
        np.testing.assert_allclose(value, wanted, atol=step, rtol=1e-6, err_msg=name)

    session = Session.open(path, compute="f32")
    ids = tokenizer.encode("def f(x):\n    return x + 1\n").ids
    assert session.tokenizer.encode("def f(x):\n    return x + 1\n") == ids
    assert session.drafters == ("draft-mtp",)
    with torch.no_grad():
        hidden, _ = again.trunk(torch.tensor([ids]))
        wanted = again.logits(hidden)[0].numpy()
    np.testing.assert_allclose(session.logits(ids), wanted, atol=2e-4)


def test_an_eagle3_drafter_is_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, again = (eagle3.Eagle3Net(torch.zeros(8, 64)) for _ in range(2))
    path = tmp_path / "eagle3.gguf"
    eagle3.save(net, DEMO_TARGET, path)
    eagle3.load(again, path)
    for name, value in net.state_dict().items():
        step = float(value.abs().max()) / 127
        torch.testing.assert_close(again.state_dict()[name], value, atol=step, rtol=1e-6)


def test_decoding_token_by_token_equals_one_pass(tokenizer: Tokenizer) -> None:
    model = tiny()
    prompt = torch.tensor([tokenizer.encode("import os\n").ids])
    ids = repair.generate(model, prompt, 12)
    with torch.no_grad():
        hidden, _ = model.trunk(ids[:, :-1])
    greedy = model.logits(hidden).argmax(-1)
    n_prompt = prompt.shape[1]
    assert torch.equal(greedy[:, n_prompt - 1 :], ids[:, n_prompt:])


def test_sampling_is_deterministic_even_and_starts_at_lines(corpus: Corpus, tokenizer) -> None:
    shares = {"library": 3, "tests": 1}
    batch = corpus.batch(5, shares, 4, 64)
    assert np.array_equal(batch, corpus.batch(5, shares, 4, 64))
    assert not np.array_equal(batch, corpus.batch(6, shares, 4, 64))

    stream = corpus.train["library"]
    newline = newline_tokens(tokenizer)
    assert tokenizer.decode([int(np.flatnonzero(newline)[0])]).endswith("\n")
    starts = set(stream.line_starts.tolist())
    assert all(s == 0 or newline[stream.ids[s - 1]] or stream.ids[s - 1] == EOT for s in starts)
    n = len(stream.ids) // 64
    first = [stream.window(i, 64) for i in range(n)]
    assert len({row.tobytes() for row in first}) > 0.8 * n  # few windows come twice
    with pytest.raises(ValueError, match="no window"):
        Stream([[1, 2, 3]], newline).window(0, 9)


def test_held_out_files_are_not_trained_on(corpus: Corpus, sources: list[CorpusFile]) -> None:
    held = [source for source in sources if source.held_out]
    assert 0 < len(held) < len(sources) / 5
    text = corpus.train["library"].ids.tobytes()
    for document in corpus.held_out["library"]:
        assert len(document) < 60 or document[:60].astype(np.uint16).tobytes() not in text


def test_tables_and_repeated_lines_are_not_suitable() -> None:
    code = "".join(f"def name_{c}(argument):\n    return {c!r} + argument\n" for c in "abcdefghij")
    assert is_suitable(code)
    assert not is_suitable(code + "    self.assertEqual(a, b)\n" * 40)
    assert not is_suitable(code + "0x1234, 0x5678,\n" * 40)
    assert not is_suitable("short")


def test_marks_are_the_generated_ends_of_repeated_grams() -> None:
    assert repair.marks([1, 2, 3, 1, 2, 3, 1], 4, n=3) == [False] * 5 + [True, True]
    assert repair.marks([1, 2, 3, 1, 2, 3], 6, n=3) == [False] * 6


def test_repair_loss_is_taken_where_a_token_was_avoided() -> None:
    logits = torch.tensor([[0.0, 4.0, 1.0], [0.0, 4.0, 1.0]])
    p = torch.softmax(logits, -1)[0]
    avoided = torch.tensor([1, repair.NONE])
    loss = repair.repair_loss(logits, torch.tensor([2, 1]), avoided)
    torch.testing.assert_close(loss, -(torch.log(p[2]) + torch.log(1 - p[1])) / 2)


def repaired(tokenizer: Tokenizer, layout: np.ndarray, p_repeat: float) -> repair.Repaired:
    torch.manual_seed(0)
    model = DemoModel(TINY)  # its layers add nothing yet, so it repeats the token it reads
    prompts = torch.tensor([tokenizer.encode("import os\n").ids] * 2)
    rng = np.random.default_rng(0)
    made = repair.generate_repaired(model, prompts, 150, layout, rng, p_repeat)
    n_prompt = prompts.shape[1]
    assert made.ids.shape == made.avoided.shape == made.better.shape == (2, n_prompt + 150)
    # what is avoided is the greedy token and would have repeated; elsewhere the greedy one is
    with torch.no_grad():
        hidden, _ = model.trunk(made.ids[:, :-1])
    greedy = model.logits(hidden).argmax(-1)[:, n_prompt - 1 :]
    here, avoided = made.ids[:, n_prompt:], made.avoided[:, n_prompt:]
    at = avoided != repair.NONE
    assert at.any()
    assert torch.equal(at, made.better[:, n_prompt:] != repair.NONE)
    assert torch.equal(torch.where(at, avoided, here), greedy)
    rows = made.ids.tolist()
    for row, position in at.nonzero().tolist():
        end = n_prompt + position
        worse, better = int(avoided[row, position]), int(made.better[row, end])
        assert repair.marks([*rows[row][:end], worse], n_prompt)[-1]
        assert not repair.marks([*rows[row][:end], better], n_prompt)[-1]
        assert rows[row][end] in (worse, better)
    return made


def repeated_tokens(made: repair.Repaired) -> list[int]:
    rows = made.ids.tolist()
    n_prompt = len(rows[0]) - 150
    return [
        token
        for row in rows
        for token, mark in zip(row, repair.marks(row, n_prompt), strict=True)
        if mark
    ]


def test_repair_marks_loops_and_the_ways_out_of_them(tokenizer: Tokenizer) -> None:
    layout = np.zeros(N_VOCAB, dtype=bool)
    never = repaired(tokenizer, layout, 0.0)
    assert repeated_tokens(never) == []
    assert repeated_tokens(repaired(tokenizer, layout, 0.7))

    layout[:] = True  # whatever is layout may repeat
    torch.manual_seed(0)
    prompts = torch.tensor([tokenizer.encode("import os\n").ids])
    rng = np.random.default_rng(0)
    free = repair.generate_repaired(DemoModel(TINY), prompts, 150, layout, rng)
    assert repeated_tokens(free)
    assert (free.avoided == repair.NONE).all()


def test_layout_tokens_are_line_ends_and_white_space(tokenizer: Tokenizer) -> None:
    texts = ["x", "\n", "    ", ":\n", " a"]
    wanted = dict(zip(texts, [False, True, True, True, False], strict=True))
    flags = layout_tokens(tokenizer)
    for text, flag in wanted.items():
        assert all(flags[i] == flag for i in tokenizer.encode(text).ids), text


def test_whole_texts_end_where_they_end_and_rows_begin_with_one() -> None:
    texts = [torch.tensor(row) for row in ([1, 2, EOT, 9, 9], [3, 4, 5, 6, 7], [8, EOT, 9, 9, 9])]
    rows = repair.whole_texts([*texts, *texts], 6)
    assert rows.tolist() == [[1, 2, EOT, 3, 4, 5], [8, EOT, 1, 2, EOT, 3]]


def test_optimiser_parts() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(32, 48)))
    assert values.min() > 0.5
    assert values.max() < 1.4
    rates = [decay(step, 100, 0.5) for step in range(100)]
    assert max(rates) == 1.0
    assert rates[0] < 0.05
    assert rates[49] == 1.0
    assert rates[-1] == pytest.approx(0.02, abs=0.03)


def test_vocabulary_size(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == N_VOCAB
    assert tokenizer.encode("<|endoftext|>").ids == [EOT]
