variable "project" {
  description = "Id of the Google Cloud project. It exists and has billing."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "Give the project's id, such as my-project: not its number, not its display name. One with a domain (example.com:id) is not supported: buckets are named after it."
  }
}

variable "location" {
  description = "Region of pipeline, jobs, buckets and images: one that has your GPUs. Buckets elsewhere would cost egress."
  type        = string
  default     = "us-central1"

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.location))
    error_message = "Give a region, such as europe-west4: not a zone, not a multi-region."
  }
}

variable "name" {
  description = "Prefix of every name: buckets are <project>-<name>-data and so on, accounts <name>-pipeline and so on."
  type        = string
  default     = "vlmpipe"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,18}[a-z0-9]$", var.name))
    error_message = "Give 3 to 20 lower-case letters, digits and dashes: the ids of service accounts have room for no more."
  }
}

variable "submitters" {
  description = "Who may start runs as the submitter account, as IAM members: user:ann@example.com, group:team@example.com."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for member in var.submitters : can(regex("^(user|group|serviceAccount|principal|principalSet):", member))])
    error_message = "Each member begins with user:, group:, serviceAccount:, principal: or principalSet:."
  }
}

variable "mirror_location" {
  description = "Second region for a bucket of checkpoint copies (checkpoint.mirror_uri of a run file); empty for none."
  type        = string
  default     = ""

  validation {
    condition     = var.mirror_location == "" || (can(regex("^[a-z]+-[a-z]+[0-9]+$", var.mirror_location)) && var.mirror_location != var.location)
    error_message = "Give a region other than location, or nothing."
  }
}

variable "data_soft_delete_days" {
  description = "Days for which deleted objects of the data bucket can be restored, and are billed: 0, or 7 to 90."
  type        = number
  default     = 7

  validation {
    condition     = var.data_soft_delete_days == 0 || (var.data_soft_delete_days >= 7 && var.data_soft_delete_days <= 90)
    error_message = "Cloud Storage takes 0 (off) or 7 to 90 days."
  }
}

variable "delete_buckets_with_content" {
  description = "Whether terraform destroy deletes buckets that are not empty: with data, checkpoints and registered models."
  type        = bool
  default     = false
}

variable "secrets" {
  description = "Empty slots in Secret Manager by name, each with the run file's fields that name it, such as { hub = [\"model.hub_token_secret\"], chat = [\"notify.webhook\"] }: the accounts that read those fields get access. A field of the map secrets is called secrets."
  type        = map(set(string))
  default     = {}

  validation {
    condition     = alltrue([for secret in keys(var.secrets) : can(regex("^[A-Za-z0-9_-]{1,200}$", secret))])
    error_message = "Names have letters, digits, dashes and underscores."
  }

  validation {
    condition     = alltrue([for fields in values(var.secrets) : length(fields) > 0 && length(setsubtract(fields, keys(local.grants.secrets))) == 0])
    error_message = "Give for each name the fields of the run file that name it: ${join(", ", keys(local.grants.secrets))}. Never put a secret's value here: it would be kept in the state."
  }
}

variable "doctor" {
  description = "Whether the submitter may take tokens of the pipeline's and the jobs' accounts, by which vlmpipe doctor asks what each may do. It may run code as both anyway."
  type        = bool
  default     = true
}

variable "alert_emails" {
  description = "Addresses that get a mail when a pipeline or training fails, stalls, loses its mirror, has a bad GPU or leaves GPUs idle; none by default."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for address in var.alert_emails : can(regex("^[^@\\s]+@[^@\\s]+[.][^@\\s]+$", address))])
    error_message = "Give e-mail addresses, such as oncall@example.com."
  }
}

variable "idle_gpu_minutes" {
  description = "Minutes for which a running job's GPUs must be idle before alert_emails are told: longer than a start with its downloads and compilation."
  type        = number
  default     = 30

  validation {
    condition     = var.idle_gpu_minutes >= 5 && var.idle_gpu_minutes <= 1440 && floor(var.idle_gpu_minutes) == var.idle_gpu_minutes
    error_message = "Give 5 to 1440 whole minutes."
  }
}

variable "monthly_budget" {
  description = "What a month of the project may cost before mails are sent, in the billing account's currency; 0 for no budget. Needs billing_account."
  type        = number
  default     = 0

  validation {
    condition     = var.monthly_budget >= 0 && floor(var.monthly_budget) == var.monthly_budget
    error_message = "Give a whole amount, without a currency."
  }

  validation {
    condition     = var.monthly_budget == 0 || length(var.alert_emails) <= 5
    error_message = "A budget notifies at most 5 addresses: give fewer alert_emails, such as a group's."
  }
}

