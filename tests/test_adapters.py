"""Models of transformers, timm and torch.nn: swapped, trained, saved, generated with, and given back as they were."""

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import METHODS
from torch import Tensor, nn

import robust_attention as ra
from robust_attention.adapters._torchvision import import_torchvision

import_torchvision()
transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

from robust_attention.adapters import huggingface  # noqa: E402
from robust_attention.adapters.timm import attention  # noqa: E402

# What these libraries warn about is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS, LENGTH = 50, 9


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def vision(config_class: Any, model_class: Any) -> nn.Module:
    config = config_class(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        num_labels=5, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return model_class(config)


def timm_vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5
    )


def timm_deit() -> nn.Module:
    return timm.create_model(
        "deit_tiny_distilled_patch16_224", img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5
    )


class Encoder(nn.Module):
    """Plain torch.nn, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head(hidden)


LANGUAGE = {"gpt2": gpt2, "llama": llama, "bert": bert, "torch": Encoder}
CAUSAL = ("gpt2", "llama")
VISION: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: vision(transformers.ViTConfig, transformers.ViTForImageClassification),
    "deit": lambda: vision(transformers.DeiTConfig, transformers.DeiTForImageClassification),
    "timm_vit": timm_vit,
    "timm_deit": timm_deit,
}
MODELS = LANGUAGE | VISION
every_model = pytest.mark.parametrize("name", MODELS)
NO_PARAMETERS = [ra.KDE(), ra.RKDE(), ra.SPKDE(), ra.MoM()]


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    with torch.no_grad():  # as sharp as a trained model's attention, so that a change of it shows
        for key, p in model.named_parameters():
            if p.dim() > 1 and "norm" not in key.lower() and "ln" not in key:
                p.mul_(3 if p.std() < 0.1 else 1)
            if p.dim() > 1 and not p.any():  # tokens that start at 0, where a norm is endlessly steep
                p.normal_(std=0.3)
    return model


def batch(name: str, padded: bool = True) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    if name in VISION:
        images = torch.randn(3, 3, 16, 16, generator=g)
        return {"x" if name.startswith("timm") else "pixel_values": images}
    ids = torch.randint(2, WORDS, (3, LENGTH), generator=g)
    mask = torch.ones(3, LENGTH, dtype=torch.int64)
    if padded:
        mask[1, 6:] = 0
        mask[2, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    out = model(**inputs)
    out = getattr(out, "logits", out)
    return out[0] if isinstance(out, tuple) else out


def real(name: str, out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The outputs that belong to tokens, not to padding."""
    return out if name in VISION else out[inputs["attention_mask"].bool()]


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_gives_the_original_logits_and_restore_the_original_bits(name: str, dtype: torch.dtype) -> None:
    model = make(name).to(dtype)
    inputs = {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch(name).items()}
    with torch.no_grad():
        before = logits(model, inputs)
        keys = model.state_dict().keys()
        report = ra.robustify(model, ra.Softmax())
        assert len(report.changed) == 2
        assert model.state_dict().keys() == keys
        after = logits(model, inputs)
        scale = 1e-5 if dtype == torch.float32 else 4e-2
        wanted = real(name, before, inputs)
        torch.testing.assert_close(
            real(name, after, inputs), wanted, rtol=scale, atol=scale * float(wanted.abs().max())
        )
        ra.robustify(model, ra.KDE())
        assert not torch.allclose(real(name, logits(model, inputs), inputs), wanted, rtol=1e-3, atol=1e-3)
        ra.restore(model)
        assert torch.equal(logits(model, inputs), before)
        assert model.state_dict().keys() == keys
        ra.restore(model)


