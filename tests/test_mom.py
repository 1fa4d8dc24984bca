"""Median of means: whose median it is, and where its randomness comes from."""

import dataclasses
import pickle

import torch
from cases import problem

import robust_attention as ra


def test_median_is_each_querys_own() -> None:
    p = problem(ra.MoM(blocks=5), B=2, H=2, Hkv=2, T=40, S=30)
    whole = p.attend()
    for i in range(0, 40, 7):
        torch.testing.assert_close(p.attend(q=p.q[:, :, i : i + 1])[:, :, 0], whole[:, :, i], rtol=1e-12, atol=1e-13)
    # and they do differ: the blocks that the queries choose are not one block
    unit = p.k / p.k.norm(dim=-1, keepdim=True)
    kernel = torch.exp(p.q @ unit.mT / 8**0.5)
    density = kernel @ p.method.draw(30).double().T
    assert len(density.median(-1).indices.unique()) > 1


def test_the_seed_alone_decides_the_draw() -> None:
    a, b = ra.MoM(seed=1), ra.MoM(seed=2)
    assert torch.equal(a.draw(64), ra.MoM(seed=1).draw(64))
    assert not torch.equal(a.draw(64), b.draw(64))
    assert torch.equal(a.draw(64), a.draw(64, device=torch.device("cpu")))
    p, small = problem(a, B=3), problem(a, B=3)
    torch.testing.assert_close(p.attend()[:1], small.attend(q=p.q[:1], k=p.k[:1], v=p.v[:1]), rtol=1e-12, atol=1e-13)


def test_a_generator_gives_fresh_draws_and_only_it_moves() -> None:
    method = ra.MoM()
    before = torch.get_rng_state()
    g = torch.Generator().manual_seed(5)
    first, second = method.draw(64, generator=g), method.draw(64, generator=g)
    assert not torch.equal(first, second)
    assert torch.equal(first, method.draw(64, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(torch.get_rng_state(), before)


def test_counts_passed_in_are_used_exactly() -> None:
    p = problem(ra.MoM(), S=9)
    counts = torch.zeros(1, 9, dtype=torch.int64)
    counts[0, 4], counts[0, 6] = 1, 2
    logit = p.q @ (p.k / p.k.norm(dim=-1, keepdim=True)).repeat_interleave(2, 1).mT / 8**0.5
    share = torch.exp(logit[..., [4, 6]]) * torch.tensor([1.0, 2.0], dtype=torch.float64)
    share = share / share.sum(-1, keepdim=True)
    wanted = share @ p.v[:, :, [4, 6]].repeat_interleave(2, 1)
    torch.testing.assert_close(p.attend(counts=counts), wanted, rtol=1e-12, atol=1e-13)
    assert torch.equal(p.attend(counts=p.method.draw(9)), p.attend())


def test_blocks_that_see_no_key_have_no_vote() -> None:
    p = problem(ra.MoM(), B=1, H=1, Hkv=1, T=3, S=6)
    counts = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
    out = p.attend(counts=counts, is_causal=True, q=p.q)
    # Query 0 of 3 over 6 keys sees 0..3: blocks 1 and 2 see some of it, block 0 nothing. The lower median of two is the
    # smaller density per key drawn.
    unit = p.k / p.k.norm(dim=-1, keepdim=True)
    kernel = torch.exp(p.q @ unit.mT / 8**0.5)[0, 0]
    pick = 0 if kernel[0, 0] < kernel[0, 3] / 3 else 3
    torch.testing.assert_close(out[0, 0, 0], p.v[0, 0, pick], rtol=1e-12, atol=1e-13)
    nothing = torch.tensor([[0, 0, 0, 0, 0, 1]])
    seen = p.attend(counts=nothing, is_causal=True)
    plain = problem(ra.KDE(), B=1, H=1, Hkv=1, T=3, S=6).attend(is_causal=True)
    torch.testing.assert_close(seen[:, :, :2], plain[:, :, :2], rtol=1e-12, atol=1e-13)


def test_density_of_a_block_is_a_mean_not_a_sum() -> None:
    p = problem(ra.MoM(), B=1, H=1, Hkv=1, T=1, S=3)
    unit = p.k / p.k.norm(dim=-1, keepdim=True)
    low, middle, high = torch.exp(p.q @ unit.mT / 8**0.5)[0, 0, 0].argsort().tolist()
    counts = torch.zeros(3, 3, dtype=torch.int64)
    counts[0, low], counts[1, middle], counts[2, high] = 1, 50, 1
    torch.testing.assert_close(p.attend(counts=counts)[0, 0, 0], p.v[0, 0, middle], rtol=1e-12, atol=0)


def test_ties_go_to_the_lower_block() -> None:
    p = problem(ra.MoM(), B=1, H=1, Hkv=1, T=2, S=4)
    k = p.k[:, :, :1].expand_as(p.k)
    counts = torch.eye(4, dtype=torch.int64)
    # Equal keys: four equal densities, the lower median is position 1.
    torch.testing.assert_close(p.attend(k=k, counts=counts), p.v[:, :, 1:2].expand(1, 1, 2, 6), rtol=1e-12, atol=0)


def test_settings_can_be_replaced_copied_and_saved() -> None:
    method = ra.MoM(blocks=3, fraction=0.5, draw="subsample", seed=9)
    assert method.draw == "subsample"
    assert repr(method) == "MoM(bandwidth=None, keys='unit', blocks=3, fraction=0.5, draw='subsample', seed=9)"
    again = dataclasses.replace(method, seed=10)
    assert again.draw == "subsample"
    assert not torch.equal(again.draw(20), method.draw(20))
    assert pickle.loads(pickle.dumps(method)) == method
    assert dataclasses.asdict(method)["draw"] == "subsample"
