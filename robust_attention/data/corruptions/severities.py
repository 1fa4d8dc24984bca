"""How strong each corruption is: the published constants, and what they become at other sizes.

Hendrycks and Dietterich published three sets of constants with their three data sets: ImageNet-C (224 pixels),
Tiny-ImageNet-C (64) and CIFAR-10-C (32). They are not one set scaled: the smaller sets are also milder.
"""

from __future__ import annotations

import math

Setting = tuple[float, ...]

CORRUPTIONS: dict[str, tuple[str, ...]] = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
"""The 15 kinds of ImageNet-C in its four groups."""

KINDS: tuple[str, ...] = tuple(kind for kinds in CORRUPTIONS.values() for kind in kinds)

MEANING: dict[str, str] = {
    "gaussian_noise": "standard deviation",
    "shot_noise": "photons at full brightness",
    "impulse_noise": "share of the values hit",
    "defocus_blur": "radius of the disk, blur of its rim",
    "glass_blur": "standard deviation of the blur, farthest move, rounds",
    "motion_blur": "radius, standard deviation",
    "zoom_blur": "number of zooms, step between them",
    "snow": "mean, deviation, zoom and threshold of the flakes, radius and deviation of their fall, share of the image",
    "frost": "share of the image, of the ice",
    "fog": "thickness, decay of the detail",
    "brightness": "added to the value of the colour",
    "contrast": "share of the contrast that is left",
    "elastic_transform": "strength and smoothness of the warp, farthest move of a corner",
    "pixelate": "share of the resolution that is left",
    "jpeg_compression": "quality",
}
"""What the numbers of a setting are."""

_PUBLISHED: dict[int, dict[str, tuple[Setting, ...]]] = {
    224: {
        "gaussian_noise": ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
        "shot_noise": ((60,), (25,), (12,), (5,), (3,)),
        "impulse_noise": ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        # The released code multiplies shares by 244 where the images have 224 pixels; these are its products.
        "elastic_transform": (
            (488, 170.8, 24.4),
            (488, 19.52, 48.8),
            (12.2, 2.44, 4.88),
            (17.08, 2.44, 4.88),
            (29.28, 2.44, 4.88),
        ),
        "pixelate": ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
        "jpeg_compression": ((25,), (18,), (15,), (10,), (7,)),
    },
    64: {
        "gaussian_noise": ((0.04,), (0.08,), (0.12,), (0.15,), (0.18,)),
        "shot_noise": ((250,), (100,), (50,), (30,), (15,)),
        "impulse_noise": ((0.01,), (0.02,), (0.05,), (0.08,), (0.14,)),
        "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        "zoom_blur": ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        "frost": ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)),
        "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "elastic_transform": (
            (0, 0, 5.12),
            (3.2, 19.2, 3.84),
            (6.4, 5.12, 3.84),
            (6.4, 1.92, 1.92),
            (10.24, 1.92, 1.28),
        ),
        "pixelate": ((0.9,), (0.8,), (0.7,), (0.6,), (0.5,)),
        "jpeg_compression": ((65,), (58,), (50,), (40,), (25,)),
    },
    32: {
        "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.1,)),
        "shot_noise": ((500,), (250,), (100,), (75,), (50,)),
        "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "zoom_blur": ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
        "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
        "elastic_transform": ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
        "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
        "jpeg_compression": ((80,), (65,), (58,), (50,), (40,)),
    },
}

# The power of the size with which a number of a setting grows. Lengths grow with the size. The strength of the
# elastic warp multiplies noise that was averaged over `smoothness` pixels, whose deviation is 1/smoothness:
# for the move to grow with the size, the strength must grow with its square.
_GROWTH: dict[str, tuple[int, ...]] = {
    "defocus_blur": (1, 0),
    "glass_blur": (1, 1, 0),
    "motion_blur": (1, 1),
    "snow": (0, 0, 0, 0, 1, 1, 0),
    "elastic_transform": (2, 1, 1),
}


def reference_size(size: int) -> int:
    """The published set nearest in scale: 32 up to 45 pixels, 64 up to 119, else 224."""
    return min(_PUBLISHED, key=lambda published: abs(math.log(size / published)))


def setting(kind: str, severity: int, size: int) -> Setting:
    """The numbers of a corruption (see `MEANING`) for images of this size.

    Departs: only 32, 64 and 224 pixels were published. At another size, lengths of the nearest published set grow
    with the size, and all else stays.
    """
    reference = reference_size(size)
    published = _PUBLISHED[reference][kind][severity - 1]
    growth = _GROWTH.get(kind, (0,) * len(published))
    return tuple(value * (size / reference) ** power for value, power in zip(published, growth, strict=True))
