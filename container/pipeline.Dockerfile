# What runs the pipeline's own steps (resolve_run, prepare_data, sync_checkpoint, decide, ...) on CPU machines. Those steps
# read checkpoints and write the export, so the trainer's libraries are here too, beside kfp. Needs BuildKit, or buildah.
ARG BASE_IMAGE=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
FROM ${BASE_IMAGE}

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /app

# As in trainer.Dockerfile: the packages, the list of them, the code.
COPY pyproject.toml README.md LICENSE container/requirements.py container/packages.txt ./
COPY container/torch_builds torch_builds
# For CPUs: each step of a run pulls the image onto a new machine, and CUDA's libraries are most of what it would hold. PyPI
# does not have this build for Linux on x86-64, so the secret `torch_index` or pip's configuration names an index that has.
ARG TORCH_BUILD=cpu
RUN --mount=type=secret,id=pip --mount=type=secret,id=torch_index export PIP_CONFIG_FILE=/run/secrets/pip \
    && python requirements.py pipelines trainer data media s3 > requirements.txt \
    && python requirements.py build > build.txt && grep '^torch=' "torch_builds/$TORCH_BUILD.txt" > torch.txt \
    && pip install --no-deps --require-hashes --requirement build.txt \
    && if [ -s /run/secrets/torch_index ]; then \
    pip install --no-deps --require-hashes --index-url "$(cat /run/secrets/torch_index)" --requirement torch.txt; fi \
    && pip install --no-deps --require-hashes --no-build-isolation --use-pep517 \
    --requirement "torch_builds/$TORCH_BUILD.txt" --requirement requirements.txt \
    && pip check
RUN --mount=type=secret,id=pip export PIP_CONFIG_FILE=/run/secrets/pip \
    && python -m venv /tmp/sbom \
    && python requirements.py sbom > sbom.txt \
    && /tmp/sbom/bin/pip install --no-deps --require-hashes --requirement sbom.txt \
    && /tmp/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.cdx.json \
    "$(command -v python)" \
    && rm -rf /tmp/sbom sbom.txt

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
