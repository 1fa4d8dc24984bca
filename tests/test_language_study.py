"""The language study at its smoke scale, every row of it, small: from the grid to numbers and to generated text."""

import io
import json
import lzma
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import robust_attention as ra
from robust_attention import cli
from robust_attention._config import describe, rebuild
from robust_attention._seeds import mix
from robust_attention.data.sentences import paragraphs
from robust_attention.data.swap import random_swap
from robust_attention.data.text import Vocabulary
from robust_attention.eval.measure import Measurement
from robust_attention.eval.perplexity import sliding_losses
from robust_attention.recipes import han2023_language as recipes
from robust_attention.recipes import han2023_language_tables as paper
from robust_attention.recipes.language import LanguageConfig, TextData, classes
from robust_attention.study import language, store
from robust_attention.study.language import build, generate_text, load_model, measure, resolved, trained
from robust_attention.study.language_run import LANGUAGE, estimate
from robust_attention.study.run import run_study
from robust_attention.study.texts import load_texts

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "data.lines": 100,
    "fit.epochs": 1,
    "model.context": 16,
    "model.dim": 16,
    "model.depth": 1,
    "model.hidden": 16,
    "evaluation.num_tokens": 150,
    "evaluation.blocks": 10,
}


def study(out: Path, *, rows: tuple[str, ...] = (), list_only: bool = False, **settings: Any) -> tuple[list[str], str]:
    console = Console(file=io.StringIO(), width=200)
    changes = [f"{path}={json.dumps(value)}" for path, value in (TINY | settings).items()]
    where, failed = run_study(
        LANGUAGE, out=out, rows=rows, changes=changes, jobs=1, device="cpu", list_only=list_only, console=console
    )
    assert where == out
    assert isinstance(console.file, io.StringIO)
    return failed, console.file.getvalue()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "smoke"
    failed, _ = study(folder, rows=(*recipes.ROWS, "mom-partition"))
    assert failed == []
    return folder


def records(out: Path) -> dict[str, dict[str, Any]]:
    return {record["row"]: record for record in store.read(store.result_files(out))}


def tiny(row: str = "transformer", **settings: Any) -> LanguageConfig:
    (cell,) = LANGUAGE.cells("smoke", rows=(row,), settings=TINY | settings)
    return cell.config


def test_every_row_is_done_and_measured(out: Path) -> None:
    found = records(out)
    assert set(found) == {*recipes.ROWS, "mom-partition"}
    targets = ("all targets", "swapped targets", "clean targets", "clean targets, before the swap")
    for row, record in found.items():
        assert record["status"] == "done", record
        measured = {m["condition"]: Measurement.from_dict(m) for m in record["measurements"]}
        assert list(measured) == list(record["blocks"])
        for part in ("valid", "test"):
            assert measured[f"clean {part}"].n == 149
            for share in ("1.5", "5"):
                whole, swapped, clean, before = (measured[f"swap {share}% {part}, {of}"] for of in targets)
                assert (whole.n, clean.n, before.n) == (149, 149 - swapped.n, clean.n)
                assert whole.value == pytest.approx((swapped.n * swapped.value + clean.n * clean.value) / 149), row
                assert whole.settings["share"] == float(share) / 100
                assert swapped.n in (whole.settings["swapped"], int(whole.settings["swapped"]) - 1)
        for condition, means in record["blocks"].items():
            assert len(means) == min(10, measured[condition].n)
            if measured[condition].n % len(means) == 0:
                assert sum(means) / len(means) == pytest.approx(measured[condition].value, abs=1e-4)
        assert record["training"]["steps"] == len(range(0, record["training"]["train_tokens"] // 16, 16))
        assert len(record["training"]["valid"]) == 1


def test_swaps_and_first_weights_are_the_same_for_every_row(out: Path) -> None:
    found = records(out)
    numbers = {
        tuple((m["n"], m["settings"].get("swapped")) for m in record["measurements"]) for record in found.values()
    }
    assert len(numbers) == 1
    weights = [build(tiny(row)).embed.weight for row in ("transformer", "mgk", "mom")]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], build(replace(tiny(), seed=1)).embed.weight)


