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
  mock_resource "google_compute_network" {
    defaults = { id = "projects/my-project/global/networks/vlmpipe-jobs" }
  }
  mock_resource "google_vertex_ai_tensorboard" {
    defaults = { name = "projects/123456789/locations/europe-west4/tensorboards/987" }
  }
  mock_resource "google_iam_workload_identity_pool" {
    defaults = { name = "projects/123456789/locations/global/workloadIdentityPools/vlmpipe-ci" }
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
    condition     = [for name, grant in google_project_iam_member.all : grant.role if strcontains(name, "trainer") || strcontains(name, "tester")] == ["roles/logging.logWriter", "roles/logging.logWriter"]
    error_message = "Jobs or pull requests may do more in the project than write logs."
  }
  assert {
    condition     = toset([for name in keys(google_storage_bucket_iam_member.all) : name if strcontains(name, "data")]) == toset(["pipeline-data-read", "trainer-data-read", "submitter-data-look", "submitter-data-read"])
    error_message = "Somebody who reads the data bucket cannot, or somebody can write there."
  }
  assert {
    condition     = length(google_monitoring_alert_policy.logs) == 0 && length(data.google_project.this) == 0 && length(google_compute_network.jobs) == 0 && length(google_vertex_ai_tensorboard.runs) == 0 && length(google_iam_workload_identity_pool.ci) == 0 && output.mirror_uri == ""
    error_message = "Something optional is made unasked."
  }
}

