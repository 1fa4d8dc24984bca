"""The vision transformer: twins differ in their attention alone, and the rest is the usual transformer."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from cases import every_method
from torch import Generator, Tensor
from torch.nn import functional as F

import robust_attention as ra
from robust_attention.adapters import import_torchvision
from robust_attention.data.contaminate import from_patches, to_patches
from robust_attention.models import ViT, ViTConfig, vit_base, vit_lab, vit_small, vit_tiny
from robust_attention.nn import set_draws

TINY = {"dim": 16, "image_size": 8, "patch_size": 2}
deterministic = pytest.mark.parametrize(
    "method",
    [cls() for cls in ra.methods().values() if not cls.stochastic],
    ids=[name for name, cls in ra.methods().items() if not cls.stochastic],
)


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def model_of(method: Any, seed: int = 0, **sizes: Any) -> ViT:
    model = ViT(ViTConfig(**{**TINY, **sizes}), method)
    model.init_weights(seeded(seed))
    return model.double().eval()


def images_of(number: int = 3, channels: int = 1) -> Tensor:
    return torch.rand(number, channels, 8, 8, generator=seeded(1), dtype=torch.float64)


def shaken(model: ViT) -> ViT:
    """With biases and norms that matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=seeded(2), dtype=parameter.dtype), alpha=0.1)
    return model


def count(model: ViT) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@every_method
def test_twins_have_equal_initial_weights(method: ra.Method) -> None:
    config = ViTConfig(**TINY, distilled=True, qk_norm=True)
    one, other = ViT(config, ra.Softmax()), ViT(config, method)
    for seed in (None, 1):
        if seed is not None:
            one.init_weights(seeded(seed))
            other.init_weights(seeded(seed))
        shared = other.state_dict()
        for name, weight in one.state_dict().items():
            assert torch.equal(weight, shared[name]), name
        assert all(".attn.attend." in name for name in set(shared) - set(one.state_dict()))
    assert not torch.equal(one.head.weight, ViT(config, ra.Softmax()).head.weight)


@every_method
def test_building_leaves_the_global_stream_alone(method: ra.Method) -> None:
    before = torch.get_rng_state()
    model = ViT(ViTConfig(**TINY), method)
    model.init_weights(seeded())
    assert torch.equal(torch.get_rng_state(), before)


def test_initial_weights_keep_the_size_of_the_tokens() -> None:
    model = ViT(ViTConfig(dim=128, channels=3, distilled=True, qk_norm=True), ra.Softmax())
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            wanted = 0.02 if name in ("pos_embed", "cls_token", "dist_token") else weight[0].numel() ** -0.5
            assert 0.8 * wanted < float(weight.detach().std()) < 1.2 * wanted, name


def test_what_methods_own_differs_from_block_to_block_and_follows_the_generator() -> None:
    config = ViTConfig(**TINY)
    scaled, random = ViT(config, ra.PositionScaled()), ViT(config, ra.Performer(features=4))
    tables = [attention.attend.get_parameter("table") for attention in scaled.attentions]
    assert tables[0].shape == (2, 17, 17)  # a page a head
    assert len({page.sum().item() for table in tables for page in table}) == 4
    directions = [attention.attend.get_buffer("directions").clone() for attention in random.attentions]
    assert not torch.equal(*directions)
    random.init_weights(seeded(1))
    assert not torch.equal(directions[0], random.attentions[0].attend.get_buffer("directions"))
    random.init_weights(seeded(0))
    assert torch.equal(directions[0], random.attentions[0].attend.get_buffer("directions"))
    # What the first block owns does not move the second one's.
    mixed = ViT(config, [ra.Softmax(), ra.PositionScaled()])
    assert torch.equal(mixed.attentions[1].attend.get_parameter("table"), tables[1])


