// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements the one copy routine between private and shared memory.
//!
//! # Safety
//! Another domain may write the source while it is read. In Rust's memory model a plain read that races a write is
//! undefined. So on x86-64 the loads are written in assembly, of which the compiler knows only that it produces bytes.
//! A torn value is possible and harmless; an assumption by the compiler is not. Elsewhere the loads are volatile.
//!
//! Sizes, measured on Zen 5: up to 128 bytes a handful of overlapping vector moves; to 4 KiB a vector loop; above it
//! `rep movsb`, which beats every vector loop once the other core's cache is involved. Non-temporal stores are used
//! only where the writer has measured that they are faster, because the reader wants the lines in a cache. An emulated
//! CPU copies words, which QEMU keeps in a register of its host. QEMU moves vectors through memory, at less than half
//! the rate, and `rep movsb` byte by byte, whatever the CPU claims.
#![allow(unsafe_code)]

use std::ptr::NonNull;

/// Copies `len` bytes.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, the two do not overlap, and nobody else writes `to`. Others
/// may write `from`.
#[inline(always)]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promises are passed on unchanged.
    unsafe { imp::copy(from, to, len) }
}

/// Method of copying that the caller chooses, to measure what suits a machine. Where the CPU does not have it, and for
/// pieces that are too short for it, the usual method is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMethod {
    /// A loop of vector loads and stores.
    Vectors,
    /// `rep movsb`.
    RepMovsb,
    /// Vector loads, and stores that bypass the caches, followed by a store fence.
    NonTemporal,
}

/// Copies `len` bytes by the given method.
///
/// # Safety
/// As [`copy`].
pub(crate) unsafe fn copy_by(method: CopyMethod, from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promises are passed on unchanged.
    unsafe { imp::copy_by(method, from, to, len) }
}

/// Returns whether [`CopyMethod::NonTemporal`] is a separate method here, and not on an emulated CPU.
pub(crate) fn can_bypass_caches() -> bool {
    imp::can_bypass_caches()
}

/// Prefetches the lines of `len` bytes from `at` on.
#[inline]
pub(crate) fn prefetch(at: NonNull<u8>, len: usize) {
    let mut line = 0;
    while line < len {
        imp::prefetch(at.as_ptr().wrapping_add(line));
        line += 64;
    }
}

/// Requests ownership of the line of `at`, which will soon be written.
#[inline(always)]
pub(crate) fn prefetch_to_write(at: NonNull<u8>) {
    imp::prefetch_to_write(at.as_ptr());
}

#[cfg(all(target_arch = "x86_64", not(miri), not(tombolo_plain_copy)))]
mod imp {
    use std::arch::{asm, is_x86_feature_detected, x86_64::__cpuid};
    use std::sync::atomic::{AtomicU8, Ordering};

    /// Length from which `rep movsb` is used, if the CPU claims to be good at it. Other CPUs move it byte by byte.
    const REP_FROM: usize = 4096;

    /// Flags for copying more than 128 bytes on this CPU: 0 before the first detection, then `LOOKED` and what the CPU
    /// is good at. An atomic and no lock, because a signal handler may copy as well, and so may a child forked in the
    /// middle of the detection.
    static GOOD_AT: AtomicU8 = AtomicU8::new(0);
    const LOOKED: u8 = 1;
    const REP: u8 = 2;
    const AVX: u8 = 4;
    const WORDS: u8 = 8;

    #[inline(always)]
    fn good_at() -> u8 {
        match GOOD_AT.load(Ordering::Relaxed) {
            0 => detect_routine(),
            known => known,
        }
    }

    #[cold]
    fn detect_routine() -> u8 {
        let (rep, avx) = (is_x86_feature_detected!("ermsb"), is_x86_feature_detected!("avx"));
        // A CPU without both belongs to an emulated Xen, or dates from before 2012.
        let good_at = if emulated_by_qemu() || !(rep || avx) {
            LOOKED | WORDS
        } else {
            LOOKED | if rep { REP } else { 0 } | if avx { AVX } else { 0 }
        };
        GOOD_AT.store(good_at, Ordering::Relaxed);
        good_at
    }

