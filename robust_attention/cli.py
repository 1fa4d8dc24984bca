"""The command `robust-attention`: a table of names to functions.

What a command needs beyond torch is imported inside it: help and errors of usage need none of it.
"""

import sys
from collections.abc import Callable
from pathlib import Path


def demo(*, out: Path = Path("out/demo"), seed: int = 0, epochs: int = 30, num_attacked: int = 256) -> None:
    """Train twins that differ in their attention only, contaminate and attack them, draw one picture.

    About three minutes on two cores: five rows of `study vision` on digits. Everything it measures goes to
    `cells-1-of-1.jsonl` and `demo.json`, the picture to `demo.png`; started again, it goes on where it was.

    Parameters
    ----------
    out
        Folder for the results.
    seed
        Initial weights, order of the batches, contamination and attacks.
    epochs
        Passes over the training digits.
    num_attacked
        Test digits that are attacked.
    """
    from rich.console import Console

    from robust_attention import _checks
    from robust_attention.demo import demo_cells, run

    _checks.whole("epochs", epochs, least=1)
    _checks.whole("num_attacked", num_attacked, least=1)
    _checks.whole("seed", seed, least=0, most=2**62)
    settings = {"fit.epochs": epochs, "evaluation.num_attacked": num_attacked}
    run(demo_cells(seed, settings), out, Console())


_STUDY = """{first}

    A grid of independent cells (data x row x seed), one JSON line each. What is done stays done: interrupt it and start
    it again, or give each of several machines a shard.

    Parameters
    ----------
    scale
        {scales}
    out
        Folder for the results; out/STUDY-SCALE if left out.
    root
        Folder that holds the data; not needed for the scale smoke.
    data
        A part of the data to run, named again for more: --data A --data B; all of the scale if left out.
    rows
        A row to run, named again for more: --rows kde --rows mom; those of the paper if left out.
    seeds
        Seeds a row, counted from 0; the scale's own number if left out.
    set_
        Change any field: --set fit.epochs=3 --set method.beta=1.2.
    config
        A TOML or JSON file with such changes.
    shard
        i/n: every n-th cell from the i-th on.
    jobs
        Cells at once, each on one core; all cores on a CPU if left out, 1 on a GPU.
    device
        cpu, cuda, or auto: a GPU where there is one.
    list_
        Print the cells and whether they are done, and stop.
    """


def _study(name: str, first: str, scales: str) -> Callable[..., None]:
    """The command of one study."""

    def study(
        *,
        scale: str = "smoke",
        out: Path | None = None,
        root: str = "",
        data: list[str] | None = None,
        rows: list[str] | None = None,
        seeds: int | None = None,
        set_: list[str] | None = None,
        config: Path | None = None,
        shard: str = "1/1",
        jobs: int | None = None,
        device: str = "auto",
        list_: bool = False,
    ) -> None:
        from robust_attention.study.run import run_study
        from robust_attention.study.store import result_files
        from robust_attention.study.studies import STUDIES
        from robust_attention.training.parallel import rank

        folder, failed = run_study(
            STUDIES[name],
            scale=scale,
            out=out,
            root=root,
            data=data or (),
            rows=rows or (),
            seeds=seeds,
            changes=set_ or (),
            config=config,
            shard=shard,
            jobs=jobs,
            device=device,
            list_only=list_,
        )
        try:
            if not list_ and rank() == 0 and result_files(folder):  # a shard may have nothing to do
                study_report(out=folder)
        finally:  # without a cell that is done there is no report, and this is what explains it
            if failed:
                names = ", ".join(failed)
                sys.exit(f"robust-attention: {len(failed)} cells failed: {names}; see cells*.jsonl in {folder}")

    study.__doc__ = _STUDY.format(first=first, scales=scales)
    return study


study_vision = _study(
    "vision",
    "Train every row of the paper's image tables, contaminate, corrupt and attack it, and write the tables.",
    "smoke (embedded digits, CPU, minutes), laptop (a part of CIFAR-10, CPU, a quarter of an hour a cell), lab "
    "(CIFAR-10 and Tiny-ImageNet, one GPU) or paper (ImageNet, four GPUs or more, started by torchrun; its cost is "
    "printed first).",
)
study_language = _study(
    "language",
    "Train every row of the paper's language tables, swap words, and split the loss into swapped and clean words.",
    "smoke (a generated text, CPU, minutes), lab (25 M words of Wikipedia, WikiText-103's valid and test, one GPU) or "
    "paper (WikiText-103, four GPUs or more, started by torchrun; its cost is printed first).",
)
study_timeseries = _study(
    "timeseries",
    "Train every row of the paper's time-series table, contaminate the series, and write tables and ranks.",
    "smoke (generated waves, CPU, a minute), laptop (two problems, ten seeds, small models, CPU), lab (six problems, "
    "ten seeds, one GPU) or paper (the five problems).",
)


