"""Text as numbers: the same in every run, whole on disk, and every mistake named."""

import hashlib
import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from robust_attention.data.sentences import _lexicon, paragraphs
from robust_attention.data.text import EOS, UNK, Subwords, Vocabulary, load_coder, read_lines
from robust_attention.data.tokens import Tokens, Windows, tokenise, tokenised
from robust_attention.training.config import FitConfig
from robust_attention.training.optimise import Plan

CPU = torch.device("cpu")
LINES = ["", " = A b = ", "", " the cat saw the dog . ", " the bird <unk> . "]


def built(**limits: Any) -> Vocabulary:
    return Vocabulary.build((line.split() for line in LINES), **limits)


def test_vocabulary_is_sorted_by_count_then_word() -> None:
    # <eos> five times, "the" three, "." and "=" twice; the others once, in the order of their characters.
    assert built().words == (EOS, "the", ".", "=", UNK, "A", "b", "bird", "cat", "dog", "saw")
    vocabulary = built()
    assert vocabulary.words[vocabulary.eos] == EOS
    assert vocabulary.words[vocabulary.unk] == UNK


def test_rare_words_count_as_unknown() -> None:
    # Six words are left out, and <unk> itself occurs once: seven.
    assert built(min_count=2).words == (UNK, EOS, "the", ".", "=")
    assert built(max_size=4).words == (UNK, EOS, "the", ".")
    assert len(built(max_size=2)) == 2


def test_encoding_and_decoding_are_inverse_for_known_words() -> None:
    vocabulary = built()
    ids = [number for line in tokenise(LINES, vocabulary) for number in line]
    assert len(ids) == sum(len(line.split()) + 1 for line in LINES)
    assert vocabulary.decode(ids).split("\n") == [" ".join(line.split()) for line in LINES] + [""]
    assert vocabulary.encode("the zebra") == [vocabulary.words.index("the"), vocabulary.unk]


def test_vocabulary_survives_the_disk_and_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    vocabulary = Vocabulary([*built().words, "Ä", "日本"])
    vocabulary.save(path)
    again = load_coder(path)
    assert isinstance(again, Vocabulary)
    assert (again.words, again.checksum) == (vocabulary.words, vocabulary.checksum)
    record = json.loads(path.read_text(encoding="utf-8"))
    record["words"][1] = "thy"
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match="must match its SHA-256"):
        load_coder(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="must be a readable JSON file"):
        load_coder(path)


def test_wrong_vocabularies_fails_clearly() -> None:
    with pytest.raises(ValueError, match="words must differ from each other, got 'a' twice"):
        Vocabulary([EOS, UNK, "a", "a"])
    with pytest.raises(ValueError, match="words must hold <unk>, got 2 without it"):
        Vocabulary([EOS, "a"])
    with pytest.raises(ValueError, match="min_count must be a whole number of at least 1, got 0"):
        built(min_count=0)


@pytest.mark.parametrize("packed", [False, True])
def test_lines_are_read_plain_and_packed(packed: bool, tmp_path: Path) -> None:
    text = "a\u2028b c\r\n\n = d = \n"  # only \n ends a line
    path = tmp_path / ("x.tokens.xz" if packed else "x.tokens")
    path.write_bytes(lzma.compress(text.encode()) if packed else text.encode())
    assert [line.split() for line in read_lines(path)] == [["a", "b", "c"], [], ["=", "d", "="]]


def test_unreadable_texts_fails_clearly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a text must be a file that can be read, got .*none.tokens"):
        list(read_lines(tmp_path / "none.tokens"))
    for name, data in (("a.xz", b"nothing packed"), ("b.xz", lzma.compress(b"a b\n" * 100)[:60])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match="a text must be a file that can be read"):
            list(read_lines(tmp_path / name))
    (tmp_path / "c").write_bytes(b"a \xff b\n")
    with pytest.raises(ValueError, match="a text must be UTF-8"):
        list(read_lines(tmp_path / "c"))


@pytest.mark.parametrize(("size", "width"), [(2**16, 2), (2**16 + 1, 4), (300_000, 4)])
def test_tokens_survive_the_disk_in_as_few_bytes_as_they_need(size: int, width: int, tmp_path: Path) -> None:
    ids = [0, 1, size - 1, 32_767, 32_768, 65_535]
    written = Tokens.write(tmp_path / "t.bin", [ids[:2], [], ids[2:]], size, {"source": "x"})
    opened = Tokens.open(tmp_path / "t.bin")
    for tokens in (written, opened):
        assert tokens.read().tolist() == ids
        assert tokens.read(1, 3).tolist() == ids[1:3]
        assert tokens.rows(torch.tensor([0, 3]), 3).tolist() == [ids[:3], ids[3:]]
        assert (len(tokens), tokens.size, tokens.about) == (6, size, {"source": "x"})
    assert (tmp_path / "t.bin").stat().st_size == 4096 + 6 * width
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin", "t.bin.sha256"]


def test_a_flipped_bit_or_a_cut_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    Tokens.write(path, [[1, 2, 3]], 10)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[4097] ^= 4
    for data in (damaged, whole[:-1], b"", whole[:50], b"[]".ljust(4096)):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="must be a whole token file, got a damaged one"):
            Tokens.open(path)
    path.write_bytes(whole)
    assert Tokens.open(path).read().tolist() == [1, 2, 3]
    path.with_name("t.bin.sha256").unlink()
    with pytest.raises(ValueError, match="must be a token file, got none"):
        Tokens.open(path)


