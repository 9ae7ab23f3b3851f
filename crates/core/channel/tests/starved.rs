// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A reader at the limit of open files (H-9). The limit is the process's, so the test is alone in its binary.

mod common;

use std::{fs::File, io::Read};

use common::{SOON, World, noise};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tombolo_channel::{Deadline, Error, Options, RingBudget, Stream};

#[test]
fn h9_reader_without_a_file_to_spare_is_told_so_and_loses_nothing() {
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..before }).unwrap();
    let (mut server, mut client) =
        World::local().pair_with::<Stream>(&Options::new().ring_growth(RingBudget::of_process()));
    let data = noise(1 << 20, 1);
    client.split().1.write_all_until(&data, Deadline::after(SOON)).unwrap();
    drop(client);
    let rest: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    let mut got = vec![0; 8 << 10];
    assert_eq!(server.split().0.try_read(&mut got).unwrap(), Some(8 << 10), "what is in the ring that it has");
    for _ in 0..3 {
        let told = server.split().0.try_read(&mut [0; 8]);
        assert!(matches!(told, Err(Error::Domain(_))), "{told:?}");
        assert!(server.split().0.ending().is_none(), "that is no end");
    }
    drop(rest);
    server.read_to_end(&mut got).unwrap();
    assert!(got == data);
}
