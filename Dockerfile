# vitkit serve in a container: docker run --rm -p 127.0.0.1:8000:8000 -v ./runs/food:/weights:ro vitkit
# For a small CPU image build with --build-arg TORCH_INDEX= and the address of PyTorch's index of CPU builds (its install
# page names it); without it pip takes the default build, which runs on a CPU and, with --gpus all, on CUDA.
FROM python:3.11-slim

ARG TORCH_INDEX
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
# torch first and alone: no other package may then pull another build of it
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY vitkit ./vitkit
RUN pip install -c constraints.txt '.[serve]' && rm -rf /src

RUN useradd --create-home --uid 1000 vitkit
USER vitkit
WORKDIR /home/vitkit

EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
# SIGTERM finishes what was accepted: give `docker stop` the time for it
STOPSIGNAL SIGTERM
ENTRYPOINT ["vitkit", "serve"]
CMD ["/weights", "--host", "0.0.0.0", "--port", "8000"]
