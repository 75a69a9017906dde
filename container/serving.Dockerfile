# vLLM's OpenAI server with what vlmpipe's deployments need beside it: a start program that fetches files from buckets and serves
# an adapter with its own settings, and num2words, which SmolVLM's processor asks for. For deploy.image_uri.
#   docker build --file container/serving.Dockerfile --build-arg VLLM_IMAGE=vllm/vllm-openai@sha256:... .
# Name vLLM's image by the digest that its registry shows beside the tag v0.32.0, for tags can be moved.
ARG VLLM_IMAGE
# hadolint ignore=DL3006
FROM ${VLLM_IMAGE}
ARG VLLM_IMAGE
RUN case "$VLLM_IMAGE" in *@sha256:*) ;; *) \
    echo "VLLM_IMAGE is $VLLM_IMAGE, expected vLLM's image by its digest, NAME@sha256:..." >&2; exit 64 ;; esac
WORKDIR /app
COPY constraints.txt container/serving.txt container/added_constraints.py ./
# None of vLLM's own packages is replaced.
RUN --mount=type=secret,id=pip export PIP_CONFIG_FILE=/run/secrets/pip PIP_NO_CACHE_DIR=1 \
    && python3 added_constraints.py constraints.txt > added.txt \
    && python3 -m pip install --constraint added.txt --requirement serving.txt
COPY pyproject.toml README.md LICENSE ./
COPY vlmpipe vlmpipe
COPY pipelines pipelines
COPY components components
COPY trainer trainer
RUN python3 -m pip install --no-deps --no-build-isolation --no-index --no-cache-dir . \
    && rm -rf build ./*.egg-info vlmpipe pipelines components trainer
# The versions of which the answers were compared (vlmpipe/config/vllm.yaml). For others: --build-arg VLLM_VERSION=...
ARG VLLM_VERSION=0.32.0
RUN found=$(python3 -c 'from importlib.metadata import version; print(version("vllm"))') \
    && case "$found" in "$VLLM_VERSION"|"$VLLM_VERSION"+*) ;; *) \
    echo "the image has vLLM $found, expected VLLM_VERSION, $VLLM_VERSION" >&2; exit 64 ;; esac \
    && python3 -m pip freeze > packages.txt
LABEL vlmpipe.vllm=$VLLM_VERSION vlmpipe.vllm-image=$VLLM_IMAGE
ENTRYPOINT ["python3", "-P", "-m", "vlmpipe.trainer.serving.vllm_server"]