    /// Returns whether the hypervisor's leaves of CPUID contain QEMU's name for its emulator.
    #[allow(unused_unsafe, reason = "safe since Rust 1.94")]
    fn emulated_by_qemu() -> bool {
        const HYPERVISOR: u32 = 1 << 31;
        // SAFETY: (any leaf) every x86-64 CPU has CPUID, and returns some value for an unknown leaf.
        let (features, hypervisor) = unsafe { (__cpuid(1), __cpuid(0x4000_0000)) };
        let name = [hypervisor.ebx, hypervisor.ecx, hypervisor.edx].map(u32::to_le_bytes);
        features.ecx & HYPERVISOR != 0 && name.as_flattened() == b"TCGTCGTCGTCG"
    }

    #[inline(always)]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        if len > 128 {
            // SAFETY: the caller's promises.
            unsafe { long(from, to, len) }
        } else if len >= 16 {
            // SAFETY: the caller's promises; the length is in range.
            unsafe { vectors(from, to, len) }
        } else {
            // SAFETY: the caller's promises; the length is in range.
            unsafe { short(from, to, len) }
        }
    }

    /// Copies 0 to 15 bytes.
    #[inline(always)]
    unsafe fn short(from: *const u8, to: *mut u8, len: usize) {
        if len >= 8 {
            // SAFETY: (in bounds) both words lie within `len >= 8` bytes.
            unsafe {
                asm!(
                    "mov {a}, [{s}]", "mov {b}, [{s} + {n} - 8]", "mov [{d}], {a}", "mov [{d} + {n} - 8], {b}",
                    a = out(reg) _, b = out(reg) _, s = in(reg) from, d = in(reg) to, n = in(reg) len,
                    options(nostack, preserves_flags),
                );
            }
        } else if len >= 4 {
            // SAFETY: (in bounds) both half-words lie within `len >= 4` bytes.
            unsafe {
                asm!(
                    "mov {a:e}, [{s}]", "mov {b:e}, [{s} + {n} - 4]", "mov [{d}], {a:e}", "mov [{d} + {n} - 4], {b:e}",
                    a = out(reg) _, b = out(reg) _, s = in(reg) from, d = in(reg) to, n = in(reg) len,
                    options(nostack, preserves_flags),
                );
            }
        } else {
            for at in 0..len {
                // SAFETY: (in bounds) `at < len`.
                let byte = unsafe { from.wrapping_add(at).read_volatile() };
                // SAFETY: (in bounds) `at < len`.
                unsafe { to.wrapping_add(at).write_volatile(byte) };
            }
        }
    }

    /// Copies 16 to 128 bytes by overlapping 16-byte moves from both ends.
    #[inline(always)]
    unsafe fn vectors(from: *const u8, to: *mut u8, len: usize) {
        if len <= 32 {
            // SAFETY: (in bounds) both vectors lie within `len >= 16` bytes.
            unsafe {
                asm!(
                    "movups {a}, [{s}]", "movups {b}, [{s} + {n} - 16]", "movups [{d}], {a}", "movups [{d} + {n} - 16], {b}",
                    a = out(xmm_reg) _, b = out(xmm_reg) _, s = in(reg) from, d = in(reg) to, n = in(reg) len,
                    options(nostack, preserves_flags),
                );
            }
        } else if len <= 64 {
            // SAFETY: (in bounds) 32 bytes from each end lie within `len > 32` bytes.
            unsafe {
                asm!(
                    "movups {a}, [{s}]", "movups {b}, [{s} + 16]",
                    "movups {e}, [{s} + {n} - 32]", "movups {f}, [{s} + {n} - 16]",
                    "movups [{d}], {a}", "movups [{d} + 16], {b}",
                    "movups [{d} + {n} - 32], {e}", "movups [{d} + {n} - 16], {f}",
                    a = out(xmm_reg) _, b = out(xmm_reg) _, e = out(xmm_reg) _, f = out(xmm_reg) _,
                    s = in(reg) from, d = in(reg) to, n = in(reg) len,
                    options(nostack, preserves_flags),
                );
            }
        } else {
            // SAFETY: (in bounds) 64 bytes from each end lie within `len > 64` bytes.
            unsafe {
                asm!(
                    "movups {a}, [{s}]", "movups {b}, [{s} + 16]", "movups {c}, [{s} + 32]", "movups {e}, [{s} + 48]",
                    "movups {f}, [{s} + {n} - 64]", "movups {g}, [{s} + {n} - 48]",
                    "movups {h}, [{s} + {n} - 32]", "movups {i}, [{s} + {n} - 16]",
                    "movups [{d}], {a}", "movups [{d} + 16], {b}", "movups [{d} + 32], {c}", "movups [{d} + 48], {e}",
                    "movups [{d} + {n} - 64], {f}", "movups [{d} + {n} - 48], {g}",
                    "movups [{d} + {n} - 32], {h}", "movups [{d} + {n} - 16], {i}",
                    a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, e = out(xmm_reg) _,
                    f = out(xmm_reg) _, g = out(xmm_reg) _, h = out(xmm_reg) _, i = out(xmm_reg) _,
                    s = in(reg) from, d = in(reg) to, n = in(reg) len,
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    /// Copies more than 128 bytes.
    #[inline]
    unsafe fn long(from: *const u8, to: *mut u8, len: usize) {
        let good_at = good_at();
        if len >= REP_FROM && good_at & REP != 0 {
            // SAFETY: the caller's promises.
            unsafe { rep_movsb(from, to, len) }
        } else if good_at & AVX != 0 {
            // SAFETY: the caller's promises; the CPU has AVX and `len > 128`.
            unsafe { avx_loop(from, to, len) }
        } else if good_at & WORDS != 0 {
            // SAFETY: the caller's promises; `len > 128`.
            unsafe { word_loop(from, to, len) }
        } else {
            // SAFETY: the caller's promises; `len > 128`.
            unsafe { sse_loop(from, to, len) }
        }
    }

    /// Copies any number of bytes.
    #[inline(always)]
    unsafe fn rep_movsb(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: (in bounds) `rep movsb` copies exactly `len` bytes upwards; the direction flag is clear on entry.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") len => _, inout("rsi") from => _, inout("rdi") to => _,
                options(nostack, preserves_flags),
            );
        }
    }

    pub(super) fn can_bypass_caches() -> bool {
        good_at() & AVX != 0
    }

    /// Copies any number of bytes; [`copy`] does what the method cannot.
    pub(super) unsafe fn copy_by(method: super::CopyMethod, from: *const u8, to: *mut u8, len: usize) {
        use super::CopyMethod::{NonTemporal, RepMovsb, Vectors};
        let avx = is_x86_feature_detected!("avx");
        match method {
            // SAFETY: the caller's promises; the CPU has AVX and `len > 128`.
            Vectors if avx && len > 128 => unsafe { avx_loop(from, to, len) },
            // SAFETY: the caller's promises; the CPU has AVX and `len > 128`.
            NonTemporal if avx && len > 128 => unsafe { non_temporal(from, to, len) },
            // SAFETY: the caller's promises.
            RepMovsb => unsafe { rep_movsb(from, to, len) },
            // SAFETY: the caller's promises.
            _ => unsafe { copy(from, to, len) },
        }
    }

    /// Copies more than 128 bytes: whole lines by stores that bypass the caches, the bytes before and after them by
    /// plain stores.
    #[target_feature(enable = "avx")]
    unsafe fn non_temporal(from: *const u8, to: *mut u8, len: usize) {
        let before = to.align_offset(64).min(len);
        let lines = (len - before) / 64;
        // SAFETY: (in bounds) `before <= len`.
        unsafe { copy(from, to, before) };
        let mut at = before;
        for _ in 0..lines {
            // SAFETY: (in bounds) a whole line is left at `at`; (aligned) `to + at` is a multiple of 64.
            unsafe {
                asm!(
                    "vmovdqu {a}, [{s}]", "vmovdqu {b}, [{s} + 32]",
                    "vmovntdq [{d}], {a}", "vmovntdq [{d} + 32], {b}",
                    a = out(ymm_reg) _, b = out(ymm_reg) _,
                    s = in(reg) from.wrapping_add(at), d = in(reg) to.wrapping_add(at),
                    options(nostack, preserves_flags),
                );
            }
            at += 64;
        }
        // SAFETY: (in bounds) `len - at` bytes are left.
        unsafe { copy(from.wrapping_add(at), to.wrapping_add(at), len - at) };
        // SAFETY: (ordered) such stores are outside x86's order of stores: the fence puts them before the position that
        // publishes them. No memory is touched.
        unsafe { asm!("sfence", "vzeroupper", options(nostack, preserves_flags)) };
    }

    /// Copies more than 128 bytes, 128 at a time. The last 128 are loaded from the end, so that no tail is left.
    #[target_feature(enable = "avx")]
    unsafe fn avx_loop(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: (in bounds) the loop runs while more than 128 bytes are left, then the last 128 bytes, which may
        // overlap what the loop copied, are moved from the end. vzeroupper is issued after the last use.
        unsafe {
            asm!(
                "2:",
                "vmovdqu {a}, [{s}]", "vmovdqu {b}, [{s} + 32]", "vmovdqu {c}, [{s} + 64]", "vmovdqu {e}, [{s} + 96]",
                "vmovdqu [{d}], {a}", "vmovdqu [{d} + 32], {b}", "vmovdqu [{d} + 64], {c}", "vmovdqu [{d} + 96], {e}",
                "add {s}, 128", "add {d}, 128", "sub {n}, 128", "cmp {n}, 128", "ja 2b",
                "vmovdqu {a}, [{s} + {n} - 128]", "vmovdqu {b}, [{s} + {n} - 96]",
                "vmovdqu {c}, [{s} + {n} - 64]", "vmovdqu {e}, [{s} + {n} - 32]",
                "vmovdqu [{d} + {n} - 128], {a}", "vmovdqu [{d} + {n} - 96], {b}",
                "vmovdqu [{d} + {n} - 64], {c}", "vmovdqu [{d} + {n} - 32], {e}",
                "vzeroupper",
                a = out(ymm_reg) _, b = out(ymm_reg) _, c = out(ymm_reg) _, e = out(ymm_reg) _,
                s = inout(reg) from => _, d = inout(reg) to => _, n = inout(reg) len => _,
                options(nostack),
            );
        }
    }

    /// Copies like [`avx_loop`], 64 bytes at a time, for CPUs without AVX that are not emulated.
    #[inline]
    unsafe fn sse_loop(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: (in bounds) as in `avx_loop`, with 64 in place of 128.
        unsafe {
            asm!(
                "2:",
                "movups {a}, [{s}]", "movups {b}, [{s} + 16]", "movups {c}, [{s} + 32]", "movups {e}, [{s} + 48]",
                "movups [{d}], {a}", "movups [{d} + 16], {b}", "movups [{d} + 32], {c}", "movups [{d} + 48], {e}",
                "add {s}, 64", "add {d}, 64", "sub {n}, 64", "cmp {n}, 64", "ja 2b",
                "movups {a}, [{s} + {n} - 64]", "movups {b}, [{s} + {n} - 48]",
                "movups {c}, [{s} + {n} - 32]", "movups {e}, [{s} + {n} - 16]",
                "movups [{d} + {n} - 64], {a}", "movups [{d} + {n} - 48], {b}",
                "movups [{d} + {n} - 32], {c}", "movups [{d} + {n} - 16], {e}",
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, e = out(xmm_reg) _,
                s = inout(reg) from => _, d = inout(reg) to => _, n = inout(reg) len => _,
                options(nostack),
            );
        }
    }

    /// Copies like [`sse_loop`], by words.
    #[inline]
    unsafe fn word_loop(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: (in bounds) as in `avx_loop`, with 64 in place of 128.
        unsafe {
            asm!(
                "2:",
                "mov {a}, [{s}]", "mov [{d}], {a}", "mov {a}, [{s} + 8]", "mov [{d} + 8], {a}",
                "mov {a}, [{s} + 16]", "mov [{d} + 16], {a}", "mov {a}, [{s} + 24]", "mov [{d} + 24], {a}",
                "mov {a}, [{s} + 32]", "mov [{d} + 32], {a}", "mov {a}, [{s} + 40]", "mov [{d} + 40], {a}",
                "mov {a}, [{s} + 48]", "mov [{d} + 48], {a}", "mov {a}, [{s} + 56]", "mov [{d} + 56], {a}",
                "add {s}, 64", "add {d}, 64", "sub {n}, 64", "cmp {n}, 64", "ja 2b",
                "lea {s}, [{s} + {n} - 64]", "lea {d}, [{d} + {n} - 64]",
                "mov {a}, [{s}]", "mov [{d}], {a}", "mov {a}, [{s} + 8]", "mov [{d} + 8], {a}",
                "mov {a}, [{s} + 16]", "mov [{d} + 16], {a}", "mov {a}, [{s} + 24]", "mov [{d} + 24], {a}",
                "mov {a}, [{s} + 32]", "mov [{d} + 32], {a}", "mov {a}, [{s} + 40]", "mov [{d} + 40], {a}",
                "mov {a}, [{s} + 48]", "mov [{d} + 48], {a}", "mov {a}, [{s} + 56]", "mov [{d} + 56], {a}",
                a = out(reg) _,
                s = inout(reg) from => _, d = inout(reg) to => _, n = inout(reg) len => _,
                options(nostack),
            );
        }
    }

    #[inline(always)]
    pub(super) fn prefetch(at: *const u8) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: (any address) a prefetch reads nothing that the program can see and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    pub(super) fn prefetch_to_write(at: *const u8) {
        // SAFETY: (any address) a prefetch changes nothing that the program can see and never faults; a CPU that does
        // not know this one treats it as a no-op.
        unsafe { asm!("prefetchw [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly)) }
    }

    #[cfg(test)]
    pub(super) type Routine = unsafe fn(*const u8, *mut u8, usize);

    /// All routines, with the lengths that they are meant for.
    #[cfg(test)]
    pub(super) const ROUTINES: [(&str, Routine, std::ops::RangeInclusive<usize>); 9] = [
        ("copy", copy, 0..=5000),
        ("short", short, 0..=15),
        ("vectors", vectors, 16..=128),
        ("sse_loop", sse_loop, 129..=700),
        ("word_loop", word_loop, 129..=700),
        ("avx_loop", avx_loop, 129..=700),
        ("long", long, 4090..=4100),
        ("rep_movsb", rep_movsb, 0..=700),
        ("non_temporal", non_temporal, 129..=700),
    ];
}

#[cfg(any(not(target_arch = "x86_64"), miri, tombolo_plain_copy))]
mod imp {
    #[inline]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let mut at = 0;
        if (from as usize ^ to as usize) % 8 == 0 {
            while at < len && (from as usize + at) % 8 != 0 {
                // SAFETY: (in bounds) `at < len`.
                unsafe { byte(from, to, at) };
                at += 1;
            }
            while len - at >= 8 {
                // SAFETY: (in bounds) eight bytes are left; (aligned) both addresses are multiples of 8 by now.
                let word = unsafe { from.wrapping_add(at).cast::<u64>().read_volatile() };
                // SAFETY: as above.
                unsafe { to.wrapping_add(at).cast::<u64>().write_volatile(word) };
                at += 8;
            }
        }
        while at < len {
            // SAFETY: (in bounds) `at < len`.
            unsafe { byte(from, to, at) };
            at += 1;
        }
    }

    pub(super) fn can_bypass_caches() -> bool {
        false
    }

    pub(super) unsafe fn copy_by(_: super::CopyMethod, from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller's promises.
        unsafe { copy(from, to, len) }
    }

    /// # Safety
    /// `at` is within both ranges.
    #[inline(always)]
    unsafe fn byte(from: *const u8, to: *mut u8, at: usize) {
        // SAFETY: the caller's promise.
        let byte = unsafe { from.wrapping_add(at).read_volatile() };
        // SAFETY: the caller's promise.
        unsafe { to.wrapping_add(at).write_volatile(byte) };
    }

    pub(super) fn prefetch(_at: *const u8) {}

    pub(super) fn prefetch_to_write(_at: *const u8) {}

    #[cfg(test)]
    pub(super) type Routine = unsafe fn(*const u8, *mut u8, usize);

    #[cfg(test)]
    pub(super) const ROUTINES: [(&str, Routine, std::ops::RangeInclusive<usize>); 1] = [("copy", copy, 0..=5000)];
}

#[cfg(test)]
mod tests {
    use super::imp::ROUTINES;

    #[test]
    fn copy_moves_every_byte_and_no_other_at_every_length_and_alignment() {
        let from: Vec<u8> = (0..6000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 | 1).collect();
        for (name, routine, lengths) in ROUTINES {
            for len in lengths {
                for (skew_from, skew_to) in [(0, 0), (1, 0), (0, 3), (7, 13)] {
                    let mut to = vec![0u8; len + 64];
                    // SAFETY: both ranges are inside their vectors.
                    unsafe { routine(from[skew_from..].as_ptr(), to[skew_to..].as_mut_ptr(), len) };
                    assert_eq!(to[skew_to..skew_to + len], from[skew_from..skew_from + len], "{name} {len}");
                    let outside = to[..skew_to].iter().chain(&to[skew_to + len..]);
                    assert!(outside.copied().all(|byte| byte == 0), "{name} wrote outside {len} bytes");
                }
            }
        }
    }
}
