"""The demo, small: what it leaves, that its numbers depend on its seed alone, and how it fails."""

import errno
import io
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Generator, Tensor

import robust_attention as ra
from robust_attention import demo
from robust_attention._files import prepare_folder, write_json
from robust_attention.data import digits
from robust_attention.demo import CLEAN, METHODS, DemoConfig, Trial, Twin
from robust_attention.eval.robustness import attacked, correct, logits_of, patch_weights
from robust_attention.eval.statistics import binomial_interval
from robust_attention.models.vit import ViT, ViTConfig
from robust_attention.plots import demo as picture
from robust_attention.training.fit import FitConfig

TINY = DemoConfig(
    model=ViTConfig(dim=16, depth=1),
    fit=FitConfig(epochs=1),
    shares=(0.25,),
    table_shares=(0.25,),
    eps=1 / 16,
    pgd_steps=2,
    eot_samples=3,
    fresh_draws=2,
    num_train=100,
    num_test=70,
    num_attacked=66,
)
TRIALS = ["clean", "noise 25%", "flat 25%", "foreign 25%", "FGSM", "PGD-2", "all attacks"]


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=150)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Result:
    """One run of the tiny demo."""

    def __init__(self, folder: Path) -> None:
        self.folder, console = folder, quiet()
        self.record = demo.run(TINY, folder, console)
        self.shown = text_of(console)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return Result(tmp_path_factory.mktemp("demo") / "new" / "folder")


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_demo_leaves_its_numbers_and_a_picture(result: Result) -> None:
    files = sorted(path.name for path in result.folder.iterdir())
    assert files == ["demo.json", "demo.png", "twins.json", "twins.safetensors"]
    written = json.loads((result.folder / "demo.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert written == json.loads(json.dumps(result.record))
    image = (result.folder / "demo.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000
    assert str(result.folder / "demo.png") in result.shown


def test_picture_needs_the_numbers_alone(result: Result, tmp_path: Path) -> None:
    shutil.copy(result.folder / "demo.json", tmp_path / "numbers.json")
    image = picture.draw(tmp_path / "numbers.json", tmp_path / "deep" / "picture.png")
    assert image.read_bytes() == (result.folder / "demo.png").read_bytes()


def test_record_says_what_was_run(result: Result) -> None:
    record = result.record
    assert [method["name"] for method in record["methods"]] == list(METHODS)
    assert [method["settings"] for method in record["methods"]] == [repr(method) for method in METHODS.values()]
    assert record["config"]["model"] == {**vars(ViTConfig()), "dim": 16, "depth": 1}
    assert record["config"]["pgd_steps"] == 2
    assert record["versions"]["torch"] == torch.__version__
    for method in record["methods"]:
        assert 0 < method["final_loss"] < 10
        assert (method["pgd_known_draw"] is None) == (not method["stochastic"])
    assert set(record["checks"]) == set(METHODS)


def test_cells_hold_every_twin_on_every_trial(result: Result) -> None:
    cells = result.record["cells"]
    assert [(cell["method"], cell["trial"]) for cell in cells] == [(m, t) for m in METHODS for t in TRIALS]
    measured = {"method", "trial", "kind", "strength", "accuracy", "low", "high", "n", "draws", "accuracy_worst_draw"}
    compared = {"difference", "p_holm", "verdict"}
    for cell in cells:
        assert set(cell) == (measured if cell["method"] == "softmax" else measured | compared)
        contaminated = "%" in cell["trial"]
        assert cell["strength"] == (0 if cell["trial"] == "clean" else 0.25 if contaminated else 1 / 16)
        assert cell["n"] == (70 if contaminated or cell["trial"] == "clean" else 66)
        assert cell["draws"] == (2 if cell["method"] == "MoM" else 1)
        assert 0 <= cell["low"] <= cell["accuracy"] <= cell["high"] <= 1
        assert cell["accuracy_worst_draw"] <= cell["accuracy"]
        assert float(cell["accuracy"] * cell["n"] * cell["draws"]) == pytest.approx(
            round(cell["accuracy"] * cell["n"] * cell["draws"]), abs=1e-4
        )


def test_nothing_survives_all_attacks_but_not_one(result: Result) -> None:
    accuracy = {(cell["method"], cell["trial"]): cell["accuracy"] for cell in result.record["cells"]}
    for name in METHODS:
        assert accuracy[name, "all attacks"] <= min(accuracy[name, "FGSM"], accuracy[name, "PGD-2"])
        checks = result.record["checks"][name]
        assert checks["PGD ≤ FGSM"] == (accuracy[name, "PGD-2"] <= accuracy[name, "FGSM"])


def test_example_and_weights_fit_the_patches(result: Result) -> None:
    example, ratio = result.record["example"], result.record["weight_ratio"]
    assert sum(example["hit"]) == 4
    clean, spoilt = torch.tensor(example["clean"]), torch.tensor(example["spoilt"])
    for place, hit in enumerate(example["hit"]):
        row, column = 2 * (place // 4), 2 * (place % 4)
        window = slice(row, row + 2), slice(column, column + 2)
        assert torch.equal(clean[window], spoilt[window]) == (not hit)
    test = digits.split().test
    assert example["label"] == int(test.labels[example["index"]])
    torch.testing.assert_close(clean, test.images[example["index"], 0])
    for name in METHODS:
        assert sum(example["weights"][name]) == pytest.approx(16, rel=1e-5)
        assert set(ratio["of_spoilt_over_clean"][name]) == {"noise", "flat", "foreign"}
    for name in ("softmax", "KDE"):
        assert set(example["weights"][name]) == {1.0}
        assert set(ratio["of_spoilt_over_clean"][name].values()) == {1.0}


def test_example_is_the_first_digit_that_every_twin_reads() -> None:
    _, test = demo.load(replace(TINY, num_test=5))
    twins = [Twin(name, ViT(TINY.model, METHODS[name]).eval()) for name in ("RKDE", "MoM")]
    twins[0].model.init_weights(seeded(2))  # a model that reads the digit as two different classes
    twins[0].correct[CLEAN] = torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0]])
    twins[1].correct[CLEAN] = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0]])
    found = demo._weights(TINY, twins, test)
    assert found["example"]["index"] == 3
    assert found["example"]["label"] == int(test.labels[3]) != int(test.labels[2])
    assert found["example"]["clean"] == test.images[3, 0].tolist()
    images, hit = demo.spoil(TINY, Trial("", "noise", 0.25), test.images)
    assert found["example"]["spoilt"] == images[3, 0].tolist()
    assert found["example"]["hit"] == hit[3].tolist()
    weight = patch_weights(twins[0].model, images, draws=1, generator=seeded())
    assert found["example"]["weights"]["RKDE"] == weight[3].tolist()
    ratio = float(weight[hit].mean() / weight[~hit].mean())
    assert found["weight_ratio"]["of_spoilt_over_clean"]["RKDE"]["noise"] == pytest.approx(ratio, rel=1e-6)
    read_as = [int(twins[0].model(source)[3].argmax()) for source in (images, test.images)]
    assert found["example"]["read_as"]["RKDE"] == read_as[0] != read_as[1]


