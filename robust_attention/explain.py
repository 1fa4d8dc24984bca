"""Which parts of one input each method trusts: patches of an image, words of a text."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

import robust_attention as ra
from robust_attention.data.contaminate import Kind, contaminate
from robust_attention.data.images import digits_images
from robust_attention.demo import load_twins
from robust_attention.eval.patches import patch_weights
from robust_attention.models.vit import ViT

TEXT_METHODS: dict[str, ra.Method] = {
    "RKDE": ra.RKDE(keys="own", weight_bandwidth=1.2),
    "SPKDE": ra.SPKDE(1.4, keys="own", weight_bandwidth=1.2),
}
"""For a trained text model: its own logits, weights from a narrower kernel than the paper's (which hardly varies)."""


def read_image(path: Path, size: int) -> Tensor:
    """Any picture as `[1, 1, size, size]` in [0, 1], ink dark as in the digits: a light background is inverted."""
    from PIL import Image, UnidentifiedImageError

    try:
        grey = Image.open(path).convert("L")
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(
            f"what must be a picture that can be read, got {path} ({error}); pass a PNG or JPEG"
        ) from error
    pixels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).float() / 255
    image = pixels.reshape(1, 1, grey.height, grey.width)
    image = F.interpolate(image, size=(size, size), mode="area")
    edge = torch.cat((image[..., 0, :], image[..., -1, :], image[..., 0], image[..., -1]), -1)
    return 1 - image if float(edge.mean()) > 0.5 else image


def example(number: int, kind: Kind, share: float, model: ViT) -> tuple[Tensor, Tensor, int]:
    """A test digit of the demo, spoilt: the image, which patches were overwritten, and its label."""
    test = digits_images(model.config.image_size).test
    if not 0 <= number < len(test):
        raise ValueError(f"example must be from 0 to {len(test) - 1}, got {number}; choose another digit")
    images = test.read(torch.arange(len(test))).float() / 255
    spoilt = contaminate(
        images, kind=kind, share=share, patch_size=model.config.patch_size, generator=Generator().manual_seed(0)
    )
    return spoilt.images[number : number + 1], spoilt.hit[number], int(test.labels[number])


@torch.no_grad()
def explain_image(image: Tensor, twins: dict[str, ViT], hit: Tensor | None, label: int | None) -> dict[str, Any]:
    """Numbers for `plots.explain.draw_image`: softmax's attention, every other twin's weights, what each reads."""
    maps = {}
    for name, model in twins.items():
        q, k, v = model.projections(image)[0]
        method = model.methods[0]
        if isinstance(method, ra.Softmax):
            # What the class token looks at, averaged over heads.
            attention = method.coefficients(q, k, v)[0, :, 0, -model.config.num_patches :].mean(0)
            maps[name] = (attention / attention.mean()).tolist()
        elif hasattr(method, "weights") or method.stochastic:
            weight = patch_weights(model, image, draws=40, generator=Generator().manual_seed(0))
            maps[name] = weight[0].tolist()
    first = next(iter(twins.values()))
    return {
        "image": image[0, 0].tolist(),
        "patch_size": first.config.patch_size,
        "maps": maps,
        "read_as": {name: int(model(image).argmax()) for name, model in twins.items()},
        "hit": None if hit is None else hit.tolist(),
        "label": label,
    }


@torch.no_grad()
def explain_text(text: str, folder: str) -> dict[str, Any]:
    """Numbers for `plots.explain.write_text`: the words, how much attention each gets, and its robust weights.

    `folder` holds a transformers encoder and its tokenizer. Weights and attention are means over heads and layers; mean
    1 over the words.
    """
    from robust_attention.adapters import import_torchvision

    import_torchvision()
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model must be a folder with a transformers encoder and its tokenizer, got {folder} "
            f"({str(error).splitlines()[0]}); save one there with save_pretrained"
        ) from error
    coded = tokenizer(text, return_tensors="pt", truncation=True)
    inputs = {name: coded[name] for name in ("input_ids", "attention_mask") if name in coded}
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    ra.robustify(model, ra.Softmax())
    seen: list[Tensor] = []

    def see(part: Any, args: Any, out: Tensor) -> None:
        seen.append(part.method.coefficients(*args[:3]).mean((0, 1, 2)))

    hooks = [part.register_forward_hook(see) for part in model.modules() if isinstance(part, ra.nn.Attend)]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    maps = {"softmax": torch.stack(seen).mean(0)}
    for name, method in TEXT_METHODS.items():
        ra.robustify(model, method)
        found = ra.weights_of(model, inputs)
        maps[name] = torch.stack([weights.joint.mean((0, 1)) for weights in found.values()]).mean(0)
    ra.restore(model)
    return {
        "words": words,
        "maps": {name: (x / x.mean()).tolist() for name, x in maps.items()},
        "settings": {"softmax": "attention received"} | {name: repr(m) for name, m in TEXT_METHODS.items()},
        "model": Path(folder).name,
    }


Places = dict[str, Tensor]
"""What a map is called -> a number for each word or step, mean 1."""