def test_what_is_done_is_not_done_again(out: Path) -> None:
    failed, said = study(out, rows=("transformer", "kde"))
    assert failed == []
    assert "0 cells to run of 2" in said
    failed, said = study(out, rows=("transformer",), list_only=True, **{"fit.epochs": 2})
    assert said.split() == ["open", "generated/transformer/0"]


def test_a_finished_run_keeps_its_weights_alone_and_is_not_trained_again(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = out / "runs" / "generated" / "transformer" / "0"
    assert {path.name for path in folder.iterdir()} == {"config.json", "words.json", "weights", "measured", ".lock"}
    monkeypatch.setattr(language, "fit", lambda *_, **__: pytest.fail("trained again"))
    config = tiny()
    texts = load_texts(config.data, folder)
    config = resolved(config, texts.coder)
    model, history = trained(config, folder, texts, CPU, lambda doing, done: None)
    assert history == records(out)["transformer"]["training"]
    again = measure(config, model, texts, "test", CPU)
    stored = [m for m in records(out)["transformer"]["measurements"] if " test" in m["condition"]]
    assert [m.to_dict() for m in again.measurements] == stored
    faster = replace(
        config, fit=replace(config.fit, micro_batch=2, save_every=7), evaluation=recipes.LanguageEvaluation()
    )
    trained(faster, folder, texts, CPU, lambda doing, done: None)  # how, not what
    with pytest.raises(ValueError, match="holds a run with other settings"):
        trained(replace(config, seed=5), folder, texts, CPU, lambda doing, done: None)


@pytest.mark.parametrize("row", ["transformer", "mom"])
def test_a_run_that_was_cut_goes_on_bitwise(row: str, tmp_path: Path) -> None:
    config = tiny(row, **{"fit.report_every": 1, "fit.save_every": 3, "fit.epochs": 2, "model.dropout": 0.1})
    texts = load_texts(config.data, tmp_path)
    config = resolved(config, texts.coder)

    class Cut(Exception):
        pass

    def cut(doing: str, done: float) -> None:
        if done > 0.6:
            raise Cut

    with pytest.raises(Cut):
        trained(config, tmp_path / "cut", texts, CPU, cut)
    assert list((tmp_path / "cut").glob("step-*.json"))
    weights, losses = [], []
    for name in ("cut", "whole"):
        model, history = trained(config, tmp_path / name, texts, CPU, lambda doing, done: None)
        weights.append(model.state_dict())
        losses.append((history["first_losses"], history["final_loss"], history["valid"]))
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_a_trained_model_loads_in_three_lines_and_generates(out: Path) -> None:
    folder = out / "runs" / "generated" / "rkde-hampel" / "0"
    model, coder, config = load_model(folder)
    assert config.row == "rkde-hampel"
    assert not model.training
    assert isinstance(coder, Vocabulary)
    texts = load_texts(config.data, folder)
    found = measure(config, model, texts, "test", CPU)
    assert found.measurements[0].value == records(out)["rkde-hampel"]["measurements"][9]["value"]
    one, same, other = (generate_text(folder, "The", number=20, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert one.startswith("The")
    assert "<unk>" not in one
    words = [word for line in one.split("\n") for word in line.split()]
    assert set(words) <= set(coder.words)
    assert generate_text(folder, number=5, temperature=0) == generate_text(folder, number=5, temperature=0, seed=4)
    with pytest.raises(ValueError, match="folder must hold a run of the language study"):
        load_model(out)


def test_parts_of_the_targets_are_those_that_were_swapped_and_the_others(out: Path) -> None:
    model, coder, config = load_model(out / "runs" / "generated" / "kde" / "0")
    tokens = load_texts(config.data, out).test.read(0, 150)
    swapped = random_swap(tokens, coder, share=0.05, seed=mix(config.seed, "test"))
    changed = swapped.tokens[1:] != tokens[1:]
    before, after = (
        sliding_losses(model, text, context=16, stride=config.evaluation.stride) for text in (tokens, swapped.tokens)
    )
    expected = {"all": after, "swapped": after[changed], "clean": after[~changed]}
    measured = {m["condition"]: m["value"] for m in records(out)["kde"]["measurements"]}
    for part, losses in expected.items():
        assert measured[f"swap 5% test, {part} targets"] == pytest.approx(float(losses.mean()))
    assert measured["swap 5% test, clean targets, before the swap"] == pytest.approx(float(before[~changed].mean()))


def test_greedy_swaps_are_measured_on_the_lines_that_were_asked_for() -> None:
    config = tiny(**{"evaluation.greedy_lines": 8, "evaluation.greedy_queries": 12, "evaluation.shares": [0.1]})
    texts = load_texts(config.data, Path())
    config = resolved(config, texts.coder)
    found = {m.condition: m for m in measure(config, build(config).eval(), texts, "test", CPU).measurements}
    greedy = [found[f"greedy swap 10% test, {of} targets"] for of in ("all", "clean", "swapped")]
    tokens = texts.test.read(0, 150)
    assert greedy[0].n == int((tokens == texts.coder.eos).nonzero()[7])
    assert greedy[0].n == greedy[1].n + greedy[2].n
    assert (greedy[0].settings["lines"], greedy[0].settings["queries"]) == (8, 12)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    root.mkdir()
    for seed, (name, number) in enumerate({"train.tokens.xz": 120, "valid.tokens": 30, "test.tokens": 30}.items()):
        data = "\n".join(paragraphs(number, seed=seed)).encode()
        (root / name).write_bytes(lzma.compress(data) if name.endswith(".xz") else data)
    return root


def of_files(root: Path, **more: Any) -> TextData:
    return TextData(
        name="files", root=str(root), train="train.tokens.xz", valid="valid.tokens", test="test.tokens", **more
    )


def test_texts_are_read_from_files_and_numbered_once(files: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = load_texts(of_files(files), cache)
    names = {path.name: path.stat().st_mtime_ns for path in cache.iterdir() if path.name != ".lock"}
    assert len(names) == 7  # the words, and three texts with a checksum each
    again = load_texts(of_files(files), cache)
    assert {name: (cache / name).stat().st_mtime_ns for name in names} == names
    for one, two in zip(first[1:], again[1:], strict=True):
        assert torch.equal(one.read(), two.read())
    lines = list(paragraphs(30, seed=1))
    assert len(first.valid) == sum(len(line.split()) + 1 for line in lines)
    decoded = first.coder.decode(first.valid.read().tolist()).split("\n")
    known = set(first.coder.words)
    assert decoded[:-1] == [" ".join(w if w in known else "<unk>" for w in line.split()) for line in lines]
    rare = load_texts(of_files(files, min_count=3), cache)
    assert len(rare.coder.words) < len(first.coder.words)


def test_subwords_go_through_the_whole_study(files: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    special = ["<unk>", "<eos>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    made.train_from_iterator(paragraphs(100), trainer)
    made.save(str(files / "tokenizer.json"))
    config = replace(tiny(), data=of_files(files, tokenizer="tokenizer.json"))
    texts = load_texts(config.data, tmp_path / "cache")
    config = resolved(config, texts.coder)
    assert config.model.vocab_size == len(texts.coder.words) <= 150
    trained(config, tmp_path / "run", texts, CPU, lambda doing, done: None)
    model, coder, _ = load_model(tmp_path / "run")
    assert coder.checksum == texts.coder.checksum
    assert measure(config, model, texts, "valid", CPU).measurements[1].settings["word"] == "<unk>"


def test_wrong_texts_fails_clearly(files: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.test must name a file in data.root, got nothing"):
        load_texts(replace(of_files(files), test=""), tmp_path)
    with pytest.raises(ValueError, match=r"data.root must be the folder of train.tokens.xz, got nothing"):
        load_texts(replace(of_files(files), root=""), tmp_path)
    with pytest.raises(ValueError, match=r"a text must be a file that can be read, got .*none"):
        load_texts(replace(of_files(files), train="none"), tmp_path)
    with pytest.raises(ValueError, match="name must be one of 'generated', 'files', got 'wiki'"):
        TextData(name="wiki")  # type: ignore[arg-type]


def test_configurations_survive_json() -> None:
    for scale, texts in recipes.SCALES.items():
        for recipe in texts.values():
            for _, row in (recipes.ROWS | recipes.VARIANTS).values():
                config = row(recipe(3, "somewhere"))
                assert rebuild(describe(config), classes()) == config, scale


def test_cells_follow_the_names_that_are_given() -> None:
    cells = LANGUAGE.cells("lab", root="r", data=("enwiki",), seeds=2)
    assert len(cells) == 2 * len(recipes.ROWS)
    assert cells[0].name == "enwiki/transformer/0"
    (cell,) = LANGUAGE.cells(
        "lab", data=("enwiki-medium",), rows=("kde-half",), seeds=1, settings={"model.depth": "4", "fit.epochs": "2"}
    )
    assert cell.config.method == (ra.Softmax(),) * 2 + (ra.KDE(),) * 2
    assert (cell.config.model.context, cell.config.fit.epochs) == (384, 2)
    (cell,) = LANGUAGE.cells("smoke", rows=("rkde-huber",), settings={"method.loss.a": "0.8"})
    assert cell.config.method == ra.RKDE(loss=ra.Huber(0.8))
    for choice in ({"rows": ("vit",)}, {"data": ("cifar10",)}):
        with pytest.raises(ValueError, match=r"must be of .*; leave it out for all"):
            LANGUAGE.cells("smoke", **choice)  # type: ignore[arg-type]


def test_the_papers_steps_and_rows_are_those_of_its_recipe() -> None:
    config = recipes.wikitext103_paper(0, "")
    segments = (103_227_021 - 1) // config.model.context
    steps = config.fit.epochs * -(-segments // config.fit.batch_size)
    assert steps == pytest.approx(500_000, rel=1e-3)
    assert round(config.fit.warmup * steps) == pytest.approx(2000, abs=3)
    assert set(paper.ROWS) == set(recipes.ROWS) - {"kde"}
    for table in (paper.TABLE_1, paper.TABLE_4):
        assert all(len(column) == len(paper.ROWS) for column in table.values())
    assert paper.number(paper.TABLE_1, "swap test, perplexity", "mom") == 52.14
    assert paper.number(paper.TABLE_4, "clean valid, loss", "kde") is None


def test_the_cost_of_a_grid_is_told_row_by_row() -> None:
    cells = LANGUAGE.cells("smoke", rows=("transformer", "kde"), settings=TINY)
    text = estimate(cells, CPU, words=50, tokens=10_000)
    assert [line.split()[0] for line in text.splitlines()[1:]] == [*(cell.name for cell in cells), "all"]
    assert "on four at best" in text


def test_report_is_written_by_the_command(out: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["study", "report", "--out", str(out)])
    assert not stop.value.code
    table, ledger = (out / "report.md").read_text(), (out / "ledger.md").read_text()
    for row in records(out):
        assert f"| {LANGUAGE.labels[row]} |" in table
    (clean,) = (m for m in records(out)["kde"]["measurements"] if m["condition"] == "clean test")
    assert "| Transformer-KDE | " in table
    assert f"{clean['value']:.3f}\u00a0±" in table
    assert f"| Transformer-KDE: clean test |  |  | {math.exp(clean['value']):.2f} (1 seeds) |" in ledger
    assert "Swapped were: generated, swap 1.5% valid:" in table
    assert "‡" not in table
