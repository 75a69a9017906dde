# The provider is configured by whoever calls this module: terraform/envs shows it. Every resource names its project itself.
terraform {
  required_version = ">= 1.9.0, < 2.0.0"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 7.45.0, < 8.0.0"
    }
  }
}
