locals {
  buckets = merge(
    {
      # Your own data (data.source, data.image_folder). Read only for pipeline and jobs. What is deleted by mistake can be
      # restored for a while.
      data = { location = var.location, soft_delete_days = var.data_soft_delete_days, delete_after_days = 0 }

      # gcp.pipeline_root: prepared data, features, checkpoints, exports and the registry.
      #
      # Soft delete is off. Training deletes old checkpoints by train.keep_checkpoints all the time, and with soft delete each
      # would be billed for 7 days more: of a 7B model some 80 GB every hundred steps. A restored one would not resume
      # either, unless its COMMIT, which is deleted first, were restored as well.
      #
      # Nothing is deleted by age. A rule would take a checkpoint's old shards and leave its COMMIT, tear data out of
      # prepared sets that later runs reuse, and empty the registry. How much is kept is the run file's to say.
      runs = { location = var.location, soft_delete_days = 0, delete_after_days = 0 }

      # Sources that Cloud Build is given by make build; read once.
      build = { location = var.location, soft_delete_days = 0, delete_after_days = 7 }
    },
    # Copies of the last checkpoint in another region. The pipeline deletes old ones there too, so the same holds as above.
    var.mirror_location != "" ? {
      mirror = { location = var.mirror_location, soft_delete_days = 0, delete_after_days = 0 }
    } : {},
  )
}

resource "google_storage_bucket" "all" {
  for_each = local.buckets

  project  = var.project
  name     = "${var.project}-${var.name}-${each.key}"
  location = each.value.location
  labels   = var.labels

  uniform_bucket_level_access = true       # roles alone decide, no object has rights of its own
  public_access_prevention    = "enforced" # nobody can publish an object, not even the owner by mistake
  force_destroy               = var.delete_buckets_with_content

  soft_delete_policy {
    retention_duration_seconds = each.value.soft_delete_days * 24 * 3600
  }

  # vlmpipe's own uploads leave no parts behind; other tools' may, and parts are billed unseen.
  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 1
    }
  }

  dynamic "lifecycle_rule" {
    for_each = each.value.delete_after_days > 0 ? [each.value.delete_after_days] : []
    content {
      action {
        type = "Delete"
      }
      condition {
        age = lifecycle_rule.value
      }
    }
  }

  dynamic "encryption" {
    for_each = var.encryption_key != "" ? [var.encryption_key] : []
    content {
      default_kms_key_name = encryption.value
    }
  }

  depends_on = [google_project_service.all, google_kms_crypto_key_iam_member.service_agents]
}
