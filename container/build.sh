#!/usr/bin/env bash
# Build and push the two images; write their names by digest into build/images.json and, if one is named, a run file.
# Usage: build.sh docker|gcloud [RUN_FILE]
# Needs CONTAINER_IMAGE_REGISTRY (see env.sh.example), an installed vlmpipe, and a builder: a Docker daemon here, or Cloud
# Build through gcloud. Options from the environment: TAG, REDUCTION_SERVER=1 (its NCCL plugin is put into the trainer image),
# HOROVOD=1 (built into the trainer image), EXTRAS (of pyproject.toml, for the trainer image, such as wandb) and BASE_IMAGE
# (instead of python:3.11-slim).
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { # found, to do
  printf 'error: %s\n  to do:    %s\n' "$1" "$2" >&2
  exit 69
}

builder=${1:-docker}
run_file=${2:-}
python=${VLMPIPE_PYTHON:-.venv/bin/python}
registry=${CONTAINER_IMAGE_REGISTRY:-}
tag=${TAG:-$(git rev-parse --short HEAD)}
plugin=${REDUCTION_SERVER:-0}
horovod=${HOROVOD:-0}
extras=${EXTRAS:-}
base=${BASE_IMAGE:-python:3.11-slim}
[ -n "$registry" ] || fail "CONTAINER_IMAGE_REGISTRY is not set" \
  "set it in env.sh, for example europe-west4-docker.pkg.dev/my-project/vlmpipe"
command -v "$python" >/dev/null || fail "vlmpipe is not installed: there is no $python" "make install"
[ -z "$run_file" ] || [ -f "$run_file" ] || fail "there is no run file $run_file" "give the path of one: config=FILE"
mkdir -p build

case $builder in
  docker)
    docker info >/dev/null 2>&1 || fail "no Docker daemon answers" \
      "start Docker, or build on Cloud Build: make build builder=gcloud"
    for image in trainer pipeline; do
      set -- --platform linux/amd64 --build-arg "BASE_IMAGE=$base"
      if [ $image = trainer ]; then
        set -- "$@" --build-arg "REDUCTION_SERVER=$plugin" --build-arg "HOROVOD=$horovod" --build-arg "EXTRAS=$extras"
      fi
      if [ -n "${PIP_CONFIG_FILE:-}" ]; then
        set -- "$@" --secret "id=pip,src=$PIP_CONFIG_FILE"
      fi
      DOCKER_BUILDKIT=1 docker build --file "container/$image.Dockerfile" "$@" --tag "$registry/$image:$tag" .
      docker push "$registry/$image:$tag"
      docker run --rm --network none "$registry/$image:$tag" cat /app/sbom.cdx.json >"build/$image.cdx.json"
    done
    docker image inspect "$registry/trainer:$tag" "$registry/pipeline:$tag" >build/builder.json
    echo "packages of the images: build/trainer.cdx.json, build/pipeline.cdx.json"
    ;;
  gcloud)
    command -v gcloud >/dev/null || fail "gcloud is not installed" \
      "install the Google Cloud CLI, or build here: make build builder=docker"
    if [ -n "${VERTEX_PROJECT_ID:-}" ]; then
      export CLOUDSDK_CORE_PROJECT=$VERTEX_PROJECT_ID # as --project, for each call
    fi
    values="_REGISTRY=$registry,_TAG=$tag,_BASE_IMAGE=$base,_REDUCTION_SERVER=$plugin,_HOROVOD=$horovod${extras:+,_EXTRAS=$extras}"
    set -- --config container/cloudbuild.yaml --substitutions "$values"
    # Without an account and a place of its own, Cloud Build takes the project's defaults, which new projects leave powerless.
    if [ -n "${CLOUD_BUILD_SA_EMAIL:-}" ]; then
      set -- "$@" --service-account "projects/${VERTEX_PROJECT_ID:--}/serviceAccounts/$CLOUD_BUILD_SA_EMAIL"
    fi
    if [ -n "${CLOUD_BUILD_SOURCES:-}" ]; then
      set -- "$@" --gcs-source-staging-dir "$CLOUD_BUILD_SOURCES"
    fi
    # Not waited for by gcloud itself: it fails when it may not read the build's log, whatever becomes of the build.
    build=$(gcloud builds submit --async --format "value(id)" "$@" .)
    echo "build $build: gcloud beta builds log --stream $build"
    while :; do
      status=$(gcloud builds describe "$build" --format "value(status)")
      case $status in
        QUEUED | PENDING | WORKING) sleep "${BUILD_POLL_S:-10}" ;;
        SUCCESS) break ;;
        *) fail "the build ended as $status" "read its log: gcloud builds log $build" ;;
      esac
    done
    gcloud builds describe "$build" --format json >build/builder.json
    echo "packages of each image: /app/sbom.cdx.json in it"
    ;;
  *) fail "unknown builder '$builder'" "builder=docker or builder=gcloud" ;;
esac

"$python" -m vlmpipe.pipelines.pin_images --registry "$registry" --tag "$tag" ${run_file:+--config "$run_file"} <build/builder.json
