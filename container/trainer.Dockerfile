# What runs on the training machines: the trainer and nothing of the pipeline (kfp pins requests and urllib3 exactly).
# torch's own wheels bring the CUDA libraries; the machine brings the driver, of a branch that is at least the label
# vlmpipe.min-driver. Needs BuildKit, or buildah.
ARG BASE_IMAGE=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
FROM ${BASE_IMAGE} AS system

# 1: with NCCL's plugin for Reduction Server (cluster.reduction_server), from Google's packages. NCCL takes one plugin: the
# minus at a name's end removes Fast Socket, in case the base has it.
ARG REDUCTION_SERVER=0
ARG GOOGLE_PACKAGES=https://packages.cloud.google.com/apt
# apt takes signatures of these keys only, whatever else the downloaded file holds: Google's Artifact Registry Repository
# Signer, and its Rapture Automatic Signing Key of 2022.
ARG GOOGLE_KEYS=35BAA0B33E9EB396F59CA838C0BA5CE6DC6315A3,A362B822F6DEDC652817EA46B53DC80D13EDEF05
# hadolint ignore=DL3008
RUN if [ "$REDUCTION_SERVER" = 1 ]; then \
    key=/etc/apt/trusted.gpg.d/google-packages.asc \
    && python -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' "$GOOGLE_PACKAGES/doc/apt-key.gpg" $key \
    && echo "deb [signed-by=$GOOGLE_KEYS] $GOOGLE_PACKAGES google-fast-socket main" > /etc/apt/sources.list.d/google.list \
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
COPY pyproject.toml constraints.txt README.md LICENSE container/requirements.py container/packages.txt ./
COPY container/torch_builds torch_builds
# EXTRAS: of pyproject.toml, such as wandb.
ARG EXTRAS=
# The build of torch (decision 0004), a file of container/torch_builds: PyPI has cu130. For others, the secret `torch_index`
# holds the address of an index that has them, from which nothing but torch is taken.
ARG TORCH_BUILD=cu130
# hadolint ignore=SC2086
RUN --mount=type=secret,id=pip --mount=type=secret,id=torch_index export PIP_CONFIG_FILE=/run/secrets/pip \
    && python requirements.py trainer data s3 $EXTRAS > requirements.txt \
    && python requirements.py build > build.txt && grep '^torch=' "torch_builds/$TORCH_BUILD.txt" > torch.txt \
    && pip install --no-deps --require-hashes --requirement build.txt \
    && if [ -s /run/secrets/torch_index ]; then \
    pip install --no-deps --require-hashes --index-url "$(cat /run/secrets/torch_index)" --requirement torch.txt; fi \
    && pip install --no-deps --require-hashes --no-build-isolation --use-pep517 \
    --requirement "torch_builds/$TORCH_BUILD.txt" --requirement requirements.txt \
    && pip check
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

# Machines with other drivers or GPUs are refused by `vlmpipe check` and by the launcher; that these are the build's needs
# is checked here. So is the plugin for Reduction Server, which an NCCL that does not know its interface ignores silently.
ARG MIN_DRIVER=580
ARG MIN_COMPUTE_CAPABILITY=7.5
ARG REDUCTION_SERVER=0
RUN python -m vlmpipe.trainer.distributed.torch_build --build "$TORCH_BUILD" \
    --min-driver "$MIN_DRIVER" --min-compute-capability "$MIN_COMPUTE_CAPABILITY" \
    && if [ "$REDUCTION_SERVER" = 1 ]; then \
    python -m vlmpipe.trainer.distributed.nccl_plugin || { dpkg --listfiles google-reduction-server; exit 1; }; fi
LABEL vlmpipe.torch-build=$TORCH_BUILD vlmpipe.min-driver=$MIN_DRIVER \
    vlmpipe.min-compute-capability=$MIN_COMPUTE_CAPABILITY

# Vertex AI and GKE mount the driver's libraries and programs into these folders, which the loader does not search by
# itself: without them, torch sees no GPU. NVIDIA_*: for container runtimes that look there for what to mount.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
    PATH=$PATH:/usr/local/nvidia/bin \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# DeepSpeed and torch put here what they compile at first use. The trainer needs none of DeepSpeed's.
ENV TORCH_EXTENSIONS_DIR=/home/vlmpipe/torch_extensions HOME=/home/vlmpipe
USER 1000
# Vertex AI gives the command in the job spec; this is what a person who starts the image by hand sees.
CMD ["python", "-m", "vlmpipe.trainer.launch", "--help"]
