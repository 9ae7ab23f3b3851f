#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Builds the test programs of libuv and libevent from Debian's sources: `foreign-tests.sh FOLDER`. They end up in
# FOLDER/uv_run_tests and FOLDER/regress. The machine's own list of sources is left as it is.
set -eu

mkdir -p "$1/lists/partial"
cd "$1"
for program in apt-get dpkg-source cmake cc make; do
    command -v $program >/dev/null || { echo "tombolo: no $program" >&2; exit 1; }
done
key=/usr/share/keyrings/debian-archive-keyring.gpg
apt-get indextargets --format "deb-src [signed-by=$key] \$(REPO_URI) \$(RELEASE) \$(COMPONENT)" \
    'Identifier: Packages' 'Origin: Debian' | sort -u >sources.list
from="-o Dir::Etc::sourcelist=$PWD/sources.list -o Dir::Etc::sourceparts=/nonexistent -o Dir::State::lists=$PWD/lists"
# shellcheck disable=SC2086 # Words are meant to be split.
{
    apt-get $from update -q
    apt-get $from source -q --download-only libuv1 libevent
}
rm -rf uv event
dpkg-source -x libuv1_*.dsc uv
dpkg-source -x libevent_*.dsc event
cmake -S uv -B uv/build -DLIBUV_BUILD_TESTS=ON
cmake --build uv/build --target uv_run_tests -j"$(nproc)"
cmake -S event -B event/build -DEVENT__DISABLE_BENCHMARK=ON -DEVENT__DISABLE_SAMPLES=ON -DEVENT__LIBRARY_TYPE=STATIC
cmake --build event/build --target regress -j"$(nproc)"
ln -sf uv/build/uv_run_tests event/build/bin/regress .
