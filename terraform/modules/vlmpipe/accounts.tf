# Four accounts, each with what its part of vlmpipe calls and no more. No account has a key. Every grant says why it is there,
# and tests/project/test_terraform.py knows each by name.
#
# Images are pulled by Vertex AI's own service agent, so no account reads their registry.

locals {
  accounts = {
    submitter = "Starts runs and schedules: people act as it"
    pipeline  = "gcp.service_account: the pipeline's CPU steps, which start the jobs"
    trainer   = "gcp.job_service_account: the training, feature and evaluation jobs"
    builder   = "Cloud Build of the images"
  }

  project_grants = merge({
    submitter-vertex = {
      account = "submitter", role = "roles/aiplatform.user"
      why     = "Creates, reads and cancels pipeline jobs; creates, changes, pauses and deletes schedules."
    }
    submitter-logs = {
      account = "submitter", role = "roles/logging.viewer"
      why     = "vlmpipe logs reads what steps and jobs printed."
    }
    pipeline-vertex = {
      account = "pipeline", role = "roles/aiplatform.user"
      why     = "Creates, watches and cancels the custom jobs, records the run's artifacts in Vertex ML Metadata, and uploads models and moves their alias."
    }
    pipeline-logs = {
      account = "pipeline", role = "roles/logging.logWriter"
      why     = "What a step prints. Google does not say as whom Vertex AI writes it; a failed run without a log is the worse guess."
    }
    trainer-logs = {
      account = "trainer", role = "roles/logging.logWriter"
      why     = "What a job prints, as for the pipeline."
    }
    builder-logs = {
      account = "builder", role = "roles/logging.logWriter"
      why     = "A build with an account of its own can keep its log in Cloud Logging only."
    }
    }, var.tensorboard ? {
    trainer-tensorboard = {
      account = "trainer", role = "roles/aiplatform.user"
      why     = "Vertex AI uploads a job's TensorBoard files as the job's account, and Google names no narrower role for it. With it, jobs may also start jobs."
    }
  } : {})

  bucket_grants = merge(
    {
      pipeline-data = {
        account = "pipeline", bucket = "data", role = "roles/storage.objectViewer"
        why     = "Data preparation reads records and pictures."
      }
      pipeline-runs = {
        account = "pipeline", bucket = "runs", role = "roles/storage.objectUser"
        why     = "Writes run.json, prepared data, the export, the registry and the report; moves the champion; deletes what it replaces."
      }
      trainer-runs = {
        account = "trainer", bucket = "runs", role = "roles/storage.objectUser"
        why     = "Reads prepared data; writes features, metrics and checkpoints; deletes old checkpoints."
      }
      submitter-runs = {
        account = "submitter", bucket = "runs", role = "roles/storage.objectViewer"
        why     = "vlmpipe status reads progress, messages and exit codes; people read reports and models."
      }
      submitter-runs-place = {
        account = "submitter", bucket = "runs", role = "roles/storage.legacyBucketReader"
        why     = "vlmpipe submit looks whether the bucket is there and in the run's region: the least role that may read its metadata."
      }
      submitter-data-place = {
        account = "submitter", bucket = "data", role = "roles/storage.legacyBucketReader"
        why     = "The same. It also lists the names of objects, and reads none."
      }
      builder-source = {
        account = "builder", bucket = "build", role = "roles/storage.objectViewer"
        why     = "Reads the sources that make build uploads."
      }
    },
    var.mirror_location != "" ? {
      submitter-mirror-place = {
        account = "submitter", bucket = "mirror", role = "roles/storage.legacyBucketReader"
        why     = "vlmpipe submit looks whether the bucket is there."
      }
      pipeline-mirror = {
        account = "pipeline", bucket = "mirror", role = "roles/storage.objectUser"
        why     = "sync_checkpoint copies the last checkpoint there and deletes older copies."
      }
      trainer-mirror = {
        account = "trainer", bucket = "mirror", role = "roles/storage.objectUser"
        why     = "Resumes from the mirror, and leaves REJECTED.json there beside a copy that is damaged: without it resuming stops."
      }
    } : {},
  )

  # Who may run something as which other account.
  act_as_grants = {
    submitter-as-pipeline = {
      account = "submitter", as = "pipeline", role = "roles/iam.serviceAccountUser"
      why     = "A pipeline job runs as gcp.service_account, which is not inherited: whoever creates the job must be allowed to use it."
    }
    pipeline-as-trainer = {
      account = "pipeline", as = "trainer", role = "roles/iam.serviceAccountUser"
      why     = "The same for custom jobs, which the pipeline creates and which run as gcp.job_service_account."
    }
  }
}

resource "google_service_account" "all" {
  for_each = local.accounts

  project      = var.project
  account_id   = "${var.name}-${each.key}"
  display_name = "${var.name} ${each.key}"
  description  = each.value

  depends_on = [google_project_service.all]
}

resource "google_project_iam_member" "all" {
  for_each = local.project_grants

  project = var.project
  role    = each.value.role
  member  = google_service_account.all[each.value.account].member
}

resource "google_storage_bucket_iam_member" "all" {
  for_each = local.bucket_grants

  bucket = google_storage_bucket.all[each.value.bucket].name
  role   = each.value.role
  member = google_service_account.all[each.value.account].member
}

resource "google_service_account_iam_member" "act_as" {
  for_each = local.act_as_grants

  service_account_id = google_service_account.all[each.value.as].name
  role               = each.value.role
  member             = google_service_account.all[each.value.account].member
}

# People and CI get short-lived tokens of the submitter account, instead of rights of their own or a key file.
resource "google_service_account_iam_member" "submitters" {
  for_each = var.submitters

  service_account_id = google_service_account.all["submitter"].name
  role               = "roles/iam.serviceAccountTokenCreator"
  member             = each.key
}

# Pushes the images, to this one repository.
resource "google_artifact_registry_repository_iam_member" "builder" {
  project    = var.project
  location   = google_artifact_registry_repository.images.location
  repository = google_artifact_registry_repository.images.name
  role       = "roles/artifactregistry.writer"
  member     = google_service_account.all["builder"].member
}

# Publishes pipelines and starts what was published, from this one repository. Who may publish may start runs, and the other way round.
resource "google_artifact_registry_repository_iam_member" "submitter" {
  project    = var.project
  location   = google_artifact_registry_repository.templates.location
  repository = google_artifact_registry_repository.templates.name
  role       = "roles/artifactregistry.writer"
  member     = google_service_account.all["submitter"].member
}

# For runs that are started in the console from a template: Google asks for it for the account that the pipeline runs as.
resource "google_artifact_registry_repository_iam_member" "pipeline" {
  project    = var.project
  location   = google_artifact_registry_repository.templates.location
  repository = google_artifact_registry_repository.templates.name
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.all["pipeline"].member
}

# One account reads each secret, at the moment it is needed: what stands in a job's spec can be read by everybody who sees the job.
resource "google_secret_manager_secret_iam_member" "reader" {
  for_each = var.secrets

  secret_id = google_secret_manager_secret.all[each.key].id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.all[each.value].member
}