run "with_a_mirror_secrets_and_people" {
  variables {
    mirror_location = "europe-west1"
    secrets = {
      chat    = ["notify.webhook"]
      hub     = ["model.hub_token_secret", "register.hub.token_secret"]
      tracker = ["secrets"]
    }
    submitters = ["user:ann@example.com"]
  }

  assert {
    condition     = google_storage_bucket.all["mirror"].location == "europe-west1" && [for name in keys(google_storage_bucket_iam_member.all) : name if strcontains(name, "mirror")] == ["pipeline-mirror-write", "submitter-mirror-look", "trainer-mirror-write"]
    error_message = "No mirror, or nobody may write to it."
  }
  assert {
    condition     = keys(google_secret_manager_secret_iam_member.reader) == ["chat-pipeline", "hub-pipeline", "hub-trainer", "tracker-trainer"]
    error_message = "An account that needs a secret cannot read it, or another one can."
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

run "without_tokens_for_the_doctor" {
  variables {
    doctor = false
  }

  assert {
    condition     = length(google_service_account_iam_member.tokens) == 0 && length(google_service_account_iam_member.act_as) == 4
    error_message = "The submitter may take tokens of other accounts."
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
  assert {
    condition     = strcontains(google_monitoring_alert_policy.pipelines[0].conditions[0].condition_matched_log[0].filter, "jsonPayload.state=\"PIPELINE_STATE_FAILED\"") && length(google_monitoring_alert_policy.pipelines[0].notification_channels) == 2
    error_message = "Nobody hears of scheduled runs that fail."
  }
  assert {
    condition     = google_monitoring_alert_policy.idle_gpus[0].conditions[0].condition_threshold[0].duration == "1800s" && google_monitoring_alert_policy.idle_gpus[0].conditions[0].condition_threshold[0].threshold_value == 0.05
    error_message = "Idle GPUs are noticed at another time."
  }
  assert {
    condition     = google_monitoring_alert_policy.idle_gpus[0].conditions[0].condition_threshold[0].aggregations[0].group_by_fields == tolist(["resource.label.job_id"])
    error_message = "A busy job hides an idle one."
  }
  assert {
    condition     = length(google_billing_budget.project) == 0
    error_message = "A budget is made unasked."
  }
}

run "with_a_budget" {
  variables {
    monthly_budget  = 2000
    billing_account = "012345-6789AB-CDEF01"
    alert_emails    = ["oncall@example.com"]
  }

  assert {
    condition     = google_billing_budget.project[0].amount[0].specified_amount[0].units == "2000" && one(google_billing_budget.project[0].budget_filter[0].projects) == "projects/123456789"
    error_message = "The budget is another one's, or of all projects."
  }
  assert {
    condition     = google_billing_budget.project[0].budget_filter[0].credit_types_treatment == "EXCLUDE_ALL_CREDITS" && length(google_billing_budget.project[0].threshold_rules) == 4 && length(google_billing_budget.project[0].all_updates_rule[0].monitoring_notification_channels) == 1
    error_message = "Credits hide what is spent, or nobody is told."
  }
  assert {
    condition     = contains(keys(google_project_service.all), "billingbudgets.googleapis.com")
    error_message = "The API of budgets is not enabled."
  }
}

run "with_a_key_a_private_network_tensorboard_and_cloud_run" {
  variables {
    encryption_key  = "projects/my-project/locations/europe-west4/keyRings/ring/cryptoKeys/key"
    private_network = "psc"
    tensorboard     = true
    cloud_run       = true
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
  assert {
    condition     = google_compute_subnetwork.jobs[0].ip_cidr_range == "10.8.0.0/24"
    error_message = "Another range."
  }
  assert {
    condition     = yamldecode(output.run_file).gcp.tensorboard == "projects/123456789/locations/europe-west4/tensorboards/987" && google_vertex_ai_tensorboard.runs[0].encryption_spec[0].kms_key_name == var.encryption_key
    error_message = "The run file does not name the TensorBoard instance, or it is without the key."
  }
  assert {
    condition     = contains(keys(google_project_iam_member.all), "trainer-aiplatform-user")
    error_message = "Jobs cannot upload to TensorBoard."
  }
  assert {
    condition     = contains(keys(google_project_iam_member.all), "pipeline-run-developer") && contains(keys(google_project_service.all), "run.googleapis.com")
    error_message = "The pipeline cannot serve on Cloud Run."
  }
}

run "peered" {
  variables {
    private_network = "peering"
  }

  assert {
    condition     = google_compute_global_address.jobs[0].prefix_length == 16 && google_compute_global_address.jobs[0].address == "10.8.0.0"
    error_message = "Another range."
  }
  assert {
    condition     = google_service_networking_connection.jobs[0].network == google_compute_network.jobs[0].id && length(google_compute_network_attachment.jobs) == 0
    error_message = "Another network is connected."
  }
  assert {
    condition     = yamldecode(output.run_file).gcp.network == "projects/123456789/global/networks/vlmpipe-jobs" && strcontains(output.env_sh, "export VERTEX_NETWORK=projects/123456789/")
    error_message = "Jobs name their network by the project's number."
  }
}

run "into_a_shared_vpc" {
  variables {
    private_network = "psc"
    shared_vpc      = "projects/my-host/regions/europe-west4/subnetworks/jobs"
  }

  assert {
    condition     = google_compute_network_attachment.jobs[0].project == "my-host" && one(google_compute_network_attachment.jobs[0].subnetworks) == var.shared_vpc && google_project_iam_member.vertex_network[0].project == "my-host"
    error_message = "The attachment is not beside the host's subnetwork."
  }
  assert {
    condition     = length(google_compute_network.jobs) == 0 && length(google_compute_subnetwork.jobs) == 0
    error_message = "A network is made beside the shared one."
  }
}

run "peered_with_a_shared_vpc" {
  variables {
    private_network = "peering"
    shared_vpc      = "projects/my-host/global/networks/shared"
  }

  assert {
    condition     = yamldecode(output.run_file).gcp.network == "projects/123456789/global/networks/shared" && data.google_project.host[0].project_id == "my-host"
    error_message = "The run file does not name the host's network."
  }
  assert {
    condition     = length(google_service_networking_connection.jobs) + length(google_compute_global_address.jobs) + length(google_compute_network.jobs) == 0
    error_message = "The host's connection is not ours."
  }
}

run "with_labels_and_github" {
  variables {
    labels               = { env = "test", team = "vision" }
    github_repository_id = "123456"
    github_owner_id      = "654321"
  }

  assert {
    condition     = alltrue([for bucket in google_storage_bucket.all : bucket.labels == tomap(var.labels)]) && google_artifact_registry_repository.images.labels == tomap(var.labels)
    error_message = "Something is without labels."
  }
  assert {
    condition     = google_iam_workload_identity_pool_provider.github[0].attribute_condition == "assertion.repository_id == \"123456\" && assertion.repository_owner_id == \"654321\" && assertion.environment == \"production\""
    error_message = "Other repositories, or jobs that nobody reviewed, may act as the submitter."
  }
  assert {
    condition     = endswith(google_service_account_iam_member.github[0].member, "/workloadIdentityPools/vlmpipe-ci/attribute.repository_id/123456") && output.workload_identity_provider != ""
    error_message = "The repository may not act as the submitter."
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
    secrets               = { hf-token = ["hf_no_field_but_a_value"] }
    private_network_range = "10.8.0.0/29"
    idle_gpu_minutes      = 2.5
    alert_emails          = ["oncall"]
    labels                = { Team = "Vision" }
    github_repository_id  = "my-team/my-repository"
    github_environment    = "*"
  }

  expect_failures = [
    var.project, var.location, var.name, var.submitters, var.data_soft_delete_days, var.secrets, var.private_network_range, var.alert_emails,
    var.idle_gpu_minutes, var.labels, var.github_repository_id, var.github_environment,
  ]
}

run "more_wrong_values_are_refused" {
  command = plan

  variables {
    encryption_key  = "my-key"
    private_network = "vpn"
    monthly_budget  = 0.5
  }

  expect_failures = [var.encryption_key, var.private_network, var.monthly_budget]
}

run "a_multi_region_is_no_mirror_and_a_network_no_subnetwork" {
  command = plan

  variables {
    mirror_location = "EU"
    private_network = "psc"
    shared_vpc      = "projects/my-host/global/networks/shared"
  }

  expect_failures = [var.mirror_location, var.shared_vpc]
}

run "a_mirror_in_the_same_region_and_a_small_range_for_peering_are_refused" {
  command = plan

  variables {
    mirror_location       = "europe-west4"
    private_network       = "peering"
    private_network_range = "10.8.0.0/24"
  }

  expect_failures = [var.mirror_location, var.private_network_range]
}

run "a_key_with_a_mirror_and_a_shared_vpc_without_a_way_into_it_are_refused" {
  command = plan

  variables {
    encryption_key  = "projects/my-project/locations/europe-west4/keyRings/ring/cryptoKeys/key"
    mirror_location = "europe-west1"
    shared_vpc      = "projects/my-host/global/networks/shared"
  }

  expect_failures = [var.encryption_key, var.shared_vpc]
}

run "a_repository_without_its_owner_is_refused" {
  command = plan

  variables {
    github_repository_id = "123456"
  }

  expect_failures = [var.github_owner_id]
}

run "a_budget_without_its_account_is_refused" {
  command = plan

  variables {
    monthly_budget = 100
  }

  expect_failures = [var.billing_account]
}
