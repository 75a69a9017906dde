# Alerts by e-mail, with alert_emails: on what training prints, on GPUs that are paid for and idle, and on pipelines that fail.
# They look at all custom jobs and pipelines of the project.

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

# A pipeline that failed, whoever started it: nobody watches the runs of a schedule. The state is in the service's own log of
# the pipeline's events.
resource "google_monitoring_alert_policy" "pipelines" {
  count = length(var.alert_emails) > 0 ? 1 : 0

  project               = var.project
  display_name          = "${var.name}: a pipeline failed"
  user_labels           = var.labels
  combiner              = "OR"
  notification_channels = [for channel in google_monitoring_notification_channel.email : channel.id]

  conditions {
    display_name = "a pipeline failed"

    condition_matched_log {
      filter           = "resource.type=\"aiplatform.googleapis.com/PipelineJob\" AND jsonPayload.state=\"PIPELINE_STATE_FAILED\""
      label_extractors = { run = "EXTRACT(resource.labels.pipeline_job_id)" }
    }
  }

  alert_strategy {
    auto_close = "86400s"

    notification_rate_limit {
      period = "3600s"
    }
  }

  documentation {
    content = "vlmpipe diagnose RUN names the step and the cause."
  }
}

# A job whose GPUs do next to nothing: training that fell back to the CPU, a rank that waits for ever, data that does not
# arrive. Vertex AI reports the share of time in which each node's accelerators computed, between 0 and 1.
resource "google_monitoring_alert_policy" "idle_gpus" {
  count = length(var.alert_emails) > 0 ? 1 : 0

  project               = var.project
  display_name          = "${var.name}: GPUs are idle"
  user_labels           = var.labels
  combiner              = "OR"
  notification_channels = [for channel in google_monitoring_notification_channel.email : channel.id]

  conditions {
    display_name = "GPUs of a running job compute less than 5 % of the time"

    condition_threshold {
      filter                  = "metric.type=\"ml.googleapis.com/training/accelerator/utilization\" AND resource.type=\"cloudml_job\""
      comparison              = "COMPARISON_LT"
      threshold_value         = 0.05
      duration                = "${var.idle_gpu_minutes * 60}s"
      evaluation_missing_data = "EVALUATION_MISSING_DATA_INACTIVE" # a job that has ended reports nothing

      aggregations {
        alignment_period     = "300s"
        per_series_aligner   = "ALIGN_MEAN"
        cross_series_reducer = "REDUCE_MEAN"
        group_by_fields      = ["resource.label.job_id"]
      }
    }
  }

  alert_strategy {
    auto_close = "86400s"
  }

  documentation {
    content = "vlmpipe status RUN shows the step and tokens/s, vlmpipe logs RUN --step train what it prints; vlmpipe cancel RUN stops paying."
  }
}
