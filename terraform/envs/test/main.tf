# The project in which CI submits runs, as GitHub Actions of one repository (docs/how-to/publish-and-schedule.md).
# Its state is shared.
# More settings: terraform/modules/vlmpipe/variables.tf.

terraform {
  required_version = ">= 1.9.0, < 2.0.0"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "7.45.0"
    }
  }

  # The bucket exists before, and is given at init: terraform init -backend-config=bucket=NAME
  backend "gcs" {
    prefix = "vlmpipe/test"
  }
}

provider "google" {
  project = var.project
  region  = var.location
}

module "vlmpipe" {
  source = "../../modules/vlmpipe"

  project    = var.project
  location   = var.location
  submitters = var.submitters

  labels                      = { env = "test" }
  github_repository_id        = var.github_repository_id
  github_owner_id             = var.github_owner_id
  delete_buckets_with_content = true
}

variable "project" {
  description = "Id of the Google Cloud project. It exists and has billing."
  type        = string
}

variable "location" {
  description = "Region of pipeline, jobs, buckets and images: one that has your GPUs."
  type        = string
  default     = "us-central1"
}

variable "submitters" {
  description = "Who may start runs, as IAM members such as user:ann@example.com."
  type        = set(string)
  default     = []
}

variable "github_repository_id" {
  description = "Number of the repository whose GitHub Actions may start runs; empty for none."
  type        = string
  default     = ""
}

variable "github_owner_id" {
  description = "Number of the repository's owner."
  type        = string
  default     = ""
}

# Each is described in terraform/modules/vlmpipe/outputs.tf.
output "env_sh" {
  value = module.vlmpipe.env_sh
}

output "run_file" {
  value = module.vlmpipe.run_file
}

output "data_bucket" {
  value = module.vlmpipe.data_bucket
}

output "mirror_uri" {
  value = module.vlmpipe.mirror_uri
}

output "submitter" {
  value = module.vlmpipe.submitter
}

output "tester" {
  value = module.vlmpipe.tester
}

output "secrets" {
  value = module.vlmpipe.secrets
}

output "workload_identity_provider" {
  value = module.vlmpipe.workload_identity_provider
}