def numbers(record: dict[str, Any]) -> str:
    """All of a record but its seconds and what it was asked for."""
    methods = [{key: value for key, value in method.items() if key != "seconds"} for method in record["methods"]]
    return repr({**record, "methods": methods, "seconds": None, "config": None})


def test_numbers_depend_on_the_seed_alone(result: Result, tmp_path: Path) -> None:
    torch.manual_seed(123)
    alike = replace(TINY, num_threads=1, fit=FitConfig(epochs=1, seed=99))  # neither counts
    assert numbers(demo.run(alike, tmp_path, quiet())) == numbers(result.record)
    other = demo.run(replace(TINY, seed=1), tmp_path, quiet())
    for mine, theirs in zip(result.record["methods"], other["methods"], strict=True):
        assert mine["final_loss"] != theirs["final_loss"]
    assert other["example"]["hit"] != result.record["example"]["hit"]


def test_twins_start_from_the_same_weights_of_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Tensor] = []

    def only_start(model: ViT, *_: Any, **__: Any) -> None:
        started.append(model.head.weight.detach().clone())
        raise demo.Cancelled

    monkeypatch.setattr(demo, "fit", only_start)
    train, test = demo.load(TINY)
    for seed in (0, 1):
        for name in METHODS:
            bar = demo.Work(progress := Progress(console=quiet()), progress.add_task(name), Event())
            with pytest.raises(demo.Cancelled):
                demo.train_and_try(replace(TINY, seed=seed), name, train, test, {}, bar)
    first, second = started[: len(METHODS)], started[len(METHODS) :]
    assert all(torch.equal(weight, first[0]) for weight in first)
    assert all(torch.equal(weight, second[0]) for weight in second)
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_attacked", [66, 1000])
def test_length_of_the_bar_is_the_number_of_model_calls(
    name: str, num_attacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TINY, num_attacked=num_attacked)
    train, test = demo.load(config)
    calls, told = [], []
    forward = ViT.forward

    def counted(model: ViT, images: Tensor, generator: Generator | None = None) -> Tensor:
        calls.append(len(images))
        return forward(model, images, generator)

    class Bar(demo.Work):
        def batch(self) -> None:
            told.append(1)
            super().batch()

    monkeypatch.setattr(ViT, "forward", counted)
    progress = Progress(console=quiet())
    total = demo._num_batches(config, name, train, test)
    bar = Bar(progress, progress.add_task(name, total=total), Event())
    twin = demo.train_and_try(config, name, train, test, {CLEAN: test.images} | spoilt_of(config, test), bar)
    assert [trial.name for trial in twin.correct] == TRIALS
    assert len(told) == len(calls)
    assert total == len(calls)


