# vitkit serve in a container: docker run --rm -p 127.0.0.1:8000:8000 -v ./runs/food:/weights:ro vitkit
# The image holds PyTorch's CPU build. `--build-arg TORCH_INDEX=` (empty) takes the default build instead, which is much
# larger and, with `docker run --gpus all`, also runs on CUDA.
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
# Install torch first, so that this build satisfies the other packages; they also install what torch depends on.
RUN pip install --no-deps -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY vitkit ./vitkit
RUN pip install -c constraints.txt . && rm -rf /src

RUN useradd --create-home --uid 1000 vitkit
USER vitkit
WORKDIR /home/vitkit

EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
# On SIGTERM the server finishes the requests it has accepted: give `docker stop` enough time.
STOPSIGNAL SIGTERM
ENTRYPOINT ["vitkit", "serve"]
CMD ["/weights", "--host", "0.0.0.0", "--port", "8000"]
