# Container image of awqd. The default bases give the CUDA image; for a CPU image:
#   docker build --build-arg BASE=debian:12 --build-arg RUNTIME=debian:12-slim -t awqd:cpu .
# and for one with gRPC 1.83, without the flaws of 1.51.1 (SECURITY.md):
#   docker build --build-arg BASE=debian:13 --build-arg RUNTIME=debian:13-slim --build-arg GRPC=newer -t awqd:cpu-grpc1.83 .
# Both for linux/amd64 and linux/arm64, whose bases there are; the recipe with gRPC 1.83 is for amd64 alone.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG RUNTIME=nvidia/cuda:13.0.1-runtime-ubuntu24.04

FROM ${BASE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
# The packages come first, so that a change of the sources does not install them again.
COPY deploy/lib.sh deploy/packages.txt deploy/
COPY deploy/newer_grpc deploy/newer_grpc/
ARG GRPC=distribution
RUN [[ "$GRPC" == distribution ]] || deploy/newer_grpc/prepare.sh
RUN ROOT=/src; source deploy/lib.sh; install_packages build; rm -rf /var/lib/apt/lists/*
COPY . .
# Every GPU from compute capability 7.5 on, those to come by portable code. Ask for fewer, such as 90a-real, for a faster build and a smaller image.
ARG CUDA_ARCHITECTURES="75-real;80-real;90a-real;90-virtual"
RUN ROOT=/src; source deploy/lib.sh; \
    configure release "-DAWQD_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}"; \
    build release bundle; \
    mv out/awqd-*-linux-"$(uname -m)" /opt/awqd

FROM ${RUNTIME}
LABEL org.opencontainers.image.title="awqd" \
      org.opencontainers.image.description="gRPC inference service for AWQ-packed checkpoints" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/awqd /opt/awqd
ENV PATH=/opt/awqd/bin:${PATH}
# A number, so that an orchestrator can see that it is not root.
USER 65532:65532
EXPOSE 8001 8002
# Every interface of the container, where published ports arrive; the health check reads it too. Metrics and probes over
# HTTP on 8002.
ENV AWQD_ADDRESS=0.0.0.0:8001 AWQD_METRICS_ADDRESS=0.0.0.0:8002
ENTRYPOINT ["/opt/awqd/bin/awqd"]
CMD ["--model_repository=/opt/awqd/models"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["/opt/awqd/bin/awqctl", "healthcheck"]
