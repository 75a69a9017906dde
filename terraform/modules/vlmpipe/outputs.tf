locals {
  gcp = merge(
    {
      project             = var.project
      location            = var.location
      service_account     = google_service_account.all["pipeline"].email
      job_service_account = google_service_account.all["trainer"].email
      pipeline_root       = "gs://${google_storage_bucket.all["runs"].name}/vlmpipe"
    },
    var.encryption_key != "" ? { encryption_spec_key_name = var.encryption_key } : {},
    local.is_psc ? {
      psc_interface_config = { network_attachment = google_compute_network_attachment.jobs[0].id }
    } : {},
    local.is_peering ? { network = local.network } : {},
    var.tensorboard ? { tensorboard = google_vertex_ai_tensorboard.runs[0].name } : {},
  )
  templates = "https://${var.location}-kfp.pkg.dev/${var.project}/${google_artifact_registry_repository.templates.name}"
  registry  = "${var.location}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.images.name}"
  env = merge(
    {
      VERTEX_PROJECT_ID        = local.gcp.project
      VERTEX_LOCATION          = local.gcp.location
      VERTEX_PIPELINE_ROOT     = local.gcp.pipeline_root
      VERTEX_SA_EMAIL          = local.gcp.service_account
      VERTEX_JOB_SA_EMAIL      = local.gcp.job_service_account
      CONTAINER_IMAGE_REGISTRY = local.registry
      VERTEX_TEMPLATE_REGISTRY = local.templates
      CLOUD_BUILD_SA_EMAIL     = google_service_account.all["builder"].email
      CLOUD_BUILD_SOURCES      = "gs://${google_storage_bucket.all["build"].name}/source"
    },
    var.encryption_key != "" ? { VERTEX_CMEK_IDENTIFIER = var.encryption_key } : {},
    local.is_peering ? { VERTEX_NETWORK = local.network } : {},
  )
}

output "env_sh" {
  description = "Content of env.sh, which make reads: terraform output -raw env_sh > env.sh"
  value       = join("", [for name, value in local.env : "export ${name}=${value}\n"])
}

output "run_file" {
  description = "The gcp section of a run file; pipeline_image is what make build prints. make fills all but psc_interface_config and tensorboard in from env.sh."
  value       = yamlencode({ gcp = local.gcp })
}

output "data_bucket" {
  description = "Where your data goes: data.source and data.image_folder lie under it."
  value       = "gs://${google_storage_bucket.all["data"].name}"
}

output "mirror_uri" {
  description = "checkpoint.mirror_uri of a run file; empty without mirror_location."
  value       = var.mirror_location != "" ? "gs://${google_storage_bucket.all["mirror"].name}/vlmpipe" : ""
}

output "submitter" {
  description = "The account to act as: gcloud auth application-default login --impersonate-service-account=..."
  value       = google_service_account.all["submitter"].email
}

output "tester" {
  description = "The account of Cloud Build's trigger for pull requests, whose code gets its rights: it may write logs and no more."
  value       = google_service_account.all["tester"].email
}

output "workload_identity_provider" {
  description = "What google-github-actions/auth is given as its provider; empty without github_repository_id."
  value       = var.github_repository_id != "" ? google_iam_workload_identity_pool_provider.github[0].name : ""
}

output "secrets" {
  description = "Resource names of the secret slots, by name: for notify.webhook of a run file or, with /versions/VERSION behind, for its secrets."
  value       = { for name, secret in google_secret_manager_secret.all : name => secret.name }
}
