"""The command line: every command answers, help comes at once, and what is wrong is said in one line."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import robust_attention as ra
from robust_attention import cli, demo, density


def run(arguments: list[str]) -> int | str | None:
    """The exit status of a command, or its last words."""
    try:
        cli.main(arguments)
    except SystemExit as stop:
        return stop.code
    return 0


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as its user starts it; the last line of its output lists what it loaded."""
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules)); "
        "from robust_attention.cli import main; main()"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_methods_prints_the_table_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["methods", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert out.strip() == cli.methods_table()
    head, rule, *rows = out.strip().splitlines()
    assert head.count("|") == rule.count("|") == 5
    for row, cls in zip(rows, ra.methods().values(), strict=True):
        assert row == f"| `ra.{cls.__name__}` | {cls.equation} | {cls.formula} | {cls.summary} |"
        assert getattr(ra, cls.__name__) is cls


@pytest.mark.parametrize("columns", ["80", "200"])
def test_methods_lists_every_registered_one(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run(["methods"]) == 0
    out = capsys.readouterr().out
    for name, cls in ra.methods().items():
        assert name in out
        assert cls.__name__ in out


@pytest.mark.parametrize("path", ["", *cli.COMMANDS])
def test_help_names_every_argument(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*path.split(), "--help"]) == 0
    out = capsys.readouterr().out
    if not path:
        assert all(command.split()[0] in out for command in cli.COMMANDS)
        return
    function = cli.COMMANDS[path]
    assert (function.__doc__ or "").split()[0] in out
    for name in inspect.signature(function).parameters:
        assert "--" + name.strip("_").replace("_", "-") in out


@pytest.mark.parametrize("arguments", [("--help",), ("dance",)], ids=" ".join)
def test_help_and_errors_of_usage_load_nothing_beyond_torch(arguments: tuple[str, ...]) -> None:
    done = fresh(*arguments)
    assert (done.returncode == 0) == (arguments == ("--help",))
    assert "demo" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "robust_attention.cli" in loaded
    assert not loaded & {"matplotlib", "PIL", "triton", "robust_attention.demo", "robust_attention.models.vit"}


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == ra.__version__


def test_demo_hands_its_arguments_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[Any, ...]] = []
    monkeypatch.setattr(demo, "run", lambda *arguments: called.append(arguments))
    assert run(["demo"]) == 0
    assert run(["demo", "--out", str(tmp_path), "--seed", "3", "--epochs", "2", "--num-attacked", "5"]) == 0
    (plain, plain_out, console), (changed, out, _) = called
    assert (plain, plain_out) == (demo.demo_cells(), Path("out/demo"))
    assert isinstance(console, Console)
    assert out == tmp_path
    for cell in changed:
        assert (cell.config.seed, cell.config.fit.epochs, cell.config.evaluation.num_attacked) == (3, 2, 5)


def test_figure_density_writes_numbers_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = density.contaminated_normal(seed=4, clean=200, outliers=20, steps=31)
    seeds = []

    def contaminated_normal(seed: int) -> dict[str, Any]:
        seeds.append(seed)
        return small

    monkeypatch.setattr(density, "contaminated_normal", contaminated_normal)
    assert run(["figure", "density", "--out", str(tmp_path / "new"), "--seed", "4"]) == 0
    assert seeds == [4]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["density.json", "density.png"]
    assert json.loads((tmp_path / "new" / "density.json").read_text(encoding="utf-8")) == json.loads(json.dumps(small))
    assert (tmp_path / "new" / "density.png").stat().st_size > 20_000
    out = capsys.readouterr().out
    for name, error in small["integrated_squared_error"].items():
        assert f"{name:6} integrated squared error {error:.4f}" in out


WRONG: list[tuple[list[str], str]] = [
    (["demo", "--epochs", "many"], r'--epochs: unable to convert "many" into int'),
    (["demo", "--epochs", "0"], "robust-attention: epochs must be a whole number of at least 1, got 0"),
    (["demo", "--num-attacked", "0"], "robust-attention: num_attacked must be a whole number of at least 1, got 0"),
    (["demo", "--seed", "-1"], "robust-attention: seed must be a whole number from 0 to"),
    (["demo", "--speed", "3"], "Unknown option: --speed"),
    (["demo", "fast", "--seed", "0"], "fast"),
    (["dance"], 'Unknown command "dance"'),
    (["figure", "dance"], 'Unknown command "dance"'),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_arguments_fail_clearly(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run", lambda *_: pytest.fail("started"))
    status = run(arguments)
    printed = capsys.readouterr()
    assert not printed.out
    said = printed.err + (status if isinstance(status, str) else "")
    assert words in said
    assert isinstance(status, str) or (isinstance(status, int) and status > 0)
    assert len(said.strip().splitlines()) == 1, said


def test_folder_that_cannot_be_written_to_fails_clearly(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    done = fresh("figure", "density", "--out", str(file))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("robust-attention: --out must be a folder that can be written to")
    assert str(file) in line


@pytest.mark.parametrize("missing", ["cyclopts", "rich"])
def test_missing_command_line_libraries_fail_clearly(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert run(["--help"]) == f"the command line needs {missing}; pip install 'robust-attention[demo]'"


def test_missing_matplotlib_fails_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(density, "contaminated_normal", lambda _: {})
    words = "this command needs matplotlib; pip install 'robust-attention[demo]'"
    assert run(["figure", "density", "--out", str(tmp_path)]) == words


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("eps must be"), "robust-attention: eps must be"),
        (OSError("No space left"), "robust-attention: No space left"),
        (FloatingPointError("the loss must"), "robust-attention: the loss must"),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else "",
)
def test_failing_command_ends_without_traceback(
    error: BaseException, status: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "fail", fail)
    assert run(["fail"]) == status


def test_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("attack left the ball")

    monkeypatch.setitem(cli.COMMANDS, "fail", fail)
    with pytest.raises(AssertionError, match="attack left the ball"):
        run(["fail"])
