"""Check whether the quotas of Vertex AI leave what the plan needs: each one's limit and use in the run's region."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from vlmpipe.doctor import remedies
from vlmpipe.doctor.google_api import CannotSee, GoogleApi
from vlmpipe.doctor.rows import Row, missing, ok, unseen
from vlmpipe.planner.cost.quotas import quotas, serving_quotas

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

SERVICE = "aiplatform.googleapis.com"
USAGE = "serviceruntime.googleapis.com/quota/allocation/usage"
LOOK_BACK = timedelta(hours=25)  # Cloud Monitoring gets the use of such quotas about once a day, and when it changes
UNLIMITED = -1
BY_NAME = "quota-metrics-by-name"


def quota_rows(config: RunConfig, api: GoogleApi) -> Iterator[Row]:
    """A row for each quota that the run's jobs and its endpoint count against."""
    needed = {**quotas(config), **serving_quotas(config)}
    for name, count in needed.items():
        try:
            yield _row(api, name, count, config.gcp.location)
        except CannotSee as error:
            yield unseen("quota", f"{name}: {count} needed in {config.gcp.location}; {error.why}", error.fix)
    if not needed:
        yield unseen("quota", "the names of the quotas for the run's machines are not known")


def _row(api: GoogleApi, name: str, needed: int, region: str) -> Row:
    metric = f"{SERVICE}/{name}"
    path = f"/v1beta1/projects/{api.project}/services/{SERVICE}/consumerQuotaMetrics/{metric.replace('/', '%2F')}"
    answer = api.get("serviceusage", path)
    where = f"{name} in {region}"
    if answer.status == 403:
        role = "roles/serviceusage.serviceUsageViewer"
        fix = remedies.grant_on_project(api.project, api.member, role)
        return unseen("quota", f"{where}: {needed} needed; {answer.message}", fix)
    limit = limit_of(answer.content, region) if answer.status == 200 else None
    if limit is None:
        unknown = unseen("quota", f"{where}: {needed} needed; Vertex AI names no limit ({answer.status})")
        return unknown.showing(BY_NAME, False)
    used, note = _used(api, metric, region)
    text = f"{where}: {needed} needed, limit {'none' if limit == UNLIMITED else limit}, {note}"
    if limit == UNLIMITED or needed <= limit - used:
        return ok("quota", text).showing(BY_NAME, True)
    if needed > limit:
        fix = remedies.raise_quota(api.project, metric, region, needed)
        return missing("quota", text, fix).showing(BY_NAME, True)
    fix = (
        f"wait until others are done, or raise it:\n{remedies.raise_quota(api.project, metric, region, needed + used)}"
    )
    return missing("quota", f"{text}: too little is free", fix).showing(BY_NAME, True)


def limit_of(metric: Mapping[str, Any], region: str) -> int | None:
    """The limit in a region: the region's own, or that of all regions. None where the metric has none by region."""
    for limit in metric.get("consumerQuotaLimits", ()):
        if "{region}" not in limit.get("unit", ""):
            continue
        buckets = limit.get("quotaBuckets", ())
        of_region = [bucket for bucket in buckets if bucket.get("dimensions", {}).get("region") == region]
        of_all = [bucket for bucket in buckets if not bucket.get("dimensions")]
        for bucket in [*of_region, *of_all]:
            return int(bucket.get("effectiveLimit", 0))  # proto3's JSON leaves out 0
    return None


def _used(api: GoogleApi, metric: str, region: str) -> tuple[int, str]:
    """How many of a quota are used, and a sentence; 0 where Cloud Monitoring knows of no use."""
    now = datetime.now(UTC)
    query = (
        f'metric.type="{USAGE}" AND resource.type="consumer_quota" AND metric.labels.quota_metric="{metric}" '
        f'AND resource.labels.location="{region}"'
    )
    interval = {"interval.startTime": _time(now - LOOK_BACK), "interval.endTime": _time(now)}
    try:
        answer = api.get("monitoring", f"/v3/projects/{api.project}/timeSeries", filter=query, **interval)
    except CannotSee as error:
        return 0, f"its use is not known ({error.why})"
    if answer.status != 200:
        return 0, f"its use is not known (Cloud Monitoring answers {answer.status})"
    points = [series["points"][0]["value"] for series in answer.content.get("timeSeries", ()) if series.get("points")]
    if not points:
        return 0, "no use reported"
    used = max(int(point.get("int64Value", 0)) for point in points)
    return used, f"{used} used"


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
