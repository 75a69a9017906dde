# The accounts and what each may do: no more than its part of vlmpipe calls. No account has a key. grants.json is made from
# vlmpipe's own table of who reads and writes what (vlmpipe/access/table.yaml), with the reason for each grant.
#
# Images are pulled by Vertex AI's own service agent, so no job needs to read their registry.

locals {
  grants = jsondecode(file("${path.module}/grants.json"))

  # Settings that some grants depend on, by the name in `when`.
  granted = {
    ""          = true
    mirror      = var.mirror_location != ""
    tensorboard = var.tensorboard
    doctor      = var.doctor
    cloud_run   = var.cloud_run
  }

  repositories = {
    images    = google_artifact_registry_repository.images
    templates = google_artifact_registry_repository.templates
  }

  # Secrets, each with the accounts that read one of its fields.
  secret_readers = merge([
    for secret, fields in var.secrets : {
      for account in toset(flatten([for field in fields : local.grants.secrets[field]])) :
      "${secret}-${account}" => { secret = secret, account = account }
    }
  ]...)
}

resource "google_service_account" "all" {
  for_each = local.grants.accounts

  project      = var.project
  account_id   = "${var.name}-${each.key}"
  display_name = "${var.name} ${each.key}"
  description  = each.value

  depends_on = [google_project_service.all]
}

resource "google_project_iam_member" "all" {
  for_each = { for name, grant in local.grants.project : name => grant if local.granted[grant.when] }

  project = var.project
  role    = each.value.role
  member  = google_service_account.all[each.value.account].member
}

resource "google_storage_bucket_iam_member" "all" {
  for_each = { for name, grant in local.grants.buckets : name => grant if local.granted[grant.when] }

  bucket = google_storage_bucket.all[each.value.bucket].name
  role   = each.value.role
  member = google_service_account.all[each.value.account].member
}

# Who may run something as which other account.
resource "google_service_account_iam_member" "act_as" {
  for_each = local.grants.act_as

  service_account_id = google_service_account.all[each.value.as].name
  role               = each.value.role
  member             = google_service_account.all[each.value.account].member
}

# Who may take tokens of which other account: the submitter can run code as both anyway, and vlmpipe doctor asks with them
# what each may do.
resource "google_service_account_iam_member" "tokens" {
  for_each = { for name, grant in local.grants.tokens : name => grant if local.granted[grant.when] }

  service_account_id = google_service_account.all[each.value.of].name
  role               = "roles/iam.serviceAccountTokenCreator"
  member             = google_service_account.all[each.value.account].member
}

# People and CI get short-lived tokens of the submitter account, instead of rights of their own or a key file.
resource "google_service_account_iam_member" "submitters" {
  for_each = var.submitters

  service_account_id = google_service_account.all["submitter"].name
  role               = "roles/iam.serviceAccountTokenCreator"
  member             = each.key
}

resource "google_artifact_registry_repository_iam_member" "all" {
  for_each = local.grants.repositories

  project    = var.project
  location   = local.repositories[each.value.repository].location
  repository = local.repositories[each.value.repository].name
  role       = each.value.role
  member     = google_service_account.all[each.value.account].member
}

# Each secret is read by the accounts that its fields need and no others, at the moment it is needed: what stands in a job's
# spec can be read by everybody who sees the job.
resource "google_secret_manager_secret_iam_member" "reader" {
  for_each = local.secret_readers

  secret_id = google_secret_manager_secret.all[each.value.secret].id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.all[each.value.account].member
}
