# Optional: GitHub Actions of one environment of one repository get short-lived tokens of the submitter account. No key exists
# that could leak.

resource "google_iam_workload_identity_pool" "ci" {
  count = var.github_repository_id != "" ? 1 : 0

  project                   = var.project
  workload_identity_pool_id = "${var.name}-ci"
  display_name              = "${var.name} CI"

  depends_on = [google_project_service.all]
}

# GitHub signs tokens for every repository in the world: the condition is what keeps the others out. It names numbers, because
# a name that was given up can be taken by anybody, and the environment, because its protection rules are the only review:
# every workflow of the repository, on any branch, can ask for a token.
resource "google_iam_workload_identity_pool_provider" "github" {
  count = var.github_repository_id != "" ? 1 : 0

  project                            = var.project
  workload_identity_pool_id          = google_iam_workload_identity_pool.ci[0].workload_identity_pool_id
  workload_identity_pool_provider_id = "github"
  display_name                       = "GitHub Actions"
  attribute_condition = join(" && ", [
    "assertion.repository_id == \"${var.github_repository_id}\"",
    "assertion.repository_owner_id == \"${var.github_owner_id}\"",
    "assertion.environment == \"${var.github_environment}\"",
  ])
  attribute_mapping = {
    "google.subject"          = "assertion.sub"
    "attribute.repository_id" = "assertion.repository_id"
  }

  oidc {
    issuer_uri = "https://token.actions.githubusercontent.com"
  }
}

# The repository acts as the submitter account, which may publish, submit and schedule.
resource "google_service_account_iam_member" "github" {
  count = var.github_repository_id != "" ? 1 : 0

  service_account_id = google_service_account.all["submitter"].name
  role               = "roles/iam.workloadIdentityUser"
  member             = "principalSet://iam.googleapis.com/${google_iam_workload_identity_pool.ci[0].name}/attribute.repository_id/${var.github_repository_id}"
}
