"""A slow float64 NumPy oracle for every attention method, written from the equations and from nothing else.

It imports nothing of the package, so the two cannot share a mistake. Shapes are the package's: query
`q [B, H, T, D]`, key `k [B, Hkv, S, D]`, value `v [B, Hkv, S, E]`, output `[B, H, T, E]`; `visible` is
boolean `[B, H, T, S]`, True where query i may look at key j; the True entries of row i are the set `V(i)`.
Query head h uses key head `h // (H // Hkv)`. A bandwidth is a sigma, not its square. A row that sees no key,
or whose every visible key has weight exactly 0, gives 0.

A zero key stays zero, and its kernel is then that of eq. 3 at the origin, `exp(-|q|^2 / (2 sigma^2))`: among
unit keys, `exp(1 / (2 sigma^2))` times what the softmax form of eq. 3 would give it, which needs `|k̂| = 1`.
"""

from collections.abc import Callable

import numpy as np
import quadprog

Array = np.ndarray
Psi = Callable[[Array], Array]


# --------------------------------------------------------------------------------------- shared pieces


def visible_set(B: int, H: int, T: int, S: int, attn_mask: Array | None = None, is_causal: bool = False) -> Array:
    """Where query i may look at key j: `attn_mask[i, j]`, and `j <= i + S - T` if causal; `[B, H, T, S]`."""
    visible = np.ones((B, H, T, S), dtype=bool)
    if attn_mask is not None:
        visible &= np.asarray(attn_mask, dtype=bool)
    if is_causal:
        i, j = np.arange(T)[:, None], np.arange(S)[None, :]
        visible &= j <= i + S - T
    return visible


