"""The small vision transformer: twins differ in their attention alone, and the rest is the usual transformer."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

import robust_attention as ra
from robust_attention.data.contaminate import from_patches, to_patches
from robust_attention.demo import METHODS
from robust_attention.models.vit import ViT, ViTConfig

every_twin = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def model_of(method: ra.Method, seed: int = 0, **sizes: Any) -> ViT:
    model = ViT(ViTConfig(**{"dim": 16, **sizes}), method)
    model.init_weights(seeded(seed))
    return model.double().eval()


def images_of(number: int = 3, channels: int = 1) -> Tensor:
    return torch.rand(number, channels, 8, 8, generator=seeded(1), dtype=torch.float64)


@every_twin
def test_twins_have_equal_initial_weights(method: ra.Method) -> None:
    config = ViTConfig(dim=16)
    torch.manual_seed(123)
    one, other = ViT(config, ra.Softmax()), ViT(config, method)
    for first, second in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert first[0] == second[0]
        assert torch.equal(first[1], second[1]), first[0]
    other.init_weights(seeded(1))
    assert not torch.equal(one.head.weight, other.head.weight)
    one.init_weights(seeded(1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_initial_weights_keep_the_size_of_the_tokens() -> None:
    for name, weight in ViT(ViTConfig(dim=128, channels=3), ra.Softmax()).named_parameters():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            wanted = 0.02 if name in ("position", "cls") else weight[0].numel() ** -0.5
            assert 0.8 * wanted < float(weight.detach().std()) < 1.2 * wanted, name


@every_twin
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_every_parameter_gets_a_finite_gradient(method: ra.Method, pool: str) -> None:
    model = model_of(method, pool=pool).train()
    logits = model(images_of(), generator=seeded())
    assert logits.shape == (3, 10)
    F.cross_entropy(logits, torch.tensor([1, 2, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
        if name.endswith("qkv.weight"):  # through queries, keys and values alike
            assert parameter.grad.unflatten(0, (3, 16)).flatten(1).any(dim=1).all(), name


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_softmax_twin_equals_the_transformer_of_torch(pool: str) -> None:
    model = model_of(ra.Softmax(), channels=3, num_heads=4, pool=pool)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms must matter
            parameter.add_(torch.randn(parameter.shape, generator=seeded(2), dtype=torch.float64), alpha=0.1)
    images = images_of(channels=3)
    patches = to_patches(2 * images - 1, 2)
    x = patches @ model.embed.weight.flatten(1).T + model.embed.bias
    if model.cls is not None:
        x = torch.cat([model.cls.expand(3, 1, 16), x], dim=1)
    x = x + model.position
    for block in model.blocks:
        theirs = nn.TransformerEncoderLayer(
            16, 4, dim_feedforward=32, dropout=0, activation="gelu", batch_first=True, norm_first=True
        ).double()
        names = {
            "self_attn.in_proj_": "attention.qkv.",
            "self_attn.out_proj.": "attention.out.",
            "linear1.": "mlp.0.",
            "linear2.": "mlp.2.",
            "norm1.": "attention_norm.",
            "norm2.": "mlp_norm.",
        }
        ours = block.state_dict()
        theirs.load_state_dict({a + kind: ours[b + kind] for a, b in names.items() for kind in ("weight", "bias")})
        x = theirs(x)
    x = model.norm(x)
    wanted = model.head(x[:, 0] if pool == "cls" else x.mean(dim=1))
    torch.testing.assert_close(model(images), wanted, rtol=1e-10, atol=1e-12)


@every_twin
def test_twin_reads_each_image_on_its_own(method: ra.Method) -> None:
    model, images = model_of(method), images_of()
    torch.testing.assert_close(model(images)[1:2], model(images[1:2]), rtol=1e-9, atol=1e-11)


deterministic = pytest.mark.parametrize(
    "method", [method for method in METHODS.values() if not method.stochastic], ids=lambda m: type(m).__name__
)


@deterministic
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_patches_that_move_with_their_positions_change_nothing(method: ra.Method, pool: str) -> None:
    model, images = model_of(method, pool=pool), images_of()
    logits = model(images)
    order = torch.randperm(16, generator=seeded(3))
    moved = from_patches(to_patches(images, 2)[:, order], images.shape, 2)
    assert (model(moved) - logits).abs().max() > 1e-4  # positions tell places apart
    first = int(pool == "cls")
    with torch.no_grad():
        model.position[:, first:] = model.position[:, first:][:, order]
    torch.testing.assert_close(model(moved), logits, rtol=1e-8, atol=1e-10)


def test_random_twin_in_training_without_generator_fails_clearly() -> None:
    message = r"generator must be given to train with MoM, which draws at random, got None; pass .* or call model.eval"
    with pytest.raises(ValueError, match=message):
        model_of(ra.MoM()).train()(images_of())
    assert model_of(ra.MoM()).eval()(images_of()).isfinite().all()
    assert model_of(ra.RKDE()).train()(images_of()).isfinite().all()


def test_generator_decides_what_a_random_twin_says() -> None:
    model, other, images = model_of(ra.MoM()), model_of(ra.MoM(seed=1)), images_of()
    before = torch.get_rng_state()
    generator = seeded(5)
    first, second = model(images, generator=generator), model(images, generator=generator)
    assert not torch.equal(first, second)
    assert torch.equal(model(images, generator=seeded(5)), first)
    assert torch.equal(model(images), model(images))  # its own seed's draw
    assert not torch.equal(model(images), other(images))
    assert torch.equal(torch.get_rng_state(), before)


def test_each_block_of_a_random_twin_draws_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw_all = ra.MoM.counts

    def spy(method: ra.MoM, *arguments: Any) -> Tensor:
        drawn.append(draw_all(method, *arguments))
        return drawn[-1]

    monkeypatch.setattr(ra.MoM, "counts", spy)
    model_of(ra.MoM(), depth=3)(images_of(), generator=seeded())
    assert [counts.shape for counts in drawn] == [(5, 17)] * 3
    assert len({str(counts.tolist()) for counts in drawn}) == 3


@deterministic
def test_generator_means_nothing_to_other_twins(method: ra.Method) -> None:
    model, generator = model_of(method), seeded()
    before = generator.get_state()
    assert torch.equal(model(images_of(), generator=generator), model(images_of()))
    assert torch.equal(generator.get_state(), before)


@dataclass(frozen=True)
class Watched(ra.Softmax):
    """Softmax that remembers what it was asked."""

    seen: ClassVar[list[tuple[Tensor, ...]]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **named: Any) -> Tensor:
        self.seen.append((q, k, v))
        return super().attend(q, k, v, *arguments, **named)


@pytest.mark.parametrize(("pool", "tokens"), [("cls", 17), ("mean", 16)])
def test_projections_are_what_attention_sees(pool: str, tokens: int) -> None:
    model = model_of(Watched(), depth=3, pool=pool)
    Watched.seen.clear()
    model(images_of())
    seen = Watched.seen[:]
    projected = model.projections(images_of())
    assert len(projected) == len(seen) == 3
    for ours, theirs in zip(projected, seen, strict=True):
        assert ours.q.shape == (3, 2, tokens, 8)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"patch_size": 3}, r"patch_size must divide image_size = 8, got 3"),
    ({"patch_size": 0}, r"patch_size must divide image_size = 8, got 0"),
    ({"num_heads": 3}, r"num_heads must divide dim = 64, got 3"),
    ({"num_heads": 0}, r"num_heads must divide dim = 64, got 0"),
]


@pytest.mark.parametrize(("sizes", "message"), CONFIGS, ids=[str(sizes) for sizes, _ in CONFIGS])
def test_config_fails_clearly(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViTConfig(**sizes)
