# State is kept in this folder (terraform.tfstate) and holds no secrets: the secret slots are made without values. To share it,
# add a backend "gcs" block here.
terraform {
  required_version = ">= 1.9.0, < 2.0.0"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "7.45.0"
    }
  }
}

provider "google" {
  project = var.project
  region  = var.location
}
