"""Time series: how they are padded, cut, scaled and spoilt, and that a model never looks behind their masks."""

import lzma
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import robust_attention as ra
from robust_attention.data.series import Series, SeriesExamples, folds, hold_out, labelled, load_problem, pad, scale_of
from robust_attention.data.series_contaminate import KINDS, Kind, contaminate_series
from robust_attention.data.sines import sines
from robust_attention.data.ts import TSError, parse_ts
from robust_attention.models.series import SeriesTransformer, SeriesTransformerConfig
from robust_attention.nn import eval_draw, set_draws

HEAD = "@missing true\n@dimensions 2\n@equalLength false\n@classLabel true a b c\n@data\n"
TRAIN = HEAD + "1,2,3:4,5,6:a\n1,2:3,4:c\n5:6:b\n"
SMALL = SeriesTransformerConfig(channels=3, length=12, num_classes=4, dim=16, depth=2, num_heads=2, hidden=24)
METHODS = [pytest.param(cls(), id=name) for name, cls in ra.methods().items()]


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def made(number: int = 40, length: int = 9, channels: int = 3, num_classes: int = 3) -> Series:
    """Lengths from 4 to `length`, classes in blocks."""
    lengths = torch.randint(4, length + 1, (number,), generator=seeded(1)).tolist()
    values, mask = pad([torch.randn(one, channels, generator=seeded(one + i)) for i, one in enumerate(lengths)], length)
    labels = torch.arange(number) * num_classes // number
    classes = tuple("abcdefgh"[:num_classes])
    return Series(name="made", values=values, mask=mask, labels=labels, classes=classes, ids=torch.arange(number))


# Reading and joining


def test_padding_hides_what_is_not_there() -> None:
    series = labelled(parse_ts(TRAIN.encode()), length=4)
    assert series.values.shape == (3, 4, 2)
    assert series.mask.tolist() == [[True, True, True, False], [True, True, False, False], [True, False, False, False]]
    assert series.values[0].tolist() == [[1, 4], [2, 5], [3, 6], [0, 0]]
    assert series.labels.tolist() == [0, 2, 1]
    assert series.ids.tolist() == [0, 1, 2]


def test_steps_with_missing_values_are_hidden() -> None:
    file = parse_ts((HEAD + "1,?,3:4,5,6:a\n").encode(), missing="mask")
    series = labelled(file)
    assert series.mask.tolist() == [[True, False, True]]
    assert series.values[0].tolist() == [[1, 4], [0, 0], [3, 6]]


def write(root: Path, part: str, text: str, suffix: str = ".ts") -> None:
    (root / "P").mkdir(exist_ok=True)
    data = text.encode()
    (root / "P" / f"P_{part}{suffix}").write_bytes(lzma.compress(data) if suffix.endswith("xz") else data)


def test_problem_joins_two_files_by_the_names_of_classes(tmp_path: Path) -> None:
    write(tmp_path, "TRAIN", TRAIN)
    write(tmp_path, "TEST", TRAIN.replace("true a b c", "true c b a").replace("5:6:b", "1,2,3,4:1,2,3,4:b"), ".ts.xz")
    train, test = load_problem(tmp_path, "P")
    assert test is not None
    assert train.length == test.length == 4
    assert (train.name, train.classes, test.classes) == ("P", ("a", "b", "c"), ("a", "b", "c"))
    assert train.labels.tolist() == test.labels.tolist() == [0, 2, 1]


def test_problem_without_test_file_has_one_part(tmp_path: Path) -> None:
    write(tmp_path, "TRAIN", TRAIN, ".ts.xz")
    assert load_problem(tmp_path, "P").test is None


def test_problem_that_is_not_there_or_does_not_fit_fails_clearly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"root must hold P/P_TRAIN\.ts"):
        load_problem(tmp_path, "P")
    with pytest.raises(ValueError, match="name must be that of a problem"):
        load_problem(tmp_path, "../P")
    write(tmp_path, "TRAIN", TRAIN)
    write(tmp_path, "TEST", "@classLabel true a b c d\n@data\n1:2:d\n")
    with pytest.raises(TSError, match=r"P_TEST\.ts: classes must be among a, b, c, got d"):
        load_problem(tmp_path, "P")
    write(tmp_path, "TEST", "@classLabel true a b c\n@data\n1:a\n")
    with pytest.raises(TSError, match=r"P_TEST\.ts: must have 2 dimensions as TRAIN, got 1"):
        load_problem(tmp_path, "P")
    write(tmp_path, "TEST", "@classLabel false\n@data\n1:2\n")
    with pytest.raises(TSError, match="must have a class for each series"):
        load_problem(tmp_path, "P")


