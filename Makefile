# SPDX-License-Identifier: Apache-2.0 OR MIT
# A thin menu over cargo: what has logic is in xtask/ and tools/. `make` alone prints it.
export PATH := $(HOME)/.cargo/bin:$(PATH)
.DEFAULT_GOAL := menu
# A report never takes the place of another.
REPORT = $(or $(DIR),target/report/$(shell date +%Y-%m-%d-%H%M%S))
TARGETS := menu demo vm-demo vm-debug xen-demo sockets-demo vm-sockets-demo net-demo test test-all check model conformance hostile crash fuzz bench report compare install install-deps doc ci clean
.PHONY: $(TARGETS) toolchain

menu: ## print this menu
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile
	@tools/toolchain.sh

demo: toolchain ## move a large file between two domains, then compare with TCP and UNIX sockets [FILE=path]
	@cargo run --release -p tombolo-cli -- demo $(if $(FILE),'$(FILE)')

vm-demo: toolchain ## boot two virtual machines, move a file between them, compare with TCP over virtio-net (QEMU)
	@tools/install-deps.sh --for vm
	@cargo run --release --package tombolo-e2e --bin vm -- --demo

vm-debug: toolchain ## the kernel module under a kernel that checks itself: KASAN, lockdep (15 minutes or more to build it, once)
	@tools/install-deps.sh --for debug
	@tools/debug-kernel.sh "$${TOMBOLO_VM_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/tombolo/vm}/kernel-debug"
	@TOMBOLO_VM_KERNEL=debug cargo run --package tombolo-e2e --bin vm -- --module

xen-demo: toolchain ## move a file between two domUs of Xen under QEMU, then compare with TCP and libxenvchan (5 minutes once it is built) [DIR=path]
	@tools/install-deps.sh --for xen
	@cargo run --release --package tombolo-e2e --bin xen -- demo '$(REPORT)'

sockets-demo: toolchain ## iperf3 and Redis with and without Tombolo, on a quiet machine and beside burners, between two network namespaces [ROWS=all]
	@tools/install-deps.sh $(if $(ROWS),,--for sockets)
	@cargo build --release -p tombolo-cli -p tombolo-preload
	@tools/sockets.py $(ROWS)

vm-sockets-demo: toolchain ## iperf3, Redis and sockperf between two virtual machines with and without Tombolo; then one migrates (QEMU) [ROUNDS=3]
	@tools/install-deps.sh --for vm && tools/install-deps.sh --for sockets
	@cargo run --release --package tombolo-e2e --bin vm -- --sockets-demo $(ROUNDS)

net-demo: toolchain ## `tombolo net` beside veth (two network namespaces), and beside virtio-net (two machines under QEMU): iperf3, sockperf (root) [ROUNDS=5]
	@tools/install-deps.sh --for net && tools/install-deps.sh --for vm
	@cargo build --release -p tombolo-cli
	@tools/net.py $(ROUNDS)
	@cargo run --release --package tombolo-e2e --bin vm -- --net-demo $(or $(ROUNDS),5)

test: toolchain ## install what the tests need, run the tiers of the short form (an hour or more on 2 cores)
	@tools/install-deps.sh
	@cargo xtask test

test-all: toolchain ## the same in the long forms: millions of mutations, thousands of kills (hours)
	@tools/install-deps.sh --long
	@cargo xtask test --long

check: toolchain ## format, lints, rules, features, unit tests: no network, no root
	@cargo xtask test format lint rules features unit

model: toolchain ## the model checker on the shipping ring, and its canaries
	@cargo xtask test loom

conformance: toolchain ## one suite over every backend
	@cargo xtask test conformance

hostile: toolchain ## a peer that changes its pages at any time, also under AddressSanitizer
	@cargo xtask test hostile asan

crash: toolchain ## peers that die or stop at any moment
	@cargo xtask test crash

fuzz: toolchain ## five minutes of fuzzing (nightly, cargo-fuzz)
	@TOMBOLO_REQUIRE=fuzz cargo xtask test fuzz

bench: toolchain ## measure against the kernel's transports on this machine
	@cargo run --release -p tombolo-cli -- bench

install: toolchain ## install the command, the broker, the C library and its header [PREFIX=/usr/local DESTDIR= SUDO=]
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' SUDO='$(SUDO)' tools/install.sh

report: toolchain ## run the whole suite and draw it: one page (15 to 20 minutes) [DIR=path] [OPTIONS=--quick]
	@cargo run --release -p tombolo-cli -- bench --report '$(REPORT)' $(OPTIONS)

compare: toolchain ## the same beside other rings in user space, which it builds [DIR=path] [OPTIONS=--quick]
	@cargo run --release --manifest-path bench/compare/Cargo.toml -- --report '$(REPORT)' $(OPTIONS)

install-deps: ## install what the tests need, the nightly toolchain for AddressSanitizer too
	@tools/install-deps.sh --nightly

doc: toolchain ## build the documentation
	@cargo xtask test doc

ci: ## what every change must pass
	@.ci/run

clean: toolchain ## remove all that was built
	@cargo clean

toolchain:
	@tools/toolchain.sh
