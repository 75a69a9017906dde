# terraform init && terraform test. The provider is played by terraform itself: nothing is created, no credentials are needed.

mock_provider "google" {
  mock_resource "google_service_account" {
    defaults = {
      name   = "projects/my-project/serviceAccounts/account@my-project.iam.gserviceaccount.com"
      email  = "account@my-project.iam.gserviceaccount.com"
      member = "serviceAccount:account@my-project.iam.gserviceaccount.com"
    }
  }
  mock_resource "google_artifact_registry_repository" {
    defaults = { name = "vlmpipe" }
  }
  mock_resource "google_compute_network_attachment" {
    defaults = { id = "projects/my-project/regions/europe-west4/networkAttachments/vlmpipe-jobs" }
  }
  mock_data "google_project" {
    defaults = { number = "123456789" }
  }
}

variables {
  project  = "my-project"
  location = "europe-west4"
}

run "as_it_comes" {
  assert {
    condition     = keys(google_storage_bucket.all) == ["build", "data", "runs"]
    error_message = "Three buckets without a mirror."
  }
  assert {
    condition     = google_storage_bucket.all["runs"].soft_delete_policy[0].retention_duration_seconds == 0
    error_message = "Deleted checkpoints are billed on."
  }
  assert {
    condition     = google_storage_bucket.all["data"].soft_delete_policy[0].retention_duration_seconds == 604800
    error_message = "Data that was deleted by mistake is gone."
  }
  assert {
    condition     = alltrue([for rule in google_storage_bucket.all["runs"].lifecycle_rule : one(rule.action).type == "AbortIncompleteMultipartUpload"])
    error_message = "A rule takes a checkpoint apart."
  }
  assert {
    condition     = length(google_storage_bucket.all["build"].lifecycle_rule) == 2
    error_message = "Old sources stay."
  }
  assert {
    condition     = yamldecode(output.run_file).gcp.pipeline_root == "gs://my-project-vlmpipe-runs/vlmpipe"
    error_message = "The run file's pipeline root is not in the runs bucket."
  }
  assert {
    condition     = length(regexall("(?m)^export [A-Z_]+=[^ \"]+$", output.env_sh)) == 9
    error_message = "env.sh has another form than make can read."
  }
  assert {
    condition     = length(google_monitoring_alert_policy.logs) == 0 && length(data.google_project.this) == 0 && length(google_compute_network.jobs) == 0 && output.mirror_uri == ""
    error_message = "Something optional is made unasked."
  }
}

run "with_a_mirror_secrets_and_people" {
  variables {
    mirror_location = "europe-west1"
    secrets         = { chat = "pipeline", hf-token = "trainer" }
    submitters      = ["user:ann@example.com"]
  }

  assert {
    condition     = google_storage_bucket.all["mirror"].location == "europe-west1" && length(google_storage_bucket_iam_member.all) == 7
    error_message = "No mirror, or nobody may write to it."
  }
  assert {
    condition     = google_secret_manager_secret_iam_member.reader["chat"].member == google_service_account.all["pipeline"].member
    error_message = "The pipeline cannot read the webhook."
  }
  assert {
    condition     = contains(keys(google_project_service.all), "secretmanager.googleapis.com")
    error_message = "Secret Manager is not enabled."
  }
  assert {
    condition     = google_service_account_iam_member.submitters["user:ann@example.com"].role == "roles/iam.serviceAccountTokenCreator"
    error_message = "Ann cannot act as the submitter."
  }
}

run "with_alerts" {
  variables {
    alert_emails = ["oncall@example.com", "ann@example.com"]
  }

  assert {
    condition     = length(google_monitoring_alert_policy.logs["straggler"].notification_channels) == 2
    error_message = "An address is not told."
  }
  assert {
    condition     = strcontains(google_monitoring_alert_policy.logs["stalled"].conditions[0].condition_matched_log[0].filter, "textPayload:\"has made no step for\"")
    error_message = "The alert looks for another text."
  }
}

run "with_a_key_and_a_private_network" {
  variables {
    encryption_key  = "projects/my-project/locations/europe-west4/keyRings/ring/cryptoKeys/key"
    private_network = true
  }

  assert {
    condition     = alltrue([for bucket in google_storage_bucket.all : bucket.encryption[0].default_kms_key_name == var.encryption_key])
    error_message = "A bucket is without the key."
  }
  assert {
    condition     = keys(google_kms_crypto_key_iam_member.service_agents) == ["registry", "storage", "vertex"]
    error_message = "A service agent cannot use the key."
  }
  assert {
    condition     = yamldecode(output.run_file).gcp.psc_interface_config.network_attachment == google_compute_network_attachment.jobs[0].id
    error_message = "The run file does not name the network attachment."
  }
  assert {
    condition     = strcontains(output.env_sh, "export VERTEX_CMEK_IDENTIFIER=projects/my-project/")
    error_message = "env.sh does not name the key."
  }
}

run "wrong_values_are_refused" {
  command = plan

  variables {
    project               = "My Project"
    location              = "europe-west4-a"
    name                  = "a-name-that-is-much-too-long"
    submitters            = ["ann@example.com"]
    data_soft_delete_days = 3
    secrets               = { hf-token = "hf_no_account_but_a_value" }
    private_network_range = "10.8.0.0/29"
    alert_emails          = ["oncall"]
  }

  expect_failures = [
    var.project, var.location, var.name, var.submitters, var.data_soft_delete_days, var.secrets, var.private_network_range, var.alert_emails,
  ]
}

run "a_multi_region_is_no_mirror" {
  command = plan

  variables {
    mirror_location = "EU"
  }

  expect_failures = [var.mirror_location]
}

run "a_short_name_is_no_key" {
  command = plan

  variables {
    encryption_key = "my-key"
  }

  expect_failures = [var.encryption_key]
}

run "a_mirror_in_the_same_region_is_refused" {
  command = plan

  variables {
    mirror_location = "europe-west4"
  }

  expect_failures = [var.mirror_location]
}

run "a_key_and_a_mirror_are_refused" {
  command = plan

  variables {
    encryption_key  = "projects/my-project/locations/europe-west4/keyRings/ring/cryptoKeys/key"
    mirror_location = "europe-west1"
  }

  expect_failures = [var.encryption_key]
}
