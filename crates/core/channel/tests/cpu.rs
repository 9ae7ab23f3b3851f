// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Endpoints that share a CPU do not spin for each other. The test has a file of its own because it changes
//! where its threads run.

mod common;

use std::{
    io::{Read, Write},
    thread,
    time::Duration,
};

use common::World;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use tombolo_channel::{Options, Stream};

const ROUNDS: u64 = 500;

fn run_on(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).unwrap();
    assert_eq!(sched_getcpu(), cpu);
}

/// Runs a ping-pong between an endpoint on one CPU and an endpoint on another. Returns how often the two spun, and had
/// to wait.
fn ping_pong(world: &World, cpus: [usize; 2], from: u64) -> (u64, u64) {
    // Long enough that spinning is not given up on a busy machine.
    let options = Options::new().spin(Duration::from_millis(20));
    let (mut server, mut client) = world.pair_with::<Stream>(&options);
    let play = |end: &mut Stream, cpu, begins: bool| {
        run_on(cpu);
        // The first reads tell each endpoint where the other runs; earlier results do not count.
        let mut before = None;
        for round in 0..ROUNDS {
            if begins {
                end.write_all(&[1; 8]).unwrap();
            }
            end.read_exact(&mut [0; 8]).unwrap();
            if !begins {
                end.write_all(&[2; 8]).unwrap();
            }
            if round == from {
                before = Some(end.statistics().received.counters);
            }
        }
        let (before, after) = (before.unwrap(), end.statistics().received.counters);
        let spins = |counters: tombolo_channel::Counters| counters.spins_paid + counters.spins_wasted;
        (spins(after) - spins(before), after.stalls - before.stalls)
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| play(&mut server, cpus[0], false));
        let (spins, waits) = scope.spawn(|| play(&mut client, cpus[1], true)).join().unwrap();
        let (other_spins, other_waits) = other.join().unwrap();
        (spins + other_spins, waits + other_waits)
    })
}

#[test]
fn r14_ends_on_one_cpu_never_spin_and_ends_on_two_do() {
    let allowed = sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let world = World::local();
    let (spins, waits) = ping_pong(&world, [cpus[0]; 2], 10);
    assert_eq!(spins, 0, "spun for a peer that could not run meanwhile");
    assert!(waits > 0, "nobody waited, so nothing was tried");
    let [first, second, ..] = cpus[..] else {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!(
                "SKIP r14_ends_on_one_cpu_never_spin_and_ends_on_two_do (needs two-cpus): half of it, this process may use one\n"
            ),
        );
        return;
    };
    let (spins, _) = ping_pong(&world, [first, second], 10);
    assert!(spins > 0, "a peer on another CPU is worth spinning for");
}

#[test]
fn r14_ends_on_two_kernels_spin_though_their_cpus_have_one_number() {
    let allowed = sched_getaffinity(None).unwrap();
    let cpu = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
    // Counted from the beginning: the endpoints learn that spinning is in vain here, where the two CPUs are one.
    let (spins, _) = ping_pong(&World::harsh(), [cpu; 2], 0);
    assert!(spins > 0, "the first processor of another machine is another processor");
}
