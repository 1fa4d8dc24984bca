"""How much each patch counts in a model."""

import pytest
import torch
from torch import Generator, Tensor

import robust_attention as ra
from robust_attention.eval.patches import patch_weights
from robust_attention.models import ViT, ViTConfig


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def model_and_images(method: ra.Method, **sizes: object) -> tuple[ViT, Tensor]:
    model = ViT(ViTConfig(**{"dim": 16, "depth": 2, **sizes}), method).eval()  # type: ignore[arg-type]
    return model, torch.rand(3, 1, 8, 8, generator=seeded())


def weights_of(model: ViT, images: Tensor, draws: int = 1, block: int = 0) -> Tensor:
    weights = patch_weights(model, images, draws=draws, generator=seeded(1), block=block)
    assert weights.shape == (3, 16)
    torch.testing.assert_close(weights.mean(dim=1), torch.ones(3))
    assert not weights.requires_grad
    return weights


@pytest.mark.parametrize("sizes", [{}, {"pool": "mean"}, {"distilled": True}], ids=str)
@pytest.mark.parametrize("method", [ra.RKDE(ra.Huber(0.05)), ra.SPKDE(1.4)], ids=lambda m: type(m).__name__)
def test_patch_weights_are_the_joint_weights_of_the_patches(
    method: ra.RKDE | ra.SPKDE, sizes: dict[str, object]
) -> None:
    model, images = model_and_images(method, **sizes)
    for block in (0, 1):
        seen = model.projections(images)[block]
        joint = method.weights(seen.k, seen.v).joint.detach().mean(dim=1)[:, model.config.num_extra :]
        weights = weights_of(model, images, block=block)
        torch.testing.assert_close(weights, joint / joint.mean(dim=1, keepdim=True))
        assert weights.std() > 0.01


@pytest.mark.parametrize("cls", [ra.MoM, ra.FourierMoM])
def test_patch_weights_of_blocks_count_how_often_a_patch_is_in_them(cls: type[ra.BlockMethod]) -> None:
    method = cls(blocks=1, fraction=0.5, draw="subsample")
    weights = weights_of(*model_and_images(method), draws=3)
    generator = seeded(1)
    often = sum((method.draw(17, generator=generator)[0] for _ in range(3)), torch.zeros(17))[1:]
    torch.testing.assert_close(weights, (often / often.mean()).expand(3, 16))


def test_patch_weights_of_other_methods_are_one() -> None:
    for method in (ra.Softmax(), ra.KDE(), ra.PositionScaled()):
        assert (weights_of(*model_and_images(method)) == 1).all()


def test_a_block_that_is_not_there_fails_clearly() -> None:
    with pytest.raises(ValueError, match=r"block must be from 0 to 1, got 2; count from the front"):
        weights_of(*model_and_images(ra.KDE()), block=2)