@every_method
def test_every_parameter_gets_a_finite_gradient(method: ra.Method) -> None:
    model = model_of(method, distilled=True).train()
    logits, distilled = model(images_of(), heads=True)
    assert logits.shape == distilled.shape == (3, 10)
    labels = torch.tensor([1, 2, 3])
    (F.cross_entropy(logits, labels) + F.cross_entropy(distilled, labels + 1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
        if name.endswith("qkv.weight"):  # through queries, keys and values alike
            assert parameter.grad.unflatten(0, (3, 16)).flatten(1).any(dim=1).all(), name


@every_method
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_twin_reads_each_image_on_its_own(method: ra.Method, pool: str) -> None:
    model, images = model_of(method, pool=pool), images_of()
    torch.testing.assert_close(model(images)[1:2], model(images[1:2]), rtol=1e-9, atol=1e-11)


@deterministic
@pytest.mark.parametrize("sizes", [{}, {"pool": "mean"}, {"distilled": True}], ids=str)
def test_patches_that_move_with_their_positions_change_nothing(method: ra.Method, sizes: dict[str, Any]) -> None:
    model, images = model_of(method, **sizes), images_of()
    logits = model(images)
    order = torch.randperm(16, generator=seeded(3))
    moved = from_patches(to_patches(images, 2)[:, order], images.shape, 2)
    assert (model(moved) - logits).abs().max() > 1e-4  # positions tell places apart
    first = model.config.num_extra
    with torch.no_grad():
        model.pos_embed[:, first:] = model.pos_embed[:, first:][:, order]
        every = torch.cat([torch.arange(first), first + order])
        for table in (p for name, p in model.named_parameters() if name.endswith("table")):
            table.copy_(table[:, every][:, :, every])
    torch.testing.assert_close(model(moved), logits, rtol=1e-8, atol=1e-10)


MILLIONS = [
    (vit_tiny(), ra.Softmax(), 5.717416),
    (vit_tiny(distilled=True), ra.Softmax(), 5.910800),
    (vit_tiny(), ra.PositionScaled(), 5.717416 + 12 * 3 * 197**2 / 1e6),
    (vit_small(), ra.Softmax(), 22.050664),
    (vit_base(), ra.Softmax(), 86.567656),
    (vit_lab(), ra.Softmax(), 2.693578),
]


@pytest.mark.parametrize(("config", "method", "millions"), MILLIONS, ids=[str(m) for *_, m in MILLIONS])
def test_presets_have_the_published_sizes(
    config: ViTConfig, method: ra.Method, millions: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ViT, "init_weights", lambda *_: None)
    model = ViT(replace(config, depth=1), ra.Softmax())
    block, rest = count(model.blocks), count(model) - count(model.blocks)  # type: ignore[arg-type]
    table = config.num_heads * config.num_tokens**2 if isinstance(method, ra.PositionScaled) else 0
    if table:
        assert count(ViT(replace(config, depth=1), method)) - count(model) == table
    assert (rest + config.depth * (block + table)) / 1e6 == pytest.approx(millions, abs=1e-6)


def test_presets_cut_small_images_into_small_patches() -> None:
    for size, patch in ((224, 16), (32, 4), (64, 8)):
        for preset in (vit_tiny, vit_small, vit_base, vit_lab):
            assert preset(image_size=size).patch_size == patch
    assert vit_tiny(image_size=32, patch_size=2, num_classes=7).num_tokens == 257
    assert (vit_lab().image_size, vit_lab().num_classes, vit_lab().depth) == (32, 10, 6)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_timm_checkpoints_load_and_give_timms_logits(name: str) -> None:
    import_torchvision()
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    theirs = timm.create_model(name, pretrained=False, depth=2).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=seeded(2)), alpha=0.05)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    ours = ViT(vit_tiny(depth=2, distilled="distilled" in name, mean=mean, std=std), ra.Softmax()).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.rand(2, 3, 224, 224, generator=seeded(1))
    normalised = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(normalised), rtol=1e-4, atol=1e-4)
    theirs.load_state_dict(ours.state_dict())  # and back


def test_without_mean_and_std_pixels_run_from_minus_one_to_one() -> None:
    images = images_of()
    plain, given = model_of(ra.Softmax()), model_of(ra.Softmax(), mean=(0.5,), std=(0.5,))
    other = model_of(ra.Softmax(), mean=(0.25,), std=(0.125,))
    assert torch.equal(plain(images), given(images))
    torch.testing.assert_close(other((images - 0.5) / 4 + 0.25), plain(images))


def test_heads_are_read_from_their_own_tokens() -> None:
    model, images = shaken(model_of(ra.RKDE(), distilled=True)), images_of()
    logits, distilled = model(images, heads=True)
    torch.testing.assert_close(model(images), (logits + distilled) / 2)
    with torch.no_grad():
        model.pos_embed[:, :2] = 0
        model.cls_token.copy_(model.dist_token)
        model.head.load_state_dict(model.head_dist.state_dict())
    logits, distilled = model(images, heads=True)
    torch.testing.assert_close(logits, distilled)


def test_each_block_has_its_own_method() -> None:
    methods = [ra.RKDE(), ra.Softmax(), ra.MoM()]
    model = model_of(methods, depth=3)
    assert model.methods == tuple(methods)
    assert [attention.attend.method for attention in model.attentions] == methods
    assert model_of(ra.KDE(), depth=3).methods == (ra.KDE(),) * 3
    with pytest.raises(ValueError, match=r"method must be .* one for each of the 2 blocks, got 3; repeat or drop some"):
        model_of(methods, depth=2)


def test_draws_in_training_are_set_from_outside() -> None:
    model, images = model_of(ra.MoM()).train(), images_of()
    said = []
    for number in (5, 6, 5):
        set_draws(model, number)
        said.append(model(images))
    assert torch.equal(said[0], said[2])
    assert not torch.equal(said[0], said[1])
    model.eval()
    assert torch.equal(model(images), model(images))  # its own seed's draw


