#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Is there a Rust toolchain that can build this? If not, says what to install and exits with 1.
set -eu
cd "$(dirname "$0")/.."

need=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

stop() { # what is wrong
    cat >&2 <<END

tombolo: $1
This installs what is needed:

    sudo apt-get install -y curl gcc libc6-dev
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y

The Rust of \`apt-get install cargo\` is too old: Debian 13 has 1.85.

END
    exit 1
}

# True if version $1 is at least $2.
at_least() {
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

have=$(cargo --version 2>/dev/null | cut -d ' ' -f 2)
[ -n "$have" ] || stop "Rust $need or newer is needed, and there is no cargo."
at_least "$have" "$need" || stop "Rust $need or newer is needed, $(command -v cargo) is $have (rustup update stable)."
command -v cc >/dev/null || stop "Rust links with a C compiler, and there is no cc."
