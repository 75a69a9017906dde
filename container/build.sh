#!/usr/bin/env bash
# Build and push the two images. Usage: build.sh docker|gcloud
# Needs CONTAINER_IMAGE_REGISTRY (see env.sh.example) and a builder: a Docker daemon here, or Cloud Build through gcloud.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { # found, to do
  printf 'error: %s\n  to do:    %s\n' "$1" "$2" >&2
  exit 69
}

builder=${1:-docker}
registry=${CONTAINER_IMAGE_REGISTRY:-}
tag=${TAG:-$(git rev-parse --short HEAD)}
[ -n "$registry" ] || fail "CONTAINER_IMAGE_REGISTRY is not set" \
  "set it in env.sh, for example europe-west4-docker.pkg.dev/my-project/vlmpipe"

case $builder in
  docker)
    docker info >/dev/null 2>&1 || fail "no Docker daemon answers" \
      "start Docker, or build on Cloud Build: make build builder=gcloud"
    for image in trainer pipeline; do
      docker build --file "container/$image.Dockerfile" --tag "$registry/$image:$tag" .
      docker push "$registry/$image:$tag"
    done
    ;;
  gcloud)
    command -v gcloud >/dev/null || fail "gcloud is not installed" \
      "install the Google Cloud CLI, or build here: make build builder=docker"
    set -- --config container/cloudbuild.yaml --substitutions "_REGISTRY=$registry,_TAG=$tag"
    if [ -n "${VERTEX_PROJECT_ID:-}" ]; then
      set -- "$@" --project "$VERTEX_PROJECT_ID"
    fi
    # Without an account and a place of its own, Cloud Build takes the project's defaults, which new projects leave powerless.
    if [ -n "${CLOUD_BUILD_SA_EMAIL:-}" ]; then
      set -- "$@" --service-account "projects/${VERTEX_PROJECT_ID:--}/serviceAccounts/$CLOUD_BUILD_SA_EMAIL"
    fi
    if [ -n "${CLOUD_BUILD_SOURCES:-}" ]; then
      set -- "$@" --gcs-source-staging-dir "$CLOUD_BUILD_SOURCES"
    fi
    gcloud builds submit "$@" .
    ;;
  *) fail "unknown builder '$builder'" "builder=docker or builder=gcloud" ;;
esac

echo "cluster.image_uri:  $registry/trainer:$tag"
echo "gcp.pipeline_image: $registry/pipeline:$tag"
echo "Pin them by digest (…@sha256:…) in the run file: a tag may move while a run is queued."