def per_query_head(x: Array, H: int) -> Array:
    """Repeat the heads of `[B, Hkv, ...]` so that query head h finds its own at h: `h // (H // Hkv)`."""
    group = H // x.shape[1]
    return x[:, [h // group for h in range(H)]]


def normalise_keys(k: Array) -> Array:
    """`k̂ = k / |k|`, a zero key staying zero; divided by its largest entry first, lest a square overflow."""
    largest = np.abs(k).max(axis=-1, keepdims=True)
    scaled = k / np.where(largest > 0, largest, 1.0)
    norm = np.sqrt((scaled**2).sum(axis=-1, keepdims=True))
    return scaled / np.where(norm > 0, norm, 1.0)


def default_bandwidth(D: int, *bandwidths: float | None) -> float:
    """The first bandwidth that is given, else `sigma = sqrt(sqrt(D))`, that is `sigma^2 = sqrt(D)`."""
    return next((sigma for sigma in bandwidths if sigma is not None), D**0.25)


def squared_distance(x: Array, y: Array) -> Array:
    """`|x_i - y_j|^2 = sum_d (x_id - y_jd)^2` of `[..., T, D]` and `[..., S, D]`, from the differences."""
    total = np.zeros((*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2]))
    with np.errstate(over="ignore"):  # points further than 1e154 apart: infinity, and a Gaussian of 0
        for d in range(x.shape[-1]):
            total += (x[..., :, None, d] - y[..., None, :, d]) ** 2
    return total


def log_or_minus_inf(x: Array) -> Array:
    """`log x`, with `log 0 = -inf`."""
    with np.errstate(divide="ignore"):
        return np.log(x)


def finite_max(x: Array, axis: int = -1) -> Array:
    """The maximum along an axis, kept as an axis of length 1; 0 where every entry is `-inf`."""
    top = x.max(axis=axis, keepdims=True, initial=-np.inf)
    return np.where(np.isneginf(top), 0.0, top)


def log_sum_exp(x: Array, axis: int) -> Array:
    """`log sum exp(x)` along an axis; `-inf` where every entry is."""
    top = finite_max(x, axis)
    return np.squeeze(top, axis) + log_or_minus_inf(np.exp(x - top).sum(axis=axis))


def average(log_weight: Array, visible: Array, v: Array) -> Array:
    """`h_i = sum_{j in V(i)} w_ij v_j / sum_{j in V(i)} w_ij` from `log w [B, H, T, S]`; 0 for 0 / 0."""
    v = per_query_head(v, log_weight.shape[1])
    masked = np.where(visible, log_weight, -np.inf)
    weight = np.exp(masked - finite_max(masked))
    total = weight.sum(axis=-1, keepdims=True)
    return weight @ v / np.where(total > 0, total, 1.0)


def log_kernel(q: Array, k: Array, bandwidth: float | None) -> Array:
    """`log kappa(q_i, k̂_j) + |q_i|^2 / (2 sigma^2) = (q_i.k̂_j - |k̂_j|^2 / 2) / sigma^2`, `[B, H, T, S]`.

    The term left out is the same for every key of a query: it cancels in every ratio and moves no median, and
    leaving it out keeps the digits of a long query.
    """
    sigma = default_bandwidth(q.shape[-1], bandwidth)
    khat = per_query_head(normalise_keys(k), q.shape[1])
    inner = q @ np.swapaxes(khat, -1, -2)
    return (inner - (khat**2).sum(axis=-1)[..., None, :] / 2) / sigma**2


# ------------------------------------------------------------------------------------- softmax and KDE


def softmax(q: Array, k: Array, v: Array, visible: Array, bandwidth: float | None = None) -> Array:
    """`h_i = sum_{j in V(i)} softmax_j(q_i.k_j / sigma^2) v_j`, `sigma^2 = sqrt(D)` unless sigma is given."""
    sigma = default_bandwidth(q.shape[-1], bandwidth)
    logit = q @ np.swapaxes(per_query_head(k, q.shape[1]), -1, -2) / sigma**2
    return average(logit, visible, v)


def kde(q: Array, k: Array, v: Array, visible: Array, bandwidth: float | None = None) -> Array:
    """`h_i = sum_{j in V(i)} kappa(q_i, k̂_j) v_j / sum_{j in V(i)} kappa(q_i, k̂_j)` (eq. 3)."""
    return average(log_kernel(q, k, bandwidth), visible, v)


# -------------------------------------------------------------------------------------- robust weights


def gram(x: Array, bandwidth: float) -> Array:
    """`G_mj = exp(-|x_m - x_j|^2 / (2 sigma^2))` of the points `x [..., N, D]`."""
    return np.exp(-squared_distance(x, x) / (2 * bandwidth**2))


def huber(a: float) -> Psi:
    """`psi(x) = 1` up to a, then `a / x`."""
    return lambda x: a / np.maximum(x, a)


def hampel(a: float) -> Psi:
    """`psi(x) = 1` up to a; `a / x` up to `b = 2a`; `a (c - x) / ((c - b) x)` up to `c = 3a`; then 0."""
    b, c = 2 * a, 3 * a

    def psi(x: Array) -> Array:
        x_safe = np.maximum(x, a)  # the two middle pieces divide by x, which is at least a there
        pieces = [np.ones_like(x), a / x_safe, a * (c - x) / ((c - b) * x_safe)]
        return np.select([x <= a, x <= b, x < c], pieces, 0.0)

    return psi


def welsch(a: float) -> Psi:
    """`psi(x) = exp(-(x / a)^2)`."""
    return lambda x: np.exp(-((x / a) ** 2))


def tukey(a: float) -> Psi:
    """`psi(x) = (1 - (x / a)^2)^2` up to a, then 0."""
    return lambda x: np.where(x <= a, (1 - (x / a) ** 2) ** 2, 0.0)


def rkde_weights(points_gram: Array, psi: Psi, sweeps: int = 1) -> Array:
    """KIRWLS over one visible set, from uniform weights; uniform again if every psi is 0.

    `r_j = sum_m w_m G_mj`, `c = sum_m w_m r_m`, `d_j = sqrt(max(0, 1 - 2 r_j + c))`,
    `w_j <- psi(d_j) / sum_m psi(d_m)`.
    """
    n = len(points_gram)
    w = np.full(n, 1 / n)
    for _ in range(sweeps):
        r = w @ points_gram
        c = w @ r
        d = np.sqrt(np.maximum(0.0, 1 - 2 * r + c))
        weight = psi(d)
        w = weight / weight.sum() if weight.sum() > 0 else np.full(n, 1 / n)
    return w


def spkde_gradient(gram: Array, beta: float, w: Array) -> Array:
    """`g = G w - q`, `q = (beta / n) G 1`: half the gradient of `w'Gw - 2 q'w`."""
    return gram @ (w - beta / len(gram))


def fw_gap(gram: Array, beta: float, w: Array) -> float:
    """Frank-Wolfe gap `g.w - min_j g_j`, `g = G w - q`: on the simplex >= 0, and 0 only at the optimum."""
    g = spkde_gradient(gram, beta, w)
    return float(g @ w - g.min())


def spkde_weights(gram: Array, beta: float) -> Array:
    """`argmin_w w'Gw - 2 q'w`, `q = (beta / n) G 1`, over the simplex of one visible set.

    quadprog finds the support; the optimality conditions `(G w - q)_j = lambda` on it and `sum w = 1` are
    then solved again as one linear system. Where G is nearly singular, quadprog also gets a ridge (below).
    Of all these answers the one with the smallest gap is returned. Where G is singular (equal points) the
    weights are not unique, only the objective is.
    """
    n = len(gram)
    if n == 1:
        return np.ones(1)
    answers: list[Array] = []
    for ridge in (0.0, 1e-12, 1e-11, 1e-10, 1e-9):
        try:
            w, support = simplex_qp(gram, beta, ridge)
        except ValueError:  # quadprog: not positive definite in floating point, or no feasible step found
            continue
        refined = solve_on_support(gram, beta, support)
        answers += [w, refined] if (refined >= 0).all() else [w]
        if min(fw_gap(gram, beta, answer) for answer in answers) < 1e-14:
            break
    return min(answers, key=lambda answer: fw_gap(gram, beta, answer))


def simplex_qp(gram: Array, beta: float, ridge: float) -> tuple[Array, Array]:
    """quadprog's answer on the simplex and its support.

    With a ridge, three proximal steps `w <- argmin_u u'Gu - 2 q'u + ridge |u - w|^2`, whose fixed point is
    the optimum without one.
    """
    n = len(gram)
    q = beta / n * gram.sum(axis=1)
    constraints = np.column_stack([np.ones(n), np.eye(n)])  # sum w = 1 (an equality), then w >= 0
    bounds = np.concatenate([[1.0], np.zeros(n)])
    w = np.full(n, 1 / n)
    for _ in range(3 if ridge > 0 else 1):
        solution = quadprog.solve_qp(gram + ridge * np.eye(n), q + ridge * w, constraints, bounds, 1)
        w = np.maximum(solution[0], 0.0)
        w /= w.sum()
    support = np.ones(n, dtype=bool)
    support[[c - 2 for c in solution[5] if c >= 2]] = False  # constraint j + 2 is w_j >= 0; 1 is the sum
    return w, support


def solve_on_support(gram: Array, beta: float, support: Array) -> Array:
    """Solve `G_SS w_S - lambda 1 = q_S`, `1'w_S = 1` for the weights on a support S; 0 off it."""
    n, size = len(gram), int(support.sum())
    system = np.ones((size + 1, size + 1))
    system[:size, :size] = gram[np.ix_(support, support)]
    system[size, size] = 0.0
    right = np.append(beta / n * gram[support].sum(axis=1), 1.0)
    try:
        solution = np.linalg.solve(system, right)
    except np.linalg.LinAlgError:  # equal points: their weights are not unique, take the shortest
        solution = np.linalg.lstsq(system, right, rcond=None)[0]
    w = np.zeros(n)
    w[support] = solution[:size] / solution[:size].sum()
    return w


def robust_weights(
    k: Array,
    v: Array,
    visible_BKTS: Array,
    solve: Callable[[Array], Array],
    bandwidth: float | None = None,
    weight_bandwidth: float | None = None,
    value_bandwidth: float | None = None,
) -> tuple[Array, Array]:
    """Joint and marginal weights of every query, `[B, Hkv, T, S]`, each solved on that query's own `V(i)`.

    Marginal points are `k̂_j`; joint points `[v_j; k̂_j]`, v raw, so that the joint Gram is the marginal one
    times a Gaussian of the values. `solve` turns a Gram into weights. Hidden keys, and empty sets, weigh 0.
    """
    B, Hkv, T, S = visible_BKTS.shape
    key_sigma = default_bandwidth(k.shape[-1], weight_bandwidth, bandwidth)
    value_sigma = default_bandwidth(k.shape[-1], value_bandwidth, weight_bandwidth, bandwidth)
    khat = normalise_keys(k)
    joint, marginal = np.zeros((B, Hkv, T, S)), np.zeros((B, Hkv, T, S))
    for b in range(B):
        for h in range(Hkv):
            marginal_gram = gram(khat[b, h], key_sigma)
            joint_gram = marginal_gram * gram(v[b, h], value_sigma)
            solved: dict[bytes, tuple[Array, Array]] = {}  # queries that see the same keys share their weights
            for t in range(T):
                seen = visible_BKTS[b, h, t]
                if not seen.any():
                    continue
                if seen.tobytes() not in solved:
                    square = np.ix_(seen, seen)
                    solved[seen.tobytes()] = solve(joint_gram[square]), solve(marginal_gram[square])
                joint[b, h, t, seen], marginal[b, h, t, seen] = solved[seen.tobytes()]
    return joint, marginal


def weighted(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    joint: Array,
    marginal: Array,
    bandwidth: float | None = None,
    own_keys: bool = False,
) -> Array:
    """`h_i = sum_j wJ_ij kappa(q_i, k̂_j) v_j / sum_j wM_ij kappa(q_i, k̂_j)`, j over `V(i)` (eq. 11).

    Weights are `[B, Hkv, T, S]`, or `[B, H, T, S]` where the heads of a group see different keys. With `own_keys`
    the kernel is `exp(q_i.k_j / sigma^2)` of the keys as they are.
    """
    H = q.shape[1]
    logit = log_kernel(q, k, bandwidth)
    if own_keys:
        sigma = default_bandwidth(q.shape[-1], bandwidth)
        logit = q @ np.swapaxes(per_query_head(k, H), -1, -2) / sigma**2
    log_kappa = np.where(visible, logit, -np.inf)
    log_above = log_kappa + log_or_minus_inf(per_query_head(joint, H))
    log_below = log_kappa + log_or_minus_inf(per_query_head(marginal, H))
    top = finite_max(log_below)
    above = np.exp(log_above - top) @ per_query_head(v, H)
    below = np.exp(log_below - top).sum(axis=-1, keepdims=True)
    return above / np.where(below > 0, below, 1.0)


# ------------------------------------------------------------------------------------- median of means


def median_block(log_kappa: Array, visible: Array, counts: Array, equal_sizes: bool = False) -> Array:
    """The block `l*` of each query, `[B, H, T]`; -1 where no block holds a visible key.

    `p_l(i) = (1 / |I_l|) sum_{j in I_l and V(i)} kappa(q_i, k̂_j)`, key j counted `counts[l, j]` times; `l*`
    is the block of the lower median of p over the blocks that see at least one key, ties to the lower index.
    With `equal_sizes`, |I_l| is the same number for all (a Poisson draw's expected size).
    """
    log_p, sees = [], []
    for count in np.asarray(counts, dtype=np.float64):
        member = visible & (count > 0)
        log_member = np.where(member, log_kappa, -np.inf)
        top = finite_max(log_member)
        size = 1.0 if equal_sizes else max(count.sum(), 1.0)
        mean = (count * np.exp(log_member - top)).sum(axis=-1) / size
        log_p.append(top[..., 0] + log_or_minus_inf(mean))
        sees.append(member.any(axis=-1))
    eligible = np.stack(sees, axis=-1)
    order = np.argsort(np.where(eligible, np.stack(log_p, axis=-1), np.inf), axis=-1, kind="stable")
    number = eligible.sum(axis=-1)
    rank = np.maximum(number - 1, 0) // 2
    block = np.take_along_axis(order, rank[..., None], axis=-1)[..., 0]
    return np.where(number > 0, block, -1)


def average_over_median_block(
    log_kappa: Array, visible: Array, v: Array, counts: Array, equal_sizes: bool = False
) -> Array:
    """`h_i = sum_{j in I_l* and V(i)} kappa_ij v_j / sum_{j in I_l* and V(i)} kappa_ij` (eq. 16).

    Where no block sees a key, over the whole of `V(i)` instead.
    """
    block = median_block(log_kappa, visible, counts, equal_sizes)
    times = np.asarray(counts, dtype=np.float64)[block]
    times[block < 0] = 1.0
    return average(log_kappa + log_or_minus_inf(times), visible, v)


def mom(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    counts: Array,
    bandwidth: float | None = None,
    equal_sizes: bool = False,
) -> Array:
    """Eq. 16 with the Gaussian kernel: kernel attention over each query's median block of `counts [M, S]`."""
    return average_over_median_block(log_kernel(q, k, bandwidth), visible, v, counts, equal_sizes)


# --------------------------------------------------------------------------------------------- Fourier


def fourier_logkernel(q: Array, k: Array, radius: float | Array, power: int = 4) -> Array:
    """`log kappa_F(q_i, k_j) = sum_d power log |sin(x_d) / x_d|`, `x_d = R_d (q_id - k_jd)`.

    Keys are not normalised. `sin(x) / x` is 1 at x = 0; the kernel is 0, its logarithm `-inf`, where a sine
    is 0. Even powers only.
    """
    if power % 2:
        raise ValueError(f"power must be even for the kernel to be non-negative, got {power}")
    radius_D = np.broadcast_to(np.asarray(radius, dtype=np.float64), q.shape[-1:])
    k = per_query_head(k, q.shape[1])
    total = np.zeros(q.shape[:-1] + k.shape[-2:-1])
    for d, radius_d in enumerate(radius_D):
        x = radius_d * (q[..., :, None, d] - k[..., None, :, d])
        x_safe = np.where(x == 0, 1.0, x)
        ratio = np.where(x == 0, 1.0, np.sin(x_safe) / x_safe)
        total += power * log_or_minus_inf(np.abs(ratio))
    return total


def fourier(q: Array, k: Array, v: Array, visible: Array, radius: float | Array, power: int = 4) -> Array:
    """`h_i = sum_{j in V(i)} kappa_F(q_i, k_j) v_j / sum_{j in V(i)} kappa_F(q_i, k_j)`."""
    return average(fourier_logkernel(q, k, radius, power), visible, v)


def fourier_mom(
    q: Array, k: Array, v: Array, visible: Array, radius: float | Array, counts: Array, power: int = 4
) -> Array:
    """Eq. 16 with the Fourier kernel in place of the Gaussian, for the median and for the average."""
    return average_over_median_block(fourier_logkernel(q, k, radius, power), visible, v, counts)


# ------------------------------------------------------------------------------------------- baselines


def mgk(q: Array, k: Array, v: Array, visible: Array, shift: Array, log_prior: Array, bandwidth: Array) -> Array:
    """`h_i = sum_j sum_r pi_r kappa_r(q_i, k_jr) v_j / sum_j sum_r pi_r kappa_r(q_i, k_jr)`, j over `V(i)`.

    `k_jr = k_j + shift_jr` with shift broadcast to `[B, Hkv, M, S, D]`; `pi = softmax(log_prior [Hkv, M])`
    over r; `kappa_r(x, y) = exp(-|x - y|^2 / (2 sigma_r^2))` with sigma `[Hkv, M]`; keys not normalised.
    """
    H, (Hkv, M) = q.shape[1], log_prior.shape
    log_pi = log_prior - log_sum_exp(log_prior, axis=-1)[:, None]
    sigma = np.broadcast_to(bandwidth, (Hkv, M))
    shift = np.broadcast_to(shift, (k.shape[0], Hkv, M, *k.shape[-2:]))
    group = H // Hkv
    log_weight = np.empty(visible.shape)
    for h in range(H):
        own = h // group
        component = [
            log_pi[own, r] - squared_distance(q[:, h], k[:, own] + shift[:, own, r]) / (2 * sigma[own, r] ** 2)
            for r in range(M)
        ]
        log_weight[:, h] = log_sum_exp(np.stack(component), axis=0)
    return average(log_weight, visible, v)


def performer(q: Array, k: Array, v: Array, visible: Array, features: Array) -> Array:
    """`h_i = sum_{j in V(i)} phi(q_i).phi(k_j) v_j / sum_{j in V(i)} phi(q_i).phi(k_j)`.

    `phi(x) = exp(Omega x' - |x'|^2 / 2) / sqrt(m)`, `x' = x / D^(1/4)`, `Omega = features [m, D]`; computed
    in logarithms.
    """
    B, H, _, D = q.shape

    def log_phi(x: Array) -> Array:
        x = x / D**0.25
        return x @ features.T - (x**2).sum(axis=-1, keepdims=True) / 2 - np.log(len(features)) / 2

    log_phi_q, log_phi_k = log_phi(q), per_query_head(log_phi(k), H)
    log_weight = np.empty(visible.shape)
    for b in range(B):
        for h in range(H):
            log_weight[b, h] = log_sum_exp(log_phi_q[b, h][:, None] + log_phi_k[b, h][None, :], axis=-1)
    return average(log_weight, visible, v)


def position_scaled(q: Array, k: Array, v: Array, visible: Array, table: Array) -> Array:
    """`h_i = sum_{j in V(i)} softmax_j((q_i.k_j / sqrt(D)) sigmoid(table_ij)) v_j`, table `[H, T, S]`."""
    logit = q @ np.swapaxes(per_query_head(k, q.shape[1]), -1, -2) / np.sqrt(q.shape[-1])
    sigmoid = np.exp(-np.logaddexp(0.0, -table))
    return average(logit * sigmoid, visible, v)
