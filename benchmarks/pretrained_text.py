"""Robust weights in a trained sentence encoder, without retraining: their cost on clean text, their gain on spoilt.

    python benchmarks/pretrained_text.py --model FOLDER --text FILE --out results/pretrained-text.json

The encoder (BERT with mean pooling, all-MiniLM-L6-v2 in the committed results) keeps its own logits (`keys="own"`) and
gets robust weights in some layers. Each spoilt sentence looks for its own clean original among all of them, by cosine.
Settings are chosen on the first half of the sentences and reported on the second, beside plain softmax, with a paired
95 % interval (bootstrap over sentences).
"""

import argparse
import json
import lzma
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

import robust_attention as ra
from robust_attention._files import write_json
from robust_attention.adapters import import_torchvision

KINDS = ("random words", "foreign words")
SHARES = (0.2, 0.4, 0.6)


def sentences(path: Path, number: int) -> list[str]:
    """The first lines of a tokenised text that are sentences of 12 to 40 words."""
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf8")
    found: dict[str, None] = {}
    for line in text.splitlines():
        for part in line.replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".").split(" . "):
            words = part.split()
            if 12 <= len(words) <= 40 and "=" not in words and "<unk>" not in words:
                found[" ".join(words)] = None
    if len(found) < number:
        raise ValueError(f"--text must hold {number} sentences, got {len(found)}; pass a longer text")
    return list(found)[:: len(found) // number][:number]


def spoil(ids: Tensor, mask: Tensor, kind: str, share: float, vocabulary: int, seed: int) -> Tensor:
    """Overwrite a share of every sentence's words (never its first and last token): nested as the share grows."""
    g = Generator().manual_seed(seed)
    order = torch.rand(ids.shape, generator=g)
    inner = mask.bool().clone()
    inner[:, 0] = False
    inner[torch.arange(len(ids)), mask.sum(1) - 1] = False
    rank = torch.where(inner, order, 2.0).argsort(1).argsort(1)
    hit = inner & (rank < (share * inner.sum(1, keepdim=True)).round())
    if kind == "random words":
        other = torch.randint(1996, vocabulary, ids.shape, generator=g)  # BERT's whole words begin there
    else:
        donor = ids.roll(1 + int(torch.randint(len(ids) - 1, (1,), generator=g)), 0)
        other = donor.gather(1, torch.randint(1, 13, ids.shape, generator=g))
    return torch.where(hit, other, ids)


@torch.no_grad()
def embed(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    parts = []
    for some, seen in zip(ids.split(50), mask.split(50), strict=True):
        width = int(seen.sum(1).max())
        hidden = model(input_ids=some[:, :width], attention_mask=seen[:, :width]).last_hidden_state
        weight = seen[:, :width, None].float()
        parts.append((hidden * weight).sum(1) / weight.sum(1))
    return torch.nn.functional.normalize(torch.cat(parts), dim=-1)


def settings() -> dict[str, tuple[ra.Method, list[int] | None]]:
    """What is tried: two methods, kernels from the paper's width to a narrow one, all layers or the first two."""
    found: dict[str, tuple[ra.Method, list[int] | None]] = {"softmax": (ra.Softmax(), None)}
    usual = 32**0.25
    for width in (1.0, 0.5, 0.25):
        for layers in (None, [0, 1]):
            where = "all layers" if layers is None else "layers 0 and 1"
            narrow = {"weight_bandwidth": usual * width, "value_bandwidth": usual}
            found[f"RKDE, σ_w = {width}σ, {where}"] = ra.RKDE(keys="own", **narrow), layers
            found[f"SPKDE β = 1.4, σ_w = {width}σ, {where}"] = ra.SPKDE(1.4, keys="own", **narrow), layers
    found["KDE (unit keys), all layers"] = ra.KDE(), None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/pretrained-text.json"))
    parser.add_argument("--number", type=int, default=600)
    args = parser.parse_args()
    import_torchvision()
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = AutoModel.from_pretrained(args.model, local_files_only=True).eval()
    coded = tokenizer(sentences(args.text, args.number), padding=True, return_tensors="pt")
    ids, mask = coded["input_ids"], coded["attention_mask"]
    original = embed(model, ids, mask)
    trials = {(kind, share): spoil(ids, mask, kind, share, len(tokenizer), 0) for kind in KINDS for share in SHARES}
    half = len(ids) // 2
    found: dict[str, dict[Any, Tensor]] = {}
    rows = []
    for name, (method, layers) in settings().items():
        ra.robustify(model, method, layers=layers)
        clean = embed(model, ids, mask)
        found[name] = {
            trial: ((embed(model, some, mask) @ clean.T).argmax(1) == torch.arange(len(ids))).float()
            for trial, some in trials.items()
        }
        nearest = [(x @ x.T).fill_diagonal_(-1).argmax(1) for x in (original, clean)]
        rows.append(
            {
                "setting": name,
                "method": repr(method),
                "layers": layers,
                "cosine_to_original": float((clean * original).sum(1).mean()),
                "same_nearest_neighbour": float((nearest[0] == nearest[1]).float().mean()),
                "chosen_half": {f"{k}, {s:.0%}": float(r[:half].mean()) for (k, s), r in found[name].items()},
                "reported_half": {f"{k}, {s:.0%}": float(r[half:].mean()) for (k, s), r in found[name].items()},
            }
        )
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
        ra.restore(model)
    score = {name: float(torch.stack([r[:half] for r in by.values()]).mean()) for name, by in found.items()}
    best = max((name for name in score if "KDE," in name or "SPKDE" in name), key=score.__getitem__)
    draws = torch.randint(half, (2000, half), generator=Generator().manual_seed(1))
    comparisons = {}
    for trial in trials:
        difference = (found[best][trial] - found["softmax"][trial])[half : 2 * half]
        means = difference[draws].mean(1).sort().values
        comparisons[f"{trial[0]}, {trial[1]:.0%}"] = {
            "softmax": float(found["softmax"][trial][half:].mean()),
            "robust": float(found[best][trial][half:].mean()),
            "difference": float(difference.mean()),
            "interval_95": [float(means[50]), float(means[1949])],
        }
    write_json(
        args.out,
        {
            "study": "pretrained-text",
            "model": args.model.resolve().parent.name,
            "text": args.text.name,
            "sentences": len(ids),
            "chosen_on": half,
            "best": best,
            "comparisons": comparisons,
            "rows": rows,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        },
    )
    print(best, json.dumps(comparisons, indent=1))


if __name__ == "__main__":
    main()
