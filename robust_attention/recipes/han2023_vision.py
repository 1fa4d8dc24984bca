"""Image experiments of Han et al., *Designing Robust Transformers using Robust Kernel Density Estimation* (2023).

One function for each image set and scale gives the whole configuration of the plain transformer; one for each row of
Tables 2 and 3 turns it into that row's. A cell of the study is row(scale(seed)).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import robust_attention as ra
from robust_attention.data.augment import Augment, light
from robust_attention.data.augment import deit as deit_augment
from robust_attention.data.corruptions import KINDS
from robust_attention.eval.adversarial import AttackPlan
from robust_attention.models.config import ViTConfig, vit_lab, vit_tiny
from robust_attention.models.convnet import ConvNetConfig
from robust_attention.recipes.vision import DataConfig, Evaluation, VisionConfig
from robust_attention.training.fit import FitConfig

Row = Callable[[VisionConfig], VisionConfig]


def vit(base: VisionConfig) -> VisionConfig:
    """The plain vision transformer: softmax attention."""
    return replace(base, row="vit", method=ra.Softmax())


def deit(base: VisionConfig) -> VisionConfig:
    """DeiT: a distillation token learns the hard decisions of a convolutional teacher, which is trained first."""
    teacher = ConvNetConfig(
        channels=base.model.channels,
        num_classes=base.model.num_classes,
        dim=16 if base.data.name == "digits" else 64,
        stages=2 if base.data.name == "digits" else 3,
        mean=base.model.mean,
        std=base.model.std,
    )
    return replace(base, row="deit", method=ra.Softmax(), model=replace(base.model, distilled=True), teacher=teacher)


def rvt(base: VisionConfig) -> VisionConfig:
    """RVT's position-aware attention scaling, alone, as the paper compares with."""
    return replace(base, row="rvt", method=ra.PositionScaled())


def fourierformer(base: VisionConfig) -> VisionConfig:
    return replace(base, row="fourierformer", method=ra.Fourier())


def kde(base: VisionConfig) -> VisionConfig:
    """The kernel that all robust rows share, without robust weights: what they must be compared with, too."""
    return replace(base, row="kde", method=ra.KDE())


def rkde_huber(base: VisionConfig) -> VisionConfig:
    return replace(base, row="rkde-huber", method=ra.RKDE(loss=ra.Huber(a=0.2)))


def rkde_hampel(base: VisionConfig) -> VisionConfig:
    return replace(base, row="rkde-hampel", method=ra.RKDE(loss=ra.Hampel(a=0.2)))


def spkde(base: VisionConfig) -> VisionConfig:
    return replace(base, row="spkde", method=ra.SPKDE(beta=1.4))


def mom(base: VisionConfig) -> VisionConfig:
    return replace(base, row="mom", method=ra.MoM())


def fourierformer_mom(base: VisionConfig) -> VisionConfig:
    return replace(base, row="fourierformer-mom", method=ra.FourierMoM())


ROWS: dict[str, tuple[str, Row]] = {
    "vit": ("ViT", vit),
    "deit": ("DeiT", deit),
    "rvt": ("RVT", rvt),
    "fourierformer": ("FourierFormer", fourierformer),
    "kde": ("ViT-KDE", kde),
    "rkde-huber": ("ViT-RKDE (Huber)", rkde_huber),
    "rkde-hampel": ("ViT-RKDE (Hampel)", rkde_hampel),
    "spkde": ("ViT-SPKDE", spkde),
    "mom": ("ViT-MoM", mom),
    "fourierformer-mom": ("FourierFormer-MoM", fourierformer_mom),
}
"""Short name → the paper's name and the recipe. KDE is not a row of the paper."""


def _folder(root: str, name: str) -> str:
    """The folder of one image set in the folder that holds them all."""
    return str(Path(root) / name) if root else ""


def digits_smoke(seed: int, root: str = "") -> VisionConfig:
    """The embedded digits in 16 patches: the whole pipeline, every row of it, in minutes on a laptop."""
    return VisionConfig(
        row="vit",
        seed=seed,
        data=DataConfig(name="digits", size=24),
        model=ViTConfig(image_size=24, patch_size=6, channels=1, num_classes=10, dim=64, depth=2, num_heads=2),
        fit=FitConfig(epochs=10, batch_size=64, learning_rate=2e-3, weight_decay=0.05, save_seconds=20.0),
        evaluation=Evaluation(
            corruptions=("gaussian_noise", "defocus_blur", "fog", "pixelate"),
            severities=(1, 3, 5),
            num_corrupted=100,
            num_attacked=64,
            plan=AttackPlan(eps=(4 / 255,), eot=4, draws=5, spsa_steps=20, spsa_samples=16, costly_first=16),
            batch_size=64,
        ),
    )