def trained(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """The loss before and after two steps; evaluated, so that a draw of blocks is the same for both."""
    with torch.no_grad():
        out = logits(model, inputs)
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    before = float((out - target).square().mean())
    model.train()
    for _ in range(2):
        loss = (logits(model, inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return before, float((logits(model, inputs) - target).square().mean())


@pytest.mark.parametrize("method", METHODS)
@every_model
def test_every_method_trains_saves_and_loads(name: str, method: ra.Method, tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_model

    inputs = batch(name)
    model = make(name)
    ra.robustify(model, method, max_len=20)
    before, after = trained(model, inputs)
    assert after < before
    save_model(model, str(tmp_path / "model.safetensors"))
    again = make(name, seed=5)
    ra.robustify(again, method, max_len=20)
    missing = again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys
    again.tie_weights() if hasattr(again, "tie_weights") else None
    again.eval()
    with torch.no_grad():
        assert torch.equal(logits(again, inputs), logits(model, inputs))


@pytest.mark.parametrize("method", [m for m in METHODS if not isinstance(m.values[0], ra.PositionScaled)])
@pytest.mark.parametrize("name", LANGUAGE)
def test_padding_and_future_have_exactly_no_influence(name: str, method: ra.Method) -> None:
    inputs = batch(name)
    model = make(name)
    ra.robustify(model, method, max_len=20)
    with torch.no_grad():
        out = real(name, logits(model, inputs), inputs)
        other = {k: x.clone() for k, x in inputs.items()}
        other["input_ids"][inputs["attention_mask"] == 0] = 7
        assert torch.equal(real(name, logits(model, other), inputs), out)
        if name in CAUSAL:
            later = {k: x.clone() for k, x in inputs.items()}
            later["input_ids"][:, 5:] = 3
            seen = torch.zeros_like(inputs["attention_mask"])
            seen[:, :5] = inputs["attention_mask"][:, :5]
            kept = {"input_ids": inputs["input_ids"], "attention_mask": seen}
            assert torch.equal(real(name, logits(model, later), kept), real(name, logits(model, inputs), kept))


GENERATES = [ra.Softmax(), ra.KDE(), ra.RKDE(), ra.SPKDE(), ra.MoM(draw="poisson"), ra.Fourier()]


@pytest.mark.parametrize("method", GENERATES, ids=repr)
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("side", ["none", "left"])
def test_greedy_generation_is_the_same_with_every_cache(name: str, method: ra.Method, side: str) -> None:
    model = make(name)
    ra.robustify(model, method)
    ids = torch.randint(2, WORDS, (2, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :3] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "output_logits": True}
    settings |= {"return_dict_in_generate": True, "pad_token_id": 0}
    plain = model.generate(ids, use_cache=False, **settings)
    dynamic = model.generate(ids, **settings)
    assert torch.equal(dynamic.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(dynamic.logits), torch.stack(plain.logits), rtol=1e-3, atol=1e-3)
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(static.sequences, plain.sequences)
    assert len(set(plain.sequences[0, 6:].tolist())) > 1 or len(set(plain.sequences[1, 6:].tolist())) > 1


def test_methods_are_known_to_transformers_by_name() -> None:
    names = huggingface.register()
    assert {"kde", "rkde", "spkde", "mom", "softmax"} <= set(names)
    assert "fourier" not in names
    inputs = batch("llama")
    wanted = make("llama")
    ra.robustify(wanted, ra.RKDE())
    named = make("llama")
    named.set_attn_implementation("rkde")
    with torch.no_grad():
        out = real("llama", logits(named, inputs), inputs)
        assert torch.equal(out, real("llama", logits(wanted, inputs), inputs))
        built = transformers.AutoModelForCausalLM.from_config(named.config, attn_implementation="rkde")
        built.load_state_dict(named.state_dict())
        assert torch.equal(real("llama", logits(built.eval(), inputs), inputs), out)
    huggingface.register_method("wide", ra.RKDE(ra.Huber(9.0)))
    named.set_attn_implementation("wide")
    assert not torch.allclose(real("llama", logits(named, inputs), inputs), out)
    with pytest.raises(ValueError, match=r"Fourier owns tensors to learn, .* use ra.robustify"):
        huggingface.register_method("f", ra.Fourier())


def test_timm_takes_a_class_at_construction() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5,
        attn_layer=attention(ra.RKDE()),
    ).eval()  # fmt: skip
    plain = timm_vit().eval()
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(model.state_dict())
    ra.robustify(plain, ra.RKDE())
    x = batch("timm_vit")["x"]
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("name", ["llama", "vit", "timm_vit", "torch"])
def test_layers_can_be_chosen(name: str) -> None:
    model = make(name)
    inputs = batch(name)
    with torch.no_grad():
        before = real(name, logits(model, inputs), inputs)
        all_of = ra.robustify(model, ra.KDE())
        both = real(name, logits(model, inputs), inputs)
        first = ra.robustify(model, ra.KDE(), layers=[0])
        assert first.changed == all_of.changed[:1]
        assert first.kept == all_of.changed[1:]
        one = real(name, logits(model, inputs), inputs)
        assert not torch.allclose(one, before, atol=1e-4)
        assert not torch.allclose(one, both, atol=1e-4)
        pattern = ra.robustify(model, ra.KDE(), layers=f"*{first.changed[0]}")
        assert torch.equal(real(name, logits(model, inputs), inputs), one)
        function = ra.robustify(model, ra.KDE(), layers=lambda n: n == first.changed[0])
        assert pattern.changed == function.changed == ra.robustify(model, ra.KDE(), layers=[-2]).changed
    ra.restore(model)
    with pytest.raises(ValueError, match=r"layers must be numbers from -2 to 1, got \[2\]"):
        ra.robustify(model, ra.KDE(), layers=[2])
    with pytest.raises(ValueError, match=r"layers must choose at least one of .*, got 'nothing'"):
        ra.robustify(model, ra.KDE(), layers="nothing")


@pytest.mark.parametrize("name", ["bert", "timm_vit", "torch", "gpt2"])
def test_weights_of_gives_every_layers_weights(name: str) -> None:
    model = make(name)
    inputs = batch(name)
    report = ra.robustify(model, ra.RKDE())
    found = ra.weights_of(model, inputs)
    assert list(found) == report.changed
    for joint, marginal in found.values():
        assert joint.shape[0] == 3
        for w in (joint, marginal):
            total = w.sum(-1)
            assert bool(((total - 1).abs() < 1e-5).logical_or(total == 0).all())
    if name == "bert":
        hidden = inputs["attention_mask"] == 0
        assert not found[report.changed[0]].joint.transpose(1, 2)[hidden].any()
    with pytest.raises(ValueError, match=r"must have layers with RKDE or SPKDE, got none"):
        ra.weights_of(make(name), inputs)


def test_own_keys_with_uniform_weights_are_the_original_model() -> None:
    for name in ("llama", "bert", "timm_vit"):
        model, inputs = make(name), batch(name)
        with torch.no_grad():
            before = real(name, logits(model, inputs), inputs)
            for method in (ra.RKDE(ra.Huber(9.0), keys="own"), ra.SPKDE(1.0, keys="own")):
                ra.robustify(model, method)
                out = real(name, logits(model, inputs), inputs)
                torch.testing.assert_close(out, before, rtol=1e-4, atol=1e-4)


def test_a_model_that_cannot_be_swapped_says_why() -> None:
    with pytest.raises(ValueError, match=r"got Linear without; build it with ra.nn.Attention"):
        ra.robustify(nn.Linear(2, 2), ra.KDE())
    with pytest.raises(ValueError, match=r"must not be compiled yet"):
        ra.robustify(torch.compile(make("torch")), ra.KDE())
    with pytest.raises(ValueError, match=r"method must be one of robust_attention's, got 'kde'"):
        ra.robustify(make("torch"), "kde")  # type: ignore[arg-type]

    class Odd(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict({"a": Odd(8, 2), "b": nn.MultiheadAttention(8, 2)})
    report = ra.robustify(model, ra.KDE())
    assert report.changed == ["b"]
    assert report.skipped == {"a": f"{Odd.__qualname__} changes nn.MultiheadAttention in ways of its own"}
    assert "could not change a: " in str(report)


def test_frozen_weights_stay_frozen_and_dropout_is_said() -> None:
    model = make("bert")
    model.requires_grad_(False)
    ra.robustify(model, ra.RKDE())
    assert not any(p.requires_grad for p in model.parameters())
    config = model.config
    config.attention_probs_dropout_prob = 0.1
    report = ra.robustify(model, ra.RKDE())
    assert report.notes == ["dropout 0.1 of attention weights is not applied"]
    report = ra.robustify(make("gpt2"), ra.MoM())
    assert 'use draw="poisson"' in report.notes[0]


@pytest.mark.parametrize("name", ["vit", "timm_vit"])
def test_a_robustified_vit_compiles_and_exports(name: str) -> None:
    torch._dynamo.reset()
    model = make(name)
    inputs = batch(name)
    ra.robustify(model, ra.RKDE())
    with torch.no_grad():
        wanted = logits(model, inputs)
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(logits(compiled, inputs), wanted, rtol=1e-4, atol=1e-4)
        exported = torch.export.export(model, (), kwargs=inputs)
        torch.testing.assert_close(logits(exported.module(), inputs), wanted, rtol=1e-4, atol=1e-4)


def test_output_attentions_are_coefficients() -> None:
    model = make("bert")
    ra.robustify(model, ra.Softmax())
    inputs = batch("bert", padded=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model(**inputs, output_attentions=True)
    assert out.attentions is not None
    assert len(out.attentions) == 2
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(3, 4, LENGTH), rtol=1e-4, atol=1e-5)


def test_packed_documents_and_masks_of_pairs_are_read_as_they_are() -> None:
    model, ids = make("llama"), torch.randint(2, WORDS, (2, 12), generator=torch.Generator().manual_seed(4))
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]] * 2)}
    pairs = torch.ones(12, 12, dtype=torch.bool).tril()
    pairs[3:, 1] = False  # the last query does not see what earlier ones do
    for inputs in (packed, {"input_ids": ids, "attention_mask": pairs.expand(2, 1, -1, -1)}):
        with torch.no_grad():
            wanted = model(**inputs, use_cache=False).logits
            ra.robustify(model, ra.Softmax())
            out = model(**inputs, use_cache=False).logits
            ra.restore(model)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_logits_with_something_added_are_refused_by_name() -> None:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(2, WORDS, (1, 5))
    report = ra.robustify(model, ra.KDE())
    assert len(report.skipped) == 2  # self-attention of encoder and decoder
    assert all("adds relative_attention_bias to its logits" in why for why in report.skipped.values())
    # Cross attention is given a bias too, when it is called.
    with pytest.raises(ValueError, match=r"robust attention has no position_bias, which T5Attention passes; leave"):
        model(input_ids=ids, decoder_input_ids=ids)


