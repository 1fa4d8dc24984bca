"""Every code block of the documents runs, and what is generated in them is up to date."""

import re
from pathlib import Path

import pytest
import torch

import robust_attention as ra
from robust_attention.ops import _method

ROOT = Path(__file__).parent.parent


def blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", blocks("README.md"), ids=range(len(blocks("README.md"))))
def test_readme_code_runs(code: str) -> None:
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


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
    for name in ("README.md", "CONTRIBUTING.md", "LAB.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name} links to {target}"


def test_table_of_methods_is_up_to_date() -> None:
    from robust_attention.cli import methods_table

    written = re.search(r"<!-- methods:.*?-->\n(.*?)<!-- /methods -->", (ROOT / "README.md").read_text(), re.DOTALL)
    assert written is not None
    assert written[1].strip() == methods_table().strip(), "run robust-attention methods --markdown and paste it"
