# Optional: a customer-managed key for buckets, images, secrets, pipeline and jobs. The key exists and lies in var.location.

# Google's own accounts, its service agents, are named by the project's number. An agent exists once its service was used, or
# after gcloud beta services identity create --service=SERVICE.
data "google_project" "this" {
  count = var.encryption_key != "" || var.private_network != "" || var.monthly_budget > 0 ? 1 : 0

  project_id = var.project
}

# The agents encrypt and decrypt, not our accounts.
locals {
  key_users = var.encryption_key != "" ? {
    vertex   = "service-${data.google_project.this[0].number}@gcp-sa-aiplatform.iam.gserviceaccount.com"
    storage  = "service-${data.google_project.this[0].number}@gs-project-accounts.iam.gserviceaccount.com"
    registry = "service-${data.google_project.this[0].number}@gcp-sa-artifactregistry.iam.gserviceaccount.com"
    secrets  = "service-${data.google_project.this[0].number}@gcp-sa-secretmanager.iam.gserviceaccount.com"
  } : {}
}

# Without it, buckets, images and secrets with this key cannot be made, and jobs with it do not start.
resource "google_kms_crypto_key_iam_member" "service_agents" {
  for_each = { for name, email in local.key_users : name => email if name != "secrets" || length(var.secrets) > 0 }

  crypto_key_id = var.encryption_key
  role          = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
  member        = "serviceAccount:${each.value}"

  depends_on = [google_project_service.all]
}
