# Optional: mails when the project's month costs more than planned. A budget notifies only; it stops nothing.

resource "google_billing_budget" "project" {
  count = var.monthly_budget > 0 ? 1 : 0

  billing_account = var.billing_account
  display_name    = "${var.name} ${var.project}"

  budget_filter {
    projects               = ["projects/${data.google_project.this[0].number}"]
    credit_types_treatment = "EXCLUDE_ALL_CREDITS" # free credits would hide what is spent
  }

  amount {
    specified_amount {
      units = tostring(var.monthly_budget) # in the billing account's own currency
    }
  }

  threshold_rules {
    threshold_percent = 0.5
  }
  threshold_rules {
    threshold_percent = 0.9
  }
  threshold_rules {
    threshold_percent = 1.0
  }
  threshold_rules {
    threshold_percent = 1.0
    spend_basis       = "FORECASTED_SPEND"
  }

  # Besides the billing account's administrators, who are told by default.
  dynamic "all_updates_rule" {
    for_each = length(var.alert_emails) > 0 ? [1] : []
    content {
      monitoring_notification_channels = [for channel in google_monitoring_notification_channel.email : channel.id]
    }
  }

  depends_on = [google_project_service.all]
}
