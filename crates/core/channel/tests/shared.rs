// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where one event stands for both halves of an endpoint, honest traffic of one half is no storm for the other (R-25,
//!

mod common;

use std::{
    io::{Read, Write},
    os::fd::AsFd,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::SOON;
use tombolo_channel::{Address, Backends, Deadline, Listener, Options, Stream};
use tombolo_domain::wait_readable;
use tombolo_domain_xen::FakeXen;

/// Number of wake-ups of a poller whose data do not come; with a nap of 16 ms after each but the first 64 they take
/// five seconds.
const WAKES: u32 = 400;

#[test]
fn r25_x8_reader_that_polls_does_not_nap_for_what_its_writer_is_notified_for() {
    let xen = FakeXen::new();
    // A writer that does not spin sleeps whenever its ring is full, and is notified each time.
    let options = Options::new().ring_size(4096).spin(Duration::ZERO);
    let address = |text: &str| text.parse::<Address>().unwrap();
    let mut listener: Listener<Stream> =
        Backends::new().with(xen.domain(5)).listen(&address("xen:7/service"), &options).unwrap();
    let (server, mut client) = thread::scope(|scope| {
        let called = scope.spawn(|| {
            Backends::new().with(xen.domain(7)).connect::<Stream>(&address("xen:5/service"), &options).unwrap()
        });
        (listener.accept_until(Deadline::after(SOON)).unwrap(), called.join().unwrap())
    });
    let (mut read, mut write) = server.into_split();
    let is_done = AtomicBool::new(false);
    let (mut wakes, mut longest) = (0, Duration::ZERO);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::SeqCst) {
                write.write_all(&[7; 4096]).unwrap();
            }
            drop(write);
        });
        scope.spawn(|| while client.read(&mut [0; 4096]).unwrap() > 0 {});
        let fd = read.poll_fd().unwrap().try_clone_to_owned().unwrap();
        let since = Instant::now();
        while wakes < WAKES && since.elapsed() < SOON / 2 {
            if wait_readable(fd.as_fd(), Deadline::after(SOON / 2)).unwrap() {
                wakes += 1;
            }
            assert!(matches!(read.try_read(&mut [0; 8]), Ok(None)));
        }
        longest = since.elapsed();
        is_done.store(true, Ordering::SeqCst);
    });
    eprintln!("{wakes} wake-ups in {longest:?}");
    assert!(wakes == WAKES && longest < Duration::from_millis(2600), "{wakes} wake-ups in {longest:?}");
}
