// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a link and its doorbells cost on this machine: `cargo run --release -p tombolo-domain-local --example measure`.
//!
//! Links set up and exchanged both ways, per second; a wake-up there and back by the doorbells, beside the same by a
//! bare eventfd, with both endpoints on one CPU and on two.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::{event::EventfdFlags, thread::CpuSet, time::ClockId};
use tombolo_domain::{Deadline, Doorbell, Endpoint, Listener, Rendezvous, Slot, Woken, wait_readable};
use tombolo_domain_local::LocalDomain;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const SEGMENT: usize = 8192;
const ROUNDS: usize = 11;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let domain = LocalDomain::in_folder(folder.path());
    set_ups(&domain)?;
    wake_ups(&domain)
}

fn received(link: &mut dyn Endpoint) -> Result<()> {
    loop {
        if link.recv(1 << 20)?.is_some() {
            return Ok(());
        }
        wait_readable(link.fd(), Deadline::NEVER)?;
    }
}

fn accepted(listener: &mut dyn Listener) -> Result<Box<dyn Endpoint>> {
    loop {
        if let Some(link) = listener.accept()? {
            return Ok(link);
        }
        wait_readable(listener.fd(), Deadline::NEVER)?;
    }
}

fn set_ups(domain: &LocalDomain) -> Result<()> {
    const LINKS: u32 = 2000;
    let mut listener = domain.listen("measure")?;
    let mut rates = Vec::new();
    let cpu = || Duration::try_from(rustix::time::clock_gettime(ClockId::ProcessCPUTime));
    let cpu_before = cpu()?;
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let server = thread::scope(|scope| {
            let server = scope.spawn(|| -> Result<()> {
                for _ in 0..LINKS {
                    let mut link = accepted(&mut *listener)?;
                    received(&mut *link)?;
                    let (_own, offer) = link.allocate(SEGMENT)?;
                    link.send(b"welcome", Some(&offer))?;
                }
                Ok(())
            });
            for _ in 0..LINKS {
                let mut link = domain.connect("measure", Deadline::NEVER)?;
                let (_own, offer) = link.allocate(SEGMENT)?;
                link.send(b"hello", Some(&offer))?;
                received(&mut *link)?;
            }
            server.join().expect("the server does not panic")
        });
        server?;
        rates.push(f64::from(LINKS) / begin.elapsed().as_secs_f64());
    }
    let (median, min, max) = spread(rates);
    let each = (cpu()? - cpu_before).as_secs_f64() * 1e6 / (f64::from(LINKS) * ROUNDS as f64);
    println!(
        "links set up and exchanged both ways: {median:.0} a second ({min:.0} to {max:.0}), {each:.1} µs of CPU each"
    );
    Ok(())
}

fn wake_ups(domain: &LocalDomain) -> Result<()> {
    let mut listener = domain.listen("wake")?;
    let mut a = domain.connect("wake", Deadline::NEVER)?;
    let mut b = accepted(&mut *listener)?;
    a.send(b"hello", None)?;
    received(&mut *b)?;
    b.send(b"welcome", None)?;
    received(&mut *a)?;
    let doorbells = [&a, &b].map(|link| link.doorbell().expect("a message came in"));

    for (name, cpus) in [("two CPUs", [0, 1]), ("one CPU", [0, 0])] {
        let mut times: [Vec<f64>; 4] = Default::default();
        for _ in 0..ROUNDS {
            times[0].push(ping_pong(cpus, Eventfd::pair()?)?);
            times[1].push(ping_pong(
                cpus,
                doorbells.each_ref().map(|doorbell| Bell(Arc::clone(doorbell), Deadline::NEVER)),
            )?);
            let soon = Deadline::after(Duration::from_secs(3600));
            times[2].push(ping_pong(cpus, doorbells.each_ref().map(|doorbell| Bell(Arc::clone(doorbell), soon)))?);
            times[3].push(ping_pong(cpus, Eventfd::pair()?)?);
        }
        let bare = spread(times[0].iter().chain(&times[3]).copied().collect());
        println!("wake-up there and back, {name}: eventfd {:.2} µs ({:.2} to {:.2})", bare.0, bare.1, bare.2);
        for (times, what) in [(&times[1], "no deadline"), (&times[2], "a deadline")] {
            let (median, min, max) = spread(times.clone());
            println!("    doorbell, {what}: {median:.2} µs ({min:.2} to {max:.2}), {:.2} of it", median / bare.0);
        }
    }
    Ok(())
}

/// A way to wake another thread.
trait Wake: Send {
    fn notify(&self) -> Result<()>;
    fn sleep(&self) -> Result<()>;
}

struct Bell(Arc<dyn Doorbell>, Deadline);

impl Wake for Bell {
    fn notify(&self) -> Result<()> {
        self.0.notify(Slot::Data);
        Ok(())
    }

    fn sleep(&self) -> Result<()> {
        assert_eq!(self.0.wait(Slot::Data, self.1)?, Woken::Notified);
        self.0.drain(Slot::Data);
        Ok(())
    }
}

/// A bare eventfd each way, for comparison: one to raise, one to sleep on.
struct Eventfd(OwnedFd, OwnedFd);

impl Eventfd {
    fn pair() -> Result<[Self; 2]> {
        let make = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC);
        let (a, b) = (make()?, make()?);
        Ok([Self(a.try_clone()?, b.try_clone()?), Self(b, a)])
    }
}

impl Wake for Eventfd {
    fn notify(&self) -> Result<()> {
        rustix::io::write(&self.0, &1u64.to_ne_bytes())?;
        Ok(())
    }

    fn sleep(&self) -> Result<()> {
        rustix::io::read(&self.1, &mut [0; 8])?;
        Ok(())
    }
}

/// Microseconds there and back.
fn ping_pong([here, there]: [usize; 2], [a, b]: [impl Wake; 2]) -> Result<f64> {
    let trips = if here == there { 20_000 } else { 3_000 };
    thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<()> {
            pin(there)?;
            for _ in 0..trips {
                b.sleep()?;
                b.notify()?;
            }
            Ok(())
        });
        pin(here)?;
        let begin = Instant::now();
        for _ in 0..trips {
            a.notify()?;
            a.sleep()?;
        }
        let took = begin.elapsed();
        echo.join().expect("the echo does not panic")?;
        Ok(took.as_secs_f64() * 1e6 / f64::from(trips))
    })
}

fn pin(cpu: usize) -> Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &cpus)?)
}

/// Median, least and greatest.
fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}
