"""Modules: checkpoints of what they replace load, softmax in them changes nothing, laws of masks and draws."""

import copy
from typing import Any

import pytest
import torch
from cases import METHODS
from torch import Tensor, nn

import robust_attention as ra

every_method = pytest.mark.parametrize("method", METHODS)
TOKENS, WIDTH, HEADS = 6, 16, 2


def x_of(batch: int = 3, tokens: int = TOKENS, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(0))


def modules(method: ra.Method) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "Attention": ra.nn.Attention(WIDTH, HEADS, method=method, max_len=TOKENS),
        "MultiheadAttention": ra.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, method=method, max_len=TOKENS),
        "TransformerEncoderLayer": ra.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 32, 0.0, batch_first=True, method=method, max_len=TOKENS
        ),
    }


def run(module: nn.Module, x: Tensor, padding: Tensor | None = None) -> Tensor:
    if isinstance(module, nn.MultiheadAttention):
        return module(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    if isinstance(module, nn.TransformerEncoderLayer):
        return module(x, src_key_padding_mask=padding)
    return module(x, None if padding is None else ~padding[:, None, None])


@every_method
@pytest.mark.parametrize("kind", ["Attention", "MultiheadAttention", "TransformerEncoderLayer"])
def test_module_trains_saves_and_loads(method: ra.Method, kind: str) -> None:
    module, x = modules(method)[kind], x_of()
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = (run(module, x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    module.eval()
    again = modules(method)[kind].eval()
    again.load_state_dict(module.state_dict())
    assert torch.equal(run(again, x), run(module, x))


@every_method
def test_padding_has_no_influence(method: ra.Method) -> None:
    padding = torch.zeros(3, TOKENS, dtype=torch.bool)
    padding[1, 4:] = True
    for module in modules(method).values():
        module.eval()
        x = x_of()
        other = x.clone()
        other[1, 4:] = 1e4
        assert torch.equal(run(module, x, padding)[1, :4], run(module, other, padding)[1, :4])


@pytest.mark.parametrize("method", [ra.Softmax(), ra.KDE(), ra.RKDE(), ra.SPKDE(), ra.MoM()], ids=repr)
def test_these_methods_add_no_entry_to_the_state_dict(method: ra.Method) -> None:
    plain = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
    for name, module in modules(method).items():
        if name == "TransformerEncoderLayer":
            assert module.state_dict().keys() == plain.state_dict().keys()
        assert sum(p.numel() for p in module.parameters()) == sum(
            p.numel() for p in modules(ra.Softmax())[name].parameters()
        )
    assert ra.nn.Attention(WIDTH, HEADS, method=method).state_dict().keys() == {
        "qkv.weight",
        "qkv.bias",
        "proj.weight",
        "proj.bias",
    }


TORCH_SETTINGS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 12, "vdim": 10},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
]


@pytest.mark.parametrize("settings", TORCH_SETTINGS, ids=repr)
def test_softmax_inside_equals_torch(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **settings)
    mine = ra.nn.MultiheadAttention(WIDTH, HEADS, **settings)
    mine.load_state_dict(theirs.state_dict())
    first = settings.get("batch_first", False)
    q, k, v = torch.randn(3, 5, WIDTH), torch.randn(3, 7, settings.get("kdim", WIDTH)), None
    v = torch.randn(3, 7, settings.get("vdim", WIDTH))
    if not first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    square = torch.ones(5, 7, dtype=torch.bool).triu(3)
    heads = (torch.rand(3 * HEADS, 5, 7) < 0.3).index_fill_(2, torch.tensor([0]), False)
    for masks in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": square},
        {"attn_mask": heads},
        {"attn_mask": torch.zeros(5, 7).masked_fill(square, -torch.inf), "key_padding_mask": padding.clone()},
    ):
        if masks.get("attn_mask") is not None and masks["attn_mask"].is_floating_point():
            masks["key_padding_mask"] = torch.zeros(3, 7).masked_fill(padding, -torch.inf)
        for average in (True, False):
            out, weights = mine(q, k, v, average_attn_weights=average, **masks)
            wanted, their_weights = theirs(q, k, v, average_attn_weights=average, **masks)
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(weights, their_weights, rtol=1e-4, atol=1e-5)
    if not settings:
        out, weights = mine(q[:, 0], k[:, 0], v[:, 0])
        wanted, their_weights = theirs(q[:, 0], k[:, 0], v[:, 0])
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights, their_weights, rtol=1e-4, atol=1e-5)


