#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# virsh for machines that have Tombolo's devices: `tombolo-virsh.sh migrate web qemu+ssh://other/system --live`.
#
# Before migrate, save, managedsave and snapshots the machine's links are left and its devices taken away, as QEMU refuses
# otherwise. libvirt has no hook for that on the side where the machine leaves. A machine that stays gets its devices again: after a
# snapshot, and when virsh failed. All other words go to virsh as they are.
set -u

leaves=no
case ${1-} in
migrate | save | managedsave) leaves=yes ;;
snapshot-create | snapshot-create-as) leaves=back ;;
*) exec virsh "$@" ;;
esac

# The domain: what follows --domain, or the first word behind the verb that is no option.
domain=
after=
for word in "$@"; do
    case $after$word in
    --domain=*) domain=${word#--domain=} ;;
    --domain) after=--domain: ; continue ;;
    --domain:*) domain=$word ;;
    -*) ;;
    *) [ -n "$domain" ] || [ "$word" = "$1" ] || domain=$word ;;
    esac
    after=
done
if [ -z "$domain" ]; then
    echo "tombolo-virsh: which domain?" >&2
    exit 2
fi

tombolo vm prepare-migration "$domain"
ready=$?
# 7: it is ready already. 2 and 3: there is no such machine here, or nothing of it that could be in the way.
case $ready in
0 | 7) ;;
2 | 3) exec virsh "$@" ;;
*) exit "$ready" ;;
esac
virsh "$@"
done=$?
if [ "$done" -ne 0 ] || [ "$leaves" = back ]; then
    tombolo vm cancel-migration "$domain" || echo "tombolo-virsh: $domain stays without links" >&2
fi
exit "$done"