@torch.no_grad()
def trusted(attends: list[ra.nn.Attend], seen: list[Any], *, is_causal: bool) -> Places:
    """How much each key counts, as a mean over heads and blocks: `[S]` a map, mean 1 over the keys that are there.

    robust weights: of the joint density, where a block's method has some. attention received: the mean of what queries
    give a key over the share it would have if all that they see counted alike.
    """
    received, weights = [], []
    for attend, given in zip(attends, seen, strict=True):
        q, k, v = given[:3]
        mask = given[3] if len(given) > 3 else None
        method = cast(Any, attend.method)
        owned = attend.tensors(q.shape[2], k.shape[2], k.device)
        share = method.coefficients(q, k, v, mask, is_causal, **owned).abs()
        visible = torch.ones_like(share, dtype=torch.bool) if mask is None else mask.expand_as(share)
        visible = visible.tril(k.shape[2] - q.shape[2]) if is_causal else visible
        even = visible / visible.sum(-1, keepdim=True).clamp(min=1)
        fair = even.sum((0, 1, 2))
        received.append(torch.where(fair > 0, share.sum((0, 1, 2)) / fair.clamp(min=1e-9), 0))
        if hasattr(method, "weights"):
            weights.append(method.weights(k, v, mask).joint.mean((0, 1)))
    maps = {"attention received": torch.stack(received).mean(0)}
    if weights:
        maps["robust weights"] = torch.stack(weights).mean(0)
    there = fair > 0  # the same keys in every block; a robust weight of 0 counts in the mean
    return {name: x / x[there].mean() for name, x in maps.items()}


def explain_words(text: str, folder: Path) -> dict[str, Any]:
    """Numbers for `plots.explain.write_text`, from a run of the language study."""
    from robust_attention.study.language import load_model

    model, coder, config = load_model(folder)
    tokens = torch.tensor([[coder.eos, *coder.encode(text)]])[:, : config.model.context]
    attends = [attention.attend for attention in model.attentions]
    maps = trusted(attends, model.projections(tokens), is_causal=True)
    method = repr(config.method)
    return {
        "words": [coder.words[number] for number in tokens[0].tolist()],
        "maps": {name: x.tolist() for name, x in maps.items()},
        "settings": dict.fromkeys(maps, method),
        "model": f"{config.data.name}, {config.row}",
    }


def explain_steps(file: Path, folder: Path, number: int) -> dict[str, Any]:
    """Numbers for `plots.explain.draw_series`, from a `.ts` file and a run of the time-series study."""
    from robust_attention.data.series import pad
    from robust_attention.data.ts import read_ts
    from robust_attention.study.series import load_run

    model, names, config = load_run(folder)
    found = read_ts(file, missing=config.data.missing)
    if not 0 <= number < len(found.series):
        raise ValueError(f"example must be from 0 to {len(found.series) - 1}, got {number}; choose another series")
    values, mask = pad(found.series[number : number + 1])
    with torch.no_grad():
        guess = int(model(values, mask).argmax(1))
    attends = [attention.attend for attention in model.attentions]
    maps = trusted(attends, model.projections(values, mask), is_causal=False)
    length = int(mask.sum())
    return {
        "series": values[0, :length].tolist(),
        "maps": {name: x[: -(-length // model.config.window)].tolist() for name, x in maps.items()},
        "window": model.config.window,
        "read_as": names[guess],
        "label": None if found.labels is None else found.classes[found.labels[number]],
        "model": f"{config.data.name}, {config.row}",
    }


def _study_of(folder: Path) -> str | None:
    """Which study left a run in this folder."""
    try:
        text = (folder / "config.json").read_text(encoding="utf-8")
    except OSError:
        return None
    return next((name for name in ("LanguageConfig", "SeriesConfig") if f'"{name}"' in text), None)


def explain(what: str | None, model: str | None, number: int, kind: str, share: float) -> tuple[str, dict[str, Any]]:
    """Decide what `what` is; ("image", "text" or "series", numbers)."""
    path = None if what is None else Path(what)
    is_image = what is None or (path is not None and path.suffix.lower() in (".png", ".jpg", ".jpeg", ".bmp", ".gif"))
    if path is not None and ".ts" in path.suffixes:
        if model is None or _study_of(Path(model)) != "SeriesConfig":
            raise ValueError(f"--model must be a run of the time-series study for a .ts file, got {model}; name one")
        return "series", explain_steps(path, Path(model), number)
    if not is_image:
        assert what is not None
        if model is None:
            raise ValueError(
                "--model must be given for a text, got none; pass a run of the language study, or a folder with a "
                "transformers encoder and its tokenizer"
            )
        text = path.read_text(encoding="utf-8") if path is not None and len(what) < 256 and path.is_file() else what
        if not text.strip():
            raise ValueError("what must not be empty; pass a sentence or a file")
        by_study = _study_of(Path(model)) == "LanguageConfig"
        return "text", explain_words(text, Path(model)) if by_study else explain_text(text, model)
    twins = load_twins(Path(model or "out/demo"))
    first = next(iter(twins.values()))
    if path is None:
        image, hit, label = example(number, cast(Kind, kind), share, first)
        return "image", explain_image(image, twins, hit, label)
    return "image", explain_image(read_image(path, first.config.image_size), twins, None, None)
