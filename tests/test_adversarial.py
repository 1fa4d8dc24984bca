"""Robust accuracy: it is what the closed form says, hidden gradients do not pass for it, and every row says how."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import Wrapped, attention_model, init, mlp, seeded, unseen

import robust_attention as ra
from robust_attention.attacks.fgsm import fgsm
from robust_attention.attacks.pgd import pgd
from robust_attention.data.images import Stored
from robust_attention.eval import plan as plan_module
from robust_attention.eval.accuracy import Reader, clean_accuracy, contaminations
from robust_attention.eval.adversarial import AttackPlan, attack_all, radius_name
from robust_attention.eval.checks import Found, above, check_attacks, check_model
from robust_attention.eval.measure import Measurement, unpack
from robust_attention.ops import Method

QUICK = AttackPlan(eps=(0.05,), spsa_steps=20, spsa_samples=16, eot=3, draws=4)


def run(model: nn.Module, plan: AttackPlan = QUICK, **settings: Any) -> dict[str, Measurement]:
    """The accuracies by condition."""
    images, labels = unseen()
    rows = attack_all(model, images, labels, plan, **{"seed": 1, **settings})
    return {row.condition: row for row in rows if row.metric == "accuracy"}


def flags(rows: dict[str, Measurement]) -> set[str]:
    return {check for row in rows.values() for check in row.failed}


# --- what the numbers are


def linear() -> nn.Module:
    """Two classes, decided by a weighted sum over images in 0.4 to 0.6."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(2, 16, generator=seeded(3)))
        model[1].bias.copy_(-0.5 * model[1].weight.sum(dim=1))
    return model


def test_robust_accuracy_of_a_linear_model_is_its_closed_form() -> None:
    model, labels = linear(), torch.arange(300) % 2
    towards = model[1].weight[1] - model[1].weight[0]
    sign = 2.0 * labels - 1
    pull = torch.rand(300, 1, generator=seeded(5)) * 0.12 - 0.01
    images = (0.5 + sign[:, None] * towards.sign() * pull + 0.02 * torch.rand(300, 16, generator=seeded(6))).detach()
    margin = sign * ((images - 0.5) @ towards).detach()
    radii = (0.01, 0.03, 0.06, 0.09)
    plan = replace(QUICK, eps=radii, spsa_steps=10)
    rows = attack_all(model, images.reshape(300, 1, 4, 4), labels, plan, seed=0)
    values = {row.condition: row for row in rows}
    wanted = {eps: (margin > eps * towards.abs().sum()).float() for eps in radii}
    assert len({share.mean().item() for share in wanted.values()}) == 4
    for eps, right in wanted.items():
        for attack in ("FGSM", "PGD-20", "PGD-20 margin", "all attacks"):
            row = values[f"{attack} {radius_name(eps)}"]
            assert row.right is not None
            assert torch.equal(unpack(row.right), right), attack
            assert row.value == right.double().mean().item()
        assert right.mean() <= values[f"SPSA {radius_name(eps)}"].value <= right.mean() + 0.02
    assert values["PGD-20 1"].value == 0
    assert not any(row.failed for row in rows)


def test_all_attacks_counts_what_survives_each() -> None:
    model = mlp()
    rows = run(model, replace(QUICK, eps=(0.15,)))
    single = [row for name, row in rows.items() if name.endswith("0.15") and "all" not in name]
    names = [row.condition.removesuffix(" 0.15") for row in single]
    assert names == ["FGSM", "PGD-20", "PGD-20 margin", "SPSA", "random-50"]
    survived = torch.stack([unpack(row.right) for row in single if row.right]).amin(dim=0)
    images, labels = unseen()
    with torch.no_grad():
        survived *= model(images).argmax(dim=1) == labels
    assert torch.equal(unpack(str(rows["all attacks 0.15"].right)), survived)
    assert rows["all attacks 0.15"].value < min(rows["random-50 0.15"].value, rows["FGSM 0.15"].value)
    assert "PGD-20 minimum 0.15" not in rows


def test_an_image_that_is_read_wrong_before_survives_nothing() -> None:
    # An attack with a label of its own can lead an image home: it was no survivor for that.
    model, (images, labels) = mlp(), unseen()
    wrong = (labels + 1) % 4
    rows = attack_all(model, images, wrong, replace(QUICK, protocols=("paper",), eps=(0.5,)), seed=1, std=(1.0,))
    values = {row.condition: row.value for row in rows if row.protocol == "paper"}
    assert values["PGD-20 0.5"] > 0.2
    assert values["all attacks 0.5"] < 0.05


