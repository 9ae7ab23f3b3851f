// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Processes that the agent starts, and that are killed.

use std::{collections::VecDeque, thread, time::Duration};

use tombolo_domain::{Deadline, Endpoint, Rendezvous};
use tombolo_mem::OwnData;
use tombolo_testing::conformance;

use crate::{doorbell, link::Side, many};

/// How long a hostile process goes on with what goes on.
pub const HOSTILE: Duration = Duration::from_secs(6);

pub fn play(role: &str, service: &str, other: &str) -> bool {
    let side = Side::new(other);
    let connect = || side.connect(service, Deadline::NEVER).expect("somebody listens");
    match role {
        "mortal" => {
            let link = connect();
            println!("ready");
            conformance::mortal_peer(link);
        }
        "listener" => {
            let _listener = side.listen(service).expect("a fresh service is free");
            println!("ready");
            forever();
        }
        "pump" => pump(connect()),
        "many" => many::far(&side, service),
        "doorbell" => doorbell::far(connect()),
        act => {
            let mut it = side.domain.hostile(side.other).expect("XenStore is there");
            println!("ready");
            if let Err(error) = it.act(act, service, Deadline::after(HOSTILE)) {
                eprintln!("{act}: {error:?}");
            }
            forever();
        }
    }
    true
}

/// Sends messages with segments as fast as they are taken, and takes each back once it was answered.
fn pump(mut link: Box<dyn Endpoint>) {
    println!("ready");
    let mut number = 0u64;
    let mut sent = VecDeque::new();
    loop {
        if sent.len() < 4 {
            let (own, offer) = link.allocate(8192).expect("there is room");
            let (_words, mut data) = own.split(0);
            data.copy_in(0, &number.to_le_bytes());
            if link.send(&number.to_le_bytes(), Some(&offer)).is_err() {
                return;
            }
            number += 1;
            sent.push_back((data, offer));
            continue;
        }
        if conformance::receive(&mut *link, Deadline::NEVER).is_err() {
            return;
        }
        let (data, offer) = sent.pop_front().expect("four");
        drop(data);
        link.retire(None, offer);
    }
}

pub fn forever() -> ! {
    loop {
        thread::park();
    }
}
