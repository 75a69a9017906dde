# Optional: a Private Service Connect interface, by which jobs reach private addresses. It has one address per node.

resource "google_compute_network" "jobs" {
  count = var.private_network ? 1 : 0

  name                    = "${var.name}-jobs"
  auto_create_subnetworks = false

  depends_on = [google_project_service.all]
}

resource "google_compute_subnetwork" "jobs" {
  count = var.private_network ? 1 : 0

  name          = "${var.name}-jobs"
  network       = google_compute_network.jobs[0].id
  region        = var.location
  ip_cidr_range = var.private_network_range
}

# Vertex AI adds the project that its machines are in to the attachment's list by itself, which terraform is to leave alone.
resource "google_compute_network_attachment" "jobs" {
  count = var.private_network ? 1 : 0

  name                  = "${var.name}-jobs"
  region                = var.location
  subnetworks           = [google_compute_subnetwork.jobs[0].id]
  connection_preference = "ACCEPT_MANUAL"

  lifecycle {
    ignore_changes = [producer_accept_lists]
  }
}

# For that, Google's codelab on this interface gives its agent this role.
resource "google_project_iam_member" "vertex_network" {
  count = var.private_network ? 1 : 0

  project = var.project
  role    = "roles/compute.networkAdmin"
  member  = "serviceAccount:service-${data.google_project.this[0].number}@gcp-sa-aiplatform.iam.gserviceaccount.com"
}
