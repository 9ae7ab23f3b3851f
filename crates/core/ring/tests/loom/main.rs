// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Model check of the shipping code: `Writer`, `Reader`, `wait` and `arm` over loom's memory. It tries every order of
//! threads and every stale value that C11 allows, up to a bound on forced switches of threads.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release -p tombolo-ring --test loom
//! ```
//!
//! A lost wake-up shows as a deadlock, an access to data that is not ordered after the peer's as a causality violation,
//! anything else as a failed assertion. `canaries` holds the mutants, each of which must be refuted. `TOMBOLO_LONG=1`
//! raises the bounds of the large models.
#![cfg(loom)]
#![forbid(unsafe_code)]

mod asymmetric;
mod canaries;
mod doorbell;
mod memory;
mod pipe;
mod poll;
mod proofs;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

/// Does what [`check`] does; without `TOMBOLO_LONG`, with one switch less. For models that take many seconds.
fn check_large(name: &str, switches: usize, body: impl Fn() + Send + Sync + 'static) {
    check(name, switches - usize::from(!is_long()), body);
}

/// Returns whether this is the long form.
fn is_long() -> bool {
    std::env::var_os("TOMBOLO_LONG").is_some_and(|value| value == "1")
}

/// Tries all interleavings of `body` with at most `switches` forced switches of threads, and prints how many there
/// were.
fn check(name: &str, switches: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(switches);
    model.max_branches = 20_000;
    let (count, since) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let counted = Arc::clone(&count);
    model.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        body();
    });
    let (count, took) = (count.load(Ordering::Relaxed), since.elapsed().as_secs_f64());
    eprintln!("{name}: {count} interleavings, at most {switches} forced switches, {took:.1} s");
}