def spoilt_of(config: DemoConfig, test: digits.Digits) -> dict[Trial, Tensor]:
    return {trial: demo.spoil(config, trial, test.images).images for trial in demo.contaminations(config)}


def test_images_are_enlarged_and_counted() -> None:
    config = replace(TINY, model=ViTConfig(image_size=24, patch_size=4), num_train=None, num_test=7)
    train, test = demo.load(config)
    splits = digits.split()
    assert train.images.shape == (len(splits.train.labels), 1, 24, 24)
    assert test.images.shape == (7, 1, 24, 24)
    assert torch.equal(test.labels, splits.test.labels[:7])
    assert 0 <= train.images.min() <= train.images.max() <= 1
    # Enlarged, not changed: averaging each 3x3 gives the digit back, smoothed.
    back = torch.nn.functional.avg_pool2d(train.images, 3)
    assert (back - splits.train.images).abs().mean() < 0.1
    assert train.images.diff(dim=2).abs().max() < 0.34  # smooth: a pixel's step is spread over three
    assert train.images.diff(dim=3).abs().max() < 0.34
    assert torch.equal(demo.load(TINY)[1].images, splits.test.images[:70])


def test_contaminations_are_nested_over_shares() -> None:
    images = digits.split().test.images[:20]
    few, many = (demo.spoil(TINY, Trial("", "noise", share), images) for share in (0.25, 0.5))
    assert (many.hit | ~few.hit).all()
    assert many.hit.sum() == 2 * few.hit.sum()
    assert not torch.equal(demo.spoil(replace(TINY, seed=1), Trial("", "noise", 0.25), images).hit, few.hit)


def reads(threshold: float) -> Any:
    """A stand-in for a model: class 1 where an image is brighter than the threshold."""

    def model(images: Tensor, generator: Generator | None = None) -> Tensor:
        return torch.nn.functional.one_hot((images.mean((1, 2, 3)) > threshold).long(), 10).float()

    model.method = ra.Softmax()  # type: ignore[attr-defined]
    return model


def test_twin_must_survive_what_broke_the_others() -> None:
    dark, bright = (torch.full((1, 1, 8, 8), value) for value in (0.25, 0.75))
    labels = torch.tensor([0, 0, 0])
    test = digits.Digits(torch.zeros(3, 1, 8, 8), labels)
    survived = demo.attacks(TINY)[-1]
    one = Twin("one", reads(0.5), adversarial=torch.cat([dark, dark, dark]))
    two = Twin("two", reads(0.1), adversarial=torch.cat([dark, bright, dark]))
    one.correct[survived], two.correct[survived] = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 1.0, 1.0]])
    demo.survive_all(TINY, [one, two], test)
    assert one.correct[survived].tolist() == [[1.0, 0.0, 0.0]]
    assert two.correct[survived].tolist() == [[0.0, 0.0, 0.0]]


