# What runs on the training machines: the trainer and nothing of the pipeline (kfp pins requests and urllib3 exactly).
# torch's own wheels bring the CUDA libraries; the machine brings the driver. Needs BuildKit, or buildah.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE} AS system

# 1: with NCCL's plugin for Reduction Server (cluster.reduction_server), from Google's packages. NCCL takes one plugin: the
# minus at a name's end removes Fast Socket, in case the base has it.
ARG REDUCTION_SERVER=0
ARG GOOGLE_PACKAGES=https://packages.cloud.google.com/apt
# hadolint ignore=DL3008
RUN if [ "$REDUCTION_SERVER" = 1 ]; then \
    key=/usr/share/keyrings/google-packages.asc \
    && python -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' "$GOOGLE_PACKAGES/doc/apt-key.gpg" $key \
    && echo "deb [signed-by=$key] $GOOGLE_PACKAGES google-fast-socket main" > /etc/apt/sources.list.d/google.list \
    && apt-get update \
    && apt-get install --yes --no-install-recommends google-reduction-server google-fast-socket- \
    && rm -rf /var/lib/apt/lists/* /etc/apt/sources.list.d/google.list $key; fi

FROM system
# torch.compile (train.compile) builds its kernels' launchers with a C++ compiler: Debian's, of whatever release the base is.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# Vertex AI runs a container as root unless its image says otherwise. A trial of hyperparameter tuning leaves its metric in
# /var/hypertune.
RUN useradd --uid 1000 --create-home vlmpipe \
    && install --directory --owner=vlmpipe /home/vlmpipe/torch_extensions /var/hypertune

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /app

# The packages first, which take minutes: changed code does not install them again. Where they come from a mirror, its
# pip.conf is handed in as the secret `pip`, of which nothing stays in the image.
COPY pyproject.toml constraints.txt README.md LICENSE container/requirements.py ./
# EXTRAS: of pyproject.toml, such as wandb.
ARG EXTRAS=
# hadolint ignore=SC2086
RUN --mount=type=secret,id=pip export PIP_CONFIG_FILE=/run/secrets/pip \
    && python requirements.py trainer data s3 $EXTRAS > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt
# 1: with Horovod (recipes/horovod), built for CPUs against the torch that was just installed: 10 to 30 minutes.
ARG HOROVOD=0
COPY recipes/horovod/build_wheel.sh ./
# hadolint ignore=DL3008,DL3013
RUN --mount=type=secret,id=pip if [ "$HOROVOD" = 1 ]; then \
    export PIP_CONFIG_FILE=/run/secrets/pip \
    && apt-get update && apt-get install --yes --no-install-recommends cmake make \
    && pip install 'setuptools<80' wheel \
    && ./build_wheel.sh "$(command -v python)" /tmp/wheels \
    && pip uninstall --yes wheel \
    && pip install --upgrade --constraint constraints.txt setuptools cloudpickle cffi psutil \
    && pip install --no-deps --no-index /tmp/wheels/horovod-*.whl \
    && apt-get purge --yes --auto-remove cmake make \
    && rm -rf /tmp/wheels /var/lib/apt/lists/*; fi \
    && rm build_wheel.sh
# What was installed, as CycloneDX: found by a tool in an environment of its own, which is not part of the image.
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

# DeepSpeed and torch put here what they compile at first use. The trainer needs none of DeepSpeed's (decision 0026).
ENV TORCH_EXTENSIONS_DIR=/home/vlmpipe/torch_extensions HOME=/home/vlmpipe
USER 1000
# Vertex AI gives the command in the job spec; this is what a person who starts the image by hand sees.
CMD ["python", "-m", "vlmpipe.trainer.launch", "--help"]
