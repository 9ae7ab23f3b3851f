// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A BPF program that tells the owner of a TCP socket the two initial sequence numbers of its connection (S-6).
//!
//! Both kernels of a connection have these numbers, and nobody else who was not on its path. Root attaches the program
//! once, at the root of cgroup version 2. From then on any program asks by `getsockopt`, without a capability, also for
//! connections from before. The attachment needs no process and no file: it belongs to the cgroup until it is detached
//! or the machine restarts.
//!
//! The reason for `unsafe`: `bpf` takes addresses of what it reads and writes.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
};

/// Level of the option, which no protocol of the kernel uses: "TM".
pub const LEVEL: i32 = 0x544d;
/// Number of the option: eight bytes, two words of 32 bits in the machine's order.
pub const SEQUENCES: i32 = 1;
/// Name under which the kernel lists the program. A program that answers otherwise gets another name.
const NAME: &[u8] = b"tombolo_isn1";

/// Returns the sequence numbers of both endpoints from the option's value: this endpoint's, then the peer's (S-6).
///
/// The kernel counts the SYN of an endpoint that `dialled` among the bytes that were acknowledged, and the peer's never
/// among those that were received.
#[must_use]
pub fn sequences(said: [u8; 8], dialled: bool) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = said;
    let (own, peer) = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
    [own.wrapping_sub(u32::from(!dialled)), peer.wrapping_sub(1)]
}

// ---- the program

const fn instruction(code: u8, registers: u8, offset: i16, value: i32) -> u64 {
    code as u64 | (registers as u64) << 8 | (offset as u16 as u64) << 16 | (value as u32 as u64) << 32
}

/// The program, one instruction a line: code, source and destination register, offset, value (`linux/bpf.h`).
///
/// The context (r6) is a `struct bpf_sockopt`: sk 0, optval 8, optval_end 16, level 24, optname 28, optlen 32, retval
/// 36. Of `struct bpf_tcp_sock` (r0): rcv_nxt 16, snd_una 24, bytes_received 80, bytes_acked 88. The kernel holds the
/// socket's lock.
const PROGRAM: [u64; 33] = [
    instruction(0xbf, 0x16, 0, 0),          //  0 r6 = r1
    instruction(0x61, 0x62, 24, 0),         //  1 r2 = level
    instruction(0x55, 0x02, 24, LEVEL),     //  2 if r2 != LEVEL goto 27
    instruction(0x61, 0x62, 28, 0),         //  3 r2 = optname
    instruction(0x55, 0x02, 22, SEQUENCES), // 4 if r2 != SEQUENCES goto 27
    instruction(0x79, 0x61, 0, 0),          //  5 r1 = sk
    instruction(0x15, 0x01, 24, 0),         //  6 if r1 == 0 goto 31
    instruction(0x85, 0, 0, 96),            //  7 r0 = bpf_tcp_sock(r1)
    instruction(0x15, 0x00, 22, 0),         //  8 if r0 == 0 goto 31: it is not TCP
    instruction(0x79, 0x61, 8, 0),          //  9 r1 = optval
    instruction(0x79, 0x62, 16, 0),         // 10 r2 = optval_end
    instruction(0xbf, 0x13, 0, 0),          // 11 r3 = r1
    instruction(0x07, 0x03, 0, 8),          // 12 r3 += 8
    instruction(0x2d, 0x23, 17, 0),         // 13 if r3 > r2 goto 31: there is no room
    instruction(0x61, 0x04, 24, 0),         // 14 r4 = snd_una
    instruction(0x79, 0x05, 88, 0),         // 15 r5 = bytes_acked
    instruction(0x1c, 0x54, 0, 0),          // 16 r4 -= r5, of 32 bits
    instruction(0x63, 0x41, 0, 0),          // 17 optval[0..4] = r4
    instruction(0x61, 0x04, 16, 0),         // 18 r4 = rcv_nxt
    instruction(0x79, 0x05, 80, 0),         // 19 r5 = bytes_received
    instruction(0x1c, 0x54, 0, 0),          // 20 r4 -= r5, of 32 bits
    instruction(0x63, 0x41, 4, 0),          // 21 optval[4..8] = r4
    instruction(0xb7, 0x04, 0, 0),          // 22 r4 = 0
    instruction(0x63, 0x46, 36, 0),         // 23 retval = r4: the kernel itself knows no such option
    instruction(0xb7, 0x04, 0, 8),          // 24 r4 = 8
    instruction(0x63, 0x46, 32, 0),         // 25 optlen = r4
    instruction(0x05, 0, 4, 0),             // 26 goto 31
    instruction(0x61, 0x62, 32, 0),         // 27 r2 = optlen, of an option that is not ours
    instruction(0xb5, 0x02, 2, 4096),       // 28 if r2 <= 4096 goto 31
    instruction(0xb7, 0x02, 0, 0),          // 29 r2 = 0: what is longer than a page the kernel passes on
    instruction(0x63, 0x26, 32, 0),         // 30 optlen = r2  only if a program says so (until 6.5)
    instruction(0xb7, 0x00, 0, 1),          // 31 r0 = 1: the call goes on
    instruction(0x95, 0, 0, 0),             // 32 return r0
];

// ---- the kernel's calls

/// `enum bpf_cmd`.
const PROG_LOAD: i32 = 5;
const PROG_ATTACH: i32 = 8;
const PROG_DETACH: i32 = 9;
const PROG_GET_FD_BY_ID: i32 = 13;
const OBJ_GET_INFO_BY_FD: i32 = 15;
const PROG_QUERY: i32 = 16;
/// `BPF_PROG_TYPE_CGROUP_SOCKOPT`, `BPF_CGROUP_GETSOCKOPT`, `BPF_F_ALLOW_MULTI`: programs of others stay in force.
const SOCKOPT: u32 = 25;
const GETSOCKOPT: u32 = 21;
const ALLOW_MULTI: u32 = 2;
/// Largest number of programs of one cgroup that are looked at.
const MOST: usize = 64;