def test_rows_say_how_they_were_made() -> None:
    rows = run(mlp(), replace(QUICK, eps=(2 / 255,)))
    assert rows["PGD-20 2/255"].settings == {
        "eps": 2 / 255, "seed": 1, "batch_size": 256, "steps": 20, "step_size": 0.15 * (2 / 255), "restarts": 1,
        "loss": "ce", "gradient": "full",
    }  # fmt: skip
    assert rows["SPSA 2/255"].settings["queries"] == 20 * 33
    assert rows["all attacks 2/255"].settings["attacks"] == "FGSM, PGD-20, PGD-20 margin, SPSA, random-50"
    assert "white box <= SPSA" in str(rows["all attacks 2/255"].settings["checks"])
    assert "transfer" not in str(rows["all attacks 2/255"].settings["checks"])
    assert all(row.n == 80 and row.protocol == "pixel" for row in rows.values())
    for row in rows.values():
        assert Measurement.from_dict(json.loads(json.dumps(row.to_dict()))) == row


def test_several_radii_make_a_falling_curve() -> None:
    rows = run(mlp(), replace(QUICK, eps=(0.2, 0.02, 0.1), which=("fgsm", "pgd")))
    curve = [rows[f"PGD-20 {eps}"].value for eps in (0.02, 0.1, 0.2)]
    assert curve[0] > curve[1] > curve[2]
    assert rows["PGD-20 0.02"].value == pytest.approx(curve[0])
    assert flags(rows) == set()


def test_radius_is_named_in_255ths_where_that_is_short() -> None:
    names = {1 / 255: "1/255", 0.5 / 255: "0.5/255", 8 / 255: "8/255", 1.0: "1", 0.05: "0.05", 0.031: "0.031"}
    assert {eps: radius_name(eps) for eps in names} == names


def test_top5_stands_beside_accuracy_where_there_are_more_than_five_classes() -> None:
    images, labels = unseen(classes=8)
    rows = attack_all(mlp(8), images, labels, replace(QUICK, eps=(0.2,), which=("fgsm",)), seed=1)
    by_metric = {row.metric: row for row in rows if row.condition == "FGSM 0.2"}
    found = fgsm(mlp(8), images, labels, eps=0.2)
    top = mlp(8)(found).topk(5, dim=1).indices
    assert by_metric["top5"].value == pytest.approx((top == labels[:, None]).any(dim=1).float().mean().item())
    assert by_metric["top5"].value > by_metric["accuracy"].value
    assert all(row.metric == "accuracy" for row in attack_all(mlp(), *unseen(), QUICK, seed=1))


def test_costly_attacks_may_be_kept_to_the_first_images() -> None:
    rows = run(mlp(), replace(QUICK, costly_first=50))
    assert rows["SPSA 0.05"].n == 50
    assert rows["PGD-20 0.05"].n == rows["all attacks 0.05"].n == 80
    assert rows["all attacks 0.05"].value <= rows["PGD-20 0.05"].value
    full = run(mlp())
    assert torch.equal(unpack(str(rows["SPSA 0.05"].right)), unpack(str(full["SPSA 0.05"].right))[:50])
    both, cheap = unpack(str(rows["all attacks 0.05"].right)), unpack(str(rows["PGD-20 0.05"].right))
    assert torch.equal(both[:50], unpack(str(full["all attacks 0.05"].right))[:50])
    assert (both[50:] <= cheap[50:]).all()


def test_result_of_an_image_does_not_depend_on_the_batch_size() -> None:
    model, (images, labels) = mlp().double(), unseen()
    every = [
        attack_all(model, images.double(), labels, replace(QUICK, eps=(0.1,)), seed=3, batch_size=size)
        for size in (256, 7)
    ]
    for one, other in zip(*every, strict=True):
        assert (one.condition, one.right) == (other.condition, other.right)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", [ra.RKDE(), ra.MoM(blocks=3)], ids=repr)
def test_result_does_not_depend_on_the_device(method: Method) -> None:
    images, labels = unseen()
    rows = []
    for device in ("cpu", "cuda"):
        model = attention_model(method).double().to(device)
        twin = attention_model(ra.Softmax()).double().to(device)
        rows.append(attack_all(model, images.double(), labels, QUICK, seed=1, twin=twin))
    for one, other in zip(*rows, strict=True):
        assert one.condition == other.condition
        assert abs(one.value - other.value) <= 0.02  # attention's last bits may differ, and a step turn round


