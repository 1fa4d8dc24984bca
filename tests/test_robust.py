"""Losses, KIRWLS, the simplex QP and the draws, each against its own definition."""

import pytest
import quadprog
import torch
from torch import Tensor

import robust_attention as ra
from robust_attention.robust import simplex_qp
from robust_attention.robust.blocks import draw_blocks, lower_median, random_words
from robust_attention.robust.gram import squared_distances, unit
from robust_attention.robust.growing_qp import GrowingQP
from robust_attention.robust.kirwls import kirwls
from robust_attention.robust.simplex_qp import certificate, spkde_weights

LOSSES = [ra.Huber(0.3), ra.Hampel(0.2), ra.Welsch(0.4), ra.Tukey(0.7)]


def gram(points: Tensor, variance: float = 8.0) -> Tensor:
    return torch.exp(squared_distances(points) / (-2 * variance))


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_psi_is_the_slope_of_rho_over_x(loss: ra.Loss) -> None:
    x = torch.linspace(0.003, 1.41, 1000, dtype=torch.float64)  # no point on a kink of these thresholds
    step = 1e-6
    slope = (loss.rho(x + step) - loss.rho(x - step)) / (2 * step)
    torch.testing.assert_close(loss.psi(x), slope / x, rtol=1e-5, atol=1e-6)
    assert float(loss.psi(torch.zeros(1))) == 1
    assert (loss.psi(x).diff() <= 1e-12).all()


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_psi_has_a_finite_gradient_at_zero_distance(loss: ra.Loss) -> None:
    x2 = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(loss.psi_of_square(x2).sum(), x2)
    assert grad.isfinite().all()


