// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ends that share a CPU do not spin for each other. A file of its own, for it changes where its threads run.

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

/// A ping-pong between an end on one CPU and an end on another; how often the two span, and had to wait.
fn ping_pong(world: &World, cpus: [usize; 2], from: u64) -> (u64, u64) {
    // Long enough that spinning is not given up on a busy machine.
    let options = Options::new().spin(Duration::from_millis(20));
    let (mut server, mut client) = world.pair_with::<Stream>(&options);
    let play = |end: &mut Stream, cpu, begins: bool| {
        run_on(cpu);
        // The first reads tell each where the other runs; what was learnt before that does not count.
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
    // At first: they learn that it is in vain here, where the two are one.
    let (spins, _) = ping_pong(&World::harsh(), [cpu; 2], 0);
    assert!(spins > 0, "the first processor of another machine is another processor");
}