def test_examples_are_batches_of_values_mask_and_labels() -> None:
    series = made()
    values, mask, labels = SeriesExamples(series).batch(torch.tensor([3, 0]), 0, torch.device("cpu"))
    assert torch.equal(values, series.values[[3, 0]])
    assert torch.equal(mask, series.mask[[3, 0]])
    assert torch.equal(labels, series.labels[[3, 0]])
    assert len(SeriesExamples(series)) == 40


# Scale


def test_scale_counts_real_steps_alone() -> None:
    series = made()
    mean, std = scale_of(series)
    steps = torch.cat([one[seen] for one, seen in zip(series.values, series.mask, strict=True)])
    torch.testing.assert_close(mean, steps.mean(0))
    torch.testing.assert_close(std, steps.std(0, correction=0))
    longer = scale_of(series.padded(50))
    assert torch.equal(longer.mean, mean)
    assert torch.equal(longer.std, std)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e20, -12345.678])
def test_scale_of_a_constant_channel_is_zero_and_the_model_reads_zero(constant: float) -> None:
    series = made()
    series.values[..., 1] = torch.where(series.mask, constant, 0.0)
    scale = scale_of(series)
    assert scale.std[1] == 0
    assert (scale.std[[0, 2]] > 0.5).all()
    model = SeriesTransformer(SMALL, ra.Softmax()).eval()
    model.standardise(*scale)
    other = series.values.clone()
    other[..., 1] = 7.0
    assert torch.equal(model(series.values, series.mask), model(other, series.mask))


def test_scale_of_a_channel_that_changes_by_rounding_alone_is_zero() -> None:
    series = made()
    near = torch.where(torch.arange(9) % 2 == 0, 12345.678, torch.nextafter(torch.tensor(12345.678), torch.tensor(0.0)))
    series.values[..., 1] = torch.where(series.mask, near, 0.0)
    assert scale_of(series).std[1] == 0


# Cuts


def test_hold_out_takes_its_share_of_every_class_by_the_seed() -> None:
    series = made(number=60)
    rest, held = hold_out(series, 0.2, seed=3)
    assert torch.bincount(held.labels).tolist() == [4, 4, 4]
    assert sorted(rest.ids.tolist() + held.ids.tolist()) == list(range(60))
    assert torch.equal(hold_out(series, 0.2, seed=3)[1].ids, held.ids)
    assert not torch.equal(hold_out(series, 0.2, seed=4)[1].ids, held.ids)


def test_hold_out_takes_one_of_few_and_leaves_one() -> None:
    series = replace(made(number=6), labels=torch.tensor([0, 1, 1, 2, 2, 2]))
    for share in (0.01, 0.99):
        rest, held = hold_out(series, share, seed=0)
        assert set(rest.labels.tolist()) == {0, 1, 2}
        assert set(held.labels.tolist()) == {1, 2}
    with pytest.raises(ValueError, match="share must lie between 0 and 1"):
        hold_out(series, 1.0, seed=0)


def test_folds_deal_every_class_evenly_and_each_series_once() -> None:
    series = replace(made(number=204), labels=(torch.arange(204) >= 57).long())
    cuts = folds(series, 5, seed=0)
    assert sorted(i for _, held in cuts for i in held.ids.tolist()) == list(range(204))
    assert sorted(len(held) for _, held in cuts) == [40, 41, 41, 41, 41]
    for rest, held in cuts:
        assert not set(rest.ids.tolist()) & set(held.ids.tolist())
        assert len(rest) + len(held) == 204
        assert int((held.labels == 0).sum()) in (11, 12)
    assert not torch.equal(folds(series, 5, seed=1)[0][1].ids, cuts[0][1].ids)


# Contamination


