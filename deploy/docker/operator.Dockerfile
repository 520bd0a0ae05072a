# syntax=docker/dockerfile:1
# The image of egress-operator. From the top of the repository:
#   docker build -f deploy/docker/operator.Dockerfile -t egress-operator:0.1.0 .
# A release names both images by digest: --build-arg RUST_IMAGE=rust@sha256:… --build-arg DEBIAN_IMAGE=debian@sha256:…
ARG RUST_IMAGE=rust:1.95-bookworm
ARG DEBIAN_IMAGE=debian:bookworm-slim

FROM ${RUST_IMAGE} AS build
WORKDIR /src
COPY . .
# the workspace is locked; the provider, which needs libvirt, is not built
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --locked --release -p egress-operator --bin egress-operator && \
    install -D target/release/egress-operator /out/egress-operator

FROM ${DEBIAN_IMAGE}
LABEL org.opencontainers.image.title="egress-operator" \
      org.opencontainers.image.licenses="Apache-2.0"
# for providers behind https whose CA is a public one
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates && \
    rm -rf /var/lib/apt/lists/*
COPY --from=build /out/egress-operator /usr/local/bin/egress-operator
# by number, so that the kubelet can tell that it is not root; the same as in the provider's image
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/egress-operator"]
