// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guarantees of every backend, as tests (clauses D-1 to D-14 of `spec/4-domain.md`).
//!
//! A backend implements [`Fixture`] and calls [`conformance!`](crate::conformance!) once; each function of this module
//! becomes a `#[test]` of the same name. The suite knows no backend: it demands what the layers above build on, and
//! nothing else. It runs both endpoints in one process; where a peer has to die, the fixture supplies a [`Mortal`].
//! Where the two sides cannot be in one process, one of them is a stand-in for a backend elsewhere ([`remote`]).
//!
//! # Example
//! ```
//! use tombolo_domain::Rendezvous;
//! use tombolo_testing::{
//!     conformance::{self, Fixture},
//!     harsh::{HarshDomain, Hypervisor},
//! };
//!
//! struct Harsh(HarshDomain, HarshDomain);
//!
//! impl Fixture for Harsh {
//!     fn listening(&self) -> &dyn Rendezvous {
//!         &self.0
//!     }
//!     fn connecting(&self) -> &dyn Rendezvous {
//!         &self.1
//!     }
//!     fn service(&self) -> String {
//!         "a/service".into()
//!     }
//! }
//!
//! let hypervisor = Hypervisor::new();
//! conformance::d4_any_number_of_notifications_is_kept(&Harsh(hypervisor.domain("a"), hypervisor.domain("b")));
//! ```
//! In a backend's `tests/conformance.rs` the last two lines are `tombolo_testing::conformance!(Harsh::new());`.

mod actor;
mod control;
mod doorbell;
mod life;
mod memory;
pub mod remote;
mod rendezvous;
mod support;

pub use actor::{Actor, Part, eventually, part};
pub use control::*;
pub use doorbell::*;
pub use life::*;
pub use memory::*;
pub use rendezvous::*;
pub use support::{accept, patience, receive, set_patience, wait_for};

use tombolo_domain::{Endpoint, Rendezvous};

/// Two domains of a backend, fresh for one test.
pub trait Fixture {
    /// Returns the domain in which one side listens.
    fn listening(&self) -> &dyn Rendezvous;

    /// Returns the domain from which the other side connects: a different one, if the backend can have two in one
    /// process.
    fn connecting(&self) -> &dyn Rendezvous;

    /// Returns a service at which [`listening`](Self::listening) may listen; another one each time.
    fn service(&self) -> String;

    /// Returns a service whose listener died without a chance to clean up, if this fixture can cause that.
    fn stale_service(&self) -> Option<String> {
        None
    }

    /// Returns a peer that can be paused and killed, if this fixture has one.
    fn mortal(&self) -> Option<Box<dyn Mortal>> {
        None
    }

    /// Brings memory up to date: what was stored in own memory can then be read in the peer's mapping. Only a fixture
    /// whose other side is elsewhere has to do anything, because it works on copies ([`remote`]).
    fn quiesce(&self) {}

    /// Returns how often a test repeats a step: fewer times than `usual` where each call crosses a stream.
    fn times(&self, usual: usize) -> usize {
        usual
    }

    /// Returns two endpoints that met: the listening side's and the connecting side's.
    fn pair(&self) -> [Box<dyn Endpoint>; 2] {
        let service = self.service();
        let mut listener = self.listening().listen(&service).expect("a fresh service is free");
        let connected = self.connecting().connect(&service, support::patience()).expect("somebody listens");
        [support::accept(&mut *listener), connected]
    }
}

/// A peer that can be paused and killed without its help (`SIGSTOP` and `SIGKILL`, or the hypervisor).
///
/// It runs [`mortal_peer`] on its endpoint of [`link`](Self::link).
pub trait Mortal {
    /// Returns this side's endpoint.
    fn link(&mut self) -> &mut dyn Endpoint;
    /// Stops the peer wherever it is.
    fn pause(&mut self);
    /// Lets the peer continue.
    fn resume(&mut self);
    /// Ends the peer finally; it has no chance to react.
    fn kill(&mut self);
}

/// Runs the program of a [`Mortal`] peer. It sends [`TESTAMENT`] with a segment that holds it. Then it echoes every
/// message, counts the echoes in the segment's tail and notifies both slots, until the other side is gone.
///
/// # Blocking
/// Until then.
pub fn mortal_peer(mut link: Box<dyn Endpoint>) {
    life::play(&mut *link);
}

