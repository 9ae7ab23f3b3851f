#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Fetches the source of a package from the archive that this machine takes its packages from, and unpacks it with Debian's
# changes, in FOLDER/PACKAGE: debian-source.sh PACKAGE FOLDER. Nothing of the machine's changes, and no privilege is needed.
set -eu

package=$1
folder=$2/apt
mkdir -p "$folder/sources" "$folder/lists/partial"
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
    [ -f "$file" ] && sed 's/^deb /deb-src /; s/^Types:.*/Types: deb-src/' "$file" >"$folder/sources/${file##*/}"
done
apt() { # get or cache, and more. As root apt would become a user who cannot write here.
    tool=$1
    shift
    # An archive that says nothing any more keeps nobody for ever.
    timeout 300 "apt-$tool" -qq -o Acquire::Retries=2 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$folder/sources" \
        -o Dir::State::lists="$folder/lists" -o Dir::Cache="$folder" -o APT::Sandbox::User=root "$@"
}
cd "$folder"
apt get update
# An archive may name a version that it does not have (any more): then the one before it.
for version in $(apt cache showsrc "$package" | sed -n 's/^Version: //p' | sort -Vru); do
    # Of a try that failed nothing is left beside the next one's.
    rm -rf "$folder/try"
    mkdir "$folder/try"
    cd "$folder/try"
    apt get source "$package=$version" && break
done
mv "$(dirname "$folder"/try/*/debian)" "$2/$package"
rm -r "$folder"
