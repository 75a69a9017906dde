# What a project needs to run vlmpipe on Vertex AI. docs/how-to/first-run-on-vertex.md uses it step by step, by terraform/envs.

locals {
  services = toset(concat(
    [
      "aiplatform.googleapis.com",           # pipelines, jobs, schedules
      "artifactregistry.googleapis.com",     # the two images, and published pipelines
      "cloudbuild.googleapis.com",           # make build builder=gcloud
      "cloudresourcemanager.googleapis.com", # the grants on the project
      "iam.googleapis.com",                  # service accounts
      "iamcredentials.googleapis.com",       # people act as the submitter account without a key
      "logging.googleapis.com",              # what jobs and builds print
      "storage.googleapis.com",
    ],
    length(var.secrets) > 0 ? ["secretmanager.googleapis.com"] : [],
    var.private_network != "" ? ["compute.googleapis.com"] : [],
    var.private_network == "peering" ? ["servicenetworking.googleapis.com"] : [],
    var.github_repository_id != "" ? ["sts.googleapis.com"] : [],
    var.encryption_key != "" ? ["cloudkms.googleapis.com"] : [],
    length(var.alert_emails) > 0 ? ["monitoring.googleapis.com"] : [],
    var.cloud_run ? ["run.googleapis.com"] : [],
    var.monthly_budget > 0 ? ["billingbudgets.googleapis.com"] : [],
  ))
}

resource "google_project_service" "all" {
  for_each = local.services

  project            = var.project
  service            = each.key
  disable_on_destroy = false # others in the project may use it
}

# No clean-up policy: run files and schedules name images by digest, and a resumed run needs the one that it began with.
resource "google_artifact_registry_repository" "images" {
  project       = var.project
  repository_id = var.name
  location      = var.location
  format        = "DOCKER"
  description   = "Trainer and pipeline images of vlmpipe"
  labels        = var.labels
  kms_key_name  = var.encryption_key != "" ? var.encryption_key : null

  depends_on = [google_project_service.all, google_kms_crypto_key_iam_member.service_agents]
}

# Compiled pipelines, which vlmpipe publish puts there: versions that never change, with tags that move.
resource "google_artifact_registry_repository" "templates" {
  project       = var.project
  repository_id = "${var.name}-templates"
  location      = var.location
  format        = "KFP"
  description   = "Published pipelines of vlmpipe"
  labels        = var.labels
  kms_key_name  = var.encryption_key != "" ? var.encryption_key : null

  depends_on = [google_project_service.all, google_kms_crypto_key_iam_member.service_agents]
}

# Slots without values, so that no value is in a variable, a plan or the state:
# gcloud secrets versions add NAME --data-file=-
resource "google_secret_manager_secret" "all" {
  for_each = var.secrets

  project   = var.project
  secret_id = each.key
  labels    = var.labels

  replication {
    user_managed {
      replicas {
        location = var.location

        dynamic "customer_managed_encryption" {
          for_each = var.encryption_key != "" ? [var.encryption_key] : []
          content {
            kms_key_name = customer_managed_encryption.value
          }
        }
      }
    }
  }

  depends_on = [google_project_service.all, google_kms_crypto_key_iam_member.service_agents]
}
