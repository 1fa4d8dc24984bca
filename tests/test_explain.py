"""What `robust-attention explain` says of an image and of a text."""

import io
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import robust_attention as ra
from robust_attention import cli, demo
from robust_attention.adapters import import_torchvision
from robust_attention.data import digits
from robust_attention.explain import example, explain_image, explain_steps, explain_words, read_image
from robust_attention.explain import explain as explain_anything
from robust_attention.study.series import load_run
from robust_attention.study.sets import load_sets
from robust_attention.study.vision import trained

NAMES = ("softmax", "RKDE", "SPKDE", "MoM")
TINY = {"fit.epochs": 1, "data.num_train": 32, "evaluation.num_attacked": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo's folder with twins that have learnt next to nothing."""
    out = tmp_path_factory.mktemp("demo")
    for cell in demo.demo_cells(settings=TINY):
        sets = load_sets(cell.config.data)
        trained(cell.config, out / "runs" / cell.name, sets, torch.device("cpu"), lambda *_: None)
    return out


def test_twins_come_back_with_their_methods(folder: Path) -> None:
    twins = demo.load_twins(folder)
    assert tuple(twins) == tuple(demo.NAMES.values())
    first = ra.RKDE(), ra.SPKDE(), ra.MoM()
    assert tuple(twins[name].methods[0] for name in NAMES[1:]) == first
    assert not any(model.training for model in twins.values())
    # One step apart from equal first weights, they differ: each came back with its own.
    heads = [model.state_dict()["head.weight"] for model in twins.values()]
    assert len({x.numpy().tobytes() for x in heads}) == len(heads)


def test_a_damaged_or_missing_checkpoint_fails_clearly(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "demo")
    (weights,) = (tmp_path / "demo" / "runs" / "digits" / "mom" / "0").glob("*.safetensors")
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ValueError, match="damaged"):
        demo.load_twins(tmp_path / "demo")
    with pytest.raises(ValueError, match=r"must be a folder that `robust-attention demo` wrote, got .*none"):
        demo.load_twins(tmp_path / "none")


def test_explained_weights_are_those_of_the_method(folder: Path) -> None:
    twins = demo.load_twins(folder)
    image, hit, label = example(3, "noise", 0.25, twins["RKDE"])
    assert int(hit.sum()) == 9
    assert label == int(digits.split().test.labels[3])
    found = explain_image(image, twins, hit, label)
    assert tuple(found["maps"]) == NAMES
    q, k, v = twins["RKDE"].projections(image)[0]
    joint = ra.RKDE().weights(k, v).joint[0].mean(0)[-36:]
    torch.testing.assert_close(torch.tensor(found["maps"]["RKDE"]), joint / joint.mean(), rtol=1e-4, atol=1e-5)
    q, k, v = twins["softmax"].projections(image)[0]
    seen = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)[0, :, 0, -36:].mean(0)
    torch.testing.assert_close(torch.tensor(found["maps"]["softmax"]), seen / seen.mean(), rtol=1e-4, atol=1e-5)


def test_pictures_are_read_whatever_their_size_and_ground(tmp_path: Path) -> None:
    dark = Image.new("RGB", (50, 40), "black")
    dark.paste((255, 255, 255), (20, 10, 30, 30))
    light = Image.eval(dark, lambda value: 255 - value)
    images = []
    for name, picture in (("dark", dark), ("light", light)):
        picture.save(tmp_path / f"{name}.png")
        images.append(read_image(tmp_path / f"{name}.png", 24))
    assert images[0].shape == (1, 1, 24, 24)
    torch.testing.assert_close(*images)
    assert float(images[0][0, 0, 12, 12]) > 0.9
    assert float(images[0][0, 0, 0, 0]) == 0
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"what must be a picture that can be read, got .*text.png"):
        read_image(tmp_path / "text.png", 24)


def test_command_writes_a_picture_and_its_numbers(folder: Path, tmp_path: Path) -> None:
    arguments = ["explain", "--model", str(folder), "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert not stop.value.code
    assert (tmp_path / "explain.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "explain.json").read_text())["maps"].keys() == set(NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a sentence"], "--model must be given for a text, got none"),
        (["a sentence", "--model", "nowhere"], "--model must be a folder with a transformers encoder"),
        (["--example", "9999"], "example must be from 0 to"),
        (["--kind", "fog"], "kind must be one of"),
    ],
)
def test_explain_fails_clearly(arguments: list[str], message: str, folder: Path, tmp_path: Path) -> None:
    import_torchvision()
    if arguments[0].startswith("--"):
        arguments = [*arguments, "--model", str(folder)]
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain", *arguments, "--out", str(tmp_path)])
    assert message in str(stop.value.code)