def hit(before: Series, after: Series) -> Tensor:
    return (before.values != after.values).any(2)


@pytest.mark.parametrize("kind", KINDS)
def test_contamination_hits_its_share_of_real_steps(kind: Kind) -> None:
    series = made()
    std = scale_of(series).std
    for share in (0.1, 0.5):
        spoilt = contaminate_series(series, kind=kind, share=share, seed=0, std=std)
        changed = hit(series, spoilt)
        assert not changed[~series.mask].any()
        assert (spoilt.values[~series.mask] == 0).all()
        if kind == "channel":
            channels = (series.values != spoilt.values).any(1).sum(1)
            assert channels.tolist() == [max(1, round(share * 3))] * len(series)
            continue
        least = 2 if kind == "swap" else 1
        wanted = [max(least, round(share * int(mask.sum()))) for mask in series.mask]
        assert changed.sum(1).tolist() == wanted
    assert torch.equal(contaminate_series(series, kind=kind, share=0, seed=0, std=std).values, series.values)


def test_contamination_does_what_it_says() -> None:
    series, std = made(), torch.tensor([1.0, 2.0, 0.0])
    spikes = contaminate_series(series, kind="spike", share=0.3, seed=0, std=std, size=4.0)
    moved = (spikes.values - series.values)[hit(series, spikes)].abs()
    torch.testing.assert_close(moved, torch.tensor([4.0, 8.0, 0.0]).expand_as(moved))
    dropped = contaminate_series(series, kind="drop", share=0.3, seed=0, std=std)
    assert (dropped.values[hit(series, dropped)] == 0).all()
    swapped = contaminate_series(series, kind="swap", share=0.3, seed=0, std=std)
    assert torch.equal(swapped.values.sort(1).values, series.values.sort(1).values)


@pytest.mark.parametrize("kind", KINDS)
def test_contamination_is_a_function_of_seed_and_place_alone(kind: Kind) -> None:
    series = made()
    settings: dict[str, Any] = {"kind": kind, "share": 0.3, "std": scale_of(series).std}
    whole = contaminate_series(series, seed=0, **settings)
    some = torch.tensor([7, 2, 30])
    assert torch.equal(contaminate_series(series.take(some), seed=0, **settings).values, whole.values[some])
    assert torch.equal(contaminate_series(series.padded(20), seed=0, **settings).values[:, :9], whole.values)
    assert not torch.equal(contaminate_series(series, seed=1, **settings).values, whole.values)
    more = contaminate_series(series, seed=0, **settings | {"share": 0.6})
    if kind != "swap":  # who is swapped with whom changes; where, does not
        kept = whole.values != series.values
        assert torch.equal(more.values[kept], whole.values[kept])
    assert (hit(series, more) >= hit(series, whole)).all()


def test_contamination_fails_clearly() -> None:
    series, std = made(), torch.ones(3)
    with pytest.raises(ValueError, match="kind must be one of"):
        contaminate_series(series, kind="rust", share=0.1, seed=0, std=std)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="share must lie between 0 and 1"):
        contaminate_series(series, kind="drop", share=1.1, seed=0, std=std)
    with pytest.raises(ValueError, match=r"std must have one number a channel, \[3\], got \[2\]"):
        contaminate_series(series, kind="drop", share=0.1, seed=0, std=std[:2])


def test_sines_are_the_same_every_time_and_unequal_in_length() -> None:
    first, again = sines(), sines()
    assert torch.equal(first.train.values, again.train.values)
    assert first.test is not None
    assert len(set(first.test.mask.sum(1).tolist())) > 5
    assert torch.bincount(first.train.labels).tolist() == [24, 24, 24]
    assert not torch.equal(first.train.values[:9], first.test.values[:9])


# The model


