# Optional: how jobs reach private addresses, by private_network. A network of its own is made here; one of a Shared VPC is used.

locals {
  is_psc       = var.private_network == "psc"
  is_peering   = var.private_network == "peering"
  is_shared    = var.shared_vpc != ""
  network_path = split("/", var.shared_vpc) # projects, HOST, ...
  host_project = local.is_shared ? local.network_path[1] : var.project
  range        = var.private_network_range != "" ? var.private_network_range : local.is_psc ? "10.8.0.0/24" : "10.8.0.0/16"
}

resource "google_compute_network" "jobs" {
  count = var.private_network != "" && !local.is_shared ? 1 : 0

  project                 = var.project
  name                    = "${var.name}-jobs"
  auto_create_subnetworks = false

  depends_on = [google_project_service.all]
}

# Private Service Connect: an interface with one address per node, from this subnet.
resource "google_compute_subnetwork" "jobs" {
  count = local.is_psc && !local.is_shared ? 1 : 0

  project       = var.project
  name          = "${var.name}-jobs"
  network       = google_compute_network.jobs[0].id
  region        = var.location
  ip_cidr_range = local.range
}

# Beside the subnet, so in the host project for a Shared VPC: whoever applies this needs roles/compute.networkAdmin there.
# Vertex AI adds the project that its machines are in to the attachment's list by itself, which terraform is to leave alone.
resource "google_compute_network_attachment" "jobs" {
  count = local.is_psc ? 1 : 0

  project               = local.host_project
  name                  = "${var.name}-jobs"
  region                = var.location
  subnetworks           = local.is_shared ? [var.shared_vpc] : [google_compute_subnetwork.jobs[0].id]
  connection_preference = "ACCEPT_MANUAL"

  lifecycle {
    ignore_changes = [producer_accept_lists]
  }
}

# For that, Google's codelab on this interface gives its agent this role, in the project of the attachment.
resource "google_project_iam_member" "vertex_network" {
  count = local.is_psc ? 1 : 0

  project = local.host_project
  role    = "roles/compute.networkAdmin"
  member  = "serviceAccount:service-${data.google_project.this[0].number}@gcp-sa-aiplatform.iam.gserviceaccount.com"
}

# Peering: a range for Google's machines, and the connection to Google's network of services. A network has one such
# connection, whose ranges all services share, so a Shared VPC's is its administrators' to make.
resource "google_compute_global_address" "jobs" {
  count = local.is_peering && !local.is_shared ? 1 : 0

  project       = var.project
  name          = "${var.name}-jobs"
  purpose       = "VPC_PEERING"
  address_type  = "INTERNAL"
  address       = split("/", local.range)[0]
  prefix_length = tonumber(split("/", local.range)[1])
  network       = google_compute_network.jobs[0].id
}

resource "google_service_networking_connection" "jobs" {
  count = local.is_peering && !local.is_shared ? 1 : 0

  network                 = google_compute_network.jobs[0].id
  service                 = "servicenetworking.googleapis.com"
  reserved_peering_ranges = [google_compute_global_address.jobs[0].name]

  depends_on = [google_project_service.all]
}

# A job names its network by the number of the network's project.
locals {
  network = !local.is_peering ? "" : local.is_shared ? "projects/${data.google_project.host[0].number}/global/networks/${local.network_path[4]}" : "projects/${data.google_project.this[0].number}/global/networks/${google_compute_network.jobs[0].name}"
}

data "google_project" "host" {
  count = local.is_peering && local.is_shared ? 1 : 0

  project_id = local.host_project
}