def test_cells_compare_image_by_image() -> None:
    trial = Trial("noise 25%", "noise", 0.25)
    right = torch.ones(1, 20)
    worse = right.clone()
    worse[0, :12] = 0
    noisy = torch.cat([right, worse])
    twins = [Twin(name, reads(0.5)) for name in ("softmax", "worse", "alike", "noisy")]
    for twin, value in zip(twins, (right, worse, right, noisy), strict=True):
        twin.correct[trial] = value
    baseline, lower, alike, drawn = demo._cells(twins)
    assert (baseline["accuracy"], lower["accuracy"], drawn["accuracy"]) == pytest.approx((1.0, 0.4, 0.7))
    assert (lower["low"], lower["high"]) == pytest.approx(binomial_interval(0.4, 20))
    assert (lower["difference"], alike["difference"], drawn["difference"]) == pytest.approx((-0.6, 0.0, -0.3))
    assert drawn["accuracy_worst_draw"] == pytest.approx(0.4)
    assert lower["p_holm"] == pytest.approx(3 * 2 / 2**12, rel=0.3)  # 12 of 12 flips one way, the smallest of three
    assert (lower["verdict"], alike["verdict"]) == ("worse", "no difference detected")
    swapped = {cell["method"]: cell for cell in demo._cells([Twin("softmax", reads(0), {trial: worse}), twins[2]])}
    assert swapped["alike"]["verdict"] == "better"


def test_table_shows_its_shares_and_marks_failed_checks(result: Result) -> None:
    def rows(**changes: Any) -> list[str]:
        console = quiet()
        console.print(demo.table({**result.record, **changes}))
        return [line for line in text_of(console).splitlines() if any(trial in line for trial in TRIALS)]

    passed = {name: {"a check": True} for name in METHODS}
    shown = rows(checks=passed)
    assert len(shown) == 7
    assert not any("†" in row for row in shown)
    failed = rows(checks={**passed, "RKDE": {"a check": True, "another": False}})
    assert [row.count("†") for row in failed] == [0, 0, 0, 0, 1, 1, 1]
    assert len(rows(checks=passed, config={**result.record["config"], "table_shares": (0.5,)})) == 4
    marked = [{**cell, "verdict": "worse"} if cell["method"] == "KDE" else cell for cell in result.record["cells"]]
    assert all(row.count("▼") == 1 for row in rows(cells=marked, checks=passed))


def test_notes_name_failed_checks_and_random_methods(result: Result) -> None:
    checks = {"KDE": {"one check": False, "another": True}}
    notes = "\n".join(demo._notes(TINY, {**result.record, "checks": checks}))
    assert "† KDE: a check failed: one check" in notes
    assert "another" not in notes.split("†", 1)[1]
    assert "70 images (66 attacked, max-norm eps 0.0625)" in notes
    assert "MoM is random: gradients average 3 draws (EOT), accuracies 2 fresh ones" in notes
    for line in result.record["notes"]:
        assert line in result.shown.replace("\n", " ")


def test_out_that_is_a_file_fails_clearly_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "train_all", lambda *_: pytest.fail("trained for nothing"))
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below"):
        message = r"--out must be a folder that can be written to, with 4 MiB free, got .*file.*; choose another folder"
        with pytest.raises(OSError, match=message):
            demo.run(TINY, out, quiet())
    assert file.read_text() == "mine"


def test_missing_matplotlib_fails_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "train_all", lambda *_: pytest.fail("trained for nothing"))
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="matplotlib"):
        demo.run(TINY, tmp_path, quiet())


