#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Builds the command, the broker, the C libraries and what `tombolo run` preloads, and installs them with manual and units:
#
#   PREFIX   where they are to live: /usr/local
#   DESTDIR  a folder to put before it, for packages: empty
#   SUDO     what to put before the commands that write there, as in SUDO=sudo: empty
set -eu
cd "$(dirname "$0")/.."
prefix=${PREFIX:-/usr/local}
to=${DESTDIR-}$prefix
built=${CARGO_TARGET_DIR:-target}/release

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
# Before 1.0 every minor version may break the interface, so it is part of the name.
soname=libtombolo.so.${version%.*}
shared=libtombolo.so.$version
vchan_soname=libtombolo-vchan.so.${version%.*}
vchan=libtombolo-vchan.so.$version
# What a Rust library needs of the system: `rustc --print native-static-libs`.
private="-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc"

cargo build --release --quiet --package tombolo-cli --package tombolo-broker --package tombolo-capi --package tombolo-preload \
    --package tombolo-vchan

# rustc gives a cdylib a version script of its own, and the linker takes only one with versions. So the shared library is
# made of the archive: nothing but what the map names is visible, and what is not needed for it is left out. It is never
# unloaded: a handler of signals may be in it.
share() { # name, soname, symbols, archive
    # shellcheck disable=SC2086 # Words are meant to be split.
    cc -shared -o "$built/$1" -Wl,-soname,"$2" -Wl,--version-script="$3" \
        -Wl,--whole-archive "$built/$4" -Wl,--no-whole-archive -Wl,--gc-sections \
        -Wl,--no-undefined -Wl,-z,relro,-z,now,-z,nodelete $private
}
share "$shared" "$soname" crates/capi/symbols.map libtombolo_capi.a
share "$vchan" "$vchan_soname" crates/compat/vchan/symbols.map libtombolo_vchan.a

SUDO=${SUDO-}
put() { # mode, file, folder, name
    $SUDO install -D -m "$1" "$2" "$to/$3/$4"
}

put 755 "$built/tombolo" bin tombolo
put 755 "$built/tombolod" bin tombolod
put 755 "$built/$shared" lib "$shared"
$SUDO ln -sf "$shared" "$to/lib/$soname"
$SUDO ln -sf "$soname" "$to/lib/libtombolo.so"
put 644 "$built/libtombolo_capi.a" lib libtombolo.a
put 755 "$built/$vchan" lib "$vchan"
$SUDO ln -sf "$vchan" "$to/lib/$vchan_soname"
$SUDO ln -sf "$vchan_soname" "$to/lib/libtombolo-vchan.so"
put 644 "$built/libtombolo_vchan.a" lib libtombolo-vchan.a
# In a folder of their own, so that they do not take the place of Xen's.
for header in libxenvchan.h libvchan.h; do
    put 644 "include/vchan/$header" include/tombolo/vchan "$header"
done
# Where `tombolo run` looks for it.
put 755 "$built/libtombolo_preload.so" lib/tombolo libtombolo_preload.so
$SUDO strip --strip-debug "$to/bin/tombolo" "$to/bin/tombolod" "$to/lib/libtombolo.a" "$to/lib/$shared" "$to/lib/libtombolo-vchan.a" \
    "$to/lib/$vchan" "$to/lib/tombolo/libtombolo_preload.so"
put 644 include/tombolo.h include tombolo.h
for pc in capi/tombolo compat/vchan/tombolo-vchan; do
    sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" -e "s|@PRIVATE@|$private|" \
        "crates/$pc.pc.in" >"$built/${pc##*/}.pc"
    put 644 "$built/${pc##*/}.pc" lib/pkgconfig "${pc##*/}.pc"
done
for unit in packaging/systemd/*.service; do
    sed "s|/usr/bin/|$prefix/bin/|" "$unit" >"$built/${unit##*/}"
    put 644 "$built/${unit##*/}" lib/systemd/system "${unit##*/}"
done
# A sample: what is in /etc is the administrator's.
put 644 packaging/tombolod.toml share/tombolo tombolod.toml
$SUDO "$built/tombolo" __generate "$to/share"
echo "tombolo $version is in $to"
