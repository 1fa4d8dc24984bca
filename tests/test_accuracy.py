"""Shares of images read right, clean and contaminated, and the rows that hold them."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import Wrapped, attention_model, mlp, seeded, unseen

import robust_attention as ra
from robust_attention._seeds import mix
from robust_attention.data.contaminate import Kind, contaminate
from robust_attention.data.images import Stored
from robust_attention.eval.accuracy import BLOCK, clean_accuracy, contaminations
from robust_attention.eval.measure import Measurement, pack, unpack

# --- clean and contaminated images


def test_clean_accuracy_is_the_share_read_right() -> None:
    images, labels = unseen(8)
    model = mlp(8)
    labels = torch.where(torch.arange(80) < 20, (labels + 1) % 8, labels)
    accuracy, top5 = clean_accuracy(model, images, labels, seed=0, batch_size=50)
    logits = model(images)
    assert (accuracy.metric, accuracy.condition, top5.metric) == ("accuracy", "clean", "top5")
    assert torch.equal(unpack(str(accuracy.right)), (logits.argmax(dim=1) == labels).float())
    ranks = (logits > logits.gather(1, labels[:, None])).sum(dim=1)
    assert torch.equal(unpack(str(top5.right)), (ranks < 5).float())
    assert accuracy.value == pytest.approx((logits.argmax(dim=1) == labels).float().mean().item())
    assert accuracy.value < top5.value < 1


def test_answer_that_is_no_number_is_not_right() -> None:
    class Nothing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.full((len(images), 10), torch.nan)

    rows = clean_accuracy(Nothing(), torch.rand(10, 1, 2, 2), torch.arange(10), seed=0)
    assert [row.value for row in rows] == [0, 0]


def test_clean_accuracy_of_a_random_model_is_over_draws() -> None:
    model, (images, labels) = attention_model(ra.MoM(blocks=3, fraction=0.3)), unseen()
    mean, worst, known = clean_accuracy(model, images, labels, seed=0, draws=8)
    assert [row.condition for row in (mean, worst, known)] == ["clean", "clean, worst of 8 draws", "clean, known draw"]
    assert (mean.settings["draws"], known.settings["draws"]) == (8, 1)
    assert worst.value < mean.value
    assert known.value == (model(images).argmax(dim=1) == labels).double().mean().item()
    assert clean_accuracy(model, images, labels, seed=0, draws=8)[0] == mean
    assert clean_accuracy(model, images, labels, seed=1, draws=8)[0].right != mean.right


KINDS: list[Kind] = ["noise", "flat", "foreign"]


def test_contaminations_do_not_depend_on_the_batch_size() -> None:
    number = BLOCK + 3
    images, labels = unseen(number=number)
    rows = [
        contaminations(mlp().double(), images.double(), labels, patch_size=2, seed=4, batch_size=size)
        for size in (64, 7)
    ]
    for one, other in zip(*rows, strict=True):
        assert (one.condition, one.value, one.right) == (other.condition, other.value, other.right)
    names = [f"{kind} {part}" for kind in KINDS for part in ("10%", "25%")]
    assert [row.condition for row in rows[0]] == names
    assert rows[0][1].value < rows[0][0].value < 1
    assert rows[0][0].settings == {"kind": "noise", "share": 0.1, "patch_size": 2, "seed": 4, "batch_size": 64}


@pytest.mark.parametrize("kind", KINDS)
def test_contaminations_spoil_blocks_as_contaminate_does(kind: Kind) -> None:
    images, labels = unseen(number=BLOCK + 60)
    seen: list[Tensor] = []

    def answer(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(x.clone())
        return model(x)

    watched = Wrapped(mlp(), answer)
    (row,) = contaminations(watched, images, labels, patch_size=2, seed=4, kinds=[kind], shares=[0.25], batch_size=90)
    spoilt = torch.cat(seen)
    assert len(spoilt) == len(images)
    first = contaminate(images[:BLOCK], kind=kind, share=0.25, patch_size=2,
                        generator=seeded(mix(4, "contaminate", 0)))  # fmt: skip
    assert torch.equal(spoilt[:BLOCK], first.images)
    changed = (spoilt != images).reshape(-1, 2, 2, 2, 2).any(dim=(2, 4)).sum(dim=(1, 2))
    assert (changed == 1).float().mean() > 0.99
    assert not torch.equal(spoilt[BLOCK:] - images[BLOCK:], spoilt[:60] - images[:60])
    assert row.value == (mlp()(spoilt).argmax(dim=1) == labels).double().mean().item()


def test_a_last_image_on_its_own_has_donors() -> None:
    images, labels = unseen(number=BLOCK + 1)
    (row,) = contaminations(mlp(), images, labels, patch_size=2, seed=4, kinds=["foreign"], shares=[0.25])
    assert row.n == BLOCK + 1


def test_contaminations_of_a_data_set_are_those_of_its_images() -> None:
    images, labels = unseen()
    stored = Stored((255 * images).round().byte(), labels, num_classes=4, name="patterns")
    rows = [contaminations(mlp(), each, labels, patch_size=2, seed=4) for each in (stored, stored.images.float() / 255)]
    assert rows[0] == rows[1]


def test_contaminations_of_a_random_model_have_three_numbers() -> None:
    model, (images, labels) = attention_model(ra.MoM(blocks=3, fraction=0.4)), unseen()
    rows = contaminations(model, images, labels, patch_size=2, seed=4, kinds=["flat"], shares=[0.25], draws=4)
    assert [row.condition for row in rows] == ["flat 25%", "flat 25%, worst of 4 draws", "flat 25%, known draw"]
    assert rows[1].value < rows[0].value


# --- rows


@pytest.mark.parametrize(("draws", "number"), [(1, 1), (1, 9), (3, 7), (20, 500), (4, 0), (255, 3), (256, 3)])
def test_packed_results_come_back(draws: int, number: int) -> None:
    right = (torch.rand(draws, number, generator=seeded()) < 0.6).float()
    right[:, : number // 3] = 1
    torch.testing.assert_close(unpack(pack(right)), right.mean(dim=0) if number else torch.zeros(0))
    assert len(pack(right)) < 24 + draws.bit_length() * number / 5.9


def test_packed_results_of_booleans_on_any_layout_come_back() -> None:
    right = (torch.rand(50, 3, generator=seeded()) < 0.5).T
    torch.testing.assert_close(unpack(pack(right)), right.float().mean(dim=0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"packed results must look like 20x500:<base64>, got ''"),
        ("3x4:!!", r"packed results must look like"),
        ("0x4:AA==", r"packed results must look like"),
        ("1x4:A", r"packed results must end in whole base64"),
        ("1x40:AA==", r"packed results of 1x40 must be 5 bytes, got 1; was it cut\?"),
        ("2x1:Aw==", r"packed results of 2 draws must not count more, got 3"),
    ],
)
def test_unpack_fails_clearly(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(text)


def test_pack_fails_clearly() -> None:
    with pytest.raises(ValueError, match=r"right must be \[draws, N\], got \[4\]; pass right\[None\]"):
        pack(torch.ones(4))
    with pytest.raises(ValueError, match=r"right must hold zeros and ones only"):
        pack(torch.full((1, 4), 0.5))


def row(**change: Any) -> Measurement:
    return Measurement(**{"metric": "accuracy", "condition": "clean", "value": 0.5, "n": 2, **change})


def test_measurement_survives_json() -> None:
    one = row(protocol="paper", right=pack(torch.ones(1, 2)), settings={"eps": 0.1, "loss": "ce"}, failed=("a", "b"))
    assert Measurement.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert Measurement.from_dict({"metric": "accuracy", "condition": "clean", "value": 0.5, "n": 2}) == row()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": "other"}, r"protocol must be one of pixel, paper, got 'other'"),
        ({"value": float("nan")}, r"value of accuracy \(clean\) must be finite, got nan"),
        ({"n": 0}, r"n of accuracy \(clean\) must be at least 1, got 0"),
    ],
)
def test_measurement_fails_clearly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row(**change)


def test_stored_measurement_with_wrong_fields_fails_clearly() -> None:
    with pytest.raises(ValueError, match=r"must have the fields .*, got \['colour'\] besides"):
        Measurement.from_dict({**row().to_dict(), "colour": "red"})
    with pytest.raises(ValueError, match=r"must have the fields \['n', 'value'\], got none; was the line cut\?"):
        Measurement.from_dict({"metric": "accuracy", "condition": "clean"})