def test_full_disk_fails_clearly_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"with 4 MiB free, got .* \(No space left on device\); choose another folder"):
        prepare_folder(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_are_not_written(bad: float, tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    write_json(path, {"π": 1.5})
    assert path.read_text(encoding="utf-8") == '{\n "π": 1.5\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"mean": bad})
    assert json.loads(path.read_text(encoding="utf-8")) == {"π": 1.5}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("num_threads", "failing"), [(1, ra.SPKDE), (2, ra.SPKDE), (2, ra.Softmax)])
def test_failing_twin_stops_the_others_and_is_told(
    num_threads: int, failing: type[ra.Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    fit = demo.fit

    def diverging(model: ViT, images: Tensor, labels: Tensor, config: FitConfig, report: Any) -> list[float]:
        if isinstance(model.method, failing):  # SPKDE is the first to start, softmax the second
            raise FloatingPointError("the loss must stay finite, got nan")

        def counted(step: Any) -> None:
            steps.append(step)
            report(step)

        return fit(model, images, labels, config, report=counted)

    monkeypatch.setattr(demo, "fit", diverging)
    with pytest.raises(FloatingPointError, match="the loss must stay finite, got nan"):
        demo.run(replace(TINY, num_threads=num_threads, fit=FitConfig(epochs=200)), tmp_path, quiet())
    assert len(steps) < 200  # of 4 twins by 400
    assert not list(tmp_path.iterdir())


def test_threads_of_torch_come_back() -> None:
    def fail() -> None:
        with demo._one_core_a_thread():
            assert torch.get_num_threads() == 1
            raise FloatingPointError

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(FloatingPointError):
            fail()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_correct_asks_each_draw_afresh_and_keeps_the_order() -> None:
    number = torch.arange(130)
    images, labels = (number / 130)[:, None, None, None].expand(-1, 1, 2, 2), number * 7 % 10
    asked = []

    def logits(part: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        draw = len(asked) // 3
        asked.append(len(part))
        index = (130 * part[:, 0, 0, 0]).round().long()
        return torch.nn.functional.one_hot(labels[index] + (index % 3 == draw), 11).float()

    right = correct(logits, images, labels, draws=2)
    assert asked == [64, 64, 2] * 2
    assert right.dtype == torch.float32
    assert torch.equal(right, torch.stack([number % 3 != 0, number % 3 != 1]).float())


def test_attacked_keeps_images_with_their_labels() -> None:
    images, labels = torch.rand(130, 1, 2, 2, generator=seeded()), torch.arange(130)
    found = attacked(lambda x, y: x + y[:, None, None, None], images, labels)
    assert torch.equal(found, images + labels[:, None, None, None])


def test_logits_of_draws_from_its_generator_and_tells() -> None:
    model = ViT(ViTConfig(dim=16, depth=1), ra.MoM()).eval()
    images = torch.rand(3, 1, 8, 8, generator=seeded())
    told = []
    logits = logits_of(model, seeded(1), lambda: told.append(1))
    first, second = logits(images), logits(images)
    assert not torch.equal(first, second)
    assert torch.equal(first, model(images, generator=seeded(1)))
    assert len(told) == 2
    known = logits_of(model, None)
    assert torch.equal(known(images), known(images))


def weights_of(method: ra.Method, draws: int = 1) -> tuple[Any, Tensor]:
    model = ViT(ViTConfig(dim=16, depth=2), method).eval()
    images = torch.rand(3, 1, 8, 8, generator=seeded())
    weights = patch_weights(model, images, draws=draws, generator=seeded(1))
    assert weights.shape == (3, 16)
    torch.testing.assert_close(weights.mean(dim=1), torch.ones(3))
    assert not weights.requires_grad
    return model.projections(images)[0], weights


@pytest.mark.parametrize("method", [ra.RKDE(ra.Huber(0.05)), ra.SPKDE(1.4)], ids=lambda m: type(m).__name__)
def test_patch_weights_are_the_joint_weights_without_the_class_token(method: ra.RKDE | ra.SPKDE) -> None:
    seen, weights = weights_of(method)
    joint = method.weights(seen.k, seen.v).joint.detach().mean(dim=1)[:, 1:]
    torch.testing.assert_close(weights, joint / joint.mean(dim=1, keepdim=True))
    assert weights.std() > 0.01


def test_patch_weights_of_blocks_count_how_often_a_patch_is_in_them() -> None:
    method = ra.MoM(blocks=1, fraction=0.5, draw="subsample")
    _, weights = weights_of(method, draws=3)
    generator = seeded(1)
    often = sum((method.draw(17, generator=generator)[0] for _ in range(3)), torch.zeros(17))[1:]
    torch.testing.assert_close(weights, (often / often.mean()).expand(3, 16))


def test_patch_weights_of_other_methods_are_one() -> None:
    for method in (ra.Softmax(), ra.KDE()):
        assert (weights_of(method)[1] == 1).all()
