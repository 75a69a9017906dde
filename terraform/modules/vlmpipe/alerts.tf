# Alerts on what training prints, by e-mail: with alert_emails. They read the logs of all custom jobs in the project.

locals {
  # By the id of vlmpipe diagnose: a text of the log line, and the alert's title.
  alerts = {
    replica-exit      = { text = "exited with a non-zero status of", title = "a training job failed" }
    stalled           = { text = "has made no step for", title = "training stands still" }
    mirror-lags       = { text = "the mirror lags", title = "checkpoints do not reach the mirror" }
    gpu-throttled     = { text = "is throttled (", title = "a GPU runs below its clock" }
    gpu-memory-errors = { text = "uncorrected memory errors", title = "a GPU has uncorrected memory errors" }
    straggler         = { text = "is a straggler", title = "one rank is slower than the others" }
  }
}

resource "google_monitoring_notification_channel" "email" {
  for_each = var.alert_emails

  project      = var.project
  display_name = "${var.name}: ${each.key}"
  user_labels  = var.labels
  type         = "email"
  labels       = { email_address = each.key }

  depends_on = [google_project_service.all]
}

resource "google_monitoring_alert_policy" "logs" {
  for_each = length(var.alert_emails) > 0 ? local.alerts : {}

  project               = var.project
  display_name          = "${var.name}: ${each.value.title}"
  user_labels           = var.labels
  combiner              = "OR"
  notification_channels = [for channel in google_monitoring_notification_channel.email : channel.id]

  conditions {
    display_name = each.value.title

    condition_matched_log {
      filter           = "resource.type=\"ml_job\" AND (textPayload:\"${each.value.text}\" OR jsonPayload.message:\"${each.value.text}\")"
      label_extractors = { job = "EXTRACT(resource.labels.job_id)" }
    }
  }

  alert_strategy {
    auto_close = "86400s"

    notification_rate_limit {
      period = "3600s"
    }
  }

  documentation {
    content = "See vlmpipe diagnose, pattern ${each.key}, and docs/reference/failure-modes.md."
  }
}
