# The trainer with lmms-eval in an environment of its own, for the job benchmark (evaluate.lmms_eval). From the trainer image:
#   docker build --file container/lmms-eval.Dockerfile --build-arg TRAINER_IMAGE=REGISTRY/trainer:TAG .
ARG TRAINER_IMAGE
FROM ${TRAINER_IMAGE}
USER 0
WORKDIR /app
COPY recipes/lmms-eval/requirements.txt lmms-eval.txt
COPY recipes/cpu_torch.py ./
# As the trainer image's.
ARG TORCH_BUILD=cu130
# Packages of the extra `serving` first: the trainer's environment serves the model, lmms-eval's asks it.
# hadolint ignore=DL3042
RUN --mount=type=secret,id=pip --mount=type=secret,id=torch_index export PIP_CONFIG_FILE=/run/secrets/pip \
    && python requirements.py serving > serving.txt \
    && pip install --no-deps --require-hashes --no-build-isolation --requirement serving.txt \
    && sed 's/ --hash=.*//' "torch_builds/$TORCH_BUILD.txt" > torch.txt \
    && python -m venv /opt/lmms-eval \
    && if [ -s /run/secrets/torch_index ]; then /opt/lmms-eval/bin/pip install --no-deps \
    --index-url "$(cat /run/secrets/torch_index)" --constraint torch.txt torch; fi \
    && /opt/lmms-eval/bin/pip install --constraint torch.txt --requirement lmms-eval.txt \
    && /opt/lmms-eval/bin/python -P cpu_torch.py \
    && rm serving.txt torch.txt cpu_torch.py
# An import of lmms-eval's looks for a program git, which the image does not have.
ENV GIT_PYTHON_REFRESH=quiet
USER 1000
