"""Every code block of the documents runs, and what is generated in them is up to date."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import robust_attention as ra
from robust_attention.adapters import import_torchvision
from robust_attention.ops import _method

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))
NOT_RUN: dict[str, int] = {}
"""How many blocks of each document are marked as not to be run: <!-- not run: why --> stands directly above them."""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fences(name: str) -> list[tuple[str, str, str]]:
    """(the line above, the language, the text) of every fenced block."""
    found, lines = [], iter(read(name).splitlines())
    above = ""
    for line in lines:
        opened = re.match(r"^( *)(`{3,}|~{3,})(.*)$", line)
        if opened:
            indent, fence, language = opened.groups()
            text = []
            for inner in lines:
                if inner.strip() == fence:
                    break
                text.append(inner.removeprefix(indent))
            found.append((above.strip(), language.strip(), "\n".join(text) + "\n"))
        above = line
    return found


def blocks(name: str) -> list[str]:
    python = [(above, text) for above, language, text in fences(name) if language.startswith("py")]
    return [text for above, text in python if not re.fullmatch(r"<!-- not run: .+ -->", above)]


@pytest.mark.parametrize("code", blocks("README.md"), ids=range(len(blocks("README.md"))))
def test_readme_code_runs(code: str) -> None:
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("name", [name for name in PAGES if blocks(name)])
def test_code_of_a_page_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks share one namespace, in order, as a reader would paste them."""
    if "transformers" in read(name) or "timm" in read(name):
        import_torchvision()
    names: dict[str, Any] = {"__name__": "page"}
    for number, code in enumerate(blocks(name)):
        exec(compile(code, f"{name}, block {number}", "exec"), names)


def test_no_block_is_skipped_silently() -> None:
    marked, languages = {}, set()
    for name in ("README.md", "CONTRIBUTING.md", *PAGES):
        found = fences(name)
        languages |= {language for _, language, _ in found}
        unrun = sum(language.startswith("py") for _, language, _ in found) - len(blocks(name))
        if unrun:
            marked[name] = unrun
    assert marked == NOT_RUN
    assert languages <= {"python", "sh", "text", "math"}, languages


def test_contributing_example_is_a_whole_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_method, "_registry", dict(_method._registry))
    (code,) = blocks("CONTRIBUTING.md")
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    method = ra.methods()["mean"]()
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    out = method.attend(q, k, v, is_causal=True)
    torch.testing.assert_close(out[:, ::2, 0], v[:, :, :3].mean(2))


def test_links_of_the_documents_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "LAB.md", "CHANGELOG.md", *PAGES):
        for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", read(name)):
            assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"


def test_table_of_methods_is_up_to_date() -> None:
    from robust_attention.cli import methods_table

    written = re.search(r"<!-- methods:.*?-->\n(.*?)<!-- /methods -->", read("README.md"), re.DOTALL)
    assert written is not None
    assert written[1].strip() == methods_table().strip(), "run robust-attention methods --markdown and paste it"


