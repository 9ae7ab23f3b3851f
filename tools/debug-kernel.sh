#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Builds the kernel that checks itself (kernel/debug.config) from Debian's source package and keeps it in the cache of the
# tests: debug-kernel.sh FOLDER. What is there already, from the same source and configuration, is left alone.
set -eu

folder=$1
config=$(cd "$(dirname "$0")/../kernel" && pwd)/debug.config
mkdir -p "$folder"
exec 9>"$folder/lock"
flock 9

package=$(apt-cache depends linux-source | sed -n 's/^ *Depends: \(linux-source-[0-9.]*\)$/\1/p' | head -n 1)
[ -n "$package" ] || {
    echo "tombolo: apt knows no package linux-source: its lists may be missing (apt-get update)" >&2
    exit 1
}
version=$(apt-cache show --no-all-versions "$package" | sed -n 's/^Version: //p')
made="$version $(sha256sum <"$config" | cut -c 1-16)"
if [ "$(cat "$folder/made" 2>/dev/null)" = "$made" ]; then
    exit 0
fi
echo "tombolo: building Linux $version with its own checks in $folder: 15 minutes of two CPUs or more, once" >&2
rm -rf "$folder/made" "$folder/source" "$folder/fetched" "$folder/root"
mkdir -p "$folder/fetched"
(cd "$folder/fetched" && apt-get -qq download -o APT::Sandbox::User=root "$package")
dpkg-deb -x "$folder"/fetched/*.deb "$folder/fetched"
tar -C "$folder" --transform "s,^$package,source," -xf "$folder/fetched/usr/src/$package.tar.xz"
rm -r "$folder/fetched"

cd "$folder/source"
make -s KCONFIG_ALLCONFIG="$config" allnoconfig >/dev/null 2>&1
# What the fragment asks for and Kconfig does not know, or has no place for, must not be missing in silence.
missing=$(grep '^CONFIG_.*=y$' "$config" | while read -r line; do grep -qxF "$line" .config || echo "$line"; done)
[ -z "$missing" ] || {
    echo "tombolo: the configuration lacks what kernel/debug.config asks for:" $missing >&2
    exit 1
}
nice -n 19 make -j"${JOBS:-$(nproc)}" bzImage modules >"$folder/log" 2>&1 || {
    tail -n 20 "$folder/log" >&2
    exit 1
}
release=$(make -s kernelrelease)
mkdir -p "$folder/root/boot" "$folder/root/usr/src" "$folder/root/lib/modules/$release/kernel"
cp arch/x86/boot/bzImage "$folder/root/boot/vmlinuz-$release"
cp modules.builtin "$folder/root/lib/modules/$release/" # Cases ask for a module unless the kernel has it built in.
ln -s "$folder/source" "$folder/root/usr/src/linux-headers-$release"
printf %s "$release" >"$folder/root/release"
echo "$made" >"$folder/made"
