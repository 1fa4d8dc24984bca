"""Laws that hold for every registered method. A new method is under them as soon as it is registered."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every_method, masks, problem
from torch import Tensor
from torch.autograd import gradcheck

import robust_attention as ra
from robust_attention.ops import _method

KDE_FAMILY = (ra.KDE, ra.RKDE, ra.SPKDE, ra.MoM)
BAD = (float("nan"), float("inf"), -float("inf"), 3e38, -3e38)


@every_method
def test_future_keys_have_no_influence(method: ra.Method) -> None:
    p = problem(method, T=9, S=11)
    out = p.attend(is_causal=True)
    for past in (1, 4, 8):
        seen = past + 2  # the last query is aligned with the last key
        for fill in (100.0, 3e38, float("nan"), float("inf")):
            k, v = p.k.clone(), p.v.clone()
            k[:, :, seen:], v[:, :, seen:] = fill, fill
            assert torch.equal(p.attend(k=k, v=v, is_causal=True)[:, :, :past], out[:, :, :past]), (
                past,
                fill,
            )
        k, v = p.k.clone().requires_grad_(), p.v.clone().requires_grad_()
        early = p.attend(k=k, v=v, is_causal=True)[:, :, :past]
        grad_k, grad_v = torch.autograd.grad(early.square().sum(), (k, v), materialize_grads=True)
        assert not grad_k[:, :, seen:].any()
        assert not grad_v[:, :, seen:].any()
        assert grad_v[:, :, :seen].any()


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_hidden_keys_change_no_bit_and_get_no_gradient(method: ra.Method, dtype: torch.dtype) -> None:
    p = problem(method, T=5, S=12).map(lambda x: x.to(dtype))
    padding = torch.tensor([12, 7])[:, None] > torch.arange(12)
    arbitrary = (torch.rand(2, 4, 5, 12, generator=torch.Generator().manual_seed(0)) < 0.6) & padding[:, None, None]
    for mask in (padding[:, None, None], arbitrary):
        hidden = ~mask.expand(2, 4, 5, 12).any(2).unflatten(1, (2, 2)).any(2)
        assert hidden.any()
        out = p.attend(attn_mask=mask)
        for fill in BAD:
            k = torch.where(hidden[..., None], torch.tensor(fill, dtype=dtype), p.k).requires_grad_()
            v = torch.where(hidden[..., None], torch.tensor(fill, dtype=dtype), p.v).requires_grad_()
            q = p.q.clone().requires_grad_()
            again = p.attend(q=q, k=k, v=v, attn_mask=mask)
            assert torch.equal(again, out), fill
            for grad in torch.autograd.grad(again.float().square().sum(), (q, k, v), materialize_grads=True):
                assert grad.isfinite().all()
                if grad is not None and grad.shape[2] == 12:
                    assert not grad[hidden].any()


@every_method
def test_nan_stays_with_the_queries_that_see_it(method: ra.Method) -> None:
    p = problem(method, T=6, S=6)
    out = p.attend(is_causal=True)
    v = p.v.clone()
    v[0, 0, 3, 1] = torch.nan
    again = p.attend(v=v, is_causal=True)
    sees = torch.zeros(2, 4, 6, dtype=torch.bool)
    sees[0, :2, 3:] = True
    assert again[sees].isnan().all()
    assert torch.equal(again[~sees], out[~sees])


@every_method
@pytest.mark.parametrize("kind", masks(2, 9, 9))
def test_sample_never_depends_on_its_batch(method: ra.Method, kind: str) -> None:
    p = problem(method)
    arguments: dict[str, Any] = masks(2, 9, 9)[kind]
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    out = p.attend(q=q, k=k, v=v, **arguments)
    grads = torch.autograd.grad(out[0].square().sum(), (q, k, v), materialize_grads=True)
    assert grads[2][0].any()
    assert not any(grad[1].any() for grad in grads)
    others = {"q": p.q.clone(), "k": p.k.clone(), "v": p.v.clone()}
    for x in others.values():
        x[1] = 50 * x[1] + 1
    torch.testing.assert_close(p.attend(**others, **arguments)[0], out[0], rtol=0, atol=0)
    alone = {n: x[:1] for n, x in (("q", p.q), ("k", p.k), ("v", p.v))}
    one = {n: a[:1] if isinstance(a, Tensor) else a for n, a in arguments.items()}
    torch.testing.assert_close(p.attend(**alone, **one)[0], out[0], rtol=1e-11, atol=1e-12)


@every_method
def test_permuting_keys_with_values_changes_nothing(method: ra.Method) -> None:
    p = problem(method, T=7, S=13)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(3))
    mask = torch.rand(2, 1, 7, 13, generator=torch.Generator().manual_seed(4)) < 0.7
    changes: dict[str, Any] = {}
    if isinstance(method, ra.BlockMethod):
        p.owned["counts"] = method.draw(13)
    for name in type(method).key_tensors:
        changes[name] = p.owned[name][..., order]
    out = p.attend(attn_mask=mask)
    again = p.attend(k=p.k[:, :, order], v=p.v[:, :, order], attn_mask=mask[..., order], **changes)
    torch.testing.assert_close(again, out, rtol=1e-9, atol=1e-11)


@every_method
def test_query_that_sees_no_key_gets_zero(method: ra.Method) -> None:
    p = problem(method, T=6, S=5)
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    mask = torch.ones(2, 1, 6, 5, dtype=torch.bool)
    mask[0, :, 2] = False
    out = p.attend(q=q, k=k, v=v, attn_mask=mask, is_causal=True)
    assert not out[0, :, 2].any()
    assert not out[:, :, 0].any()  # causal with more queries than keys: the first query is before every key
    assert out[:, :, 3:].any(-1).all()
    grads = torch.autograd.grad(out.square().sum(), (q, k, v), materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0, :, 2].any()
    nothing = p.attend(attn_mask=torch.zeros(1, 1, 1, 5, dtype=torch.bool))
    assert nothing.shape == out.shape
    assert not nothing.any()


@every_method
@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"S": 0}, {"T": 0, "S": 0}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_inputs_give_empty_or_zero_results(method: ra.Method, sizes: dict[str, int], is_causal: bool) -> None:
    p = problem(method, **sizes)
    q = p.q.clone().requires_grad_()
    out = p.attend(q=q, is_causal=is_causal)
    assert out.shape == (*p.q.shape[:3], p.v.shape[3])
    assert not out.any()
    out.sum().backward()
    assert q.grad is not None
    assert not q.grad.any()


@every_method
def test_equal_keys_give_the_mean_value(method: ra.Method) -> None:
    p = problem(method, T=4, S=10)
    p.owned = {n: x[..., :1].expand_as(x) if n in type(method).key_tensors else x for n, x in p.owned.items()}
    k = p.k[:, :, :1].expand_as(p.k)
    v = p.v[:, :, :1] if isinstance(method, ra.SPKDE | ra.RKDE) else p.v  # joint weights look at the values too
    if isinstance(method, ra.BlockMethod):
        p.owned["counts"] = torch.ones(3, 10, dtype=torch.int64)
    v = v.expand_as(p.v)
    wanted = v.mean(2).repeat_interleave(2, 1)[:, :, None].expand(2, 4, 4, 6)
    torch.testing.assert_close(p.attend(k=k, v=v), wanted, rtol=1e-10, atol=1e-12)
    if isinstance(method, ra.RKDE | ra.SPKDE):
        for weights in method.weights(k, v):
            torch.testing.assert_close(weights, torch.full_like(weights, 0.1), rtol=1e-12, atol=0)


@every_method
def test_grouped_heads_equal_repeated_keys(method: ra.Method) -> None:
    p = problem(method)
    owned = {
        n: x.repeat_interleave(2, 0) if n in ("shift", "log_prior", "component_bandwidth") else x
        for n, x in p.owned.items()
    }
    repeated = {"k": p.k.repeat_interleave(2, 1), "v": p.v.repeat_interleave(2, 1)}
    for arguments in masks(2, 9, 9).values():
        again = p.attend(**repeated, **owned, **arguments)
        torch.testing.assert_close(again, p.attend(**arguments), rtol=1e-11, atol=1e-12)


@every_method
def test_masks_combine_and_broadcast(method: ra.Method) -> None:
    p = problem(method, T=7, S=7)
    padding = torch.tensor([7, 4])[:, None] > torch.arange(7)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    both = padding[:, None, None] & causal
    wanted = p.attend(attn_mask=both)
    torch.testing.assert_close(
        p.attend(attn_mask=padding[:, None, None], is_causal=True), wanted, rtol=1e-11, atol=1e-12
    )
    torch.testing.assert_close(p.attend(attn_mask=both.expand(2, 4, 7, 7)), wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(p.attend(attn_mask=both.expand(2, 4, 7, 7).contiguous()), wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(p.attend(attn_mask=causal), p.attend(is_causal=True), rtol=1e-11, atol=1e-12)
    everything = torch.ones(7, dtype=torch.bool)
    torch.testing.assert_close(p.attend(attn_mask=everything), p.attend(), rtol=1e-11, atol=1e-12)


@every_method
def test_non_contiguous_inputs_change_nothing(method: ra.Method) -> None:
    p = problem(method)
    loose = p.map(lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x)
    torch.testing.assert_close(loose.attend(), p.attend(), rtol=1e-12, atol=1e-13)


@every_method
@pytest.mark.parametrize("kind", ["full", "arbitrary", "causal"])
def test_gradcheck(method: ra.Method, kind: str) -> None:
    p = problem(method, B=1, H=2, Hkv=1, T=3, S=5, D=3, E=2, seed=5)
    mask = torch.rand(1, 2, 3, 5, generator=torch.Generator().manual_seed(6)) < 0.7
    arguments: dict[str, Any] = {"full": {}, "arbitrary": {"attn_mask": mask}, "causal": {"is_causal": True}}[kind]
    names = ["q", "k", "v", *p.owned]
    inputs = [x.clone().requires_grad_() for x in (p.q, p.k, p.v, *p.owned.values())]

    def attend(*tensors: Tensor) -> Tensor:
        return p.attend(**dict(zip(names, tensors, strict=True)), **arguments)

    assert gradcheck(attend, inputs, fast_mode=False)


@every_method
def test_global_random_state_is_left_alone(method: ra.Method) -> None:
    p = problem(method)
    before = torch.get_rng_state()
    first = p.attend()
    torch.manual_seed(123)
    assert torch.equal(p.attend(), first)
    torch.set_rng_state(before)
    p.attend()
    assert torch.equal(torch.get_rng_state(), before)


@every_method
def test_settings_are_frozen_hashable_and_shown(method: ra.Method) -> None:
    assert hash(method) == hash(type(method)(**_fields(method)))
    assert method == type(method)(**_fields(method))
    with pytest.raises(AttributeError):
        method.anything = 1  # type: ignore[attr-defined]
    assert repr(method).startswith(type(method).__name__ + "(")
    for text in (type(method).equation, type(method).summary, type(method).formula):
        assert text


def _fields(method: ra.Method) -> dict[str, Any]:
    import dataclasses

    return {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}


def test_two_methods_cannot_share_a_name() -> None:
    with pytest.raises(ValueError, match="method names must be unique, but 'kde' is KDE; choose another name"):
        ra.register("kde")(ra.Softmax)


def test_registered_method_is_listed_and_comes_under_the_laws() -> None:
    assert list(ra.methods()) == sorted(ra.methods())
    assert {p.values[0].__class__ for p in every_method.args[1]} == set(ra.methods().values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", [ra.Huber, ra.Hampel, ra.Welsch, ra.Tukey])
def test_rkde_with_a_huge_threshold_is_kde(loss: type[ra.Loss]) -> None:
    for arguments in masks(2, 9, 9).values():
        p, plain = problem(ra.RKDE(loss=loss(1e8), sweeps=2)), problem(ra.KDE())
        torch.testing.assert_close(p.attend(**arguments), plain.attend(**arguments), rtol=1e-12, atol=1e-13)


def test_spkde_without_scaling_is_uniform() -> None:
    p = problem(ra.SPKDE(beta=1.0))
    for arguments in masks(2, 9, 9).values():
        torch.testing.assert_close(p.attend(**arguments), problem(ra.KDE()).attend(**arguments), rtol=1e-12, atol=1e-13)
        for weights in p.method.weights(p.k, p.v, **arguments):
            positive = weights[weights > 0]
            count = (weights > 0).sum(-1, keepdim=True).double().expand_as(weights)[weights > 0]
            torch.testing.assert_close(positive, 1 / count, rtol=1e-14, atol=0)


@pytest.mark.parametrize("draw", ["subsample", "partition"])
def test_mom_with_one_block_of_every_key_is_kde(draw: str) -> None:
    for arguments in masks(2, 9, 9).values():
        p = problem(ra.MoM(blocks=1, fraction=1.0, draw=draw))
        torch.testing.assert_close(p.attend(**arguments), problem(ra.KDE()).attend(**arguments), rtol=1e-12, atol=1e-13)
        four = problem(ra.FourierMoM(blocks=1, fraction=1.0, draw=draw))
        torch.testing.assert_close(
            four.attend(**arguments), problem(ra.Fourier()).attend(**arguments), rtol=1e-12, atol=1e-13
        )


def test_performer_approaches_softmax_as_features_grow() -> None:
    g = torch.Generator().manual_seed(0)
    p = problem(ra.Performer(), D=8).map(lambda x: x / 2)
    softmax = problem(ra.Softmax(), D=8).map(lambda x: x / 2).attend()
    errors = []
    for features in (64, 1024, 16384):
        directions = torch.randn(features, 8, generator=g, dtype=torch.float64)
        errors.append(float((p.attend(directions=directions) - softmax).abs().max()))
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.02


def test_mgk_of_one_unshifted_component_on_unit_keys_is_kde() -> None:
    p = problem(ra.MGK(components=1))
    k = p.k / p.k.norm(dim=-1, keepdim=True)
    out = p.attend(k=k, shift=torch.zeros(1, 1, 1, 1), component_bandwidth=None)
    torch.testing.assert_close(out, problem(ra.KDE()).attend(k=k), rtol=1e-12, atol=1e-13)


def test_position_scaled_with_an_open_table_is_softmax() -> None:
    p = problem(ra.PositionScaled())
    torch.testing.assert_close(p.attend(table=torch.full((4, 9, 9), 60.0)), problem(ra.Softmax()).attend())


@every_method
def test_huge_future_values_leave_the_gradients_of_the_past_alone(method: ra.Method) -> None:
    p = problem(method).map(Tensor.float)
    both = []
    for fill in (1.0, 3e38):
        q, k, v = (x.clone() for x in (p.q, p.k, p.v))
        v[:, :, -1] = fill
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = p.attend(q=q, k=k, v=v, is_causal=True)[:, :, :5]
        both.append(torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True))
    if isinstance(method, ra.Performer):  # its running sums pass through the huge value
        return
    for plain, huge in zip(*both, strict=True):
        torch.testing.assert_close(huge, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [ra.Fourier(), ra.FourierMoM()], ids=repr)
def test_fourier_gradients_stay_finite_beside_a_distant_key(method: ra.Method) -> None:
    p = problem(method).map(Tensor.float)
    k = p.k.clone()
    k[:, :, 3] = 1e6
    leaves = [x.clone().requires_grad_() for x in (p.q, k, p.v)]
    out = p.attend(q=leaves[0], k=leaves[1], v=leaves[2])
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


def test_the_example_of_contributing_comes_under_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_method, "_registry", dict(_method._registry))
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    exec(compile(code, "CONTRIBUTING.md", "exec"), {"__name__": "example"})
    mean = ra.methods()["mean"]()
    test_future_keys_have_no_influence(mean)
    test_hidden_keys_change_no_bit_and_get_no_gradient(mean, torch.float32)
    test_nan_stays_with_the_queries_that_see_it(mean)
    for kind in masks(2, 9, 9):
        test_sample_never_depends_on_its_batch(mean, kind)
    test_gradcheck(mean, "causal")
    test_permuting_keys_with_values_changes_nothing(mean)
    test_query_that_sees_no_key_gets_zero(mean)
    test_equal_keys_give_the_mean_value(mean)
    test_grouped_heads_equal_repeated_keys(mean)
    test_masks_combine_and_broadcast(mean)
