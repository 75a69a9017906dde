#!/usr/bin/env bash
# Build and push the two images; write their names by digest into build/images.json and, if one is named, a run file.
# Usage: build.sh docker|gcloud [RUN_FILE]
# Needs CONTAINER_IMAGE_REGISTRY (see env.sh.example), an installed vlmpipe, and a builder: a Docker daemon here, or Cloud
# Build through gcloud. Options from the environment: TAG, REDUCTION_SERVER=1 (its NCCL plugin is put into the trainer image),
# HOROVOD=1 (built into the trainer image), EXTRAS (of pyproject.toml, for the trainer image, such as wandb), BASE_IMAGE
# (instead of the recipes', by digest), and torch's builds: TORCH_BUILD of the trainer image (cu130) with TORCH_INDEX_URL, and
# PIPELINE_TORCH_BUILD of the pipeline image (cpu) with TORCH_CPU_INDEX_URL.
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
base=${BASE_IMAGE:-$(sed -n 's/^ARG BASE_IMAGE=//p' container/trainer.Dockerfile)}
trainer_torch=${TORCH_BUILD:-cu130}
pipeline_torch=${PIPELINE_TORCH_BUILD:-cpu}
trainer_index=${TORCH_INDEX_URL:-}
pipeline_index=${TORCH_CPU_INDEX_URL:-}
[ -n "$registry" ] || fail "CONTAINER_IMAGE_REGISTRY is not set" \
  "set it in env.sh, for example europe-west4-docker.pkg.dev/my-project/vlmpipe"
command -v "$python" >/dev/null || fail "vlmpipe is not installed: there is no $python" "make install"
[ -z "$run_file" ] || [ -f "$run_file" ] || fail "there is no run file $run_file" "give the path of one: config=FILE"
case $base in
  *@sha256:*) ;;
  *) fail "BASE_IMAGE is $base, and a tag can be moved" \
    "name the image by its digest, NAME@sha256:..., which docker buildx imagetools inspect $base shows" ;;
esac
for torch in "$trainer_torch" "$pipeline_torch"; do
  [ -f "container/torch_builds/$torch.txt" ] || fail "there is no container/torch_builds/$torch.txt, of torch's build $torch" \
    "$python container/pin_torch.py $torch --index-url INDEX writes it"
done
# Names and needs of a build, as build arguments.
needs_of() {
  "$python" -m vlmpipe.trainer.distributed.cuda_builds "$1"
}
trainer_needs=$(needs_of "$trainer_torch")
pipeline_needs=$(needs_of "$pipeline_torch")
if [ "$builder" = gcloud ] || [ -z "${PIP_CONFIG_FILE:-}" ]; then # without a pip.conf, there is PyPI only, which has cu130
  [ "$trainer_torch" = cu130 ] || [ -n "$trainer_index" ] || fail "TORCH_INDEX_URL is not set, and PyPI has no build $trainer_torch of torch" \
    "set it to the index of $trainer_torch that https://pytorch.org/get-started shows"
  [ "$pipeline_torch" = cu130 ] || [ -n "$pipeline_index" ] || fail \
    "TORCH_CPU_INDEX_URL is not set, and PyPI has no build $pipeline_torch of torch" \
    "set it to the index that https://pytorch.org/get-started shows for CPU; or PIPELINE_TORCH_BUILD=cu130, for an image of which each step of a run pulls 3 GB more"
fi
mkdir -p build

case $builder in
  docker)
    docker info >/dev/null 2>&1 || fail "no Docker daemon answers" \
      "start Docker, or build on Cloud Build: make build builder=gcloud"
    for image in trainer pipeline; do
      set -- --platform linux/amd64 --build-arg "BASE_IMAGE=$base"
      needs=$pipeline_needs index=${pipeline_index:+TORCH_CPU_INDEX_URL}
      if [ $image = trainer ]; then
        set -- "$@" --build-arg "REDUCTION_SERVER=$plugin" --build-arg "HOROVOD=$horovod" --build-arg "EXTRAS=$extras"
        needs=$trainer_needs index=${trainer_index:+TORCH_INDEX_URL}
      fi
      for argument in $needs; do
        set -- "$@" --build-arg "$argument"
      done
      if [ -n "$index" ]; then # a secret, for it may hold credentials: nothing of it stays in the image
        set -- "$@" --secret "id=torch_index,env=$index"
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
    for argument in $trainer_needs; do
      values+=",_$argument"
    done
    for argument in $pipeline_needs; do
      values+=",_PIPELINE_$argument"
    done
    values+="${trainer_index:+,_TORCH_INDEX_URL=$trainer_index}${pipeline_index:+,_TORCH_CPU_INDEX_URL=$pipeline_index}"
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

"$python" -m vlmpipe.pipelines.pin_images --registry "$registry" --tag "$tag" --torch-build "$trainer_torch" ${run_file:+--config "$run_file"} <build/builder.json
