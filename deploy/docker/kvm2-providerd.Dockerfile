# syntax=docker/dockerfile:1
# The image of kvm2-providerd. From the top of the repository:
#   docker build -f deploy/docker/kvm2-providerd.Dockerfile -t kvm2-providerd:0.1.0 .
# A release names both images by digest: --build-arg RUST_IMAGE=rust@sha256:… --build-arg DEBIAN_IMAGE=debian@sha256:…
#
# libvirt's client library is that of bookworm-backports: what the lab and its measurements have (11.3). Backports come
# from the mirror that the image has for bookworm itself.
ARG RUST_IMAGE=rust:1.95-bookworm
ARG DEBIAN_IMAGE=debian:bookworm-slim

FROM ${RUST_IMAGE} AS build
# hadolint ignore=DL3008
RUN sed -n -e 's/^Suites:.*/Suites: bookworm-backports/' -e '1,/^$/p' /etc/apt/sources.list.d/debian.sources \
        >/etc/apt/sources.list.d/backports.sources && \
    apt-get update && \
    apt-get install -y --no-install-recommends -t bookworm-backports libvirt-dev && \
    apt-get install -y --no-install-recommends pkg-config && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --locked --release -p provider-kvm2 --bin kvm2-providerd && \
    install -D target/release/kvm2-providerd /out/kvm2-providerd

FROM ${DEBIAN_IMAGE}
LABEL org.opencontainers.image.title="kvm2-providerd" \
      org.opencontainers.image.licenses="Apache-2.0 AND LGPL-2.1-or-later"
# hadolint ignore=DL3008
RUN sed -n -e 's/^Suites:.*/Suites: bookworm-backports/' -e '1,/^$/p' /etc/apt/sources.list.d/debian.sources \
        >/etc/apt/sources.list.d/backports.sources && \
    apt-get update && \
    apt-get install -y --no-install-recommends -t bookworm-backports libvirt0 && \
    apt-get install -y --no-install-recommends ca-certificates && \
    dpkg --compare-versions "$(dpkg-query -W -f '${Version}' libvirt0)" ge 11.3 && \
    rm -rf /var/lib/apt/lists/*
COPY --from=build /out/kvm2-providerd /usr/local/bin/kvm2-providerd
# a program that lacks a library says so here and not in a cluster
RUN ["/usr/local/bin/kvm2-providerd", "--version"]
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/kvm2-providerd"]