def study_report(*, out: Path = Path("out/vision-smoke")) -> None:
    """Tables, figures and the ledger beside the paper, from the cells in a folder.

    Parameters
    ----------
    out
        Folder of a study, or one file of cells; everything goes beside them.
    """
    from robust_attention._files import write_bytes, write_json
    from robust_attention.plots import study as plots
    from robust_attention.study.reports import study_report as read

    report = read(out)
    folder = out.parent if out.is_file() else out
    write_json(folder / "report.json", report)
    made = []
    for name, text in plots.texts(report).items():
        made.append(folder / name)
        write_bytes(made[-1], text.encode())
    print(*made, *plots.draw(report, folder), sep="\n")


def explain(
    what: str | None = None,
    *,
    model: str | None = None,
    out: Path = Path("out/explain"),
    example: int = 0,
    kind: str = "noise",
    share: float = 0.2,
) -> None:
    """Show which patches, words or time steps each method trusts.

    Parameters
    ----------
    what
        A picture (its patches are weighed by the demo's twins), a text or text file (weighed in a transformers encoder
        or a model of the language study), or a .ts file. Nothing: a digit that the twins have not seen, spoilt.
    model
        For a picture the demo's folder (out/demo if left out), for a text a folder with an encoder and its tokenizer
        or a run of the language study, for a .ts file a run of the time-series study.
    out
        Folder for `explain.png` or `explain.html`, and `explain.json` with the numbers.
    example, kind, share
        Which test digit or series, and how the digit is spoilt: noise, flat or foreign patches, and how many.
    """
    from robust_attention import explain as explaining
    from robust_attention._files import prepare_folder, write_json
    from robust_attention.plots import explain as plots

    prepare_folder(out)
    medium, found = explaining.explain(what, model, example, kind, share)
    write_json(out / "explain.json", found)
    if medium == "text":
        print(plots.write_text(found, out / "explain.html"))
    else:
        draw = plots.draw_image if medium == "image" else plots.draw_series
        print(draw(found, out / "explain.png"))


def figure_density(*, out: Path = Path("out/figures"), seed: int = 0) -> None:
    """Draw the paper's density figure: truth and four estimates from 1,000 normal points and 100 outliers.

    Writes `density.png` and, with every number in it, `density.json`.

    Parameters
    ----------
    out
        Folder for the figure.
    seed
        Seed of the points.
    """
    from robust_attention import _checks
    from robust_attention._files import prepare_folder, write_json
    from robust_attention.density import contaminated_normal
    from robust_attention.plots import density

    _checks.whole("seed", seed, least=0, most=2**62)
    prepare_folder(out)
    result = contaminated_normal(seed)
    write_json(out / "density.json", result)
    print(density.draw(result, out / "density.png"))
    for name, error in result["integrated_squared_error"].items():
        print(
            f"{name:6} integrated squared error {error:.4f}, {result['outlier_mass'][name]:.1%} of its mass on outliers"
        )


def figure_methods(*, out: Path = Path("out/figures/methods"), seed: int = 0) -> None:
    """Draw, for every method, how much an outlying key counts as it moves away from the others.

    Writes one PNG a method and, with every number in them, `methods.json`.

    Parameters
    ----------
    out
        Folder for the figures.
    seed
        Seed of the keys, values and queries.
    """
    from robust_attention import _checks
    from robust_attention._files import prepare_folder, write_json
    from robust_attention.eval import influence
    from robust_attention.plots import methods as plots

    _checks.whole("seed", seed, least=0, most=2**62)
    prepare_folder(out)
    record = influence.outlier_shares(seed)
    write_json(out / "methods.json", record)
    print(*plots.draw(record, out), sep="\n")


def methods(*, markdown: bool = False) -> None:
    """List every method: its class, its equation, what it computes.

    Parameters
    ----------
    markdown
        Print the table of the README.
    """
    if markdown:
        print(methods_table())
        return
    for name, (cls, equation, words, _, settings) in _rows().items():
        print(f"{name:16} ra.{cls:15} {equation:10} {words}\n{'':16} {settings}")


def methods_table() -> str:
    """The registry as a Markdown table."""
    lines = ["| method | defined by | h_i | in words |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `ra.{cls}` | {equation} | {formula} | {words} |" for cls, equation, words, formula, _ in _rows().values()
    ]
    return "\n".join(lines)


def _rows() -> dict[str, tuple[str, str, str, str, str]]:
    from dataclasses import fields

    import robust_attention as ra

    return {
        name: (cls.__name__, cls.equation, cls.summary, cls.formula, ", ".join(f.name for f in fields(cls)))
        for name, cls in ra.methods().items()
    }


