"""The table of the study of a trained text model, from its JSON alone."""

from typing import Any


def table(record: dict[str, Any]) -> str:
    """Markdown: what each setting costs on clean text, and how many spoilt sentences find their originals."""
    trials = list(record["comparisons"])
    head = ["setting", "cosine to the original, clean", "same nearest neighbour, clean", *trials]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in record["rows"]:
        cells = [f"{row['cosine_to_original']:.3f}", f"{row['same_nearest_neighbour']:.0%}"]
        cells += [f"{row['reported_half'][trial]:.0%}" for trial in trials]
        mark = " (chosen)" if row["setting"] == record["best"] else ""
        lines.append(f"| {row['setting']}{mark} | " + " | ".join(cells) + " |")
    verdicts = []
    for trial, found in record["comparisons"].items():
        low, high = found["interval_95"]
        better = "better" if low > 0 else "worse" if high < 0 else "no difference detected"
        verdicts.append(f"- {trial}: {100 * found['difference']:+.1f} points, 95 % interval {100 * low:+.1f} to "
                        f"{100 * high:+.1f}: {better}")  # fmt: skip
    about = (
        f"{record['model']}, {record['sentences']} sentences of {record['text']}; settings chosen on the first "
        f"{record['chosen_on']}, the table and the comparison of the chosen one with softmax are of the others:"
    )
    return "\n".join([*lines, "", about, "", *verdicts])