def test_hampel_has_its_three_parts() -> None:
    x = torch.tensor([0.1, 0.3, 0.5, 0.6, 0.7], dtype=torch.float64)
    wanted = torch.tensor([1.0, 0.2 / 0.3, 0.2 * 0.1 / (0.2 * 0.5), 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(ra.Hampel(0.2).psi(x), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_kirwls_objective_never_rises(loss: ra.Loss, seed: int) -> None:
    x = torch.cat([unit(points(40, 6, seed=seed) + 2), unit(points(5, 6, seed=seed + 100))])
    G = gram(x, 0.5)
    visible = torch.ones(1, 45, dtype=torch.bool)
    last = torch.inf
    for sweeps in range(8):
        w = kirwls(G, visible, loss, sweeps)[0]
        distance = (1 - 2 * G @ w + w @ G @ w).clamp(min=0).sqrt()
        now = float(loss.rho(distance).sum())
        assert now <= last + 1e-12
        last = now


def test_kirwls_is_uniform_where_every_weight_is_zero() -> None:
    G = torch.eye(4, dtype=torch.float64)
    w = kirwls(G, torch.ones(1, 4, dtype=torch.bool), ra.Tukey(0.1), 3)
    assert torch.equal(w, torch.full((1, 4), 0.25, dtype=torch.float64))


def clustered(spread: float) -> Tensor:
    centres = points(4, 8, 64)
    return unit(centres[:, torch.arange(96) % 8] + spread * points(4, 96, 64, seed=1))


GRAMS = {
    "random": gram(unit(points(4, 96, 64))),
    "clustered": gram(clustered(3e-3)),  # condition about 1e9
    "duplicated": gram(clustered(0.0)),
    "one": gram(unit(points(4, 1, 64))),
    "two": gram(unit(points(4, 2, 64))),
    "narrow": gram(unit(points(4, 96, 64)), 0.4),
    "flat": gram(unit(points(4, 96, 3)), 3**0.5),
}


@pytest.mark.parametrize("beta", [1.0, 1.05, 1.4, 3.0])
@pytest.mark.parametrize("kind", GRAMS)
@pytest.mark.parametrize("sets", ["full", "masked", "prefixes"])
def test_qp_is_feasible_and_certified(kind: str, beta: float, sets: str) -> None:
    G = GRAMS[kind]
    size = G.shape[-1]
    visible = {
        "full": torch.ones(4, 1, size, dtype=torch.bool),
        "masked": torch.rand(4, 3, size, generator=torch.Generator().manual_seed(2)) < 0.5,
        "prefixes": torch.ones(size, size, dtype=torch.bool).tril()[:: max(1, size // 6)].expand(4, -1, -1),
    }[sets]
    for dtype, most in ((torch.float64, 1e-10), (torch.float32, 5e-6)):
        w, info = spkde_weights(G.to(dtype), visible, beta, prefixes=sets == "prefixes")
        assert w.dtype == dtype
        assert (w >= 0).all()
        assert not w[~visible].any()
        torch.testing.assert_close(w.sum(-1), visible.any(-1).to(dtype), rtol=1e-6, atol=0)
        gap, objective = certificate(G, visible, w.double(), beta)  # in float64, whatever solved it
        assert float(gap.max()) <= most
        assert info.reached.all()
        assert float((info.objective - objective).abs().max()) <= 1e-5


def test_condition_of_the_clustered_grams_is_what_their_name_says() -> None:
    assert 1e8 < float(torch.linalg.cond(GRAMS["clustered"]).max()) < 1e11


@pytest.mark.parametrize("beta", [1.05, 1.4, 3.0])
@pytest.mark.parametrize("kind", ["random", "narrow", "two"])
def test_qp_equals_a_library_solver(kind: str, beta: float) -> None:
    G = GRAMS[kind]
    size = G.shape[-1]
    w, _ = spkde_weights(G, torch.ones(4, 1, size, dtype=torch.bool), beta)
    for one, mine in zip(G.numpy(), w[:, 0].numpy(), strict=True):
        linear = beta / size * one.sum(0)
        constraints = torch.cat([torch.ones(size, 1), torch.eye(size)], 1).double().numpy()
        limits = torch.cat([torch.ones(1), torch.zeros(size)]).double().numpy()
        theirs = quadprog.solve_qp(one, linear, constraints, limits, 1)[0]
        assert abs(mine - theirs).max() <= 1e-9


def test_qp_gap_that_is_not_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(simplex_qp.GAP_TOLERANCE, torch.float64, 1e-20)
    k = points(1, 1, 40, 8)
    with pytest.warns(UserWarning, match=r"SPKDE: 1 of 1 quadratic programmes end with a Frank–Wolfe gap of up to .*"):
        info = ra.SPKDE(2.0).weights(k, k).info
    assert not info[0].reached.all()


def test_qp_info_belongs_to_the_weights() -> None:
    k, v = points(2, 3, 20, 8), points(2, 3, 20, 4, seed=1)
    joint, marginal = weights = ra.SPKDE(1.4).weights(k, v, is_causal=True)
    assert joint.shape == marginal.shape == (2, 3, 20, 20)
    for info in weights.info:
        assert info.gap.shape == (2, 3, 1, 20)
        assert float(info.gap.max()) <= 1e-10


@pytest.mark.parametrize("size", [11, 37, 64])
def test_a_problem_rounds_alike_wherever_it_stands_in_a_batch(size: int) -> None:
    G = gram(unit(points(12, size, 16) + 1), 4.0)
    everything = torch.ones(12, 1, size, dtype=torch.bool)
    weights, info = spkde_weights(G, everything, 1.4)
    assert (weights == 0).any()  # the solver had to work
    for part in ([0, 1], [5, 3, 8], list(range(2, 12))):
        alone, alone_info = spkde_weights(G[part], everything[part], 1.4)
        assert torch.equal(alone, weights[part])
        assert torch.equal(alone_info.gap, info.gap[part])


def test_causal_qp_equals_each_prefix_on_its_own() -> None:
    k, v = points(1, 2, 24, 8), points(1, 2, 24, 4, seed=1)
    for beta in (1.05, 1.4):
        whole = ra.SPKDE(beta).weights(k, v, is_causal=True)
        for n in (1, 2, 7, 24):
            part = ra.SPKDE(beta).weights(k[:, :, :n], v[:, :, :n])
            for a, b in zip(whole, part, strict=True):
                torch.testing.assert_close(a[:, :, n - 1, :n], b, rtol=1e-9, atol=1e-12)
                assert not a[:, :, n - 1, n:].any()


def test_closed_form_of_all_prefixes_is_exact_where_the_optimum_is_inside() -> None:
    G = GRAMS["random"]
    prefixes = torch.ones(96, 96, dtype=torch.bool).tril().expand(4, -1, -1)
    closed = simplex_qp._closed_prefixes(G, prefixes, 1.05)
    inside = ((closed >= 0) | ~prefixes).all(-1)
    assert inside.double().mean() > 0.9  # the shortcut is taken, not only allowed
    assert float(certificate(G, prefixes, closed, 1.05)[0][inside].max()) <= 1e-13


@pytest.mark.parametrize("beta", [1.05, 1.4, 3.0])
@pytest.mark.parametrize("kind", ["random", "clustered", "duplicated", "narrow"])
def test_a_growing_qp_is_certified_at_every_size(kind: str, beta: float) -> None:
    G = GRAMS[kind]
    growing = GrowingQP.start(G[:, :5, :5], torch.ones(4, 5, dtype=torch.bool), beta, 1e-13)
    for n in range(6, 97):
        w, gap = growing.grow(G[:, n - 1, :n], torch.ones(4, dtype=torch.bool), beta, 1e-13)
        assert (w >= 0).all()
        torch.testing.assert_close(w.sum(-1), torch.ones(4, dtype=torch.float64))
        mine, _ = certificate(G[:, :n, :n], torch.ones(4, 1, n, dtype=torch.bool), w[:, None], beta)
        assert float(mine.max()) <= 1e-10
        torch.testing.assert_close(gap, mine[:, 0], rtol=0, atol=1e-12)


def test_a_growing_qp_keeps_the_inverse_of_its_support() -> None:
    G = GRAMS["random"]
    growing = GrowingQP.start(G[:, :0, :0], torch.ones(4, 0, dtype=torch.bool), 3.0, 1e-13)
    changes = 0
    for n in range(1, 97):
        before = growing.support.clone()
        growing.grow(G[:, n - 1, :n], torch.ones(4, dtype=torch.bool), 3.0, 1e-13)
        if before.shape == growing.support.shape:
            changes += int((before & ~growing.support).sum())
    assert changes > 50  # points left it, and others came
    product = growing.inverse @ growing.gram * growing.support[:, None]
    torch.testing.assert_close(product, torch.diag_embed(growing.support.double()), rtol=0, atol=1e-9)


def test_prefixes_one_after_the_other_equal_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = torch.ones(96, 96, dtype=torch.bool).tril().expand(4, -1, -1)
    grown, _ = spkde_weights(GRAMS["narrow"], prefixes, 3.0, prefixes=True)
    monkeypatch.setattr(simplex_qp, "_GROW_FROM", 1000)
    at_once, _ = spkde_weights(GRAMS["narrow"], prefixes, 3.0, prefixes=True)
    assert not torch.equal(grown, at_once)  # two ways
    torch.testing.assert_close(grown, at_once, rtol=1e-9, atol=1e-11)


def test_prefixes_do_not_feel_a_degenerate_last_point() -> None:
    G = GRAMS["random"].clone()
    twin = G.clone()
    twin[:, -1], twin[:, :, -1] = twin[:, 0], twin[:, :, 0]  # the last point repeats the first: singular
    twin[:, -1, -1] = 1 - 1e-9  # and a little worse than singular
    prefixes = torch.ones(96, 96, dtype=torch.bool).tril().expand(4, -1, -1)
    for beta in (1.05, 1.4):
        before, _ = spkde_weights(G, prefixes, beta, prefixes=True)
        after, _ = spkde_weights(twin, prefixes, beta, prefixes=True)
        assert torch.equal(before[:, :-1], after[:, :-1])


@pytest.mark.parametrize("draw", ["bootstrap", "subsample", "partition"])
def test_draws_are_what_they_say(draw: str) -> None:
    counts = draw_blocks(50, 7, 40, draw, seed=3)  # type: ignore[arg-type]
    assert counts.shape == (7, 50)
    assert counts.dtype == torch.int64
    if draw == "partition":
        assert (counts.sum(0) == 1).all()
        assert counts.sum(1).max() - counts.sum(1).min() <= 1
    else:
        assert (counts.sum(1) == 40).all()
        assert len({tuple(row.tolist()) for row in counts}) == 7
    if draw == "subsample":
        assert counts.max() == 1
    if draw == "bootstrap":
        assert counts.max() > 1
    assert torch.equal(counts, draw_blocks(50, 7, 40, draw, seed=3))  # type: ignore[arg-type]
    assert not torch.equal(counts, draw_blocks(50, 7, 40, draw, seed=4))  # type: ignore[arg-type]


@pytest.mark.parametrize("draw", ["bootstrap", "subsample", "partition"])
def test_draws_are_uniform_over_keys(draw: str) -> None:
    total = sum(draw_blocks(20, 4, 10, draw, seed=s)[0] for s in range(4000))  # type: ignore[arg-type]
    expected = 4000 * (10 if draw != "partition" else 5) / 20
    assert isinstance(total, Tensor)
    chi_square = float(((total - expected) ** 2 / expected).sum())
    assert chi_square < 55  # 20 keys: beyond the 1e-5 quantile of any of the three


def test_random_words_fill_their_range() -> None:
    words = random_words(0, 100, 10_000)
    assert words.min() >= 0
    assert words.max() < 2**32
    bits = torch.stack([(words >> b) & 1 for b in range(32)]).double().mean((1, 2))
    assert (bits - 0.5).abs().max() < 0.003
    assert len(words.unique()) > 999_000 - 300


def test_lower_median_breaks_ties_downwards_and_skips_what_does_not_count() -> None:
    value = torch.tensor([[3.0, 1.0, 2.0, 2.0], [5.0, 4.0, 4.0, 1.0], [1.0, 2.0, 3.0, 4.0], [9.0, 9.0, 9.0, 9.0]])
    counted = torch.tensor([[True] * 4, [True, True, True, False], [False] * 4, [False, True, True, True]])
    chosen, some = lower_median(value, counted)
    assert chosen[[0, 1, 3]].tolist() == [2, 2, 2]
    assert some.tolist() == [True, True, False, True]


def test_unit_keeps_directions_of_any_length() -> None:
    x = points(5, 7)
    for scale in (1e-300, 1e-30, 1.0, 1e300):
        torch.testing.assert_close(unit(x * scale), unit(x), rtol=1e-13, atol=0)
    assert not unit(torch.zeros(2, 3)).any()
    zero = torch.zeros(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(unit(zero).sum(), zero)
    assert not grad.any()


def test_squared_distances_keep_small_ones_far_from_the_origin() -> None:
    x = (1000 + 1e-3 * points(6, 4)).float()
    exact = (x.double()[:, None] - x.double()[None]).square().sum(-1)
    torch.testing.assert_close(squared_distances(x).double(), exact, rtol=1e-3, atol=1e-10)