def inputs() -> tuple[Tensor, Tensor]:
    series = made(number=5)
    return series.values, series.mask


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pool", ["flatten", "mean"])
def test_padding_has_no_influence_not_even_in_the_last_bit(method: ra.Method, pool: Any) -> None:
    model = SeriesTransformer(replace(SMALL, pool=pool), method).eval()
    values, mask = inputs()
    logits = model(values, mask)
    spoilt = torch.where(mask[..., None], values, torch.tensor([torch.nan, torch.inf, 1e30]))
    assert torch.equal(model(spoilt, mask), logits)
    longer = torch.nn.functional.pad(spoilt, (0, 0, 0, 3), value=1e9), torch.nn.functional.pad(mask, (0, 3))
    assert torch.equal(model(*longer), logits)
    alone = torch.cat([model(values[i : i + 1, : int(n)]) for i, n in enumerate(mask.sum(1))])
    torch.testing.assert_close(alone, logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(values, torch.ones_like(mask)), logits, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_hidden_steps_get_no_gradient_and_visible_ones_some(method: ra.Method) -> None:
    model = SeriesTransformer(SMALL, method).train()
    values, mask = inputs()
    values.requires_grad_()
    model(values, mask).square().sum().backward()
    assert values.grad is not None
    assert (values.grad[~mask] == 0).all()
    assert (values.grad[mask] != 0).any(1).all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("method", METHODS)
def test_hidden_values_do_not_reach_the_gradient_of_any_weight(method: ra.Method) -> None:
    values, mask = inputs()
    found = []
    for hidden in (0.0, torch.nan):
        model = SeriesTransformer(replace(SMALL, dropout=0.0), method).train()
        set_draws(model, 3)
        model(torch.where(mask[..., None], values, hidden), mask).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@pytest.mark.parametrize("pool", ["flatten", "mean"])
def test_classifier_reads_zeros_where_nothing_is_seen(pool: Any) -> None:
    model = SeriesTransformer(replace(SMALL, pool=pool), ra.Softmax()).eval()
    values, mask = inputs()
    last: list[Tensor] = []
    read: list[Tensor] = []
    model.act.register_forward_hook(lambda module, given, out: last.append(out))
    model.head.register_forward_hook(lambda module, given, out: read.append(given[0]))
    model(values, mask)
    seen = torch.nn.functional.pad(mask, (0, 3))
    if pool == "flatten":
        assert torch.equal(read[0], torch.where(seen[..., None], last[0], 0).flatten(1))
    else:
        means = torch.stack([tokens[visible].mean(0) for tokens, visible in zip(last[0], seen, strict=True)])
        torch.testing.assert_close(read[0], means)


@pytest.mark.parametrize("method", [ra.MoM(), ra.FourierMoM()], ids=["mom", "fourier_mom"])
def test_fresh_draws_do_not_depend_on_padding_either(method: ra.Method) -> None:
    model = SeriesTransformer(SMALL, method).eval()
    values, mask = inputs()
    with eval_draw(model, "fresh"):
        set_draws(model, 5)
        first = model(values, mask)
        set_draws(model, 5)
        again = model(torch.nn.functional.pad(values, (0, 0, 0, 2)), torch.nn.functional.pad(mask, (0, 2)))
        set_draws(model, 6)
        other = model(values, mask)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_series_of_few_steps_or_none_give_finite_logits() -> None:
    for cls in ra.methods().values():
        model = SeriesTransformer(SMALL, cls()).eval()
        values, mask = torch.randn(3, 12, 3, generator=seeded()), torch.zeros(3, 12, dtype=torch.bool)
        mask[0, 4], mask[1, :2] = True, True
        assert model(values, mask).isfinite().all()


def test_weights_do_not_depend_on_the_method_nor_on_the_global_stream() -> None:
    before = torch.get_rng_state()
    models = [SeriesTransformer(SMALL, method) for method in (ra.Softmax(), ra.MoM(), ra.Fourier())]
    for model in models:
        model.init_weights(seeded(7))
    assert torch.equal(torch.get_rng_state(), before)
    first, second, third = (model.state_dict() for model in models)
    assert first.keys() == second.keys() < third.keys()
    assert all(torch.equal(first[name], other[name]) for other in (second, third) for name in first)
    models[0].init_weights(seeded(8))
    assert not torch.equal(models[0].head.weight, models[1].head.weight)


def test_tokens_start_with_variance_one() -> None:
    config = replace(SMALL, channels=50, dim=512, num_heads=8)
    values = torch.randn(4, 12, 50, generator=seeded())
    tokens, _ = SeriesTransformer(config, ra.Softmax()).eval().tokens(values, None)
    assert 0.9 < float(tokens.detach().std()) < 1.1


def test_standardise_is_what_dividing_beforehand_does() -> None:
    values, mask = inputs()
    mean, std = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 4.0, 1.0])
    model = SeriesTransformer(SMALL, ra.Softmax()).eval()
    logits = model(values, mask)
    model.standardise(mean, std)
    torch.testing.assert_close(model(values * std + mean, mask), logits, atol=1e-4, rtol=1e-4)
    assert {"channel_mean", "channel_scale"} <= set(model.state_dict())