/// Message that a mortal peer sends first and writes at the beginning of its segment's data.
pub const TESTAMENT: &[u8; 16] = b"I was here first";

/// Makes each conformance test a `#[test]` that runs on the value of the expression, evaluated anew for each. As
/// `conformance!(table Fixture)` returns a table of their names and functions, for programs that run them themselves.
#[macro_export]
macro_rules! conformance {
    (table $fixture:ty) => {
        $crate::conformance! { @names table $fixture }
    };
    ($fixture:expr) => {
        $crate::conformance! { @names tests $fixture }
    };
    (@names $form:ident $($fixture:tt)*) => {
        $crate::conformance! { @$form [$($fixture)*]
            d1_fresh_memory_is_zeroed_and_exact
            d1_memory_after_use_is_zeroed_again
            d1_peer_sees_what_the_owner_writes
            d1_offers_may_be_sent_late_and_in_any_order
            d2_peers_mapping_is_read_only_for_ever
            d3_mapped_memory_outlives_its_owner
            d4_any_number_of_notifications_is_kept
            d4_no_notification_is_lost_between_two_who_sleep
            d4_last_notification_is_reported_before_the_end
            d5_notifying_never_blocks_though_nobody_drains
            d5_notifying_a_peer_that_is_gone_is_harmless
            d6_wait_with_a_past_deadline_returns_at_once
            d6_wait_without_a_notification_ends_at_its_deadline
            d6_both_slots_are_waited_on_at_once
            d6_wait_for_ever_ends_when_the_peer_goes
            d7_drain_forgets_what_came_before_and_nothing_after
            d7_descriptor_is_readable_while_undrained
            d8_messages_arrive_whole_apart_and_in_order
            d8_message_too_long_is_refused_by_the_sender
            d8_recv_of_nothing_is_none_at_once
            d8_full_path_is_a_limit_and_not_a_block
            d8_descriptor_tells_when_there_is_something
            d8_messages_come_before_the_end
            d9_segment_larger_than_agreed_is_refused
            d9_message_without_memory_brings_none
            d10_peer_that_is_there_is_not_gone
            d10_peer_that_closed_is_gone
            d10_killed_peer_is_noticed_and_leaves_what_it_shared
            d11_paused_peer_is_told_from_one_that_is_gone
            d12_service_without_listener_is_not_found
            d12_empty_service_is_refused
            d12_service_in_use_is_refused_to_a_second_listener
            d12_dropped_listener_leaves_its_name_free
            d12_dropped_listener_lets_go_of_those_who_wait
            d12_stale_name_is_taken_over
            d12_accept_of_nobody_is_none_at_once
            d12_silent_clients_hold_up_nobody
            d12_every_caller_gets_a_link_of_its_own
            d13_retired_memory_is_not_reused_while_mapped
            d13_memory_on_its_way_outlives_its_owner_as_said
            d14_many_links_at_once_do_not_disturb_each_other
        }
    };
    (@tests $fixture:tt $($name:ident)*) => {
        $($crate::conformance! { @test $fixture $name })*
    };
    (@test [$($fixture:tt)*] $name:ident) => {
        #[test]
        fn $name() {
            $crate::conformance::$name(&$($fixture)*);
        }
    };
    (@table [$fixture:ty] $($name:ident)*) => {
        [$((stringify!($name), $crate::conformance::$name as fn(&$fixture))),*]
    };
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_test_of_the_suite_is_wired_up() {
        let suite = [
            include_str!("memory.rs"),
            include_str!("doorbell.rs"),
            include_str!("control.rs"),
            include_str!("life.rs"),
            include_str!("rendezvous.rs"),
        ];
        let tests = suite.iter().flat_map(|source| source.split("pub fn ").skip(1));
        let names: Vec<_> = tests.filter_map(|rest| rest.split_once('(')).map(|(name, _)| name).collect();
        assert!(names.len() > 30, "the search finds them");
        for name in names {
            let wired = include_str!("mod.rs").lines().any(|line| line.trim() == name);
            assert!(wired, "{name} is missing from conformance!");
        }
    }
}