@every_method
def test_returned_weights_rebuild_the_output(method: ra.Method) -> None:
    module = modules(method)["MultiheadAttention"].eval()
    x = x_of()
    out, weights = module(x, x, x, average_attn_weights=False)
    v = module._heads(module._project(x, x, x)[2])
    rebuilt = module.out_proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(rebuilt, out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_encoder_layer_with_softmax_equals_torch(norm_first: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    settings = {"batch_first": batch_first, "norm_first": norm_first}
    theirs = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, **settings)
    mine = ra.nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, **settings)
    mine.load_state_dict(theirs.state_dict())
    x = x_of() if batch_first else x_of().transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    padding = torch.zeros(3, TOKENS, dtype=torch.bool)
    padding[2, 3:] = True
    for training in (True, False):
        theirs.train(training), mine.train(training)
        for arguments in ({}, {"src_key_padding_mask": padding}, {"src_mask": causal, "is_causal": True}):
            with torch.set_grad_enabled(training):
                torch.testing.assert_close(mine(x, **arguments), theirs(x, **arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_no_fused_path_bypasses_the_method() -> None:
    torch.manual_seed(0)
    layer = ra.nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True, method=ra.RKDE()).eval()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(3, TOKENS, dtype=torch.bool)
    padding[1, 4:] = True
    x = x_of()
    with torch.no_grad():
        evaluated = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(evaluated, encoder(x, src_key_padding_mask=padding))
    softmax = copy.deepcopy(encoder)
    for part in softmax.modules():
        if isinstance(part, ra.nn.Attend):
            part.method = ra.Softmax()
    assert not torch.allclose(softmax(x, src_key_padding_mask=padding), evaluated, atol=1e-4)


def test_draws_are_fresh_in_training_and_by_choice_in_evaluation() -> None:
    torch.manual_seed(0)
    x = x_of(tokens=40)
    for eval_draw in ("fixed", "fresh"):
        module = ra.nn.Attention(WIDTH, HEADS, method=ra.MoM(seed=3), eval_draw=eval_draw)
        state = torch.get_rng_state()
        assert not torch.equal(module(x), module(x))
        module.eval()
        assert torch.equal(module(x), module(x)) == (eval_draw == "fixed")
        assert torch.equal(torch.get_rng_state(), state)
        assert int(module.attend.num_draws) == (2 if eval_draw == "fixed" else 4)
    first, second = (ra.nn.Attend(ra.MoM(seed=3), kv_heads=1, width=4) for _ in range(2))
    drawn = [m.tensors(40, 40, torch.device("cpu"))["counts"] for m in (first, second)]
    assert torch.equal(*drawn)
    second.num_draws += 5
    later = [first.tensors(40, 40, torch.device("cpu"))["counts"] for _ in range(6)][-1]
    assert torch.equal(second.tensors(40, 40, torch.device("cpu"))["counts"], later)


def test_modules_fail_clearly() -> None:
    with pytest.raises(ValueError, match=r"num_heads must divide embed_dim = 16, got 3; choose"):
        ra.nn.Attention(16, 3, method=ra.KDE())
    with pytest.raises(ValueError, match=r"max_len must be given for PositionScaled, .* got None; pass"):
        ra.nn.Attention(16, 2, method=ra.PositionScaled())
    with pytest.raises(ValueError, match=r"must not be longer than max_len = 4, got 6 keys"):
        ra.nn.Attention(16, 2, method=ra.PositionScaled(), max_len=4)(x_of())
    with pytest.raises(ValueError, match=r"dropout must be 0, got 0.1; put"):
        ra.nn.MultiheadAttention(16, 2, 0.1)
    x = x_of()
    with pytest.raises(ValueError, match=r"attn_mask must be boolean, or additive with 0 and -inf only"):
        ra.nn.MultiheadAttention(16, 2, batch_first=True)(x, x, x, attn_mask=torch.full((6, 6), 0.5))
    with pytest.raises(ValueError, match=r"method must be one of robust_attention's, got 'rkde'; pass"):
        ra.nn.Attend("rkde", kv_heads=1, width=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"eval_draw must be one of 'fixed', 'fresh', got 'none'; choose"):
        ra.nn.Attend(ra.MoM(), kv_heads=1, width=4, eval_draw="none")  # type: ignore[arg-type]