def test_windows_are_means_over_their_visible_steps() -> None:
    plain = SeriesTransformer(SMALL, ra.Softmax()).eval()
    windowed = SeriesTransformer(replace(SMALL, window=4), ra.Softmax()).eval()
    values, mask = torch.randn(2, 45, 3, generator=seeded()), torch.ones(2, 45, dtype=torch.bool)
    mask[1, 14:] = False
    mask[0, 4:8] = False
    means, seen = torch.zeros(2, 12, 3), torch.zeros(2, 12, dtype=torch.bool)
    for i in range(2):
        for j in range(12):
            steps = values[i, 4 * j : 4 * j + 4][mask[i, 4 * j : 4 * j + 4]]
            if len(steps):
                means[i, j], seen[i, j] = steps.mean(0), True
    torch.testing.assert_close(windowed(values, mask), plain(means, seen))


def test_projections_show_what_every_block_looks_at() -> None:
    model = SeriesTransformer(SMALL, ra.RKDE()).eval()
    values, mask = inputs()
    seen = model.projections(values, mask)
    assert len(seen) == 2
    assert seen[0].q.shape == (5, 2, 12, 8)
    assert torch.equal(seen[0].mask[:, 0, 0, :9], mask)
    weights = ra.RKDE().weights(seen[0].k, seen[0].v, seen[0].mask)
    assert (weights.joint[~seen[0].mask[:, 0].expand(-1, 2, -1)] == 0).all()


def test_one_method_for_each_block() -> None:
    model = SeriesTransformer(SMALL, [ra.Softmax(), ra.RKDE()])
    assert [type(a.attend.method) for a in model.attentions] == [ra.Softmax, ra.RKDE]
    with pytest.raises(ValueError, match="method must be one method, or one for each of the 2 blocks, got 3"):
        SeriesTransformer(SMALL, [ra.Softmax()] * 3)


def test_published_sizes_are_the_defaults() -> None:
    config = SeriesTransformerConfig()
    assert (config.depth, config.dim, config.num_heads, config.hidden) == (2, 512, 8, 2048)
    model = SeriesTransformer(SeriesTransformerConfig(channels=3, length=315, num_classes=8), ra.Softmax())
    layers = 2 * (4 * 512 * 513 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512)
    around = 4 * 512 + 315 * 512 + 2 * 512 + (315 * 512 + 1) * 8
    assert sum(p.numel() for p in model.parameters()) == layers + around


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"dim": 15}, "num_heads must divide dim = 15"),
        ({"dropout": 1.0}, "dropout must lie from 0 to below 1"),
        ({"pool": "max"}, "pool must be one of"),
        ({"length": 0}, "length must be a whole number"),
    ],
)
def test_model_sizes_fails_clearly(change: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        replace(SMALL, **change)


def test_model_inputs_fails_clearly() -> None:
    model = SeriesTransformer(SMALL, ra.Softmax())
    values, mask = inputs()
    with pytest.raises(ValueError, match="series must be floating-point"):
        model(values[..., :2], mask)
    with pytest.raises(ValueError, match="must not be longer than the model's 12 steps, got 13"):
        model(torch.zeros(1, 13, 3))
    with pytest.raises(ValueError, match="mask must be boolean"):
        model(values, mask.float())


def test_loss_falls_on_waves() -> None:
    train = sines(num_train=24).train
    config = SeriesTransformerConfig(
        channels=2, length=30, num_classes=3, dim=16, depth=1, num_heads=2, hidden=16, dropout=0.0
    )
    model = SeriesTransformer(config, ra.SPKDE())
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(25):
        loss = torch.nn.functional.cross_entropy(model(train.values, train.mask), train.labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    assert math.isfinite(losses[0])