def test_seed_decides() -> None:
    rows = [run(mlp(), replace(QUICK, pgd_steps=1, which=("pgd",)), seed=seed) for seed in (1, 1, 2)]
    name = "PGD-1 0.05"
    assert rows[0][name].right == rows[1][name].right
    starts = []
    for seed in (1, 2):
        reader = Reader(mlp(), seed=seed, batch_size=8)
        starts.append(plan_module.pgd_of(QUICK, reader).make(*unseen(number=8), 0.1, True, 0, 1))
    assert not torch.equal(*starts)


def test_images_may_be_bytes_or_a_data_set() -> None:
    images, labels = unseen()
    stored = (255 * images).round().byte()
    sets = [stored.float() / 255, stored, Stored(stored, labels, num_classes=4, name="patterns")]
    rows = [attack_all(mlp(), each, labels, replace(QUICK, which=("pgd",)), seed=1, batch_size=50) for each in sets]
    assert rows[0] == rows[1] == rows[2]


def test_evaluation_leaves_everything_as_it_was() -> None:
    model = attention_model(ra.RKDE())
    model.train()
    model.head.eval()
    model.place.requires_grad_(False)
    images, labels = unseen()
    before, state = images.clone(), torch.get_rng_state()
    attack_all(model, images, labels, replace(QUICK, which=("fgsm", "pgd")), seed=1)
    contaminations(model, images, labels, patch_size=1, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, before)
    assert model.training
    assert model.attention.training
    assert not model.head.training
    assert model.attention.attend.method == ra.RKDE()
    wanting = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert wanting == {name for name, _ in model.named_parameters()} - {"place"}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_model_is_attacked_in_evaluation_mode() -> None:
    modes: list[bool] = []

    def answer(model: nn.Module, x: Tensor) -> Tensor:
        modes.append(model.training)
        return model(x)

    run(Wrapped(mlp(), answer).train(), replace(QUICK, which=("fgsm",)))
    assert modes
    assert not any(modes)


def test_progress_is_told() -> None:
    told: list[tuple[str, float]] = []
    run(mlp(), replace(QUICK, which=("fgsm", "pgd")), tell=lambda what, share: told.append((what, share)))
    assert [what for what, _ in told] == [
        "checks of the model", "FGSM 0.05, pixel", "PGD-20 0.05, pixel", "check at eps = 1",
    ]  # fmt: skip
    assert [share for _, share in told] == [0.25, 0.5, 0.75, 1.0]


# --- protocols


def test_paper_protocol_is_unclipped_in_normalised_units_with_the_models_own_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []

    def watched(logits: Any, images: Tensor, labels: Tensor, **settings: Any) -> Tensor:
        calls.append({"labels": labels, **settings})
        return fgsm(logits, images, labels, **settings)

    monkeypatch.setattr(plan_module, "fgsm", watched)
    model = mlp(channels=3)
    images, truth = unseen(channels=3)
    truth = torch.where(torch.arange(80) < 20, (truth + 1) % 4, truth)  # the model answers these wrong
    std = (0.5, 0.25, 0.1)
    plan = replace(QUICK, protocols=("paper", "pixel"), eps=(0.1,), which=("fgsm",))
    rows = attack_all(model, images, truth, plan, seed=1, std=std)
    paper, pixel = calls
    own = model(images).argmax(dim=1)
    assert torch.equal(paper["labels"], own)
    assert torch.equal(pixel["labels"], truth)
    assert not torch.equal(own, truth)
    torch.testing.assert_close(paper["eps"], 0.1 * torch.tensor(std))
    assert pixel["eps"] == 0.1
    assert (paper["clip"], pixel["clip"]) == (False, True)
    values = {(row.protocol, row.condition): row.value for row in rows}
    found = fgsm(model, images, own, eps=0.1 * torch.tensor(std), clip=False)
    assert values["paper", "FGSM 0.1"] == pytest.approx((model(found).argmax(1) == truth).float().mean().item())
    found = fgsm(model, images, truth, eps=0.1)
    assert values["pixel", "FGSM 0.1"] == pytest.approx((model(found).argmax(1) == truth).float().mean().item())


def test_paper_protocol_without_deviations_fails_clearly() -> None:
    with pytest.raises(ValueError, match=r"std must be given for the paper protocol, got None; pass the model's"):
        run(mlp(), replace(QUICK, protocols=("paper",)))


# --- robust weights, twins and draws