def bench(*, scale: str = "auto", only: list[str] | None = None, out: Path = Path("out/bench")) -> None:
    """Time and memory of every method beside SDPA, the plain formula and the published algorithm.

    Every implementation is checked against float64 first; one that fails is named and not timed. Rows go to
    `bench.json` as they come, plots and a table follow; started again on the same machine and code, it goes on.

    Parameters
    ----------
    scale
        smoke (seconds), laptop (CPU, some minutes), gpu (some minutes), or auto: gpu where there is one.
    only
        Parts to run: operator, growing, decode, step; all if left out.
    out
        Folder for the results.
    """
    import torch

    from robust_attention import _checks
    from robust_attention.bench.run import run
    from robust_attention.bench.scales import KINDS, SCALES
    from robust_attention.plots import bench as plots

    _checks.one_of("scale", scale, ("auto", *SCALES))
    if scale == "auto":
        scale = "gpu" if torch.cuda.is_available() else "laptop"
    if scale == "gpu" and not torch.cuda.is_available():
        raise ValueError("scale='gpu' needs a CUDA device, got none; choose laptop")
    record = run(scale, SCALES[scale], out, lambda line: print(line, flush=True), only or KINDS)
    (out / "bench.md").write_text(plots.table(record) + "\n", encoding="utf-8")
    print(*plots.draw(record, out), out / "bench.md", sep="\n")


def generate(
    folder: Path,
    prompt: str = "",
    *,
    number: int = 100,
    temperature: float = 1.0,
    top_k: int = 40,
    seed: int = 0,
) -> None:
    """Continue a text by a model that the language study trained.

    Parameters
    ----------
    folder
        A run of the study: RESULTS/runs/DATA/ROW/SEED.
    prompt
        Words to go on from.
    number
        Words to add.
    temperature
        Below 1 likely words become likelier; 0 takes the likeliest.
    top_k
        Words that are considered each time; 0 means all.
    seed
        Equal seeds give equal texts.
    """
    from robust_attention.study.language import generate_text

    print(generate_text(folder, prompt, number=number, temperature=temperature, top_k=top_k or None, seed=seed))


def classify(folder: Path, file: Path, *, missing: str | None = None) -> None:
    """Name the class of each series of a .ts file by a model that the time-series study trained.

    Parameters
    ----------
    folder
        A run of the study: RESULTS/runs/PROBLEM/ROW/SEED.
    file
        A .ts file of the same problem.
    missing
        What to do with missing values: fail, zero, interpolate or mask; as in training if left out.
    """
    from typing import get_args

    from robust_attention import _checks
    from robust_attention.data.ts import Missing
    from robust_attention.study.series import classify as guesses

    if missing is not None:
        _checks.one_of("missing", missing, get_args(Missing))
    for number, guess in enumerate(guesses(folder, file, missing=missing), 1):  # type: ignore[arg-type]
        truth = "" if guess.truth is None else f", labelled {guess.truth}"
        print(f"{number:6}  {guess.name} ({guess.share:.0%}){truth}")


COMMANDS: dict[str, Callable[..., None]] = {
    "bench": bench,
    "classify": classify,
    "demo": demo,
    "explain": explain,
    "figure density": figure_density,
    "figure methods": figure_methods,
    "generate": generate,
    "methods": methods,
    "study language": study_language,
    "study report": study_report,
    "study timeseries": study_timeseries,
    "study vision": study_vision,
}
_GROUPS = {"figure": "Draw a figure of the paper.", "study": "Reproduce the paper's tables, cell by cell."}


def main(arguments: list[str] | None = None) -> None:
    """Run one command; a wrong argument or a full disk ends in one line, not in a traceback."""
    try:
        import cyclopts
        import rich  # noqa: F401
    except ImportError as error:
        sys.exit(f"the command line needs {error.name}; pip install 'robust-attention[demo]'")
    from robust_attention._version import __version__

    app = cyclopts.App(
        name="robust-attention",
        help="Attention that survives contaminated and adversarial input.",
        version=__version__,
        default_parameter=cyclopts.Parameter(negative=()),  # no --no-list and --empty-rows beside --list and --rows
    )
    groups: dict[str, cyclopts.App] = {"": app}
    for path, function in COMMANDS.items():
        *group, name = path.split()
        for word in group:
            if word not in groups:
                groups[word] = cyclopts.App(name=word, help=_GROUPS[word])
                app.command(groups[word])
        groups[group[-1] if group else ""].command(function, name=name)
    try:
        app(arguments, exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        sys.exit(f"robust-attention: {error}")
    except ImportError as error:
        extra = {"transformers": "hf", "timm": "timm"}.get(error.name or "", "demo")
        sys.exit(f"this command needs {error.name or error}; pip install 'robust-attention[{extra}]'")
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"robust-attention: {error}")
    except KeyboardInterrupt:
        print("robust-attention: stopped; a study goes on when it is started again", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if type(error).__name__ == "Interrupted":  # by SIGTERM, with everything saved; imported late, like torch
            sys.exit(f"robust-attention: {error}")
        raise
