// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How often the kernel's barrier leaves out a CPU on which a thread of the same process has ended (R-13, ADR 0086).
//!
//! A thread runs on the first CPU all the time, and the second one calls `membarrier`. A call that interrupts the first
//! CPU takes microseconds. One that does not returns at once, though a thread of a registered process runs there.
//!
//! ```console
//! cargo run --release -p tombolo-bench --example barrier
//! ```
#![forbid(unsafe_code)]

use std::{
    hint::spin_loop,
    io,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use rustix::thread::{CpuSet, MembarrierCommand, membarrier, sched_setaffinity};

/// Calls of each case.
const CALLS: u32 = 3000;
/// What takes less has interrupted nobody.
const SHORT: Duration = Duration::from_nanos(800);
/// Time between what is done before a call, and the call.
const GAP: Duration = Duration::from_micros(50);

fn run_on(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).expect("two CPUs");
}

/// Calls that found the other thread at work, and how many of these were short. Before each a thread ends on the CPU
/// `ends_on`.
fn count_short(ends_on: Option<usize>) -> (u32, u32) {
    let (beats, asked, over) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            run_on(0);
            while !over.load(Relaxed) {
                if asked.swap(false, Relaxed)
                    && let Some(cpu) = ends_on
                {
                    thread::spawn(move || run_on(cpu)).join().expect("it only ends");
                }
                (0..1000).for_each(|_| _ = beats.fetch_add(1, Relaxed));
            }
        });
        run_on(1);
        let (mut met, mut short) = (0, 0);
        for _ in 0..CALLS {
            asked.store(true, Relaxed);
            while asked.load(Relaxed) {
                spin_loop();
            }
            let since = Instant::now();
            while since.elapsed() < GAP {
                spin_loop();
            }
            let before = beats.load(Relaxed);
            while beats.load(Relaxed) == before {
                spin_loop();
            }
            let (before, since) = (beats.load(Relaxed), Instant::now());
            membarrier(MembarrierCommand::GlobalExpedited).expect("registered");
            let took = since.elapsed();
            if beats.load(Relaxed) != before {
                met += 1;
                short += u32::from(took < SHORT);
            }
        }
        over.store(true, Relaxed);
        (met, short)
    })
}

fn main() -> io::Result<()> {
    membarrier(MembarrierCommand::RegisterGlobalExpedited)?;
    let cases = [("no thread ends", None), ("one ends on that CPU", Some(0)), ("one ends on the other CPU", Some(1))];
    for (case, ends_on) in cases {
        let (met, short) = count_short(ends_on);
        println!("{case}: {short} of {met} calls interrupted nobody");
    }
    Ok(())
}