def test_drop_path_skips_branches_of_some_images_and_keeps_the_mean() -> None:
    model = model_of(ra.Softmax(), depth=3, drop_path=0.5).train()
    assert [block.drop_path for block in model.blocks] == [0, 0.25, 0.5]
    block, x = model.blocks[2], torch.randn(4000, 3, 16, generator=seeded(), dtype=torch.float64)
    torch.manual_seed(0)
    attended = block._sometimes(x) / x
    factors = attended.mean((1, 2))
    torch.testing.assert_close(attended, factors[:, None, None].expand_as(attended))  # whole images
    assert {round(float(factor), 9) for factor in factors} == {0, 2}
    assert abs(float(factors.mean()) - 1) < 0.1
    images = images_of()
    torch.manual_seed(1)
    one = model(images)
    torch.manual_seed(1)
    assert torch.equal(model(images), one)
    assert not torch.equal(model(images), one)
    assert torch.equal(model.eval()(images), model(images))


def test_dropout_acts_in_training_only() -> None:
    plain, model = model_of(ra.Softmax()), model_of(ra.Softmax(), dropout=0.3)
    assert torch.equal(model(images_of()), plain(images_of()))
    torch.manual_seed(0)
    model.train()
    assert not torch.equal(model(images_of()), plain(images_of()))


@dataclass(frozen=True)
class Watched(ra.Softmax):
    """Softmax that remembers what it was asked."""

    seen: ClassVar[list[tuple[Tensor, ...]]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **named: Any) -> Tensor:
        self.seen.append((q, k, v))
        return super().attend(q, k, v, *arguments, **named)


@pytest.mark.parametrize(("pool", "tokens"), [("cls", 17), ("mean", 16)])
def test_projections_are_what_attention_sees(pool: str, tokens: int) -> None:
    model = model_of(Watched(), depth=3, pool=pool, qk_norm=True)
    Watched.seen.clear()
    model(images_of())
    seen = Watched.seen[:]
    projected = model.projections(images_of())
    assert len(projected) == len(seen) == 3
    for ours, theirs in zip(projected, seen, strict=True):
        assert ours.q.shape == (3, 2, tokens, 8)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not any(attention.attend._forward_pre_hooks for attention in model.attentions)


def test_qk_norm_normalises_each_head() -> None:
    for q, k, _ in model_of(ra.Softmax(), qk_norm=True).projections(images_of()):
        for x in (q, k):
            torch.testing.assert_close(x.mean(-1), torch.zeros_like(x[..., 0]))
            torch.testing.assert_close(x.var(-1, correction=0), torch.ones_like(x[..., 0]), rtol=0.01, atol=0)


@every_method
def test_autocast_gives_nearly_the_same(method: ra.Method) -> None:
    model, images = model_of(method).float(), images_of().float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
        logits.float().square().sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    if not method.stochastic:  # a rounded density may choose another block
        torch.testing.assert_close(logits.float(), model(images), rtol=0.1, atol=0.1)


@pytest.mark.filterwarnings("ignore")  # the compiler's own modules warn of things that are not ours
def test_model_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    model = model_of([ra.RKDE(), ra.MoM()], distilled=True).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    said, gradients = [], []
    for call in (compiled, model):
        set_draws(model, 7)
        model.zero_grad()
        logits, distilled = call(images_of(), heads=True)
        (logits.square().sum() + distilled.square().sum()).backward()
        said.append(logits)
        gradients.append(model.pos_embed.grad.clone())
    torch.testing.assert_close(*said, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"patch_size": 3}, r"patch_size must divide image_size = 8, got 3"),
    ({"patch_size": 0}, r"patch_size must be a whole number of at least 1, got 0"),
    ({"num_heads": 3}, r"num_heads must divide dim = 64, got 3"),
    ({"num_heads": 0}, r"num_heads must be a whole number of at least 1, got 0"),
    ({"pool": "max"}, r"pool must be one of 'cls', 'mean', got 'max'"),
    ({"pool": "mean", "distilled": True}, r'pool must be "cls" for a distilled model.*got \'mean\''),
    ({"drop_path": 1.0}, r"drop_path must lie from 0 to below 1, got 1.0"),
    ({"dropout": -0.1}, r"dropout must lie from 0 to below 1, got -0.1"),
    ({"mean": (0.5, 0.5, 0.5)}, r"mean must have one number a channel = 1, got \(0.5, 0.5, 0.5\)"),
    ({"std": (0.0,)}, r"std must be a finite number above 0, got 0.0"),
]


@pytest.mark.parametrize(("sizes", "message"), CONFIGS, ids=[str(sizes) for sizes, _ in CONFIGS])
def test_config_fails_clearly(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViTConfig(**sizes)


def test_wrong_images_and_heads_fail_clearly() -> None:
    model = model_of(ra.Softmax()).float()
    wanted = r"images must be floating-point \[B, 1, 8, 8\] in \[0, 1\], got "
    for images, came in (
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), r"torch.uint8 \[2, 1, 8, 8\]"),
        (torch.zeros(2, 3, 8, 8), r"torch.float32 \[2, 3, 8, 8\]"),
        (torch.zeros(2, 1, 16, 16), r"torch.float32 \[2, 1, 16, 16\]"),
    ):
        with pytest.raises(ValueError, match=wanted + came):
            model(images)
    with pytest.raises(ValueError, match=r"heads must be False where there is one head, got True; .* distilled=True"):
        model(torch.zeros(1, 1, 8, 8), heads=True)