def navigation() -> list[str]:
    yaml = pytest.importorskip("yaml")

    def leaves(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [leaf for part in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(part)]

    return leaves(yaml.safe_load(read("mkdocs.yml"))["nav"])


def test_every_method_has_a_page_and_every_page_is_in_the_navigation() -> None:
    listed = navigation()
    assert sorted(listed) == [name.removeprefix("docs/") for name in PAGES]
    pages = {Path(name).stem for name in listed if name.startswith("methods/")} - {"index"}
    assert pages == set(ra.methods()), (
        "write docs/methods/<name>.md, with a figure by `robust-attention figure methods`"
    )
    table = read("docs/methods/index.md")
    for name, cls in ra.methods().items():
        assert f"| [{cls.__name__}]({name}.md) | {cls.equation} | {cls.summary} |" in table
        page = read(f"docs/methods/{name}.md")
        assert page.startswith(f"# {cls.__name__}\n")
        parts = ["What happens to an outlier", "Numerics", "Cost", "When to use it", "When not", "Example", "Settings"]
        assert re.findall(r"^## (.*)$", page, re.MULTILINE) == parts
        assert "```math" in page
        assert f"(../images/methods/{name}.png)" in page


def test_figures_of_the_methods_are_small_and_up_to_date() -> None:
    from robust_attention.eval.influence import outlier_shares

    folder = DOCS / "images" / "methods"
    assert {path.stem for path in folder.glob("*.png")} == set(ra.methods())
    assert all(path.stat().st_size < 60_000 for path in folder.glob("*.png"))
    written = json.loads((folder / "methods.json").read_text(encoding="utf-8"))
    again = outlier_shares(written["seed"])
    hint = "run robust-attention figure methods --out docs/images/methods"
    assert written["curves"] == again["curves"], hint
    for panel in ("keys", "values"):
        for label, shares in again[panel]["shares"].items():
            assert written[panel]["shares"][label] == pytest.approx(shares, abs=1e-4), f"{label}: {hint}"


def test_figure_methods_writes_numbers_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from robust_attention import cli
    from robust_attention.eval import influence

    pytest.importorskip("matplotlib")
    record = json.loads((DOCS / "images" / "methods" / "methods.json").read_text(encoding="utf-8"))
    seeds = []
    monkeypatch.setattr(influence, "outlier_shares", lambda seed: seeds.append(seed) or record)
    with pytest.raises(SystemExit) as stop:
        cli.main(["figure", "methods", "--out", str(tmp_path / "new"), "--seed", "4"])
    assert not stop.value.code
    assert seeds == [4]
    assert json.loads((tmp_path / "new" / "methods.json").read_text(encoding="utf-8")) == record
    assert {path.stem for path in (tmp_path / "new").glob("*.png")} == set(ra.methods())


def test_an_outlier_counts_less_with_robust_weights_and_more_with_softmax() -> None:
    record = json.loads((DOCS / "images" / "methods" / "methods.json").read_text(encoding="utf-8"))
    even, keys, values = record["even_share"], record["keys"]["shares"], record["values"]["shares"]
    assert keys["Softmax"][-1] > 2 * even
    assert keys["RKDE, Tukey(0.8)"][-1] < 1e-3
    assert keys["SPKDE"][-1] < even / 4
    assert keys["MoM, partition"][-1] < keys["MoM"][-1]
    assert values["SPKDE"][-1] == values["RKDE, Tukey(0.8)"][-1] == 0
    for label in ("Softmax", "KDE", "MoM", "Fourier", "MGK", "Performer", "PositionScaled"):
        assert len(set(values[label])) == 1, f"{label} does not look at values"


@pytest.mark.slow
def test_site_builds_without_warnings_and_without_the_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    # --strict counts the warnings that are shown: it must not be run with --quiet.
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    for path, html in pages.items():
        fetched = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(https?://[^" >]*)', html)
        assert not fetched, f"{path} fetches {fetched}"
    for name, cls in ra.methods().items():
        html = pages[tmp_path / "methods" / name / "index.html"]
        assert "<math" in html
        for field in dataclasses.fields(cls):
            assert f'id="robust_attention.{cls.__name__}.{field.name}"' in html, f"document {field.name}"
    everything = "".join(pages.values())
    for name in set(ra.__all__) - {"__version__", "density", "nn"}:
        assert f'id="robust_attention.{name}"' in everything, f"{name} is exported and in no page"


def test_table_of_the_pretrained_study_is_up_to_date() -> None:
    from robust_attention.plots.pretrained import table

    record = json.loads(read("results/pretrained-text.json"))
    written = re.search(r"<!-- table:.*?-->\n(.*?)<!-- /table -->", read("docs/recipes/pretrained.md"), re.DOTALL)
    assert written is not None
    assert written[1].strip() == table(record).strip()
