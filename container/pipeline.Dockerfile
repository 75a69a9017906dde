# What runs the pipeline's own steps (resolve_run, prepare_data, sync_checkpoint, decide, ...) on CPU machines. Those steps
# read checkpoints and write the export, so the trainer's libraries are here too, beside kfp. Needs BuildKit, or buildah.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /app

# As in trainer.Dockerfile: the packages, the list of them, the code.
COPY pyproject.toml constraints.txt README.md LICENSE container/requirements.py ./
COPY container/torch_builds torch_builds
# For CPUs: each step of a run pulls the image onto a new machine, and CUDA's libraries are most of what it would hold. PyPI
# does not have this build for Linux on x86-64, so the secret `torch_index` or pip's configuration names an index that has.
ARG TORCH_BUILD=cpu
RUN --mount=type=secret,id=pip --mount=type=secret,id=torch_index export PIP_CONFIG_FILE=/run/secrets/pip \
    && python requirements.py pipelines trainer data media s3 > requirements.txt \
    && if [ -s /run/secrets/torch_index ]; then \
    pip install --no-deps --index-url "$(cat /run/secrets/torch_index)" --constraint "torch_builds/$TORCH_BUILD.txt" torch; fi \
    && pip install --constraint constraints.txt --constraint "torch_builds/$TORCH_BUILD.txt" --requirement requirements.txt
RUN --mount=type=secret,id=pip export PIP_CONFIG_FILE=/run/secrets/pip \
    && python -m venv /tmp/sbom \
    && /tmp/sbom/bin/pip install --constraint constraints.txt cyclonedx-bom \
    && /tmp/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.cdx.json \
    "$(command -v python)" \
    && rm -rf /tmp/sbom

COPY vlmpipe vlmpipe
COPY pipelines pipelines
COPY components components
COPY trainer trainer
RUN pip install --no-deps --no-build-isolation --no-index . && rm -rf build ./*.egg-info vlmpipe pipelines components trainer

ARG MIN_DRIVER=
ARG MIN_COMPUTE_CAPABILITY=
RUN python -m vlmpipe.trainer.distributed.torch_build --build "$TORCH_BUILD" \
    --min-driver "$MIN_DRIVER" --min-compute-capability "$MIN_COMPUTE_CAPABILITY"
LABEL vlmpipe.torch-build=$TORCH_BUILD

# The steps run as root: kfp's executor writes its outputs below /gcs, where Vertex AI mounts buckets, and nothing says that
# another user may (kubeflow/pipelines#5673).
CMD ["vlmpipe", "--help"]