def test_robust_weights_are_attacked_detached_and_from_the_twin_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = attention_model(ra.RKDE(ra.Huber(0.1))), attention_model(ra.Softmax())
    used: list[tuple[bool, str]] = []

    def watched(logits: Any, *args: Any, **settings: Any) -> Tensor:
        used.append((logits.model is twin, model.attention.attend.method.weight_grad))
        return pgd(logits, *args, **settings)

    monkeypatch.setattr(plan_module, "pgd", watched)
    rows = run(model, replace(QUICK, eps=(0.1,), which=("pgd",)), twin=twin)
    assert used[:3] == [(False, "full"), (False, "stop"), (True, "full")]
    kinds = {"PGD-20": "full", "PGD-20 detached": "stop", "PGD-20 transfer": "transfer"}
    assert {name: rows[f"{name} 0.1"].settings["gradient"] for name in kinds} == kinds
    each = torch.stack([unpack(str(rows[f"{name} 0.1"].right)) for name in kinds])
    assert torch.equal(unpack(str(rows["PGD-20 minimum 0.1"].right)), each.amin(dim=0))
    assert rows["all attacks 0.1"].value <= rows["PGD-20 minimum 0.1"].value < rows["PGD-20 transfer 0.1"].value
    assert rows["PGD-20 minimum 0.1"].settings["attacks"] == "PGD-20, PGD-20 detached, PGD-20 transfer"
    assert flags(rows) == set()


def test_full_gradient_is_attacked_even_if_the_model_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attention_model(ra.RKDE(weight_grad="stop"))
    used: list[str] = []

    def watched(*args: Any, **settings: Any) -> Tensor:
        used.append(model.attention.attend.method.weight_grad)
        return fgsm(*args, **settings)

    monkeypatch.setattr(plan_module, "fgsm", watched)
    attack_all(model, *unseen(number=4), replace(QUICK, which=("fgsm",), pgd_steps=1), seed=1)
    assert used == ["full"]
    assert model.attention.attend.method.weight_grad == "stop"


def test_random_model_has_three_numbers() -> None:
    model = attention_model(ra.MoM(blocks=3, fraction=0.4))
    rows = run(model, replace(QUICK, eps=(0.1,), which=("fgsm", "pgd"), draws=6))
    for name in ("FGSM 0.1", "PGD-20 0.1", "all attacks 0.1"):
        mean, worst, known = (rows[name + ending] for ending in ("", ", worst of 6 draws", ", known draw"))
        assert worst.value < mean.value
        assert (mean.settings["draws"], mean.settings["eot"], known.settings["draws"]) == (6, 3, 1)
        assert "eot" not in known.settings
        share = unpack(str(mean.right))
        assert ((share > 0) & (share < 1)).any()  # draws differ
        assert torch.equal(unpack(str(worst.right)), (share == 1).float())
    again = run(model, replace(QUICK, eps=(0.1,), which=("fgsm", "pgd"), draws=6))
    assert again == rows
    assert "undeclared randomness" not in flags(rows)


def test_random_model_is_attacked_by_means_over_draws_unless_the_draw_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples: list[int] = []

    def watched(*args: Any, **settings: Any) -> Tensor:
        samples.append(settings["samples"])
        return fgsm(*args, **settings)

    monkeypatch.setattr(plan_module, "fgsm", watched)
    plan = replace(QUICK, which=("fgsm",), pgd_steps=1, eot=7)
    attack_all(attention_model(ra.MoM(blocks=3, fraction=0.4)), *unseen(number=4), plan, seed=1)
    assert samples == [7, 1]


def test_gradients_of_a_random_model_are_means_over_draws_unless_the_draw_is_known() -> None:
    model = attention_model(ra.MoM(blocks=3, fraction=0.4))
    attend, counts = model.attention.attend, []
    original = attend.tensors
    attend.tensors = lambda *args: counts.append(original(*args).get("counts")) or original(*args)
    images, labels = unseen(number=4)
    reader = Reader(model, seed=1, batch_size=8)
    (attack,) = plan_module.attacks_of(replace(QUICK, which=("fgsm",)), reader, None)
    with reader.drawing("fresh"):
        attack.make(images, labels, 0.1, True, 0, 5)
    assert len({str(count) for count in counts}) == 5
    counts.clear()
    with reader.drawing("known"):
        attack.make(images, labels, 0.1, True, 0, 1)
    assert counts == [None]


# --- hidden gradients


