"""What `robust-attention explain` says of an image and of a text."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import robust_attention as ra
from robust_attention import cli, demo
from robust_attention.adapters import import_torchvision
from robust_attention.data import digits
from robust_attention.explain import example, explain_image, read_image
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
