#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Is there a Rust toolchain that can build this? If not, says what to install and exits with 1.
set -eu
cd "$(dirname "$0")/.."

need=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
rustup="curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y"

stop() {
    printf '\ntombolo: %s\n\n' "$1" >&2
    shift
    printf '    %s\n' "$@" >&2
    exit 1
}

# True if version $1 is at least $2.
at_least() {
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

if ! have=$(cargo --version 2>/dev/null); then
    stop "Rust $need or newer is needed and there is no cargo. Install it with" \
        "$rustup" "" \
        "(\`apt-get install cargo\` may be too old: Debian 13 has Rust 1.85.)"
fi
have=$(echo "$have" | cut -d ' ' -f 2)
if ! at_least "$have" "$need"; then
    stop "Rust $need or newer is needed, this is $have ($(command -v cargo)). Update it with" \
        "rustup update stable" "" "or, if it came from a distribution, install rustup:" "$rustup"
fi
if ! command -v cc >/dev/null; then
    stop "Rust needs a C compiler to link with. Install it with" "sudo apt-get install gcc libc6-dev"
fi
