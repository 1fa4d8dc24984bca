"""Text experiments of Han et al., *Designing Robust Transformers using Robust Kernel Density Estimation* (2023).

One function for each text and scale gives the whole configuration of the plain transformer; one for each row of
Tables 1 and 4 turns it into that row's. A cell of the study is row(scale(seed)).
"""

from collections.abc import Callable
from dataclasses import replace

import robust_attention as ra
from robust_attention.models.lm import LMConfig, lm_medium, lm_small
from robust_attention.recipes.language import LanguageConfig, LanguageEvaluation, TextData
from robust_attention.training.fit import FitConfig

Row = Callable[[LanguageConfig], LanguageConfig]


def transformer(base: LanguageConfig) -> LanguageConfig:
    """Softmax attention: the twin of every other row."""
    return replace(base, row="transformer", method=ra.Softmax())


def performer(base: LanguageConfig) -> LanguageConfig:
    return replace(base, row="performer", method=ra.Performer(features=128))


def mgk(base: LanguageConfig) -> LanguageConfig:
    """Half the heads, each key a mixture of two."""
    heads = max(1, base.model.num_heads // 2)
    return replace(base, row="mgk", method=ra.MGK(components=2), model=replace(base.model, num_heads=heads))


def fourierformer(base: LanguageConfig) -> LanguageConfig:
    return replace(base, row="fourierformer", method=ra.Fourier())


def kde(base: LanguageConfig) -> LanguageConfig:
    """The kernel that all robust rows share, without robust weights: what they must be compared with, too."""
    return replace(base, row="kde", method=ra.KDE())


def rkde_huber(base: LanguageConfig) -> LanguageConfig:
    return replace(base, row="rkde-huber", method=ra.RKDE(loss=ra.Huber(a=0.4)))


def rkde_hampel(base: LanguageConfig) -> LanguageConfig:
    return replace(base, row="rkde-hampel", method=ra.RKDE(loss=ra.Hampel(a=0.4)))


def spkde(base: LanguageConfig) -> LanguageConfig:
    return replace(base, row="spkde", method=ra.SPKDE(beta=1.4))


def mom(base: LanguageConfig) -> LanguageConfig:
    """Blocks of 80 % of the keys, each key drawn on its own.

    Departs: draw="poisson" is the paper's draw with replacement with a random size. A draw of fixed size from the
    whole sequence has other blocks for a longer one, and so depends on how much text follows.
    """
    return replace(base, row="mom", method=ra.MoM(draw="poisson"))


def fourierformer_mom(base: LanguageConfig) -> LanguageConfig:
    return replace(base, row="fourierformer-mom", method=ra.FourierMoM(draw="poisson"))


def kde_half(base: LanguageConfig) -> LanguageConfig:
    """Softmax in the first half of the blocks, kernel attention in the others."""
    return replace(base, row="kde-half", method=_upper_half(base, ra.KDE()))


def rkde_half(base: LanguageConfig) -> LanguageConfig:
    """Softmax in the first half of the blocks, Hampel's weights in the others."""
    return replace(base, row="rkde-half", method=_upper_half(base, ra.RKDE(loss=ra.Hampel(a=0.4))))


def rkde_own_keys(base: LanguageConfig) -> LanguageConfig:
    """Hampel's weights on keys as they come, as long as softmax has them."""
    return replace(base, row="rkde-own-keys", method=ra.RKDE(loss=ra.Hampel(a=0.4), keys="own"))


def rkde_narrow(base: LanguageConfig) -> LanguageConfig:
    """A narrow kernel for attention and a narrower one for the weights, which then differ from key to key."""
    width = (base.model.dim / base.model.num_heads) ** 0.5
    method = ra.RKDE(loss=ra.Hampel(a=0.4), bandwidth=(0.1 * width) ** 0.5, weight_bandwidth=(0.05 * width) ** 0.5)
    return replace(base, row="rkde-narrow", method=method)


def mom_partition(base: LanguageConfig) -> LanguageConfig:
    """Seven disjoint blocks of the whole context: what the paper's theorem covers, for up to three outliers."""
    return replace(base, row="mom-partition", method=ra.MoM(blocks=7, draw="partition"))


def mom_half(base: LanguageConfig) -> LanguageConfig:
    """Softmax in the first half of the blocks, median of means in the others."""
    return replace(base, row="mom-half", method=_upper_half(base, ra.MoM(draw="poisson")))


def spkde_last(base: LanguageConfig) -> LanguageConfig:
    """Softmax in all blocks but the last, which has the weights of the quadratic programme."""
    plain = (ra.Softmax(),) * (base.model.depth - 1)
    return replace(base, row="spkde-last", method=(*plain, ra.SPKDE(beta=1.4)))


def _upper_half(base: LanguageConfig, method: ra.Method) -> tuple[ra.Method, ...]:
    plain = base.model.depth // 2
    return (ra.Softmax(),) * plain + (method,) * (base.model.depth - plain)


ROWS: dict[str, tuple[str, Row]] = {
    "transformer": ("Transformer", transformer),
    "performer": ("Performer", performer),
    "mgk": ("Transformer-MGK", mgk),
    "fourierformer": ("FourierFormer", fourierformer),
    "kde": ("Transformer-KDE", kde),
    "rkde-huber": ("Transformer-RKDE (Huber)", rkde_huber),
    "rkde-hampel": ("Transformer-RKDE (Hampel)", rkde_hampel),
    "spkde": ("Transformer-SPKDE", spkde),
    "mom": ("Transformer-MoM", mom),
    "fourierformer-mom": ("FourierFormer-MoM", fourierformer_mom),
}
"""Short name → the paper's name and the recipe. KDE is not a row of the paper."""

VARIANTS: dict[str, tuple[str, Row]] = {
    "kde-half": ("KDE in the upper half", kde_half),
    "rkde-half": ("RKDE in the upper half", rkde_half),
    "rkde-own-keys": ("RKDE, keys as they come", rkde_own_keys),
    "rkde-narrow": ("RKDE, narrow kernels", rkde_narrow),
    "mom-partition": ("MoM, disjoint blocks", mom_partition),
    "spkde-last": ("SPKDE in the last block", spkde_last),
    "mom-half": ("MoM in the upper half", mom_half),
}
"""Rows of our own, run only by name: candidates for a clean loss as softmax's and a smaller rise under swaps."""

TWIN = "transformer"
"""The row that every other one is compared with."""


def generated_smoke(seed: int, root: str = "") -> LanguageConfig:
    """A text made by a grammar in the package: the whole pipeline in minutes on a laptop."""
    return LanguageConfig(
        row=TWIN,
        seed=seed,
        data=TextData(name="generated", lines=600, min_count=2),
        model=LMConfig(context=32, dim=32, depth=2, num_heads=2, hidden=64, dropout=0.0),
        fit=FitConfig(epochs=5, batch_size=16, learning_rate=1e-2, weight_decay=0.0, warmup=0.1, clip=1.0),
        evaluation=LanguageEvaluation(stride=8, num_tokens=1000, batch_size=64, blocks=50),
    )


def enwiki_lab(seed: int, root: str) -> LanguageConfig:
    """25 M tokens of Wikipedia on one GPU, tried on WikiText-103's real parts: perplexities are not the published ones.

    All 224,283 words of the training text. The small model; `medium` makes the other.
    """
    return LanguageConfig(
        row=TWIN,
        seed=seed,
        data=TextData(
            name="files",
            root=root,
            train="enwiki/train.tokens.xz",
            valid="wikitext/wikitext-103.valid.tokens.xz",
            test="wikitext/wikitext-103.test.tokens.xz",
        ),
        model=lm_small(),
        fit=FitConfig(
            epochs=5,
            batch_size=96,
            learning_rate=1e-3,
            weight_decay=0.0,
            warmup=0.05,
            clip=0.25,
            precision="bfloat16",
        ),
        evaluation=LanguageEvaluation(stride=16, batch_size=256),
    )


def wikitext103_paper(seed: int, root: str) -> LanguageConfig:
    """WikiText-103 as published: 500,000 steps of 96 segments, four GPUs or more.

    119 epochs of its 403,000 segments are 499,900 steps.
    Departs: one seed a row; the exact softmax instead of the source's adaptive one; AdamW instead of Adam, without
    decay the same.
    """
    return LanguageConfig(
        row=TWIN,
        seed=seed,
        data=TextData(
            name="files",
            root=root,
            train="wiki.train.tokens",
            valid="wiki.valid.tokens",
            test="wiki.test.tokens",
        ),
        model=lm_small(),
        fit=FitConfig(
            epochs=119,
            batch_size=96,
            learning_rate=2.5e-4,
            weight_decay=0.0,
            warmup=2000 / 499_900,
            clip=0.25,
            precision="bfloat16",
        ),
        evaluation=LanguageEvaluation(stride=1, batch_size=256),
    )


def medium(base: LanguageConfig) -> LanguageConfig:
    """Table 4 instead of Table 1: twice the width, one and a half times the context."""
    return replace(base, model=lm_medium(vocab_size=base.model.vocab_size))


def enwiki_lab_medium(seed: int, root: str) -> LanguageConfig:
    return medium(enwiki_lab(seed, root))


def wikitext103_paper_medium(seed: int, root: str) -> LanguageConfig:
    return medium(wikitext103_paper(seed, root))


SCALES: dict[str, dict[str, Callable[[int, str], LanguageConfig]]] = {
    "smoke": {"generated": generated_smoke},
    "lab": {"enwiki": enwiki_lab, "enwiki-medium": enwiki_lab_medium},
    "paper": {"wikitext-103": wikitext103_paper, "wikitext-103-medium": wikitext103_paper_medium},
}
"""Scale → text and model → recipe."""
SEEDS: dict[str, int] = {"smoke": 1, "lab": 3, "paper": 1}
"""Seeds a row, counted from 0."""
