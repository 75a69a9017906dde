# What runs on the training machines: the trainer and nothing of the pipeline (kfp pins requests and urllib3 exactly).
# torch's own wheels bring the CUDA libraries; the machine brings the driver.
FROM python:3.11-slim

# torch.compile (train.compile) builds its kernels' launchers with a C++ compiler: Debian's, of whatever release the base is.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /app

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY pipelines pipelines
COPY components components
COPY trainer trainer
RUN pip install --constraint constraints.txt '.[trainer,data]'

# Vertex AI gives the command in the job spec; this is what a person who starts the image by hand sees.
CMD ["python", "-m", "trainer.launch", "--help"]
