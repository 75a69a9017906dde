"""The `audit` job: audits the data of a run by its own checkpoints, and writes what it found into the run's folder.

Ranks share the losses of samples; rank 0 compares images and writes.
"""

from __future__ import annotations

import argparse

from vlmpipe.trainer.gc_control import collector_off

with collector_off():
    from vlmpipe.trainer import __version__
    from vlmpipe.trainer.audit.audit import AuditRequest, audit_with, losses_of
    from vlmpipe.trainer.audit.checkpoints import compared_names
    from vlmpipe.trainer.audit.findings import EXCLUSIONS, FOLDER, Audit, exclusion_file
    from vlmpipe.trainer.audit.images.search import max_compared
    from vlmpipe.trainer.config.job import AuditConfig, JobConfig
    from vlmpipe.trainer.distributed.agreement import on_first
    from vlmpipe.trainer.distributed.process import PATIENCE, ProcessContext, run_worker, start_worker
    from vlmpipe.trainer.models.image_threads import use_threads
    from vlmpipe.trainer.progress import Progress
    from vlmpipe.trainer.storage import open_storage
    from vlmpipe.trainer.storage.base import Storage, join_uri


def audit_run(job: JobConfig, worker: ProcessContext) -> None:
    """Audit the run's data, unless that was done for these data, checkpoints and settings. Collective."""
    settings, store = job.evaluate.audit or AuditConfig(), open_storage(join_uri(job.run.run_uri, FOLDER))
    request = AuditRequest(job, job.pointers().prepared_uri, has_run=True, max_samples=settings.max_samples)
    progress = Progress(job.run.run_uri, "audit") if worker.is_first else None
    earlier = on_first(worker, lambda: _earlier(store, request))
    if earlier:
        if progress:
            progress.finish("reused", earlier)
        return

    def told(what: str, done: int, of: int) -> None:
        if progress:
            progress.update(done, of, message=what)

    losses = losses_of(request, told, worker)

    def write() -> str:
        result, _ = audit_with(request, losses, told)
        store.write(EXCLUSIONS, exclusion_file(result))
        result.write(store)  # last: a record without its list is made again
        return _described(result, store)

    described = on_first(worker, write)
    if progress:
        progress.finish(message=described)


def _earlier(store: Storage, request: AuditRequest) -> str:
    """Description of the audit that is there of these data, checkpoints and settings; empty for none."""
    audit = Audit.read_if_whole(store)
    made_of = (__version__, request.prepared_uri, request.max_samples, compared_names(request.job))
    if audit is None or audit.made_of != made_of or not store.stat(EXCLUSIONS):
        return ""
    compared = audit.finding("near_duplicate").checked  # fewer where the package of an index was missing
    return _described(audit, store) if compared == min(audit.images, max_compared()) else ""


def _described(result: Audit, store: Storage) -> str:
    kinds = ", ".join(f"{finding.samples:,} {finding.kind}" for finding in result.findings if finding.samples)
    text = f"samples flagged: {kinds or 'none'}; {result.excluded:,} of {result.samples:,} to look at"
    return f"{text} in {store.uri(EXCLUSIONS)}"


def main() -> None:
    """Audit on this rank."""
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.audit.job", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    options = parser.parse_args()
    job = JobConfig.load(options.config)
    use_threads(job.data.loader_threads)
    audit_run(job, start_worker(PATIENCE, shares_gpus=True))


if __name__ == "__main__":
    run_worker(main)
