"""Lines of an audit for a terminal: what to do first, then a table, then what could not be looked for."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.trainer.audit.findings import Audit, Kind

JSON_SAMPLES = 20  # of each finding
NAMES: dict[Kind, tuple[str, str]] = {  # in the table, and with a number before it
    "near_duplicate": ("near duplicates", "near duplicates"),
    "shared_image": ("shared images", "with shared images"),
    "blank_image": ("blank images", "with blank images"),
    "suspected_label": ("suspected labels", "suspected wrong labels"),
    "contradiction": ("contradictions", "contradictions"),
    "text_alone": ("text alone", "answered by the text alone"),
    "outlier": ("outliers", "outliers"),
}


def decision(audit: Audit) -> str:
    """One sentence that says what to do."""
    if not audit.excluded:
        return f"nothing to exclude: {audit.samples:,} samples and {audit.images:,} images were looked at"
    counts = ", ".join(
        f"{finding.excluded:,} {NAMES[finding.kind][1]}" for finding in audit.findings if finding.excluded
    )
    share = audit.excluded / max(1, audit.samples)
    return f"exclude {audit.excluded:,} of {audit.samples:,} samples ({share:.1%}), after a look: {counts}"


def table(audit: Audit) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Rows of name, samples, groups, groups of both splits, excluded and checked; the first has the names."""
    yield "finding", "samples", "groups", "both splits", "excluded", "checked"
    for finding in audit.findings:
        if not finding.checked and finding.obstacle:
            yield NAMES[finding.kind][0], "not known", "", "", "", "0"
            continue
        groups = (f"{finding.groups:,}", f"{finding.across_splits:,}") if finding.groups else ("", "")
        yield NAMES[finding.kind][0], f"{finding.samples:,}", *groups, f"{finding.excluded:,}", f"{finding.checked:,}"


def lines(audit: Audit, files: dict[str, str]) -> list[str]:
    """The whole screen. files: address of each file that was written, by its name."""
    shown = [decision(audit), ""]
    for name, *values in table(audit):
        shown.append(f"{name:<17}" + "".join(f"{value:>12}" for value in values))
    shown.append("")
    shown += [f"{NAMES[finding.kind][0]}: {finding.advice}" for finding in audit.findings if finding.samples]
    by = f"images compared by {audit.vectors}" if audit.images else "no images"
    if audit.checkpoint_steps:
        by += "; losses at step " + " and ".join(f"{step:,}" for step in audit.checkpoint_steps)
    shown.append(by)
    for finding in audit.findings:
        if finding.obstacle:
            shown.append(f"{NAMES[finding.kind][0]}: {finding.obstacle}")
    for note in audit.notes:
        shown.append(f"note: {note}")
    shown += [f"{name:<11}{address}" for name, address in files.items()]
    if audit.excluded and "exclusions" in files:
        shown += ["", "next: read the page, delete lines that are right, and name the list in the run file:"]
        shown.append(f"  data: {{exclude: {files['exclusions']}}}")
    return shown


def summary_json(audit: Audit, files: dict[str, str]) -> dict[str, object]:
    """One object: the audit with the first samples of each finding, and the files that hold all."""
    shown = audit.model_dump(mode="json")
    for finding in shown["findings"]:
        finding["listed"] = len(finding["flagged"])
        finding["flagged"] = finding["flagged"][:JSON_SAMPLES]
    return {"decision": decision(audit), **shown, "files": files}
