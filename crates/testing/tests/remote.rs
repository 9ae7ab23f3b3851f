// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The suite with one of its sides run by an agent over a socket: once the listening side, once the connecting one. The
//! flaws that it finds in a backend it also finds through an agent.

mod flawed;
mod support;

use std::{os::unix::net::UnixStream, process::Command, sync::Arc, thread};

use flawed::{Flaw, Flawed};
use support::Harsh;
use tombolo_domain::Rendezvous;
use tombolo_testing::conformance::{
    Fixture, Mortal,
    remote::{Remote, serve},
};

/// Side that the agent runs.
#[derive(Clone, Copy)]
enum Elsewhere {
    Listening,
    Connecting,
}

/// A fixture of two domains in this process, one of which is reached through an agent.
struct Split<F> {
    inner: F,
    remote: Remote,
    here: Box<dyn Rendezvous>,
    elsewhere: Elsewhere,
}

impl<F> Split<F> {
    fn new(inner: F, sides: [impl Rendezvous + 'static; 2], elsewhere: Elsewhere) -> Self {
        let [listening, connecting] = sides;
        let (here, there) = match elsewhere {
            Elsewhere::Listening => (connecting, listening),
            Elsewhere::Connecting => (listening, connecting),
        };
        let (near, far) = UnixStream::pair().expect("there are descriptors");
        let no_process = |_: &str, _: &str| -> Command { panic!("the double's processes are no processes") };
        let scheme = here.scheme();
        let answers = far.try_clone().expect("there are descriptors");
        thread::spawn(move || serve(far, answers, Arc::new(there), no_process).expect("the stream works"));
        let remote = Remote::new(scheme, near.try_clone().expect("there are descriptors"), near);
        Self { inner, remote, here: Box::new(here), elsewhere }
    }
}

fn harsh(elsewhere: Elsewhere) -> Split<Harsh> {
    let inner = Harsh::new();
    let sides = [inner.a.clone(), inner.b.clone()];
    Split::new(inner, sides, elsewhere)
}

impl<F: Fixture> Fixture for Split<F> {
    fn listening(&self) -> &dyn Rendezvous {
        match self.elsewhere {
            Elsewhere::Listening => &self.remote,
            Elsewhere::Connecting => &*self.here,
        }
    }

    fn connecting(&self) -> &dyn Rendezvous {
        match self.elsewhere {
            Elsewhere::Listening => &*self.here,
            Elsewhere::Connecting => &self.remote,
        }
    }

    fn service(&self) -> String {
        self.inner.service()
    }

    fn stale_service(&self) -> Option<String> {
        self.inner.stale_service()
    }

    fn mortal(&self) -> Option<Box<dyn Mortal>> {
        self.inner.mortal()
    }

    fn quiesce(&self) {
        self.remote.sync_memory();
    }

    fn times(&self, usual: usize) -> usize {
        usual / 10
    }
}

mod listening {
    tombolo_testing::conformance!(super::harsh(super::Elsewhere::Listening));
}

mod connecting {
    tombolo_testing::conformance!(super::harsh(super::Elsewhere::Connecting));
}

/// `FLAW: clause, test` becomes a test that passes if that test of the suite fails, on whichever side the flaw is.
macro_rules! canaries {
    ($($name:ident: $flaw:ident, $expected:literal, $test:ident;)*) => {
        mod canaries_listening {
            use super::*;
            canaries!(@tests Listening; $($name: $flaw, $expected, $test;)*);
        }
        mod canaries_connecting {
            use super::*;
            canaries!(@tests Connecting; $($name: $flaw, $expected, $test;)*);
        }
    };
    (@tests $elsewhere:ident; $($name:ident: $flaw:ident, $expected:literal, $test:ident;)*) => {$(
        #[test]
        #[should_panic(expected = $expected)]
        fn $name() {
            let flawed = Flawed::new(Flaw::$flaw);
            let sides = [flawed.a.clone(), flawed.b.clone()];
            tombolo_testing::conformance::$test(&Split::new(flawed, sides, Elsewhere::$elsewhere));
        }
    )*};
}

canaries! {
    d1_canary_dirty_memory: DirtyAtOwner, "D-1: memory shows", d1_memory_after_use_is_zeroed_again;
    d1_canary_dirty_mapping: DirtyAtPeer, "D-1: the peer finds", d1_fresh_memory_is_zeroed_and_exact;
    d1_canary_memory_that_is_not_shared: CopyAtPeer, "D-1: written after", d1_peer_sees_what_the_owner_writes;
    d2_canary_writable_mapping: CopyAtPeer, "D-2", d2_peers_mapping_is_read_only_for_ever;
    d3_canary_retired_memory_wiped: RetiredIsReused, "D-3", d3_mapped_memory_outlives_its_owner;
    d4_canary_lost_notifications: LosesSomeNotifications, "D-4", d4_no_notification_is_lost_between_two_who_sleep;
    d7_canary_silent_descriptor: SilentDescriptors, "D-7: notified, and not", d7_descriptor_is_readable_while_undrained;
    d8_canary_wrong_order: ReversesMessages, "D-8: message of", d8_messages_arrive_whole_apart_and_in_order;
    d9_canary_any_size_taken: IgnoresMax, "D-9", d9_segment_larger_than_agreed_is_refused;
    d10_canary_life_is_eternal: LifeIsEternal, "D-10", d10_peer_that_closed_is_gone;
    d12_canary_name_left_behind: LeavesListener, "D-12", d12_dropped_listener_leaves_its_name_free;
    d13_canary_quarantine_for_ever: QuarantineForEver, "D-13", d13_retired_memory_is_not_reused_while_mapped;
}
