// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite on this backend, with peers in separate processes that are stopped and killed.

mod support;

use std::sync::Arc;

use support::World;
use tombolo_control::Life;
use tombolo_domain::Rendezvous;
use tombolo_testing::conformance::{Fixture, Mortal};

tombolo_testing::conformance!(Two(Arc::new(World::new())));

#[test]
fn child_process() {
    support::play();
}

struct Two(Arc<World>);

impl Fixture for Two {
    fn listening(&self) -> &dyn Rendezvous {
        &self.0.a
    }

    fn connecting(&self) -> &dyn Rendezvous {
        &self.0.b
    }

    fn service(&self) -> String {
        self.0.service()
    }

    fn stale_service(&self) -> Option<String> {
        Some(self.0.stale())
    }

    fn mortal(&self) -> Option<Box<dyn Mortal>> {
        let ((actor, link), world) = (self.0.mortal(), self.0.clone());
        let life = |is_paused| if is_paused { Life::Paused } else { Life::Running };
        Some(actor.into_mortal(link, move |is_paused| world.live("b", life(is_paused))))
    }
}
