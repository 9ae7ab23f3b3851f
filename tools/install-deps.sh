#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Installs what the tests need and is missing: Debian packages if we are root or sudo asks nothing, components of
# the Rust toolchain if there is a rustup. What cannot be installed is named, with what will be skipped for want of
# it; the tests say so again. With --nightly also the toolchain that has AddressSanitizer; with --long what the long
# forms build from Debian's sources with, Miri and cargo-mutants. With --for only what that needs: demo, vm, xen, sockets,
# net (the demonstrations) or debug (`make vm-debug`).
set -eu

group=all
if [ "${1-}" = --for ]; then
    group=${2-}
    case "$group" in
    demo | vm | xen | sockets | net | debug) shift 2 ;;
    *)
        echo "tombolo: --for demo, vm, xen, sockets, net or debug, not '$group'" >&2
        exit 2
        ;;
    esac
fi

missing=
# Whether this is wanted for one of the groups: by all who want everything.
for_group() {
    case " all $1 " in *" $group "*) ;; *) return 1 ;; esac
}
want() { # command, package, what is skipped without it, groups
    for_group "${4-}" || return 0
    command -v "$1" >/dev/null && return
    missing="$missing $2"
    echo "tombolo: no $1 (package $2): $3" >&2
}

want cc "gcc libc6-dev" "nothing can be built" "demo vm xen sockets net debug"
want c++ g++ "the C header is not tried from C++"
want pkg-config pkg-config "C programs are not built against the installed library"
want valgrind "valgrind libc6-dbg" "C programs are not run under valgrind"
want ip iproute2 "measurements over a pair of virtual Ethernet devices are skipped" "demo vm sockets net"
want qemu-system-x86_64 qemu-system-x86 "tests in virtual machines are skipped" "vm xen debug"
want make make "tests in virtual machines are skipped" "vm debug"
want xz xz-utils "tests between Xen's domains are skipped" "vm xen debug"
want strip binutils "tests between Xen's domains are skipped" "vm xen debug"
if for_group "vm debug" && ! ls /usr/lib/*/libelf.so.1 >/dev/null 2>&1; then # What builds kernel modules is linked with it.
    missing="$missing libelf1"
fi
want sparse sparse "the kernel module is not checked by sparse"
want xmllint libxml2-utils "what is generated for libvirt is not checked by its schema"
if for_group "" && ! [ -e /usr/share/libvirt/schemas/domain.rng ]; then # With libvirt's library; its daemon is not wanted.
    missing="$missing libvirt0"
fi
want python3 "python3 python3-requests" "most tests of sockets are skipped" "sockets net"
if for_group "" && ! /usr/bin/python3 -c 'import test.test_ftplib' 2>/dev/null; then # CPython's own tests, with Debian's Python.
    missing="$missing libpython3.11-testsuite"
fi
if for_group "" && ! [ -d /usr/lib/python3/dist-packages/grpc ]; then
    missing="$missing python3-grpcio"
fi
want socat socat "tests of sockets between namespaces are skipped"
want iptables iptables "sockets behind translated addresses are not tested"
want iperf3 iperf3 "tests of sockets between namespaces are skipped" "sockets net"
programs="tests of sockets with real programs are skipped in part"
want iperf iperf "$programs"
want redis-server "redis-server redis-tools" "$programs" "sockets"
want nginx nginx-light "$programs"
want wrk wrk "$programs"
want memcached memcached "$programs"
want mosquitto "mosquitto mosquitto-clients" "$programs"
want sockperf sockperf "$programs" "sockets net"
want node nodejs "$programs"
want curl curl "$programs"
want openssl openssl "$programs"
want pgbench "postgresql postgresql-client" "$programs"
want pg_config "libpq-dev postgresql-server-dev-15" "$programs"
if for_group "" && command -v pg_config >/dev/null && ! [ -f "$(pg_config --includedir-server)/postgres.h" ]; then
    missing="$missing postgresql-server-dev-15" # For PostgreSQL's own tests, as its sources.
fi
want dpkg-source dpkg-dev "the tests that Redis and PostgreSQL have of themselves are skipped"
want tclsh tcl "Redis' own tests are skipped"
want mpicc "openmpi-bin libopenmpi-dev" "$programs"
want javac default-jdk-headless "$programs"
want scp openssh-client "$programs"
want haproxy haproxy "$programs"
want php-fpm8.2 php-fpm "$programs"
want apache2 apache2-bin "$programs"
want gunicorn gunicorn "$programs"
want mariadbd "mariadb-server-core mariadb-client-core" "$programs"
want sysbench sysbench "$programs"
if for_group "" && ! [ -x /usr/sbin/sshd ]; then
    missing="$missing openssh-server"
fi

if [ "$group" = debug ]; then # What Linux itself is built with.
    kernel="there is no kernel with its own checks"
    want flex flex "$kernel" debug
    want bison bison "$kernel" debug
    want bc bc "$kernel" debug
    [ -f /usr/include/libelf.h ] || missing="$missing libelf-dev"
fi

if [ "${1-}" = --long ]; then
    others="the tests of libuv and libevent are skipped"
    want cmake cmake "$others"
    [ -f /usr/include/openssl/ssl.h ] || missing="$missing libssl-dev"
fi

if [ -n "$missing" ]; then
    root=
    [ "$(id -u)" = 0 ] || root="sudo -n"
    # shellcheck disable=SC2086 # Words are meant to be split.
    if command -v apt-get >/dev/null && $root true 2>/dev/null; then
        echo "tombolo: installing$missing" >&2
        # Another apt at work is waited for, ten minutes at most, and says so itself.
        $root apt-get update -q -o DPkg::Lock::Timeout=600 || true
        install="$root apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=600"
        # One that cannot be had keeps the others from nothing.
        # shellcheck disable=SC2086
        $install $missing || for package in $missing; do
            $install "$package" || echo "tombolo: apt-get failed; going on without $package" >&2
        done
    else
        echo "tombolo: not root, and sudo would ask; going on. To install: sudo apt-get install$missing" >&2
    fi
fi

if [ "$group" = all ] && command -v rustup >/dev/null; then
    for tool in fmt clippy; do
        cargo $tool --version >/dev/null 2>&1 && continue
        [ $tool = fmt ] && component=rustfmt || component=clippy
        rustup component add $component || echo "tombolo: no $component: its tier is skipped" >&2
    done
    if [ "${1-}" = --nightly ]; then
        rustup toolchain install nightly --profile minimal
    fi
    if [ "${1-}" = --long ]; then
        cargo +nightly miri --version >/dev/null 2>&1 || rustup +nightly component add miri rust-src ||
            echo "tombolo: no Miri: its tier is skipped" >&2
    fi
fi
if [ "${1-}" = --long ] && ! cargo mutants --version >/dev/null 2>&1; then
    cargo install --locked cargo-mutants || echo "tombolo: no cargo-mutants: its tier is skipped" >&2
fi
