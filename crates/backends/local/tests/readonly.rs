// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A process that holds a segment's descriptor, or maps it, cannot write it, shrink it or punch holes into it, in any
//! way (D-2, D-3, L-6).
//!
//! # Safety
//! The tests map memory and change its protection by hand, because that is what they are about.
#![allow(unsafe_code)]

mod support;

use std::{
    fs::File,
    io::{Seek, SeekFrom, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr,
};

use rustix::{
    fs::{FallocateFlags, SealFlags},
    io::Errno,
    mm::{MapFlags, MprotectFlags, ProtFlags},
};
use support::{Folder, accept, patience, raw::Raw};
use tombolo_domain::{Endpoint, Offer, Rendezvous};
use tombolo_mem::{OwnData, OwnSegment, PeerData, PeerSegment};
use tombolo_testing::conformance;

const LEN: usize = 8192;

/// Returns a segment whose very descriptor a hostile receiver holds.
fn held(folder: &Folder) -> (Raw, OwnSegment, Offer, OwnedFd) {
    let mut raw = Raw::introduced(folder);
    let (own, offer) = raw.link.allocate(LEN).unwrap();
    raw.link.send(b"take", Some(&offer)).unwrap();
    let fd = raw.receive_datagram().1.pop().expect("the segment comes last");
    (raw, own, offer, fd)
}

/// Returns two endpoints and a segment mapped by the proper calls.
fn mapped(folder: &Folder) -> ([Box<dyn Endpoint>; 2], OwnSegment, PeerSegment) {
    let mut listener = folder.domain.listen("a").unwrap();
    let mut a = folder.domain.connect("a", patience()).unwrap();
    let mut b = accept(&mut *listener);
    let (own, offer) = a.allocate(LEN).unwrap();
    a.send(b"take", Some(&offer)).unwrap();
    let peer = conformance::receive(&mut *b, patience()).unwrap().segment.unwrap();
    ([a, b], own, peer)
}

fn map(fd: BorrowedFd<'_>, prot: ProtFlags, flags: MapFlags) -> rustix::io::Result<*mut u8> {
    // SAFETY: (address) null without MAP_FIXED replaces nothing; the mapping is left to the end of the process.
    unsafe { rustix::mm::mmap(ptr::null_mut(), LEN, prot, flags, fd, 0) }.map(|base| base.cast())
}

fn protect(base: *mut u8) -> rustix::io::Result<()> {
    // SAFETY: (range) a live mapping of LEN bytes; (aliasing) no reference to its bytes exists.
    unsafe { rustix::mm::mprotect(base.cast(), LEN, MprotectFlags::READ | MprotectFlags::WRITE) }
}

#[test]
fn d2_peers_mapping_cannot_be_made_writable() {
    let folder = Folder::new();
    let (_links, _own, peer) = mapped(&folder);
    let (base, len) = peer.address();
    assert_eq!(len, LEN);
    assert_eq!(protect(base.cast_mut()), Err(Errno::ACCESS));
}

#[test]
fn d2_peers_mapping_cannot_be_written_through_proc_self_mem() {
    let folder = Folder::new();
    let (_links, _own, peer) = mapped(&folder);
    let mut memory = File::options().write(true).open("/proc/self/mem").unwrap();
    memory.seek(SeekFrom::Start(peer.address().0 as u64)).unwrap();
    assert!(memory.write(&[1]).is_err());
    let mut byte = [9];
    peer.data(0).copy_out(0, &mut byte);
    assert_eq!(byte, [0]);
}

#[test]
fn d2_l6_descriptor_gives_no_writable_mapping() {
    let folder = Folder::new();
    let (_raw, _own, _offer, fd) = held(&folder);
    let both = ProtFlags::READ | ProtFlags::WRITE;
    assert_eq!(map(fd.as_fd(), both, MapFlags::SHARED), Err(Errno::PERM));
    assert_eq!(map(fd.as_fd(), ProtFlags::WRITE, MapFlags::SHARED), Err(Errno::PERM));
    let second = map(fd.as_fd(), ProtFlags::READ, MapFlags::SHARED).unwrap();
    assert_eq!(protect(second), Err(Errno::ACCESS));
}

#[test]
fn d2_l6_descriptor_opened_anew_for_writing_gives_no_more() {
    let folder = Folder::new();
    let (_raw, _own, _offer, fd) = held(&folder);
    let second = map(fd.as_fd(), ProtFlags::READ, MapFlags::SHARED).unwrap() as usize;
    let roads =
        [format!("/proc/self/fd/{}", fd.as_raw_fd()), format!("/proc/self/map_files/{second:x}-{:x}", second + LEN)];
    for road in roads {
        let Ok(file) = File::options().read(true).write(true).open(&road) else {
            // The file cannot even be opened, which is as good.
            continue;
        };
        assert_eq!(map(file.as_fd(), ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED), Err(Errno::PERM), "{road}");
        assert_eq!(rustix::io::pwrite(&file, &[1], 0), Err(Errno::PERM), "{road}");
        assert_eq!(rustix::fs::ftruncate(&file, 4096), Err(Errno::PERM), "{road}");
    }
}

#[test]
fn d3_l6_descriptor_cannot_shrink_grow_punch_write_or_unseal() {
    let folder = Folder::new();
    let (_raw, _own, _offer, fd) = held(&folder);
    assert_eq!(rustix::io::pwrite(&fd, &[1], 0), Err(Errno::PERM));
    for len in [0, 4096, LEN as u64 * 2] {
        assert_eq!(rustix::fs::ftruncate(&fd, len), Err(Errno::PERM), "to {len}");
    }
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(rustix::fs::fallocate(&fd, punch, 0, 4096), Err(Errno::PERM));
    assert_eq!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM));
}

#[test]
fn d3_l6_not_even_the_owner_can_punch_a_hole_under_its_reader() {
    let folder = Folder::new();
    let (_links, own, peer) = mapped(&folder);
    let base = own_address(LEN, &peer);
    // SAFETY: (range) the owner's live mapping; were it allowed, its bytes would read as zeros, which they are.
    let removed = unsafe { rustix::mm::madvise(base.cast(), LEN, rustix::mm::Advice::LinuxRemove) };
    assert_eq!(removed, Err(Errno::PERM));
    drop(own);
}

/// Returns the one writable mapping of a memfd of this name and length, which is not `peer`.
fn own_address(len: usize, peer: &PeerSegment) -> *mut u8 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let inode = |line: &str| line.split_whitespace().nth(4).map(str::to_owned);
    let of_peer = maps.lines().find(|line| line.starts_with(&format!("{:x}-", peer.address().0 as usize))).unwrap();
    let own: Vec<_> = maps.lines().filter(|line| inode(line) == inode(of_peer) && line.contains(" rw-s ")).collect();
    assert_eq!(own.len(), 1, "one writable mapping, ever");
    let (from, to) = own[0].split(' ').next().unwrap().split_once('-').unwrap();
    let (from, to) = (usize::from_str_radix(from, 16).unwrap(), usize::from_str_radix(to, 16).unwrap());
    assert_eq!(to - from, len);
    ptr::with_exposed_provenance_mut(from)
}

#[test]
fn d2_private_copy_of_a_mapping_changes_nothing_for_its_owner() {
    let folder = Folder::new();
    let (_raw, own, _offer, fd) = held(&folder);
    let copy = map(fd.as_fd(), ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).unwrap();
    // SAFETY: (valid) a live, writable, private mapping of LEN bytes that nobody else knows.
    unsafe { copy.write(1) };
    let mut byte = [9];
    own.split(0).1.copy_back(0, &mut byte);
    assert_eq!(byte, [0]);
}
