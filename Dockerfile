# The two commands of the README in a container: docker build -t gradcast . && docker run --cap-add NET_ADMIN --cap-add
# SYS_ADMIN gradcast. The capabilities are for the demo's slow links; without them it trains over loopback.
FROM debian:12
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates make python3
COPY . /gradcast
WORKDIR /gradcast
# What is missing, compilers included, `make` installs by itself; PyTorch is 5 GB.
RUN make core
CMD ["make", "demo"]
