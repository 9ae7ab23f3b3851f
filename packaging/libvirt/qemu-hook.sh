#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# libvirt's hook on the side where a machine arrives: /etc/libvirt/hooks/qemu, or called from there with the same words and input.
#
# The machine left without a doorbell, so what arrives must be described without one: tombolod plugs it. The description comes by
# standard input, and the one that counts goes to standard output. Nothing is said of any other operation.
set -u

case ${2-}/${3-} in
migrate/begin | restore/begin) sed "/<shmem name=['\"]tombolo['\"]>/,/<\/shmem>/d" ;;
esac
