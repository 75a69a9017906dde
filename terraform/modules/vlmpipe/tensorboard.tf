# Optional: the instance that gcp.tensorboard of a run file names. Jobs then send it what they write for TensorBoard.

resource "google_vertex_ai_tensorboard" "runs" {
  count = var.tensorboard ? 1 : 0

  project      = var.project
  region       = var.location
  display_name = var.name
  labels       = var.labels

  dynamic "encryption_spec" {
    for_each = var.encryption_key != "" ? [var.encryption_key] : []
    content {
      kms_key_name = encryption_spec.value
    }
  }

  depends_on = [google_project_service.all, google_kms_crypto_key_iam_member.service_agents]
}