def rounded(model: nn.Module, x: Tensor) -> Tensor:
    return model((x * 10).round() / 10)


PLANTED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], set[str]]] = {
    "detached head": (lambda model, x: model[3](model[:3](x).detach()), {"zero gradient", "above 1 % at eps = 1"}),
    "nothing but detached": (lambda model, x: model(x.detach()), {"zero gradient", "SPSA below white box"}),
    "quantised input": (rounded, {"zero gradient", "transfer below white box"}),
    "saturated": (lambda model, x: model(x) * 1e4, {"zero gradient"}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_hidden_gradients_are_flagged(name: str) -> None:
    answer, wanted = PLANTED[name]
    rows = run(Wrapped(mlp(), answer), replace(QUICK, eps=(0.15,)), twin=mlp(width=24))
    assert wanted <= flags(rows)
    assert all("zero gradient" in row.failed for row in rows.values())


def test_noise_at_test_time_is_flagged() -> None:
    noise = seeded(9)
    model = Wrapped(mlp(), lambda inner, x: inner(x + 0.2 * torch.randn(x.shape, generator=noise)))
    rows = run(model, replace(QUICK, which=("fgsm", "pgd")))
    assert all("undeclared randomness" in row.failed for row in rows.values())


def test_gradients_that_mislead_are_flagged() -> None:
    # Answers of one model, gradients of another that knows nothing: no zero shows, but everyone else finds more.
    misleading = init(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), 1.0)

    def answer(model: nn.Module, x: Tensor) -> Tensor:
        false = misleading(x)
        return model(x).detach() + false - false.detach()

    plan = replace(QUICK, eps=(0.05, 0.15), autoattack=("square",) if find_spec("pyautoattack") else False)
    rows = run(Wrapped(mlp(), answer), replace(plan, square_queries=300), twin=mlp(width=24))
    wanted = {"SPSA below white box", "transfer below white box", "above 1 % at eps = 1"}
    wanted |= {"Square below white box"} if plan.autoattack else set()
    assert wanted <= flags(rows)
    assert "SPSA below white box" in rows["all attacks 0.15"].failed
    assert "SPSA below white box" in rows["PGD-20 0.15"].failed


@pytest.mark.parametrize("classes", [4, 8])
def test_honest_model_is_not_flagged(classes: int) -> None:
    images, labels = unseen(classes)
    auto: Any = ("apgd-ce", "square") if find_spec("pyautoattack") else False
    plan = replace(QUICK, eps=(0.02, 0.05, 0.1, 0.2), autoattack=auto, square_queries=100)
    plan = replace(plan, protocols=("pixel", "paper"))
    rows = attack_all(mlp(classes), images, labels, plan, seed=1, twin=mlp(classes, width=24), std=(0.8,))
    assert {row.failed for row in rows} == {()}


@pytest.mark.parametrize("method", [ra.Softmax(), ra.KDE(), ra.RKDE()], ids=repr)
def test_honest_attention_is_not_flagged(method: Method) -> None:
    rows = run(attention_model(method), replace(QUICK, eps=(0.03, 0.1), which=("fgsm", "pgd", "random")))
    assert flags(rows) == set()


def found(label: str, role: Any, held: Tensor, eps: float = 0.1) -> Found:
    return Found(label=label, role=role, protocol="pixel", variant="plain", eps=eps, right={"held": held[None] > 0})


def share(number: int) -> Tensor:
    """100 images of which the first so many survive."""
    return (torch.arange(100) < number).float()


CASES: list[tuple[list[tuple[str, str, int]], str | None]] = [
    ([("FGSM", "white", 40), ("PGD-20", "white", 60)], "PGD above FGSM"),
    ([("FGSM", "white", 60), ("PGD-20", "white", 40)], None),
    ([("FGSM", "white", 40), ("PGD-20", "white", 41)], None),
    ([("PGD-20", "white", 60), ("SPSA", "spsa", 40)], "SPSA below white box"),
    ([("PGD-20", "white", 60), ("PGD-20 detached", "white", 40), ("SPSA", "spsa", 40)], None),
    ([("PGD-20", "white", 60), ("random-50", "random", 40)], "random below PGD"),
    ([("PGD-20", "white", 60), ("PGD-20 transfer", "transfer", 40)], "transfer below white box"),
    ([("PGD-20", "white", 60), ("PGD-20 transfer", "transfer", 80)], None),
]


@pytest.mark.parametrize(("entries", "check"), CASES)
def test_check_marks_the_rows_that_it_is_about_and_their_sum(
    entries: list[tuple[str, str, int]], check: str | None
) -> None:
    every = [found(label, role, share(number)) for label, role, number in entries]
    every += [found("clean", "clean", share(100), eps=0.0), found("all attacks", "sum", share(30))]
    other = found("PGD-20", "white", share(20), eps=0.2)
    check_attacks([*every, other])
    wanted = {entry.label: [check] for entry in every if check and entry.role != "clean"}
    assert {entry.label: entry.failed for entry in every if entry.failed} == wanted
    assert not other.failed


def test_curve_that_rises_is_marked_where_it_does() -> None:
    curve = [found("FGSM", "white", share(number), eps) for number, eps in ((60, 0.1), (30, 0.2), (45, 0.3), (10, 0.4))]
    clean = found("clean", "clean", share(50), 0.0)
    check_attacks([*curve, clean])
    assert [entry.failed for entry in curve] == [["rises with eps"], [], ["rises with eps"], []]


def test_square_is_compared_with_the_white_box() -> None:
    for broken, marks in ((15, ["Square below white box"]), (2, [])):
        white, auto = found("PGD-20", "white", share(60)), found("AutoAttack", "auto", share(60 - broken))
        auto.broken_by_square = (torch.arange(100) >= 60 - broken) & (torch.arange(100) < 60)
        clean = found("clean", "clean", share(100), 0.0)
        check_attacks([white, auto, clean])
        assert white.failed == auto.failed == marks


def test_difference_counts_only_beyond_chance() -> None:
    def result(*right: int) -> Tensor:
        return torch.tensor(right)[None]

    rest = [1] * 200
    assert above(result(*[1] * 7, *rest), result(*[0] * 7, *rest))
    assert not above(result(*[1] * 6, *rest), result(*[0] * 6, *rest))
    # As many the other way: no difference.
    assert not above(result(*[1] * 9, *[0] * 9, *rest), result(*[0] * 9, *[1] * 9, *rest))
    # Ten of ten thousand may be beyond chance, but are no sign of anything.
    assert not above(torch.ones(1, 10_000), (torch.arange(10_000) >= 10)[None])
    # Of results on different numbers of images, those that both have count.
    assert not above(result(1, 1, 1, 1), result(1, 1))


def test_model_that_answers_nonsense_is_named() -> None:
    images, labels = unseen(number=20)
    model = Wrapped(mlp(), lambda inner, x: inner(x) / (x.flatten(1)[:, :1] > 0.5))
    failed = check_model(Reader(model, seed=0, batch_size=8), images, labels)
    assert "answers not finite" in failed


# --- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": ()}, r"eps must name each radius once, at least one, got \(\)"),
        ({"eps": (0.1, 0.1)}, r"eps must name each radius once, at least one, got \(0.1, 0.1\)"),
        ({"eps": (0.0,)}, r"eps must be a finite number above 0, got 0.0"),
        ({"which": ("cw",)}, r"which must be one of 'fgsm', .*, got 'cw'"),
        ({"protocols": ("l2",)}, r"protocols must be one of 'pixel', 'paper', got 'l2'"),
        ({"which": ()}, r"a plan must name at least one protocol and one attack, got none"),
        ({"eot": 0}, r"eot must be a whole number of at least 1, got 0"),
        ({"costly_first": 0}, r"costly_first must be a whole number of at least 1, got 0"),
    ],
)
def test_plan_fails_clearly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttackPlan(**change)


def test_evaluation_without_images_or_labels_fails_clearly() -> None:
    images, labels = unseen()
    with pytest.raises(ValueError, match=r"labels must be whole numbers, one an image: \[80\], got \[3\]"):
        attack_all(mlp(), images, labels[:3], QUICK, seed=0)
    with pytest.raises(ValueError, match=r"images must hold at least one, got none"):
        clean_accuracy(mlp(), images[:0], labels[:0], seed=0)
    with pytest.raises(ValueError, match=r"images must be \[N, C, H, W\], got \[1, 4, 4\]"):
        clean_accuracy(mlp(), images[0], labels[:1], seed=0)
    with pytest.raises(ValueError, match=r"draws must be a whole number of at least 1, got 0"):
        clean_accuracy(mlp(), images, labels, seed=0, draws=0)


def test_missing_original_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(model: nn.Module, x: Tensor) -> Tensor:
        raise AssertionError("asked")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pyautoattack is not installed"):
        run(Wrapped(mlp(), never), replace(QUICK, autoattack=True))