@pytest.mark.parametrize("name", ["bert", "timm_vit", "torch"])
def test_a_deep_copy_takes_back_its_own_changes(name: str) -> None:
    model, inputs = make(name), batch(name)
    with torch.no_grad():
        plain = real(name, logits(model, inputs), inputs)
        ra.robustify(model, ra.KDE())
        robust = real(name, logits(model, inputs), inputs)
        twin = copy.deepcopy(model)
        ra.restore(twin)
        assert torch.equal(real(name, logits(twin, inputs), inputs), plain)
        assert torch.equal(real(name, logits(model, inputs), inputs), robust)
        ra.restore(model)
        assert torch.equal(real(name, logits(model, inputs), inputs), plain)


def test_models_that_share_a_configuration_do_not_switch_each_other_off() -> None:
    first = make("bert")
    second = transformers.BertForMaskedLM(first.config).eval()
    second.load_state_dict(first.state_dict())
    inputs = batch("bert")
    with torch.no_grad():
        plain = real("bert", logits(first, inputs), inputs)
        for model in (first, second):
            ra.robustify(model, ra.KDE())
        robust = real("bert", logits(second, inputs), inputs)
        ra.restore(first)
        assert torch.equal(real("bert", logits(second, inputs), inputs), robust)
        torch.testing.assert_close(real("bert", logits(first, inputs), inputs), plain, rtol=1e-4, atol=1e-5)
        ra.restore(second)
        assert first.config._attn_implementation != huggingface.NAME
        assert torch.equal(real("bert", logits(first, inputs), inputs), plain)


