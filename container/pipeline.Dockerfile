# What runs the pipeline's own steps (resolve_run, prepare_data, sync_checkpoint, decide, ...) on CPU machines. Those steps
# read checkpoints and write the export, so the trainer's libraries are here too, beside kfp.
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /app

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY pipelines pipelines
COPY components components
COPY trainer trainer
RUN pip install --constraint constraints.txt '.[pipelines,trainer,data]'
