"""Every method against the oracle (written from the equations, with loops, in NumPy) in every masking situation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from cases import Problem, every_method, masks, problem
from numpy.typing import NDArray

import robust_attention as ra

SIZES = (1, 2, 17, 64, 197)
Array = NDArray[Any]


def psi(loss: ra.Loss) -> Callable[[Array], Array]:
    return getattr(oracle, type(loss).__name__.lower())(loss.a)


def counts(method: ra.MoM | ra.FourierMoM, keys: int) -> Array:
    return method.draw(keys).numpy()


def weighted(p: Problem, visible: Array, solve: Callable[[Array], Array]) -> Array:
    m, groups = p.method, p.q.shape[1] // p.k.shape[1]
    q, k, v = p.q.numpy(), p.k.numpy(), p.v.numpy()
    names = ("bandwidth", "weight_bandwidth", "value_bandwidth")
    widths = {name: getattr(m, name) for name in names}
    if (visible == visible[:, :1]).all():  # heads that share keys share their weights too
        joint, marginal = oracle.robust_weights(k, v, visible[:, ::groups], solve, **widths)
    else:
        k_each, v_each = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
        joint, marginal = oracle.robust_weights(k_each, v_each, visible, solve, **widths)
    return oracle.weighted(q, k, v, visible, joint, marginal, bandwidth=m.bandwidth, own_keys=m.keys == "own")


ORACLES: dict[str, Callable[[Any, Problem, tuple[Array, ...], Array], Array]] = {
    "softmax": lambda m, p, x, see: oracle.softmax(*x, see, bandwidth=m.bandwidth),
    "kde": lambda m, p, x, see: oracle.kde(*x, see, bandwidth=m.bandwidth),
    "rkde": lambda m, p, x, see: weighted(p, see, lambda G: oracle.rkde_weights(G, psi(m.loss), m.sweeps)),
    "spkde": lambda m, p, x, see: weighted(p, see, lambda G: oracle.spkde_weights(G, m.beta)),
    "mom": lambda m, p, x, see: oracle.mom(
        *x, see, counts(m, see.shape[-1]), bandwidth=m.bandwidth, equal_sizes=m.draw == "poisson"
    ),
    "fourier": lambda m, p, x, see: oracle.fourier(*x, see, p.owned["radius"].numpy(), power=m.power),
    "fourier_mom": lambda m, p, x, see: oracle.fourier_mom(
        *x, see, p.owned["radius"].numpy(), counts(m, see.shape[-1]), power=m.power
    ),
    "mgk": lambda m, p, x, see: oracle.mgk(
        *x,
        see,
        p.owned["shift"].numpy(),
        p.owned["log_prior"].numpy(),
        p.owned["component_bandwidth"].numpy(),
    ),
    "performer": lambda m, p, x, see: oracle.performer(*x, see, p.owned["directions"].numpy()),
    "position_scaled": lambda m, p, x, see: oracle.position_scaled(*x, see, p.owned["table"].numpy()),
}


def test_every_method_has_an_oracle() -> None:
    missing = set(ra.methods()) - set(ORACLES)
    assert not missing, f"write an oracle for {missing} in tests/oracle.py and name it in ORACLES"


def relative_error(p: Problem, arguments: dict[str, Any]) -> float:
    B, H, T, _ = p.q.shape
    mask = arguments.get("attn_mask")
    see = oracle.visible_set(
        B, H, T, p.k.shape[2], None if mask is None else mask.numpy(), arguments.get("is_causal", False)
    )
    name = next(n for n, c in ra.methods().items() if type(p.method) is c)
    owned = {n: x.expand(p.q.shape[1], -1, -1) if n == "table" else x for n, x in p.owned.items()}
    p = Problem(p.method, p.q, p.k, p.v, owned)
    wanted = ORACLES[name](p.method, p, (p.q.numpy(), p.k.numpy(), p.v.numpy()), see)
    out = p.attend(**arguments).numpy()
    assert out.shape == wanted.shape
    return float(np.abs(out - wanted).max() / max(np.abs(wanted).max(), 1e-300))


@every_method
@pytest.mark.parametrize("S", SIZES)
@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
def test_method_equals_oracle(method: ra.Method, S: int, grouped: bool) -> None:
    for T in SIZES:
        # The oracle solves one QP for each query: its large cases get one head and the default setting.
        slow = isinstance(method, ra.SPKDE) and S >= 64 and T >= 64
        if slow and (grouped or method != ra.SPKDE()):
            continue
        Hkv = 1 if slow or S * T > 64 * 64 else 2
        p = problem(
            method,
            B=2 if S * T < 64 * 64 else 1,
            H=Hkv * (1 + grouped),
            Hkv=Hkv,
            T=T,
            S=S,
            D=64,
            E=32,
            seed=S + T,
        )
        for kind, arguments in masks(p.q.shape[0], T, S, seed=S * T).items():
            error = relative_error(p, arguments)
            assert error <= 1e-10, f"{kind} T={T} S={S}: {error:.1e}"


@every_method
def test_method_equals_oracle_where_heads_see_different_keys(method: ra.Method) -> None:
    p = problem(method, T=17, S=23, D=16)
    mask = torch.rand(2, 4, 17, 23, generator=torch.Generator().manual_seed(1)) < 0.4
    assert relative_error(p, {"attn_mask": mask}) <= 1e-10