def test_a_bare_attention_module_fails_clearly_and_stays_whole() -> None:
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    with pytest.raises(ValueError, match=r"got MultiheadAttention, which is one itself; put it into nn.Sequential"):
        ra.robustify(module, ra.KDE())
    module.eval().state_dict()


def test_quantised_models_work() -> None:
    for name in ("bert", "timm_vit"):
        model, inputs = make(name), batch(name)
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        with torch.no_grad():
            before = real(name, logits(quantised, inputs), inputs)
            assert len(ra.robustify(quantised, ra.Softmax()).changed) == 2
            after = real(name, logits(quantised, inputs), inputs)
            torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)


def test_checkpointing_meets_the_same_draw_again() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        module = ra.nn.Attention(32, 4, method=ra.MoM()).train()
        out = checkpoint(module, x, use_reentrant=False) if again else module(x)
        out.square().sum().backward()
        found.append(module.qkv.weight.grad)
        assert int(module.attend.num_draws) == 1
    assert torch.equal(*found)


def test_plain_torch_needs_no_other_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert ra.robustify(make("torch"), ra.KDE()).changed


def test_parts_and_wholes_can_be_changed_one_after_the_other() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.plain = make("bert"), make("torch")

    whole, inputs = Both().eval(), batch("bert")
    with torch.no_grad():
        plain = real("bert", logits(whole.text, inputs), inputs)
        ra.robustify(whole.text, ra.KDE())
        assert len(ra.robustify(whole, ra.RKDE()).changed) == 4
        ra.restore(whole)
        ra.restore(whole.text)
        assert torch.equal(real("bert", logits(whole.text, inputs), inputs), plain)
    model = make("torch")
    ra.robustify(model, ra.KDE())
    ra.restore(torch.compile(model))
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