@pytest.mark.filterwarnings("ignore")
def test_a_text_becomes_a_page(tmp_path: Path) -> None:
    import_torchvision()
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "small", "test", "##ing", "&"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    config = transformers.BertConfig(
        vocab_size=10, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain", "a small testing & test", "--model", str(tmp_path / "model"), "--out", str(tmp_path)])
    assert not stop.value.code
    page = (tmp_path / "explain.html").read_text()
    assert "&amp;" in page
    assert "http" not in page
    found = json.loads((tmp_path / "explain.json").read_text())
    assert set(found["maps"]) == {"softmax", "RKDE", "SPKDE"}
    for weights in found["maps"].values():
        assert len(weights) == len(found["words"])
        assert sum(weights) / len(weights) == pytest.approx(1, abs=1e-4)


def study(name: str, out: Path, row: str, **settings: object) -> Path:
    """A run of a study that has learnt next to nothing."""
    from rich.console import Console

    from robust_attention.study.run import run_cells
    from robust_attention.study.studies import STUDIES

    (cell,) = STUDIES[name].cells("smoke", rows=(row,), seeds=1, settings=settings)
    console = Console(file=io.StringIO())
    assert run_cells(STUDIES[name], [cell], out, console, device=torch.device("cpu")) == []
    return out / "runs" / cell.name


def test_steps_of_a_series_are_explained_by_their_weights(tmp_path: Path) -> None:
    small = {"fit.epochs": 1, "model.dim": 16, "model.depth": 1, "model.hidden": 16, "evaluation.draws": 1}
    run = study("timeseries", tmp_path / "s", "spkde", **small)
    waves = [[math.sin(i * f) for i in range(20 + f)] for f in (1, 2)]
    text = "".join(":".join(",".join(map(str, wave)) for _ in range(2)) + ":fast\n" for wave in waves)
    head = (
        "@problemName waves\n@timeStamps false\n@missing false\n@univariate false\n@dimensions 2\n@equalLength false\n"
    )
    (tmp_path / "a.ts").write_text(f"{head}@classLabel true slow fast\n@data\n{text}")
    found = explain_steps(tmp_path / "a.ts", run, 1)
    assert found["label"] == "fast"
    assert len(found["series"]) == 22
    loaded = load_run(run)
    values, mask = torch.tensor(found["series"])[None], torch.ones(1, 22, dtype=torch.bool)
    _, k, v, seen = loaded.model.projections(values, mask)[0]
    joint = ra.SPKDE().weights(k, v, seen).joint[0].mean(0)
    expected = joint[:22] / joint[:22].mean()
    torch.testing.assert_close(torch.tensor(found["maps"]["robust weights"]), expected, rtol=1e-4, atol=1e-5)
    received = torch.tensor(found["maps"]["attention received"])
    assert received.shape == (22,)
    assert received.mean().item() == pytest.approx(1, abs=1e-4)
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain", str(tmp_path / "a.ts"), "--model", str(run), "--out", str(tmp_path / "o")])
    assert not stop.value.code
    assert (tmp_path / "o" / "explain.png").stat().st_size > 5_000
    with pytest.raises(ValueError, match="example must be from 0 to 1, got 2"):
        explain_steps(tmp_path / "a.ts", run, 2)
    with pytest.raises(ValueError, match="--model must be a run of the time-series study"):
        explain_anything(str(tmp_path / "a.ts"), None, 0, "noise", 0.2)


def test_words_of_a_trained_language_model_are_explained(tmp_path: Path) -> None:
    small: dict[str, object] = {f"model.{name}": 16 for name in ("context", "dim", "hidden")}
    small |= {"data.lines": 60, "fit.epochs": 1, "model.depth": 1, "evaluation.num_tokens": 60, "evaluation.blocks": 4}
    run = study("language", tmp_path / "l", "rkde-huber", **small)
    found = explain_words("a b c d e", run)
    assert len(found["words"]) == 6  # the end of the line before, then five
    assert set(found["maps"]) == {"attention received", "robust weights"}
    for numbers in found["maps"].values():
        assert sum(numbers) == pytest.approx(6, rel=1e-4)
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain", "a b c", "--model", str(run), "--out", str(tmp_path / "o")])
    assert not stop.value.code
    page = (tmp_path / "o" / "explain.html").read_text()
    assert "robust weights" in page