variable "billing_account" {
  description = "The billing account that pays for the project, for monthly_budget: gcloud billing projects describe PROJECT. Whoever applies this needs roles/billing.costsManager on it."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^([0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6})?$", var.billing_account)) && (var.monthly_budget == 0 || var.billing_account != "")
    error_message = "Give the account's id, such as 012345-6789AB-CDEF01, with monthly_budget."
  }
}

variable "encryption_key" {
  description = "Customer-managed key, projects/.../locations/.../keyRings/.../cryptoKeys/..., in location; empty for Google's keys."
  type        = string
  default     = ""

  validation {
    condition     = var.encryption_key == "" || can(regex("^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$", var.encryption_key))
    error_message = "Give the key's full resource name, without a version."
  }

  validation {
    condition     = var.encryption_key == "" || var.mirror_location == ""
    error_message = "A key lies in one region and cannot encrypt the bucket of another: leave mirror_location or encryption_key out."
  }
}

variable "private_network" {
  description = "How jobs reach private addresses: psc (a Private Service Connect interface), peering, or empty for not at all."
  type        = string
  default     = ""

  validation {
    condition     = contains(["", "psc", "peering"], var.private_network)
    error_message = "Give psc, peering or nothing."
  }
}

variable "private_network_range" {
  description = "IPv4 range of the network made here, in CIDR form: for psc its subnet, of which every node takes an address and Google 4; for peering the range that Google's machines take, /18 or larger. Empty takes 10.8.0.0/24 and 10.8.0.0/16."
  type        = string
  default     = ""

  validation {
    condition     = var.private_network_range == "" || can(cidrhost(var.private_network_range, 15))
    error_message = "Give a range of at least 16 addresses, such as 10.8.0.0/24."
  }

  validation {
    condition     = var.private_network != "peering" || var.private_network_range == "" || try(tonumber(split("/", var.private_network_range)[1]) <= 18, false)
    error_message = "Google plans custom training on peered ranges of /16 to /18: 63 to 15 jobs at once, of 8 nodes each."
  }

  validation {
    condition     = var.private_network_range == "" || var.shared_vpc == ""
    error_message = "The host project's network has ranges of its own: leave private_network_range or shared_vpc out."
  }
}

variable "shared_vpc" {
  description = "A host project's network to use instead of one made here: for psc projects/HOST/regions/REGION/subnetworks/NAME, for peering projects/HOST/global/networks/NAME, which its administrators have connected to Google's services."
  type        = string
  default     = ""

  validation {
    condition     = var.shared_vpc == "" || can(regex(var.private_network == "psc" ? "^projects/[^/]+/regions/[^/]+/subnetworks/[^/]+$" : "^projects/[^/]+/global/networks/[^/]+$", var.shared_vpc))
    error_message = "Give a subnetwork's full resource name for private_network = psc, and a network's for peering."
  }

  validation {
    condition     = var.shared_vpc == "" || var.private_network != ""
    error_message = "Say by private_network how the jobs reach it: psc or peering."
  }
}

variable "labels" {
  description = "Labels of everything made here that takes any, such as { env = \"dev\", team = \"vision\" }."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name, value in var.labels : can(regex("^[a-z][a-z0-9_-]{0,62}$", name)) && can(regex("^[a-z0-9_-]{0,63}$", value))])
    error_message = "Names and values have at most 63 lower-case letters, digits, underscores and dashes; a name begins with a letter."
  }
}

variable "tensorboard" {
  description = "Whether to make a Vertex AI TensorBoard instance (gcp.tensorboard of a run file). Google bills for what is stored in it."
  type        = bool
  default     = false
}

variable "cloud_run" {
  description = "Whether runs may serve their models on Cloud Run (deploy.cloud_run of a run file). The account pipeline may then make, change, delete and call the project's services."
  type        = bool
  default     = false
}

variable "github_repository_id" {
  description = "Numeric id of the repository whose GitHub Actions may act as the submitter account, without a key: gh api repos/OWNER/NAME --jq .id. Empty for none. A name can change hands, a number cannot."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^[0-9]*$", var.github_repository_id))
    error_message = "Give the number that gh api repos/OWNER/NAME --jq .id prints, not the name."
  }
}

variable "github_owner_id" {
  description = "Numeric id of the account or organization that owns the repository: gh api repos/OWNER/NAME --jq .owner.id."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^[0-9]*$", var.github_owner_id)) && (var.github_owner_id != "") == (var.github_repository_id != "")
    error_message = "Give the number that gh api repos/OWNER/NAME --jq .owner.id prints, together with github_repository_id."
  }
}

variable "github_environment" {
  description = "Environment of the repository whose jobs may act as the submitter account; its protection rules say who reviews them. Jobs without it, such as those of pull requests, get no token."
  type        = string
  default     = "production"

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9 ._-]{0,254}$", var.github_environment))
    error_message = "Give the name of an environment: letters, digits, spaces, dots, dashes and underscores."
  }
}