def test_numbers_out_of_range_fails_clearly(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    for wrong in ([3, 10], [-1], [2**40]):
        with pytest.raises(ValueError, match=r"token ids must .*from 0 to size - 1 = 9"):
            Tokens.write(path, [wrong], 10)
    with pytest.raises(ValueError, match="a text must have at least one word"):
        Tokens.write(path, [[], []], 10)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="token ids must lie from 0 to size - 1 = 9, got 1 to 12"):
        Windows(Tokens(torch.tensor([1, 12, 3]), 10), 2).batch(torch.tensor([0]), 0, CPU)
    with pytest.raises(ValueError, match=r"ids must be whole numbers \[N\], got torch.float32"):
        Tokens(torch.zeros(3), 10)


def test_a_token_file_is_made_again_only_for_another_text_or_vocabulary(tmp_path: Path) -> None:
    source, path = tmp_path / "x.tokens", tmp_path / "made" / "x.bin"
    source.write_text("\n".join(LINES), encoding="utf-8")
    first = tokenised(source, built(), path)
    made = path.stat().st_mtime_ns
    assert torch.equal(tokenised(source, built(), path).read(), first.read())
    assert path.stat().st_mtime_ns == made
    other = tokenised(source, built(min_count=2), path)
    assert other.size == 5
    path.write_bytes(path.read_bytes()[:-1])
    assert torch.equal(tokenised(source, built(min_count=2), path).read(), other.read())
    source.write_text("the dog", encoding="utf-8")
    assert len(tokenised(source, built(), path)) == 3


def test_windows_cover_the_text_once_with_the_next_word_as_target() -> None:
    tokens = Tokens(torch.arange(24), 30)
    windows = Windows(tokens, 5)
    assert len(windows) == 4
    inputs, targets = windows.batch(torch.tensor([2, 0]), 9, CPU)
    assert inputs.tolist() == [[10, 11, 12, 13, 14], [0, 1, 2, 3, 4]]
    assert torch.equal(targets, inputs + 1)
    with pytest.raises(ValueError, match="more than context = 24 tokens, got 24"):
        Windows(tokens, 24)


def test_order_of_windows_is_a_function_of_seed_and_step_and_resumes() -> None:
    windows = Windows(Tokens(torch.arange(101), 200), 4)
    config = FitConfig(epochs=2, batch_size=6, seed=3)
    plan = Plan(len(windows), config)
    seen = [windows.batch(plan.indices(step), 0, CPU)[0] for step in range(plan.num_steps)]
    later = Plan(len(windows), config)  # a new process that starts in the middle of the second epoch
    assert torch.equal(windows.batch(later.indices(7), 0, CPU)[0], seen[7])
    per_epoch = plan.steps_per_epoch
    for epoch in (seen[:per_epoch], seen[per_epoch:]):
        assert sorted(torch.cat(epoch).flatten().tolist()) == list(range(100))
    assert not torch.equal(seen[0], seen[per_epoch])


def test_generated_text_is_the_same_everywhere_and_goes_on() -> None:
    lines = list(paragraphs(200, seed=1))
    assert lines == list(paragraphs(300, seed=1))[:200]
    assert lines != list(paragraphs(200, seed=2))
    words = Counter(word for line in lines for word in line.split())
    assert 200 < len(words) < 800
    assert words["the"] > 100
    assert lines[1].startswith(" = ")
    # A change of the generator would silently change every stored result of the smoke scale.
    assert hashlib.sha256("\n".join(paragraphs(1000)).encode()).hexdigest()[:16] == "792759be9a3e4cd4"


def test_agreement_in_number_holds_across_a_clause() -> None:
    verbs = set(_lexicon().verbs)
    clauses = [
        words for line in paragraphs(600) for text in line.split(" . ") if "that" in (words := text.split())[1:5]
    ]
    main = {
        start: [words[words.index("that") + 3] for words in clauses if words[0] == start]
        for start in ("These", "Every")
    }
    assert min(map(len, main.values())) > 20
    assert set(main["These"]) <= verbs
    assert {verb[:-1] for verb in main["Every"]} <= verbs
    assert all(verb.endswith("t") for verb in main["Every"])


@pytest.fixture
def subwords(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], show_progress=False)
    made.train_from_iterator(paragraphs(60), trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_subwords_number_any_text(subwords: Path, tmp_path: Path) -> None:
    coder = load_coder(subwords)
    assert isinstance(coder, Subwords)
    line = next(line for line in paragraphs(10) if "." in line).strip()
    ids = [*coder.encode(line), coder.eos]
    assert len(ids) > len(line.split())
    assert coder.decode(ids) == line + "\n"
    assert coder.words[coder.eos] == "</s>"
    assert coder.unk is not None
    coder.save(tmp_path / "copy.json")
    assert load_coder(tmp_path / "copy.json").checksum == coder.checksum


def test_wrong_tokenizers_fails_clearly(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="path must be a tokenizer's JSON file"):
        load_coder(tmp_path / "x.json")
