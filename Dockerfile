# One image for CPU and CUDA: torch's wheels bring what they need, the driver comes from the host.
#   docker build --build-arg TORCH_INDEX=URL .                    CPU; URL is PyTorch's index of CPU wheels
#   docker build --build-arg VARIANT=cuda .                       CUDA, from the default package index
#   docker build --target demo --build-arg TORCH_INDEX=URL .      with the default model inside
# docs/deploy.md says how to run it. Pin the base for a release: --build-arg BASE_IMAGE=python:3.11-slim-bookworm@sha256:...
ARG BASE_IMAGE=python:3.11-slim-bookworm

# ---- build: a virtual environment, copied as it is
FROM ${BASE_IMAGE} AS build
ARG VARIANT=cpu
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/peagle
ENV PATH=/opt/peagle/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# Layers of their own: the dependencies change seldom, the source often. A CPU wheel is told from the others by its local
# version, which the default index does not carry; without it an image of several gigabytes would come out.
RUN case "$VARIANT" in \
        cpu) SUFFIX=+cpu ;; \
        cuda) SUFFIX= ;; \
        *) echo "VARIANT must be cpu or cuda, got '$VARIANT'" >&2; exit 1 ;; \
    esac; \
    sed -n "s/^torch==.*/&$SUFFIX/p" constraints.txt > torch.txt; \
    if ! python3 -m pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r torch.txt; then \
        echo "torch could not be installed for VARIANT=$VARIANT. CPU wheels need --build-arg TORCH_INDEX=URL, where URL is" \
            "the index that PyTorch's installation page names for Linux, Pip, CPU." >&2; \
        exit 1; \
    fi
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*p['dependencies'], *p['optional-dependencies']['tracing'], sep='\n')" > requirements.txt \
    && python3 -m pip install -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY peagle peagle
COPY server server
RUN python3 -m pip install --no-deps .

# ---- server: what runs
FROM ${BASE_IMAGE} AS server
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="peagle" \
      org.opencontainers.image.description="An OpenAI-compatible LLM server whose speculation is invisible, except in speed." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# The number is what Kubernetes' runAsNonRoot checks; the name is for people. /data holds models, and nothing else is written.
RUN groupadd --gid 10001 peagle \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin peagle \
    && install -d -o 10001 -g 10001 -m 0775 /data
COPY --from=build /opt/peagle /opt/peagle
ENV PATH=/opt/peagle/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/data \
    HF_HOME=/data/huggingface \
    PEAGLE_CACHE=/data/peagle \
    PEAGLE_HOST=0.0.0.0
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
# /health means "restart me": some supervisors act on it, so a long start must not count against it. Its /ready sibling
# is for those who wait for the model.
HEALTHCHECK --interval=30s --timeout=5s --retries=3 \
    CMD ["peagle", "health"]
# Exec form: the server is process 1 and gets SIGTERM itself, upon which it drains.
ENTRYPOINT ["peagle"]
CMD ["serve"]

# ---- demo: the server with the default model inside, so that its first start needs no network
FROM server AS demo
ENV PEAGLE_CACHE=/opt/models
USER 0:0
RUN peagle fetch && chmod -R a+rX /opt/models
USER 10001:10001

# ---- what `docker build .` makes: no weights
FROM server