def digits_demo(seed: int) -> VisionConfig:
    """The same in 36 smoother patches, trained for longer, with nothing but patches and attacks tried."""
    base = digits_smoke(seed)
    return replace(
        base,
        model=replace(base.model, patch_size=4),
        fit=replace(base.fit, epochs=30),
        evaluation=replace(
            base.evaluation,
            shares=(0.1, 0.2, 0.3, 0.4),
            corruptions=(),
            num_attacked=256,
            plan=AttackPlan(eps=(4 / 255,), which=("fgsm", "pgd", "random"), eot=8, draws=5, random_tries=20),
        ),
    )


def cifar10_lab(seed: int, root: str) -> VisionConfig:
    """CIFAR-10 on one GPU: a light transformer on patches of 4, 40 epochs."""
    return VisionConfig(
        row="vit",
        seed=seed,
        data=DataConfig(name="cifar10", root=_folder(root, "cifar10"), size=32, validation=0.1),
        model=vit_lab(
            image_size=32, patch_size=4, num_classes=10, mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262)
        ),
        augment=light(label_smoothing=0.1),
        fit=FitConfig(
            epochs=40, batch_size=512, learning_rate=1e-3, weight_decay=0.05, warmup=0.1, clip=1.0, precision="bfloat16"
        ),
        evaluation=_lab_evaluation(),
    )


def tiny_imagenet_lab(seed: int, root: str) -> VisionConfig:
    """Tiny-ImageNet (40,000 training images at hand) on one GPU: patches of 8, 60 epochs."""
    return replace(
        cifar10_lab(seed, root),
        data=DataConfig(name="tiny-imagenet", root=_folder(root, "tiny-imagenet"), size=64, validation=0.1),
        model=vit_lab(
            image_size=64, patch_size=8, num_classes=200, mean=(0.480, 0.448, 0.398), std=(0.277, 0.269, 0.282)
        ),
        augment=Augment(crop="resized", scale=(0.25, 1.0), flip=0.5, mixup=0.2, cutmix=1.0, label_smoothing=0.1),
        fit=FitConfig(
            epochs=60, batch_size=512, learning_rate=1e-3, weight_decay=0.05, warmup=0.1, clip=1.0, precision="bfloat16"
        ),
    )


def _lab_evaluation() -> Evaluation:
    return Evaluation(
        corruptions=KINDS,
        num_corrupted=2000,
        num_attacked=1000,
        plan=AttackPlan(eps=(0.5 / 255, 1 / 255, 2 / 255, 4 / 255), costly_first=200),
        batch_size=500,
    )


def imagenet_paper(seed: int, root: str) -> VisionConfig:
    """ImageNet as published: ViT-tiny at 224 in patches of 16, DeiT's recipe for 300 epochs, on four GPUs or more.

    Departs: one seed a row suffices to repeat the paper; its table says nothing of seeds.
    """
    return VisionConfig(
        row="vit",
        seed=seed,
        data=DataConfig(name="imagenet", root=_folder(root, "imagenet"), size=224, validation=0.01),
        model=vit_tiny(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), drop_path=0.1),
        augment=deit_augment(),
        fit=FitConfig(
            epochs=300, batch_size=1024, learning_rate=1e-3, weight_decay=0.05, warmup=5 / 300, precision="bfloat16"
        ),
        evaluation=Evaluation(
            corruptions=KINDS,
            plan=AttackPlan(eps=(1 / 255,), protocols=("pixel", "paper"), costly_first=1000),
            batch_size=250,
        ),
    )


def cifar10_laptop(seed: int, root: str) -> VisionConfig:
    """CIFAR-10 on a CPU: 20,000 images, a tenth of the lab's model; for pilots, not for claims."""
    base = cifar10_lab(seed, root)
    return replace(
        base,
        data=replace(base.data, num_train=20_000),
        model=replace(base.model, dim=64, depth=3, num_heads=2, mlp_ratio=2.0),
        fit=replace(base.fit, epochs=12, batch_size=128, learning_rate=2e-3, precision="float32", save_seconds=60.0),
        evaluation=Evaluation(
            num_clean=2000,
            num_attacked=200,
            plan=AttackPlan(which=("fgsm", "pgd", "random"), eot=8, draws=8, random_tries=20),
            batch_size=200,
        ),
    )


SCALES: dict[str, dict[str, Callable[[int, str], VisionConfig]]] = {
    "smoke": {"digits": digits_smoke},
    "laptop": {"cifar10": cifar10_laptop},
    "lab": {"cifar10": cifar10_lab, "tiny-imagenet": tiny_imagenet_lab},
    "paper": {"imagenet": imagenet_paper},
}
"""Scale → image set → recipe."""
SEEDS: dict[str, int] = {"smoke": 1, "laptop": 1, "lab": 3, "paper": 1}
"""Seeds a row, counted from 0."""