/// Attributes of a call, as words of 32 bits.
#[repr(align(8))]
struct Attributes([u32; 18]);

impl Attributes {
    const fn of(words: [u32; 4]) -> Self {
        let mut all = [0; 18];
        let mut at = 0;
        while at < 4 {
            all[at] = words[at];
            at += 1;
        }
        Self(all)
    }

    fn put_address<T>(&mut self, at: usize, of: *const T) {
        let address = of as u64;
        (self.0[at], self.0[at + 1]) = (address as u32, (address >> 32) as u32);
    }
}

/// Calls `bpf(2)`. What `attributes` point to must exist, with the lengths that they give.
fn bpf(command: i32, attributes: &mut Attributes) -> io::Result<i32> {
    let size = size_of::<Attributes>();
    // SAFETY: (valid) the attributes are there for their size; each caller below says what they point to.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, (&raw mut *attributes).cast::<u8>(), size) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done as i32) }
}

/// Takes ownership of a descriptor that a call of [`bpf`] made.
fn own(fd: i32) -> OwnedFd {
    // SAFETY: (open) the kernel has just made it, for this caller alone.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn load() -> io::Result<OwnedFd> {
    let license = c"Dual MIT/GPL";
    let mut attributes = Attributes::of([SOCKOPT, PROGRAM.len() as u32, 0, 0]);
    // (valid) both outlive the call, which reads so many instructions, and the licence to its zero.
    attributes.put_address(2, PROGRAM.as_ptr());
    attributes.put_address(4, license.as_ptr());
    for (at, byte) in NAME.iter().enumerate() {
        attributes.0[12 + at / 4] |= u32::from(*byte) << (at % 4 * 8);
    }
    attributes.0[17] = GETSOCKOPT;
    bpf(PROG_LOAD, &mut attributes).map(own)
}

/// Returns the copies of this program that are attached at a cgroup.
fn attached(cgroup: RawFd) -> io::Result<Vec<OwnedFd>> {
    let mut ids = [0_u32; MOST];
    let mut attributes = Attributes::of([cgroup as u32, GETSOCKOPT, 0, 0]);
    // (valid) the kernel writes at most as many numbers as it is told there is room for.
    attributes.put_address(4, ids.as_mut_ptr());
    attributes.0[6] = MOST as u32;
    bpf(PROG_QUERY, &mut attributes)?;
    let count = (attributes.0[6] as usize).min(MOST);
    let mut ours = Vec::new();
    for id in &ids[..count] {
        // A program that has gone meanwhile is skipped.
        let Ok(program) = bpf(PROG_GET_FD_BY_ID, &mut Attributes::of([*id, 0, 0, 0])).map(own) else { continue };
        let mut info = [0_u64; 10];
        let mut asks = Attributes::of([program.as_raw_fd() as u32, size_of_val(&info) as u32, 0, 0]);
        // (valid) the kernel writes at most as many bytes as it is told there are: `struct bpf_prog_info`, to the
        // name's end.
        asks.put_address(2, info.as_mut_ptr());
        bpf(OBJ_GET_INFO_BY_FD, &mut asks)?;
        let name: Vec<u8> =
            info[8..].iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
        if name == NAME {
            ours.push(program);
        }
    }
    Ok(ours)
}

/// Returns where cgroup version 2 is mounted, alone or beside version 1: its root as far as this process sees it.
#[must_use]
pub fn find_root() -> Option<PathBuf> {
    const MAGIC: rustix::fs::FsWord = 0x6367_7270;
    let is_second = |path: &PathBuf| rustix::fs::statfs(path).is_ok_and(|found| found.f_type == MAGIC);
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(PathBuf::from).into_iter().find(is_second)
}

/// Returns whether the program is attached at `cgroup` itself.
///
/// # Errors
/// Returns the kernel's error; the kernel asks for `CAP_NET_ADMIN` and `CAP_BPF`.
pub fn is_attached(cgroup: &Path) -> io::Result<bool> {
    Ok(!attached(File::open(cgroup)?.as_raw_fd())?.is_empty())
}

/// Attaches the program at `cgroup`, for all processes in it. Returns whether it was not attached before.
///
/// # Errors
/// Returns the kernel's error; the kernel asks for `CAP_NET_ADMIN` and `CAP_BPF`.
pub fn attach(cgroup: &Path) -> io::Result<bool> {
    let cgroup = File::open(cgroup)?;
    if !attached(cgroup.as_raw_fd())?.is_empty() {
        return Ok(false);
    }
    let program = load()?;
    let words = [cgroup.as_raw_fd() as u32, program.as_raw_fd() as u32, GETSOCKOPT, ALLOW_MULTI];
    bpf(PROG_ATTACH, &mut Attributes::of(words))?;
    Ok(true)
}

/// Detaches the program from `cgroup`. Returns whether it was attached.
///
/// # Errors
/// Returns the kernel's error; the kernel asks for `CAP_NET_ADMIN` and `CAP_BPF`.
pub fn detach(cgroup: &Path) -> io::Result<bool> {
    let cgroup = File::open(cgroup)?;
    let ours = attached(cgroup.as_raw_fd())?;
    for program in &ours {
        bpf(PROG_DETACH, &mut Attributes::of([cgroup.as_raw_fd() as u32, program.as_raw_fd() as u32, GETSOCKOPT, 0]))?;
    }
    Ok(!ours.is_empty())
}
