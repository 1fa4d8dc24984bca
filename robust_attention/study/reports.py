"""The report of whichever study left its cells in a folder."""

from pathlib import Path
from typing import Any

from robust_attention.study import store
from robust_attention.study.language_pages import language_report
from robust_attention.study.pages import vision_report
from robust_attention.study.series_pages import series_report

REPORTS = {"language": language_report, "vision": vision_report, "timeseries": series_report}


def study_report(out: Path) -> dict[str, Any]:
    """Everything that tables and figures show, as JSON."""
    names = sorted({record["study"] for record in store.read(store.result_files(out))})
    if len(names) != 1 or names[0] not in REPORTS:
        found = ", ".join(names) or "none"
        raise ValueError(f"--out must hold cells*.jsonl of one study ({', '.join(REPORTS)}), got {found} in {out}")
    return {"study": names[0], **REPORTS[names[0]](out)}
